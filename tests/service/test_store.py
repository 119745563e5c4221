"""The result store, with a clock of the test's own; `ack`, `attach` and messages sent twice, through real sockets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import ServiceSettings
from rollout.engine.messages.to_engine import Cancel
from rollout.engine.messages.to_service import Finish, Rejected
from rollout.service.delivery.store import ResultStore
from rollout.service.delivery.waiters import Position
from tests.support.clock import Clock
from tests.support.service.harness import delta, done, serving
from tests.support.settings import settings_of

START = Position(0, 0)
OVERHEAD = 1024


def new_store(clock, **limits):
    return ResultStore(settings_of(ServiceSettings, **limits), clock)


def add(store, request_id, size=10, client="c"):
    store.add((client, request_id), [bytes(size)], b"content", START)


def ids(store, names, client="c"):
    return "".join(name for name in names if store.get((client, name)) is not None)


# --- limits ----------------------------------------------------------------------------------------------------------


def test_the_oldest_results_go_when_there_are_too_many(clock):
    store = new_store(clock, max_results=3)
    for name in "abcde":
        add(store, name)
    assert (len(store), ids(store, "abcde")) == (3, "cde")


def test_the_oldest_results_go_when_they_take_too_much(clock):
    store = new_store(clock, max_results_bytes=3 * OVERHEAD + 3000)
    for name in "abc":
        add(store, name, 1000)
    assert (store.size, ids(store, "abc")) == (3 * OVERHEAD + 3000, "abc")
    add(store, "d", 1001)
    assert ids(store, "abcd") == "cd" and store.size == 2 * OVERHEAD + 2001


@pytest.mark.parametrize(
    ("limits", "flood", "size"),
    [({"max_results": 8}, 10, 10), ({"max_results_bytes": 8 * OVERHEAD + 8000}, 10, 1000)],
    ids=["number", "bytes"],
)
def test_a_client_that_has_the_most_loses_its_own_results_first(clock, limits, flood, size):
    store = new_store(clock, **limits)
    for name in "abc":
        add(store, name, size, client="careful")
    for number in range(flood):
        add(store, str(number), size, client="flood")
    assert ids(store, "abc", client="careful") == "abc"
    assert ids(store, "0123456789", client="flood") == "56789"
    add(store, "d", size, client="careful")
    assert ids(store, "abcd", client="careful") == "abcd" and ids(store, "56789", client="flood") == "6789"


def test_the_number_counts_at_the_limit_of_the_number_and_the_bytes_at_that_of_the_bytes(clock):
    store = new_store(clock, max_results=4, max_results_bytes=100_000)
    add(store, "large", 60_000, client="one")
    for name in "abcd":
        add(store, name, client="many")
    assert ids(store, ["large"], client="one") == "large" and ids(store, "abcd", client="many") == "bcd"
    add(store, "other", 50_000, client="two")
    assert ids(store, ["large"], client="one") == "" and ids(store, ["other"], client="two") == "other"
    assert ids(store, "bcd", client="many") == "cd"


def test_a_result_that_is_larger_than_the_store_costs_no_other(clock, caplog):
    store = new_store(clock, max_results_bytes=5000)
    add(store, "a")
    add(store, "b", 5000)
    assert ids(store, "ab") == "a" and [(r.request, r.client) for r in caplog.records] == [("b", "c")]


def test_results_go_when_they_are_too_old(clock):
    store = new_store(clock, max_results_age_s=60.0)
    add(store, "a")
    clock.now += 30
    add(store, "b")
    assert store.wait_s() == 30
    clock.now += 29.9
    store.expire()
    assert ids(store, "ab") == "ab"
    clock.now += 0.1
    assert ids(store, "ab") == "b" and store.wait_s() == 30
    clock.now += 30
    store.expire()
    assert (len(store), store.size, store.wait_s()) == (0, 0, None)


@pytest.mark.parametrize("limits", [{"max_results": 0}, {"max_results_bytes": 0}, {"max_results_age_s": 0.0}])
def test_a_limit_of_zero_keeps_nothing(clock, limits):
    store = new_store(clock, **limits)
    add(store, "a")
    assert (len(store), store.size) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "forget", "client", "wait"]), st.integers(0, 30), st.integers(0, 4000)),
        max_size=60,
    )
)
def test_whatever_is_done_the_store_stays_within_its_limits(steps):
    clock = Clock()
    store = new_store(clock, max_results=8, max_results_bytes=20_000, max_results_age_s=5.0)
    names = []
    for serial, (what, number, size) in enumerate(steps):
        if what == "add":
            names.append((f"c{number % 3}", f"{serial}"))
            store.add(names[-1], [bytes(size), b"xyz"], b"", START)
        elif what == "forget":
            store.forget((f"c{number % 3}", f"{number}"))
        elif what == "client":
            store.forget_client(f"c{number % 3}")
        else:
            clock.now += number / 10
            store.expire()
        kept = [stored for name in names if (stored := store.get(name)) is not None]
        assert len(store) == len(kept) <= 8 and store.size == sum(stored.size for stored in kept) <= 20_000
        assert all(clock.now - stored.ended_s < 5 for stored in kept)


# --- messages sent twice ---------------------------------------------------------------------------------------------


@pytest.fixture
def bench(codec):
    with serving(codec) as bench:
        yield bench


REQUEST = {"client": "job", "prompt": [1, 2], "n": 2, "max_tokens": 9, "metadata": {"x": np.arange(2)}}


def test_message_sent_again_after_its_result_gets_the_same_result(bench):
    one, two = bench.client(), bench.client(delimiter=True)
    one.send("generate", "r", **REQUEST)
    bench.finish(bench.submitted())
    first = one.receive()
    two.send("generate", "r", **REQUEST)
    second = two.receive()
    assert repr(first) == repr(second) and first["op"] == "result"
    assert bench.inbox.empty(), "it is generated once"
    one.send("generate", "r", **REQUEST)
    assert repr(one.receive()) == repr(first), "as often as it is asked for"


def test_other_content_is_a_duplicate_until_the_result_is_acknowledged(bench):
    client = bench.client()
    client.send("generate", "r", **REQUEST)
    bench.finish(bench.submitted())
    assert client.receive()["op"] == "result"
    error = client.ask("generate", "r", **REQUEST | {"max_tokens": 8})
    assert (error["code"], error["field"]) == ("duplicate", "id")
    assert client.ask("ack", "k", client="job", targets=["r"])["op"] == "ok"
    client.send("generate", "r", **REQUEST | {"max_tokens": 8})
    assert bench.submitted().max_tokens == 8


def test_acknowledged_result_is_forgotten_and_a_repeated_message_is_a_new_request(bench):
    client = bench.client()
    for name in ("r", "s", "t"):
        client.send("generate", name, **REQUEST)
        bench.finish(bench.submitted())
        client.receive()
    assert client.ask("ack", "k", client="job", targets=["r", "t", "never sent"])["op"] == "ok"
    assert client.ask("status", "u")["results"]["stored"] == 1
    assert client.ask("attach", "b", client="job", target="r")["code"] == "not_found"
    assert client.ask("attach", "b", client="job", target="s")["op"] == "result"
    client.send("generate", "r", **REQUEST)
    bench.submitted()


def test_request_in_flight_cannot_be_acknowledged(bench):
    client = bench.client()
    for name in ("r", "s"):
        client.send("generate", name, **REQUEST)
    bench.finish(bench.submitted())
    client.receive()
    error = client.ask("ack", "k", client="job", targets=["r", "s"])
    assert (error["code"], error["field"]) == ("bad_request", "targets.1")
    assert client.ask("attach", "b", client="job", target="r")["op"] == "result", "and the other one is still there"


@pytest.mark.parametrize("targets", [None, [], "r", [""], [1], ["x" * 129], ["r"] * 65_537])
def test_wrong_targets_are_refused(bench, targets):
    fields = {} if targets is None else {"targets": targets}
    assert bench.client().ask("ack", **fields)["code"] in ("bad_request", "bad_message")


def test_clients_cannot_reach_each_others_results(bench):
    one, two = bench.client(), bench.client()
    one.send("generate", "r", **REQUEST)
    request = bench.submitted()
    assert two.ask("attach", "b", client="other", target="r")["code"] == "not_found"
    assert two.ask("attach", "b", target="r")["code"] == "not_found"
    bench.finish(request)
    one.receive()
    assert two.ask("attach", "b", client="other", target="r")["code"] == "not_found"
    assert two.ask("ack", "k", client="other", targets=["r"])["op"] == "ok"
    assert one.ask("attach", "b", client="job", target="r")["op"] == "result"


def test_an_error_frees_the_id(bench):
    client = bench.client()
    client.send("generate", "r", **REQUEST)
    bench.put(Rejected(bench.submitted().key, "overloaded", "full"))
    assert client.receive()["code"] == "overloaded"
    client.send("generate", "r", **REQUEST)
    bench.finish(bench.submitted())
    assert client.receive()["op"] == "result"


def test_a_full_store_forgets_the_oldest_and_says_so_by_not_found(codec):
    with serving(codec, max_results=2) as bench:
        client = bench.client()
        for name in ("a", "b", "c"):
            client.send("generate", name, **REQUEST)
            bench.finish(bench.submitted())
            client.receive()
        assert client.ask("attach", "x", client="job", target="a")["code"] == "not_found"
        assert client.ask("attach", "x", client="job", target="b")["op"] == "result"


def test_status_counts_stored_results(bench):
    client = bench.client()
    client.send("generate", "r", **REQUEST)
    bench.finish(bench.submitted())
    client.receive()
    results = client.ask("status", "s")["results"]
    assert results["stored"] == 1 and OVERHEAD < results["bytes"] < OVERHEAD + 2000


def test_results_can_be_had_from_a_draining_worker(bench):
    client = bench.client()
    client.send("generate", "r", **REQUEST)
    bench.finish(bench.submitted())
    client.receive()
    client.send("shutdown", "s")
    assert client.ask("attach", "b", client="job", target="r")["op"] == "result"
    client.send("generate", "r", **REQUEST)
    assert client.receive()["op"] == "result"


# --- attach ----------------------------------------------------------------------------------------------------------


def test_attach_waits_for_the_result_and_answers_under_its_own_id(bench):
    one, two = bench.client(), bench.client(delimiter=True)
    one.send("generate", "r", **REQUEST)
    request = bench.submitted()
    two.send("attach", "b", client="job", target="r")
    assert two.ask("ping", "p")["op"] == "ok"
    bench.finish(request)
    result, attached = one.receive(), two.receive()
    assert (result["id"], attached["id"]) == ("r", "b")
    assert repr(result | {"id": "b"}) == repr(attached)
    assert repr(two.ask("attach", "c", client="job", target="r") | {"id": "b"}) == repr(attached)


def test_cancelled_partial_is_kept(bench):
    client = bench.client()
    client.send("generate", "r", **REQUEST)
    request = bench.submitted()
    assert client.ask("cancel", "c", client="job", target="r")["op"] == "ok"
    assert bench.command() == Cancel(request.key)
    bench.finish(request, [4], reason="cancelled")
    client.receive()
    result = client.ask("attach", "b", client="job", target="r")
    assert [completion["finish_reason"] for completion in result["completions"]] == ["cancelled"] * 2
    assert result["completions"][0]["token_ids"].tolist() == [4]


def test_failed_completion_is_kept_with_its_error_and_its_tokens(bench):
    client = bench.client()
    client.send("generate", "r", **REQUEST | {"n": 1})
    request = bench.submitted()
    bench.put(delta(request.key, 0, 0, [5, 6], finish=Finish("error", error="out of memory")), done(request))
    client.receive()
    (completion,) = client.ask("attach", "b", client="job", target="r")["completions"]
    assert (completion["finish_reason"], completion["error"]) == ("error", "out of memory")
    assert completion["token_ids"].tolist() == [5, 6]


def test_only_so_many_wait_for_one_request(bench):
    client = bench.client()
    client.send("generate", "r", **REQUEST)
    request = bench.submitted()
    for i in range(63):
        client.send("attach", f"b{i}", client="job", target="r")
    error = client.ask("attach", "last", client="job", target="r")
    assert (error["id"], error["code"]) == ("last", "overloaded") and error["retry_after_s"] > 0
    bench.finish(request)
    assert {client.receive()["id"] for _ in range(64)} == {"r", *(f"b{i}" for i in range(63))}


def test_a_connection_that_ends_takes_its_waiting_along(bench):
    one, two = bench.client(), bench.client()
    one.send("generate", "r", **REQUEST)
    request = bench.submitted()
    two.send("attach", "b", client="job", target="r")
    assert two.ask("ping", "p")["op"] == "ok"
    one.socket.close(0)
    bench.finish(request)
    assert two.receive()["op"] == "result" and bench.inbox.empty()
