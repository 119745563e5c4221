"""Forks: a request that continues another one goes where that one's tokens are, and names it as that worker does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bridge.client_script import Connect, Serve
from tests.support.bridge.model_script import Model, vanish
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, result
from trainer_bridge.client.generate_request import plan_request
from trainer_bridge.client.placement import Fleet
from trainer_bridge.wire.errors import NotFound


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
    fleet.sent("r", "b")
    plan = plan_request(None, {"fork": {"request": "r"}, "session": "s"})
    home, _ = fleet.source(plan.fields["fork"])
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
        fleet.sent(f"r{i}", "b")
    assert fleet.source({"request": "r0"})[0] is None and fleet.source({"request": "r39999"})[0] == "b"


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
        {"request": legs[0], "index": 0},
        {"request": "b"},
    ]


def test_a_fork_whose_worker_is_lost_ends_with_its_tokens_and_says_what_to_send(connect: Connect, serve: Serve) -> None:
    """Another worker does not know what it continues."""

    def unknown(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        worker.reply(
            peer, header, {"op": "error", "code": "not_found", "message": "send the tokens", "field": "fork.request"}
        )

    lost, other = serve(Model(3, reach=(4,), fail=vanish)), serve(unknown)
    client = connect(lost.endpoint, other.endpoint, resume=True)
    fields = {"fork": {"request": "r"}, "max_tokens": 9, "seed": 1}
    with pytest.raises(NotFound, match="send the tokens") as ended:
        client.generate([7], endpoint=None, request_id="b", **fields)
    assert [len(part) for part in ended.value.partials] == [4]
