"""What becomes of a connection, which of several is used, and replies that break the protocol."""

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from tests.support.bridge.client_script import TIMEOUT_S, Connect, Serve, only_generate, silent
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, counting, result
from tests.support.bridge.standing_still import standing_still
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.wire import codec as wire
from trainer_bridge.wire import errors

# --- connections -----------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_an_error_and_the_next_worker_is_found(connect: Connect, serve: Serve) -> None:
    first = serve(only_generate(lambda worker, peer, header: worker.vanish()))
    client = connect(first.endpoint)
    with pytest.raises(errors.ConnectionLost) as caught:
        client.generate([1], request_id="r")
    assert caught.value.request_id == "r"
    first.stop()
    second = serve(endpoint=first.endpoint)
    assert client.generate([1], max_tokens=1).completions[0].token_ids.tolist() == [2]
    assert len(second.requests) == 1  # the lost request was not sent again behind our back


def test_what_was_not_sent_when_the_connection_was_lost_is_never_sent(connect: Connect, serve: Serve) -> None:
    first = serve(lambda worker, peer, header: worker.vanish(), hwm=1)
    client = connect(first.endpoint, connect_timeout_s=1.0)
    prompt = np.zeros(1 << 18, np.int32)  # more than the system's buffers hold, all together
    settled = list(client.generate_as_completed([prompt] * 40))
    assert all(isinstance(item.error, errors.ConnectionLost) for item in settled) and len(settled) == 40
    first.stop()
    second = serve(endpoint=first.endpoint)
    client._core._connect_timeout_s = TIMEOUT_S
    client.ping()
    assert [header["op"] for header in second.requests] == ["ping"]


def test_a_restart_between_two_requests_goes_unnoticed(connect: Connect, serve: Serve) -> None:
    first = serve()
    client = connect(first.endpoint)
    client.ping()
    first.stop()
    second = serve(endpoint=first.endpoint)
    client.ping()
    assert [header["op"] for header in second.requests] == ["ping"]


def within_context(monkeypatch: pytest.MonkeyPatch, start: Callable[[], Any]) -> tuple[zmq.Context, Any]:
    """A new context of ZeroMQ, and a client that was started in it."""
    context = zmq.Context()
    with monkeypatch.context() as patch:
        patch.setattr(zmq, "Context", lambda: context)
        return context, start()


def test_a_restart_that_zeromq_has_no_time_to_notice_goes_unnoticed(
    connect: Connect, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = serve()
    context, client = within_context(monkeypatch, lambda: connect(first.endpoint))
    client.ping()
    with standing_still(context):
        first.stop()
        second = serve(endpoint=first.endpoint)
        stream = client.generate([1], max_tokens=1, stream="tokens")  # sent, but not waited for
    assert stream.wait().completions[0].token_ids.tolist() == [2]
    assert [header["op"] for header in second.requests] == ["generate"]


def test_what_was_answered_before_the_loss_counts(connect: Connect, serve: Serve) -> None:
    def answer_and_go(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        counting(worker, peer, header)
        worker.vanish()

    worker = serve(answer_and_go)
    connect(worker.endpoint).shutdown("now")
    assert worker.requests[0]["mode"] == "now"


def test_an_endpoint_without_a_worker_is_an_error(connect: Connect) -> None:
    with pytest.raises(errors.ConnectionLost, match="cannot be reached"):
        connect("tcp://127.0.0.1:9", connect_timeout_s=0.05).generate("x")


def test_a_string_that_is_no_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="tcp://"):
        RolloutClient("localhost:5757")


def test_a_request_may_be_made_before_the_worker_is_there(connect: Connect, serve: Serve) -> None:
    first = serve()
    first.stop()
    client = connect(first.endpoint)
    settled = client.generate_as_completed([[1]], max_tokens=1)
    second = serve(endpoint=first.endpoint)
    assert next(settled).unwrap().completions[0].token_ids.tolist() == [2]
    assert len(second.requests) == 1


def test_what_was_given_up_before_the_worker_was_there_is_never_sent(connect: Connect, serve: Serve) -> None:
    first = serve()
    first.stop()
    client = connect(first.endpoint)
    with pytest.raises(errors.RolloutTimeout):
        client.generate([1], timeout_s=0.02)
    second = serve(endpoint=first.endpoint)
    client.ping()
    assert [header["op"] for header in second.requests] == ["ping"]


def test_a_timeout_is_an_error_and_cancels(connect: Connect, serve: Serve) -> None:
    worker = serve(only_generate(silent))
    client = connect(worker.endpoint)
    client.ping()
    with pytest.raises(errors.RolloutTimeout) as caught:
        client.generate([1], timeout_s=0.05, request_id="slow")
    assert isinstance(caught.value, TimeoutError)
    assert worker.next("cancel")["target"] == "slow"


def test_the_answer_to_something_given_up_is_dropped(connect: Connect, serve: Serve) -> None:
    late: list[Any] = []

    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        late.append((peer, header))
        if header["op"] == "ping":
            for known in late:
                counting(worker, *known)

    client = connect(serve(handle).endpoint)
    with pytest.raises(errors.RolloutTimeout):
        client.generate([1], timeout_s=0.05)
    client.ping()


# --- several endpoints -----------------------------------------------------------------------------------------------


def test_the_least_loaded_endpoint_is_chosen_by_completions(connect: Connect, serve: Serve) -> None:
    first, second = serve(only_generate(silent)), serve(only_generate(silent))
    client = connect(first.endpoint, second.endpoint)
    client.ping()
    eight = client.generate([1], n=8, stream="tokens", endpoint=first.endpoint)
    loads = [client.generate([1], n=3, stream="tokens").endpoint for _ in range(4)]
    assert loads == [second.endpoint] * 3 + [first.endpoint]  # 8:0, 8:3, 8:6, 8:9
    eight.close()
    assert client.generate([1], stream="tokens").endpoint == first.endpoint  # 3:9


def test_a_worker_that_may_still_come_gets_its_share(connect: Connect, serve: Serve) -> None:
    there = serve(only_generate(silent))
    client = connect(there.endpoint, "tcp://127.0.0.1:9")
    client.ping(endpoint=there.endpoint)
    places = [client.generate([i], stream="tokens").endpoint for i in range(10)]
    assert places.count(there.endpoint) == 5


def test_an_endpoint_that_was_never_there_attracts_nothing_more(connect: Connect, serve: Serve) -> None:
    there, absent = serve(only_generate(silent)), "tcp://127.0.0.1:9"
    client = connect(absent, there.endpoint, connect_timeout_s=0.5)
    with pytest.raises(errors.ConnectionLost):
        client.generate([1], endpoint=absent)
    assert {client.generate([i], stream="tokens").endpoint for i in range(5)} == {there.endpoint}


def test_equal_loads_are_spread(connect: Connect, serve: Serve) -> None:
    workers = [serve(), serve(), serve()]
    client = connect(*(worker.endpoint for worker in workers))
    client.ping()
    for i in range(30):
        client.generate([i])  # ends before the next one begins
    counts = [sum(header["op"] == "generate" for header in worker.requests) for worker in workers]
    assert counts == [10, 10, 10]
    client.generate_many([[i] for i in range(30)], max_in_flight=6)
    assert sum(header["op"] == "generate" for worker in workers for header in worker.requests) == 60


def test_a_session_stays_where_it_is(connect: Connect, serve: Serve) -> None:
    workers = [serve(), serve()]
    client = connect(*(worker.endpoint for worker in workers))
    client.ping()
    places = {name: client.generate([1], session=name).endpoint for name in ("a", "b")}
    assert places["a"] != places["b"]
    for name in "aaabab":
        assert client.generate([1], session=name).endpoint == places[name]


def test_a_worker_that_is_gone_attracts_nothing(connect: Connect, serve: Serve) -> None:
    gone, there = serve(), serve()
    client = connect(gone.endpoint, there.endpoint)
    client.ping()
    gone.stop()
    with pytest.raises((errors.ConnectionLost, errors.RolloutTimeout)):
        client.ping(endpoint=gone.endpoint, timeout_s=0.5)
    assert {client.generate([1]).endpoint for _ in range(4)} == {there.endpoint}


# --- broken replies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"op": "result"}, "completions"),
        ({"op": "chunk", **completion([1]), "offset": 0}, "answered generate with 'chunk'"),
        ({"op": "ok"}, "answered generate with 'ok'"),
        ({"op": "result", "v": 2}, "version 2"),
        (result([completion([1], token_ids=[1.5])]), "token_ids"),
        (result([completion([1], token_ids="x")]), "token_ids"),
        (result([completion([1], versions=[[1, "x"]])]), "version run"),
        (result([completion([1], finish_reason="tired")]), "tired"),
        (result([completion([1])], prompt_tokens=None), "prompt_tokens"),
    ],
)
def test_a_reply_that_breaks_the_protocol_is_an_error(connect: Connect, serve: Serve, reply: Any, said: str) -> None:
    worker = serve(only_generate(lambda worker, peer, header: worker.reply(peer, header, reply)))
    client = connect(worker.endpoint)
    with pytest.raises(errors.ProtocolError, match=said):
        client.generate([1])
    client.ping()


def test_a_reply_that_cannot_be_read_fails_the_request_it_names(connect: Connect, serve: Serve) -> None:
    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["prompt"][0] == 13:
            worker.send(peer, [wire.encode({"id": header["id"]})[0] + b"\0"])
        counting(worker, peer, header)

    settled = list(connect(serve(only_generate(handle)).endpoint).generate_as_completed([[1], [13], [2]]))
    failed = [item.index for item in settled if isinstance(item.error, errors.ProtocolError)]
    assert failed == [1] and sum(item.result is not None for item in settled) == 2


@pytest.mark.parametrize("frames", [[b"\xc1"], wire.encode({"v": 1, "id": None, "op": "error", "message": "?"})])
def test_a_reply_that_nobody_can_place_leaves_no_request_hanging(connect: Connect, serve: Serve, frames: Any) -> None:
    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["prompt"][0] == 2:
            worker.send(peer, frames)

    settled = list(connect(serve(only_generate(handle)).endpoint).generate_as_completed([[1], [2]]))
    assert all(isinstance(item.error, errors.ProtocolError) for item in settled) and len(settled) == 2


#: Clients with requests in flight; one of them has no worker.
DROPPED = {
    "blocking": """
from trainer_bridge.client.blocking import RolloutClient
clients = [RolloutClient(endpoint), RolloutClient(endpoint, resume=True), RolloutClient("tcp://127.0.0.1:9")]
kept = [clients, [client.generate([1], stream="tokens") for client in clients]]
""",
    "asyncio": """
import asyncio
from trainer_bridge.client.asynchronous import AsyncRolloutClient
async def ask(client):
    return client, await client.generate([1], stream="tokens")
kept = [asyncio.run(ask(AsyncRolloutClient(place))) for place in (endpoint, "tcp://127.0.0.1:9")]
""",
}
ENDS = {
    "exit": "",
    "collected": "import gc; del clients; kept.clear(); gc.collect(); print('collected', flush=True)",
    "forked": """
import gc, os
child = os.fork()
clients = None
kept.clear()
gc.collect()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
}


@pytest.mark.parametrize("kind", DROPPED)
@pytest.mark.parametrize("end", ENDS)
def test_a_client_that_is_dropped_does_not_hang(serve: Serve, kind: str, end: str) -> None:
    worker = serve(only_generate(silent))
    code = f"endpoint, clients = {worker.endpoint!r}, []\n{DROPPED[kind]}\n{ENDS[end]}"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S).returncode == 0


def test_a_client_that_is_collected_closes_its_connections(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = serve()
    context, client = within_context(monkeypatch, lambda: RolloutClient(worker.endpoint))
    client.ping()
    del client
    gc.collect()
    assert context.closed  # that waits for all of its sockets


def test_a_worker_that_is_stopped_is_lost_after_four_heartbeats() -> None:
    """A peer that shakes hands, and then says nothing more, as a stopped process does."""
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        endpoint = worker.stdout.readline().strip()
        try:
            with RolloutClient(endpoint, heartbeat_s=0.1, timeout_s=TIMEOUT_S) as client:
                began = time.monotonic()
                with pytest.raises(errors.ConnectionLost):
                    client.ping()
                assert time.monotonic() - began < TIMEOUT_S / 2
        finally:
            worker.kill()


STOPPED = """
import os, signal, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind("tcp://127.0.0.1:*")
print(socket.last_endpoint.decode(), flush=True)
socket.recv()
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("heartbeat_s", [0.0, -1.0, float("nan"), 4000.0])
def test_a_heartbeat_that_cannot_be_is_refused(heartbeat_s: float) -> None:
    with pytest.raises(ValueError, match="heartbeat_s"):
        RolloutClient("tcp://127.0.0.1:9", heartbeat_s=heartbeat_s)


def test_a_closed_client_says_so(serve: Serve) -> None:
    with RolloutClient(serve().endpoint) as client:
        client.ping()
    with pytest.raises(ValueError, match="closed"):
        client.ping()
    client.close()
