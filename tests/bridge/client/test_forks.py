"""Forks: a request that continues another one goes where that one's tokens are, and names it as that worker does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.bridge.client_script import Connect, Serve
from tests.support.bridge.model_script import Model, vanish
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, result
from trainer_bridge.client import known_tokens
from trainer_bridge.client.generate_request import plan_request
from trainer_bridge.client.placement import Fleet
from trainer_bridge.wire.errors import BadRequest, NotFound, TooLong


def accept(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    worker.reply(peer, header, result([completion([1, 2], index) for index in range(header.get("n", 1))]))


def forks(*workers: ScriptedWorker) -> list[tuple[int, dict[str, Any]]]:
    """The worker of each fork that was sent, and the fork."""
    sent = [(number, header) for number, worker in enumerate(workers) for header in worker.requests]
    return [(number, header["fork"]) for number, header in sent if "fork" in header]


def test_a_fork_is_sent_as_it_was_given_with_and_without_further_tokens(connect: Connect, serve: Serve) -> None:
    worker = serve(accept)
    client = connect(worker.endpoint)
    client.generate([5], request_id="r", n=2)
    client.generate(fork={"request": "r", "index": 1, "offset": None}, max_tokens=3)
    client.generate([7, 8], fork={"session": "s", "offset": 4}, session="t")
    client.generate("text", fork={"request": "r"})
    assert [fork for _, fork in forks(worker)] == [
        {"request": "r", "index": 1},
        {"session": "s", "offset": 4},
        {"request": "r"},
    ]
    sent = [header for header in worker.requests if "fork" in header]
    assert "prompt" not in sent[0] and sent[1]["prompt"].tolist() == [7, 8] and sent[2]["prompt"] == "text"


@pytest.mark.parametrize("fork", ["r", 7, ["r"]])
def test_a_fork_that_is_no_map_is_refused_before_it_is_sent(fork: Any) -> None:
    with pytest.raises(ValueError, match="fork"):
        plan_request(None, {"fork": fork})


def test_a_fork_goes_to_the_worker_that_has_what_it_continues(connect: Connect, serve: Serve) -> None:
    workers = serve(accept), serve(accept), serve(accept)
    client = connect(*(worker.endpoint for worker in workers))
    homes = {f"r{i}": client.generate([i], request_id=f"r{i}").endpoint for i in range(6)}
    assert len(set(homes.values())) == 3
    for name, home in homes.items():
        assert client.generate([1], fork={"request": name}, session=f"of {name}").endpoint == home
        assert client.generate(fork={"session": f"of {name}"}).endpoint == home
    named = client.generate(fork={"request": "r0"}, endpoint=workers[1].endpoint)
    assert named.endpoint == workers[1].endpoint


def test_a_branch_that_becomes_a_session_stays_where_it_began() -> None:
    fleet = Fleet("abc")
    fleet.note_sent("r", "b")
    plan = plan_request(None, {"fork": {"request": "r"}, "session": "s"})
    home, _ = fleet.locate_fork(plan.fields["fork"])
    assert fleet.choose(plan, (), (), home) == "b" == fleet.session_home("s")


def test_what_this_client_has_not_sent_may_be_anywhere_and_the_worker_says_so(connect: Connect, serve: Serve) -> None:
    def refuse(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        worker.reply(peer, header, {"op": "error", "code": "not_found", "message": "no", "field": "fork.request"})

    client = connect(serve(refuse).endpoint, serve(refuse).endpoint)
    with pytest.raises(NotFound):
        client.generate(fork={"request": "unknown"})


def test_the_places_of_requests_are_forgotten_oldest_first() -> None:
    fleet = Fleet("ab")
    for i in range(40_000):
        fleet.note_sent(f"r{i}", "b")
    assert fleet.locate_fork({"request": "r0"})[0] is None and fleet.locate_fork({"request": "r39999"})[0] == "b"


def test_a_completion_that_changed_workers_is_continued_where_it_ended(connect: Connect, serve: Serve) -> None:
    """Its last worker knows it by another id, and as its only completion."""
    lost, other = serve(Model(3, reach=(6, 0, 3), fail=vanish)), serve(Model(4))
    client = connect(lost.endpoint, other.endpoint, resume=True)
    client.generate([1, 2], n=3, max_tokens=6, seed=1, request_id="r")
    legs = {len(header["continue_from"]["token_ids"]): header["id"] for header in other.requests if header["id"] != "r"}
    client.generate([7], fork={"request": "r", "index": 2, "offset": 4}, max_tokens=3, request_id="b")
    client.generate([7], fork={"request": "r", "index": 1}, max_tokens=3)
    client.generate([7], fork={"request": "b"}, max_tokens=3)
    assert [fork for _, fork in forks(other)] == [
        {"request": legs[3], "index": 0, "offset": 4},
        {"request": legs[0], "index": 0, "offset": 8},
        {"request": "b", "index": 0, "offset": 8},
    ]


def test_a_fork_of_unknown_tokens_whose_worker_is_lost_says_what_to_send(connect: Connect, serve: Serve) -> None:
    """Another process of this client may have sent their source. All its tokens so far may be others by now."""
    lost, other = serve(Model(3, reach=(4,), fail=vanish)), serve(Model(4))
    client = connect(lost.endpoint, other.endpoint, resume=True)
    with pytest.raises(NotFound, match="send the tokens") as ended:
        client.generate([7], fork={"request": "r"}, max_tokens=9, seed=1, request_id="b")
    assert [len(part) for part in ended.value.partials] == [4] and ended.value.field == "fork"
    assert not other.requests


def test_a_text_prompt_cannot_be_sent_again_as_tokens(connect: Connect, serve: Serve) -> None:
    lost, other = serve(Model(3, reach=(3,), fail=vanish)), serve(Model(4))
    client = connect(lost.endpoint, resume=True)
    lost.handler = Model(3)
    client.generate("text", max_tokens=6, request_id="r")
    client.add(other.endpoint)
    lost.handler = Model(3, reach=(3,), fail=vanish)
    with pytest.raises(NotFound, match="send the tokens"):
        client.generate([7], fork={"request": "r"}, max_tokens=9)


# --- forks that outlive the worker of their source ---


class Sourced:
    """Two workers and a client that resumes; the first one has the source `r`, with the prompt 5 6."""

    def __init__(self, connect: Connect, serve: Serve, **source: Any) -> None:
        self.home, self.other = serve(Model(3)), serve(Model(4))
        self.client = connect(self.home.endpoint, self.other.endpoint, resume=True)
        fields = {"n": 2, "max_tokens": 6, "seed": 1, "request_id": "r", "endpoint": self.home.endpoint, **source}
        result = self.client.generate(np.array([5, 6]), **fields)
        self.drawn = [completion.token_ids.tolist() for completion in result.completions]

    def answer_by(self, handler: Callable[[ScriptedWorker, bytes, dict[str, Any]], None]) -> None:
        """Have both workers answer by `handler`."""
        self.home.handler = self.other.handler = handler

    def loses(self, *reach: int) -> None:
        """The next requests at the home come to an end after so many tokens."""
        self.home.handler = Model(3, reach=reach, fail=vanish)

    def prompts(self) -> list[list[int]]:
        """The prompts of what the other worker was asked; nothing there has a fork."""
        sent = [header for header in self.other.requests if header["op"] == "generate"]
        assert not any("fork" in header for header in sent)
        return [header["prompt"].tolist() for header in sent]


def test_a_fork_goes_on_elsewhere_with_the_tokens_that_it_continues(connect: Connect, serve: Serve) -> None:
    pair = Sourced(connect, serve, cache_salt="mine")
    pair.loses(4, 0)
    fork = {"request": "r", "index": 1, "offset": 5}
    branch = pair.client.generate([7], fork=fork, n=2, max_tokens=6, seed=9, request_id="b")
    assert pair.prompts() == [[5, 6, *pair.drawn[1][:3], 7]] * 2
    assert {header["cache_salt"] for header in pair.other.requests if header["op"] == "generate"} == {"mine"}
    assert branch.resumes and [len(completion) for completion in branch.completions] == [6, 6]
    leaf = pair.client.generate(fork={"request": "b", "index": 1}, max_tokens=6)
    assert leaf.endpoint == pair.other.endpoint and forks(pair.other)[-1][1]["offset"] == 6 + 6


def test_a_fork_whose_source_was_lost_before_goes_elsewhere_at_once(connect: Connect, serve: Serve) -> None:
    pair = Sourced(connect, serve, n=1, session="s")
    pair.loses(0)
    pair.client.generate([1], max_tokens=6, session="s")
    assert pair.prompts() == [[1]] and len(pair.home.requests) >= 2
    pair.client.generate([7], fork={"request": "r"}, max_tokens=6)
    assert pair.prompts()[1:] == [[5, 6, *pair.drawn[0], 7]]


def test_a_request_that_is_too_large_to_be_known_pushes_no_other_one_out(
    connect: Connect, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_tokens, "_MOST_BYTES", 4096)
    pair = Sourced(connect, serve, n=1)
    pair.client.generate(np.zeros(1000, np.int32), max_tokens=6, endpoint=pair.home.endpoint)
    pair.loses(0)
    pair.client.generate([7], fork={"request": "r"}, max_tokens=6)
    assert pair.prompts() == [[5, 6, *pair.drawn[0], 7]]


def test_a_worker_that_does_not_know_the_source_any_more_gets_its_tokens(connect: Connect, serve: Serve) -> None:
    pair = Sourced(connect, serve)

    def forgets(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if "fork" in header:
            error = {"op": "error", "code": "not_found", "message": "not any more", "field": "fork.request"}
            worker.reply(peer, header, error)
        else:
            Model(3)(worker, peer, header)

    pair.answer_by(forgets)
    result = pair.client.generate([7], fork={"request": "r"}, max_tokens=6)
    assert len(result.completions[0]) == 6
    sent = [header for worker in (pair.home, pair.other) for header in worker.requests if header["op"] == "generate"]
    assert [header["prompt"].tolist() for header in sent if header.get("fork") is None][-1] == [
        5, 6, *pair.drawn[0], 7
    ]  # fmt: skip


def test_a_fork_of_a_running_source_takes_the_same_tokens_at_every_worker(connect: Connect, serve: Serve) -> None:
    """What the client has received is all that there is; the source goes on meanwhile."""
    home, other = serve(Model(3, reach=(4,), fail=lambda *of_reply: None)), serve(Model(4))
    client = connect(home.endpoint, other.endpoint, resume=True)
    stream = client.generate(
        np.array([5, 6]), max_tokens=50, seed=1, stream="tokens", request_id="r", endpoint=home.endpoint
    )
    have = [int(token) for chunk in (next(stream), next(stream)) for token in chunk.token_ids]
    home.handler = Model(3, reach=(2,), fail=vanish)
    client.generate([7], fork={"request": "r"}, max_tokens=6, request_id="b")
    first = next(header for header in home.requests if header.get("id") == "b")
    assert first["fork"] == {"request": "r", "index": 0, "offset": 6}
    again = next(header for header in other.requests if header["op"] == "generate" and header["id"] != "r")
    assert again["prompt"].tolist() == [5, 6, *have, 7]
    stream.close()


def test_a_fork_of_a_session_continues_its_last_turn_elsewhere(connect: Connect, serve: Serve) -> None:
    pair = Sourced(connect, serve, n=1, session="s")
    pair.loses(2)
    pair.client.generate([7], fork={"session": "s"}, max_tokens=6)
    assert pair.prompts()[-1] == [5, 6, *pair.drawn[0], 7]
    pair.client.end_session("s")
    with pytest.raises(NotFound):
        pair.answer_by(refuse_forks)
        pair.client.generate([7], fork={"session": "s"}, max_tokens=6)


@pytest.mark.parametrize(
    "fork",
    [
        {"request": "r", "at": 3},
        {"request": "r", "session": "s"},
        {"session": "s", "index": 1},
        {"session": ["s"]},
        {"request": 7},
        {"request": "r", "index": 9},
        {"request": "r", "index": True},
        {"request": "r", "offset": 0},
        {"request": "r", "offset": 99},
        {"request": "r", "offset": True},
        {},
    ],
)
def test_a_fork_that_makes_no_sense_is_for_the_worker_to_refuse(
    connect: Connect, serve: Serve, fork: dict[str, Any]
) -> None:
    """Also if the client knows the tokens of its source."""

    def refuse(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        assert header["fork"] == fork
        error = {"op": "error", "code": "bad_request", "message": "no", "field": "fork"}
        worker.reply(peer, header, error)

    pair = Sourced(connect, serve, n=1, session="s")
    pair.answer_by(refuse)
    with pytest.raises(BadRequest):
        pair.client.generate([7], fork=fork, max_tokens=6)


def refuse_forks(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    if header["op"] == "generate":
        error = {"op": "error", "code": "not_found", "message": "unknown", "field": "fork.session"}
        worker.reply(peer, header, error)


def test_an_id_that_is_refused_the_second_time_is_continued_where_it_was(connect: Connect, serve: Serve) -> None:
    def refuse(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        worker.reply(peer, header, {"op": "error", "code": "too_long", "message": "no", "field": "prompt"})

    home, other = serve(accept), serve(refuse)
    client = connect(home.endpoint, other.endpoint)
    client.generate([5], request_id="r", endpoint=home.endpoint)
    with pytest.raises(TooLong):
        client.generate([5], request_id="r", endpoint=other.endpoint)
    assert client.generate(fork={"request": "r"}).endpoint == home.endpoint


def test_a_last_turn_that_is_refused_leaves_its_session_where_it_was(connect: Connect, serve: Serve) -> None:
    def refuse_last(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header.get("end_of_session") and len(header["prompt"]) > 1:
            worker.reply(peer, header, {"op": "error", "code": "too_long", "message": "no", "field": "prompt"})
        else:
            accept(worker, peer, header)

    workers = serve(refuse_last), serve(refuse_last), serve(refuse_last)
    client = connect(*(worker.endpoint for worker in workers))
    home = client.generate([5], session="s").endpoint
    with pytest.raises(TooLong):
        client.generate([5, 6], session="s", end_of_session=True)
    assert [client.generate([5], session="s").endpoint for _ in range(3)] == [home] * 3
    client.generate([5], session="s", end_of_session=True)
    assert {client.generate([5], session=f"s{i}").endpoint for i in range(3)} == {each.endpoint for each in workers}
