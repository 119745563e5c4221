"""What a worker does about trainers' process groups: real receivers, and a peer of gloo in the test's own process.

`tests/gateway/test_process_groups.py` has a trainer that uses torch.distributed's own groups.
"""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.weights.parameter_map import UpdateNames
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves
from tests.support.bridge.tensor_group import GroupWorker
from tests.support.ports import free_port, needs_ipv6
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup
from trainer_bridge.transports.torch_group.group_member import cut
from trainer_bridge.wire.manifest import pack

Rows = list[list[Any]]


@pytest.fixture(params=["staged", "in_place"])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    with Worker(apply=request.param, idle_s=20) as worker:
        yield worker


def meeting(port: int, **more: Any) -> dict[str, Any]:
    return {"kind": "torch", "backend": "gloo", "host": "127.0.0.1", "port": port, "rank": 1, "size": 2, **more}


def rows_of(tensors: dict[str, torch.Tensor]) -> Rows:
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]


class Peer:
    """Rank 0 of a group of two."""

    def __init__(self, worker: Worker, name: str = "mine", host: str = "127.0.0.1", shown: str = "") -> None:
        self.worker, self.name = worker, name
        self._closed = False
        wait = timedelta(seconds=20)
        # It listens before the worker is told where: the worker's time to connect is short in some tests.
        store = dist.TCPStore(host, 0, 2, is_master=True, timeout=wait, wait_for_workers=False)
        with ThreadPoolExecutor(1) as thread:
            joined = thread.submit(
                worker.control, action="join", group=name, meeting=meeting(store.port, host=shown or host)
            )
            prefix = f"{name}/{name}//cpu/"
            self.group = BroadcastGroup(store, prefix, 0, 2, "", torch.device("cpu"), 20)
            assert joined.result() == {"op": "ok"}

    def send(self, part: int, tensors: dict[str, torch.Tensor], packed_bytes: int | None = None) -> dict[str, Any]:
        """Broadcast a part; the worker's answer."""
        rows = rows_of(tensors)
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
        sizes = cut([data.numel() for data in flat], packed_bytes)
        counts = [len(each) for each in sizes]
        order = {"group": self.name, "part": part, "tensors": rows, "packed_bytes": packed_bytes}
        answer = self.worker.ask(action="gather", **order)
        for count in counts:
            self.group.broadcast(torch.cat(flat[:count])).wait(threading.Event())
            flat = flat[count:]
        return answer.get(timeout=20)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.group.close(broken=True)


@contextmanager
def peer(worker: Worker, name: str = "mine", **where: str) -> Iterator[Peer]:
    made = Peer(worker, name, **where)
    try:
        yield made
    finally:
        made.close()


def publish(worker: Worker, version: int, rows: Rows) -> dict[str, Any]:
    """`begin` and `commit` of what was gathered; the last answer."""
    manifest = pack(version, [tuple(row) for row in rows], 1 << 20).to_wire()
    begun = worker.control(action="begin", version=version, manifest=manifest, transport="torch_group", options={})
    return worker.control(action="commit", token=begun["token"], options={}) if begun["op"] == "ok" else begun


def test_packed_broadcasts_end_with_the_tensor_that_exceeds_their_size() -> None:
    assert cut([4, 6, 1, 20, 3, 3], 10) == [[4, 6, 1], [20], [3, 3]]
    assert cut([10, 1, 11], 10) == [[10, 1], [11]] and cut([5], 10) == [[5]] and cut([], 10) == []
    assert cut([4, 6, 0], None) == [[4], [6], [0]]


def test_what_is_gathered_reaches_all_ranks_of_a_tensor_group() -> None:
    with GroupWorker(2, relay_bytes=512, idle_s=20) as worker, peer(worker) as trainer:
        for version, parts in ((1, 1), (2, 3)):
            tensors = new_tensors(TinyModel(), version)
            names = list(tensors)
            for part in range(parts):
                assert trainer.send(part, {name: tensors[name] for name in names[part::parts]})["op"] == "ok"
            order = [name for part in range(parts) for name in names[part::parts]]
            rows = rows_of({name: tensors[name] for name in order})
            assert publish(worker, version, rows)["op"] == "ok" and worker.serve(tensors)


@needs_ipv6
@pytest.mark.parametrize("shown", ["::1", "[::1]"])
def test_a_trainers_store_may_be_at_an_ipv6_address(worker: Worker, shown: str) -> None:
    tensors = new_tensors(worker.model, 1)
    with peer(worker, host="::1", shown=shown) as trainer:
        assert trainer.send(0, tensors)["op"] == "ok" and publish(worker, 1, rows_of(tensors))["op"] == "ok"
    assert serves(worker.model, tensors)


@pytest.mark.parametrize("packed_bytes", [None, 1, 100, 1 << 30])
def test_updates_in_parts_are_swapped_in_whole(worker: Worker, packed_bytes: int | None) -> None:
    with peer(worker) as trainer:
        for version, parts in ((1, 1), (2, 2), (3, 5)):
            before = worker.model.snapshot()
            tensors = new_tensors(worker.model, version)
            names = list(tensors)
            for part in range(parts):
                answer = trainer.send(part, {name: tensors[name] for name in names[part::parts]}, packed_bytes)
                assert answer["op"] == "ok" and bool(answer["missing"]) == (part + 1 < parts)
            assert all(torch.equal(before[name], value) for name, value in worker.model.parameters.items())
            order = [name for part in range(parts) for name in names[part::parts]]
            assert publish(worker, version, rows_of({name: tensors[name] for name in order}))["version"] == version
            assert serves(worker.model, tensors) and worker.receiver.version == version
        assert worker.control(action="leave", group="mine") == {"op": "ok", "left": True}
    with WeightPublisher(worker.endpoint) as publisher:  # other ways still work
        publisher.publish(tensors := new_tensors(worker.model, 9), 9).applied(20)
    assert serves(worker.model, tensors)


def test_parts_without_a_tensor_that_is_used_begin_no_update(caplog: pytest.LogCaptureFixture) -> None:
    """Trainers send layers for multi-token prediction before or after the tensors that make an update whole."""
    extra = {"mtp.fc.weight": torch.ones(7, 3), "mtp.norm.weight": torch.ones(5)}
    with (
        caplog.at_level("INFO"),
        Worker(idle_s=20, names=UpdateNames(unused=("mtp.",))) as worker,
        peer(worker) as trainer,
    ):
        for version in (1, 2):
            tensors = new_tensors(worker.model, version)
            first, *others = tensors
            for _ in range(2):
                answer = trainer.send(0, extra)
                assert answer["gathered"] == 0 and answer["missing"]
            trainer.send(0, {first: tensors[first]} | extra)
            assert trainer.send(1, {name: tensors[name] for name in others})["missing"] == []
            rows = rows_of({first: tensors[first]} | extra | {name: tensors[name] for name in others})
            assert publish(worker, version, rows)["op"] == "ok"
            assert trainer.send(0, extra)["gathered"] == 0
            assert serves(worker.model, tensors) and worker.receiver.version == version
    assert sum("mtp.fc.weight" in record.getMessage() for record in caplog.records) == 1


def test_an_answer_names_the_tensors_that_an_update_lacks_and_may_lack() -> None:
    names = UpdateNames(frozenset({"norm.weight"}), optional=frozenset({"q.weight"}))
    with Worker(idle_s=20, names=names) as worker, peer(worker) as trainer:
        tensors = new_tensors(worker.model, 1)
        late = {name: tensors.pop(name) for name in ("norm.weight", "q.weight")}
        assert trainer.send(0, {name: tensors[name] for name in list(tensors)[1:]})["missing"]
        answer = trainer.send(1, {name: tensors[name] for name in list(tensors)[:1]})
        assert (answer["missing"], sorted(answer["left_out"])) == ([], ["norm.weight", "q.weight"])
        for part, name in enumerate(late, 2):
            answer = trainer.send(part, {name: late[name]})
            assert (answer["missing"], answer["left_out"]) == ([], list(late)[part - 1 :])


def test_tensors_that_do_not_fit_are_received_and_refused(worker: Worker) -> None:
    model, tensors = worker.model, new_tensors(worker.model, 1)
    with peer(worker) as trainer:
        before = model.snapshot()
        assert trainer.send(0, tensors | {"other": torch.ones(3)})["code"] == "weights_rejected"
        assert "norm.weight" in trainer.send(0, tensors | {"norm.weight": torch.ones(5)})["message"]
        for first in ({"q.weight"}, {"norm.weight", "q.weight"}, set(tensors)):  # at one place in both parts, or not
            trainer.send(0, {name: tensor for name, tensor in tensors.items() if name in first})
            again = trainer.send(1, {"q.weight": tensors["q.weight"]})
            assert again["code"] == "weights_rejected" and "q.weight" in again["message"]
        part = dict(list(tensors.items())[1:])
        assert trainer.send(0, part)["missing"] == ["embed.weight"]
        assert publish(worker, 1, rows_of(part))["code"] == "weights_rejected"
        assert all(torch.equal(before[name], value) for name, value in model.parameters.items())
        assert trainer.send(0, tensors)["missing"] == []  # the group has stayed in step
        assert publish(worker, 0, rows_of(tensors))["code"] == "weights_rejected"  # not newer
        assert publish(worker, 1, rows_of(dict(reversed(tensors.items()))))["code"] == "weights_rejected"
        assert trainer.send(0, tensors)["missing"] == []  # an update that is not the gathered one drops it
        assert publish(worker, 1, rows_of(tensors))["op"] == "ok"
        assert publish(worker, 2, rows_of(tensors))["code"] == "weights_rejected"  # gathered tensors are used once
    assert serves(model, tensors)


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": []},
        {"tensors": [["q.weight", "int8", [8, 6]]]},
        {"tensors": [["q.weight", "bfloat16", [-8, 6]]]},
        {"tensors": [["q.weight", "bfloat16", [1 << 40]]]},
        {"tensors": [["q.weight", "bfloat16"]]},
        {"tensors": [["q.weight", "bfloat16", [8, 6]]] * 99},
        {"tensors": "q.weight"},
        {"part": 1},
        {"part": -1},
        {"part": True},
        {"packed_bytes": 0},
        {"packed_bytes": 2.5},
        {"group": "other"},
        {"group": ["mine"]},
        {"extra": 1},
    ],
)
def test_a_part_that_cannot_be_received_is_refused_and_drops_its_group(change: dict[str, Any]) -> None:
    """What the trainer broadcasts all the same would be taken for the next part."""
    with Worker(idle_s=20) as worker, peer(worker) as trainer:
        rows = [["q.weight", "bfloat16", [8, 6]]]
        order = {"group": "mine", "part": 0, "tensors": rows, "packed_bytes": None} | change
        assert worker.control(action="gather", **order)["op"] == "error"
        if change.keys() & {"group", "extra"}:
            assert trainer.send(0, new_tensors(worker.model, 1))["missing"] == []
        else:
            assert worker.control(action="leave", group="mine") == {"op": "ok", "left": False}
        with peer(worker, "next") as again:
            tensors = new_tensors(worker.model, 2)
            assert again.send(0, tensors)["missing"] == [] and publish(worker, 1, rows_of(tensors))["op"] == "ok"
        assert serves(worker.model, tensors)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rank": 0}, "meeting.rank"),
        ({"rank": 2}, "meeting.rank"),
        ({"rank": "1"}, "meeting.rank"),
        ({"size": 1}, "meeting.size"),
        ({"size": 1 << 20}, "meeting.size"),
        ({"backend": "nccl"}, "meeting.backend"),  # on a CPU
        ({"backend": "mpi"}, "meeting.backend"),
        ({"kind": "vllm"}, "meeting.backend"),
        ({"kind": "vllm", "backend": "nccl"}, "meeting.backend"),
        ({"kind": "other"}, "meeting.kind"),
        ({"port": 0}, "meeting.host"),
        ({"host": ""}, "meeting.host"),
        ({"host": 1}, "meeting.host"),
        ({"nccl_id": "00" * 128}, "meeting"),
        ({"extra": 1}, "meeting"),
    ],
)
def test_meetings_that_make_no_sense(change: dict[str, Any], field: str) -> None:
    with shared_worker() as worker:
        answer = worker.control(action="join", group="mine", meeting=meeting(1) | change)
        assert (answer["code"], answer["field"]) == ("bad_request", field)


_shared: list[Worker] = []


@contextmanager
def shared_worker() -> Iterator[Worker]:
    """A worker that no test changes."""
    if not _shared:
        _shared.append(Worker())
    yield _shared[0]


@pytest.fixture(autouse=True, scope="module")
def _close_shared_worker() -> Iterator[None]:
    yield
    while _shared:
        _shared.pop().close()


def test_a_group_that_never_forms_is_an_error_in_time() -> None:
    with Worker(idle_s=1.0) as worker:
        port = free_port()
        answer = worker.control(action="join", group="mine", meeting=meeting(port))
        assert answer["code"] == "weights_rejected" and str(port) in answer["message"]
        with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
            told = meeting(silent.getsockname()[1])
            assert worker.control(action="join", group="mine", meeting=told)["code"] == "weights_rejected"
        alone = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
        told = meeting(alone.port, size=3)  # one member never comes
        assert worker.control(action="join", group="mine", meeting=told)["code"] == "weights_rejected"
        tensors = new_tensors(worker.model, 1)
        worker.receiver._intake._idle_s = 60.0  # the update has its time
        with WeightPublisher(worker.endpoint) as publisher:
            publisher.publish(tensors, 1).applied(20)
        assert serves(worker.model, tensors)


@pytest.mark.nightly
def test_a_trainer_that_leaves_or_stands_still_in_the_middle() -> None:
    with Worker(idle_s=5) as worker:  # also the time to join, on a busy machine
        tensors = new_tensors(worker.model, 1)
        order = {"action": "gather", "part": 0, "tensors": rows_of(tensors), "packed_bytes": None}
        with peer(worker, "gone") as trainer:
            answer = worker.ask(**order, group="gone")
            trainer.group.broadcast(next(iter(tensors.values()))).wait(threading.Event())
            trainer.close()
            assert answer.get(timeout=20)["code"] == "weights_rejected"
        with peer(worker, "still"):
            assert worker.control(**order, group="still")["code"] == "weights_rejected"
        assert worker.control(action="leave", group="still") == {"op": "ok", "left": False}
        assert worker.receiver.version == 0 and not worker.updates
        with peer(worker, "next") as trainer:
            assert trainer.send(0, tensors)["missing"] == [] and publish(worker, 1, rows_of(tensors))["op"] == "ok"
        assert serves(worker.model, tensors)


def test_a_worker_that_ends_answers_what_waits() -> None:
    with Worker(idle_s=20) as worker, peer(worker):
        waiting = worker.ask(action="join", group="other", meeting=meeting(free_port()))
        rows = rows_of(new_tensors(worker.model, 1))
        gathering = worker.ask(action="gather", group="mine", part=0, tensors=rows, packed_bytes=None)
        worker.receiver.close()
        assert waiting.get(timeout=20)["code"] == gathering.get(timeout=20)["code"] == "unavailable"


def test_groups_with_keys_are_not_offered_and_publishers_cannot_send() -> None:
    model = TinyModel()
    with Worker(model=model) as worker:
        with pytest.raises(ValueError, match="torch_group"):
            WeightPublisher(worker.endpoint, transport="torch_group").close()
        begin = {"action": "begin", "version": 1, "transport": "torch_group"}
        manifest = pack(1, [tuple(row) for row in rows_of(new_tensors(model, 1))], 1 << 20).to_wire()
        assert worker.control(**begin, manifest=manifest, options={"a": 1})["field"] == "options"
        assert worker.control(**begin, manifest=manifest, options={})["code"] == "weights_rejected"
