"""Updates that send what has changed: workers serve the same weights as after a whole update, or get a whole one."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.models.cut import Cut, CutView
from rollout.weights.delta_staging import DeltaStaging, put_kept
from rollout.weights.kept_memory import StagedMemory
from rollout.weights.parameter_map import ManifestFit, UpdateNames
from rollout.weights.pinned_memory import HostBuffer
from rollout.weights.staging import WeightStaging
from tests.support.bridge.fault_client import FaultServer, run_fault
from tests.support.bridge.fault_server import changed
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.parts import Watchful
from tests.support.bridge.tensor_group import GroupWorker
from tests.support.kernels.grids import checkered, nightly, squared
from tests.support.ports import free_port
from trainer_bridge.publish.publisher import PublishHandle, WeightPublisher
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import ConnectionLost, RolloutError, RolloutTimeout, WeightsRejected
from trainer_bridge.wire.manifest import DTYPE_BYTES, TensorEntry, pack

SMALL = 192
SHARE = 0.05
LAYOUTS: dict[str, Callable[[], Worker]] = {
    "staged": lambda: Worker(apply="staged"),
    "in place": lambda: Worker(apply="in_place"),
    "two ranks": lambda: GroupWorker(2),
    "three ranks": lambda: GroupWorker(3),
    "two ranks in place": lambda: GroupWorker(2, apply="in_place"),
}


def serving(worker: Worker, tensors: dict[str, torch.Tensor]) -> bool:
    return worker.serve(tensors) if isinstance(worker, GroupWorker) else serves(worker.model, tensors)


def step(tensors: dict[str, torch.Tensor], seed: int, share: float = SHARE) -> dict[str, torch.Tensor]:
    return changed(tensors, seed, share)


class Trainer:
    """Publishes steps, and looks at what was sent and whether it is served."""

    def __init__(self, publisher: WeightPublisher, stacked: bool = False, version: int = 0) -> None:
        self.publisher, self.version = publisher, version
        self.tensors = new_tensors(TinyModel(), 1, stacked=stacked)

    def publish(self, share: float = SHARE) -> PublishHandle:
        self.version += 1
        self.tensors = step(self.tensors, self.version, share)
        return self.publisher.publish(self.tensors, self.version)

    def sent(self, *workers: Worker, share: float = SHARE) -> list[bool]:
        """Publish a step, which all workers serve then; for each whether it came whole."""
        reports = self.publish(share).applied(20)
        assert all(serving(worker, self.tensors) for worker in workers)
        assert [report.version for report in reports] == [self.version] * len(workers)
        places = {worker.endpoint: i for i, worker in enumerate(workers)}
        return [report.sent_nbytes >= report.nbytes for report in sorted(reports, key=lambda r: places[r.endpoint])]


@pytest.mark.parametrize(("layout", "transport", "stacked"), squared([*LAYOUTS], ["zmq", "shm", "disk"], [False, True]))
def test_a_worker_that_has_the_last_update_gets_the_changes(
    tmp_path: Path, layout: str, transport: str, stacked: bool
) -> None:
    how = {"transport": transport, "folder": str(tmp_path), "bucket_bytes": SMALL}
    with LAYOUTS[layout]() as worker, WeightPublisher(worker.endpoint, deltas="host", **how) as publisher:
        trainer = Trainer(publisher, stacked)
        came_whole = [trainer.sent(worker, share=share) for share in (1.0, SHARE, 0.3, 0.0, SHARE)]
        # A stacked tensor that a parameter keeps transposed cannot be changed in place.
        in_place = "in place" in layout and stacked
        assert came_whole == [[True], *[[in_place]] * 4]


@pytest.mark.parametrize("layout", ["staged", "in place"])
def test_the_tensors_are_free_before_anything_is_sent(layout: str) -> None:
    with LAYOUTS[layout]() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        trainer.sent(worker)
        worker.gate.clear()  # the worker applies nothing meanwhile
        handle = trainer.publish()
        handle.held(20)
        sent = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
        for tensor in trainer.tensors.values():
            tensor.fill_(float("nan"))  # the trainer's next step
        worker.gate.set()
        handle.applied(20)
        assert serves(worker.model, sent)


@pytest.mark.parametrize("layout", ["staged", "in place", "two ranks"])
def test_a_worker_that_took_another_publishers_update_gets_a_whole_one(layout: str) -> None:
    with LAYOUTS[layout]() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        assert [trainer.sent(worker) for _ in range(2)] == [[True], [False]]
        with WeightPublisher(worker.endpoint, transport="zmq") as other:
            other.publish(new_tensors(TinyModel(), 9), 10).applied(20)
        trainer.version = 10
        assert [trainer.sent(worker) for _ in range(2)] == [[True], [False]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_publishers_in_turn_never_change_the_other_ones_update(layout: str) -> None:
    with LAYOUTS[layout]() as worker, ExitStack() as stack:
        trainers = [
            Trainer(stack.enter_context(WeightPublisher(worker.endpoint, transport="zmq", deltas="host")))
            for _ in range(2)
        ]
        came_whole = []
        for turn, version in zip((0, 1, 0, 0, 1, 1), range(1, 7), strict=True):
            trainers[turn].version = version - 1
            came_whole += trainers[turn].sent(worker)
        assert came_whole == [True, True, True, False, True, False]


@pytest.mark.parametrize("transport", ["zmq", "shm", "disk"])
def test_of_several_workers_each_gets_what_it_lacks(tmp_path: Path, transport: str) -> None:
    with ExitStack() as stack:
        one, two = (stack.enter_context(LAYOUTS[layout]()) for layout in ("staged", "in place"))
        how = {"transport": transport, "folder": str(tmp_path), "deltas": "host"}
        publisher = stack.enter_context(Watchful(one.endpoint, **how))
        trainer = Trainer(publisher)
        trainer.sent(one)
        publisher.add(two.endpoint)
        wait_for(lambda: two.receiver.version == 1, "the kept update")
        assert trainer.sent(one, two) == [False, False]  # it was brought the last one, as with `keep`
        publisher.remove(one.endpoint)
        trainer.sent(two)
        publisher.add(one.endpoint)
        assert trainer.sent(one, two) in ([True, False], [False, False])  # it may have been brought that one, too
        assert trainer.sent(one, two) == [False, False]


def test_a_worker_that_restarts_gets_the_kept_update_and_then_changes() -> None:
    with Worker() as first:
        port = first.port
        with Watchful(first.endpoint, transport="zmq", deltas="host") as publisher:
            trainer = Trainer(publisher)
            assert [trainer.sent(first) for _ in range(2)] == [[True], [False]]
            first.close()
            with Worker(port=port) as again:
                wait_for(lambda: again.receiver.version == 2, "the newest version")
                assert serves(again.model, trainer.tensors)
                assert trainer.sent(again) == [False]


@pytest.mark.parametrize("layout", ["staged", "in place", "two ranks", "two ranks in place"])
def test_a_base_that_was_changed_behind_the_workers_back_is_found_and_sent_whole(layout: str) -> None:
    with LAYOUTS[layout]() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        assert [trainer.sent(worker) for _ in range(2)] == [[True], [False]]
        staging = worker.stagings[-1] if isinstance(worker, GroupWorker) else worker.staging
        if staging.in_place:
            wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
            (worker.shards[-1] if isinstance(worker, GroupWorker) else worker.model).parameters["qkv"].view(
                torch.int16
            )[0, 0] ^= 1
        else:
            staging.base.parts(0, SMALL)[0][1][2] ^= 1
        assert [trainer.sent(worker) for _ in range(2)] == [[True], [False]]


@pytest.mark.parametrize("layout", ["staged", "in place", "two ranks"])
def test_adapters_and_refused_updates_leave_the_base(layout: str) -> None:
    with LAYOUTS[layout]() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        trainer.sent(worker)
        with WeightPublisher(worker.endpoint, transport="zmq") as other:
            with pytest.raises(WeightsRejected, match="not newer"):
                other.publish(trainer.tensors, 1).applied(20)
            with pytest.raises(RolloutError):
                other.publish({"a.lora_A.weight": torch.zeros(2, 2)}, 1, adapter="a", adapter_config={"r": 2}).applied(
                    20
                )
        assert trainer.sent(worker) == [False]


def test_an_update_that_all_workers_refuse_is_no_base() -> None:
    with Worker() as worker, Watchful(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        trainer.sent(worker)
        with pytest.raises(WeightsRejected, match="stranger"):
            publisher.publish({**trainer.tensors, "stranger": torch.zeros(3)}, 2).applied(20)
        trainer.version = 2
        assert [trainer.sent(worker) for _ in range(2)] == [[True], [False]]


def test_a_replaced_update_is_the_base_of_the_one_that_replaces_it() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        trainer.sent(worker)
        worker.engine_gate.recomputing = True
        waits = trainer.publish()
        wait_for(lambda: worker.status()["state"] == "ready", "an update that waits")
        follows = trainer.publish()
        with pytest.raises(WeightsRejected, match="took the place"):
            waits.applied(20)
        worker.engine_gate.recomputing = False
        (report,) = follows.applied(20)
        assert report.sent_nbytes < report.nbytes and serves(worker.model, trainer.tensors)


def test_tensors_of_other_types_and_other_shapes_of_an_update_come_whole_once() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        trainer.sent(worker)
        trainer.tensors = {name: tensor.float() for name, tensor in trainer.tensors.items()}
        assert [trainer.sent(worker) for _ in range(2)] == [[True], [False]]
        trainer.tensors = new_tensors(TinyModel(), 4, stacked=True)
        assert [trainer.sent(worker) for _ in range(2)] == [[True], [False]]


def test_a_tensor_of_an_odd_number_of_bytes_comes_whole() -> None:
    with Worker(names=UpdateNames(unused=("visual.",))) as worker:
        with WeightPublisher(worker.endpoint, transport="zmq", bucket_bytes=SMALL, deltas="host") as publisher:
            trainer = Trainer(publisher)
            for version in (1, 2):
                trainer.tensors = step(trainer.tensors, version)
                odd = {"visual.codes": torch.zeros(3, dtype=torch.float8_e4m3fn)}
                (report,) = publisher.publish({**trainer.tensors, **odd}, version).applied(20)
                assert report.sent_nbytes == report.nbytes and serves(worker.model, trainer.tensors)


@pytest.mark.parametrize("share", [0.95, 1.0])
def test_an_update_of_which_most_has_changed_comes_whole_and_is_the_base_of_the_next(share: float) -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        assert [trainer.sent(worker, share=each) for each in (1.0, share, SHARE)] == [[True], [True], [False]]


@pytest.mark.parametrize("layout", ["staged", "in place", "two ranks"])
def test_a_worker_without_memory_for_codes_gets_the_whole(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    reserve = HostBuffer.reserve

    def full(self: HostBuffer, nbytes: int, slack: int = 0) -> torch.Tensor:
        return reserve(self, 1 << 60 if slack else nbytes)

    with LAYOUTS[layout]() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        trainer.sent(worker)
        with monkeypatch.context() as patch:
            patch.setattr(HostBuffer, "reserve", full)
            assert trainer.sent(worker) == [True]
        assert trainer.sent(worker) == [False]


def test_in_place_weights_that_are_kept_in_another_type_come_whole_and_the_log_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LAYOUTS["in place"]() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        trainer.tensors = {name: tensor.float() for name, tensor in trainer.tensors.items()}
        with caplog.at_level("INFO"):
            assert [trainer.sent(worker) for _ in range(2)] == [[True], [True]]
        assert ".weight is not kept" in caplog.text


@pytest.mark.parametrize(
    ("layout", "damage"),
    [
        ("staged", "words"),  # values are compared with the publisher's where one rank stages the whole
        *((layout, "gaps") for layout in ("staged", "in place", "two ranks", "two ranks in place")),
    ],
)
def test_codes_that_are_wrong_in_themselves_are_refused_with_the_tensors_name_and_the_whole_follows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, layout: str, damage: str
) -> None:
    """The transport's checksums are right: the publisher made these codes."""
    from trainer_bridge.publish import deltas

    plain = deltas.changed_words

    def damaged(old: torch.Tensor, new: torch.Tensor) -> dict[Any, torch.Tensor]:
        parts = plain(old, new)
        if "gaps" in parts:
            parts[damage].view(torch.uint8).fill_(254 if damage == "gaps" else 77)  # type: ignore[index]
        return parts

    with LAYOUTS[layout]() as worker:
        with WeightPublisher(worker.endpoint, transport="zmq", bucket_bytes=SMALL, deltas="host") as publisher:
            trainer = Trainer(publisher)
            trainer.sent(worker)
            monkeypatch.setattr(deltas, "changed_words", damaged)
            with caplog.at_level("INFO"):
                assert trainer.sent(worker) == [True]
            assert "bucket 0 of the delta (embed.weight" in caplog.text
            monkeypatch.undo()
            assert trainer.sent(worker) == [False]
            assert worker.engine_gate.hold == "free" and not worker.engine_gate.stale


def test_in_place_generation_is_held_only_once_all_codes_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    holds: list[str] = []
    take = DeltaStaging.take

    def note(self: DeltaStaging, start: int, data: torch.Tensor) -> Any:
        holds.append(worker.engine_gate.hold)
        return take(self, start, data)

    monkeypatch.setattr(DeltaStaging, "take", note)
    with LAYOUTS["in place"]() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        trainer.sent(worker)
        assert trainer.sent(worker) == [False] and set(holds) == {"free"}
        assert worker.engine_gate.hold == "free"


@pytest.mark.parametrize("layout", ["in place", "two ranks in place"])
def test_in_place_no_change_is_made_before_the_loop_has_granted_the_hold(layout: str) -> None:
    with LAYOUTS[layout]() as worker, WeightPublisher(worker.endpoint, bucket_bytes=SMALL, deltas="host") as publisher:
        trainer = Trainer(publisher)
        trainer.sent(worker)
        before = trainer.tensors
        worker.gate.clear()
        handle = trainer.publish()
        wait_for(lambda: worker.engine_gate.hold == "wanted", "the wish for a hold")
        for _ in range(20):  # each answer is a round of the receiver's thread, which would make changes
            assert worker.status()["state"] == "receiving"
        assert serving(worker, before) and not worker.engine_gate.stale
        worker.gate.set()
        (report,) = handle.applied(20)
        assert report.sent_nbytes < report.nbytes and serving(worker, trainer.tensors)


@pytest.mark.parametrize("transport", ["zmq", *nightly("shm", "disk")])
@pytest.mark.parametrize(
    ("layout", "phase"), checkered(["staged", "in place"], ["prepare", "begin", "transfer", "commit"])
)
def test_a_publisher_that_is_killed_while_it_sends_changes_leaves_the_old_weights_serving(
    faults: FaultServer, tmp_path: Path, layout: str, transport: str, phase: str
) -> None:
    apply = "in_place" if layout == "in place" else "staged"
    with Worker(idle_s=60.0, apply=apply) as worker:
        run_fault(faults, worker, transport, tmp_path, phase, "kill", deltas=True)
        assert worker.receiver.version == 2 and worker.engine_gate.hold == "free"
        assert serves(worker.model, new_tensors(TinyModel(), 2))
        with WeightPublisher(worker.endpoint, transport=transport, folder=str(tmp_path), deltas="host") as publisher:
            trainer = Trainer(publisher, version=3)
            assert [trainer.sent(worker) for _ in range(2)] == [[True], [False]]  # of another run of the trainer


@pytest.mark.parametrize("layout", ["staged", "in place"])
@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_changes_that_are_damaged_on_their_way_are_sent_again_as_a_whole(
    faults: FaultServer, tmp_path: Path, layout: str, transport: str
) -> None:
    apply = "in_place" if layout == "in place" else "staged"
    with Worker(idle_s=60.0, apply=apply) as worker:
        run_fault(faults, worker, transport, tmp_path, "transfer", "corrupt", deltas=True)
        assert worker.receiver.version == 3 and worker.engine_gate.hold == "free"
        assert serves(worker.model, changed(new_tensors(TinyModel(), 2), 2))


@pytest.mark.parametrize("fault", [signal.SIGKILL])
def test_a_worker_that_is_killed_while_it_takes_changes_gets_the_whole_when_it_is_back(
    faults: FaultServer, monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    from trainer_bridge.publish import deltas

    killed: list[int] = []

    class Deadly(Payload):
        def start_bucket(self, index: int, out: torch.Tensor) -> int:
            if self.delta is not None and not killed:
                os.kill(pid, fault)
                killed.append(pid)
            return super().start_bucket(index, out)

    monkeypatch.setattr(deltas, "Payload", Deadly)
    port = free_port()
    with Watchful(f"tcp://127.0.0.1:{port}", transport="zmq", begin_s=60.0, stall_s=5.0, deltas="host") as publisher:
        trainer = Trainer(publisher)
        with faults.child(role="worker", port=port, settings={}) as pid:
            trainer.publish().applied(60)
            with pytest.raises((ConnectionLost, RolloutTimeout)):
                trainer.publish().applied(60)
        assert killed
        with Worker(port=port) as again:
            wait_for(lambda: again.receiver.version == 2, "the newest version")
            assert serves(again.model, trainer.tensors) and trainer.sent(again) == [False]


@pytest.mark.parametrize("layout", ["staged", "in place"])
def test_a_tensor_with_two_names_is_compared_and_sent_once(layout: str) -> None:
    with LAYOUTS[layout]() as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        trainer = Trainer(publisher)
        for version in (1, 2, 3):
            tensors = changed(trainer.tensors, version, SHARE)
            handle = publisher.publish({**tensors, "lm_head.weight": tensors["embed.weight"]}, version)
            (report,) = handle.applied(20)
            assert serves(worker.model, tensors) and (report.sent_nbytes < report.nbytes) == (version > 1)
            assert report.nbytes == sum(tensor.nbytes for tensor in tensors.values())
            trainer.tensors = tensors


def test_a_worker_that_has_two_parameters_for_a_tensor_gets_both_names() -> None:
    model = TinyModel()
    model.parameters["head"] = torch.zeros_like(model.parameters["embed"])
    model.views["lm_head.weight"] = model.parameters["head"]
    with Worker(model=model) as worker:
        with WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
            tensors = new_tensors(TinyModel(), 1)
            for version in (1, 2, 3):
                tensors = changed(tensors, version, SHARE)
                both = {**tensors, "lm_head.weight": tensors["embed.weight"]}
                (report,) = publisher.publish(both, version).applied(20)
                assert serves(model, both) and (report.sent_nbytes < report.nbytes) == (version > 1)


def test_a_wrong_place_for_the_kept_update_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="deltas must be"):
        WeightPublisher("tcp://127.0.0.1:1", deltas="gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cut", [None, Cut(0, 8, ((2, 4), (6, 8))), Cut(1, 12, ((4, 10),))], ids=["all", "rows", "columns"]
)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_changed_words_reach_the_part_that_a_rank_keeps(dtype: str, cut: Cut | None) -> None:
    """Also of codes, of which a word holds two."""
    old = torch.randint(256, (8, 12, DTYPE_BYTES[dtype]), dtype=torch.uint8)
    new = torch.where(torch.rand(old.shape) < 0.3, old ^ 1, old)
    before, after = old.flatten().view(torch.int16), new.flatten().view(torch.int16)
    index = (before != after).nonzero()[:, 0]
    memory, expected = ((each if cut is None else cut.take(each)).flatten().clone() for each in (old, new))
    put_kept(TensorEntry("w", dtype, (8, 12), 0), cut, memory, index, after[index])
    assert torch.equal(memory, expected)


@pytest.mark.parametrize(("columns", "whole"), [(6, False), (5, True)])
def test_a_rank_takes_codes_whole_whose_rows_are_not_whole_words(columns: int, whole: bool) -> None:
    view = CutView.of(torch.zeros(4, columns, dtype=torch.uint8), Cut(0, 8, ((0, 4),)))
    staging, manifest = (
        WeightStaging(StagedMemory({"w": view}, "host", shard=True)),
        pack(1, [("w", "float8_e4m3fn", [8, columns])], 256),
    )
    staging.open(manifest, ManifestFit(("w",), ()))
    staging.take(0, torch.zeros(manifest.total_bytes, dtype=torch.uint8))
    staging.base.verified("first")
    assert bool(staging.base.lacks(manifest, "first")) == whole
