"""Every error code, from a real worker; what one client does wrong disturbs no other."""

import msgpack
import pytest

from tests.support.worker.harness import text_of
from tests.support.worker.raw_client import RawClient, pack_blob
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import Duplicate, NotFound, Overloaded, TooLong


def code_of(reply: dict) -> str:
    assert reply["op"] == "error" and reply["message"], reply
    return reply["code"]


def header(**fields: object) -> bytes:
    return msgpack.packb({"v": 1, "id": "x", **fields})


@pytest.mark.parametrize(
    ("frames", "request_id"),
    [
        ([b"\xc1\xc1\xc1"], ""),
        ([msgpack.packb([1, 2, 3])], ""),
        ([msgpack.packb({1: 2})], ""),
        ([header(op="ping")[:-2]], "x"),
        ([header(op="ping") + b"\x00"], "x"),
        ([msgpack.packb({"v": 2, "op": "ping", "id": "x"})], "x"),
        ([msgpack.packb({"op": "ping", "id": "x"})], "x"),
        ([header(op="generate", prompt={"blob": 0, "dtype": "<i4", "shape": [3]}), b"12345678"], "x"),
        ([header(op="generate", prompt={"blob": 0, "dtype": "|O8", "shape": [1]}), b"12345678"], "x"),
        ([header(op="generate", prompt={"blob": 1, "dtype": "<i4", "shape": [2]}), b"12345678"], "x"),
        ([header(op="ping"), b"an extra blob"], "x"),
        ([header(op="ping"), *[b""] * 300], "x"),
        ([header(op="ping", more=msgpack.ExtType(1, b"code"))], "x"),
        ([header(op="ping", more=b"x" * (17 << 20))], "x"),
    ],
    ids=[
        "not msgpack", "a list", "integer keys", "cut off", "bytes after it", "wrong v", "no v", "short blob",
        "object dtype", "no such blob", "unused blob", "too many blobs", "an extension", "too large",
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_a_bad_message(raw: RawClient, frames: list[bytes], request_id: str) -> None:
    raw.send_frames(frames)
    reply = raw.receive()
    assert (code_of(reply), reply["id"]) == ("bad_message", request_id)
    assert raw.ask("ping", "after")["op"] == "ok"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"sampling": {"top_q": 0.5}}, "sampling.top_q"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"sampling": {"top_k": 17}}, "sampling.top_k"),
        ({"sampling": {"seed": -1}}, "sampling.seed"),
        ({"sampling": {"logit_bias": {"16": 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {"five": 1.0}}}, "sampling.logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 1025}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"stop": {"strings": "6"}}, "stop.strings"),
        ({"stop": {"strings": ["6", "<eos>"]}}, "stop.strings.1"),
        ({"stop": {"token_ids": [16]}}, "stop.token_ids"),
        ({"stop": {"min_tokens": 9}, "max_tokens": 8}, "stop.min_tokens"),
        ({"stream": True}, "stream"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"metadata": [1]}, "metadata"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [3, 16]}, "prompt"),
        ({"prompt": [3, 1.5]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"messages": [{"role": "user", "content": "17:"}]}, "prompt"),
        ({"prompt": None, "messages": [{"content": "17:"}]}, "messages.0.role"),
        ({"tools": []}, "tools"),
        ({"continue_from": {"token_ids": [3]}}, "continue_from.seed"),
        ({"continue_from": {"token_ids": [3], "seed": 1}, "n": 2}, "n"),
        ({"continue_from": {"token_ids": [3, 4], "seed": 1}, "max_tokens": 1}, "max_tokens"),
        ({"continue_from": {"token_ids": [3, 4], "seed": 1, "logprobs": [0.0]}}, "continue_from"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_named(raw: RawClient, fields: dict, field: str) -> None:
    reply = raw.ask("generate", "b", **{"prompt": "17:", "max_tokens": 8, **fields})
    assert (code_of(reply), reply["field"]) == ("bad_request", field)


#: What the protocol names and not every worker has, with a value that asks for it.
OPTIONAL_FIELDS = {
    "logprobs": 5, "prompt_logprobs": True, "min_complete": 1, "return_routing": True, "constraint": {"regex": "a"},
    "adapter": "a", "session": "a", "min_version": 1, "max_version_span": 1, "max_kv_age": 1,
    "detached": True,
}  # fmt: skip
OPTIONAL_OPS = ("attach", "ack", "sleep", "wake", "report", "trace")


def test_features_outside_the_capabilities_are_refused_by_name(raw: RawClient) -> None:
    offered = set(raw.ask("status", "s")["capabilities"])
    refused = [name for name in OPTIONAL_FIELDS if name not in offered]
    for name in refused:
        reply = raw.ask("generate", "b", prompt="17:", max_tokens=8, **{name: OPTIONAL_FIELDS[name]})
        assert (code_of(reply), reply["field"]) == ("bad_request", name)
        assert name in reply["message"] and "capabilities" in reply["message"]
    for op in (op for op in OPTIONAL_OPS if op not in offered):
        reply = raw.ask(op, "b")
        assert (code_of(reply), reply["field"]) == ("bad_request", "op") and op in reply["message"]


@pytest.mark.parametrize(
    ("op", "fields", "field"),
    [
        ("generat", {}, "op"),
        ("ping", {"now": True}, "now"),
        ("cancel", {}, "target"),
        ("pause", {"mode": "stop"}, "mode"),
        ("shutdown", {"mode": "later"}, "mode"),
        ("weights", {"action": "undo"}, "action"),
        ("weights", {"action": "commit", "token": "00", "options": {}, "more": 1}, "more"),
    ],
)
def test_a_wrong_op_or_control_field_is_named(raw: RawClient, op: str, fields: dict, field: str) -> None:
    reply = raw.ask(op, "b", **fields)
    assert (code_of(reply), reply["field"]) == ("bad_request", field)


@pytest.mark.parametrize("request_id", ["", "x" * 129, 7, None])
def test_a_request_without_a_proper_id_is_answered_without_one(raw: RawClient, request_id: object) -> None:
    raw.send_frames([msgpack.packb({"v": 1, "op": "ping", "id": request_id})])
    reply = raw.receive()
    assert (code_of(reply), reply["field"], reply["id"]) == ("bad_request", "id", "")


def test_fields_of_other_versions_that_ask_for_nothing_are_accepted(raw: RawClient) -> None:
    nothing = {
        "logprobs": 0,
        "prompt_logprobs": False,
        "min_complete": None,
        "return_routing": False,
        "detached": False,
    }
    assert raw.ask("generate", "b", prompt="17:", max_tokens=2, **nothing)["op"] == "result"


def test_a_request_that_the_worker_can_never_hold_is_too_long(client: RolloutClient) -> None:
    limit = client.status()["max_context_tokens"]
    with pytest.raises(TooLong) as caught:
        client.generate("17:", max_tokens=limit - 2)
    assert caught.value.field == "max_tokens" and str(limit - 3) in str(caught.value)
    with pytest.raises(TooLong):
        client.generate([3] * (limit + 1))


def test_a_full_queue_is_overloaded_and_says_when_to_come_back(client: RolloutClient, worker: WorkerProcess) -> None:
    room = client.status()["queue"]["max"]
    client.pause()
    waiting = client.generate("17:", n=room, max_tokens=4, stream="completions")
    with pytest.raises(Overloaded) as caught:
        client.generate("17:", max_tokens=4)
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0
    with RolloutClient(worker.endpoint, timeout_s=60) as other:  # a batch waits and comes back by itself
        batch = other.generate_as_completed(["18:", "19:"], max_tokens=4)
        client.resume()
        outcomes = [settled.unwrap() for settled in batch]
    assert sorted(text_of(result.completions[0].token_ids) for result in outcomes) == [" 19 ", " 20 "]
    assert len(waiting.wait().completions) == room


def test_an_id_in_flight_is_a_duplicate_and_an_unknown_one_is_not_found(client: RolloutClient) -> None:
    with client.generate("17:", max_tokens=30_000, stream="tokens", request_id="mine") as stream:
        next(stream)
        with RolloutClient(client.endpoints[0], timeout_s=60) as stranger:
            with pytest.raises(NotFound):  # a request of another client
                stranger.cancel("mine")
        with pytest.raises(NotFound) as caught:
            client.cancel("another")
        assert caught.value.field == "target"
        stream.cancel()
        assert stream.wait().completions[0].finish_reason == "cancelled"
    with pytest.raises(NotFound):
        client.cancel("mine")


def test_a_duplicate_has_its_class(worker: WorkerProcess) -> None:
    names = {"client": "same", "timeout_s": 60.0}
    with RolloutClient(worker.endpoint, **names) as one, RolloutClient(worker.endpoint, **names) as other:
        with one.generate("17:", max_tokens=30_000, stream="tokens", request_id="d") as stream:
            next(stream)
            with pytest.raises(Duplicate) as caught:
                other.generate("18:", request_id="d")
            assert caught.value.request_id == "d"
            other.cancel("d")  # the same client by name
            assert stream.wait().completions[0].finish_reason == "cancelled"


def test_one_bad_client_does_not_disturb_anothers_stream(client: RolloutClient, worker: WorkerProcess) -> None:
    rounds = 6
    with (
        client.generate("17:", n=2, max_tokens=1200, stream="tokens", stream_every=16) as stream,
        RawClient(worker.endpoint) as bad,
        RawClient(worker.endpoint, delimiter=True) as worse,
    ):
        for i in range(rounds):
            next(stream)
            bad.send_frames([b"\xc1 nonsense %d" % i])
            assert code_of(bad.receive()) == "bad_message"
            reference, blob = pack_blob([3, 99], "<i4")
            assert code_of(bad.ask("generate", "b", (blob,), prompt=reference)) == "bad_request"
            worse.send("generate", f"left{i}", prompt="17:", max_tokens=30_000, stream="tokens", stream_every=1)
        assert worse.receive()["op"] == "chunk"
        worse.close()  # with all of its requests in flight
        result = stream.wait()
    expected = "".join(f" {number}" for number in range(18, 700))
    for completion in result.completions:
        assert expected.startswith(text_of(completion.token_ids)) and len(completion) == 1200
