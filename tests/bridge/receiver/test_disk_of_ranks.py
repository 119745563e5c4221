"""Updates from files, of which each rank reads the pieces that have some of its part."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.weights.parameter_map import ParameterMap
from rollout.weights.update_memory import UpdateMemory
from tests.support.bridge.file_memory import Between
from tests.support.bridge.harness import TinyModel, new_tensors, wait_for
from tests.support.bridge.tensor_group import GroupWorker
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.base import OfferedMemory
from trainer_bridge.transports.disk import DiskSender
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.registry import TRANSPORTS
from trainer_bridge.wire.errors import WeightsRejected

PIECE = 24


class Followers:
    """Stands between the followers and the files. `refuses`: none opens them; `damages`, `hangs`: of reads."""

    def __init__(self) -> None:
        self.nbytes: Counter[int] = Counter()  # by follower, in the order in which they opened an update
        self.opened = 0
        self.refuses = self.damages = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.reads = threading.Event()
        self._open = TRANSPORTS["disk"].offered

    def open(self, *how: Any) -> OfferedMemory:
        if self.refuses:
            raise OSError(2, "no such folder here")
        assert self._open is not None
        folder, number = self._open(*how), self.opened
        self.opened += 1
        read = folder.read

        def reads(index: int, start: int, nbytes: int, check: int, keep: Any) -> None:
            self.nbytes[number] += nbytes

            def keeps(*piece: Any) -> Any:
                self.reads.set()
                self.goes_on.wait(60)
                return keep(*piece)

            read(index, start, nbytes, check ^ self.damages, keeps)

        return Between(reads, folder.close)


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Followers]:
    between = Followers()
    entry = replace(
        TRANSPORTS["disk"],
        offered=between.open,
        sender=lambda publisher: DiskSender(publisher.folder or "", file_bytes=300, piece_bytes=PIECE),
    )
    monkeypatch.setitem(TRANSPORTS, "disk", entry)
    yield between
    between.goes_on.set()


def publisher_of(worker: GroupWorker, folder: Path, **how: Any) -> WeightPublisher:
    return WeightPublisher(worker.endpoint, transport="disk", folder=str(folder), **how)


def bytes_of_rank(worker: GroupWorker, rank: int, tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of the pieces of which a rank keeps something."""
    nbytes = 0
    for name, tensor in tensors.items():
        cut = getattr(worker.shards[rank].views[name], "cut", None)
        kept = torch.zeros(tensor.shape, dtype=torch.bool)
        for begin, end in ((0, tensor.shape[0]),) if cut is None else cut.ranges:
            kept.narrow(0 if cut is None else cut.dim, begin, end - begin).fill_(True)
        by_byte = kept.flatten().repeat_interleave(tensor.element_size())
        nbytes += sum(part.numel() for part in by_byte.split(PIECE) if part.any())
    return nbytes


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_reads_only_pieces_that_have_some_of_its_part(
    tmp_path: Path, followers: Followers, size: int, apply: str, stacked: bool
) -> None:
    with GroupWorker(size, apply=apply) as worker, publisher_of(worker, tmp_path) as publisher:
        for version in (1, 2):
            followers.nbytes.clear()
            followers.opened = 0
            tensors = new_tensors(TinyModel(), version, stacked=stacked)
            (report,) = publisher.publish(tensors, version).applied(60)
            assert worker.serve(tensors) and report.version == version
            expected = [bytes_of_rank(worker, rank, tensors) for rank in range(1, size)]
            assert sorted(followers.nbytes.values()) == sorted(expected)
            assert max(expected) < sum(tensor.nbytes for tensor in tensors.values())
        assert worker.relayed.size == 0, "nothing goes from rank to rank"


def test_changes_come_from_files_to_every_rank(tmp_path: Path, followers: Followers) -> None:
    with GroupWorker(2) as worker, publisher_of(worker, tmp_path, deltas="host") as publisher:
        publisher.publish(tensors := new_tensors(TinyModel(), 1), 1).applied(60)
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed["q.weight"][0] += 1
        (report,) = publisher.publish(changed, 2).applied(60)
        assert report.sent_nbytes < report.nbytes and worker.serve(changed)


def test_ranks_that_cannot_open_the_folder_get_their_parts_from_rank_0(tmp_path: Path, followers: Followers) -> None:
    followers.refuses = True
    with GroupWorker(2) as worker, publisher_of(worker, tmp_path) as publisher:
        publisher.publish(tensors := new_tensors(TinyModel(), 1), 1).applied(60)
        assert worker.serve(tensors) and worker.relayed.size > 0


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_damage_that_one_rank_finds_is_refused_by_all(tmp_path: Path, followers: Followers, apply: str) -> None:
    with GroupWorker(2, apply=apply) as worker, publisher_of(worker, tmp_path) as publisher:
        publisher.publish(old := new_tensors(TinyModel(), 1), 1).applied(60)
        followers.damages = True
        with pytest.raises(WeightsRejected, match="rank 1: .*is damaged"):
            publisher.publish(new_tensors(TinyModel(), 2), 2).applied(60)
        assert worker.status()["state"] == ("stale" if apply == "in_place" else "idle")
        assert apply == "in_place" or worker.serve(old)
        followers.damages = False
        publisher.publish(tensors := new_tensors(TinyModel(), 3), 3).applied(60)
        assert worker.serve(tensors)


def publish_to_hung_disk(worker: GroupWorker, folder: Path, followers: Followers) -> WeightPublisher:
    """Publish version 1, then version 2, of which a rank's first read hangs; returns the second one's publisher."""
    with publisher_of(worker, folder) as publisher:
        publisher.publish(new_tensors(TinyModel(), 1), 1).applied(60)
    followers.goes_on.clear()
    followers.reads.clear()
    hung = publisher_of(worker, folder)
    hung.publish(new_tensors(TinyModel(), 2), 2)
    assert followers.reads.wait(60)
    return hung


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_disk_that_hangs_for_one_rank_costs_an_update_and_nothing_else(
    tmp_path: Path, followers: Followers, transport: str
) -> None:
    """Also if the next ones come in sections, which the ranks would read themselves."""
    with GroupWorker(2) as worker:
        hung = publish_to_hung_disk(worker, tmp_path, followers)
        lanes = worker.reports.lanes(0)
        assert not lanes["update_reads"].busy, "the watch would take the rank for hung"
        hung.close()
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        wait_for(lambda: not worker.reports.lanes(0)["updates"].busy, "the end of what the rank was told")
        with WeightPublisher(worker.endpoint, transport=transport) as other:
            other.publish(new_tensors(TinyModel(), 3), 3).applied(60)
            worker.gate.clear()
            handle = other.publish(tensors := new_tensors(TinyModel(), 4), 4)
            wait_for(lambda: worker.status()["state"] == "ready", "the next update")
            followers.goes_on.set()
            last = worker.orders.give("update_reads", 0, 0, 0, 0, 0)
            wait_for(lambda: worker.reports.done("update_reads", last), "the end of all reads")
            worker.gate.set()
            handle.applied(60)
            assert worker.serve(tensors), "the piece that came late is not kept"
        with publisher_of(worker, tmp_path) as publisher:
            publisher.publish(tensors := new_tensors(TinyModel(), 5), 5).applied(60)
            assert worker.serve(tensors)


def test_in_place_a_rank_writes_no_piece_that_comes_after_the_drop(tmp_path: Path, followers: Followers) -> None:
    with GroupWorker(2, apply="in_place") as worker:
        hung = publish_to_hung_disk(worker, tmp_path, followers)
        hung.close()
        wait_for(lambda: worker.status()["state"] == "stale", "the end of the update")
        worker.ask(action="abort", token="0" * 32).get(timeout=60)  # answered once the ranks have closed the folder
        before = [tensor.clone() for tensor in worker.shards[1].parameters.values()]
        followers.goes_on.set()
        last = worker.orders.give("update_reads", 0, 0, 0, 0, 0)
        wait_for(lambda: worker.reports.done("update_reads", last), "the end of all reads")
        assert all(map(torch.equal, before, worker.shards[1].parameters.values()))


def offered(worker: GroupWorker, folder: Path) -> tuple[UpdateMemory, Iterator[tuple[int, int, int, int]]]:
    """The memory of an update from files that the ranks read, and the pieces of its first tensor."""
    payload = Payload(new_tensors(TinyModel(), 2), 2, 64)
    options = DiskSender(str(folder), piece_bytes=PIECE).prepare(payload)
    fit = ParameterMap(worker.shards[0].views).check(payload.manifest)
    memory = worker.memories.open(payload.manifest, fit, False)
    memory.offer("disk", options)
    wait_for(memory.wait_for_room, "the ranks")
    name, _, checks = options["files"][0]
    data = (Path(options["folder"]) / name).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    first = min(json.loads(data[8:header]).items(), key=lambda item: item[1]["data_offsets"])[0]
    (entry,) = (entry for entry in payload.manifest.tensors if entry.name == first)
    starts = range(0, entry.nbytes, PIECE)
    ends = [min(start + PIECE, entry.nbytes) for start in starts]
    pieces = zip(starts, ends, checks[1:], strict=False)
    return memory, ((header + start, entry.offset + start, entry.offset + end, check) for start, end, check in pieces)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_piece_that_a_rank_finds_damaged_is_never_read(tmp_path: Path, followers: Followers, apply: str) -> None:
    with GroupWorker(2, apply=apply) as worker:
        memory, pieces = offered(worker, tmp_path)
        assert not memory.dirty
        followers.damages = True
        with pytest.raises(WeightsRejected, match="rank 1: .*is damaged"):
            for piece in pieces:
                memory.leave_to_owner(*piece)
                assert memory.dirty == (apply == "in_place"), "another rank may have written"
                wait_for(lambda: memory.unread() == 0, "the rank")
        memory.abandon()


def test_few_pieces_are_read_ahead(tmp_path: Path, followers: Followers) -> None:
    """Those that are left when an update is dropped keep the next one waiting."""
    with GroupWorker(2) as worker:
        memory, pieces = offered(worker, tmp_path)
        followers.goes_on.clear()
        followers.reads.clear()
        first = next(pieces)
        given = 0
        while memory.wait_for_room():
            assert (given := given + 1) < 20
            memory.leave_to_owner(*(next(pieces, first)))
        assert given >= 2
        followers.goes_on.set()
        wait_for(memory.wait_for_room, "the rank")
        memory.abandon()
