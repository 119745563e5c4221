"""Updates from files, of which each rank reads the pieces that have some of its part."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bridge.harness import TinyModel, new_tensors, wait_for
from tests.support.bridge.tensor_group import GroupWorker
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.base import OfferedMemory
from trainer_bridge.transports.disk import DiskSender
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

        folder.read = reads  # type: ignore[method-assign]
        return folder


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


def test_a_disk_that_hangs_for_one_rank_costs_an_update_and_nothing_else(tmp_path: Path, followers: Followers) -> None:
    with GroupWorker(2) as worker:
        with publisher_of(worker, tmp_path) as publisher:
            publisher.publish(new_tensors(TinyModel(), 1), 1).applied(60)
        followers.goes_on.clear()
        followers.reads.clear()
        hung = publisher_of(worker, tmp_path)
        hung.publish(new_tensors(TinyModel(), 2), 2)
        assert followers.reads.wait(60)
        lanes = worker.reports.lanes(0)
        assert not lanes["update_reads"].busy, "the watch would take the rank for hung"
        hung.close()
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        wait_for(lambda: not worker.reports.lanes(0)["updates"].busy, "the end of what the rank was told")
        with WeightPublisher(worker.endpoint, transport="zmq") as other:
            worker.gate.clear()
            handle = other.publish(tensors := new_tensors(TinyModel(), 3), 3)
            wait_for(lambda: worker.status()["state"] == "ready", "the next update")
            followers.goes_on.set()
            last = worker.orders.give("update_reads", 0, 0, 0, 0, 0)
            wait_for(lambda: worker.reports.done("update_reads", last), "the end of all reads")
            worker.gate.set()
            handle.applied(60)
            assert worker.serve(tensors), "the piece that came late is not kept"
        with publisher_of(worker, tmp_path) as publisher:
            publisher.publish(tensors := new_tensors(TinyModel(), 4), 4).applied(60)
            assert worker.serve(tensors)
