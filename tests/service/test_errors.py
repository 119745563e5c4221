"""Refusals, with their code and field; a wrong message does not affect other clients."""

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.engine.messages.statuses import EngineStatus
from rollout.engine.messages.to_engine import Submit
from tests.support.service.harness import serving
from trainer_bridge.wire.codec import encode

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def bench(codec):
    with serving(codec, max_n=8, max_prompt_tokens=500, max_message_bytes=20_000, max_header_bytes=10_000) as bench:
        yield bench


@pytest.fixture(scope="module")
def client(bench):
    return bench.client()


WRONG_FIELDS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, 2.0]}, "prompt"),
    ({"prompt": [1, None]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [302]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": np.array([1.0])}, "prompt"),
    ({"prompt": np.array([[1]])}, "prompt"),
    ({"prompt": np.array([302])}, "prompt"),
    ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
    ({"prompt": None, "messages": []}, "messages"),
    ({"prompt": None, "messages": [{"content": "x"}]}, "messages.0.role"),
    ({"prompt": None, "messages": [{"role": "user", "content": "bad"}]}, "messages"),
    (
        {"prompt": None, "messages": [{"role": "user"}], "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs.tokenize",
    ),
    ({"tools": []}, "tools"),
    ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.0}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True}, "stream"),
    ({"stream_every": 0}, "stream_every"),
    ({"return_text": 1}, "return_text"),
    ({"priority": 2**31}, "priority"),
    ({"deadline_s": 0}, "deadline_s"),
    ({"deadline_s": INF}, "deadline_s"),
    ({"metadata": []}, "metadata"),
    ({"client": ""}, "client"),
    ({"max_token": 3}, "max_token"),
    ({"sampling": {"temperature": NAN}}, "sampling.temperature"),
    ({"sampling": {"temperature": -1}}, "sampling.temperature"),
    ({"sampling": {"temperature": 1e-9}}, "sampling.temperature"),
    ({"sampling": {"top_p": 0}}, "sampling.top_p"),
    ({"sampling": {"top_p": 1.1}}, "sampling.top_p"),
    ({"sampling": {"top_k": -1}}, "sampling.top_k"),
    ({"sampling": {"top_k": 303}}, "sampling.top_k"),
    ({"sampling": {"min_p": 2}}, "sampling.min_p"),
    ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
    ({"sampling": {"presence_penalty": INF}}, "sampling.presence_penalty"),
    ({"sampling": {"frequency_penalty": "x"}}, "sampling.frequency_penalty"),
    ({"sampling": {"seed": 2**63}}, "sampling.seed"),
    ({"sampling": {"seed": -1}}, "sampling.seed"),
    ({"sampling": {"logit_bias": {"302": 1}}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": {"x": 1}}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": {"1": NAN}}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": {"1": 1, "01": 1}}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": {str(i): 0 for i in range(513)}}}, "sampling.logit_bias"),
    ({"sampling": {"topp": 1}}, "sampling.topp"),
    ({"stop": {"strings": [""]}}, "stop.strings.0"),
    ({"stop": {"strings": ["x"] * 33}}, "stop.strings"),
    ({"stop": {"strings": ["x" * 257]}}, "stop.strings.0"),
    ({"stop": {"strings": ["a", "<|im_end|>"]}}, "stop.strings.1"),
    ({"stop": {"token_ids": [302]}}, "stop.token_ids"),
    ({"stop": {"token_ids": [-1]}}, "stop.token_ids.0"),
    ({"stop": {"min_tokens": 11}, "max_tokens": 10}, "stop.min_tokens"),
    ({"stop": {"min_tokens": 1001}}, "stop.min_tokens"),
    ({"stop": {"min_tokens": 1, "token_ids": list(range(65))}}, "stop.token_ids"),
    ({"constraint": {"token_ids": [302]}}, "constraint.token_ids"),
    ({"constraint": {"token_ids": [1], "after": [302]}}, "constraint.after"),
    ({"constraint": {"token_ids": [1], "after": [2, 301]}}, "constraint.after"),
    ({"constraint": {"token_ids": [1], "after": []}}, "constraint.after"),
    ({"constraint": {"token_ids": [1], "after": "needs the extra"}}, "constraint.after"),
    ({"continue_from": {"token_ids": [1]}}, "continue_from.seed"),
    ({"continue_from": {"seed": 1}}, "continue_from.token_ids"),
    ({"continue_from": {"token_ids": [302], "seed": 1}}, "continue_from.token_ids"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "logprobs": [1.0, 2.0]}}, "continue_from"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "raw_logprobs": ["x"]}}, "continue_from.raw_logprobs"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "logprobs": [None]}}, "continue_from.logprobs"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "versions": [[1, 2]]}}, "continue_from"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "logprobs": [5.0]}}, "continue_from"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "raw_logprobs": [INF]}}, "continue_from"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "drawn_logprobs": [1e39]}}, "continue_from"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "versions": [[1]]}}, "continue_from.versions"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "versions": [[2**63, 1]]}}, "continue_from.versions"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "recomputed": [[0, 2**63]]}}, "continue_from.recomputed"),
    ({"continue_from": {"token_ids": [1], "seed": 1, "kv_versions": [[0, 2**63, 1]]}}, "continue_from.kv_versions"),
    ({"max_kv_age": -1}, "max_kv_age"),
    ({"max_kv_age": "1"}, "max_kv_age"),
    ({"continue_from": {"token_ids": [1], "seed": 1}, "n": 2}, "n"),
    ({"continue_from": {"token_ids": [1, 2], "seed": 1}, "max_tokens": 1}, "max_tokens"),
    ({"continue_from": {"token_ids": [1, 2], "seed": 1}, "sampling": {"seed": 2}}, "sampling.seed"),
]


@pytest.mark.parametrize("fields, field", WRONG_FIELDS, ids=lambda value: str(value)[:60])
def test_wrong_field_is_named(bench, client, fields, field):
    header = {"prompt": [1], **fields}
    error = client.ask("generate", **{name: value for name, value in header.items() if value is not None})
    assert (error["op"], error["id"], error["code"], error["field"]) == ("error", "a", "bad_request", field)
    assert len(error["message"]) > 10 and bench.inbox.empty()


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"prompt": [1] * 600}, "prompt"),
        ({"prompt": [1], "max_tokens": 1000}, "max_tokens"),
        ({"prompt": "a b " * 500}, "prompt"),
        ({"prompt": [1] * 500, "continue_from": {"token_ids": [1] * 500, "seed": 1}}, "prompt"),
    ],
)
def test_what_the_context_cannot_hold_is_too_long(bench, client, fields, field):
    error = client.ask("generate", **fields)
    assert (error["code"], error["field"]) == ("too_long", field)
    assert bench.inbox.empty()


def test_adapters_cannot_be_loaded_where_none_are_served_but_null_is_fine(bench, client):
    for op, fields in (("load_adapter", {"name": "x", "path": "x"}), ("unload_adapter", {"name": "x"})):
        error = client.ask(op, **fields)
        assert (error["code"], error["field"]) == ("bad_request", "op")
    client.send("generate", prompt=[1], max_tokens=1, adapter=None)
    bench.finish(bench.submitted())
    assert client.receive()["op"] == "result"
    assert client.ask("ack", "k", targets=["a"])["op"] == "ok"


@pytest.mark.parametrize("field", ["sampling", "stop", "constraint", "continue_from"])
def test_text_in_place_of_a_map_is_answered_with_map(client, field):
    error = client.ask("generate", prompt=[1], **{field: "json"})
    assert (error["code"], error["field"]) == ("bad_request", field)
    assert "map" in error["message"] and "Fields" not in error["message"]


@pytest.mark.parametrize("op", ["sleep", "wake", "trace", "nonsense", 5, None])
def test_op_that_is_not_offered_is_a_bad_request(client, op):
    error = client.ask(op, "z")
    assert (error["id"], error["code"], error["field"]) == ("z", "bad_request", "op")


@pytest.mark.parametrize("header_id", ["", "x" * 129, 5, None])
def test_id_must_be_a_short_string(client, header_id):
    error = client.ask("ping", header_id)
    assert (error["id"], error["code"], error["field"]) == ("", "bad_request", "id")


@pytest.mark.parametrize("op", ["ping", "status", "resume", "pause", "shutdown", "cancel", "attach", "ack", "report"])
def test_unknown_field_of_any_op_is_refused(bench, client, op):
    extra = {"cancel": {"target": "x"}, "attach": {"target": "x"}, "ack": {"targets": ["x"]}}.get(op, {})
    extra = {"target": "x", "logprobs": {"0": [0.0]}} if op == "report" else extra
    error = client.ask(op, wrong=1, **extra)
    assert (error["code"], error["field"]) == ("bad_request", "wrong")
    assert bench.inbox.empty()


def test_a_misspelt_field_is_answered_with_the_one_meant(client):
    error = client.ask("generate", prompt=[1], max_token=3)
    assert error["field"] == "max_token" and "did you mean 'max_tokens'?" in error["message"]


@pytest.mark.parametrize("version", [2, "1", True, None])
def test_wrong_protocol_version_is_a_bad_message(client, version):
    client.send_frames(encode({"v": version, "op": "ping", "id": "q"}))
    error = client.receive()
    assert (error["id"], error["code"], error["field"]) == ("q", "bad_message", "v")


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [msgpack.packb([1])],
        [msgpack.packb({"v": 1, "op": "ping", "id": "q"}), b"blob nobody refers to"],
        [msgpack.packb({"v": 1, "op": "ping", "id": "q"}) + b"x" * 10_001],
        [msgpack.packb({"id": "q", "prompt": {"blob": 0, "dtype": "<i4", "shape": [9999]}}), b"1234"],
        [msgpack.packb({"id": "q", "x": {"blob": 0, "dtype": "|u1", "shape": [20_001]}}), bytes(20_001)],
    ],
)
def test_broken_message_is_a_bad_message(client, frames):
    client.send_frames(frames)
    error = client.receive()
    assert (error["op"], error["code"]) == ("error", "bad_message")
    assert error["id"] in ("q", "")


def test_every_limit_on_clients_and_queue_says_when_to_come_back(codec):
    with serving(codec, max_clients=1) as bench:
        one, two = bench.client(), bench.client()
        one.send("generate", prompt=[1], max_tokens=2)
        request = bench.submitted()
        error = two.ask("generate", prompt=[1], max_tokens=2)
        assert error["code"] == "overloaded" and error["retry_after_s"] > 0
        bench.finish(request)
        assert one.receive()["op"] == "result"
        two.send("generate", prompt=[1], max_tokens=2)
        bench.submitted()


def test_fault_in_one_message_is_internal_and_the_server_goes_on(codec, caplog):
    with serving(codec) as bench:
        client = bench.client()
        bench.status[0] = None  # the status reply cannot be made of this
        error = client.ask("status", "s")
        assert (error["id"], error["code"]) == ("s", "internal")
        bench.status[0] = EngineStatus()
        assert client.ask("ping")["op"] == "ok"
    assert any(record.exc_info for record in caplog.records), "the fault is in the log"


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    [
        *("prompt", "sampling", "stop", "n", "continue_from", "messages", "stream", "metadata"),
        *("target", "targets", "offsets", "text_chars"),
    ]
)
headers = st.builds(
    lambda op, fields: {"v": 1, "op": op, "id": "f", **fields},
    st.sampled_from(["generate", "cancel", "attach", "ack", "weights", "status", "x"]),
    st.dictionaries(names, plain, max_size=4),
)
frames = st.lists(st.binary(max_size=40), max_size=4) | headers.map(lambda header: [msgpack.packb(header)])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(frames, min_size=1, max_size=5))
def test_random_messages_do_not_disturb_another_client(fuzzed, messages):
    bench, good, bad = fuzzed
    good.send("generate", "good", prompt=[1, 2], max_tokens=3)
    request = good_request(bench)
    for message in messages:
        if message:
            bad.send_frames(message)
    while bad.socket.poll(0):
        bad.socket.recv_multipart()
    bench.finish(request)
    assert good.receive()["op"] == "result"
    assert good.ask("ack", "k", targets=["good"])["op"] == "ok"


def good_request(bench):
    """The good client's request; random messages may be valid requests, too."""
    while True:
        command = bench.command()
        if isinstance(command, Submit) and command.request.key[1].startswith("good#"):
            return command.request


@pytest.fixture
def fuzzed(codec):
    with serving(codec) as bench:
        yield bench, bench.client(), bench.client()
