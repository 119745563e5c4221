"""Trainer ranks whose parts cross over memory that they lend to rank 0: real ranks, with files in the place of GPUs."""

import itertools
import json
import math
import random
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.bridge.fault_client import FaultServer
from tests.support.bridge.file_memory import FileMemory
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.lending_trainer import CLOSE_S
from tests.support.bridge.tensor_group import GroupWorker
from tests.support.kernels.grids import nightly
from trainer_bridge.publish.lent_parts import (
    BorrowedParts,
    LentBuffer,
    answer,
    buffer_bytes,
    host_number,
    map_buffers,
    read_answer,
)
from trainer_bridge.transports.cut import Cut
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.shards import Shards
from trainer_bridge.transports.tensors import copy_rows
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.manifest import MAX_BUCKET_BYTES, pack

SMALL = 64
ROWS = ["rows", "rows", "rows"]


def train(
    faults: FaultServer,
    workers: list[Worker],
    folder: Path,
    *,
    ranks: int = 2,
    bucket_bytes: int = SMALL,
    placements: list[str] = ROWS,
    fault: str = "",
    candidates: tuple[str, ...] = ("cuda_ipc",),
    late: Worker | None = None,
) -> list[dict[str, Any]]:
    """Run all ranks; what each one that lived saw. At the end no rank has memory."""
    (folder / "lent").mkdir()
    order = {"endpoints": [worker.endpoint for worker in workers], "folder": str(folder), "ranks": ranks}
    order |= {"bucket_bytes": bucket_bytes, "placements": placements, "fault": fault, "candidates": candidates}
    order["late"] = None if late is None else late.endpoint
    lost = {"dies": 1, "stands still": 0}.get(fault)
    files = [folder / f"rank-{rank}.json" for rank in range(ranks) if rank != lost]
    with ExitStack() as stack:
        for rank in range(ranks):
            stack.enter_context(faults.child(role="lending", rank=rank, **order))
        for file in files:
            wait_for(file.exists, f"the end of {file.stem}", 120)
    # A rank that cannot know whether rank 0 still reads its buffer leaves it to the end of the process.
    assert len(list((folder / "lent").iterdir())) == (0 if lost is None else ranks - 1)
    seen = [json.loads(file.read_text()) for file in files]
    assert all(mapped == 0 for rank in seen for mapped in rank["mapped"])  # between two updates
    return seen


def shared_worker(folder: Path) -> Worker:
    """A worker that maps the slots of rank 0."""
    (folder / "slots").mkdir(exist_ok=True)
    return Worker(shared=folder / "slots")


def buckets(bucket_bytes: int) -> list[int]:
    """The numbers of the buckets of an update."""
    return list(range(Payload(new_tensors(TinyModel(), 1), 1, bucket_bytes).manifest.bucket_count))


def of_version(noted: list[list[Any]], version: int) -> list[Any]:
    return [what for at, what, *_ in noted if at == version]


GRID = [(3, SMALL), (2, 192), (2, 1 << 20), (3, 1 << 20), (4, 320)]


@pytest.mark.parametrize(("ranks", "bucket_bytes"), [(2, SMALL), *nightly((3, 192), *GRID)])
def test_parts_arrive_by_one_command_a_bucket_and_none_through_the_host(
    faults: FaultServer, tmp_path: Path, ranks: int, bucket_bytes: int
) -> None:
    with shared_worker(tmp_path) as worker:
        seen = train(faults, [worker], tmp_path, ranks=ranks, bucket_bytes=bucket_bytes)
        assert serves(worker.model, new_tensors(worker.model, 3))
        assert [update.version for update in worker.updates] == [1, 2, 3]
    for rank in seen:
        assert rank["versions"] == [1, 2, 3] and rank["errors"] == rank["warnings"] == []
    for version in (1, 2, 3):
        assert of_version(seen[0]["requested"], version) == buckets(bucket_bytes)
        for rank in seen[1:]:
            assert of_version(rank["events"], version) == ["packed"] * len(buckets(bucket_bytes)) + ["released"]
    assert seen[0]["fetched"] == [] and seen[0]["buffers"] == [ranks - 1] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("bucket_bytes", [SMALL, *nightly(1 << 20)])
def test_columns_copies_and_tensors_of_rank_0_alone_cross_beside_runs(
    faults: FaultServer, tmp_path: Path, bucket_bytes: int
) -> None:
    with shared_worker(tmp_path) as worker:
        placements = ["rows", "mixed", "replicated", "mixed"]
        seen = train(faults, [worker], tmp_path, ranks=3, bucket_bytes=bucket_bytes, placements=placements)
        assert serves(worker.model, new_tensors(worker.model, 4))
    assert seen[0]["versions"] == [1, 2, 3, 4] and seen[0]["fetched"] == []
    requested = [of_version(seen[0]["requested"], version) for version in (1, 2, 3, 4)]
    assert requested == [buckets(bucket_bytes), buckets(bucket_bytes), [], buckets(bucket_bytes)]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["no memory", *nightly("other host", "no access")])
def test_all_parts_come_through_the_host_if_one_rank_cannot_lend(
    faults: FaultServer, tmp_path: Path, fault: str
) -> None:
    with shared_worker(tmp_path) as worker:
        seen = train(faults, [worker], tmp_path, ranks=3, placements=["rows", "mixed"], fault=fault)
        tensors = new_tensors(worker.model, 2)
        assert serves(worker.model, tensors)
    assert seen[0]["versions"] == [1, 2] and seen[0]["requested"] == []
    assert sum(of_version(seen[0]["fetched"], 1)) == sum(tensor.nbytes for tensor in tensors.values())
    assert len(seen[0]["warnings"]) == 1  # for both updates
    assert all("packed" not in of_version(rank["events"], 1) for rank in seen)
    assert seen[0]["buffers"] == [0, 0]  # which the others could have lent


@pytest.mark.nightly
def test_in_a_square_of_ranks_rows_of_columns_cross_and_only_boxes_of_two_inner_cuts_do_not(
    faults: FaultServer, tmp_path: Path
) -> None:
    with shared_worker(tmp_path) as worker:
        placements = ["replicas", "grid", "boxes"]
        seen = train(faults, [worker], tmp_path, ranks=4, bucket_bytes=192, placements=placements)
        tensors = new_tensors(worker.model, 3, stacked=True)
        assert serves(worker.model, tensors)
        boxes = sum(tensor.nbytes for tensor in tensors.values() if tensor.ndim == 3)
    assert seen[0]["versions"] == [1, 2, 3] and all(rank["warnings"] == [] for rank in seen)
    assert [sum(of_version(seen[0]["fetched"], version)) for version in (1, 2, 3)] == [0, 0, boxes]
    assert all(of_version(seen[0]["requested"], version) for version in (1, 2, 3))
    lenders = [[rank for rank in range(4) if "packed" in of_version(seen[rank]["events"], at)] for at in (1, 2)]
    assert lenders == [[1], [1, 2, 3]]


@pytest.mark.parametrize("fault", ["no room", *nightly("elsewhere")])
def test_a_bucket_on_the_host_and_one_without_memory_to_put_it_together_are_whole(
    faults: FaultServer, tmp_path: Path, fault: str
) -> None:
    with shared_worker(tmp_path) as worker:
        seen = train(faults, [worker], tmp_path, placements=["rows", "mixed"], fault=fault)
        assert serves(worker.model, new_tensors(worker.model, 2)) and seen[0]["versions"] == [1, 2]
    assert [of_version(seen[0]["requested"], version) for version in (1, 2)] == [buckets(SMALL)] * 2
    assert len(of_version(seen[0]["fetched"], 1)) == (fault == "no room")


def test_a_rank_that_dies_while_it_packs_ends_the_update_and_the_old_weights_serve(
    faults: FaultServer, tmp_path: Path
) -> None:
    with shared_worker(tmp_path) as worker:
        seen = train(faults, [worker], tmp_path, ranks=3, fault="dies")
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        assert serves(worker.model, new_tensors(worker.model, 1)) and worker.receiver.version == 1
    for rank in seen:
        (error,) = rank["errors"]
        assert error.startswith("gather: ") and rank["versions"] == [1]
    assert "rank 1 cannot be reached" in seen[0]["errors"][0]


@pytest.mark.nightly
def test_a_lender_can_close_while_rank_0_stands_still(faults: FaultServer, tmp_path: Path) -> None:
    with shared_worker(tmp_path) as worker:
        for rank in train(faults, [worker], tmp_path, ranks=3, fault="stands still"):
            assert rank["closed_s"] < 4 * CLOSE_S and len(rank["errors"]) == 1 and rank["versions"] == [1]


@pytest.mark.parametrize(
    ("fault", "says"), [("cannot pack", "rank 1.*out of luck"), *nightly(("gives up", "it gives up"))]
)
def test_an_update_that_fails_midway_is_released_everywhere_and_the_next_one_crosses(
    faults: FaultServer, tmp_path: Path, fault: str, says: str
) -> None:
    with shared_worker(tmp_path) as worker:
        seen = train(faults, [worker], tmp_path, ranks=3, fault=fault)
        assert serves(worker.model, new_tensors(worker.model, 3)) and worker.receiver.version == 3
    for rank in seen:
        (error,) = rank["errors"]
        assert re.search(says, error) and rank["versions"] == [1, 3]
        assert of_version(rank["events"], 2)[-1] == "released"
    assert 0 < len(of_version(seen[0]["requested"], 2)) < len(buckets(SMALL))
    assert of_version(seen[0]["requested"], 3) == buckets(SMALL) and seen[0]["fetched"] == []


@pytest.mark.nightly
def test_two_senders_at_a_time_and_a_kept_copy_get_the_same_bytes(faults: FaultServer, tmp_path: Path) -> None:
    with shared_worker(tmp_path) as near, Worker() as far, Worker() as late:
        workers, placements = [near, far], ["rows", "mixed"]
        ways = ("cuda_ipc", "shm")
        seen = train(faults, workers, tmp_path, ranks=3, placements=placements, candidates=ways, late=late)
        tensors = new_tensors(near.model, 2)
        assert all(serves(worker.model, tensors) for worker in (near, far, late))
    assert seen[0]["transports"] == [["cuda_ipc", "shm"]] * 2 and seen[0]["fetched"] == []
    assert set(of_version(seen[0]["requested"], 2)) == set(buckets(SMALL))


# --- without processes -----------------------------------------------------------------------------------------------


def part_of(whole: torch.Tensor, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Shards:
    """One tensor of a rank that holds a box of it."""
    shards = Shards([whole], "0" * 15)
    shards.boxes = [(starts, sizes)]
    shards.locals = [whole[tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))].clone()]
    return shards


def cuts_of(shape: tuple[int, ...]) -> list[Cut | None]:
    """No cut, and cuts of each dimension: the first entries, some in the middle, and two ranges."""
    cuts: list[Cut | None] = [None]
    for dim, size in enumerate(shape):
        cuts += [Cut(dim, size, ranges) for ranges in (((0, 1),), ((1, size - 1),), ((0, 2), (size - 1, size)))]
    return cuts


BOXES = [
    ((7,), (2,), (3,)),
    ((5, 6), (1, 0), (3, 6)),
    ((5, 6), (0, 2), (5, 3)),
    ((5, 6), (2, 3), (2, 2)),
    ((3, 4, 5), (1, 0, 0), (2, 4, 5)),
    ((3, 4, 5), (0, 1, 0), (3, 2, 5)),
    ((3, 4, 5), (1, 1, 0), (2, 2, 5)),
    ((3, 4, 5), (1, 0, 2), (2, 4, 3)),
    ((), (), ()),
]


@pytest.mark.parametrize(("shape", "starts", "sizes"), BOXES)
def test_the_portions_of_every_cut_of_a_tensor_are_the_elements_of_the_part(
    shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    shards = part_of(whole, starts, sizes)
    inside = set(shards.locals[0].reshape(-1).tolist())
    draws = random.Random(0)
    inner = {dim for dim in range(1, len(shape)) if sizes[dim] != shape[dim]}
    for cut in cuts_of(shape):
        if cut is not None and cut.dim and inner - {cut.dim}:
            continue  # of such parts there are no portions
        kept = (whole if cut is None else cut.take(whole)).reshape(-1).tolist()
        spans = list(itertools.combinations(range(len(kept) + 1), 2))
        for first, last in spans if cut is None else draws.sample(spans, min(len(spans), 100)):
            found = []
            for portion in shards.own_portion(0, first, last, cut):
                rows, (source, step) = portion.rows, shards.own_bytes(0, portion)
                out = torch.empty(4 * rows.width * rows.times, dtype=torch.uint8)
                copy_rows(rows._replace(start=0, step=4 * rows.width, width=4 * rows.width), source, step, out)
                places = [rows.start + row * rows.step + at for row in range(rows.times) for at in range(rows.width)]
                assert out.view(torch.float32).tolist() == [kept[place] for place in places]
                found += places
            assert sorted(found) == [place for place in range(first, last) if kept[place] in inside]


@pytest.mark.parametrize("cut", [None, Cut(2, 5, ((0, 3),)), Cut(2, 5, ((0, 2), (3, 4)))])
def test_a_part_that_is_cut_in_two_dimensions_after_the_first_has_no_portion(cut: Cut | None) -> None:
    starts, sizes = ((0, 1, 2), (3, 2, 3)) if cut is None or len(cut.ranges) == 1 else ((0, 1, 0), (3, 2, 5))
    assert part_of(torch.zeros(3, 4, 5), starts, sizes).own_portion(0, 0, 60, cut) == []


@pytest.mark.parametrize("transport", ["cuda_ipc", *nightly("shm")])
def test_parts_of_several_ranks_come_in_the_sections_of_several_ranks(
    faults: FaultServer, tmp_path: Path, transport: str
) -> None:
    (tmp_path / "slots").mkdir()
    peers = [FileMemory(tmp_path / "slots") for _ in range(3)]
    with GroupWorker(3, shared=tmp_path / "slots", peers=peers) as worker:
        placements = ["rows", "rows", "mixed", "rows"]
        seen = train(faults, [worker], tmp_path, ranks=2, placements=placements, candidates=(transport,))
        assert worker.serve(new_tensors(TinyModel(), 4))
    for rank in seen:
        assert rank["versions"] == [1, 2, 3, 4] and rank["errors"] == rank["warnings"] == []
    assert seen[0]["fetched"] == []
    requested = [of_version(seen[0]["requested"], version) for version in (1, 2, 3, 4)]
    assert requested[0] == buckets(SMALL) and requested[1] == requested[2] == requested[3]
    packed = [begin for version, what, *begin in seen[1]["events"] if (version, what) == (2, "packed")]
    assert sorted(packed) != packed  # the ranks' sections take turns


@pytest.mark.parametrize("fault", ["cannot pack", *nightly("no memory", "no room", "dies")])
def test_sections_of_several_ranks_that_cannot_be_packed_change_nothing(
    faults: FaultServer, tmp_path: Path, fault: str
) -> None:
    (tmp_path / "slots").mkdir()
    peers = [FileMemory(tmp_path / "slots") for _ in range(2)]
    with GroupWorker(2, shared=tmp_path / "slots", peers=peers) as worker:
        seen = train(faults, [worker], tmp_path, ranks=2, fault=fault)
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        version = 1 if fault == "dies" else 3
        assert worker.receiver.version == version and worker.serve(new_tensors(TinyModel(), version))
    taken = {"cannot pack": [1, 3], "dies": [1]}.get(fault, [1, 2, 3])
    assert all(rank["versions"] == taken for rank in seen)


class Ranks:
    """Two ranks that lend, and what they are asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.failure = ""

    def request(self, first: int, count: int, at: int) -> None:
        self.asked.append((first, count, at))

    def wait_packed(self) -> None:
        if self.failure:
            raise RolloutError(self.failure)
        self.asked.append("packed")


def borrowed(ranks: Ranks, nbytes: int, reads_done: Any = None) -> BorrowedParts:
    manifest = pack(1, [("a", "float32", (nbytes // 4,))], SMALL)
    readers: Any = {1: SimpleNamespace()}
    return BorrowedParts(ranks.request, ranks.wait_packed, readers, manifest, reads_done)


def test_a_round_is_requested_into_a_half_once_the_reads_out_of_it_have_run() -> None:
    ranks, events = Ranks(), itertools.count()

    def event() -> Any:
        number = next(events)
        ranks.asked.append(f"read {number}")
        return SimpleNamespace(synchronize=lambda: ranks.asked.append(f"wait {number}"))

    parts = borrowed(ranks, 7 * SMALL, event)
    for index in range(7):
        with parts.bucket(index):
            ranks.asked.append(index)
    half = 2 * SMALL
    assert ranks.asked == [
        *((0, 2, 0), "packed", (2, 2, half), 0, "read 0", 1, "read 1"),
        *("packed", "wait 1", (4, 2, 0), 2, "read 2", 3, "read 3"),
        *("packed", "wait 3", (6, 1, half), 4, "read 4", 5, "read 5"),
        *("packed", 6, "read 6"),
    ]


def test_reads_are_waited_for_even_if_the_bucket_failed() -> None:
    waited: list[int] = []
    parts = borrowed(Ranks(), 6 * SMALL, lambda: SimpleNamespace(synchronize=lambda: waited.append(1)))
    with pytest.raises(RolloutError), parts.bucket(0):
        raise RolloutError("in between")
    with parts.bucket(2):
        assert waited == [1]


def test_buckets_in_another_order_are_requested_again_and_one_round_needs_one_half() -> None:
    ranks = Ranks()
    parts = borrowed(ranks, 5 * SMALL)
    for index in (4, 1, 0, 3, 1):
        with parts.bucket(index):
            pass
    half = 2 * SMALL
    assert ranks.asked == [
        *((4, 1, 0), "packed", (0, 2, half), "packed", (2, 2, 0)),
        *("packed", (4, 1, half)),  # bucket 3, and the last round ahead, in the place of the first
        *((0, 2, 0), "packed", (2, 2, half)),
    ]
    for count in (1, 2):
        ranks = Ranks()
        parts = borrowed(ranks, count * SMALL)
        for index in (0, count - 1, 0):
            with parts.bucket(index):
                pass
        assert ranks.asked == [(0, count, 0), "packed"]


def test_a_round_whose_half_was_packed_anew_is_requested_again_though_that_failed() -> None:
    ranks = Ranks()
    parts = borrowed(ranks, 7 * SMALL)
    with parts.bucket(0):
        pass
    ranks.failure = "out of luck"
    with pytest.raises(RolloutError), parts.bucket(4):
        pass
    ranks.failure, ranks.asked = "", []
    with parts.bucket(0):
        assert ranks.asked[:2] == [(0, 2, 2 * SMALL), "packed"]


def test_reads_are_at_the_place_in_the_half_that_has_the_bucket() -> None:
    read: list[int] = []
    parts = borrowed(Ranks(), 7 * SMALL)
    parts._readers = {1: SimpleNamespace(read=lambda at, out: read.append(at))}  # type: ignore[dict-item]
    for index in (0, 1, 2, 5, 0):
        with parts.bucket(index):
            parts.read(1, index * SMALL + 5, torch.empty(1))
    # Round 2 was packed ahead into the first half, then round 3 into the second, and round 0 in the place of round 2.
    assert read == [5, SMALL + 5, 2 * SMALL + 5, SMALL + 5, 5]


def test_a_buffer_is_kept_grows_and_is_freed(tmp_path: Path) -> None:
    memory, buffer = FileMemory(tmp_path), LentBuffer()

    def sizes() -> list[int]:
        return [file.stat().st_size for file in tmp_path.iterdir()]

    def lend(memory: FileMemory, nbytes: int) -> bytes:
        handle = buffer.lend(memory, nbytes, host_number())
        buffer.end_loan()
        return handle

    first = lend(memory, 100)
    assert lend(memory, 50) == first and sizes() == [100]
    assert lend(memory, 200) != first and sizes() == [200]
    lend(FileMemory(tmp_path), 200)  # of another GPU
    assert sizes() == [200]
    buffer.free()
    assert sizes() == []
    for given, host in ((None, host_number()), (memory, host_number() + 1), (memory, 0)):
        with pytest.raises(OSError):
            buffer.lend(given, 100, host)
    assert sizes() == []
    buffer.lend(memory, 100, host_number())
    buffer.free()  # in the middle of an update: rank 0 may read it
    assert sizes() == [100]


def test_a_rank_lends_room_for_two_rounds_which_is_a_gibibyte_at_most() -> None:
    for nbytes, lent in ((1 << 40, 1 << 30), (3 << 28, 1 << 30), (2 << 28, 2 << 28), (1 << 20, 1 << 20)):
        manifest = pack(1, [("a", "float32", (nbytes // 4,))], MAX_BUCKET_BYTES)
        assert buffer_bytes(manifest) == lent


def test_no_buffer_stays_mapped_if_one_cannot_be(tmp_path: Path) -> None:
    memory = FileMemory(tmp_path)
    handle = memory.handle(memory.allocate(64))
    with pytest.raises(OSError, match="rank 3"):
        map_buffers(memory, {1: handle, 2: handle, 3: b"x" * 64}, 64)
    assert memory.readers == 0
    assert set(map_buffers(memory, {1: handle, 2: handle}, 64)) == {1, 2} and memory.readers == 2


def test_an_answer_has_a_handle_or_a_reason_of_any_length() -> None:
    assert read_answer(answer(b"h" * 64)) == (b"h" * 64, "")
    assert read_answer(answer(why_not="no"))[1] == "no"
    long = answer(why_not="ü" * 1000)
    assert long.numel() == answer().numel() and read_answer(long)[1].startswith("ü" * 100)


def test_a_portion_of_released_tensors_is_not_packed() -> None:
    payload = Payload({"a": torch.ones(8)}, 1, SMALL, spread=True)
    payload.release()
    with pytest.raises(RolloutError, match="released"):
        payload.pack_portions({0: torch.empty(32, dtype=torch.uint8)})
