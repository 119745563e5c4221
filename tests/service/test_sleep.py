"""`sleep` and `wake` as messages, and what becomes of requests that come meanwhile."""

from collections.abc import Iterator

import pytest

from rollout.engine.messages.statuses import EngineStatus, SleepStatus
from rollout.engine.messages.to_engine import Sleep, WakeUp
from rollout.engine.messages.to_service import Done, Failed
from tests.support.service.harness import MODEL, Bench, ServedModel, serving

SLEEPS = ServedModel(MODEL.name, MODEL.vocab_size, MODEL.max_context_tokens, MODEL.eos_ids, sleep=True)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with serving(None, model=SLEEPS) as bench:
        yield bench


def test_both_are_answered_once_they_took_effect_with_what_it_came_to(bench):
    client = bench.client()
    client.send("sleep", "s", level=2, mode="abort", requests="refuse")
    client.send("wake", "w")
    client.send("sleep", "d")
    sleep, wake, default = (bench.command() for _ in range(3))
    assert sleep == Sleep(2, sleep.token, "abort", "refuse")
    assert wake == WakeUp(wake.token) and default == Sleep(1, default.token)
    assert client.ask("ping", "i")["id"] == "i", "nothing was answered before the engine did it"
    bench.put(Done(sleep.token, {"level": 2, "bytes": 5 << 30, "seconds": 0.5}), Done(default.token))
    assert client.receive() == {"v": 1, "op": "ok", "id": "s", "level": 2, "bytes": 5 << 30, "seconds": 0.5}
    assert client.receive() == {"v": 1, "op": "ok", "id": "d"}
    bench.put(Failed(wake.token, "2.00 GiB are missing", code="unavailable"))
    error = client.receive()
    assert (error["id"], error["code"], error["message"]) == ("w", "unavailable", "2.00 GiB are missing")


@pytest.mark.parametrize(
    "field, value", [("level", 3), ("level", True), ("mode", "stop"), ("requests", 1), ("tags", ["kv_cache"])]
)
def test_a_wrong_field_is_named(bench, field, value):
    error = bench.client().ask("sleep", **{field: value})
    assert (error["code"], error["field"]) == ("bad_request", field)
    assert (bench.client().ask("wake", tags=["weights"])["field"], bench.inbox.empty()) == ("tags", True)


def test_a_worker_that_cannot_sleep_says_how_it_could():
    with serving(None) as bench:
        client = bench.client()
        for op in ("sleep", "wake"):
            error = client.ask(op)
            assert (error["code"], error["field"]) == ("bad_request", "op") and "engine.sleep" in error["message"]
        assert bench.inbox.empty() and "sleep" not in client.ask("status")["capabilities"]


def test_status_says_how_it_sleeps(bench):
    client = bench.client()
    status = client.ask("status")
    assert status["sleep"] is None and {"sleep", "wake"} <= set(status["capabilities"])
    bench.status[0] = EngineStatus(state="asleep", sleep=SleepStatus(2, "wait", 7, 1.5))
    status = client.ask("status")
    assert status["state"] == "asleep"
    assert status["sleep"] == {"level": 2, "requests": "wait", "freed_bytes": 7, "age_s": 1.5}


def test_requests_wait_or_are_refused(bench):
    client = bench.client()
    bench.status[0] = EngineStatus(state="asleep", sleep=SleepStatus(1, "refuse", 7, 1.5))
    error = client.ask("generate", "r", prompt=[1])
    assert error["code"] == "unavailable" and "asleep" in error["message"] and bench.inbox.empty()
    for sleep in (SleepStatus(1, "wait", 7, 1.5), None):  # None: woken between the two looks
        bench.status[0] = EngineStatus(state="asleep", sleep=sleep)
        client.send("generate", f"w{sleep}", prompt=[1])
        bench.finish(bench.submitted())
        assert client.receive()["op"] == "result"
