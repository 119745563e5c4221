"""Pause, cancel, deadlines, priorities and status of a real worker, and a client that vanishes."""

from typing import Any

import pytest

from tests.support.worker.harness import EOS, text_of, until
from tests.support.worker.raw_client import RawClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import RolloutTimeout

LONG = {"max_tokens": 30_000, "stream": "tokens", "stream_every": 8}


def counted(start: int, tokens: int) -> str:
    return "".join(f" {number}" for number in range(start + 1, start + 2 + tokens // 2))[:tokens]


def test_a_paused_worker_generates_nothing_and_goes_on_where_it_was(client: RolloutClient) -> None:
    stream = client.generate("17:", max_tokens=30_000, stream="tokens", stream_every=1)
    next(stream)
    client.pause()
    status = client.status()
    assert status["state"] == "paused"
    until(lambda: (client.status()["slots"]["in_flight"], client.status()["rows"]["running"]) == (0, 1), "the snapshot")
    had = sum(len(part) for part in stream.partials())
    client.ping()  # an answer that comes after whatever was still on its way
    now = sum(len(part) for part in stream.partials())
    client.ping()
    assert sum(len(part) for part in stream.partials()) == now and had <= now < 30_000
    late = client.generate("30:", max_tokens=9, stream="completions")
    with pytest.raises(RolloutTimeout):
        client.generate("40:", max_tokens=9, timeout_s=0.05)
    client.resume()
    assert client.status()["state"] == "serving"
    while len(stream.partials()[0]) < now + 100:
        next(stream)
    stream.cancel()
    (completion,) = stream.wait().completions
    assert text_of(completion.token_ids) == counted(17, len(completion)) and completion.finish_reason == "cancelled"
    assert text_of(late.wait().completions[0].token_ids) == counted(30, 9)


def test_pause_with_abort_hands_everything_back(client: RolloutClient) -> None:
    streams = [client.generate(f"{start}:", n=5, **LONG) for start in (17, 50)]  # ten completions on eight rows
    next(streams[0])
    client.pause("abort")
    for start, stream in zip((17, 50), streams, strict=True):
        for completion in stream.wait().completions:
            assert completion.finish_reason == "cancelled" and len(completion) < 30_000
            assert text_of(completion.token_ids) == counted(start, len(completion))
    status = client.status()
    assert status["state"] == "paused"
    client.resume()
    assert text_of(client.generate("17:", max_tokens=6).completions[0].token_ids) == " 18 19"


def test_cancel_ends_a_request_with_its_tokens_so_far(client: RolloutClient) -> None:
    with client.generate("17:", n=3, **LONG) as stream, client.generate("90:", **LONG) as other:
        next(stream)
        stream.cancel()
        completions = stream.wait().completions
        assert [completion.finish_reason for completion in completions] == ["cancelled"] * 3
        assert [completion.index for completion in completions] == [0, 1, 2]
        for completion in completions:
            assert text_of(completion.token_ids) == counted(17, len(completion)) and len(completion) < 30_000
            assert sum(count for _, count in completion.versions) == len(completion)
        next(other)  # goes on
        other.cancel()


def test_cancel_reaches_waiting_requests(client: RolloutClient) -> None:
    with client.generate("17:", n=8, **LONG) as stream:
        next(stream)
        waiting = client.generate("18:", max_tokens=5, stream="completions", request_id="waits")
        client.cancel("waits")
        (completion,) = waiting.wait().completions
        assert (completion.finish_reason, len(completion)) == ("cancelled", 0)
        stream.cancel()


def test_a_deadline_ends_a_completion_with_its_tokens_so_far(client: RolloutClient) -> None:
    for deadline_s in (1.0, 4.0, 16.0):  # on a busy machine the first token may take longer than a second
        result = client.generate("17:", n=2, max_tokens=32_000, deadline_s=deadline_s)
        assert [completion.finish_reason for completion in result.completions] == ["deadline"] * 2
        assert all(text_of(one.token_ids) == counted(17, len(one)) for one in result.completions)
        assert deadline_s / 2 <= result.timing.total_s < deadline_s + 60
        if all(0 < len(completion) < 32_000 for completion in result.completions):
            return
    pytest.fail("no completion had a token before its deadline")


def test_a_deadline_that_passes_in_the_queue_ends_it_empty(client: RolloutClient) -> None:
    client.pause()
    result = client.generate("17:", max_tokens=20, deadline_s=0.01)
    client.resume()
    (completion,) = result.completions
    assert (completion.finish_reason, len(completion), completion.versions) == ("deadline", 0, [])


def test_higher_priorities_go_first(raw: RawClient) -> None:
    raw.ask("pause", "p")
    priorities = {"low": -5, "first": 0, "second": 0, "high": 7}
    for name, priority in priorities.items():  # eight completions each: one request at a time has all rows
        raw.send("generate", name, prompt=[3, 4], n=5 if name == "low" else 6, max_tokens=40, priority=priority)
    raw.send("resume", "r")
    order = [raw.receive()["id"] for _ in range(5)]
    assert order[0] == "r" and order.index("high") < order.index("first") < order.index("second") < order.index("low")


def test_a_vanished_client_leaves_nothing_behind(worker: WorkerProcess, client: RolloutClient) -> None:
    reclaimed = client.status()["reclaimed"]
    with RawClient(worker.endpoint) as raw:
        raw.send("generate", "streams", prompt="17:", n=2, max_tokens=30_000, stream="tokens", stream_every=4)
        assert raw.receive()["op"] == "chunk"
        raw.send("generate", "waits", prompt="17:", n=3, max_tokens=30_000)
        raw.send("ping", "p")
        while raw.receive()["op"] != "ok":
            pass
        until(lambda: client.status()["rows"]["running"] == 5, "the rows")
    until(lambda: client.status()["rows"]["running"] == 0, "the rows to be free again")
    assert client.status()["reclaimed"] == reclaimed + 5


def test_a_vanished_client_that_streams_nothing_is_noticed_too(worker: WorkerProcess, client: RolloutClient) -> None:
    reclaimed = client.status()["reclaimed"]
    with RawClient(worker.endpoint) as raw:
        raw.send("generate", "waits", prompt="17:", n=4, max_tokens=30_000)
        until(lambda: client.status()["rows"]["running"] == 4, "the rows")
    until(lambda: client.status()["rows"]["running"] == 0, "the rows to be free again")
    assert client.status()["reclaimed"] == reclaimed + 4


def test_a_connection_that_takes_an_ended_ones_place_is_not_taken_for_it(worker: WorkerProcess) -> None:
    """The kernel gives the next connection the file descriptor of the one that just ended."""
    for i in range(30):
        with RawClient(worker.endpoint) as gone:
            gone.send("generate", "g", prompt="17:", max_tokens=30_000)
            assert gone.ask("ping", "p")["op"] == "ok"
        with RawClient(worker.endpoint) as stays:
            reply = stays.ask("generate", "s", prompt="17:", max_tokens=3 + i)
            assert reply["op"] == "result" and reply["completions"][0]["finish_reason"] == "length"


def test_a_client_that_comes_back_on_another_connection_keeps_its_request(
    worker: WorkerProcess, client: RolloutClient
) -> None:
    request = {"prompt": "17:", "max_tokens": 1000, "client": "comes back"}
    client.pause()  # the request is not to be over before the other connection is there
    with RawClient(worker.endpoint) as before:
        before.send("generate", "r", **request)
        assert before.ask("ping", "p")["op"] == "ok"
        with RawClient(worker.endpoint) as after:
            after.send("generate", "r", **request)
            assert after.ask("ping", "p")["op"] == "ok"
            before.close()
            client.resume()
            (completion,) = after.receive()["completions"]
    assert text_of(completion["token_ids"]) == counted(17, 1000)


def test_status_has_every_field_while_it_runs(client: RolloutClient, worker: WorkerProcess) -> None:
    preemptions = client.status()["preemptions"]

    def at_work() -> dict[str, Any] | None:
        now = client.status()
        full = now["rows"]["running"] == 8 and now["queue"]["waiting"] == 2
        return now if full and now["gpu_active_pct"] > 0 and now["tokens_per_s"] > 0 else None

    with client.generate("17:", n=10, **LONG | {"max_tokens": 8000}) as stream:  # eight of these fit into the KV
        status = until(at_work, "rows and a rate")
        stream.cancel()
    assert status.keys() >= {"model", "worker", "state", "weights_version", "weights_endpoint", "capabilities"}
    assert status["model"] == worker.model and str(worker.pid) in status["worker"]
    assert (status["state"], status["weights_version"]) == ("serving", 0)
    assert status["weights_endpoint"] == worker.weights_endpoint
    assert status["rows"] == {"running": 8, "max": 8} and status["queue"] == {"waiting": 2, "max": 24, "clients": 1}
    pages = status["pages"]
    assert pages.keys() == {"free", "cached", "used", "total"} and pages["used"] >= 8
    assert pages["free"] + pages["cached"] + pages["used"] == pages["total"]
    assert 0 <= status["slots"]["in_flight"] <= 2
    assert 0 < status["tokens_per_s"] < 1e6 and 0 < status["gpu_active_pct"] <= 100
    assert 0 < status["gpu_busy_s"] < status["uptime_s"]
    assert status["reclaimed"] >= 0 and status["preemptions"] == preemptions and status["uptime_s"] > 0
    assert (status["max_context_tokens"], status["vocab_size"], status["eos_ids"]) == (32_768, 16, [EOS])
    ops = {"generate", "cancel", "status", "ping", "pause", "resume", "shutdown", "weights"}
    assert ops | {"messages", "stream", "continue_from", "priority", "deadline_s"} <= set(status["capabilities"])
