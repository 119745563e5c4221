"""Updates that are cut for the ranks of a worker: each rank gets the parts that it keeps, and nothing else."""

import bisect
import copy
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.weights import update_intake
from rollout.weights.kept_memory import StagedMemory
from rollout.weights.staging import WeightStaging
from rollout.weights.update_memory import RankUpdateMemory
from tests.support.bridge.fault_client import FaultServer, idle_s, run_fault
from tests.support.bridge.file_memory import Between, FileMemory, share_from
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.tensor_group import GroupWorker
from tests.support.kernels.grids import checkered, nightly, squared
from tests.support.ports import free_port
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.base import IncomingUpdate, OfferedMemory
from trainer_bridge.transports.cut import Cut
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.registry import TRANSPORTS
from trainer_bridge.transports.sections import (
    RankCuts,
    cuts_digest,
    cuts_from_wire,
    cuts_to_wire,
    plan_sections,
    section_of,
)
from trainer_bridge.transports.zmq_stream import SharedReceiver
from trainer_bridge.wire.errors import BadRequest, ConnectionLost, ProtocolError, WeightsRejected
from trainer_bridge.wire.manifest import pack
from trainer_bridge.wire.weight_messages import check_fields

SMALL = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def random_cut(draws: random.Random, shape: tuple[int, ...]) -> Cut | None:
    if not shape or draws.random() < 0.2:
        return None
    dim = draws.randrange(len(shape))
    count = min(shape[dim] + 1, draws.choice([0, 2, 2, 4]))
    marks = sorted(draws.sample(range(shape[dim] + 1), count // 2 * 2))
    return Cut(dim, shape[dim], tuple(zip(marks[::2], marks[1::2], strict=True)))


def kept(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    if cut is None:
        return tensor
    places = [place for begin, end in cut.ranges for place in range(begin, end)]
    words = tensor.view(torch.uint8).view(*tensor.shape, -1)  # torch selects no float8 numbers
    return words.index_select(cut.dim, torch.tensor(places, dtype=torch.int64))


@pytest.mark.parametrize("seed", [*range(25), *nightly(*range(25, 500))])
def test_each_bucket_has_the_parts_of_one_rank(seed: int) -> None:
    draws, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for i in range(draws.randrange(1, 9)):
        shape = tuple(draws.randrange(1, 9) for _ in range(draws.randrange(4)))
        values = torch.randint(0, 255, (*shape, 4), generator=generator, dtype=torch.uint8)
        dtype = draws.choice(DTYPES)
        tensor = values[..., : dtype.itemsize].contiguous().view(dtype).view(shape)
        tensors[f"t{i}"] = tensor.mT.contiguous().mT if len(shape) > 1 and draws.random() < 0.3 else tensor
    payload = Payload(tensors, 7, draws.choice([64, 192, 4096]))
    whole = payload.manifest
    ranks: list[RankCuts] = [
        {name: random_cut(draws, tuple(tensor.shape)) for name, tensor in tensors.items() if draws.random() < 0.9}
        for _ in range(draws.randrange(1, 5))
    ]
    plan = plan_sections(whole, cuts_from_wire(cuts_to_wire(whole, ranks), whole))
    assert plan.cuts == cuts_digest(whole, ranks)
    payload.use_sections(plan)
    sent = payload.manifest
    assert sent.version == 7 and sent.bucket_bytes <= whole.bucket_bytes
    stream = torch.full((sent.bucket_count * sent.bucket_bytes,), 255, dtype=torch.uint8)
    for index in range(sent.bucket_count):
        start, end = sent.bucket_span(index)
        assert payload.pack_bucket(index, stream[start:]) == end - start
    for rank, cuts in enumerate(ranks):
        entries = plan.of_rank(rank)
        assert list(entries) == [entry for entry, _, _ in section_of(whole, cuts, plan.begins[rank])]
        assert plan.begins[rank] % sent.bucket_bytes == 0
        expected = {name: kept(tensors[name].contiguous(), cut) for name, cut in cuts.items()}
        assert {entry.name for entry in entries} == {name for name, part in expected.items() if part.numel()}
        for entry in entries:
            part = expected[entry.name].contiguous().view(-1).view(torch.uint8)
            assert torch.equal(stream[entry.offset : entry.end], part)
    payload.use_whole()
    assert payload.manifest == whole


def test_two_worlds_of_cuts_have_two_digests() -> None:
    """Halves in another order have the same shapes."""
    manifest = pack(1, [("a", "float32", (4, 2))], SMALL)
    halves: list[RankCuts] = [{"a": Cut(0, 4, ((0, 2),))}, {"a": Cut(0, 4, ((2, 4),))}]
    digests = {cuts_digest(manifest, ranks) for ranks in (halves, halves[::-1], halves[:1], [{}, *halves])}
    assert len(digests) == 4


def test_plans_in_another_order_have_two_digests() -> None:
    """Another release may plan otherwise from the same cuts; equal shapes would hide it."""
    manifest = pack(1, [("a", "float32", (4, 2)), ("b", "float32", (4, 2))], SMALL)
    plan = plan_sections(manifest, [{"a": None, "b": None}])
    a, b = plan.manifest.tensors
    swapped = replace(plan.manifest, tensors=(replace(a, name="b"), replace(b, name="a")))
    backwards = replace(plan.manifest, order=plan.manifest.order[::-1])
    others = (replace(plan, manifest=swapped), replace(plan, manifest=backwards), replace(plan, begins=(64,)))
    assert len({plan.digest, *(other.digest for other in others)}) == 4


def test_buckets_of_the_ranks_take_turns() -> None:
    """So the ranks copy side by side, and none waits until another one has all of its parts."""
    manifest = pack(1, [("a", "float32", (64,)), ("b", "float32", (32,)), ("c", "float32", (16,))], SMALL)
    plan = plan_sections(manifest, [{"a": None}, {}, {"b": None}, {"c": None}])
    spans = [plan.manifest.bucket_span(index) for index in range(plan.manifest.bucket_count)]
    assert [bisect.bisect_right(plan.begins, start) - 1 for start, _ in spans] == [3, 2, 0, 2, 0, 0, 0]
    assert sorted(spans) == [(at, at + SMALL) for at in range(0, 7 * SMALL, SMALL)]


def test_a_stream_that_goes_back_to_whole_tensors_keeps_no_part() -> None:
    values = {"a": torch.arange(64.0).view(8, 8)}
    payload = Payload(values, 1, 64)
    payload.use_sections(plan_sections(payload.manifest, [{"a": Cut(1, 8, ((4, 8),))}]))
    stream = torch.empty(256, dtype=torch.uint8)
    payload.pack_bucket(0, stream)
    payload.use_whole()
    size = payload.pack_bucket(0, stream)
    assert torch.equal(stream[:size].view(torch.float32), values["a"].view(-1)[: size // 4])


WIRE: dict[str, Any] = {"cuts": [None, [0, 4, [[0, 2]]]], "ranks": [[1, 0], [-1, 0]]}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ([], None), ([], {}), (["cuts"], {}), (["cuts", 1], "x"), (["cuts", 1], [0, 4]), (["cuts", 1, 0], 2),
        (["cuts", 1, 0], -1), (["cuts", 1, 1], 5), (["cuts", 1, 1], "4"), (["cuts", 1, 2], None),
        (["cuts", 1, 2], [[0]]), (["cuts", 1, 2], [[2, 1]]), (["cuts", 1, 2], [[0, 5]]), (["cuts", 1, 2], [[0, True]]),
        (["cuts", 1, 2], [[1, 2], [0, 1]]), (["cuts", 1, 2], [[0, 1]] * 100), (["ranks"], []), (["ranks"], None),
        (["ranks"], [[0, 0]] * 65), (["ranks", 0], [0]), (["ranks", 0], {}), (["ranks", 0, 1], 2),
        (["ranks", 0, 1], -2), (["ranks", 0, 1], None), (["ranks", 0, 1], 1),
    ],
)  # fmt: skip
def test_cuts_that_no_worker_has_are_refused(path: list[str | int], value: Any) -> None:
    manifest = pack(1, [("a", "float32", (4, 2)), ("b", "float32", (3,))], SMALL)
    assert cuts_to_wire(manifest, cuts_from_wire(WIRE, manifest)) == {
        "cuts": [None, [0, 4, [[0, 2]]]],
        "ranks": [[1, 0], [-1, 0]],
    }
    told: Any = copy.deepcopy(WIRE)
    place = told
    for step in path[:-1]:
        place = place[step]
    if path:
        place[path[-1]] = value
    else:
        told = value
    with pytest.raises(ProtocolError):
        cuts_from_wire(told, manifest)


def tensors_of(seed: int, stacked: bool = True) -> dict[str, torch.Tensor]:
    return new_tensors(TinyModel(), seed, stacked=stacked)


def worker_of(size: int, **how: Any) -> Worker:
    return GroupWorker(size, **how) if size > 1 else Worker(**how)


def serve(worker: Worker, tensors: dict[str, torch.Tensor]) -> bool:
    return worker.serve(tensors) if isinstance(worker, GroupWorker) else serves(worker.model, tensors)


def sections_bytes(worker: GroupWorker, tensors: dict[str, torch.Tensor]) -> int:
    """The bytes that all ranks keep, in the types that are sent."""
    return sum(
        shard.part(name).numel() * tensor.element_size() for shard in worker.shards for name, tensor in tensors.items()
    )


@pytest.mark.parametrize(
    ("transport", "apply", "stacked"),
    squared(["zmq", "shm", "nccl", "cuda_ipc"], ["staged", "in_place"], [True, False]),
)
def test_from_the_second_update_on_each_rank_gets_its_parts(
    tmp_path: Path, transport: str, stacked: bool, apply: str
) -> None:
    with (
        GroupWorker(3, shared=tmp_path, relay_bytes=512, apply=apply) as worker,
        WeightPublisher(worker.endpoint, transport=transport, bucket_bytes=SMALL) as publisher,
    ):
        share_from(publisher, tmp_path)
        for version in range(1, 5):
            tensors = tensors_of(version, stacked)
            (report,) = publisher.publish(tensors, version).applied(60)
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            assert report.nbytes == nbytes
            assert report.sent_nbytes == (nbytes if version == 1 else sections_bytes(worker, tensors))
            assert worker.serve(tensors)


class Reading(RankUpdateMemory):
    """Leaves buckets with odd numbers to another rank, which has read the first `read` of them."""

    left, read = 0, 0

    def offer(self, transport: str, options: Any) -> None:
        """No-op: this test tells what is read."""

    def leave_to_owner(self, index: int, start: int, end: int, check: int) -> bool:
        self.left += index % 2
        return bool(index % 2)

    def unread(self) -> int:
        return self.left - self.read


class Announced(SharedReceiver):
    """Takes buckets that a test announces."""

    name = "shm"

    def begin(self, incoming: IncomingUpdate, options: Any) -> dict[str, Any]:
        return {}

    def take(self, incoming: IncomingUpdate, index: int, check: int) -> bool:
        return not self.leave(incoming, index, check)


def test_a_bucket_is_acknowledged_though_a_later_one_is_not_read() -> None:
    """The publisher packs the next bucket into its slot meanwhile: ranks and publisher do not work in lock step."""
    staging = WeightStaging(StagedMemory(TinyModel().views))
    manifest = Payload(tensors_of(1), 1, SMALL).manifest
    memory = Reading(staging, manifest, staging)
    incoming = IncomingUpdate(manifest, "shm", bytes(16), memory)
    with Worker() as worker:
        receiver, taken = Announced(worker.receiver.receivers["zmq"]), [0, 1, 2, 3, 4]  # type: ignore[arg-type]
    assert [receiver.take(incoming, index, 0) for index in taken] == [True, False, True, False, True]
    assert receiver.complete(incoming, taken) == 1, "the second one is not read"
    memory.read = 1
    assert receiver.complete(incoming, taken) == 3 and incoming.arrived_bytes == SMALL
    assert receiver.complete(incoming, taken[3:]) == 0
    memory.read = 2
    assert receiver.complete(incoming, taken[3:]) == 2 and incoming.arrived_bytes == 2 * SMALL


class Readers:
    """Stands between the ranks and a publisher's memory, which all but one refuse to open, or find damaged."""

    def __init__(self, transport: str, patch: pytest.MonkeyPatch) -> None:
        self.opened = self.closed = self.nbytes = 0
        self.refuses = self.damages = self.keeps = False
        entry = TRANSPORTS[transport]
        assert entry.offered is not None
        self._open = entry.offered
        patch.setitem(TRANSPORTS, transport, replace(entry, offered=self.open))

    def open(self, *how: Any) -> OfferedMemory:
        if self.refuses and self.opened:
            raise OSError(1, "no access")
        memory = self._open(*how)
        self.opened += 1
        read, close = memory.read, memory.close

        def reads(index: int, start: int, nbytes: int, check: int, keep: Any) -> None:
            self.nbytes += nbytes
            read(index, start, nbytes, check ^ self.damages, keep)

        def closes() -> None:
            self.closed += 1
            close()
            if self.keeps:
                raise OSError(4, "no such memory")

        return Between(reads, closes)


@pytest.mark.parametrize(("apply", "transport"), checkered(["staged", "in_place"], ["shm", "cuda_ipc"]))
def test_each_rank_reads_its_buckets_in_the_publisher_memory(
    tmp_path: Path, transport: str, apply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = Readers(transport, monkeypatch)
    peers = [FileMemory(tmp_path) for _ in range(3)]
    with (
        GroupWorker(3, shared=tmp_path, relay_bytes=512, apply=apply, peers=peers) as worker,
        WeightPublisher(worker.endpoint, transport=transport, bucket_bytes=SMALL) as publisher,
    ):
        share_from(publisher, tmp_path)

        def publish(version: int) -> dict[str, torch.Tensor]:
            publisher.publish(tensors := tensors_of(version), version).applied(60)
            assert worker.serve(tensors) and readers.opened == readers.closed
            return tensors

        publish(1)
        assert readers.opened == 0  # whole tensors, of which all ranks have parts
        second = publish(2)
        theirs = sum(
            shard.part(name).numel() * tensor.element_size()
            for shard in worker.shards[1:]
            for name, tensor in second.items()
        )
        assert readers.opened == 2 and readers.nbytes >= theirs
        readers.damages = True
        with pytest.raises(WeightsRejected, match="damaged"):
            publisher.publish(tensors_of(3), 3).applied(60)
        assert readers.opened == readers.closed == 4
        readers.damages, readers.refuses, readers.nbytes = False, True, 0
        publish(4)
        assert readers.nbytes == 0  # one rank cannot read it, so all parts come through rank 0
        readers.refuses = False
        publish(5)
        assert readers.nbytes >= theirs


def test_a_rank_keeps_what_it_reads_while_it_skips_a_piece_of_rank_0(tmp_path: Path) -> None:
    """Buckets that it reads, and pieces that come through rank 0, are kept by two threads."""
    with (
        GroupWorker(2, shared=tmp_path) as worker,
        WeightPublisher(worker.endpoint, transport="shm", bucket_bytes=SMALL) as publisher,
    ):
        share_from(publisher, tmp_path)
        publisher.publish(tensors_of(1), 1).applied(60)
        follower, skipping = worker.stagings[1], threading.Event()
        skips = follower.skips

        def skips_slowly(start: int, end: int) -> bool:
            if threading.current_thread().name == "updates" and not skipping.is_set():
                skipping.set()
                (before,), until = worker.reports.ended("update_reads"), time.monotonic() + 1
                while worker.reports.ended("update_reads") == [before] and time.monotonic() < until:
                    time.sleep(0.01)
            return skips(start, end)

        follower.skips = skips_slowly  # type: ignore[method-assign]
        publisher.publish(tensors := tensors_of(2), 2).applied(60)
        assert skipping.is_set() and worker.serve(tensors)


class SlowReaders(Readers):
    """The first rank reads until the other one, which finds damage, has had the update dropped."""

    def __init__(self, transport: str, patch: pytest.MonkeyPatch) -> None:
        super().__init__(transport, patch)
        self.reading, self.early = threading.Event(), threading.Event()

    def open(self, *how: Any) -> OfferedMemory:
        memory, slow = super().open(*how), self.opened == 1
        read, close = memory.read, memory.close

        def reads(index: int, start: int, nbytes: int, check: int, keep: Any) -> None:
            if slow:
                self.reading.set()
                self.early.wait(1)
                self.reading.clear()
            else:
                self.reading.wait(20)
                check ^= 1
            read(index, start, nbytes, check, keep)

        def closes() -> None:
            if slow and self.reading.is_set():
                self.early.set()
            close()

        return Between(reads, closes)


def test_memory_of_the_publisher_is_open_until_a_rank_has_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = SlowReaders("shm", monkeypatch)
    with (
        GroupWorker(3, shared=tmp_path) as worker,
        WeightPublisher(worker.endpoint, transport="shm") as publisher,
    ):
        share_from(publisher, tmp_path)
        publisher.publish(tensors_of(1), 1).applied(60)
        with pytest.raises(WeightsRejected, match="damaged"):
            publisher.publish(tensors_of(2), 2).applied(60)
        wait_for(lambda: readers.closed == 2, "the end of the reads")
        assert not readers.early.is_set()


def test_all_ranks_close_the_publisher_memory_though_it_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver refuses to close memory of a process that has died."""
    readers, peers = Readers("cuda_ipc", monkeypatch), [FileMemory(tmp_path) for _ in range(2)]
    with (
        GroupWorker(2, shared=tmp_path, peers=peers) as worker,
        WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=SMALL) as publisher,
    ):
        share_from(publisher, tmp_path)
        publisher.publish(tensors_of(1), 1).applied(60)

        def refuse(memory: FileMemory, opened: torch.Tensor) -> None:
            raise OSError(4, "no such memory")

        readers.damages = readers.keeps = True
        with monkeypatch.context() as patch:
            patch.setattr(FileMemory, "close", refuse)
            with pytest.raises(WeightsRejected, match="damaged"):
                publisher.publish(tensors_of(2), 2).applied(60)
            assert readers.opened == readers.closed == 1
        readers.damages = False
        publisher.publish(tensors := tensors_of(3), 3).applied(60)
        assert worker.serve(tensors) and readers.opened == readers.closed == 2


def test_a_layout_that_changes_comes_whole_once() -> None:
    with GroupWorker(2) as worker, WeightPublisher(worker.endpoint, transport="zmq") as publisher:
        came_whole = []
        for version, stacked in enumerate([True, True, False, False, True], 1):
            tensors = tensors_of(version, stacked)
            (report,) = publisher.publish(tensors, version).applied(60)
            came_whole.append(report.sent_nbytes == report.nbytes)
            assert worker.serve(tensors)
        assert came_whole == [True, False, True, False, True]


def test_a_worker_that_comes_back_with_other_ranks_gets_whole_tensors_once() -> None:
    port = free_port()
    came_whole = []
    with WeightPublisher(f"tcp://127.0.0.1:{port}", transport="zmq") as publisher:
        for first, size in ((1, 2), (3, 3), (5, 1)):
            with worker_of(size, port=port) as worker:
                for version in (first, first + 1):
                    tensors = tensors_of(version)
                    (report,) = publisher.publish(tensors, version).applied(60)
                    came_whole.append(report.sent_nbytes == report.nbytes)
                    assert serve(worker, tensors)
    assert came_whole == [True, False, True, False, True, True]


@pytest.mark.parametrize(("sizes", "whole"), [((2, 2), False), ((2, 3), True), ((2, 1), True)])
def test_workers_with_equal_ranks_share_one_stream(sizes: tuple[int, ...], whole: bool) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(worker_of(size)) for size in sizes]
        with WeightPublisher([worker.endpoint for worker in workers], transport="zmq") as publisher:
            for version in (1, 2, 3):
                tensors = tensors_of(version)
                reports = publisher.publish(tensors, version).applied(60)
                assert [each.sent_nbytes == each.nbytes for each in reports] == [version == 1 or whole] * 2
                assert all(serve(worker, tensors) for worker in workers)


def test_a_worker_of_another_release_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, old = [], ["refuses sections"]

    def check(header: Any) -> str:
        asked.append("sections" in header)
        if old and ("sections" in header or old == ["refuses all"]):
            raise BadRequest("begin takes no field 'sections'", field="sections")
        return check_fields(header)

    port = free_port()
    monkeypatch.setattr(update_intake, "check_fields", check)
    with WeightPublisher(f"tcp://127.0.0.1:{port}", transport="zmq") as publisher:
        with GroupWorker(2, port=port) as worker:
            for version in (1, 2):
                tensors = tensors_of(version)
                (report,) = publisher.publish(tensors, version).applied(60)
                assert report.sent_nbytes == report.nbytes and worker.serve(tensors)
        assert asked.count(True) == 1
        old.clear()
        with pytest.raises(ConnectionLost):
            publisher.publish(tensors, 3).applied(60)
        with GroupWorker(2, port=port) as worker:  # of this release
            came_whole = []
            for version in (4, 5):
                (report,) = publisher.publish(tensors, version).applied(60)
                came_whole.append(report.sent_nbytes == report.nbytes)
            assert came_whole == [True, False] and worker.serve(tensors)
            old.append("refuses all")  # also what is not cut: an error, and no further try
            asked.clear()
            with pytest.raises(BadRequest, match="takes no field 'sections'"):
                publisher.publish(tensors, 6).applied(60)
            assert asked == [True, True, False], "in sections, asked for its cuts, whole"


def test_a_worker_whose_cuts_cannot_be_read_gets_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have more ranks, or more ranges in a cut, than a publisher plans for."""
    asked = []

    def too_many(manifest: Any, ranks: Any) -> Any:
        asked.append(cuts_to_wire(manifest, ranks))
        return {**asked[-1], "ranks": asked[-1]["ranks"] * 64}

    monkeypatch.setattr(update_intake, "cuts_to_wire", too_many)
    with GroupWorker(2) as worker, WeightPublisher(worker.endpoint, transport="zmq") as publisher:
        for version in (1, 2):
            tensors = tensors_of(version)
            (report,) = publisher.publish(tensors, version).applied(60)
            assert report.sent_nbytes == report.nbytes and worker.serve(tensors)
    assert len(asked) == 1


def test_the_kept_update_comes_in_sections_too() -> None:
    """With deltas, a worker that lacks the base gets its parts of the kept bytes."""
    with (
        GroupWorker(2) as worker,
        WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher,
    ):
        for version in (1, 2):
            tensors = tensors_of(version)  # all values change: too many for a delta
            (report,) = publisher.publish(tensors, version).applied(60)
            assert (report.sent_nbytes == report.nbytes) == (version == 1) and worker.serve(tensors)
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed["q.weight"][0] += 1
        (report,) = publisher.publish(changed, 3).applied(60)
        assert report.sent_nbytes < report.nbytes and worker.serve(changed)


FAULTS = [("prepare", "kill"), ("begin", "kill"), ("transfer", "kill"), ("commit", "kill"), ("transfer", "corrupt")]


@pytest.fixture(scope="module")
def faults() -> Iterator[FaultServer]:
    server = FaultServer()
    yield server
    server.close()


@pytest.mark.parametrize("transport", ["zmq", "shm", "cuda_ipc", *nightly("nccl")])
def test_a_trainer_that_dies_in_any_phase_leaves_all_ranks_at_one_version(
    faults: FaultServer, tmp_path: Path, transport: str
) -> None:
    peers = [FileMemory(tmp_path) for _ in range(3)]
    with GroupWorker(3, relay_bytes=512, idle_s=idle_s(transport), shared=tmp_path, peers=peers) as worker:
        for version, (phase, fault) in zip(range(2, 99, 3), FAULTS, strict=False):
            order = {"version": version, "seed": version, "sections": True}
            run_fault(faults, worker, transport, tmp_path, phase, fault, **order)
            assert worker.receiver.version == version and worker.serve(tensors_of(version, stacked=False))
        with WeightPublisher(worker.endpoint, transport=transport, bucket_bytes=SMALL) as publisher:
            share_from(publisher, tmp_path)
            for version in (100, 101):
                tensors = tensors_of(version, stacked=False)
                (report,) = publisher.publish(tensors, version).applied(60)
                assert (report.sent_nbytes == report.nbytes) == (version == 100) and worker.serve(tensors)


def test_bytes_for_a_rank_that_do_not_come_are_missed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank counts the bytes of its own parts, besides the checks of buckets."""
    with GroupWorker(2) as worker, WeightPublisher(worker.endpoint, transport="zmq", bucket_bytes=SMALL) as publisher:
        for version in (1, 2):
            old = tensors_of(version)
            publisher.publish(old, version).applied(60)
        staging = worker.stagings[1]
        take, lost = staging.take, [True]

        def drops_one(start: int, data: torch.Tensor) -> Any:
            return None if lost and lost.pop() else take(start, data)

        with monkeypatch.context() as patch:
            patch.setattr(staging, "take", drops_one)
            with pytest.raises(WeightsRejected, match="rank 1: .* did not arrive whole"):
                publisher.publish(tensors_of(3), 3).applied(60)
        assert not lost and worker.receiver.version == 2 and worker.serve(old)
        publisher.publish(tensors_of(4), 4).applied(60)
        assert worker.serve(tensors_of(4))
