"""What may happen to an update on its way, for every transport: afterwards whole weights serve, old or new.

An update in place that broke half-way leaves a worker stale: it serves nothing until a whole one has come.
"""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bridge.cut_cable import CutCable
from tests.support.bridge.fault_client import FaultServer, ended_or_stopped, idle_s, run_fault, time_passes
from tests.support.bridge.fault_server import middle
from tests.support.bridge.file_memory import share_from
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.parts import NCCL_FIRST, enter_nccl, group_with, no_groups, packing
from tests.support.kernels.grids import checkered, nightly
from tests.support.ports import free_port
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports import bucket_link
from trainer_bridge.transports.nccl import transport as nccl
from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup, GroupError
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import ConnectionLost, RolloutError, RolloutTimeout, WeightsRejected

TRANSPORTS = ["cuda_ipc", "shm", "zmq", "nccl", "disk"]  # the first over files in the place of a GPU's memory
SMALL = 64


def good(worker: Worker, transport: str, folder: Path, version: int) -> dict[str, torch.Tensor]:
    """A publish from start to end."""
    tensors = new_tensors(worker.model, version)
    with WeightPublisher(worker.endpoint, transport=transport, folder=str(folder), bucket_bytes=SMALL) as publisher:
        share_from(publisher, folder)
        (report,) = publisher.publish(tensors, version).applied(20)
    assert report.version == version and report.transport == transport
    return tensors


@pytest.mark.parametrize(
    ("transport", "grief"),
    checkered(
        TRANSPORTS,
        [
            "prepare kill",
            "begin kill",
            "transfer kill",
            "commit kill",
            "begin stop",
            "transfer stop",
            "transfer corrupt",
        ],
    ),
)
def test_the_old_weights_serve_on_and_the_next_publish_works(
    faults: FaultServer, tmp_path: Path, transport: str, grief: str
) -> None:
    phase, fault = grief.split()
    with Worker(idle_s=idle_s(transport), apply="staged", shared=tmp_path) as worker:
        old = good(worker, transport, tmp_path, 1)
        run_fault(faults, worker, transport, tmp_path, phase, fault)
        assert serves(worker.model, old) and worker.receiver.version == 1 and worker.engine_gate.hold == "free"
        assert serves(worker.model, good(worker, transport, tmp_path, 2))
        assert [update.version for update in worker.updates] == [1, 2]


@pytest.mark.parametrize(("transport", "fault"), checkered(TRANSPORTS, ["kill", "stop", "corrupt"]))
def test_in_place_a_worker_is_stale_until_a_whole_update_has_come(
    faults: FaultServer, tmp_path: Path, transport: str, fault: str
) -> None:
    with Worker(idle_s=idle_s(transport), apply="in_place", shared=tmp_path) as worker:
        old = good(worker, transport, tmp_path, 1)
        run_fault(faults, worker, transport, tmp_path, "transfer", fault)
        gate, status = worker.engine_gate, worker.status()
        if gate.stale:
            assert gate.hold != "free" and status["state"] == "stale" and "version 2" in status["stale"]
            assert "Publish a whole update" in gate.stale and worker.receiver.version == 1
        else:  # nothing was written: the publisher died before it told the worker of a file
            assert serves(worker.model, old) and gate.hold == "free"
        assert bool(gate.stale) or (transport == "disk" and fault != "corrupt")
        new = good(worker, transport, tmp_path, 3)
        assert serves(worker.model, new) and not gate.stale and gate.hold == "free"
        assert worker.status()["state"] == "idle"


@pytest.mark.parametrize(("apply", "transport"), checkered(["staged", "in_place"], ["cuda_ipc", "shm", "zmq"]))
def test_a_connection_that_is_cut_in_the_middle_of_a_bucket_ends_the_update_there_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str, apply: str
) -> None:
    """Both ends live on; of the sixth bucket half of its bytes have come (of its message, where they lie in memory).

    It is noticed at once: another worker gets the update long before `stall_s` is over.
    """
    grant, cables = bucket_link.read_grant, []
    magic, more = (b"WBK1", 60) if transport == "zmq" else (b"WSB1", 10)
    several = contextlib.ExitStack()

    def through_a_cable(peer: Any) -> tuple[int, str]:
        window, address = grant(peer)
        if peer.endpoint != worker.endpoint:
            return window, address
        cables.append(several.enter_context(CutCable(int(address.rpartition(":")[2]), magic, 6, more)))
        return window, f"tcp://127.0.0.1:{cables[-1].port}"

    mine = {"apply": apply, "shared": tmp_path}
    with several, Worker(idle_s=60.0, **mine) as worker, Worker(**mine) as other:
        old = good(worker, transport, tmp_path, 1)
        with monkeypatch.context() as patch:
            patch.setattr(bucket_link, "read_grant", through_a_cable)
            how = {"transport": transport, "bucket_bytes": SMALL, "stall_s": 60.0}
            endpoints = [worker.endpoint, other.endpoint]
            with WeightPublisher(endpoints, **how) as publisher, pytest.raises(ConnectionLost) as caught:
                share_from(publisher, tmp_path)
                publisher.publish(new := new_tensors(worker.model, 2), 2).applied(20)
            assert str(caught.value).startswith("transfer:") and worker.endpoint in str(caught.value)
            assert other.receiver.version == 2 and serves(other.model, new)
        (cable,) = cables
        assert cable.cut.is_set()
        with time_passes(60.0):
            wait_for(lambda: worker.status()["state"] in ("idle", "stale"), "the end of the update")
        assert worker.receiver.version == 1
        assert bool(worker.engine_gate.stale) == (apply == "in_place")
        assert apply == "in_place" or serves(worker.model, old)
        assert serves(worker.model, good(worker, transport, tmp_path, 3)) and worker.engine_gate.hold == "free"


@pytest.mark.parametrize(("apply", "transport"), checkered(["staged", "in_place"], TRANSPORTS))
def test_wrong_shapes_and_versions_that_do_not_grow_are_refused_and_change_nothing(
    tmp_path: Path, transport: str, apply: str
) -> None:
    with Worker(apply=apply, shared=tmp_path) as worker:
        good(worker, transport, tmp_path, 4)
        tensors = good(worker, transport, tmp_path, 5)
        before = worker.model.snapshot()
        wrong = {**new_tensors(worker.model, 6), "q.weight": torch.zeros(7, 6)}
        attempts = [(wrong, 6, "q.weight"), (tensors, 5, "not newer"), (tensors, 4, "not newer")]
        with WeightPublisher(worker.endpoint, transport=transport, folder=str(tmp_path)) as publisher:
            share_from(publisher, tmp_path)
            for update, version, text in attempts:
                with pytest.raises(WeightsRejected, match=f"^begin: {worker.endpoint}: .*{text}"):
                    publisher.publish(update, version).applied(20)
        assert all(torch.equal(before[name], tensor) for name, tensor in worker.model.parameters.items())
        assert worker.status()["state"] == "idle" and worker.engine_gate.hold == "free"
        assert serves(worker.model, good(worker, transport, tmp_path, 6))


@pytest.mark.parametrize("transport", ["zmq", "nccl", *nightly("cuda_ipc", "shm", "disk")])
@pytest.mark.parametrize("fault", [signal.SIGKILL, *nightly(signal.SIGSTOP)])
def test_a_worker_that_is_killed_or_hangs_half_way_is_named_and_takes_the_next_update(
    faults: FaultServer, tmp_path: Path, transport: str, fault: signal.Signals
) -> None:
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    packed = []
    step = "host_copy" if transport == "disk" else "start_bucket"
    plain = getattr(Payload, step)

    def pack(self: Payload, *arguments: Any) -> Any:
        packed.append(arguments)
        if len(packed) == middle(transport):
            os.kill(pid, fault)
            wait_for(lambda: ended_or_stopped(pid), "the fault")
        return plain(self, *arguments)

    tensors = new_tensors(TinyModel(), 1)
    # Only a worker that hangs is waited for. The folder of `disk` is written before workers are notified.
    limits = {"stall_s": 1.5, "apply_s": 10.0} if fault == signal.SIGSTOP else {}
    limits["begin_s"] = 3.0 if transport == "disk" else 60.0
    how = {"transport": transport, "folder": str(tmp_path), "bucket_bytes": SMALL}
    with packing(**{step: pack})(endpoint, **how, **limits) as publisher:
        share_from(publisher, tmp_path)
        with faults.child(role="worker", port=port, folder=str(tmp_path), settings={}) as pid:
            handle = publisher.publish(tensors, 1)
            with pytest.raises((ConnectionLost, RolloutTimeout, RolloutError)) as caught:
                handle.applied(60)
            phases = ("begin:",) if transport == "disk" else ("transfer:", "commit:")
            assert endpoint in str(caught.value) and str(caught.value).startswith(phases)
        with faults.child(role="worker", port=port, folder=str(tmp_path), settings={}):
            assert wait_for(lambda: tried(publisher, tensors), "the next update") == 2


def tried(publisher: WeightPublisher, tensors: dict[str, torch.Tensor]) -> int:
    """Publish as version 2; 0 if that still went to the connection of before."""
    with contextlib.suppress(ConnectionLost):
        return publisher.publish(tensors, 2).applied(20)[0].version
    return 0


def test_a_worker_that_leaves_a_group_does_not_keep_the_others_from_the_update(faults: FaultServer) -> None:
    port = free_port()
    packed = []
    plain = Payload.start_bucket

    def pack(self: Payload, index: int, out: torch.Tensor) -> int:
        packed.append(index)
        if len(packed) == 5:
            os.kill(pid, signal.SIGKILL)
        return plain(self, index, out)

    lost = f"tcp://127.0.0.1:{port}"
    with Worker() as one, Worker() as two, faults.child(role="worker", port=port, settings={}) as pid:
        endpoints = [one.endpoint, lost, two.endpoint]
        with packing(start_bucket=pack)(endpoints, transport="nccl", bucket_bytes=SMALL) as publisher:
            tensors = new_tensors(one.model, 1)
            handle = publisher.publish(tensors, 1)
            with pytest.raises(RolloutError, match=lost):
                handle.applied(30)
            assert list(handle.errors) == [lost] and set(handle.reports) == {one.endpoint, two.endpoint}
            assert serves(one.model, tensors) and serves(two.model, tensors)


def test_auto_goes_another_way_where_no_group_comes_about(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_nccl(monkeypatch, no_groups("no route between the devices"), **NCCL_FIRST)
    with Worker() as worker, WeightPublisher(worker.endpoint, bucket_bytes=SMALL) as publisher:
        for version in (1, 2):
            tensors = new_tensors(worker.model, version)
            (report,) = publisher.publish(tensors, version).applied(20)
            assert report.transport == "shm" and serves(worker.model, tensors)
            assert "nccl" in report.why and "no route" in report.why


def test_a_group_is_kept_for_the_next_update_while_its_members_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    enter_nccl(monkeypatch, group_with(joined))
    with Worker() as one, Worker() as two:
        with WeightPublisher([one.endpoint, two.endpoint], transport="nccl", bucket_bytes=SMALL) as publisher:

            def publish(version: int) -> None:
                tensors = new_tensors(one.model, version)
                publisher.publish(tensors, version).applied(20)
                assert serves(one.model, tensors) and serves(two.model, tensors)

            for version in (1, 2, 3):
                publish(version)
            assert len(joined) == 3 and len(set(joined)) == 1
            one.receiver.receivers["nccl"].rest()  # as before a sleep
            publish(4)
            assert len(joined) == 6 and len(set(joined)) == 2
            publish(5)
            assert len(joined) == 6
        tensors = new_tensors(one.model, 6)
        with WeightPublisher(one.endpoint, transport="nccl", bucket_bytes=SMALL) as publisher:  # of another trainer
            publisher.publish(tensors, 6).applied(20)
        assert serves(one.model, tensors) and len(joined) == 8 and len(set(joined)) == 3


def test_a_kept_group_that_lost_a_member_is_made_anew(faults: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    enter_nccl(monkeypatch, group_with(joined))
    port = free_port()
    tensors = new_tensors(TinyModel(), 1)
    limits = {"stall_s": 10.0, "begin_s": 10.0}
    endpoint = f"tcp://127.0.0.1:{port}"
    with Worker() as one, WeightPublisher([one.endpoint, endpoint], transport="nccl", **limits) as publisher:
        for version in (1, 3):
            with faults.child(role="worker", port=port, settings={}) as pid:
                reports = wait_for(lambda v=version: republished(publisher, tensors, v), "the update")  # type: ignore[misc]
                assert {report.version for report in reports} <= {version, version + 1} and len(reports) == 2
                os.kill(pid, signal.SIGKILL)
        assert serves(one.model, tensors) and len(set(joined)) >= 2


@pytest.mark.parametrize(("transport", "apply"), checkered(["nccl", "auto"], ["staged", "in_place"]))
def test_a_kept_group_that_broke_while_nobody_used_it_is_made_anew_for_the_same_update(
    monkeypatch: pytest.MonkeyPatch, transport: str, apply: str
) -> None:
    def lost(*_: Any) -> None:
        raise GroupError("Connection closed by peer")

    joined: list[str] = []
    enter_nccl(monkeypatch, group_with(joined), **NCCL_FIRST)
    with Worker(apply=apply) as worker, WeightPublisher(worker.endpoint, transport=transport) as publisher:
        for version in (1, 2, 3):
            tensors = new_tensors(worker.model, version)
            (report,) = publisher.publish(tensors, version).applied(20)
            assert report.transport == "nccl" and serves(worker.model, tensors)
            if version == 1:
                worker.receiver.receivers["nccl"].kept._kept[1].broadcast = lost
        assert len(joined) == 4 and len(set(joined)) == 2


def republished(publisher: WeightPublisher, tensors: dict[str, torch.Tensor], version: int) -> list[Any]:
    """The reports of `version`, or of the next one; none if that still went to the connection of before."""
    for number in (version, version + 1):
        with contextlib.suppress(RolloutError):
            return publisher.publish(tensors, number).applied(20)
    return []


def test_a_group_leaves_the_default_group_alone() -> None:
    with Worker() as one, Worker() as two:
        with WeightPublisher([one.endpoint, two.endpoint], transport="nccl", bucket_bytes=SMALL) as publisher:
            for version in (1, 2, 3):
                tensors = new_tensors(one.model, version)
                publisher.publish(tensors, version).applied(20)
                assert serves(one.model, tensors) and serves(two.model, tensors)
    assert not torch.distributed.is_initialized() and not torch.distributed.distributed_c10d._world.pg_map


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hosts": []}, "options.hosts"),
        ({"hosts": ["127.0.0.1"] * 17}, "options.hosts"),
        ({"hosts": [3]}, "options.hosts"),
        ({"port": 0}, "options.port"),
        ({"port": 1 << 16}, "options.port"),
        ({"port": True}, "options"),
        ({"backend": "nccl"}, "options.backend"),
        ({"backend": "mpi"}, "options.backend"),
        ({"more": 1}, "options"),
    ],
)
def test_broken_options_of_a_group_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    payload = Payload(new_tensors(TinyModel(), 1), 1, SMALL)
    with Worker() as worker:
        sender = nccl.NcclSender([worker.endpoint])
        options = {**sender.prepare(payload), **changes}
        manifest = payload.manifest.to_wire()
        reply = worker.control(action="begin", version=1, manifest=manifest, transport="nccl", options=options)
        assert (reply["op"], reply["code"], reply["field"]) == ("error", "bad_request", field), reply
        sender.close()
        gone = {"hosts": ["127.0.0.1"], "port": 9, "backend": "gloo", "devices": []}
        reply = worker.control(action="begin", version=1, manifest=manifest, transport="nccl", options=gone)
        assert reply["field"] == "options.hosts" and "does not reach" in reply["message"]
        assert worker.status()["state"] == "idle"


def test_a_worker_that_gives_up_is_heard_of_while_the_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def buffer(self: Any, nbytes: int) -> torch.Tensor:
        if self.rank:
            raise GroupError("no memory")
        return BroadcastGroup.buffer(self, nbytes)

    enter_nccl(monkeypatch, group_with(buffer=buffer))
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="nccl") as publisher:
        handle = publisher.publish(new_tensors(worker.model, 1), 1)
        with pytest.raises(RolloutError, match=f"transfer: .*gave up: no memory.*{worker.endpoint}"):
            handle.applied(60)
