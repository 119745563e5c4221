"""Who acknowledges results by itself, and when."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.bridge.client_script import Connect, Serve, in_reverse, only_generate
from tests.support.bridge.model_script import Model, vanish
from tests.support.bridge.scripted_worker import ScriptedWorker, counting
from trainer_bridge.wire import errors
from trainer_bridge.wire.worker_connection import WorkerConnection


def acknowledged(worker: ScriptedWorker, count: int) -> list[str]:
    """The ids that were acknowledged, once there are `count` of them."""
    while len(worker.acknowledged) < count:
        worker.next("ack")
    return worker.acknowledged


def test_a_client_without_a_name_acknowledges_what_it_was_given(connect: Connect, serve: Serve) -> None:
    worker = serve()
    client = connect(worker.endpoint)
    client.generate([1], request_id="a")
    for _ in client.generate([1], request_id="b", stream="tokens"):
        pass
    assert acknowledged(worker, 2) == ["a", "b"]
    assert client.ping() is None, "the answer to it reaches no other call"


def test_results_that_come_together_are_acknowledged_together(
    connect: Connect, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain, held, given = WorkerConnection.drain, [], []

    def drain_when_all_are_there(self: WorkerConnection, most: int) -> tuple[list[list[bytes]], bool]:
        messages, lost = drain(self, most)
        if given:
            return messages, lost
        held.extend(messages)
        if len(held) < 50:
            return [], lost
        given.append(True)  # once: what comes again would be acknowledged again
        return held, lost

    worker = serve(only_generate(in_reverse(50)))
    monkeypatch.setattr(WorkerConnection, "drain", drain_when_all_are_there)
    connect(worker.endpoint).generate_many([[token] for token in range(50)], max_tokens=1)
    assert len(set(acknowledged(worker, 50))) == 50
    assert worker.acks < 25


def test_a_named_client_leaves_its_results_for_who_comes_back(connect: Connect, serve: Serve) -> None:
    worker = serve()
    client = connect(worker.endpoint, client="job")
    client.generate([1], request_id="a")
    client.ping()
    assert worker.acknowledged == []
    client.ack(["a"])
    assert worker.acknowledged == ["a"]


@pytest.mark.parametrize(("client", "acknowledge", "acks"), [("job", True, ["a"]), (None, False, [])])
def test_it_can_be_said_otherwise(
    connect: Connect, serve: Serve, client: str | None, acknowledge: bool, acks: list[str]
) -> None:
    worker = serve()
    made = connect(worker.endpoint, client=client, acknowledge=acknowledge)
    made.generate([1], request_id="a")
    made.ping()
    assert worker.acknowledged == acks


def test_with_a_journal_it_is_acknowledged_once_it_is_written(connect: Connect, serve: Serve, tmp_path: Path) -> None:
    path, at_ack = tmp_path / "j", []

    class Watched(ScriptedWorker):
        def reply(self, peer: bytes, request: dict[str, Any], fields: dict[str, Any]) -> None:
            if request["op"] == "ack":
                at_ack.append(path.read_bytes().count(b"finish_reason"))
            super().reply(peer, request, fields)

    worker = Watched(Model(3))
    client = connect(worker.endpoint, client="job", journal=path)
    client.generate([1], max_tokens=4, request_id="a")
    worker.next("ack")  # it has been answered
    (leg,) = worker.acknowledged
    assert leg == worker.requests[0]["id"] and at_ack and at_ack[0] > 0
    client.close()
    worker.stop()


def test_a_named_client_acknowledges_legs_that_nobody_else_knows(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(Model(5))
    client = connect(first.endpoint, second.endpoint, client="job", resume=True)
    client.generate([1], max_tokens=9, request_id="r")
    (leg,) = acknowledged(second, 1)
    assert leg != "r" and first.acknowledged == []
    client.generate([1], max_tokens=4, request_id="s", endpoint=second.endpoint)
    client.ping(endpoint=second.endpoint)
    assert second.acknowledged == [leg], "that one can be attached to"


def test_the_result_of_a_request_that_was_given_up_is_acknowledged_too(connect: Connect, serve: Serve) -> None:
    def late(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] == "cancel":
            counting(worker, peer, {**header, "op": "generate", "id": header["target"], "prompt": [1]})
        elif header["op"] != "generate":
            counting(worker, peer, header)

    worker = serve(late)
    client = connect(worker.endpoint)
    client.ping()  # without a connection the request would not be sent
    with pytest.raises(errors.RolloutTimeout):
        client.generate([1], request_id="a", timeout_s=0.1)
    worker.next("cancel")
    client.ping()
    client.ping()
    assert acknowledged(worker, 1) == ["a"]
