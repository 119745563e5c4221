"""`generate` through real sockets: what reaches the engine, what comes back."""

import numpy as np
import pytest
import zmq

from rollout.engine.messages.requests import StopParams
from rollout.engine.messages.statuses import EngineStatus
from rollout.engine.messages.to_engine import Cancel
from rollout.engine.messages.to_service import Finish, Rejected
from tests.support.patience import PATIENCE_S
from tests.support.service.harness import MODEL, delta, done, serving


@pytest.fixture
def bench(codec):
    with serving(codec) as bench:
        yield bench


@pytest.mark.parametrize("kind, delimiter", [(zmq.DEALER, False), (zmq.DEALER, True), (zmq.REQ, False)])
def test_request_reaches_the_engine_and_its_result_comes_back(bench, kind, delimiter):
    client = bench.client(kind, delimiter)
    client.send("generate", "r1", prompt=[5, 6], n=2, max_tokens=9, metadata={"group": 4, "x": np.arange(2)})
    request = bench.submitted()
    assert request.prompt.token_ids.tolist() == [5, 6] and request.prompt.token_ids.dtype == np.int32
    assert (request.n, request.max_tokens, request.stream_every) == (2, 9, 0)
    assert request.stop == StopParams(token_ids=(301,))
    bench.finish(request, [1, 2, 3])
    result = client.receive()
    assert (result["op"], result["id"], result["v"]) == ("result", "r1", 1)
    assert [completion["index"] for completion in result["completions"]] == [0, 1]
    second = result["completions"][1]
    assert second["token_ids"].tolist() == [1, 2, 3] and second["token_ids"].dtype == np.int32
    assert second["logprobs"].tolist() == [0, -1, -2] and second["logprobs"].dtype == np.float32
    assert second["raw_logprobs"].tolist() == [0, -2, -4]
    assert "drawn_logprobs" not in second and "text" not in second
    assert second["versions"] == [[7, 3]]
    assert (second["finish_reason"], second["stop"], second["seed"]) == ("length", None, 1001)
    assert (result["prompt_tokens"], result["cached_tokens"], result["preemptions"]) == (2, 1, 2)
    assert result["timing"] == {"queued_s": 0.1, "prefill_s": 0.2, "decode_s": 0.3, "total_s": 0.6}
    assert result["worker"] == "worker-1" and result["seed"] == request.sampling.seed
    assert result["metadata"]["group"] == 4 and result["metadata"]["x"].tolist() == [0, 1]


def test_sampling_and_stop_settings_reach_the_engine(bench):
    client = bench.client()
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logit_bias": {"9": 2, "3": -1.5},
        "seed": 2**63 - 1,
    }
    stop = {"token_ids": [4, 4], "strings": ["END"], "ignore_eos": True, "min_tokens": 2}
    client.send("generate", prompt=np.array([1], np.uint16), sampling=sampling, stop=stop, priority=-3, deadline_s=60)
    request = bench.submitted()
    for name, value in sampling.items():
        if name != "logit_bias":
            assert getattr(request.sampling, name) == value, name
    assert request.sampling.logit_bias == ((3, -1.5), (9, 2.0))
    assert request.stop == StopParams(token_ids=(4,), strings=("END",), min_tokens=2)
    assert request.priority == -3 and 50 < request.deadline_s <= 60
    assert request.max_tokens == MODEL.max_context_tokens - 1
    assert request.stream_every == 4  # stop_check_every


def test_worker_draws_a_seed_for_each_request_that_has_none(bench):
    client = bench.client()
    seeds = set()
    for name in "abcdefgh":
        client.send("generate", name, prompt=[1], max_tokens=2)
        seeds.add(bench.submitted().sampling.seed)
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_text_and_messages_are_tokenized(bench, codec):
    client = bench.client()
    client.send("generate", "a", prompt="the fox", max_tokens=4, return_text=True)
    request = bench.submitted()
    assert request.prompt.token_ids.tolist() == codec.encode("the fox").tolist()
    bench.finish(request, codec.encode("café 👍").tolist())
    assert client.receive()["completions"][0]["text"] == "café 👍"

    messages = [{"role": "user", "content": "hi"}]
    client.send("generate", "b", messages=messages, tools=[{"name": "t"}], chat_template_kwargs={"loud": True})
    text = codec.decode(bench.submitted().prompt.token_ids.tolist())
    assert "user\nhi" in text and "tools:1LOUD" in text and text.endswith("assistant\n")
    client.send("generate", "c", messages=messages, chat_template_kwargs={"add_generation_prompt": False})
    assert "assistant" not in codec.decode(bench.submitted().prompt.token_ids.tolist())


def test_requests_of_one_client_keep_their_order_behind_a_long_text(bench):
    client = bench.client()
    client.send("generate", "long", prompt="the fox " * 100, max_tokens=2)
    client.send("generate", "short", prompt=[1, 2], max_tokens=2)
    assert [bench.submitted().key[1].split("#")[0] for _ in range(2)] == ["long", "short"]


def test_socket_is_served_while_a_prompt_is_tokenized(codec):
    import threading

    started, release = threading.Event(), threading.Event()

    class Slow(type(codec)):
        def __init__(self):
            self.__dict__.update(codec.__dict__)

        def encode(self, text):
            started.set()
            assert release.wait(PATIENCE_S)
            return super().encode(text)

    with serving(Slow()) as bench:
        one, two = bench.client(), bench.client()
        one.send("generate", prompt="the fox", max_tokens=2)
        assert started.wait(PATIENCE_S)
        assert two.ask("ping")["op"] == "ok"
        assert two.ask("status")["queue"]["waiting"] == 1
        two.send("generate", prompt=[1], max_tokens=2)
        bench.finish(bench.submitted())
        assert two.receive()["op"] == "result"
        one.send("cancel", "c", target="a")
        assert one.receive()["op"] == "ok"
        release.set()
        request = bench.submitted()
        assert bench.command() == Cancel(request.key)


def test_result_holds_old_and_new_tokens_of_continue_from(bench):
    client = bench.client()
    prior = {
        "token_ids": [11, 12],
        "seed": 77,
        "logprobs": np.array([-1, -2], np.float32),
        "versions": [[3, 1], [4, 1]],
    }
    client.send("generate", prompt=[1], max_tokens=5, continue_from=prior, stream="tokens", stream_every=1)
    request = bench.submitted()
    assert request.prior.token_ids.tolist() == [11, 12] and request.sampling.seed == 77 and request.max_tokens == 5
    new = delta(request.key, 0, 2, [13], version=4, drawn_logprobs=np.array([-9], np.float32), finish=Finish("length"))
    bench.put(new, done(request))
    chunk, result = client.receive(), client.receive()
    assert chunk["op"] == "chunk" and chunk["offset"] == 2 and chunk["token_ids"].tolist() == [13]
    assert chunk["versions"] == [[4, 1]]
    completion = result["completions"][0]
    assert completion["token_ids"].tolist() == [11, 12, 13]
    assert completion["logprobs"].tolist() == [-1, -2, -2]
    assert np.isnan(completion["raw_logprobs"][:2]).all() and completion["raw_logprobs"][2] == -4
    assert np.isnan(completion["drawn_logprobs"][:2]).all() and completion["drawn_logprobs"][2] == -9
    assert completion["versions"] == [[3, 1], [4, 2]]


def test_versions_of_continue_from_are_unknown_when_not_given(bench):
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=5, continue_from={"token_ids": [11, 12], "seed": 0})
    bench.finish(bench.submitted(), [13])
    assert client.receive()["completions"][0]["versions"] == [[-1, 2], [7, 1]]


def test_stream_of_tokens_comes_in_chunks_of_the_asked_size(bench):
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=9, stream="tokens", stream_every=2)
    request = bench.submitted()
    assert request.stream_every == 2
    for offset in (0, 2, 4):
        bench.put(delta(request.key, 0, offset, [offset, offset + 1], version=offset))
    bench.put(delta(request.key, 0, 6, [], finish=Finish("stop", 5)), done(request))
    chunks = [client.receive() for _ in range(4)]
    assert [chunk["offset"] for chunk in chunks] == [0, 2, 4, 6]
    assert np.concatenate([chunk["token_ids"] for chunk in chunks]).tolist() == list(range(6))
    assert [chunk["versions"] for chunk in chunks] == [[[0, 2]], [[2, 2]], [[4, 2]], []]
    assert "finish_reason" not in chunks[2]
    assert (chunks[3]["finish_reason"], chunks[3]["stop"]) == ("stop", 5)
    assert client.receive()["completions"][0]["token_ids"].tolist() == list(range(6))


def test_stream_of_completions_sends_each_as_it_finishes(bench):
    client = bench.client()
    client.send("generate", prompt=[1], n=2, max_tokens=9, stream="completions")
    request = bench.submitted()
    assert request.stream_every == 0
    bench.put(delta(request.key, 1, 0, [8, 9], finish=Finish("length")))
    chunk = client.receive()
    assert (chunk["op"], chunk["index"], chunk["offset"], chunk["finish_reason"]) == ("chunk", 1, 0, "length")
    bench.put(delta(request.key, 0, 0, [7], finish=Finish("error", error="NaN in the logits")), done(request))
    assert client.receive()["error"] == "NaN in the logits"
    assert [len(completion["token_ids"]) for completion in client.receive()["completions"]] == [1, 2]


def test_plain_tokens_of_a_completion_with_drawn_logprobs_have_their_logprobs(bench):
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=4, stream="tokens", stream_every=1)
    request = bench.submitted()
    bench.put(delta(request.key, 0, 0, [1, 2]))
    bench.put(delta(request.key, 0, 2, [3], drawn_logprobs=np.array([-9], np.float32)))
    bench.put(delta(request.key, 0, 3, [4], finish=Finish("length")), done(request))
    replies = [client.receive() for _ in range(4)]
    assert replies[3]["completions"][0]["drawn_logprobs"].tolist() == [0, -1, -9, -3]


def test_same_message_twice_is_one_request_with_two_replies(bench):
    one, two = bench.client(), bench.client(delimiter=True)
    one.send("generate", "x", client="job", prompt=[1, 2], max_tokens=3)
    request = bench.submitted()
    two.send("generate", "x", client="job", prompt=[1, 2], max_tokens=3)
    assert two.ask("ping", "p")["op"] == "ok"
    bench.finish(request)
    assert one.receive()["op"] == two.receive()["op"] == "result"
    assert bench.inbox.empty()


def test_same_id_with_other_content_is_a_duplicate_and_the_first_goes_on(bench):
    client = bench.client()
    client.send("generate", "x", prompt=[1, 2], max_tokens=3)
    request = bench.submitted()
    error = client.ask("generate", "x", prompt=[1, 2], max_tokens=4)
    assert (error["op"], error["code"], error["field"], error["id"]) == ("error", "duplicate", "id", "x")
    bench.finish(request)
    assert client.receive()["op"] == "result"


def test_ids_of_two_clients_do_not_clash_and_an_id_is_free_after_its_ack(bench):
    one, two = bench.client(), bench.client()
    one.send("generate", "x", prompt=[1], max_tokens=3)
    first = bench.submitted()
    two.send("generate", "x", prompt=[2], max_tokens=3)
    second = bench.submitted()
    assert first.key != second.key
    bench.finish(first)
    assert one.receive()["op"] == "result"
    assert one.ask("generate", "x", prompt=[3], max_tokens=3)["code"] == "duplicate"
    assert one.ask("ack", "k", targets=["x"])["op"] == "ok"
    one.send("generate", "x", prompt=[3], max_tokens=3)
    third = bench.submitted()
    assert third.key not in (first.key, second.key)


def test_cancel_reaches_the_engine_and_the_partial_comes_back(bench):
    client = bench.client()
    client.send("generate", "x", prompt=[1], max_tokens=3)
    request = bench.submitted()
    assert client.ask("cancel", "c", target="x") == {"v": 1, "op": "ok", "id": "c"}
    assert bench.command() == Cancel(request.key)
    bench.finish(request, [4], reason="cancelled")
    assert client.receive()["completions"][0]["finish_reason"] == "cancelled"
    error = client.ask("cancel", "c", target="x")
    assert (error["code"], error["field"]) == ("not_found", "target")


def test_a_client_cannot_cancel_a_request_of_another(bench):
    one, two = bench.client(), bench.client()
    one.send("generate", "x", prompt=[1], max_tokens=3)
    bench.submitted()
    assert two.ask("cancel", "c", target="x")["code"] == "not_found"
    assert bench.inbox.empty()


def test_rejection_by_the_engine_is_an_error_with_all_its_fields(bench):
    client = bench.client()
    client.send("generate", "x", prompt=[1], max_tokens=3)
    request = bench.submitted()
    bench.put(Rejected(request.key, "overloaded", "the queue is full"))
    error = client.receive()
    assert (error["code"], error["message"], error["retry_after_s"]) == ("overloaded", "the queue is full", 1.0)
    assert client.ask("cancel", "c", target="x")["code"] == "not_found"


@pytest.mark.parametrize("state", ["draining", "stale"])  # asleep: test_sleep.py
def test_new_requests_are_refused_while_the_worker_cannot_serve(bench, state):
    bench.status[0] = EngineStatus(state=state)
    assert bench.client().ask("generate", prompt=[1])["code"] == "unavailable"


def test_paused_worker_takes_requests(bench):
    bench.status[0] = EngineStatus(state="paused")
    bench.client().send("generate", prompt=[1])
    assert bench.submitted().prompt.token_ids.tolist() == [1]


def test_broken_event_ends_its_request_and_nothing_else(bench):
    client = bench.client()
    client.send("generate", "bad", prompt=[1], max_tokens=3)
    bad = bench.submitted()
    client.send("generate", "good", prompt=[1], max_tokens=3)
    good = bench.submitted()
    bench.put(delta(bad.key, 0, 5, [1]))  # a gap
    error = client.receive()
    assert (error["id"], error["code"]) == ("bad", "internal")
    assert bench.command() == Cancel(bad.key)
    bench.put(delta(bad.key, 0, 0, [1], finish=Finish("cancelled")), done(bad))
    bench.finish(good)
    assert client.receive()["op"] == "result"


def test_model_without_tokenizer_serves_token_ids_only():
    with serving(None) as bench:
        client = bench.client()
        for field, fields in {
            "prompt": {"prompt": "text"},
            "messages": {"messages": [{"role": "user", "content": "x"}]},
            "return_text": {"prompt": [1], "return_text": True},
            "stop.strings": {"prompt": [1], "stop": {"strings": ["x"]}},
        }.items():
            error = client.ask("generate", **fields)
            assert (error["code"], error["field"]) == ("bad_request", field)
            assert "no tokenizer" in error["message"]
        client.send("generate", prompt=[1], max_tokens=2)
        bench.finish(bench.submitted())
        assert client.receive()["op"] == "result"


@pytest.mark.parametrize("stop", [{}, {"ignore_eos": True}, {"min_tokens": 3}])
def test_a_list_of_tokens_has_no_end_and_may_begin_after_others(bench, stop):
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=9, constraint={"token_ids": [4, 5]}, stop=stop)
    first = bench.submitted()
    assert [first.constraint.start().accept(token) for token in (4, 5, 301, 6)] == [True, True, False, False]
    assert first.constraint.free is None and first.stop.min_tokens == stop.get("min_tokens", 0)
    bench.finish(first)
    client.receive()
    for prompt, prior, begun in (([1], [], False), ([1, 7, 8], [], True), ([1], [7], False), ([1], [7, 8], True)):
        known = {"continue_from": {"token_ids": prior, "seed": 3}} if prior else {}
        fields = {"constraint": {"token_ids": [4, 5], "after": [7, 8]}, "max_tokens": 9, **known}
        client.send("generate", f"{prompt}{prior}", prompt=prompt, stop=stop, **fields)
        request = bench.submitted()
        assert (request.constraint.free is None) == begun
        bench.finish(request)
        client.receive()
