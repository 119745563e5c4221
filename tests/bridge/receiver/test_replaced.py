"""An update that waits for recomputation gives way to a newer one of its target, and its publisher learns why."""

import queue
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout.engine.features.adapters.known_adapters import AdapterRegistry
from rollout.models.peft_tensors import AdapterPacker
from rollout.weights.adapter_updates import AdapterTarget
from tests.bridge.receiver.test_adapters import RawAdapter, spec  # noqa: F401 -- a fixture
from tests.support.bridge.harness import Worker, new_tensors, serves, wait_for
from tests.support.bridge.raw_publisher import RawPublisher, assert_rejected

REPLACED = "weights_replaced"


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Its rows are being computed again, so updates wait."""
    with Worker() as worker:
        worker.engine_gate.note_recomputing(True)
        yield worker


def waiting(worker: Worker, seed: int, version: int) -> tuple[RawPublisher, queue.SimpleQueue, dict]:
    """An update that is ready; the queue gets the answer to its commit."""
    raw = RawPublisher(worker, tensors := new_tensors(worker.model, seed), version)
    assert raw.begin()["op"] == "ok"
    raw.send_all()
    committed = worker.ask(**raw.commit_fields())
    wait_for(lambda: worker.status()["state"] == "ready", "a ready update")
    return raw, committed, tensors


def answer(replies: queue.SimpleQueue) -> dict[str, Any]:
    return replies.get(timeout=20)


def test_a_status_says_what_a_ready_update_waits_for(worker: Worker) -> None:
    assert worker.status()["waits_for"] is None, "no update is ready"
    waiting(worker, 1, 1)
    assert worker.status()["waits_for"] == worker.receiver.summary()["waits_for"] == "recompute"


def test_a_newer_begin_takes_the_place_of_an_update_that_waits(worker: Worker) -> None:
    before = worker.model.snapshot()
    _, committed, _ = waiting(worker, 1, 1)
    raw, second, tensors = waiting(worker, 2, 2)
    assert_rejected(answer(committed), "version 2 took the place of version 1", REPLACED)
    assert second.empty() and all((worker.model.parameters[name] == old).all() for name, old in before.items())
    worker.engine_gate.note_recomputing(False)
    assert answer(second)["version"] == 2
    assert serves(worker.model, tensors) and [update.version for update in worker.updates] == [2]
    assert worker.status()["state"] == "idle"
    assert_rejected(raw.commit(), "token", "not_found")


def test_many_updates_take_each_others_place_in_the_same_memory(worker: Worker) -> None:
    answers = [waiting(worker, version, version)[1] for version in range(1, 8)]
    worker.engine_gate.note_recomputing(False)
    assert [answer(each).get("code", "ok") for each in answers] == [REPLACED] * 6 + ["ok"]
    assert worker.receiver.version == 7


@pytest.mark.parametrize("version", [1, 2])
def test_a_begin_that_is_not_newer_waits(worker: Worker, version: int) -> None:
    _, committed, tensors = waiting(worker, 1, 2)
    begun = worker.ask(**RawPublisher(worker, new_tensors(worker.model, 3), version).begin_fields())
    assert worker.status()["state"] == "ready" and begun.empty() and committed.empty()
    worker.engine_gate.note_recomputing(False)
    assert answer(committed)["op"] == "ok" and serves(worker.model, tensors)
    assert_rejected(answer(begun), "not newer than version 2")


def test_a_newer_begin_that_does_not_fit_takes_no_place(worker: Worker) -> None:
    _, committed, tensors = waiting(worker, 1, 1)
    wrong = new_tensors(worker.model, 2)
    wrong["q.weight"] = wrong["q.weight"][:7]
    assert_rejected(RawPublisher(worker, wrong, 2).begin(), "q.weight")
    assert worker.status()["state"] == "ready" and committed.empty()
    worker.engine_gate.note_recomputing(False)
    assert answer(committed)["op"] == "ok" and serves(worker.model, tensors)


def test_a_begin_that_came_before_the_wait_takes_its_place_later(worker: Worker) -> None:
    worker.gate.clear()  # the loop is late; nothing is known to wait
    worker.engine_gate.note_recomputing(False)
    _, committed, _ = waiting(worker, 1, 1)
    begun = worker.ask(**RawPublisher(worker, new_tensors(worker.model, 2), 2).begin_fields())
    assert worker.status()["state"] == "ready" and begun.empty() and committed.empty()
    worker.engine_gate.note_recomputing(True)
    assert_rejected(answer(committed), "took the place", REPLACED)
    assert answer(begun)["op"] == "ok"


def test_an_update_that_the_loop_has_taken_is_not_replaced(worker: Worker) -> None:
    worker.gate.clear()
    _, committed, _ = waiting(worker, 1, 1)
    update = wait_for(worker.receiver.take_ready, "an update")
    begun = worker.ask(**RawPublisher(worker, new_tensors(worker.model, 2), 2).begin_fields())
    assert worker.status()["state"] == "applying" and begun.empty()
    update.copy_into()
    worker.receiver.applied(update, 0.0)
    assert answer(committed)["op"] == answer(begun)["op"] == "ok"


def test_adapters_and_the_model_do_not_take_each_others_place(spec) -> None:  # noqa: F811
    target = AdapterTarget(spec, 4, torch.float32, AdapterRegistry(8), AdapterPacker())
    with Worker(adapters=target) as worker:
        worker.engine_gate.note_recomputing(True)
        adapter = RawAdapter(worker, spec, "a")
        adapter.begin()
        adapter.send_all()
        committed = worker.ask(**adapter.commit_fields())
        wait_for(lambda: worker.status()["state"] == "ready", "a ready adapter")
        begun = worker.ask(**RawPublisher(worker, new_tensors(worker.model, 2), 2).begin_fields())
        other = worker.ask(**RawAdapter(worker, spec, "b").begin_fields())
        assert worker.status()["state"] == "ready" and begun.empty() and other.empty() and committed.empty()
        worker.engine_gate.note_recomputing(False)
        assert answer(committed)["op"] == answer(begun)["op"] == "ok"


# --- a publisher that offers to give way ---


def test_an_abort_for_a_newer_update_drops_one_that_waits(worker: Worker) -> None:
    raw, committed, _ = waiting(worker, 1, 1)
    assert_rejected(worker.control(action="abort", token=raw.token.hex()), "too late")
    assert_rejected(worker.control(action="abort", token=raw.token.hex(), newer=1), "too late")
    assert committed.empty()
    assert worker.control(action="abort", token=raw.token.hex(), newer=5)["op"] == "ok"
    assert_rejected(answer(committed), "version 5 took the place of version 1", REPLACED)
    assert worker.status()["state"] == "idle" and worker.updates == []


def test_an_abort_for_a_newer_update_leaves_one_that_does_not_wait(worker: Worker) -> None:
    worker.gate.clear()
    worker.engine_gate.note_recomputing(False)
    raw = RawPublisher(worker, tensors := new_tensors(worker.model, 1), 1)
    raw.begin()
    assert_rejected(worker.control(action="abort", token=raw.token.hex(), newer=2), "is not waiting")
    raw.send_all()
    committed = worker.ask(**raw.commit_fields())
    wait_for(lambda: worker.status()["state"] == "ready", "a ready update")
    assert_rejected(worker.control(action="abort", token=raw.token.hex(), newer=2), "too late")
    worker.gate.set()
    assert answer(committed)["op"] == "ok" and serves(worker.model, tensors)


@pytest.mark.parametrize("newer", ["2", 2.0, True, [2]])
def test_a_newer_that_is_no_version_is_refused(worker: Worker, newer: Any) -> None:
    raw, committed, _ = waiting(worker, 1, 1)
    reply = worker.control(action="abort", token=raw.token.hex(), newer=newer)
    assert (reply["code"], reply["field"]) == ("bad_request", "newer") and committed.empty()
