"""`fork`: which tokens a request continues, whose they are, how long they are known, and in which order requests go."""

from typing import Any

import numpy as np
import pytest

from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_engine import Cancel, EndSession, Flush, StopAt
from rollout.engine.messages.to_service import Finish, Flushed, Rejected
from tests.support.service.harness import Bench, Client, delta, done, serving
from tests.support.service.media import PLACEHOLDER, WITH_IMAGES, item_of, prompt_for


def ended(bench: Bench, by: Client, name: str = "source", tokens: list[int] | None = None, **fields: Any) -> None:
    """A request that has ended, with the prompt 5 6 7 unless the fields say otherwise."""
    by.send("generate", name, **{"prompt": [5, 6, 7], "max_tokens": 50} | fields)
    bench.finish(bench.submitted(), tokens)
    assert by.receive()["op"] == "result"


def forked(bench: Bench, by: Client, name: str = "branch", **fields: Any) -> Request:
    """The request that the engine gets for a fork of what does not run."""
    by.send("generate", name, **{"max_tokens": 5} | fields)
    return bench.submitted()


def prompt_of(request: Request) -> list[int]:
    return request.prompt.token_ids.tolist()


# --- of ended requests ---


@pytest.mark.parametrize(
    ("fork", "prompt", "expected"),
    [
        ({}, None, [5, 6, 7, 11, 12, 13]),
        ({}, [9, 9], [5, 6, 7, 11, 12, 13, 9, 9]),
        ({"offset": 4}, [9], [5, 6, 7, 11, 9]),
        ({"offset": 4}, [], [5, 6, 7, 11]),
        ({"offset": 2}, [9], [5, 6, 9]),
        ({"offset": 1}, None, [5]),
        ({"offset": 6, "index": 0}, None, [5, 6, 7, 11, 12, 13]),
    ],
)
def test_a_fork_of_an_ended_request_has_its_first_tokens_and_then_its_own(bench, client, fork, prompt, expected):
    ended(bench, client, tokens=[11, 12, 13])
    request = forked(
        bench, client, fork={"request": "source", **fork}, **({} if prompt is None else {"prompt": prompt})
    )
    assert prompt_of(request) == expected
    bench.finish(request)
    result = client.receive()
    assert result["op"] == "result" and result["prompt_tokens"] == len(expected)


def test_each_completion_can_be_continued_and_branches_of_branches_too(bench, client):
    client.send("generate", "source", prompt=[5], max_tokens=50, n=3)
    request = bench.submitted()
    for index in range(3):
        bench.put(delta(request.key, index, 0, [20 + index], finish=Finish("length")))
    bench.put(done(request))
    client.receive()
    branch = forked(bench, client, fork={"request": "source", "index": 2}, prompt=[9], n=2)
    assert prompt_of(branch) == [5, 22, 9] and branch.n == 2
    bench.finish(branch, [30])
    client.receive()
    leaf = forked(bench, client, "leaf", fork={"request": "branch", "index": 1}, return_prompt_ids=True)
    assert prompt_of(leaf) == [5, 22, 9, 30]
    bench.finish(leaf)
    assert client.receive()["prompt_token_ids"].tolist() == [5, 22, 9, 30]


def test_tokens_of_continue_from_are_the_completions(bench, client):
    ended(bench, client, tokens=[13], continue_from={"token_ids": [11, 12], "seed": 1})
    assert prompt_of(forked(bench, client, fork={"request": "source"})) == [5, 6, 7, 11, 12, 13]


def test_a_fork_takes_tokens_and_salt_and_nothing_else(bench, client):
    ended(bench, client, cache_salt="mine", priority=3, sampling={"temperature": 0.5}, session="s")
    request = forked(bench, client, fork={"request": "source"})
    assert request.priority == 0 and request.sampling.temperature == 1.0 and request.session is None
    salt = request.prompt.salt
    assert salt
    bench.finish(request)
    client.receive()
    assert forked(bench, client, "other", fork={"request": "source"}, cache_salt="other").prompt.salt not in (salt, b"")


def test_an_acknowledged_request_can_be_continued_until_its_id_is_taken_again(bench, client):
    ended(bench, client, tokens=[11])
    client.ask("ack", "k", targets=["source"])
    assert prompt_of(forked(bench, client, fork={"request": "source"}, max_tokens=1)) == [5, 6, 7, 11]
    ended(bench, client, tokens=[44], prompt=[4])
    assert prompt_of(forked(bench, client, "again", fork={"request": "source"})) == [4, 44]


@pytest.mark.parametrize("accepted", [True, False])
def test_a_request_that_is_refused_leaves_the_tokens_of_an_earlier_one_with_its_id(bench, client, accepted):
    """Whether the service refuses it, before or after its prompt is prepared, or the engine."""
    ended(bench, client, tokens=[11], session="s")
    client.ask("ack", "k", targets=["source"])
    if accepted:
        client.send("generate", "source", prompt=[1], max_tokens=5, session="s")
        bench.put(Rejected(bench.submitted().key, "overloaded", "full"))
        assert client.receive()["code"] == "overloaded"
    else:
        assert client.ask("generate", "source", prompt=[1] * 1001, session="s")["code"] == "too_long"
        assert client.ask("generate", "source", fork={"request": "nobody"})["code"] == "not_found"
    for name, fork in (("a", {"request": "source"}), ("b", {"session": "s"})):
        assert prompt_of(forked(bench, client, name, fork=fork)) == [5, 6, 7, 11]


def test_a_fork_of_a_request_in_flight_never_takes_an_earlier_one_with_its_id(bench, client):
    ended(bench, client, tokens=[11])
    client.ask("ack", "k", targets=["source"])
    client.send("generate", "source", prompt=[1], max_tokens=5)
    source = bench.submitted()
    client.send("generate", "branch", fork={"request": "source"}, max_tokens=5)
    bench.put(Rejected(source.key, "overloaded", "full"), Flushed(bench.command().asker))
    assert client.receive()["code"] == "overloaded"
    error = client.receive()
    assert (error["id"], error["code"], error["field"]) == ("branch", "not_found", "fork.request")
    assert prompt_of(forked(bench, client, "later", fork={"request": "source"})) == [5, 6, 7, 11]


def test_a_request_may_continue_an_earlier_one_with_its_id(bench, client):
    ended(bench, client, tokens=[11])
    client.ask("ack", "k", targets=["source"])
    again = forked(bench, client, "source", fork={"request": "source"}, prompt=[9])
    assert prompt_of(again) == [5, 6, 7, 11, 9]
    bench.finish(again, [12])
    client.receive()
    assert prompt_of(forked(bench, client, "b", fork={"request": "source"})) == [5, 6, 7, 11, 9, 12]


# --- of running requests ---


def test_a_running_request_is_asked_for_its_tokens(bench, client):
    client.send("generate", "source", prompt=[5], max_tokens=50)
    source = bench.submitted()
    client.send("generate", "branch", fork={"request": "source"}, prompt=[9], max_tokens=5)
    flush = bench.command()
    assert isinstance(flush, Flush) and flush.key == source.key
    bench.put(delta(source.key, 0, 0, [11, 12]), Flushed(flush.asker))
    assert prompt_of(bench.submitted()) == [5, 11, 12, 9]
    bench.put(delta(source.key, 0, 2, [13], finish=Finish("length")), done(source))
    assert client.receive()["completions"][0]["token_ids"].tolist() == [11, 12, 13]


def test_a_source_that_ends_before_it_is_asked_is_found_ended(bench, client):
    client.send("generate", "source", prompt=[5], max_tokens=50)
    source = bench.submitted()
    client.send("generate", "branch", fork={"request": "source"}, max_tokens=5)
    flush = bench.command()
    bench.finish(source, [11])
    bench.put(Flushed(flush.asker))
    assert prompt_of(bench.submitted()) == [5, 11]


def test_a_source_that_the_engine_refuses_is_not_found(bench, client):
    client.send("generate", "source", prompt=[5], max_tokens=50)
    source = bench.submitted()
    client.send("generate", "branch", fork={"request": "source"}, max_tokens=5)
    bench.put(Rejected(source.key, "overloaded", "full"), Flushed(bench.command().asker))
    assert client.receive()["code"] == "overloaded"
    error = client.receive()
    assert (error["id"], error["code"], error["field"]) == ("branch", "not_found", "fork.request")


def test_a_stop_string_that_was_found_cuts_what_is_continued(codec):
    tokens = codec.encode("the quick END more").tolist()
    with serving(codec) as bench:
        client = bench.client()
        client.send("generate", "source", prompt=[5], max_tokens=90, stop={"strings": ["END"]})
        source = bench.submitted()
        bench.put(delta(source.key, 0, 0, tokens))
        stop = bench.command()
        assert isinstance(stop, StopAt)
        client.send("generate", "branch", fork={"request": "source"}, max_tokens=5)
        bench.put(Flushed(bench.command().asker))
        assert prompt_of(bench.submitted()) == [5, *tokens[: stop.tokens]]


def test_later_requests_of_the_client_wait_for_a_fork_and_those_of_others_do_not(bench, client):
    other = bench.client()
    client.send("generate", "source", prompt=[5], max_tokens=50)
    bench.submitted()
    client.send("generate", "branch", fork={"request": "source"}, session="s", max_tokens=5)
    flush = bench.command()
    client.send("generate", "of-branch", fork={"request": "branch"}, prompt=[8], max_tokens=5)
    client.send("end_session", "e", session="s")
    other.send("generate", prompt=[1], max_tokens=5)
    assert prompt_of(bench.submitted()) == [1]
    bench.put(Flushed(flush.asker))
    branch = bench.submitted()
    assert prompt_of(branch) == [5]
    second = bench.command()
    assert isinstance(second, Flush) and second.key == branch.key
    assert bench.inbox.empty()
    bench.put(Flushed(second.asker))
    assert prompt_of(bench.submitted()) == [5, 8]
    assert isinstance(bench.command(), EndSession)


def test_a_fork_that_is_cancelled_while_it_waits_ends_as_cancelled(bench, client):
    client.send("generate", "source", prompt=[5], max_tokens=50)
    bench.submitted()
    client.send("generate", "branch", fork={"request": "source"}, max_tokens=5)
    flush = bench.command()
    assert client.ask("cancel", "c", target="branch")["op"] == "ok"
    bench.put(Flushed(flush.asker))
    assert bench.command().request.key == bench.command().key  # submitted and cancelled


def test_a_client_that_goes_while_its_fork_waits_leaves_nothing(bench):
    client = bench.client()
    client.send("generate", "source", prompt=[5], max_tokens=50, client="job")
    source = bench.submitted()
    going = bench.client()
    going.send("generate", "source", prompt=[5], max_tokens=50)
    gone = bench.submitted()
    going.send("generate", "branch", fork={"request": "source"}, max_tokens=5)
    flush = bench.command()
    going.send("generate", "next", fork={"request": "source"}, max_tokens=5)
    going.socket.close(0)
    assert bench.command() == Cancel(gone.key)
    bench.put(Flushed(flush.asker))
    client.send("generate", "branch", fork={"request": "source"}, max_tokens=5, client="job")
    flush = bench.command()
    assert flush.key == source.key


# --- of sessions ---


def test_a_session_is_continued_from_its_last_turn(bench, client):
    ended(bench, client, "one", tokens=[11], session="s")
    ended(bench, client, "two", tokens=[12], session="s", prompt=[5, 6, 7, 11, 8])
    client.ask("ack", "k", targets=["one", "two"])
    branch = forked(bench, client, fork={"session": "s"}, prompt=[9], session="other")
    assert prompt_of(branch) == [5, 6, 7, 11, 8, 12, 9] and branch.session == (branch.key[0], "other")
    bench.finish(branch, [13])
    client.receive()
    back = forked(bench, client, "back", fork={"session": "s", "offset": 4}, session="s")
    assert prompt_of(back) == [5, 6, 7, 11]
    bench.finish(back, [14])
    client.receive()
    assert prompt_of(forked(bench, client, "c", fork={"session": "s"})) == [5, 6, 7, 11, 14]
    assert prompt_of(forked(bench, client, "d", fork={"session": "other"})) == [5, 6, 7, 11, 8, 12, 9, 13]


def test_the_running_turn_of_a_session_is_its_last_one(bench, client):
    ended(bench, client, "one", tokens=[11], session="s")
    client.send("generate", "two", prompt=[1, 2], max_tokens=9, session="s")
    turn = bench.submitted()
    client.send("generate", "branch", fork={"session": "s"}, max_tokens=5)
    flush = bench.command()
    assert flush.key == turn.key
    bench.put(Flushed(flush.asker))
    assert prompt_of(bench.submitted()) == [1, 2]


def test_a_turn_that_is_refused_because_another_one_runs_is_not_the_last_one(bench, client):
    """It is in flight until its refusal comes."""
    client.send("generate", "runs", prompt=[1, 2], max_tokens=9, session="s")
    runs = bench.submitted()
    client.send("generate", "refused", prompt=[3], max_tokens=9, session="s")
    refused = bench.submitted()
    client.send("generate", "branch", fork={"session": "s"}, max_tokens=5)
    flush = bench.command()
    assert flush.key == runs.key
    bench.put(Rejected(refused.key, "bad_request", "a turn runs"), delta(runs.key, 0, 0, [7]), Flushed(flush.asker))
    assert prompt_of(bench.submitted()) == [1, 2, 7]


def test_the_turn_after_one_that_is_refused_is_asked_for_its_tokens(bench, client):
    client.send("generate", "refused", prompt=[3], max_tokens=9, session="s")
    refused = bench.submitted()
    client.send("generate", "runs", prompt=[1, 2], max_tokens=9, session="s")
    runs = bench.submitted()
    client.send("generate", "branch", fork={"session": "s"}, max_tokens=5)
    bench.put(Rejected(refused.key, "overloaded", "full"), Flushed(bench.command().asker))
    again = bench.command()
    assert isinstance(again, Flush) and again.key == runs.key
    bench.put(delta(runs.key, 0, 0, [7]), Flushed(again.asker))
    assert prompt_of(bench.submitted()) == [1, 2, 7]


def test_a_session_that_was_ended_is_not_known(bench, client):
    ended(bench, client, "one", tokens=[11], session="s")
    client.send("end_session", "e", session="s")
    assert isinstance(bench.command(), EndSession)
    error = client.ask("generate", "branch", fork={"session": "s"})
    assert (error["code"], error["field"]) == ("not_found", "fork.session")
    assert prompt_of(forked(bench, client, "b", fork={"request": "one"})) == [5, 6, 7, 11]


# --- what is refused ---


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"fork": {}}, "bad_request", "fork"),
        ({"fork": {"request": "source", "session": "s"}}, "bad_request", "fork"),
        ({"fork": {"session": "s", "index": 1}}, "bad_request", "fork"),
        ({"fork": {"request": ""}}, "bad_request", "fork.request"),
        ({"fork": {"request": 7}}, "bad_request", "fork.request"),
        ({"fork": {"request": "x" * 129}}, "bad_request", "fork.request"),
        ({"fork": {"request": "source", "index": -1}}, "bad_request", "fork.index"),
        ({"fork": {"request": "source", "index": 1}}, "bad_request", "fork.index"),
        ({"fork": {"request": "source", "index": 1 << 40}}, "bad_request", "fork.index"),
        ({"fork": {"request": "source", "offset": 0}}, "bad_request", "fork.offset"),
        ({"fork": {"request": "source", "offset": 7}}, "bad_request", "fork.offset"),
        ({"fork": {"request": "source", "offset": 2.5}}, "bad_request", "fork.offset"),
        ({"fork": {"request": "source", "at": 2}}, "bad_request", "fork.at"),
        ({"fork": "source"}, "bad_request", "fork"),
        ({"fork": {"request": "nobody"}}, "not_found", "fork.request"),
        ({"fork": {"session": "nobody"}}, "not_found", "fork.session"),
        ({"fork": {"request": "branch"}}, "not_found", "fork.request"),  # itself
        ({"fork": {"request": "source"}, "n": 1025}, "bad_request", "n"),
        ({"fork": {"request": "source"}, "n": 2, "session": "s"}, "bad_request", "n"),
        ({"fork": {"request": "source"}, "prompt": [302]}, "bad_request", "prompt"),
        ({"fork": {"request": "source"}, "prompt": "text"}, "bad_request", "prompt"),
        ({"fork": {"request": "source"}, "messages": [{"role": "user"}]}, "bad_request", "messages"),
        ({"fork": {"request": "source"}, "prompt": [1] * 995}, "too_long", "prompt"),
        ({"fork": {"request": "source"}, "max_tokens": 995}, "too_long", "max_tokens"),
        ({}, "bad_request", "prompt"),
    ],
)
def test_wrong_forks_are_refused_by_name_and_disturb_nothing(bench, client, fields, code, field):
    ended(bench, client)
    error = client.ask("generate", "branch", **fields)
    assert (error["op"], error["code"], error["field"]) == ("error", code, field)
    assert bench.inbox.empty()
    assert len(prompt_of(forked(bench, client, "next", fork={"request": "source"}))) == 6


def test_clients_cannot_continue_each_others_tokens(bench):
    """Neither by a request's id nor by a session's name, running or ended; and the answer does not tell which."""
    mine, other = bench.client(), bench.client()
    ended(bench, mine, "ended", session="s", client="job")
    mine.send("generate", "running", prompt=[5], max_tokens=9, client="job", session="t")
    bench.submitted()
    unknown = other.ask("generate", "b", fork={"request": "unknown"})["message"]
    for fork in ({"request": "ended"}, {"request": "running"}, {"session": "s"}, {"session": "t"}):
        for fields in ({}, {"client": "thief"}):
            error = other.ask("generate", "b", fork=fork, **fields)
            assert error["code"] == "not_found"
            if "request" in fork:
                assert error["message"].replace(fork["request"], "unknown") == unknown
    assert bench.inbox.empty()
    again = bench.client()  # the same client over another connection
    assert len(prompt_of(forked(bench, again, fork={"request": "ended"}, client="job"))) == 6


# --- what is kept ---


def test_the_client_with_most_tokens_loses_its_oldest_first():
    with serving(max_history_bytes=20_000) as bench:
        busy, quiet = bench.client(), bench.client()
        ended(bench, quiet, "quiet")
        for i in range(12):
            ended(bench, busy, f"r{i}", prompt=[1] * 900)
        assert busy.ask("generate", "b", fork={"request": "r0"})["code"] == "not_found"
        assert len(prompt_of(forked(bench, quiet, fork={"request": "quiet"}))) == 6
        assert len(prompt_of(forked(bench, busy, fork={"request": "r11"}))) == 903


def test_a_number_of_requests_is_known():
    with serving(max_histories=2) as bench:
        client = bench.client()
        for name in ("a", "b", "c"):
            ended(bench, client, name, session=f"s-{name}")
        assert client.ask("generate", "x", fork={"request": "a"})["code"] == "not_found"
        assert client.ask("generate", "x", fork={"session": "s-a"})["code"] == "not_found"
        assert len(prompt_of(forked(bench, client, fork={"session": "s-c"}))) == 6


def test_forks_count_the_tokens_that_they_continue_as_memory():
    """A short message may name a long prompt."""
    with serving(max_pending_bytes=20_000) as bench:
        client = bench.client()
        ended(bench, client, prompt=[1] * 900)
        for i in range(12):
            client.send("generate", f"b{i}", fork={"request": "source"}, max_tokens=1)
        assert client.receive()["code"] == "overloaded"


def test_the_memory_of_forks_is_free_when_they_end():
    with serving(max_pending_bytes=20_000) as bench:
        client = bench.client()
        ended(bench, client, prompt=[1] * 900)
        for i in range(12):
            request = forked(bench, client, f"b{i}", fork={"request": "source"}, max_tokens=1)
            bench.finish(request, [1])
            assert client.receive()["op"] == "result"


# --- text, constraints ---


class BeginningCodec:
    """A tokenizer that puts a token in front of a text."""

    has_chat_template = False

    def __init__(self, codec) -> None:
        self.check_stop_strings, self.encode_rendered = codec.check_stop_strings, codec.encode_rendered

    def encode(self, text):
        return np.array([300, *self.encode_rendered(text)], np.int32)


def test_text_after_a_fork_is_tokenized_without_the_tokens_of_a_beginning(codec):
    with serving(BeginningCodec(codec)) as bench:
        client = bench.client()
        ended(bench, client, tokens=[11], prompt="fox")
        request = forked(bench, client, fork={"request": "source"}, prompt=" the quick")
        expected = codec.encode_rendered("fox").tolist(), codec.encode_rendered(" the quick").tolist()
        assert prompt_of(request) == [300, *expected[0], 11, *expected[1]]


def test_a_constraint_applies_to_the_branch_and_reads_the_end_of_what_it_continues(bench, client):
    """A marker at the end of what is continued begins the constraint at once, as in a prompt that was sent."""
    ended(bench, client, tokens=[11, 12])
    constraint = {"token_ids": [20, 21], "after": [11, 12]}
    mine = forked(bench, client, fork={"request": "source"}, constraint=constraint)
    client.send("generate", "sent", prompt=[5, 6, 7, 11, 12], constraint=constraint, max_tokens=5)
    sent = bench.submitted()
    assert mine.constraint.free is None and sent.constraint.free is None
    earlier = forked(bench, client, "earlier", fork={"request": "source", "offset": 4}, constraint=constraint)
    assert earlier.constraint.free is not None


def test_status_names_the_field(bench, client):
    assert "fork" in client.ask("status")["capabilities"]


# --- images ---


def test_a_fork_has_the_images_of_what_it_continues():
    item = item_of(2)
    with serving(model=WITH_IMAGES) as bench:
        client = bench.client()
        ended(bench, client, tokens=[11], prompt=prompt_for(item), media=[item])
        whole = forked(bench, client, fork={"request": "source"}, prompt=[9])
        assert prompt_of(whole) == [*prompt_for(item), 11, 9]
        ((place, image),) = whole.prompt.media
        assert place == 2 and np.array_equal(image.pixels.patches, item["pixel_values"])
        client.send("generate", "of-running", fork={"request": "branch", "offset": 4}, max_tokens=5)
        bench.put(Flushed(bench.command().asker))
        ((_, again),) = bench.submitted().prompt.media
        assert again.pixels.digest == image.pixels.digest
        text = forked(bench, client, "text", fork={"request": "source", "offset": 2})
        assert prompt_of(text) == [1, 2] and not text.prompt.media


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"fork": {"request": "source", "offset": 3}}, "bad_request", "fork.offset"),
        ({"fork": {"request": "source"}, "media": [item_of(0)]}, "bad_request", "media"),
        ({"fork": {"request": "source"}, "prompt": [PLACEHOLDER]}, "bad_request", "media"),
    ],
)
def test_forks_that_would_break_an_image_are_refused(fields, code, field):
    item = item_of(2)
    with serving(model=WITH_IMAGES) as bench:
        client = bench.client()
        ended(bench, client, tokens=[11], prompt=prompt_for(item), media=[item])
        error = client.ask("generate", "branch", **fields)
        assert (error["code"], error["field"]) == (code, field)


def test_images_that_are_gone_have_to_be_sent_again():
    """What is known of ended requests holds no pixels: the store of images alone bounds them."""
    first, second = item_of(2), item_of(2, seed=1)
    with serving(model=WITH_IMAGES, media_store_bytes=first["pixel_values"].nbytes) as bench:
        client = bench.client()
        ended(bench, client, tokens=[11], prompt=prompt_for(first), media=[first])
        ended(bench, client, "other", tokens=[11], prompt=prompt_for(second), media=[second])
        error = client.ask("generate", "branch", fork={"request": "source"})
        assert (error["code"], error["field"]) == ("not_found", "fork.request")
        assert len(forked(bench, client, fork={"request": "other"}).prompt.media) == 1
