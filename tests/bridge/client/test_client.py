"""Requests and control messages, by either client, against a server that follows a script."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bridge.client_script import TIMEOUT_S, Connect, Serve, in_reverse
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, counting, result
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.generate_request import plan_request
from trainer_bridge.wire import errors

# --- one request -----------------------------------------------------------------------------------------------------


def test_a_result_arrives_typed(connect: Connect, serve: Serve) -> None:
    worker = serve()
    outcome = connect(worker.endpoint).generate([7, 8], n=2, max_tokens=3, metadata={"row": 5})
    assert [item.index for item in outcome.completions] == [0, 1]
    second = outcome.completions[1]
    assert second.token_ids.tolist() == [9, 10, 11] and second.token_ids.dtype == np.int32
    assert second.logprobs.tolist() == [0, -1, -2] and second.logprobs.dtype == np.float32
    assert second.raw_logprobs.tolist() == [0, -2, -4] and second.drawn_logprobs is None
    assert (second.versions, second.finish_reason, second.seed) == ([(3, 3)], "length", 101)
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.preemptions, outcome.worker) == (2, 1, 0, "w0")
    assert outcome.timing.prefill_s == 0.25 and outcome.metadata == {"row": 5} and outcome.endpoint == worker.endpoint


def test_token_ids_are_sent_as_an_int32_blob(connect: Connect, serve: Serve) -> None:
    worker = serve()
    client = connect(worker.endpoint)
    for prompt in ([7, 8], (7, 8), np.array([7, 8], ">u2")):
        client.generate(prompt)
        sent = worker.requests[-1]["prompt"]
        assert isinstance(sent, np.ndarray) and sent.dtype == np.int32 and sent.tolist() == [7, 8]


def test_fields_are_sent_under_the_protocols_names(connect: Connect, serve: Serve) -> None:
    worker = serve(lambda worker, peer, header: worker.reply(peer, header, result([completion([1])])))
    connect(worker.endpoint, client="trainer-0").generate(
        messages=[{"role": "user", "content": "hi"}],
        sampling={"top_k": 5},
        temperature=0.5,
        logit_bias={17: 1.5},
        stop={"token_ids": np.array([2]), "strings": ["x"]},
        max_tokens=9,
        deadline_s=None,
        request_id="mine",
        session="s",
    )
    assert worker.requests == [
        {
            "v": 1,
            "op": "generate",
            "id": "mine",
            "client": "trainer-0",
            "messages": [{"role": "user", "content": "hi"}],
            "sampling": {"top_k": 5, "temperature": 0.5, "logit_bias": {"17": 1.5}},
            "stop": {"token_ids": [2], "strings": ["x"]},
            "max_tokens": 9,
            "session": "s",
        }
    ]


def test_none_in_a_map_to_continue_from_is_as_good_as_absent() -> None:
    known = {"token_ids": [7, 8], "seed": 1}
    optional = (
        *("logprobs", "raw_logprobs", "drawn_logprobs", "top_ids", "top_logprobs", "versions", "recomputed"),
        "kv_versions",
        *("adapter_versions", "routing", "text_chars"),
    )
    plan = plan_request([1], {"continue_from": known | dict.fromkeys(optional)})
    sent = plan.fields["continue_from"]
    assert sent.keys() == known.keys() and sent["token_ids"].tolist() == [7, 8]
    assert plan.prior is not None and plan.prior.versions == [(-1, 2)] and plan.prior.adapter_versions == []
    assert np.isnan(plan.prior.logprobs).tolist() == np.isnan(plan.prior.raw_logprobs).tolist() == [True, True]


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "said"),
    [
        ("x", {"max_token": 5}, TypeError, "max_token'"),
        (None, {}, ValueError, "either a prompt"),
        ("x", {"messages": []}, ValueError, "either a prompt"),
        ([1.5], {}, ValueError, "integers"),
        ([-1], {}, ValueError, "not a token id"),
        ([2**31], {}, ValueError, "not a token id"),
        ("x", {"stream": True}, ValueError, "stream"),
        ("x", {"n": 0}, ValueError, "n is 0"),
        ("x", {"top_k": 1, "sampling": {"top_k": 1}}, ValueError, "top_k"),
        ("x", {"endpoint": "tcp://other:1"}, ValueError, "not an endpoint"),
        ("x", {"request_id": "i" * 129}, ValueError, "128"),
    ],
)
def test_what_cannot_be_meant_is_refused(connect: Connect, prompt: Any, fields: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        connect("tcp://127.0.0.1:9").generate(prompt, **fields)


@pytest.mark.parametrize(
    "kind",
    [
        errors.BadMessage,
        errors.BadRequest,
        errors.TooLong,
        errors.Overloaded,
        errors.Duplicate,
        errors.NotFound,
        errors.WeightsRejected,
        errors.Unavailable,
        errors.InternalError,
    ],
)
def test_each_code_has_its_exception(connect: Connect, serve: Serve, kind: type[errors.RolloutError]) -> None:
    fields = {"op": "error", "code": kind.code, "message": "change it", "field": "stop.strings", "retry_after_s": 2.5}
    worker = serve(lambda worker, peer, header: worker.reply(peer, header, fields))
    with pytest.raises(kind, match="change it") as caught:
        connect(worker.endpoint).generate([1], request_id="r")
    error = caught.value
    assert type(error) is kind
    assert (error.code, error.field, error.retry_after_s, error.request_id) == (kind.code, "stop.strings", 2.5, "r")


def test_a_code_of_tomorrow_is_still_an_error(connect: Connect, serve: Serve) -> None:
    reply = {"op": "error", "code": "moon", "message": "m"}
    worker = serve(lambda worker, peer, header: worker.reply(peer, header, reply))
    with pytest.raises(errors.RolloutError) as caught:
        connect(worker.endpoint).ping()
    assert caught.value.code == "moon"


# --- many requests ---------------------------------------------------------------------------------------------------


def test_results_of_many_are_in_input_order(connect: Connect, serve: Serve) -> None:
    worker = serve(in_reverse(50))
    outcomes = connect(worker.endpoint).generate_many([[i] for i in range(50)], max_tokens=1)
    assert [outcome.completions[0].token_ids[0] for outcome in outcomes] == list(range(1, 51))


def test_outcomes_come_as_they_complete(connect: Connect, serve: Serve) -> None:
    worker = serve(in_reverse(3))
    settled = list(connect(worker.endpoint).generate_as_completed([[10], {"prompt": [20]}, [30]], max_tokens=1))
    assert [item.index for item in settled] == [2, 1, 0]
    assert [item.unwrap().completions[0].token_ids[0] for item in settled] == [31, 21, 11]


def test_items_replace_common_fields(connect: Connect, serve: Serve) -> None:
    worker = serve()
    connect(worker.endpoint).generate_many([[1], {"prompt": [2], "max_tokens": 9}], max_tokens=5, max_in_flight=1)
    assert [header["max_tokens"] for header in worker.requests] == [5, 9]


def test_no_more_than_the_window_is_in_flight(connect: Connect, serve: Serve) -> None:
    waiting: list[Any] = []
    excess: list[bool] = []

    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        waiting.append((peer, header))
        if len(waiting) == 4:
            excess.append(worker.has_more(wait_ms=20))
            while waiting:
                counting(worker, *waiting.pop())

    connect(serve(handle).endpoint).generate_many([[i] for i in range(12)], max_in_flight=4)
    assert excess == [False] * 3


def test_an_overloaded_worker_is_asked_again(connect: Connect, serve: Serve) -> None:
    refused: set[int] = set()

    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        token = int(header["prompt"][0])
        if token % 3 == 0 and token not in refused:
            refused.add(token)
            reply = {"op": "error", "code": "overloaded", "message": "full", "retry_after_s": 0.0}
            worker.reply(peer, header, reply)
        else:
            counting(worker, peer, header)

    worker = serve(handle)
    outcomes = connect(worker.endpoint).generate_many([[i] for i in range(9)], max_tokens=1)
    assert [int(outcome.completions[0].token_ids[0]) for outcome in outcomes] == list(range(1, 10))
    assert refused == {0, 3, 6} and len(worker.requests) == 12


def refuse_13(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    if header["op"] == "generate" and header["prompt"][0] == 13:
        worker.reply(peer, header, {"op": "error", "code": "too_long", "message": "no"})
    elif header["op"] != "generate" or header["prompt"][0] != 99:  # 99: never answered
        counting(worker, peer, header)


def test_the_first_error_of_many_is_raised_and_the_rest_cancelled(connect: Connect, serve: Serve) -> None:
    worker = serve(refuse_13)
    with pytest.raises(errors.TooLong):
        connect(worker.endpoint).generate_many([{"prompt": [99], "request_id": "stuck"}, [13]])
    assert worker.next("cancel")["target"] == "stuck"


def test_one_error_among_many_does_not_hurt_the_others(connect: Connect, serve: Serve) -> None:
    worker = serve(refuse_13)
    settled = sorted(connect(worker.endpoint).generate_as_completed([[1], [13], [2]]), key=lambda item: item.index)
    assert isinstance(settled[1].error, errors.TooLong) and settled[1].result is None
    assert settled[0].result is not None and settled[2].result is not None


def test_progress_counts_requests_and_tokens(connect: Connect, serve: Serve) -> None:
    seen: list[tuple[int, int, int]] = []
    client = connect(serve().endpoint)
    client.generate_many([[1], [2]], n=2, max_tokens=5, progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 2, 10), (2, 2, 20)]


@pytest.mark.parametrize("rich", [True, False])
def test_progress_bar_goes_to_stderr(serve: Serve, capsys: Any, monkeypatch: Any, rich: bool) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with RolloutClient(serve().endpoint, timeout_s=TIMEOUT_S) as client:
        client.generate_many([[1], [2]], max_tokens=500, progress=True)
    shown = capsys.readouterr()
    assert "1,000 tokens" in shown.err and "2/2" in shown.err and shown.out == ""


# --- control ---------------------------------------------------------------------------------------------------------


def test_control_messages_go_to_every_endpoint(connect: Connect, serve: Serve) -> None:
    workers = [serve(), serve()]
    client = connect(*(worker.endpoint for worker in workers))
    client.pause("abort")
    client.resume()
    client.shutdown()
    for worker in workers:
        sent = [(header["op"], header.get("mode")) for header in worker.requests]
        assert sent == [("pause", "abort"), ("resume", None), ("shutdown", "drain")]
    assert client.statuses() == {worker.endpoint: {"state": "serving", "weights_version": 3} for worker in workers}
    assert client.status(workers[1].endpoint)["state"] == "serving"
    with pytest.raises(ValueError, match="which one"):
        client.status()


def knows(*ids: str) -> Any:
    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        known = header["target"] in ids
        worker.reply(
            peer, header, {"op": "ok"} if known else {"op": "error", "code": "not_found", "message": "no such id"}
        )

    return handle


def test_cancel_finds_the_worker_that_knows_the_request(connect: Connect, serve: Serve) -> None:
    workers = [serve(knows("a")), serve(knows("b"))]
    client = connect(*(worker.endpoint for worker in workers))
    client.cancel("a")
    client.cancel("b")
    with pytest.raises(errors.NotFound):
        client.cancel("c")
    with pytest.raises(errors.NotFound):
        client.cancel("a", endpoint=workers[1].endpoint)


# --- the protocol without the client ---------------------------------------------------------------------------------


def test_the_minimal_client_needs_nothing_of_ours(serve: Serve) -> None:
    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        item = completion([18, 19], text="18 19", finish_reason="length")
        if header.get("stream"):
            worker.reply(peer, header, {"op": "chunk", **item, "offset": 0})
        worker.reply(peer, header, result([item]))

    worker = serve(handle)
    script = Path(__file__).parents[3] / "scripts" / "minimal_client.py"
    command = [sys.executable, "-I", str(script), worker.endpoint, "--prompt", "17:"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "token_ids [18, 19]" in done.stdout and "completion 0 from token 0: [18, 19]" in done.stdout
    assert [header["prompt"] for header in worker.requests] == ["17:", "17:"]


# --- imports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["client", "client.launch", "wire.codec", "wire.errors", "wire.keys"])
def test_clients_import_nothing_heavy(module: str) -> None:
    heavy = ("torch", "pydantic", "transformers", "rollout", "rich", "safetensors", "wandb")
    code = f"import sys, trainer_bridge.{module}; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
