"""Updates of a tensor group: every rank keeps its part, all of them swap or none does. Followers are threads here."""

import errno
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.models.cut import Cut
from rollout.weights.delta_staging import put_kept
from rollout.weights.kept_layout import cut_rows, in_words
from rollout.weights.kept_memory import StagedMemory
from rollout.weights.parameter_map import ParameterMap
from rollout.weights.staging import WeightStaging
from tests.support.bridge.fault_client import FaultServer, ended_or_stopped, idle_s, run_fault
from tests.support.bridge.file_memory import FileMemory, share_from
from tests.support.bridge.harness import TinyModel, new_tensors, wait_for
from tests.support.bridge.raw_publisher import RawPublisher, assert_rejected
from tests.support.bridge.tensor_group import GroupWorker
from tests.support.kernels.grids import checkered, nightly, squared
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError, RolloutTimeout
from trainer_bridge.wire.manifest import DTYPE_BYTES, checksum, pack

TRANSPORTS = ["zmq", "shm", "disk", "nccl", "cuda_ipc"]  # gloo, and files in the place of a GPU's memory
TRANSPORTS_BY_RANK_0 = [transport for transport in TRANSPORTS if transport != "disk"]
SMALL = 64


def tensors_of(seed: int, **how: Any) -> dict[str, torch.Tensor]:
    return new_tensors(TinyModel(), seed, **how)


def good(
    worker: GroupWorker, transport: str, folder: Path, version: int, bucket_bytes: int = SMALL, **how: Any
) -> dict[str, torch.Tensor]:
    """A publish from start to end."""
    tensors, where = tensors_of(version, **how), str(folder)
    with WeightPublisher(worker.endpoint, transport=transport, folder=where, bucket_bytes=bucket_bytes) as publisher:
        share_from(publisher, folder)
        (report,) = publisher.publish(tensors, version).applied(60)
    assert report.version == version and report.transport == transport
    return tensors


def waits(worker: GroupWorker, transport: str) -> bool:
    """Whether an update has come so far while a rank carries out no order: of files each rank reads its own pieces."""
    incoming = worker.status()["incoming"]
    return incoming is not None and (transport == "disk" or incoming["arrived_bytes"] >= SMALL)


# --- what a rank keeps ------------------------------------------------------------------------------------------------


def random_cut(draws: random.Random, shape: tuple[int, ...]) -> Cut | None:
    dim = draws.randrange(len(shape))
    marks = sorted(draws.sample(range(shape[dim] + 1), min(shape[dim] + 1, draws.choice([2, 2, 4]))))
    ranges = tuple(zip(marks[::2], marks[1::2], strict=False))
    return draws.choice([None, Cut(dim, shape[dim], ranges)])


@pytest.mark.parametrize("seed", [*range(40), *nightly(*range(40, 2000))])
def test_pieces_of_a_tensor_make_the_part_that_a_cut_keeps(seed: int) -> None:
    draws = random.Random(seed)
    shape = tuple(draws.randrange(1, 9) for _ in range(draws.randrange(1, 4)))
    cut = random_cut(draws, shape)
    itemsize = draws.choice([2, 4])
    whole = np.random.default_rng(seed).integers(0, 255, (*shape, itemsize)).astype(np.uint8)
    wanted = whole
    if cut is not None:
        wanted = whole.take([i for begin, end in cut.ranges for i in range(begin, end)], cut.dim)
    source, target = whole.reshape(-1), np.full(wanted.size + 8, 255, np.uint8)
    ends = sorted({whole.size, *(itemsize * draws.randrange(whole.size // itemsize) for _ in range(4))})
    pieces = list(zip([0, *ends], ends, strict=False))
    draws.shuffle(pieces)
    for lo, hi in pieces:
        for first, source_step, (start, step, width, times) in cut_rows(shape, itemsize, cut, lo, hi):
            for row in range(times):
                begin, at = first + row * source_step, start + row * step
                assert lo <= begin and begin + width <= hi
                assert (target[at : at + width] == 255).all(), "each byte is kept once"
                target[at : at + width] = source[begin : begin + width]
    assert np.array_equal(target[: wanted.size], wanted.reshape(-1))
    assert (target[wanted.size :] == 255).all()


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("seed", range(30))
def test_changed_words_of_any_cut_reach_the_kept_part(dtype: str, seed: int) -> None:
    draws, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = tuple(2 * draws.randrange(1, 5) for _ in range(draws.choice([1, 2, 3])))
    cut = random_cut(draws, shape)
    (entry,) = pack(1, [("a", dtype, shape)], 64).tensors

    def kept(whole: torch.Tensor) -> torch.Tensor:
        entries = whole.view(*shape, DTYPE_BYTES[dtype])
        return (entries if cut is None else cut.take(entries)).contiguous().view(-1)

    old, new = (torch.randint(256, (entry.nbytes,), dtype=torch.uint8, generator=generator) for _ in range(2))
    index = (torch.rand(entry.nbytes // 2, generator=generator) < 0.3).nonzero()[:, 0]
    values = new.view(torch.int16)[index]
    memory = kept(old).clone()
    old.view(torch.int16)[index] = values
    if in_words(entry, cut):
        put_kept(entry, cut, memory, index, values)
        assert torch.equal(memory, kept(old))
    else:
        assert dtype == "float8_e4m3fn"


@pytest.mark.parametrize(("size", "stacked", "dtype"), squared([2, 3], [False, True], [None, torch.float32]))
def test_every_rank_keeps_its_part(tmp_path: Path, size: int, stacked: bool, dtype: torch.dtype | None) -> None:
    with GroupWorker(size) as worker:
        assert worker.serve(good(worker, "zmq", tmp_path, 1, stacked=stacked, dtype=dtype))
        assert worker.serve(good(worker, "zmq", tmp_path, 2, stacked=not stacked))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_update_by_every_transport_reaches_all_ranks(tmp_path: Path, transport: str) -> None:
    with GroupWorker(2, relay_bytes=1 << 10, shared=tmp_path) as worker:
        for version in (1, 2, 3):
            assert worker.serve(good(worker, transport, tmp_path, version))
        assert [update.version for update in worker.updates] == [1, 2, 3]


def test_an_update_copies_a_rank_s_bytes_in_few_pieces(tmp_path: Path) -> None:
    """What lies side by side in the parameters does so in the staging memory: a swap is a few large copies."""
    with GroupWorker(2) as worker:
        tensors = tensors_of(1)
        good(worker, "zmq", tmp_path, 1)
        shard = worker.shards[0]
        staging = WeightStaging(StagedMemory(shard.views, shard=True))
        payload = RawPublisher(worker, tensors, 2)
        fit = ParameterMap(shard.views).check(payload.manifest)
        staging.open(payload.manifest, fit)
        copies = staging.memory.copies()
        assert sum(view.numel() for view, _ in copies) == sum(p.numel() for p in shard.parameters.values())
        assert len(copies) == len(shard.parameters), "one for each parameter"


# --- bounded memory ---------------------------------------------------------------------------------------------------


def test_nothing_is_allocated_before_the_first_update_and_the_relay_stays_small(tmp_path: Path) -> None:
    with GroupWorker(2, relay_bytes=4 * SMALL, piece_bytes=SMALL) as worker:
        assert worker.relayed.size == 0
        assert worker.serve(good(worker, "zmq", tmp_path, 1))
        assert worker.relayed.size == 4 * SMALL


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_transfer_waits_for_the_slowest_rank(tmp_path: Path, transport: str) -> None:
    with GroupWorker(2, relay_bytes=4 * SMALL, piece_bytes=SMALL, shared=tmp_path) as worker:
        worker.reading.clear()
        tensors = tensors_of(1)
        publisher = WeightPublisher(worker.endpoint, transport=transport, folder=str(tmp_path), bucket_bytes=SMALL)
        with publisher:
            share_from(publisher, tmp_path)
            handle = publisher.publish(tensors, 1)
            wait_for(lambda: waits(worker, transport), "the first pieces")
            with pytest.raises(RolloutTimeout):
                handle.applied(0.3)
            assert worker.status()["incoming"]["arrived_bytes"] <= 4 * SMALL
            worker.reading.set()
            (report,) = handle.applied(60)
        assert report.version == 1 and worker.serve(tensors)


@pytest.mark.parametrize("block_bytes", [1, 64, 256])
def test_blocks_of_staging_memory_do_not_show(tmp_path: Path, block_bytes: int) -> None:
    with GroupWorker(2, block_bytes=block_bytes) as worker:
        for version, stacked in ((1, False), (2, True), (3, False)):
            assert worker.serve(good(worker, "zmq", tmp_path, version, stacked=stacked))


# --- from device to device, over files in the place of a GPU's memory ------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_what_comes_on_a_device_goes_through_no_host_memory(tmp_path: Path, size: int) -> None:
    peers = [FileMemory(tmp_path) for _ in range(size)]
    with GroupWorker(size, relay_bytes=256, shared=tmp_path, peers=peers) as worker:
        for version in (1, 2):
            assert worker.serve(good(worker, "cuda_ipc", tmp_path, version))
        assert worker.relayed.size == 0
        assert worker.serve(good(worker, "zmq", tmp_path, 3))
        assert worker.relayed.size > 0
        assert worker.serve(good(worker, "cuda_ipc", tmp_path, 4))


def test_a_sleep_gives_the_memory_on_the_device_back_and_the_next_update_takes_some_again(tmp_path: Path) -> None:
    peers = [FileMemory(tmp_path) for _ in range(3)]
    allocated = lambda: len(list(tmp_path.iterdir())) - beside  # noqa: E731 -- files that stand for memory
    with GroupWorker(3, relay_bytes=256, shared=tmp_path, peers=peers) as worker:
        beside = len(list(tmp_path.iterdir()))
        for version in (1, 2, 3):
            assert worker.serve(good(worker, "cuda_ipc", tmp_path, version))
            assert allocated() == 1 and [peer.readers for peer in peers[1:]] == [1, 1]
            worker.orders.unmap_relay()
            wait_for(lambda: [peer.readers for peer in peers[1:]] == [0, 0], "the followers")
            wait_for(lambda: worker.orders.free_relay() > 0, "their reports")
            assert allocated() == 0 and worker.orders.free_relay() == 0
        assert worker.relayed.size == 0, "no piece went through the host"


def test_memory_that_has_become_too_small_is_given_back(tmp_path: Path) -> None:
    peers = [FileMemory(tmp_path) for _ in range(2)]
    with GroupWorker(2, relay_bytes=256, shared=tmp_path, peers=peers) as worker:
        beside = len(list(tmp_path.iterdir()))
        for version, bucket_bytes in ((1, 64), (2, 256), (3, 512)):
            assert worker.serve(good(worker, "cuda_ipc", tmp_path, version, bucket_bytes=bucket_bytes))
            assert len(list(tmp_path.iterdir())) - beside == 1 and peers[1].readers == 1


class Unreadable(FileMemory):
    def reader(self, handle: bytes, nbytes: int) -> Any:
        raise OSError(217, "cudaErrorPeerAccessUnsupported")


class Full(FileMemory):
    def allocate(self, nbytes: int) -> torch.Tensor:
        raise OSError(2, "cudaErrorMemoryAllocation")


@pytest.mark.parametrize("failing", ["unreadable", "full", "no gpu"])
def test_a_device_that_cannot_be_read_leaves_the_way_through_the_host(tmp_path: Path, failing: str) -> None:
    plain = FileMemory(tmp_path)
    last = {"unreadable": Unreadable(tmp_path), "full": plain, "no gpu": None}[failing]
    peers = [Full(tmp_path) if failing == "full" else plain, plain, last]
    with GroupWorker(3, relay_bytes=256, shared=tmp_path, peers=peers) as worker:
        for version in (1, 2):
            assert worker.serve(good(worker, "cuda_ipc", tmp_path, version))
        assert worker.relayed.size > 0


# --- in place ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_update_in_place_is_written_by_every_rank(tmp_path: Path, transport: str) -> None:
    with GroupWorker(2, relay_bytes=512, apply="in_place", shared=tmp_path) as worker:
        assert worker.receiver.summary()["staging"] is None
        for version, how in enumerate(({}, {"stacked": True}, {"dtype": torch.float32}), 1):
            assert worker.serve(good(worker, transport, tmp_path, version, **how))
            assert worker.engine_gate.hold == "free" and not worker.engine_gate.stale


@pytest.mark.parametrize("end", ["aborted", "damaged", "tied"])
def test_an_update_in_place_that_breaks_leaves_the_worker_stale_until_a_whole_one_comes(
    tmp_path: Path, end: str
) -> None:
    with GroupWorker(2, relay_bytes=512, apply="in_place") as worker:
        good(worker, "zmq", tmp_path, 1)
        tensors = tensors_of(2)
        if end == "tied":
            tensors["lm_head.weight"] = tensors["embed.weight"].clone()
            tensors["lm_head.weight"][10, 0] += 1  # of the last rank
        raw = RawPublisher(worker, tensors, 2)
        assert raw.begin()["op"] == "ok"
        if end == "tied":
            raw.send_all()
            assert_rejected(raw.commit(), "are one parameter")
        else:
            for index in range(3):
                raw.send(index)
                assert raw.answer() == (b"WAK1", index)
        if end == "damaged":
            raw.send(3, bytes(len(raw.buckets[3])), check=1)
            assert raw.answer()[0] == b"WNO1"
        elif end == "aborted":
            assert worker.control(action="abort", token=raw.token.hex())["op"] == "ok"
        wait_for(lambda: worker.engine_gate.stale, "the end of the update")
        assert worker.receiver.version == 1
        whole = good(worker, "zmq", tmp_path, 2)  # the same version again
        assert worker.serve(whole) and not worker.engine_gate.stale


# --- all ranks or none ------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[GroupWorker]:
    with GroupWorker(2, relay_bytes=512) as worker:
        yield worker


def test_damage_is_found_before_any_rank_swaps(group: GroupWorker, tmp_path: Path) -> None:
    old = good(group, "zmq", tmp_path, 1)
    raw = RawPublisher(group, tensors_of(2), 2)
    raw.begin()
    for index in range(len(raw.buckets) - 1):
        raw.send(index)
        raw.answer()
    damaged = bytearray(raw.buckets[-1])
    damaged[0] ^= 1
    raw.send(len(raw.buckets) - 1, bytes(damaged), check=checksum(raw.buckets[-1]))
    assert raw.answer()[0] == b"WNO1"
    assert_rejected(raw.commit(), "damaged")
    assert group.serve(old) and group.receiver.version == 1
    assert group.serve(good(group, "zmq", tmp_path, 3))


def test_a_digest_that_does_not_match_leaves_all_ranks_at_the_old_version(group: GroupWorker, tmp_path: Path) -> None:
    old = good(group, "zmq", tmp_path, 1)
    raw = RawPublisher(group, tensors_of(2), 2)
    raw.begin()
    raw.send_all()
    assert_rejected(raw.commit(options={"checksums": "0" * 32}), "differs")
    assert group.serve(old) and group.orders.prepared == 1
    assert group.serve(good(group, "zmq", tmp_path, 3))


def test_tied_tensors_that_differ_on_one_rank_only_are_refused(group: GroupWorker, tmp_path: Path) -> None:
    old = good(group, "zmq", tmp_path, 1)
    tensors = tensors_of(2)
    tensors["lm_head.weight"] = tensors["embed.weight"].clone()
    for row, version in ((0, 2), (10, 3)):  # of rank 0, of rank 1
        changed = tensors | {"lm_head.weight": tensors["lm_head.weight"].clone()}
        changed["lm_head.weight"][row, 0] += 1
        with WeightPublisher(group.endpoint) as publisher, pytest.raises(Exception, match="are one parameter"):
            publisher.publish(changed, version).applied(60)
        assert group.serve(old)
    with WeightPublisher(group.endpoint) as publisher:
        publisher.publish(tensors, 4).applied(60)
    assert group.serve(tensors)


def test_a_rank_that_cannot_take_an_update_keeps_all_from_it(group: GroupWorker, tmp_path: Path) -> None:
    old = good(group, "zmq", tmp_path, 1)
    staging = group.stagings[1]
    take, calls = staging.take, []

    def fails_once(start: int, data: torch.Tensor) -> Any:
        calls.append(start)
        if len(calls) == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return take(start, data)

    staging.take = fails_once  # type: ignore[method-assign]
    with WeightPublisher(group.endpoint, bucket_bytes=SMALL) as publisher:
        with pytest.raises(Exception, match="rank 1: RuntimeError: CUDA error"):
            publisher.publish(tensors_of(2), 2).applied(60)
        assert group.serve(old)
        new = tensors_of(3)
        publisher.publish(new, 3).applied(60)
    assert group.serve(new)


def test_no_byte_of_the_next_update_comes_while_a_rank_still_copies_the_one_before(group: GroupWorker) -> None:
    tensors, late = tensors_of(1), RawPublisher(group, tensors_of(2), 2)
    group.swapping.clear()
    raw = RawPublisher(group, tensors, 1)
    assert raw.begin()["op"] == "ok"
    raw.send_all()
    assert raw.commit()["op"] == "ok" and group.receiver.version == 1  # rank 0 has swapped

    def send() -> None:
        assert late.begin()["op"] == "ok"
        late.send_all()

    sends = threading.Thread(target=send, daemon=True)
    sends.start()
    sends.join(0.3)
    waited = sends.is_alive() and group.status()["incoming"] is None
    group.swapping.set()
    sends.join(20)
    assert not sends.is_alive()
    assert group.serve(tensors) and waited
    assert late.commit()["op"] == "ok" and group.serve(tensors_of(2))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_update_that_waits_for_a_hung_rank_can_be_dropped(tmp_path: Path, transport: str) -> None:
    """Whichever thread of the worker waits for memory to pass a piece on, the receiver's goes on."""
    with GroupWorker(2, relay_bytes=4 * SMALL, piece_bytes=SMALL, shared=tmp_path, idle_s=600.0) as worker:
        worker.reading.clear()
        publisher = WeightPublisher(worker.endpoint, transport=transport, folder=str(tmp_path), bucket_bytes=SMALL)
        share_from(publisher, tmp_path)
        publisher.publish(tensors_of(1), 1)
        wait_for(lambda: waits(worker, transport), "the first pieces")
        publisher.close()
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        worker.reading.set()
        assert worker.serve(good(worker, transport, tmp_path, 2))


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
def test_a_hung_rank_delays_the_answer_to_an_abort_and_no_other_one(tmp_path: Path, transport: str) -> None:
    """It may have the publisher's memory open, which is freed after that answer. The receiver's thread goes on."""
    peers = [FileMemory(tmp_path) for _ in range(2)]
    with GroupWorker(2, shared=tmp_path, peers=peers) as worker:
        publisher = WeightPublisher(worker.endpoint, transport=transport, bucket_bytes=SMALL)
        share_from(publisher, tmp_path)
        for version in (1, 2, 3):  # after the first one, each rank reads its part
            publisher.publish(middle := tensors_of(version), version).applied(60)
        worker.reading.clear()
        publisher.publish(tensors_of(4), 4)
        wait_for(lambda: worker.status()["state"] == "receiving", "the begin")
        publisher.close()  # it waits a second for the answer
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        late = worker.ask(action="abort", token="0" * 32)
        assert worker.status()["version"] == 3 and late.empty()
        worker.reading.set()
        assert late.get(timeout=60)["code"] == "not_found"
        assert worker.serve(middle) and peers[1].readers == (transport == "cuda_ipc"), "of the relay alone"
        assert worker.serve(good(worker, transport, tmp_path, 5))


def test_the_ranks_hear_of_no_update_that_was_dropped_before_they_heard_of_it(tmp_path: Path) -> None:
    """A member of an nccl group asks for room in a thread of its own, perhaps once more after the drop."""
    with GroupWorker(2) as worker:
        good(worker, "zmq", tmp_path, 1)
        opens, opened = worker.memories.open, []
        worker.memories.open = lambda *how: opened.append(opens(*how)) or opened[-1]  # type: ignore[method-assign]
        worker.reading.clear()
        raws = [RawPublisher(worker, tensors_of(version), version) for version in (2, 3, 4)]
        assert [raw.begin()["op"] for raw in raws] == ["ok"] * 3
        worker.reading.set()
        for index in range(len(raws[-1].buckets)):
            raws[-1].send(index)
            assert raws[-1].answer() == (b"WAK1", index)
            assert not opened[1].wait_for_room()
        assert raws[-1].commit()["version"] == 4
        assert worker.serve(tensors_of(4))


def test_a_rank_closes_what_was_offered_though_dropping_the_update_fails_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("unspecified launch failure")

    peers = [FileMemory(tmp_path) for _ in range(2)]
    with GroupWorker(2, shared=tmp_path, peers=peers) as worker:
        publisher = WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=SMALL)
        share_from(publisher, tmp_path)
        for version in (1, 2, 3):  # after the first one, each rank reads its part
            publisher.publish(middle := tensors_of(version), version).applied(60)
        worker.reading.clear()
        publisher.publish(tensors_of(4), 4)
        wait_for(lambda: worker.status()["state"] == "receiving", "the begin")
        with monkeypatch.context() as patch:
            patch.setattr(worker.staging, "abandon", fails)
            worker.reading.set()
            publisher.close()
            wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        assert worker.ask(action="abort", token="0" * 32).get(timeout=60)["code"] == "not_found"
        assert peers[1].readers == 1, "of the relay alone"
        assert worker.serve(middle)


@pytest.mark.parametrize("transport", ["shm", *nightly("zmq", "nccl", "cuda_ipc", "disk")])
@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        ("transfer", "kill"),
        ("transfer", "corrupt"),
        *nightly(("begin", "kill"), ("commit", "kill"), ("transfer", "stop")),
    ],
)
def test_a_trainer_that_comes_to_grief_leaves_all_ranks_as_they_were(
    faults: FaultServer, tmp_path: Path, transport: str, phase: str, fault: str
) -> None:
    with GroupWorker(2, relay_bytes=512, idle_s=idle_s(transport), shared=tmp_path) as worker:
        old = good(worker, transport, tmp_path, 1)
        run_fault(faults, worker, transport, tmp_path, phase, fault)
        assert worker.serve(old) and worker.receiver.version == 1
        assert worker.serve(good(worker, transport, tmp_path, 2))


def test_an_update_without_memory_to_pass_it_on_is_refused_with_the_reason(
    group: GroupWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tensors = tensors_of(1)
    with WeightPublisher(group.endpoint, bucket_bytes=SMALL) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", no_space)
            with pytest.raises(RolloutError, match="the ranks cannot share .* raise the memory of the container"):
                publisher.publish(tensors, 1).applied(60)
        assert group.receiver.version == 0 and group.status()["state"] == "idle"
        publisher.publish(tensors, 1).applied(60)
    assert group.serve(tensors)


@pytest.mark.parametrize(
    ("transport", "phase"),
    [*checkered(TRANSPORTS_BY_RANK_0, ["reading", "gate"]), ("disk", "gate")],  # files are read by each rank
)
def test_a_committed_update_comes_into_use_without_its_trainer(
    faults: FaultServer, tmp_path: Path, transport: str, phase: str
) -> None:
    """The trainer is killed while another rank has not planned its copies, or while all wait for the swap."""
    with GroupWorker(2, shared=tmp_path) as worker:
        old, new = good(worker, transport, tmp_path, 1), tensors_of(2)
        stands: threading.Event = getattr(worker, phase)
        state = {"reading": "receiving", "gate": "ready"}[phase]
        stands.clear()
        order = {"endpoint": worker.endpoint, "transport": transport, "folder": str(tmp_path), "version": 2, "seed": 2}
        with faults.child(role="publisher", phase="none", fault="none", device="cpu", **order) as pid:
            wait_for(lambda: worker.status()["state"] == state, f"the update to be {state}")
            wait_for(lambda: worker.orders.prepared == 2, "the commit")
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: ended_or_stopped(pid), "the end of the trainer")
        assert worker.receiver.version == 1 and all(shard.serves(old) for shard in worker.shards)
        stands.set()
        wait_for(lambda: worker.receiver.version == 2, "the swap")
        assert worker.serve(new)
        assert worker.serve(good(worker, transport, tmp_path, 3))


@pytest.mark.parametrize("seed", [0, 1, *nightly(*range(2, 60))])
def test_updates_that_end_anywhere_change_all_ranks_or_none(tmp_path: Path, seed: int) -> None:
    """Buckets in any order; a sender that leaves, damages one, commits too early, or is overtaken by another."""
    draws = random.Random(seed)
    with GroupWorker(draws.choice([2, 3]), relay_bytes=draws.choice([256, 512, 1 << 16])) as worker:
        served = good(worker, "zmq", tmp_path, 1)
        for version in range(2, 14):
            tensors = tensors_of(100 * seed + version, stacked=draws.random() < 0.3)
            raw = RawPublisher(worker, tensors, version)
            assert raw.begin()["op"] == "ok"
            order = list(range(len(raw.buckets)))
            draws.shuffle(order)
            end = draws.choice(["applied", "leaves", "damage", "early", "digest", "overtaken"])
            most = len(order) if end in ("applied", "digest") else draws.randrange(len(order))
            for index in order[:most]:
                raw.send(index)
                assert raw.answer() == (b"WAK1", index)
            if end == "damage":
                raw.send(order[most], bytes(len(raw.buckets[order[most]])), check=1)
                assert raw.answer()[0] == b"WNO1"
            elif end == "early":
                assert_rejected(raw.commit(), "missing at commit")
            elif end == "digest":
                assert_rejected(raw.commit(options={"checksums": "f" * 32}), "differs")
            elif end == "applied":
                assert raw.commit()["op"] == "ok"
                served = tensors
            elif end == "leaves":
                assert worker.control(action="abort", token=raw.token.hex())["op"] == "ok"
            raw.close()
            if end != "overtaken":
                assert worker.serve(served)
        assert worker.serve(served)
        assert worker.serve(good(worker, "zmq", tmp_path, 50))
