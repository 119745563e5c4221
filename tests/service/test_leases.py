"""Leases: how long a client that is gone keeps its requests. The clock is the test's."""

import inspect
import os
import tracemalloc

import pytest
import zmq

from rollout.engine.messages.to_engine import Cancel
from rollout.engine.messages.to_service import Finish
from rollout.service.leases import Leases, client_key, may_return
from tests.support.service.harness import delta, done, serving
from tests.support.service.slow_codec import SlowCodec

A, B = b"\x00aaaa", b"\x00bbbb"
JOB, OTHER = client_key("job", A), client_key("other", A)


@pytest.fixture
def leases(clock):
    return Leases(60.0, clock)


def test_lease_of_a_client_ends_when_it_stayed_away(leases, clock):
    leases.hold(JOB, A)
    assert leases.wait_s() is None
    leases.connection_closed(A)
    assert leases.wait_s() == 60 and leases.take_ended() == []
    clock.now += 59.9
    assert leases.take_ended() == []
    clock.now += 0.1
    assert leases.wait_s() == 0
    assert leases.take_ended() == [JOB]
    assert leases.take_ended() == [] and leases.wait_s() is None, "told once"


def test_client_that_comes_back_keeps_its_lease(leases, clock):
    leases.hold(JOB, A)
    leases.connection_closed(A)
    clock.now += 59
    leases.renew(JOB, B)
    clock.now += 1000
    assert leases.take_ended() == []
    leases.connection_closed(B)
    clock.now += 59
    assert leases.take_ended() == [], "the lease begins anew"
    clock.now += 1
    assert leases.take_ended() == [JOB]


def test_client_is_there_while_one_of_its_connections_is(leases, clock):
    leases.hold(JOB, A)
    leases.renew(JOB, B)
    leases.connection_closed(A)
    clock.now += 1000
    assert leases.take_ended() == []


def test_clients_leave_in_order_and_one_connection_may_be_several(leases, clock):
    leases.hold(JOB, A)
    leases.hold(OTHER, A)
    leases.hold(OTHER, B)
    leases.connection_closed(A)
    clock.now += 30
    leases.connection_closed(B)
    clock.now += 30
    assert leases.take_ended() == [JOB] and leases.wait_s() == 30
    clock.now += 30
    assert leases.take_ended() == [OTHER]


def test_client_without_a_name_is_gone_at_once(leases):
    nameless = client_key(None, A)
    leases.hold(nameless, A)
    leases.connection_closed(A)
    assert leases.wait_s() == 0 and leases.take_ended() == [nameless]


def test_only_a_name_or_an_identity_of_its_own_lets_a_client_return():
    assert may_return(client_key("connection:00", A)) and may_return(client_key(None, b"mine"))
    assert not may_return(client_key(None, A))
    assert client_key("x", A) == client_key("x", B) and client_key(None, A) != client_key(None, B)


def test_nothing_is_remembered_of_clients_without_requests(leases):
    def come_and_go(clients: range) -> None:
        for i in clients:
            connection = os.urandom(5)
            leases.renew(f"client:{i}", connection)
            leases.hold(JOB, connection)
            if i % 2:
                leases.connection_closed(connection)
            leases.release(JOB)
            leases.connection_closed(connection)

    come_and_go(range(100))
    tracemalloc.start()
    try:
        come_and_go(range(100, 1100))
        own = tracemalloc.Filter(True, inspect.getfile(type(leases)))  # other threads allocate, too
        kept = tracemalloc.take_snapshot().filter_traces([own]).statistics("filename")
        assert sum(each.size for each in kept) < 5000, "bytes, of 1000 clients"
    finally:
        tracemalloc.stop()
    assert leases.take_ended() == []


# --- through real sockets --------------------------------------------------------------------------------------------


def vanish(client):
    client.socket.close(0)


def wait_for_a_lease(bench):
    """Return when the lease of a client that leaves now has ended."""
    later = bench.client()
    later.send("generate", "r", client="later", prompt=[1], max_tokens=9)
    request = bench.submitted()
    vanish(later)
    assert bench.command() == Cancel(request.key)
    bench.finish(request, [], reason="cancelled")


def status_of(bench):
    return bench.client().ask("status", "s")


def test_named_client_that_stays_away_has_its_requests_ended_and_their_partials_kept(codec):
    with serving(codec, lease_s=0.1) as bench:
        gone = bench.client()
        gone.send("generate", "r", client="job", prompt=[1], n=3, max_tokens=9)
        request = bench.submitted()
        bench.put(delta(request.key, 0, 0, [1, 2], finish=Finish("length")), delta(request.key, 1, 0, [3]))
        assert gone.ask("ping", "p", client="job")["op"] == "ok"
        vanish(gone)
        assert bench.command() == Cancel(request.key), "no message came: the worker noticed by itself"
        for index, tokens in ((1, [4]), (2, [])):
            bench.put(delta(request.key, index, 1 if index == 1 else 0, tokens, finish=Finish("cancelled")))
        bench.put(done(request))
        result = bench.client().ask("attach", "back", client="job", target="r")
        assert [completion["token_ids"].tolist() for completion in result["completions"]] == [[1, 2], [3, 4], []]
        assert [completion["finish_reason"] for completion in result["completions"]] == [
            "length",
            "cancelled",
            "cancelled",
        ]
        assert status_of(bench)["reclaimed"] == 2, "completions that had ended by themselves are not counted"
        assert bench.inbox.empty()


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_completion_without_tokens_of_a_vanished_client_is_not_kept(codec, cancelled):
    with serving(codec, lease_s=0.1) as bench:
        gone = bench.client()
        gone.send("generate", "r", client="job", prompt=[1], n=2, max_tokens=9)
        known = {"token_ids": [4, 5], "seed": 1}
        gone.send("generate", "s", client="job", prompt=[1], max_tokens=9, continue_from=known)
        requests = [bench.submitted(), bench.submitted()]
        if cancelled:
            for name in ("r", "s"):
                assert gone.ask("cancel", "c", client="job", target=name)["op"] == "ok"
        else:
            assert gone.ask("ping", "p", client="job")["op"] == "ok"
        vanish(gone)
        assert [bench.command(), bench.command()] == [Cancel(request.key) for request in requests]
        if cancelled:  # nothing tells when the lease ends of what was cancelled before: the next client's ends later
            wait_for_a_lease(bench)
        for request in requests:
            bench.finish(request, [], reason="cancelled")
        back = bench.client()
        assert back.ask("attach", "b", client="job", target="r")["code"] == "not_found"
        assert status_of(bench)["results"]["stored"] == 0
        back.send("generate", "r", client="job", prompt=[2], max_tokens=9)
        bench.finish(bench.submitted())
        assert back.receive()["op"] == "result", "its id is free"


def test_named_client_that_is_back_within_its_lease_keeps_its_requests(codec):
    with serving(codec, lease_s=30.0) as bench:
        gone = bench.client()
        gone.send("generate", "r", client="job", prompt=[1], max_tokens=9)
        request = bench.submitted()
        vanish(gone)
        back = bench.client()
        assert back.ask("ping", "p", client="job")["op"] == "ok"
        back.send("attach", "again", client="job", target="r")
        bench.finish(request)
        result = back.receive()
        assert (result["id"], result["op"]) == ("again", "result")
        assert result["completions"][0]["finish_reason"] == "length"
        assert bench.inbox.empty() and status_of(bench)["reclaimed"] == 0


def test_message_of_any_kind_renews_a_lease(codec):
    with serving(codec, lease_s=4.0) as bench:  # long enough for a ping on a busy machine
        gone, later, back = bench.client(), bench.client(), bench.client()
        gone.send("generate", "r", client="job", prompt=[1], max_tokens=9)
        bench.submitted()
        later.send("generate", "r", client="other", prompt=[1], max_tokens=9)
        other = bench.submitted()
        vanish(gone)
        assert back.ask("ping", "p")["op"] == "ok"
        vanish(later)
        assert back.ask("ping", "p", client="job")["op"] == "ok"
        assert bench.command() == Cancel(other.key), "and not the one that left before it"
        assert bench.inbox.empty()


def test_nameless_client_that_is_gone_has_its_requests_ended_at_once_and_nothing_is_kept(codec):
    with serving(codec) as bench:
        gone = bench.client()
        for name in ("waits", "cancelled", "done"):
            gone.send("generate", name, prompt=[1], n=2, max_tokens=9)
        waits, cancelled, finished = (bench.submitted() for _ in range(3))
        bench.finish(finished)
        assert gone.receive()["id"] == "done"
        assert gone.ask("cancel", "c", target="cancelled")["op"] == "ok"
        assert bench.command() == Cancel(cancelled.key)
        assert status_of(bench)["results"]["stored"] == 1
        vanish(gone)
        assert bench.command() == Cancel(waits.key)
        bench.finish(cancelled)
        bench.finish(waits)
        status = status_of(bench)
        assert (status["results"], status["reclaimed"]) == ({"stored": 0, "bytes": 0}, 2)
        assert bench.inbox.empty(), "what its client had cancelled is not cancelled again"


def test_detached_request_survives_its_client(codec):
    with serving(codec, lease_s=0.0) as bench:
        gone = bench.client()
        gone.send("generate", "stays", client="job", prompt=[1], max_tokens=9, detached=True)
        stays = bench.submitted()
        gone.send("generate", "goes", client="job", prompt=[1], max_tokens=9)
        goes = bench.submitted()
        vanish(gone)
        assert bench.command() == Cancel(goes.key)
        bench.finish(stays)
        result = bench.client().ask("attach", "b", client="job", target="stays")
        assert result["completions"][0]["token_ids"].tolist() == [1, 2, 3]
        assert bench.inbox.empty() and status_of(bench)["reclaimed"] == 1


def test_detached_request_needs_a_name(codec):
    with serving(codec) as bench:
        error = bench.client().ask("generate", prompt=[1], detached=True)
        assert (error["code"], error["field"]) == ("bad_request", "client")


def test_connection_with_an_identity_of_its_own_has_a_lease(codec):
    with serving(codec, lease_s=30.0) as bench:
        before = with_identity(bench)
        before.send("generate", "r", prompt=[1], max_tokens=9)
        request = bench.submitted()
        vanish(before)
        after = with_identity(bench)
        after.send("attach", "b", target="r")
        after.send("ping", "p")
        assert after.receive()["id"] == "p"
        bench.finish(request)
        assert after.receive()["op"] == "result"
        assert bench.inbox.empty()


def with_identity(bench):
    client = bench.client()
    vanish(client)
    client.socket = bench.context.socket(zmq.DEALER)
    for option, value in ((zmq.ROUTING_ID, b"trainer-0"), (zmq.RCVTIMEO, 5000), (zmq.LINGER, 0)):
        client.socket.setsockopt(option, value)
    client.socket.connect(bench.server.endpoint)
    return client


@pytest.mark.parametrize("named", [True, False])
def test_client_that_goes_while_its_prompt_is_tokenized_leaves_nothing_running(codec, named):
    slow = SlowCodec(codec)
    with serving(slow, lease_s=0.0) as bench:
        gone = bench.client()
        fields = {"client": "job"} if named else {}
        gone.send("generate", "r", prompt="text", n=4, max_tokens=9, **fields)
        assert gone.ask("ping", "p")["op"] == "ok"
        vanish(gone)
        other = bench.client()
        while other.ask("status", "s")["reclaimed"] != 4:
            pass
        slow.go.set()
        other.send("generate", "next", prompt="text", max_tokens=9)
        assert bench.submitted().key[1].startswith("next#")


def test_prompts_of_vanished_clients_are_not_worked_on_and_hold_no_memory(codec):
    worked_on = []

    class Slow(SlowCodec):
        def encode(self, text):
            worked_on.append(text[:9])
            return super().encode(text)

    slow = Slow(codec)
    with serving(slow, lease_s=0.0) as bench:
        gone, other = bench.client(), bench.client()
        gone.send("generate", "first", prompt="first", max_tokens=9)
        assert gone.ask("ping", "p")["op"] == "ok"
        tracemalloc.start()
        for i in range(4):
            gone.send("generate", f"r{i}", prompt="x" * 5_000_000, max_tokens=9)
        assert gone.ask("ping", "p")["op"] == "ok"
        assert tracemalloc.get_traced_memory()[0] > 20_000_000
        vanish(gone)
        while other.ask("status", "s")["reclaimed"] != 5:
            pass
        assert tracemalloc.get_traced_memory()[0] < 12_000_000  # a message may still be referenced
        tracemalloc.stop()
        slow.go.set()
        other.send("generate", "next", prompt="next", max_tokens=9)
        assert bench.submitted().key[1].startswith("next#")
        assert worked_on == ["first", "next"]
