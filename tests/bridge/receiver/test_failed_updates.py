"""Updates that fail: their waiters get the error, even if the cleanup fails too, and their memory is freed."""

import gc
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest

from rollout.config import WeightsSettings
from rollout.engine.gate import Gate
from rollout.weights.staging import make_staging
from rollout.weights.update_memory import UpdateMemories, UpdateMemory
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.raw_publisher import RawPublisher, assert_rejected, publish
from tests.support.ports import free_port
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import WeightsRejected


class Seen(UpdateMemories):
    """Keeps the memory of the last update in sight, and counts how often memory is abandoned."""

    last: weakref.ref[UpdateMemory]

    abandoned = 0

    def open(self, *update: Any) -> UpdateMemory:
        memory = super().open(*update)
        self.last = weakref.ref(memory)
        abandon, itself = type(memory).abandon, self.last

        def counted() -> None:
            self.abandoned += 1
            abandon(itself())

        memory.abandon = counted  # type: ignore[method-assign]
        return memory


def seen_worker(apply: Literal["auto", "staged", "in_place"]) -> tuple[Worker, Seen]:
    model = TinyModel()
    seen = Seen(make_staging(model.views, WeightsSettings(apply=apply)))
    return Worker(model=model, memories=seen), seen


def raising(*_: Any) -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("what", ["drop", "abandon"])
def test_a_worker_that_cannot_let_go_of_an_update_still_says_why_it_failed(what: str) -> None:
    worker, seen = seen_worker("auto")
    with worker:
        old = publish(worker, 1, 1)
        raw = RawPublisher(worker, new_tensors(worker.model, 2), 2)
        assert raw.begin()["op"] == "ok"
        owner = worker.receiver.receivers["zmq"] if what == "drop" else seen.last()
        setattr(owner, what, raising)
        assert_rejected(raw.commit(), "of 9 buckets")
        if what == "drop":
            del owner.drop
        assert worker.receiver.alive and serves(worker.model, old)
        assert serves(worker.model, publish(worker, 3, 3))


def test_a_message_that_came_in_a_round_that_failed_is_answered() -> None:
    failed = []

    def take_a_message_and_fail(incoming: Any) -> bool:
        busy = advance(incoming)
        if busy and not failed:
            failed.append(True)
            raise WeightsRejected("another transport's group broke")
        return busy

    with Worker() as worker, WeightPublisher(worker.endpoint, transport="zmq") as publisher:
        receiver = worker.receiver.receivers["zmq"]
        advance, receiver.advance = receiver.advance, take_a_message_and_fail  # type: ignore[method-assign]
        tensors = new_tensors(worker.model, 1)
        publisher.publish(tensors, 1).applied(20)
        assert failed and serves(worker.model, tensors)


def test_in_place_a_worker_that_cannot_let_go_of_half_an_update_is_stale_until_a_whole_one_came() -> None:
    worker, seen = seen_worker("in_place")
    with worker:
        publish(worker, 1, 1)
        raw = RawPublisher(worker, new_tensors(worker.model, 2), 2)
        assert raw.begin()["op"] == "ok"
        seen.last().abandon = raising
        raw.send(0)
        assert raw.answer()[0] == b"WAK1"
        assert_rejected(raw.commit(), "of 9 buckets")
        assert worker.status()["state"] == "stale" and "in part" in worker.engine_gate.stale
        assert serves(worker.model, publish(worker, 3, 3)) and worker.status()["state"] == "idle"


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_an_update_that_was_refused_keeps_no_memory(apply: str) -> None:
    worker, seen = seen_worker(apply)
    with worker:
        raw = RawPublisher(worker, new_tensors(worker.model, 1), 1)
        assert raw.begin()["op"] == "ok"
        raw.send(0, check=1)
        assert raw.answer()[0] == b"WNO1"
        wait_for(lambda: worker.status()["state"] == "idle", "the refusal")
        worker.status()  # the thread has left what refused it
        gc.collect()
        assert seen.last() is None
        assert_rejected(raw.commit(), "bucket 0")  # the reason is kept


def failing_begin(how: str, folder: Path) -> dict[str, Any]:
    """Fields of a `begin` that fits the model, and fails once its memory is laid out."""
    if how == "the folder is missing":
        files = [["model.safetensors", 8, 0]]
        return {"transport": "disk", "options": {"folder": str(folder / "missing"), "files": files}}
    return {
        "transport": "nccl",
        "options": {"hosts": ["127.0.0.1"], "port": free_port(), "backend": "gloo", "devices": []},
    }


@pytest.mark.parametrize("how", ["the folder is missing", "no publisher listens"])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_begin_that_fails_midway_leaves_nothing(apply: str, how: str, tmp_path: Path) -> None:
    worker, seen = seen_worker(apply)
    with worker:
        old = publish(worker, 1, 1)
        raw = RawPublisher(worker, new_tensors(worker.model, 2), 2)
        assert raw.begin(**failing_begin(how, tmp_path))["op"] == "error"
        assert seen.abandoned == 1 and worker.status()["state"] == "idle"
        gc.collect()
        assert seen.last() is None
        assert worker.engine_gate.hold == "free" and not worker.engine_gate.stale and serves(worker.model, old)
        assert serves(worker.model, publish(worker, 2, 2)) and seen.abandoned == 1


class Asker:
    """Who asked for a hold: an update, with all its memory."""


@pytest.mark.parametrize("end", ["clear", "fail"])
@pytest.mark.parametrize("granted", [True, False])
def test_a_hold_that_is_over_keeps_nothing_of_who_asked(end: str, granted: bool) -> None:
    gate, asker = Gate(), Asker()
    held = weakref.ref(asker)
    gate.request_hold(lambda asker=asker: None)  # type: ignore[misc]
    if granted:
        gate.grant_hold()
    gate.clear_hold() if end == "clear" else gate.fail_hold("half an update")
    del asker
    gc.collect()
    assert held() is None
