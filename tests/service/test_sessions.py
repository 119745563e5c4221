"""Sessions as messages: what the engine is asked for, whose a session is, when it ends."""

import pytest

from rollout.engine.messages.to_engine import Cancel, EndSession, Prefetch
from rollout.engine.messages.to_service import Done, Failed, Rejected
from tests.support.service.harness import serving
from tests.support.service.slow_codec import SlowCodec


@pytest.fixture
def bench():
    with serving(session_lease_s=20.0, max_session_lease_s=40.0) as bench:
        yield bench


@pytest.fixture
def client(bench):
    return bench.client()


def test_a_session_is_its_clients_and_has_a_lease(bench, client):
    for name, lease_s, expected_s in (("job", None, 20.0), ("job", 40, 40.0), (None, 0.5, 0.5)):
        fields = {} if name is None else {"client": name}
        fields |= {} if lease_s is None else {"session_lease_s": lease_s}
        client.send("generate", prompt=[1], max_tokens=3, session="s", **fields)
        request = bench.submitted()
        assert request.session == (request.key[0], "s") and request.session_lease_s == expected_s
        assert (request.key[0] == "client:job") == (name == "job")
        bench.finish(request)
        assert client.receive()["op"] == "result"
        client.ask("ack", "k", targets=["a"], **({} if name is None else {"client": name}))
    client.send("generate", "b", prompt=[1], max_tokens=3)
    assert bench.submitted().session is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"session": ""}, "session"),
        ({"session": "x" * 129}, "session"),
        ({"session": 7}, "session"),
        ({"session": ["s"]}, "session"),
        ({"session": "s", "n": 2}, "n"),
        ({"session_lease_s": 5}, "session_lease_s"),
        ({"end_of_session": True}, "end_of_session"),
        ({"session": "s", "end_of_session": 1}, "end_of_session"),
        *(({"session": "s", "session_lease_s": bad}, "session_lease_s") for bad in (0, -1, 40.1, "5", True, 1e400)),
        ({"session": "s", "session_lease_s": float("nan")}, "session_lease_s"),
    ],
)
def test_wrong_session_fields_are_refused_by_name(bench, client, fields, field):
    error = client.ask("generate", prompt=[1], **fields)
    assert (error["code"], error["field"]) == ("bad_request", field)
    assert bench.inbox.empty()


@pytest.mark.parametrize("fields", [{}, {"session": ""}, {"session": None}, {"session": 5}])
def test_ending_a_session_needs_its_name(bench, client, fields):
    error = client.ask("end_session", **fields)
    assert (error["code"], error["field"]) == ("bad_request", "session")
    assert bench.inbox.empty()


def test_ending_a_session_is_confirmed_once_the_engine_has(bench, client):
    client.send("end_session", "e", session="s", client="job")
    command = bench.command()
    assert isinstance(command, EndSession) and (command.client, command.name) == ("client:job", "s")
    client.send("ping", "p")
    assert client.receive()["id"] == "p"
    bench.put(Done(command.token))
    assert (reply := client.receive())["op"] == "ok" and reply["id"] == "e"


def test_the_last_turn_of_a_session_ends_it(bench, client):
    """Once the turn has ended, so that it has the KV of the turn before; a refused turn ends nothing."""
    client.send("generate", "refused", prompt=[1], max_tokens=3, session="s", end_of_session=True)
    bench.put(Rejected(bench.submitted().key, "overloaded", "full"))
    assert client.receive()["op"] == "error" and bench.inbox.empty()
    client.send("generate", "last", prompt=[1], max_tokens=3, session="s", end_of_session=True)
    request = bench.submitted()
    assert bench.inbox.empty()
    bench.finish(request)
    assert client.receive()["op"] == "result"
    assert bench.command() == EndSession(request.key[0], "s")


def test_the_end_of_a_session_does_not_overtake_a_turn_whose_prompt_is_tokenized(codec):
    """It would end nothing, and the turn would begin a session that never ends."""
    slow = SlowCodec(codec)
    with serving(slow) as bench:
        client, other = bench.client(), bench.client()
        client.send("generate", "turn", prompt="text", max_tokens=3, session="s")
        client.send("end_session", "e", session="s")
        assert client.ask("ping", "p")["op"] == "ok"
        other.send("end_session", "o", session="s")
        assert isinstance(bench.command(), EndSession), "nobody else waits for it"
        slow.go.set()
        key = bench.submitted().key
        command = bench.command()
        assert isinstance(command, EndSession) and command.client == key[0]


def test_a_second_turn_at_once_is_what_the_engine_says_it_is(bench, client):
    client.send("generate", prompt=[1], max_tokens=3, session="s")
    request = bench.submitted()
    bench.put(Rejected(request.key, "bad_request", "a turn has not ended", "session"))
    error = client.receive()
    assert (error["code"], error["field"]) == ("bad_request", "session")


def test_sessions_of_a_client_without_a_name_end_with_its_connection(bench):
    unnamed, named, other = bench.client(), bench.client(), bench.client()
    unnamed.send("generate", prompt=[1], max_tokens=3, session="s")
    running = bench.submitted()
    named.send("generate", prompt=[1], max_tokens=3, session="s", client="job")
    bench.finish(bench.submitted())
    assert named.receive()["op"] == "result"
    named.socket.close(0)
    unnamed.socket.close(0)
    assert bench.command() == Cancel(running.key)
    assert bench.command() == EndSession(running.key[0])
    other.send("generate", prompt=[1], max_tokens=3)  # nothing comes for the named one before this
    bench.finish(bench.submitted())
    assert other.receive()["op"] == "result"


def test_status_has_the_sessions(bench, client):
    found = client.ask("status")
    counts = dict.fromkeys(("holding", "pages", "turns", "hits", "reused_tokens", "evicted"), 0)
    assert found["sessions"] == counts | {"room": None}
    assert {"session", "end_session"} <= set(found["capabilities"])


# --- hints ---


def test_a_lease_is_for_requests_with_and_without_a_session(bench, client):
    client.send("generate", "a", prompt=[1], max_tokens=3, lease_s=7)
    request = bench.submitted()
    assert (request.lease_s, request.session) == (7.0, None)
    client.send("generate", "b", prompt=[1], max_tokens=3, n=4, lease_s=0.5)
    assert bench.submitted().lease_s == 0.5
    client.send("generate", "c", prompt=[1], max_tokens=3, session="s", lease_s=30)
    request = bench.submitted()
    assert (request.lease_s, request.session_lease_s) == (30.0, 20.0)
    client.send("generate", "d", prompt=[1], max_tokens=3)
    assert bench.submitted().lease_s == 0.0


@pytest.mark.parametrize("bad", [0, -1, 40.1, "5", True, 1e400, [1]])
def test_wrong_leases_are_refused_by_name(bench, client, bad):
    error = client.ask("generate", prompt=[1], lease_s=bad)
    assert (error["code"], error["field"]) == ("bad_request", "lease_s")
    assert bench.inbox.empty()


def test_leases_of_a_client_without_a_name_end_with_its_connection(bench):
    going = bench.client()
    going.send("generate", prompt=[1], max_tokens=3, lease_s=7)
    request = bench.submitted()
    bench.finish(request)
    assert going.receive()["op"] == "result"
    going.socket.close(0)
    assert bench.command() == EndSession(request.key[0])


def test_a_prefetch_names_tokens_or_a_session(bench, client):
    client.send("prefetch", "p", prompt=[5, 6, 7], cache_salt="mine")
    order = bench.command()
    assert isinstance(order, Prefetch) and order.prompt.token_ids.tolist() == [5, 6, 7] and order.adapter is None
    client.send("generate", "salted", prompt=[5, 6, 7], max_tokens=3, cache_salt="mine")
    assert bench.submitted().prompt.salt == order.prompt.salt != b""
    bench.put(Done(order.token, {"tokens": 2}))
    assert client.receive()["tokens"] == 2
    client.send("generate", "turn", prompt=[1, 2], max_tokens=3, session="s", cache_salt="of s")
    turn = bench.submitted()
    for said in ([1, 2], [1, 2, 11, 12]):
        client.send("prefetch", "p", session="s")
        order = bench.command()
        assert order.prompt.token_ids.tolist() == said and order.prompt.salt == turn.prompt.salt
        bench.put(Failed(order.token, "asleep", code="unavailable"))
        assert client.receive()["code"] == "unavailable"
        if len(said) == 2:
            bench.finish(turn, [11, 12])
            assert client.receive()["op"] == "result"


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({}, "bad_request", "prompt"),
        ({"session": "s", "prompt": [1]}, "bad_request", "prompt"),
        ({"session": "s", "cache_salt": "x"}, "bad_request", "cache_salt"),
        ({"session": "s"}, "not_found", "session"),
        ({"session": ""}, "bad_request", "session"),
        ({"prompt": "text"}, "bad_request", "prompt"),
        ({"prompt": []}, "bad_request", "prompt"),
        ({"prompt": [302]}, "bad_request", "prompt"),
        ({"prompt": [-1]}, "bad_request", "prompt"),
        ({"prompt": [1], "cache_salt": ""}, "bad_request", "cache_salt"),
        ({"prompt": [1], "lease_s": 3}, "bad_request", "lease_s"),
    ],
)
def test_wrong_prefetches_are_refused_by_name(bench, client, fields, code, field):
    error = client.ask("prefetch", "p", **fields)
    assert (error["code"], error.get("field")) == (code, field)
    assert bench.inbox.empty()


def test_a_session_is_prefetched_for_its_own_client_alone(bench, client):
    client.send("generate", "turn", prompt=[1, 2], max_tokens=3, session="s")
    bench.finish(bench.submitted(), [3])
    client.receive()
    assert bench.client().ask("prefetch", "p", session="s")["code"] == "not_found"


def test_prefetches_count_as_memory_until_they_are_answered():
    with serving(max_pending_bytes=20_000) as bench:
        client = bench.client()
        for i in range(6):
            client.send("prefetch", f"p{i}", prompt=[1] * 990)
        assert client.receive()["code"] == "overloaded"
        for _ in range(5):
            bench.put(Done(bench.command().token, {"tokens": 0}))
            assert client.receive()["op"] == "ok"
        client.send("prefetch", "last", prompt=[1] * 990)
        assert isinstance(bench.command(), Prefetch)
