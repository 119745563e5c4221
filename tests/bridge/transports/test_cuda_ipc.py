"""GPU memory that two processes share: the transport's logic over host memory, and, with a GPU, the memory itself."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import zmq

from rollout.network.access import Access
from rollout.weights.kept_memory import StagedMemory
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.receiver import WeightSocket
from rollout.weights.staging import WeightStaging
from rollout.weights.update_memory import RankUpdateMemory
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves
from tests.support.bridge.parts import enter
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports import bucket_link, cuda_ipc
from trainer_bridge.transports.base import IncomingUpdate, Recipient, TransferRules
from trainer_bridge.transports.bucket_link import ACK, BUCKET, REFUSAL_MAGIC, SHARED_MAGIC, send_buckets
from trainer_bridge.transports.cuda_ipc import CudaIpcMemory, CudaIpcReceiver, CudaIpcSender, OpenSlots
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.zmq_stream import ZmqReceiver
from trainer_bridge.wire.errors import RolloutError, WeightsRejected

SMALL = 64


class HostMemory:
    """What a driver does, for one process: memory, handles of it, and a count of who holds what."""

    def __init__(self) -> None:
        self.allocated: dict[bytes, torch.Tensor] = {}
        self.opened = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.allocated[secrets.token_bytes(64)] = memory
        return memory

    def free(self, memory: torch.Tensor) -> None:
        self.allocated = {key: other for key, other in self.allocated.items() if other is not memory}

    def handle(self, memory: torch.Tensor) -> bytes:
        return next(key for key, other in self.allocated.items() if other is memory)

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        if handle not in self.allocated:
            raise OSError(201, "invalid handle")
        self.opened += 1
        return self.allocated[handle][:nbytes]

    def close(self, memory: torch.Tensor) -> None:
        self.opened -= 1


def shared(
    worker: Worker,
    publisher: WeightPublisher,
    memory: HostMemory | None = None,
    receiver_type: type[CudaIpcReceiver] = CudaIpcReceiver,
    sender_type: type[CudaIpcSender] = CudaIpcSender,
) -> HostMemory:
    """Give both sides the same driver."""
    memory = memory or HostMemory()
    receivers = worker.receiver.receivers
    receivers["cuda_ipc"] = receiver_type(receivers["zmq"], memory)
    publisher.choice.senders["cuda_ipc"] = sender_type(None, memory)
    return memory


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("bucket_bytes", [SMALL, 192, 1 << 20])
def test_buckets_go_through_shared_slots_and_nothing_stays_open(apply: str, bucket_bytes: int) -> None:
    with Worker(apply=apply) as worker:
        with WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=bucket_bytes) as publisher:
            memory = shared(worker, publisher)
            for version in (1, 2, 3):
                tensors = new_tensors(worker.model, version)
                (report,) = publisher.publish(tensors, version).applied(20)
                assert report.transport == "cuda_ipc" and serves(worker.model, tensors)
                buckets = Payload(tensors, version, bucket_bytes).manifest.bucket_count
                assert len(memory.allocated) == max(2, min(16, buckets)) and memory.opened == 0
        assert memory.allocated == {}


def test_a_slot_that_changed_on_its_way_is_found() -> None:
    damage = []

    class Driver(HostMemory):
        def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
            slots.append(super().open(handle, nbytes))
            return slots[-1]

    class Damages(CudaIpcReceiver):
        def take(self, incoming: IncomingUpdate, index: int, check: int) -> bool:
            if index == 4 and damage:
                slots[index % len(slots)][5] ^= damage.pop()
            return super().take(incoming, index, check)

    slots: list[torch.Tensor] = []
    with Worker() as worker:
        with WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=SMALL) as publisher:
            memory = shared(worker, publisher, Driver(), Damages)
            publisher.publish(old := new_tensors(worker.model, 1), 1).applied(20)
            slots.clear()
            damage.append(1)
            with pytest.raises(RolloutError, match="damaged"):
                publisher.publish(new_tensors(worker.model, 2), 2).applied(20)
            assert serves(worker.model, old) and memory.opened == 0
            publisher.publish(new := new_tensors(worker.model, 3), 2).applied(20)
            assert serves(worker.model, new)


def test_slots_of_a_worker_that_was_given_up_are_freed_once_it_was_told() -> None:
    freed_open = []

    class Driver(HostMemory):
        def free(self, memory: torch.Tensor) -> None:
            freed_open.append(self.opened)
            super().free(memory)

    given_up, buckets = threading.Event(), []

    class Hangs(CudaIpcReceiver):
        def take(self, *arguments: Any) -> bool:
            buckets.append(1)
            if len(buckets) == 5:
                assert given_up.wait(20)  # with the slots open
            return super().take(*arguments)

    class GivesUp(CudaIpcSender):
        def transfer(self, *arguments: Any) -> dict[str, Any]:
            try:
                return super().transfer(*arguments)
            finally:
                given_up.set()

    class Patient(WeightPublisher):
        abort_s = 20.0

    with Worker() as worker:
        limits = {"bucket_bytes": SMALL, "stall_s": 1.0}
        with Patient(worker.endpoint, transport="cuda_ipc", **limits) as publisher:
            memory = shared(worker, publisher, Driver(), Hangs, GivesUp)
            with pytest.raises(RolloutError, match="no acknowledgement"):
                publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
            assert memory.opened == 0 and memory.allocated == {} and freed_open == [0] * 16
            publisher._rules = TransferRules(20.0, publisher.closing)
            publisher.publish(tensors := new_tensors(worker.model, 2), 2).applied(20)
            assert serves(worker.model, tensors)


class OnGpu(torch.Tensor):
    """Host memory that says it is a GPU's."""

    is_cuda = True


class ByHand:
    """A receiver without its thread, and a trainer that announces on demand."""

    def __init__(
        self,
        memory: HostMemory | None = None,
        bucket_bytes: int = SMALL,
        receiver_type: type[CudaIpcReceiver] = CudaIpcReceiver,
    ) -> None:
        self.memory = memory or HostMemory()
        self.payload = Payload(new_tensors(TinyModel(), 1), 1, bucket_bytes)
        self.count = self.payload.manifest.bucket_count
        self.sender = CudaIpcSender(None, self.memory)
        options = self.sender.prepare(self.payload)
        self.socket = WeightSocket("tcp://127.0.0.1:*", 1 << 20, Access(None, None, insecure=False))
        self.zmq = ZmqReceiver(self.socket)
        self.receiver = receiver_type(self.zmq, self.memory)
        staging = WeightStaging(StagedMemory({}, "host"))
        staging.open(self.payload.manifest, ManifestFit((), ()))
        self.stream, destination = staging.memory.blocks[0], RankUpdateMemory(staging, self.payload.manifest, staging)
        self.incoming = IncomingUpdate(self.payload.manifest, "cuda_ipc", bytes(16), destination)
        self.incoming.open.set()
        self.receiver.begin(self.incoming, options)
        self.link = zmq.Context.instance().socket(zmq.DEALER)
        self.link.connect(self.socket.endpoint)

    def pack(self, indices: range) -> list[int]:
        return [check for check, _ in self.sender.pack(self.payload, indices, 16)]

    def announce(self, index: int, check: int) -> None:
        """Tell the worker, and have it take the message."""
        self.link.send(BUCKET.pack(SHARED_MAGIC, bytes(16), index, check))
        assert self.socket.zmq_socket.poll(5000)
        assert self.zmq.advance(self.incoming)

    def answers(self, at_most_ms: int = 50) -> list[Any]:
        """What was acknowledged, in order, and refusals as they are."""
        found: list[Any] = []
        while self.link.poll(at_most_ms):
            message = self.link.recv()
            found.append(message if message[:4] == REFUSAL_MAGIC else ACK.unpack(message)[2])
        return found

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *exc: object) -> None:
        self.link.close(0)
        self.receiver.close()
        self.socket.close()
        self.sender.close()


def test_buckets_are_acknowledged_once_they_have_settled_and_not_before() -> None:
    waits, taken = [], []

    class Noted(CudaIpcReceiver):
        def take(self, incoming: IncomingUpdate, index: int, check: int) -> bool:
            taken.append(index)
            return super().take(incoming, index, check)

        def complete(self, incoming: IncomingUpdate, indices: Sequence[int]) -> int:
            waits.append(len(taken))
            return super().complete(incoming, indices)

    with ByHand(receiver_type=Noted) as hand:
        checksums = hand.pack(range(3))
        for index in (0, 2, 1):
            hand.announce(index, checksums[index])
        assert hand.answers() == [] and waits == [] and hand.incoming.arrived_bytes == 0
        assert hand.zmq.advance(hand.incoming)  # no message is there
        assert hand.answers() == [0, 2, 1] and waits == [3] and hand.incoming.arrived_bytes == 3 * SMALL
        assert not hand.zmq.advance(hand.incoming) and waits == [3]


def test_a_bucket_that_is_repeated_before_it_has_settled_is_not_acknowledged_before_either() -> None:
    with ByHand() as hand:
        (check,) = hand.pack(range(1))
        hand.announce(0, check)
        hand.announce(0, check)
        assert hand.answers() == []  # the copy out of the slot may not have run
        hand.zmq.advance(hand.incoming)
        assert hand.answers() == [0, 0]
        hand.announce(0, check)
        assert hand.answers() == [0] and hand.incoming.arrived_bytes == SMALL


@pytest.mark.parametrize("damaged", [False, True])
def test_a_commit_before_all_has_settled_waits_for_it(damaged: bool) -> None:
    with ByHand(bucket_bytes=192) as hand:
        checksums = hand.pack(range(hand.count))
        if damaged:
            hand.receiver._slots[1][5] ^= 1
        for index, check in enumerate(checksums):
            hand.announce(index, check)
        options = {"checksums": bucket_link.checksums_digest(checksums)}
        if damaged:
            with pytest.raises(WeightsRejected, match="bucket 1 arrived damaged"):
                hand.receiver.finish(hand.incoming, options)
            assert hand.answers() == []
        else:
            assert hand.receiver.finish(hand.incoming, options)
            assert hand.answers() == list(range(hand.count))


def test_what_was_taken_is_forgotten_with_its_update() -> None:
    with ByHand() as hand:
        checksums = hand.pack(range(2))
        hand.announce(0, checksums[0])
        hand.receiver.drop(hand.incoming, WeightsRejected("for the test"))
        assert hand.memory.opened == 0
        hand.receiver.begin(hand.incoming, hand.sender.prepare(hand.payload))
        assert not hand.zmq.advance(hand.incoming)  # nothing is to be settled
        hand.announce(1, checksums[1])
        hand.zmq.advance(hand.incoming)
        answers = hand.answers()
        assert answers[1:] == [1] and b"for the test" in answers[0] and hand.incoming.arrived_bytes == SMALL


def test_slots_are_closed_when_copies_out_of_them_have_run_though_taking_one_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = []

    class Driver(HostMemory):
        def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
            return super().open(handle, nbytes).as_subclass(OnGpu)

        def close(self, memory: torch.Tensor) -> None:
            super().close(memory)
            events.append("close")

    class Stream:
        def synchronize(self) -> None:
            events.append("wait")

    def fails(start: int, data: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    with ByHand(Driver()) as hand:
        (check,) = hand.pack(range(1))
        hand.incoming.destination.put = fails
        with pytest.raises(RuntimeError, match="launch failure"):
            hand.announce(0, check)  # its copy is on the stream
        hand.receiver.drop(hand.incoming, WeightsRejected("it failed"))
        assert events == ["wait"] + ["close"] * 16


def test_what_is_verified_are_the_bytes_where_they_have_landed() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=SMALL) as publisher:
        shared(worker, publisher)
        publisher.publish(old := new_tensors(worker.model, 1), 1).applied(20)
        take = worker.staging.take

        def damages(start: int, data: torch.Tensor) -> Any:
            taken = take(start, data)
            if start == 2 * SMALL:
                worker.staging.memory.blocks[0][start + 5] ^= 1
            return taken

        worker.staging.take = damages  # type: ignore[method-assign]
        with pytest.raises(RolloutError, match="bucket 2 arrived damaged"):
            publisher.publish(new_tensors(worker.model, 2), 2).applied(20)
        assert serves(worker.model, old)


class FailsOnce(HostMemory):
    """Once `broken`, one slot of all can be neither closed nor freed."""

    broken = False

    def close(self, memory: torch.Tensor) -> None:
        super().close(memory)
        self._fail()

    def free(self, memory: torch.Tensor) -> None:
        super().free(memory)
        self._fail()

    def reader(self, handle: bytes, nbytes: int) -> Any:
        driver, memory = self, self.open(handle, nbytes)

        class Reader:
            def close(self) -> None:
                driver.close(memory)

        return Reader()

    def _fail(self) -> None:
        failed, self.broken = self.broken, False
        if failed:
            raise OSError(1, "cudaErrorInvalidValue")


def test_a_slot_that_cannot_be_closed_or_freed_keeps_no_other_one() -> None:
    memory = FailsOnce()
    with ByHand(memory) as hand:
        count = memory.opened
        slots = OpenSlots(hand.sender.prepare(hand.payload), torch.device("cpu"), memory)
        assert memory.opened == 2 * count
        for close in (slots.close, hand.receiver.close):
            memory.broken = True
            with pytest.raises(OSError, match="InvalidValue"):
                close()
            close()  # closes nothing twice
        assert memory.opened == 0 and len(memory.allocated) == count
        memory.broken = True
        with pytest.raises(OSError, match="InvalidValue"):
            hand.sender.close()
        assert memory.allocated == {}


def test_a_whole_update_is_applied_though_a_slot_cannot_be_closed_after_it() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=SMALL) as publisher:
        shared(worker, publisher, memory := FailsOnce())
        memory.broken = True
        for version in (1, 2):
            publisher.publish(tensors := new_tensors(worker.model, version), version).applied(20)
            assert serves(worker.model, tensors) and memory.opened == 0 and not memory.broken


def test_a_damaged_bucket_leaves_a_worker_in_place_stale_until_a_whole_update() -> None:
    damaged = threading.Event()

    class Damages(CudaIpcReceiver):
        def take(self, incoming: IncomingUpdate, index: int, check: int) -> bool:
            return super().take(incoming, index, check ^ damaged.is_set())

    with Worker(apply="in_place") as worker:
        with WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=SMALL) as publisher:
            memory = shared(worker, publisher, receiver_type=Damages)
            damaged.set()
            with pytest.raises(RolloutError, match="damaged"):
                publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
            assert worker.status()["state"] == "stale" and memory.opened == 0
            damaged.clear()
            publisher.publish(tensors := new_tensors(worker.model, 2), 2).applied(20)
            assert worker.status()["state"] == "idle" and serves(worker.model, tensors)


@pytest.mark.parametrize("windows", [(16,), (16, 5), (3, 16), (2,), (1,)])
def test_no_slot_is_packed_anew_before_every_worker_has_acknowledged_it(windows: tuple[int, ...]) -> None:
    links: list[Any] = []

    class SlowLink(bucket_link.Link):
        """One bucket is acknowledged in each look."""

        sent = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            links.append(self)
            self.socket.close(0)
            self.socket = zmq.Context.instance().socket(zmq.ROUTER)  # a message waits in it, so no look waits
            self._peer = zmq.Context.instance().socket(zmq.DEALER)
            self._peer.connect(f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}")
            self._peer.send(b"")

        def close(self) -> None:
            self._peer.close(0)
            super().close()

        def send(self, index: int, check: int, data: memoryview | None) -> None:
            assert index == self.sent and check == 7 * index
            self.sent += 1

        def read(self) -> None:
            self.acknowledged = min(self.acknowledged + 1, self.sent)

    payload = Payload({"x": torch.zeros(50 * SMALL // 2, dtype=torch.bfloat16)}, 1, SMALL)
    packed: list[int] = []
    least = min(windows)

    def pack(indices: range, slots: int) -> list[tuple[int, memoryview | None]]:
        assert slots == least and 1 <= len(indices) <= max(1, slots // 2)
        assert all(link.acknowledged > index - slots for link in links for index in indices)
        packed.extend(indices)
        return [(7 * index, None) for index in indices]

    grants = [{"endpoint": "tcp://127.0.0.1:9", "window": window} for window in windows]
    recipients = [Recipient("tcp://127.0.0.1:9", bytes(16), grant) for grant in grants]
    rules = TransferRules(20.0, threading.Event())
    options, left = send_buckets(payload, recipients, rules, None, pack, 16, together=16, link_type=SlowLink)
    assert packed == list(range(50)) and not left and payload.wait_released(0)
    assert options == {"checksums": bucket_link.checksums_digest([7 * index for index in packed])}
    assert all(link.acknowledged == 50 for link in links)


class Full(HostMemory):
    """A GPU with room for a given number of slots."""

    room = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        if len(self.allocated) >= self.room:
            raise OSError(2, "out of memory")
        return super().allocate(nbytes)


@pytest.mark.parametrize(("room", "slots"), [(1, 0), (3, 2), (5, 4), (15, 8)])
def test_a_gpu_that_is_nearly_full_is_left_as_it_was_or_has_fewer_slots(room: int, slots: int) -> None:
    memory = Full()
    memory.room = room
    sender, payload = CudaIpcSender(None, memory), Payload(new_tensors(TinyModel(), 1), 1, SMALL)
    if slots:
        assert len(sender.prepare(payload)["handles"]) == slots
    else:
        with pytest.raises(RolloutError, match="out of memory"):
            sender.prepare(payload)
    assert len(memory.allocated) == slots
    sender.close()
    assert memory.allocated == {}


def test_slots_that_no_worker_opened_are_given_back_after_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto` a worker of another host refuses them, and is never asked again."""

    def refused(handle: bytes, nbytes: int) -> torch.Tensor:
        raise OSError(201, "invalid handle")

    enter(monkeypatch, "cuda_ipc", gpu_to_gpu=False)
    enter(monkeypatch, "shm", auto=None)
    with Worker() as worker, WeightPublisher(worker.endpoint, bucket_bytes=SMALL) as publisher:
        memory = shared(worker, publisher)
        memory.open = refused  # type: ignore[method-assign]
        (report,) = publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
        assert report.transport == "zmq" and memory.allocated == {}


@pytest.mark.parametrize("broken", [False, True])
def test_tensors_are_given_back_when_copies_that_a_failed_sender_began_have_run(broken: bool) -> None:
    payload = Payload(new_tensors(TinyModel(), 1), 1, SMALL)
    events = []

    class Stream:
        device = torch.device("cpu")

        def synchronize(self) -> None:
            events.append("wait")
            if broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    payload._stream = Stream()  # type: ignore[assignment]
    payload.on_release = lambda: events.append("free")
    payload.start_bucket(0, torch.empty(SMALL, dtype=torch.uint8))
    assert events == []
    payload.release()
    assert events == ["wait", "free"]


def test_fingerprints_are_taken_and_waited_for_behind_the_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the payload's stream: on another one they would be of what the slots held before."""
    inside, seen = [], []

    @contextlib.contextmanager
    def on_side_stream() -> Iterator[None]:
        inside.append(1)
        yield
        inside.pop()

    for name in ("fingerprint", "_low_words"):
        plain = getattr(cuda_ipc, name)
        noted = functools.partial(
            lambda name, plain, data: seen.append((name, len(inside))) or plain(data), name, plain
        )
        monkeypatch.setattr(cuda_ipc, name, noted)
    payload, sender = Payload(new_tensors(TinyModel(), 1), 1, SMALL), CudaIpcSender(None, HostMemory())
    sender.prepare(payload)
    payload.on_side_stream = on_side_stream  # type: ignore[method-assign]
    sender.pack(payload, range(2), 16)
    assert seen == [("fingerprint", 1), ("fingerprint", 1), ("_low_words", 1)]
    sender.close()


def test_two_workers_share_the_slots() -> None:
    with Worker() as one, Worker() as other:
        with WeightPublisher([one.endpoint, other.endpoint], transport="cuda_ipc", bucket_bytes=SMALL) as publisher:
            memory = shared(one, publisher)
            receivers = other.receiver.receivers
            receivers["cuda_ipc"] = CudaIpcReceiver(receivers["zmq"], memory)
            for version in (1, 2):
                publisher.publish(tensors := new_tensors(one.model, version), version).applied(20)
                assert serves(one.model, tensors) and serves(other.model, tensors) and memory.opened == 0


def test_memory_of_another_gpu_is_refused_and_closed() -> None:
    """Torch would make a copy of it, which never changes."""
    memory, calls = CudaIpcMemory.__new__(CudaIpcMemory), []

    def call(name: str, *arguments: Any) -> None:
        calls.append(name)
        if name == "cudaIpcOpenMemHandle":
            arguments[0]._obj.value = 0x1000

    memory._call = call  # type: ignore[method-assign]
    memory._tensor = lambda pointer, nbytes: torch.zeros(nbytes, dtype=torch.uint8)  # type: ignore[method-assign]
    with pytest.raises(OSError, match="another GPU"):
        memory.open(bytes(64), 16)
    assert calls == ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"boot_id": "x"}, "options"),
        ({"handles": []}, "options.handles"),
        ({"handles": [5]}, "options.handles"),
        ({"handles": ["zz"]}, "options.handles"),
        ({"handles": ["00"]}, "options.handles"),
        ({"handles": ["00" * 64]}, "options"),
        ({"slot_bytes": 1}, "options"),
        ({"slot_bytes": 1 << 40}, "options"),
        ({"more": 1}, "options"),
    ],
)
def test_broken_options_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    payload, memory = Payload(new_tensors(TinyModel(), 1), 1, SMALL), HostMemory()
    options = CudaIpcSender(None, memory).prepare(payload)
    with Worker() as worker:
        receivers = worker.receiver.receivers
        receivers["cuda_ipc"] = CudaIpcReceiver(receivers["zmq"], memory)
        begin = {"action": "begin", "version": 1, "manifest": payload.manifest.to_wire(), "transport": "cuda_ipc"}
        reply = worker.control(**begin, options={**options, **changes})
        assert (reply["op"], reply["code"], reply["field"]) == ("error", "bad_request", field), reply
        assert memory.opened == 0 and worker.control(**begin, options=options)["op"] == "ok"


def test_tensors_on_the_cpu_have_no_gpu_memory_to_share() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="cuda_ipc") as publisher:
        with pytest.raises(RolloutError, match="prepare: no GPU memory.*another transport"):
            publisher.publish(new_tensors(worker.model, 1), 1).applied(20)


PUBLISH = """
import sys, torch
from tests.support.bridge.harness import TinyModel, new_tensors
from trainer_bridge.publish.publisher import WeightPublisher
with WeightPublisher(sys.argv[1], bucket_bytes=192) as publisher:
    for version in (1, 2, 3):
        tensors = {name: tensor.cuda() for name, tensor in new_tensors(TinyModel(), version).items()}
        (report,) = publisher.publish(tensors, version).applied(60)
        assert report.transport == "cuda_ipc", report
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_another_process_publishes_from_the_same_gpu(apply: str) -> None:
    with Worker(model=TinyModel(device="cuda"), apply=apply) as worker:
        subprocess.run(
            [sys.executable, "-c", PUBLISH, worker.endpoint],
            check=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        torch.cuda.synchronize()
        expected = {name: tensor.cuda() for name, tensor in new_tensors(TinyModel(), 3).items()}
        assert serves(worker.model, expected)
