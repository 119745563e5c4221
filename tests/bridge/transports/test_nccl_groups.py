"""Process groups of an update: what breaks is noticed, nothing hangs for ever, and no thread outlives its worker."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.parts import NCCL_FIRST, enter_nccl, group_with, no_groups, packing
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.base import Recipient, TransferRules
from trainer_bridge.transports.nccl import member as group_member
from trainer_bridge.transports.nccl.member import NcclMember
from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup, GroupError, GroupSeat, StoreServer, connect
from trainer_bridge.transports.nccl.transport import NcclSender
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.address import LOOPBACK
from trainer_bridge.wire.errors import RolloutError

SMALL = 64
CPU = torch.device("cpu")


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Worker, NcclSender, str]]:
    """A worker whose thread waits for its place in a group, the publisher of that, and the token of the update."""
    asleep = threading.Event()

    def sleep(_: float) -> None:
        asleep.set()
        time.sleep(0.3)  # it takes a while to look up

    monkeypatch.setattr(group_member, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    payload = Payload(new_tensors(TinyModel(), 1), 1, SMALL)
    with Worker() as worker:
        sender = NcclSender([worker.endpoint])
        begin = {"action": "begin", "version": 1, "manifest": payload.manifest.to_wire(), "transport": "nccl"}
        begun = worker.control(**begin, options=sender.prepare(payload))
        assert begun["op"] == "ok"
        assert asleep.wait(20) and worker.status()["state"] == "receiving"
        yield worker, sender, begun["token"]
        sender.close()


def test_a_worker_notices_that_its_group_is_gone_long_before_it_would_miss_the_data(waiting) -> None:
    worker, sender, token = waiting
    sender.close()  # the publisher died: its store is gone
    wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
    told = worker.control(action="commit", token=token, options={})
    assert told["code"] == "weights_rejected" and "the group with the publisher broke" in told["message"]


def test_a_worker_that_closes_leaves_no_thread_of_a_group_behind(waiting) -> None:
    worker, *_ = waiting
    again = Payload(new_tensors(TinyModel(), 2), 2, SMALL)
    begin = {"action": "begin", "version": 2, "manifest": again.manifest.to_wire(), "transport": "zmq", "options": {}}
    assert worker.control(**begin)["op"] == "ok"  # another update took its place: its thread may still be there
    worker.receiver.close()
    assert not named("weights-nccl")


ENDS = """
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from torch.distributed import HashStore
from tests.support.bridge.harness import TinyModel, Worker, new_tensors
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.nccl import member as group_member
from trainer_bridge.transports.nccl.transport import NcclSender

inside = threading.Event()

def sleep(_):  # inside of torch, until the process has begun to end
    inside.set()
    with suppress(RuntimeError):
        HashStore().wait(["nothing"], timedelta(seconds=0.2))

group_member.time = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
payload = Payload(new_tensors(TinyModel(), 1), 1, 64)
worker = Worker()
sender = NcclSender([worker.endpoint])
begin = {"action": "begin", "version": 1, "manifest": payload.manifest.to_wire(), "transport": "nccl"}
assert worker.control(**begin, options=sender.prepare(payload))["op"] == "ok"
assert inside.wait(20)
worker.close()
"""


KEPT = """
from tests.support.bridge.harness import TinyModel, Worker, new_tensors
from trainer_bridge.publish.publisher import WeightPublisher

with Worker() as worker, WeightPublisher(worker.endpoint, transport="nccl") as publisher:
    for version in (1, 2):
        publisher.publish(new_tensors(worker.model, version), version).applied(20)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("script", [ENDS, KEPT], ids=["a thread was waiting", "a group was kept"])
def test_a_process_ends_cleanly(script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_publisher_that_closes_behind_the_last_bucket_keeps_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, closed = threading.Event(), threading.Event()

    def broadcast(self: Any, data: torch.Tensor, root: int = 0) -> Any:
        pending = BroadcastGroup.broadcast(self, data, root)
        if self.rank:
            return pending

        def wait(*given: Any) -> None:
            pending.wait(*given)
            sent.set()  # the only bucket
            assert closed.wait(20)

        return SimpleNamespace(wait=wait)

    groups = Groups(monkeypatch, broadcast=broadcast)
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="nccl") as publisher:
        handle = publisher.publish(new_tensors(worker.model, 1), 1)
        assert sent.wait(20)
        publisher.close()
        closed.set()
        with pytest.raises(RolloutError, match="the publisher was closed"):
            handle.applied(20)
        wait_for(lambda: not named("weights-group"), "the end of its thread")
        wait_for(lambda: 0 in groups.left, "the end of its group")


def test_a_worker_whose_update_is_dropped_behind_the_last_bucket_keeps_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups, plain = Groups(monkeypatch), NcclMember._take_buckets

    def take_buckets(self: NcclMember, *arguments: Any) -> None:
        plain(self, *arguments)
        assert self._cancelled.wait(20)

    with Worker() as worker, WeightPublisher(worker.endpoint, transport="nccl", apply_s=3.0) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(NcclMember, "_take_buckets", take_buckets)
            with pytest.raises(RolloutError, match="commit"):
                publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
            wait_for(lambda: not named("weights-nccl"), "the end of the worker's thread")
        made, publisher._apply_s = groups.made, 60.0
        publisher.publish(tensors := new_tensors(worker.model, 2), 2).applied(20)
        assert serves(worker.model, tensors) and groups.made == made + 2, "both made a new one"


class Groups:
    """Counts the groups that members of this process join from now on, and notes which ranks leave theirs.

    The publisher's rank is 0. `methods` are those of the groups.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
        self.joined: list[str] = []
        self.left: list[int] = []

        def end(group: Any, broken: bool) -> Any:
            self.left.append(group.rank)
            return BroadcastGroup.close(group, broken)

        enter_nccl(monkeypatch, group_with(self.joined, close=end, **methods))

    @property
    def made(self) -> int:
        return len(self.joined)


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_an_update_that_was_dropped_takes_no_group_from_the_next(
    waiting: tuple[Worker, NcclSender, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, sender, token = waiting
    receiver = worker.receiver.receivers["nccl"]
    member, placed, left = receiver._member, threading.Event(), []

    def loads(data: bytes) -> Any:
        placed.set()
        return json.loads(data)

    monkeypatch.setattr(group_member, "json", SimpleNamespace(loads=loads))
    receiver.kept.keep(GroupSeat("kept", 1, 2, 0), SimpleNamespace(close=lambda broken: left.append(broken)))
    with member._lock:  # its place comes at the same time as the end of its update
        sender._server.store.set(f"member/{token}", '["another", 1, 2, 0, 0]')
        assert placed.wait(20)
        member._cancelled.set()
    wait_for(lambda: not member.thread.is_alive(), "the end of the update")
    assert not left


def test_buffers_of_an_update_that_failed_live_until_nothing_is_packed_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref] = []
    alive: list[bool] = []

    def noted(self: BroadcastGroup, nbytes: int) -> torch.Tensor:
        data = BroadcastGroup.buffer(self, nbytes)
        if threading.current_thread().name == "weights-group":
            made.append(weakref.ref(data))
        return data

    def packed(self: Payload) -> None:
        if threading.current_thread().name == "weights-group":
            alive.extend(data() is not None for data in made)
        Payload.wait_packed(self)

    def fails(self: Payload, index: int, out: torch.Tensor) -> int:
        if index == 3:
            raise RuntimeError("the device is gone")
        return Payload.start_bucket(self, index, out)

    enter_nccl(monkeypatch, group_with(buffer=noted))
    publisher_type = packing(wait_packed=packed, start_bucket=fails)
    with Worker() as worker, publisher_type(worker.endpoint, transport="nccl", bucket_bytes=SMALL) as publisher:
        with pytest.raises(RolloutError, match="the device is gone"):
            publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
        wait_for(lambda: not named("weights-group"), "the end of its thread")
    assert made and alive == [True] * len(made)


def clocked_sender(now_s: list[float]) -> type[NcclSender]:
    """A sender whose transfers go by this clock."""

    class Clocked(NcclSender):
        def transfer(self, payload: Payload, recipients: Sequence[Recipient], rules: TransferRules) -> dict[str, Any]:
            return super().transfer(payload, recipients, replace(rules, clock=lambda: now_s[0]))

    return Clocked


def test_a_group_that_hangs_ends_the_update_and_close_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    over, now_s = threading.Event(), [0.0]

    def join(self: Any, store: Any, name: str, rank: int, *_: Any) -> None:
        """Block, as inside NCCL."""
        if rank == 0:
            now_s[0] += 1000.0  # so long has nothing moved
        over.wait()
        raise GroupError("it is over")

    enter_nccl(monkeypatch, group_with(__init__=join), clocked_sender(now_s))
    with Worker() as worker:
        publisher = WeightPublisher(worker.endpoint, transport="nccl")
        handle = publisher.publish(new_tensors(worker.model, 1), 1)
        with pytest.raises(RolloutError, match="nothing moved in the group"):
            handle.applied(20)
        publisher.close()
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        over.set()


def test_an_update_that_moves_may_take_longer_than_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock leaps by 20 s with each bucket; a stall takes 30 s and the grace."""
    now = [0.0]

    def pack(self: Payload, index: int, out: torch.Tensor) -> int:
        now[0] += 20.0
        return Payload.start_bucket(self, index, out)

    enter_nccl(monkeypatch, sender_type=clocked_sender(now))
    publisher_type = packing(start_bucket=pack)
    with Worker() as worker, publisher_type(worker.endpoint, transport="nccl", bucket_bytes=SMALL) as publisher:
        handle = publisher.publish(tensors := new_tensors(worker.model, 1), 1)
        handle.applied(20)
        assert serves(worker.model, tensors) and now[0] > 100


def test_workers_that_come_to_a_group_in_turn_meet_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()

    class Noted(NcclSender):
        def prepare(self, payload: Payload) -> dict[str, Any]:
            options = super().prepare(payload)
            ports.add(options["port"])
            return options

    enter_nccl(monkeypatch, sender_type=Noted, auto=3, gpu_to_gpu=False)
    with Worker() as first, Worker() as second:
        del second.receiver.receivers["shm"]  # it refuses that, and comes to the group a round later
        with WeightPublisher([first.endpoint, second.endpoint], bucket_bytes=SMALL) as publisher:
            publisher.choice.refusals[first.endpoint] = {"shm": "for the test"}
            for version in (1, 2):
                tensors = new_tensors(first.model, version)
                reports = publisher.publish(tensors, version).applied(20)
                assert [report.transport for report in reports] == ["nccl", "nccl"]
                assert serves(first.model, tensors) and serves(second.model, tensors)
                assert len(ports) == version  # one store for each update


def test_who_got_the_bytes_keeps_them_when_another_fails_the_same_way_in_a_second_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RolloutError("damaged")

    enter_nccl(monkeypatch, no_groups("no route between the devices"), **NCCL_FIRST)
    with Worker() as near, Worker() as broken:
        broken.receiver.receivers["shm"].take = refuse
        with WeightPublisher([near.endpoint, broken.endpoint], bucket_bytes=SMALL) as publisher:
            publisher.choice.refusals[near.endpoint] = {"nccl": "for the test"}
            handle = publisher.publish(tensors := new_tensors(near.model, 1), 1)
            with pytest.raises(RolloutError, match="damaged"):
                handle.applied(20)
            assert list(handle.reports) == [near.endpoint] and list(handle.errors) == [broken.endpoint]
            assert serves(near.model, tensors) and broken.receiver.version == 0


# --- one group, without a publisher ----------------------------------------------------------------------------------


def test_a_member_that_waited_in_vain_can_leave_before_the_groups_own_deadline() -> None:
    server, members = StoreServer([LOOPBACK], 30.0), {}

    def join(rank: int) -> None:
        store = connect(server.local_host, server.port, 30.0)
        members[rank] = BroadcastGroup(store, "g", rank, 2, LOOPBACK, CPU, 30.0, op_timeout_s=3600.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pending = members[1].broadcast(torch.zeros(8, dtype=torch.uint8))  # rank 0 sends nothing
    with pytest.raises(GroupError, match="nothing moved for 0.1 s"):
        pending.wait(threading.Event(), 0.1)
    left = threading.Thread(target=members[1].close, args=(True,), daemon=True)
    del pending
    left.start()
    left.join(20)
    assert not left.is_alive()
    members[0].close(broken=True)
    gc.collect()


@pytest.fixture
def without_nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`join(store, rank, timeout_s)` as on a GPU, and `join.made`, the ranks that made a backend.

    In the place of NCCL's backend: connecting hangs, on rank 0, until the end of the test.
    """
    made: list[int] = []
    over = threading.Event()

    class Backend:
        Options = SimpleNamespace

        def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
            self.rank = rank
            made.append(rank)
            assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"

        def eager_connect_single_device(self, device: torch.device) -> None:
            if self.rank == 0:
                over.wait()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def join(store: dist.Store, rank: int, timeout_s: float) -> Any:
        member = BroadcastGroup.__new__(BroadcastGroup)
        member.device = CPU
        member._timeout = member._join_timeout = timedelta(seconds=timeout_s)
        return member._nccl(store, rank, 2)

    join.made = made  # type: ignore[attr-defined]
    yield join
    over.set()


def test_nobody_connects_by_nccl_before_all_are_there(without_nccl) -> None:
    with pytest.raises(RuntimeError):
        without_nccl(dist.HashStore(), 0, 0.1)
    assert without_nccl.made == []


def test_a_group_that_hangs_while_it_connects_does_not_keep_others_from_being_made(without_nccl) -> None:
    before = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    stuck, other = dist.HashStore(), dist.HashStore()
    stuck.set("here/1", "")
    other.set("here/0", "")
    thread = threading.Thread(target=without_nccl, args=(stuck, 0, 20.0), daemon=True)
    thread.start()
    wait_for(lambda: without_nccl.made == [0], "a group that hangs")
    second = threading.Thread(target=without_nccl, args=(other, 1, 20.0), daemon=True)
    second.start()
    second.join(20)
    assert not second.is_alive() and without_nccl.made == [0, 1]
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before


def test_a_group_is_left_where_python_starts_no_thread_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an exit handler of Python 3.12.0."""
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="nccl") as publisher:
        publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
        kept = publisher.choice.senders["nccl"].kept
        name = kept.name

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        with monkeypatch.context() as ending:
            ending.setattr(threading.Thread, "start", refuse)
            kept.close()
        assert name and kept.name == ""
