"""Who sends which bytes in a group of several trainer ranks, and that every member gets all of them."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bridge.harness import TinyModel, new_tensors
from tests.support.kernels.grids import nightly
from trainer_bridge.transports.base import TransferRules
from trainer_bridge.transports.fingerprint import fingerprint
from trainer_bridge.transports.nccl.broadcasts import Broadcasts
from trainer_bridge.transports.nccl.kept_group import KeptGroup
from trainer_bridge.transports.nccl.nccl_group import (
    BroadcastGroup,
    GroupError,
    GroupSeat,
    StoreServer,
    connect,
    given_up,
)
from trainer_bridge.transports.nccl.runs import Columns, Runs
from trainer_bridge.transports.nccl.transport import NcclSender
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.registry import auto_order
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.manifest import Manifest, pack

BUCKET = 128
HOST = "127.0.0.1"


def some_runs(manifest: Manifest, members: list[int], seed: int = 1) -> Runs:
    """Runs that begin anywhere in the tensors, at elements of two bytes."""
    rng = np.random.default_rng(seed)
    firsts = np.unique(rng.integers(1, manifest.total_bytes // 2, 40)) * 2
    return Runs(manifest, np.concatenate([[0], firsts]), rng.choice(members, len(firsts) + 1))


def test_every_byte_of_every_bucket_travels_once_and_lands_in_its_place() -> None:
    manifest = pack(1, [("a", "float32", (11, 6)), ("b", "bfloat16", (7, 3)), ("c", "bfloat16", (333,))], BUCKET)
    stream = torch.randint(0, 256, (manifest.total_bytes,), dtype=torch.uint8)
    for runs in (some_runs(manifest, [0, 3, 4]), some_runs(manifest, [2, 5], 2), Runs.alone(manifest)):
        out = torch.zeros(runs.buffer_bytes, dtype=torch.uint8)
        for index in range(manifest.bucket_count):
            start, end = manifest.bucket_span(index)
            bucket, travelled = runs.bucket(index), torch.full((runs.buffer_bytes,), 255, dtype=torch.uint8)
            assert [part.root for part in bucket.parts] == sorted({part.root for part in bucket.parts})
            for part in bucket.parts:
                assert part.at % 64 == 0 and part.end <= runs.buffer_bytes
                for first, last, at in part.pieces:
                    assert part.at <= at and at + last - first <= part.end and at % 64 == 0
                    travelled[at : at + last - first] = stream[first:last]
            assert torch.equal(bucket.unpack(travelled, out), stream[start:end])


@pytest.mark.parametrize("seed", [*range(30), *nightly(*range(30, 1000))])
def test_columns_and_runs_of_every_bucket_travel_once_and_land_in_their_places(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [
        ("a", "float32", (11, 6)),
        ("b", "bfloat16", (7, 3, 10)),
        ("c", "bfloat16", (333,)),
        ("d", "bfloat16", (40, 2)),
    ]
    manifest = pack(1, [shapes[i] for i in rng.permutation(4)[: 1 + seed % 4]], int(64 * rng.integers(1, 9)))
    stream = torch.randint(0, 256, (manifest.total_bytes,), dtype=torch.uint8)
    firsts, roots, columns = [], [], []
    for entry in manifest.tensors:
        row = entry.nbytes // entry.shape[0]
        if len(entry.shape) > 1 and rng.integers(4):
            cuts = sorted({0, *(2 * int(rng.integers(row // 2)) for _ in range(2))})
            columns.append(Columns(row, tuple(cuts), tuple(rng.choice(5, len(cuts)).tolist())))
            firsts += [entry.offset, entry.end]
            roots += [-len(columns), 0]
        else:
            firsts += [entry.offset, entry.offset + 2 * int(rng.integers(1, entry.nbytes // 2))]
            roots += rng.choice(5, 2).tolist()
    whole = [i for i in range(len(firsts)) if firsts[i] < [*firsts[1:], manifest.total_bytes][i]]
    runs = Runs(manifest, np.array(firsts)[whole], np.array(roots)[whole], columns)
    out = torch.zeros(runs.buffer_bytes, dtype=torch.uint8)
    for index in range(manifest.bucket_count):
        start, end = manifest.bucket_span(index)
        bucket, travelled = runs.bucket(index), torch.full((runs.buffer_bytes,), 255, dtype=torch.uint8)
        filled = torch.zeros(runs.buffer_bytes, dtype=torch.int32)
        for part in bucket.parts:
            assert part.at % 64 == 0 and part.end <= runs.buffer_bytes
            lines = [(first, last, at) for first, last, at in part.pieces]
            for rows, at in part.columns:
                begins = [rows.start + i * rows.step for i in range(rows.times)]
                assert at % 64 == 0
                lines += [(begin, begin + rows.width, at + i * rows.width) for i, begin in enumerate(begins)]
            for first, last, at in lines:
                assert start <= first < last <= end and part.at <= at and at + last - first <= part.end
                travelled[at : at + last - first] = stream[first:last]
                filled[at : at + last - first] += 1
        assert int(filled.sum()) == end - start and int(filled.max()) == 1, "each byte travels once"
        out.fill_(7)
        assert torch.equal(bucket.unpack(travelled, out), stream[start:end])


def broadcast(
    devices: list[str], runs: Runs, tensors: dict[str, torch.Tensor], payload_type: type[Payload] = Payload
) -> tuple[list[Any], str | None]:
    """All members of a group of trainer ranks, and why one gave up. Rank 0 keeps what it sent and got."""
    server = StoreServer([HOST], 20.0)
    jobs: list[Any] = [None] * len(devices)

    def take_part(rank: int) -> None:
        mine = {name: tensor.to(devices[rank]) for name, tensor in tensors.items()}
        payload = payload_type(mine, 1, BUCKET)
        if rank == 0:
            memory = torch.zeros(payload.manifest.total_bytes, dtype=torch.uint8)
            payload.keep_in(lambda: memory)
        store, watch = (connect(HOST, server.port, 20.0) for _ in range(2))
        place = GroupSeat("g", rank, len(devices), len(runs))
        rules = TransferRules(20.0, threading.Event())
        job = Broadcasts(payload, store, place, HOST, rules, KeptGroup(), None if rank else runs, f"rank {rank}")
        job.run(watch)
        jobs[rank] = job

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in jobs:  # one that gave up returns before its sending thread has logged why
        assert job.ended.wait(20.0)
    return jobs, given_up(server.store)


TWO_GPUS = pytest.param(
    ["cuda:0", "cuda:1"],
    marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
)


@pytest.mark.parametrize("devices", [["cpu"] * 3, TWO_GPUS])
def test_ranks_that_each_send_what_they_own_all_end_with_the_whole(devices: list[str]) -> None:
    tensors = new_tensors(TinyModel(), 1)
    plain = Payload(tensors, 1, BUCKET)
    manifest = plain.manifest
    stream = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for index in range(manifest.bucket_count):
        plain.pack_bucket(index, stream[index * BUCKET :])
    runs = some_runs(manifest, list(range(len(devices))))
    jobs, gave_up = broadcast(devices, runs, tensors)
    assert gave_up is None and [job.error for job in jobs] == [None] * len(devices)
    assert [job.sent for job in jobs] == [manifest.bucket_count] * len(devices)
    assert all(job.order == jobs[0].order for job in jobs) and len({root for _, root in jobs[0].order}) == len(devices)
    for index, root in jobs[0].order:
        part = next(part for part in runs.bucket(index).parts if part.root == root)
        travelled = torch.zeros(runs.buffer_bytes, dtype=torch.uint8)
        for first, last, at in part.pieces:
            travelled[at : at + last - first] = stream[first:last]
        assert jobs[root].fingerprints[index] == fingerprint(travelled[part.at : part.end])


def test_all_hear_the_first_reason_for_which_a_member_gave_up() -> None:
    left = []

    class Fails(Payload):
        def pack_pieces(self, *arguments: Any) -> None:
            if self.kept is None and not left:
                left.append(self)
                raise RuntimeError("out of memory")
            super().pack_pieces(*arguments)

    tensors = new_tensors(TinyModel(), 1)
    jobs, gave_up = broadcast(["cpu"] * 2, some_runs(Payload(tensors, 1, BUCKET).manifest, [0, 1]), tensors, Fails)
    assert gave_up == "rank 1 gave up: out of memory" and all(job.error for job in jobs)


def test_a_publisher_that_is_closed_while_it_packs_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    class Closed(Payload):
        def pack_pieces(self, *arguments: Any) -> None:
            raise RolloutError("transfer: the tensors were released before they were sent", code="closed")

    tensors = new_tensors(TinyModel(), 1)
    jobs, _ = broadcast(["cpu"] * 2, some_runs(Payload(tensors, 1, BUCKET).manifest, [0, 1]), tensors, Closed)
    assert any("were released" in (job.error or "") for job in jobs)
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("firsts", "roots"),
    [([1, 64], [0, 1]), ([0, 65], [0, 1]), ([0, 64, 64], [0, 1, 0]), ([0, 1 << 30], [0, 1]), ([0, 64], [0, 3])],
)
def test_a_table_that_is_none_is_refused(firsts: list[int], roots: list[int]) -> None:
    class Told:
        """In the place of a group: member 0 sends this."""

        def buffer(self, nbytes: int) -> torch.Tensor:
            return torch.from_numpy(np.array([firsts, roots], "<i8").view(np.uint8).reshape(-1))

        def broadcast(self, data: torch.Tensor) -> Any:
            return type("Pending", (), {"wait": lambda self, stop: None})()

    manifest = pack(1, [("a", "float32", (99,))], BUCKET)
    group: BroadcastGroup = Told()  # type: ignore[assignment]
    with pytest.raises(GroupError, match="table"):
        Runs.learn(manifest, group, GroupSeat("g", 1, 3, len(firsts)), threading.Event())


@pytest.mark.parametrize(
    ("roots", "columns"),
    [
        ([-2, 0], [(0, 12, 0, 0), (0, 12, 4, 1)]),  # of no such number
        ([-1, -1], [(0, 12, 0, 0), (0, 12, 4, 1)]),  # twice
        ([-1, 0], [(0, 14, 0, 0), (0, 14, 4, 1)]),  # the tensor is no whole number of rows
        ([-1, 0], [(0, 12, 4, 0), (0, 12, 8, 1)]),  # a row begins before its first column
        ([-1, 0], [(0, 12, 0, 0), (0, 12, 12, 1)]),  # a column without bytes
        ([-1, 0], [(0, 12, 0, 0), (0, 12, 5, 1)]),  # half an element
        ([-1, 0], [(0, 12, 0, 0), (0, 24, 4, 1)]),  # two lengths of a row
        ([-1, 0], [(0, 12, 0, 0), (0, 12, 4, 3)]),  # a member that is none
        ([-1, 0], [(1, 12, 0, 0), (1, 12, 4, 1)]),  # counted from 1
        ([-1, 0], [(0, 0, 0, 0)]),  # rows without bytes
    ],
)
def test_a_table_of_columns_that_is_none_is_refused(roots: list[int], columns: list[tuple[int, ...]]) -> None:
    tables = [np.array([[0, 132], roots], "<i8"), np.array(columns, "<i8")]

    class Told:
        """In the place of a group: member 0 sends these."""

        def buffer(self, nbytes: int) -> torch.Tensor:
            return torch.from_numpy(tables.pop(0).view(np.uint8).reshape(-1))

        def broadcast(self, data: torch.Tensor) -> Any:
            return type("Pending", (), {"wait": lambda self, stop: None})()

    manifest = pack(1, [("a", "float32", (11, 3)), ("b", "float32", (9,))], BUCKET)
    group: BroadcastGroup = Told()  # type: ignore[assignment]
    with pytest.raises(GroupError, match="table"):
        Runs.learn(manifest, group, GroupSeat("g", 1, 3, 2, len(columns)), threading.Event())


def test_auto_tries_groups_first_for_parts_of_several_ranks() -> None:
    assert auto_order(gpu=True, parts=True) == ["nccl", "cuda_ipc", "shm", "zmq"]
    assert auto_order(gpu=True, parts=False) == ["cuda_ipc", "nccl", "shm", "zmq"]
    assert auto_order(gpu=False, parts=True) == auto_order(gpu=False, parts=False) == ["shm", "zmq"]


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_trainer_without_nccl_refuses_it_before_a_worker_is_asked() -> None:
    payload: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(RolloutError, match="no NCCL"):
        NcclSender([]).prepare(payload)
