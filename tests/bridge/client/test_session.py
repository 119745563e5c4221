"""Sessions as the clients send them: the worker of each turn, and the message that ends a session."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bridge.client_script import Connect, Serve, only_generate
from tests.support.bridge.model_script import Model
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, result
from trainer_bridge.wire.errors import ConnectionLost, RolloutTimeout


def settled(client: Any, value: Any) -> Any:
    """What a call of either client's session gives."""
    return client._settle(value) if asyncio.iscoroutine(value) else value


@only_generate
def answer(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    worker.reply(peer, header, result([completion([1])]))


def sent(worker: ScriptedWorker, op: str) -> list[dict[str, Any]]:
    return [header for header in worker.requests if header["op"] == op]


def test_every_turn_names_its_session_and_its_lease(connect: Connect, serve: Serve) -> None:
    worker = serve(answer)
    client = connect(worker.endpoint)
    first, second = client.session(lease_s=7.5), client.session("mine")
    for session in (first, second, first):
        settled(client, session.generate([1, 2], max_tokens=3))
    assert [header["session"] for header in sent(worker, "generate")] == [first.id, "mine", first.id]
    assert [header.get("session_lease_s") for header in sent(worker, "generate")] == [7.5, None, 7.5]
    assert first.id != client.session().id


def test_the_end_is_told_to_its_worker_alone(connect: Connect, serve: Serve) -> None:
    workers = [serve(answer), serve(answer)]
    client = connect(*(worker.endpoint for worker in workers), client="job")
    client.ping()
    session = client.session()
    place = settled(client, session.generate([1])).endpoint
    if hasattr(session, "__aenter__"):
        settled(client, session.__aexit__(None, None, None))
    else:
        session.__exit__(None, None, None)
    client.ping()
    for worker in workers:
        ends = [(header["session"], header["client"]) for header in sent(worker, "end_session")]
        assert ends == ([(session.id, "job")] if worker.endpoint == place else [])


def test_of_a_session_of_another_process_every_worker_is_told(connect: Connect, serve: Serve) -> None:
    workers = [serve(answer), serve(answer)]
    client = connect(*(worker.endpoint for worker in workers), client="job")
    client.end_session("theirs")
    client.ping()
    assert [[header["session"] for header in sent(worker, "end_session")] for worker in workers] == [["theirs"]] * 2


def test_ending_a_session_whose_worker_is_gone_is_no_error(connect: Connect, serve: Serve) -> None:
    gone, there = serve(answer), serve(answer)
    client = connect(gone.endpoint, there.endpoint)
    client.ping()
    session = client.session()
    settled(client, session.generate([1], endpoint=gone.endpoint))
    gone.stop()
    with pytest.raises((ConnectionLost, RolloutTimeout)):
        client.ping(endpoint=gone.endpoint, timeout_s=0.5)
    session.end()
    client.ping(endpoint=there.endpoint)
    assert sent(there, "end_session") == []
    client.close()
    session.end()


def test_a_journal_knows_a_turn_again_whatever_its_session_is_called(
    connect: Connect, serve: Serve, tmp_path: Path
) -> None:
    """A process that was started again has other sessions, and the same requests."""
    worker = serve(Model(3))
    for _ in range(2):
        client = connect(worker.endpoint, journal=tmp_path / "journal")
        session = client.session(lease_s=5)
        turn = settled(client, session.generate([1], max_tokens=4, seed=9, request_id="turn-1"))
        assert len(turn.completions[0]) == 4
        client.close()
    assert len(sent(worker, "generate")) == 1


def test_a_prefetch_goes_where_the_kv_is_known_to_be(connect: Connect, serve: Serve) -> None:
    """To the worker of a session or of a prompt's longest part; to all workers if none is known."""
    here = {"op": "ok", "tokens": 64}

    def told(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] == "prefetch":
            worker.reply(peer, header, here)
        else:
            answer(worker, peer, header)

    workers = [serve(told), serve(told), serve(told)]
    client = connect(*(worker.endpoint for worker in workers))
    client.ping()
    long = list(range(200))
    place = client.generate([1], session="s", max_tokens=3).endpoint
    holder = client.generate(long, max_tokens=3).endpoint

    def asked() -> list[str]:
        found = [worker.endpoint for worker in workers for _ in sent(worker, "prefetch")]
        for worker in workers:
            worker.requests.clear()
        return found

    assert client.prefetch(session="s") == 64 and asked() == [place]
    assert client.prefetch([*long, 7]) == 64 and asked() == [holder]
    client.prefetch([7] * 200), client.prefetch(session="of another process")
    assert sorted(asked()) == sorted(2 * [worker.endpoint for worker in workers])
    client.prefetch(np.array(long), endpoint=workers[0].endpoint, cache_salt="x")
    assert [header["cache_salt"] for header in sent(workers[0], "prefetch")] == ["x"]
    assert asked() == [workers[0].endpoint]
    with pytest.raises(ValueError):
        client.prefetch([-1])
