"""Ops other than `generate`, slow and vanished clients, start and stop."""

import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
import zmq

from rollout.engine.messages.statuses import EngineStatus
from rollout.engine.messages.to_engine import Cancel, Pause, Resume, Shutdown, Sleep
from rollout.engine.messages.to_service import Done, Finish
from rollout.service.capabilities import Outbox
from tests.support.service.harness import MODEL, ServedModel, delta, done, serving
from tests.support.service.slow_codec import SlowCodec
from trainer_bridge.client.results import split_chunks

LONG = ServedModel(name="long", vocab_size=302, max_context_tokens=100_000_000)
PART = 20_000  # tokens of a large chunk: 240 KB


@pytest.fixture
def bench(codec):
    with serving(codec) as bench:
        yield bench


@pytest.mark.parametrize("kind, delimiter", [(zmq.DEALER, False), (zmq.DEALER, True), (zmq.REQ, False)])
def test_ping_is_answered_with_the_framing_of_the_question(bench, kind, delimiter):
    assert bench.client(kind, delimiter).ask("ping", "p1", client="me") == {"v": 1, "op": "ok", "id": "p1"}


def test_status_has_every_field(bench):
    status = bench.client().ask("status")
    assert (status["op"], status["model"], status["worker"], status["state"]) == (
        "status",
        "tiny",
        "worker-1",
        "serving",
    )
    assert status["weights_version"] == 3 and status["weights_endpoint"] is None
    assert status["rows"] == {"running": 2, "max": 8} and status["queue"] == {"waiting": 0, "max": 16, "clients": 0}
    assert status["pages"] == {"free": 5, "cached": 0, "used": 0, "total": 0}
    assert status["slots"] == {"in_flight": 0}
    for name in ("tokens_per_s", "gpu_active_pct", "gpu_busy_s", "reclaimed", "preemptions", "uptime_s"):
        assert status[name] == 0
    assert status["max_context_tokens"] == 1000 and status["eos_ids"] == [301] and status["vocab_size"] == 302
    assert status["results"] == {"stored": 0, "bytes": 0}
    assert {"generate", "messages", "stop.strings", "continue_from", "attach", "ack"} <= set(status["capabilities"])
    assert "weights" not in status["capabilities"] and "sleep" not in status["capabilities"]


def test_pause_and_resume_are_answered_once_they_took_effect(bench):
    client = bench.client()
    client.send("pause", "p", mode="abort")
    client.send("resume", "r")
    pause, resume = bench.command(), bench.command()
    assert isinstance(pause, Pause) and pause.mode == "abort" and isinstance(resume, Resume)
    assert client.ask("ping", "i")["id"] == "i", "nothing was answered before the engine did it"
    bench.put(Done(resume.token), Done(pause.token))
    assert [client.receive()["id"] for _ in range(2)] == ["r", "p"]


def test_draining_worker_refuses_new_requests_and_finishes_the_old(bench):
    client = bench.client()
    client.send("generate", "old", prompt=[1], max_tokens=2)
    request = bench.submitted()
    client.send("shutdown", "s")
    command = bench.command()
    assert command == Shutdown("drain", command.token)
    assert client.ask("generate", "new", prompt=[1])["code"] == "unavailable"
    assert client.ask("status")["state"] == "draining"
    bench.finish(request)
    bench.put(Done(command.token))
    bench.server.stop()
    assert [client.receive()["op"] for _ in range(2)] == ["result", "ok"]


def test_what_is_in_flight_when_the_server_stops_is_answered(bench):
    client = bench.client()
    client.send("generate", "g", prompt=[1], max_tokens=2)
    bench.submitted()
    client.send("pause", "p")
    bench.command()
    bench.server.stop()
    replies = {reply["id"]: reply for reply in (client.receive(), client.receive())}
    assert replies["g"]["code"] == replies["p"]["code"] == "unavailable"
    bench.put(Done(1))  # late events go nowhere


class Receiver:
    """A weight receiver that answers later, from a thread of its own."""

    endpoint = "tcp://127.0.0.1:1"

    def control(self, header, reply):
        if header["action"] == "fail":
            raise RuntimeError("broken")
        answer = {"code": "weights_rejected", "message": "no"} if header["action"] == "bad" else {"seen": header["x"]}
        threading.Thread(target=reply, args=(answer,)).start()

    def summary(self):
        return {"apply": "staged", "staging": "host", "last": None}


def test_weight_messages_reach_the_receiver_and_its_answer_the_client(codec):
    with serving(codec, Receiver()) as bench:
        client = bench.client()
        answer = client.ask("weights", "w", action="begin", x=np.arange(3))
        assert (answer["op"], answer["id"], answer["seen"].tolist()) == ("ok", "w", [0, 1, 2])
        answer = client.ask("weights", "w", action="bad")
        assert (answer["op"], answer["code"]) == ("error", "weights_rejected")
        assert client.ask("weights", "w", action="fail")["code"] == "internal"
        status = client.ask("status")
        assert status["weights_endpoint"] == Receiver.endpoint and "weights" in status["capabilities"]


def test_worker_without_receiver_refuses_weights(bench):
    error = bench.client().ask("weights", action="begin")
    assert (error["code"], error["field"]) == ("bad_request", "op")


def test_requests_of_a_vanished_connection_are_cancelled(bench):
    gone, other = bench.client(), bench.client()
    gone.send("generate", "lost", prompt=[1], max_tokens=900, stream="tokens", stream_every=1)
    lost = bench.submitted()
    gone.send("generate", "shared", client="job", prompt=[1], max_tokens=9)
    shared = bench.submitted()
    other.send("generate", "shared", client="job", prompt=[1], max_tokens=9)
    assert other.ask("ping")["op"] == "ok"
    gone.socket.close(0)
    for offset in range(100_000):  # until the socket has noticed
        bench.put(delta(lost.key, 0, offset, [1]))
        other.ask("ping")
        if not bench.inbox.empty():
            break
    assert bench.command() == Cancel(lost.key)
    bench.finish(shared)
    assert other.receive()["op"] == "result", "another connection waits for this one"
    assert bench.inbox.empty()


@pytest.fixture
def slow(codec, caplog):
    """A bench whose first client does not read, with everything between it and the server small."""
    caplog.set_level(logging.WARNING)
    with serving(codec, model=LONG, max_stream_buffer_bytes=1 << 20, send_hwm=1) as bench:
        client = bench.client()
        client.socket.close(0)
        client.socket = bench.context.socket(zmq.DEALER)
        for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.RCVTIMEO, 60_000), (zmq.LINGER, 0)):
            client.socket.setsockopt(option, value)
        client.socket.connect(bench.server.endpoint)
        yield bench, client


def test_stream_of_a_client_that_does_not_read_is_dropped_but_its_result_comes(slow, caplog):
    bench, client = slow
    other = bench.client()
    client.send("generate", prompt=[1], max_tokens=10_000_000, stream="tokens", stream_every=PART)
    request = bench.submitted()
    parts = 0
    while not caplog.records:  # it warns when it drops a stream
        assert parts < 500, "nothing bounds what is kept for a client that does not read"
        bench.put(delta(request.key, 0, parts * PART, [parts % 300] * PART))
        assert other.ask("ping")["op"] == "ok", "another client is served meanwhile"
        parts += 1
    bench.put(delta(request.key, 0, parts * PART, [5], finish=Finish("length")), done(request))
    chunks = []
    while (reply := client.receive())["op"] == "chunk":
        chunks.append(reply)
    assert [chunk["offset"] for chunk in chunks] == [i * PART for i in range(len(chunks))], (
        "a stream ends, it has no gap"
    )
    assert 0 < len(chunks) < parts
    assert len(reply["completions"][0]["token_ids"]) == parts * PART + 1
    assert client.ask("ping")["op"] == "ok"


def test_joined_streams_of_a_client_that_does_not_read_end_without_a_gap(slow, caplog):
    bench, client = slow
    other = bench.client()
    fields = {"prompt": [1], "max_tokens": 10_000_000, "stream": "tokens", "stream_every": PART, "join_chunks": True}
    for name in ("a", "b"):
        client.send("generate", name, **fields)
    requests = [bench.submitted() for _ in range(2)]
    parts = 0
    while not caplog.records:
        assert parts < 500, "nothing bounds what is kept for a client that does not read"
        bench.put(*(delta(request.key, 0, parts * PART, [parts % 300] * PART) for request in requests))
        assert other.ask("ping")["op"] == "ok", "another client is served meanwhile"
        parts += 1
    offsets, results = {"a": [], "b": []}, {}
    for request in requests:  # one result at a time: both have no room
        bench.put(delta(request.key, 0, parts * PART, [5], finish=Finish("length")), done(request))
        while (reply := client.receive())["op"] != "result":
            for chunk in split_chunks(reply) if reply["op"] == "chunks" else [reply]:
                offsets[chunk["id"]].append(chunk["offset"])
        results[reply["id"]] = len(reply["completions"][0]["token_ids"])
    assert results == dict.fromkeys("ab", parts * PART + 1)
    for found in offsets.values():
        assert 0 < len(found) < parts and found == [i * PART for i in range(len(found))], "a stream has no gap"


def test_replies_wait_in_order_for_a_client_that_reads_late(slow, caplog):
    bench, client = slow
    other = bench.client()
    for name in ("a", "b", "c"):
        client.send("generate", name, prompt=[1], max_tokens=10_000_000)
    for request in [bench.submitted() for _ in range(3)]:
        bench.put(delta(request.key, 0, 0, [1] * PART, finish=Finish("length")), done(request))
    assert other.ask("ping")["op"] == "ok"
    assert [client.receive()["id"] for _ in range(3)] == ["a", "b", "c"]


def test_outbox_never_blocks_the_engine_and_keeps_the_order():
    outbox = Outbox()
    for token in range(50_000):  # far more than the socket pair holds
        outbox.put([Done(token)])
    outbox.post(print)
    outbox.put([])
    items = list(outbox.drain())
    assert items == [*(Done(token) for token in range(50_000)), print]
    assert list(outbox.drain()) == []
    outbox.close()
    outbox.put([Done(1)])


def test_endpoint_that_is_taken_is_a_clear_error(bench):
    with pytest.raises(ValueError, match=r"cannot bind .*service\.bind"), serving(bind=bench.server.endpoint):
        pass


def test_port_zero_becomes_a_real_port(bench):
    assert int(bench.server.endpoint.rsplit(":", 1)[1]) > 0
    assert bench.server.endpoint.startswith("tcp://127.0.0.1:")


def test_status_follows_the_engine(bench):
    client = bench.client()
    bench.status[0] = EngineStatus(state="paused", weights_version=9)
    status = client.ask("status")
    assert (status["state"], status["weights_version"]) == ("paused", 9)
    assert MODEL.name == status["model"]


@pytest.mark.parametrize(
    "op, mode, ends",
    [
        ("pause", "abort", True),
        ("pause", "keep", False),
        ("sleep", "abort", True),
        ("sleep", None, False),
        ("sleep", "keep", False),
    ],
)
def test_an_order_that_ends_requests_ends_those_whose_prompt_is_still_text(codec, op, mode, ends):
    slow = SlowCodec(codec)
    with serving(slow, model=replace(MODEL, sleep=True)) as bench:
        client = bench.client()
        client.send("generate", "old", prompt="the", max_tokens=2)
        client.send(op, "o", **({} if mode is None else {"mode": mode}))
        assert isinstance(bench.command(), Pause | Sleep)
        client.send("generate", "new", prompt=[1], max_tokens=2)
        slow.go.set()
        old, *orders = bench.submitted(), *((bench.command(),) if ends else ())
        assert orders == ([Cancel(old.key)] if ends else [])
        new = bench.submitted()
        assert len(old.prompt) == 2 and len(new.prompt) == 1
        assert client.ask("ping", "i")["id"] == "i" and bench.inbox.empty(), "what came after the order goes on"
