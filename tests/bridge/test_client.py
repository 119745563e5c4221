"""Both clients against a server that follows a script, over real sockets. Each test runs with either client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_worker import ScriptedWorker, completion, counting, result

from trainer_bridge import errors, wire
from trainer_bridge.async_client import AsyncRolloutClient
from trainer_bridge.client import RolloutClient

TIMEOUT_S = 20.0


class FromAsync:
    """An asyncio client (or stream) with the methods of the blocking one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inner: Any) -> None:
        self._loop, self._inner = loop, inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return (lambda *args, **more: self._settle(value(*args, **more))) if callable(value) else value

    def _settle(self, value: Any) -> Any:
        if asyncio.iscoroutine(value):
            value = self._loop.run_until_complete(value)
        return FromAsync(self._loop, value) if hasattr(value, "__anext__") else value

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run_until_complete(anext(self._inner))
        except StopAsyncIteration:
            raise StopIteration from None


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    clients: list[Any] = []
    loop = asyncio.new_event_loop()

    def make(*endpoints: str, **settings: Any) -> Any:
        settings = {"timeout_s": TIMEOUT_S, **settings}
        if request.param == "blocking":
            client: Any = RolloutClient(endpoints, **settings)
        else:
            client = FromAsync(loop, AsyncRolloutClient(endpoints, **settings))
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
    loop.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedWorker]]:
    workers: list[ScriptedWorker] = []

    def make(handler: Any = counting, **settings: Any) -> ScriptedWorker:
        workers.append(ScriptedWorker(handler, **settings))
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop()


Connect = Callable[..., Any]
Serve = Callable[..., ScriptedWorker]


def only_generate(handler: Any) -> Any:
    """A handler for `generate`; everything else is answered as usual."""
    return lambda worker, peer, header: (handler if header["op"] == "generate" else counting)(worker, peer, header)


def silent(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    """A handler that never answers."""


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
        }
    ]


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "said"),
    [
        ("x", {"max_token": 5}, TypeError, "max_token'"),
        (None, {}, ValueError, "either a prompt"),
        ("x", {"messages": []}, ValueError, "either a prompt"),
        ([1.5], {}, ValueError, "integers"),
        ([-1], {}, ValueError, "no token id"),
        ([2**31], {}, ValueError, "no token id"),
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


def in_reverse(count: int) -> Any:
    """Answer `count` requests in the reverse of their order, once all of them are there."""
    waiting: list[Any] = []

    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        waiting.append((peer, header))
        if len(waiting) == count:
            for known in reversed(waiting):
                counting(worker, *known)

    return handle


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


# --- streams ---------------------------------------------------------------------------------------------------------


def chunks(*replies: dict[str, Any], then: dict[str, Any] | None = None) -> Any:
    """Answer `generate` with these chunks and, if given, a result."""

    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        for reply in replies:
            worker.reply(peer, header, {"op": "chunk", **reply})
        if then is not None:
            worker.reply(peer, header, then)

    return only_generate(handle)


TWO_STREAMS = chunks(
    {**completion([1, 2]), "offset": 0},
    {**completion([7], 1), "offset": 0, "finish_reason": "stop", "stop": 7, "text": "x"},
    {**completion([3], version=3), "offset": 2},
    {**completion([4], version=4), "offset": 3, "finish_reason": "length"},
    then=result([completion([1, 2, 3, 4], versions=[[3, 3], [4, 1]]), completion([7], 1, finish_reason="stop")]),
)


def test_chunks_come_in_order_and_add_up(connect: Connect, serve: Serve) -> None:
    stream = connect(serve(TWO_STREAMS).endpoint).generate([0], n=2, stream="tokens", stream_every=2)
    seen = [(chunk.index, chunk.offset, chunk.token_ids.tolist(), chunk.finish_reason) for chunk in stream]
    assert seen == [(0, 0, [1, 2], None), (1, 0, [7], "stop"), (0, 2, [3], None), (0, 3, [4], "length")]
    first, second = stream.partials()
    assert first.token_ids.tolist() == [1, 2, 3, 4] and first.versions == [(3, 3), (4, 1)]
    assert first.logprobs.tolist() == [0, -1, 0, 0] and first.finish_reason == "length" and first.seed == 100
    assert (second.stop, second.text) == (7, "x")
    assert stream.result.completions[0].token_ids.tolist() == [1, 2, 3, 4]


def test_completions_come_whole_in_the_order_of_their_ends(connect: Connect, serve: Serve) -> None:
    worker = serve(
        chunks(
            {**completion([5, 6], 1), "offset": 0, "finish_reason": "stop"},
            {**completion([5], 0), "offset": 0, "finish_reason": "length"},
            then=result([completion([5]), completion([5, 6], 1)]),
        )
    )
    stream = connect(worker.endpoint).generate([0], n=2, stream="completions")
    assert [(item.index, item.token_ids.tolist(), item.finish_reason) for item in stream] == [
        (1, [5, 6], "stop"),
        (0, [5], "length"),
    ]
    assert worker.requests[0]["stream"] == "completions"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([{**completion([1]), "offset": 0}, {**completion([3]), "offset": 2}], "gap"),
        ([{**completion([1]), "offset": 0}, {**completion([1]), "offset": 0}], "gap"),
        (
            [{**completion([1]), "offset": 0, "finish_reason": "stop"}, {**completion([2]), "offset": 1}],
            "after its end",
        ),
        ([{**completion([1]), "offset": 0}, {**completion([2], index=4), "offset": 0}], "completion 4"),
        ([{**completion([1]), "offset": 0}, {**completion([2]), "offset": 1, "logprobs": [1, 2]}], "2 logprobs"),
        ([{**completion([1]), "offset": 0}, {**completion([2]), "offset": 1, "versions": []}], "add up"),
    ],
)
def test_a_stream_that_lost_tokens_is_an_error(connect: Connect, serve: Serve, bad: list, said: str) -> None:
    worker = serve(chunks(*bad))
    stream = connect(worker.endpoint).generate([0], n=2, stream="tokens", request_id="r")
    assert next(stream).token_ids.tolist() == [1]
    with pytest.raises(errors.ProtocolError, match=said):
        next(stream)
    assert [item.token_ids.tolist() for item in stream.partials()] == [[1]]
    assert worker.next("cancel")["target"] == "r"


def test_a_chunk_lost_at_the_end_is_an_error(connect: Connect, serve: Serve) -> None:
    worker = serve(chunks({**completion([1]), "offset": 0}, then=result([completion([1, 2])])))
    stream = connect(worker.endpoint).generate([0], stream="tokens")
    assert next(stream).token_ids.tolist() == [1]
    with pytest.raises(errors.ProtocolError, match="lacks tokens"):
        next(stream)


def test_a_part_of_a_completion_is_no_completion(connect: Connect, serve: Serve) -> None:
    worker = serve(chunks({**completion([1]), "offset": 0}))
    with pytest.raises(errors.ProtocolError, match="not a whole completion"):
        next(connect(worker.endpoint).generate([0], stream="completions"))


def test_a_stream_is_continued_from_what_had_come(connect: Connect, serve: Serve) -> None:
    first = serve(chunks({**completion([1, 2]), "offset": 0}, {**completion([3], version=4), "offset": 2}))
    client = connect(first.endpoint)
    stream = client.generate([0], stream="tokens")
    assert [next(stream).offset, next(stream).offset] == [0, 2]
    first.stop()
    with pytest.raises(errors.ConnectionLost):
        next(stream)
    whole = completion([1, 2, 3, 4], versions=[[3, 2], [4, 2]])
    second = serve(chunks({**completion([4], version=4), "offset": 3, "finish_reason": "length"}, then=result([whole])))
    again = connect(second.endpoint).generate([0], stream="tokens", continue_from=stream.partials()[0])
    assert [chunk.offset for chunk in again] == [3]
    sent = second.requests[0]["continue_from"]
    assert sent["token_ids"].tolist() == [1, 2, 3] and sent["logprobs"].tolist() == [0, -1, 0]
    assert (sent["seed"], sent["versions"]) == (100, [[3, 2], [4, 1]])
    assert again.partials()[0].token_ids.tolist() == [1, 2, 3, 4]
    assert again.partials()[0].versions == [(3, 2), (4, 2)]


@pytest.mark.parametrize("repeats_prior", [True, False])
def test_a_continued_completion_is_whole(connect: Connect, serve: Serve, repeats_prior: bool) -> None:
    whole = completion([1, 2, 3], versions=[[-1, 2], [3, 1]], finish_reason="stop")
    reply = {**whole, "offset": 0} if repeats_prior else {**completion([3]), "offset": 2, "finish_reason": "stop"}
    worker = serve(chunks(reply, then=result([whole])))
    prior = {"token_ids": [1, 2], "seed": 100}
    stream = connect(worker.endpoint).generate([0], stream="completions", continue_from=prior)
    assert [(item.token_ids.tolist(), item.versions) for item in stream] == [([1, 2, 3], [(-1, 2), (3, 1)])]
    assert worker.requests[0]["continue_from"]["token_ids"].tolist() == [1, 2]


def test_text_and_drawn_logprobs_of_chunks_are_joined(connect: Connect, serve: Serve) -> None:
    drawn = np.float32([-7.0])
    worker = serve(
        chunks(
            {**completion([1, 2], text="a "), "offset": 0},
            {**completion([3], text="b", drawn_logprobs=drawn), "offset": 2, "finish_reason": "stop"},
            then=result([completion([1, 2, 3])]),
        )
    )
    stream = connect(worker.endpoint).generate([0], stream="tokens", return_text=True)
    assert len(list(stream)) == 2
    (joined,) = stream.partials()
    assert joined.text == "a b" and joined.drawn_logprobs.tolist() == [0, -1, -7]


def test_leaving_a_stream_cancels_it(connect: Connect, serve: Serve) -> None:
    worker = serve(chunks({**completion([1]), "offset": 0}))
    stream = connect(worker.endpoint).generate([0], stream="tokens", request_id="r")
    next(stream)
    stream.close()
    assert worker.next("cancel")["target"] == "r"
    with pytest.raises(errors.RolloutError, match="abandoned"):
        next(stream)


def test_a_stream_can_be_ended_with_what_it_has(connect: Connect, serve: Serve) -> None:
    known: list[Any] = []

    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] == "generate":
            known.append((peer, header))
            worker.reply(peer, header, {"op": "chunk", **completion([1]), "offset": 0})
            return
        ending = completion([], finish_reason="cancelled")
        worker.reply(*known[0], {"op": "chunk", **ending, "offset": 1})
        worker.reply(*known[0], result([completion([1], finish_reason="cancelled")]))
        worker.reply(peer, header, {"op": "ok"})

    stream = connect(serve(handle).endpoint).generate([0], stream="tokens")
    next(stream)
    stream.cancel()
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"]
    assert stream.wait().completions[0].token_ids.tolist() == [1]


# --- connections -----------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_an_error_and_the_next_worker_is_found(connect: Connect, serve: Serve) -> None:
    first = serve(only_generate(lambda worker, peer, header: worker.vanish()))
    client = connect(first.endpoint)
    with pytest.raises(errors.ConnectionLost) as caught:
        client.generate([1], request_id="r")
    assert caught.value.request_id == "r"
    first.stop()
    second = serve(endpoint=first.endpoint)
    assert client.generate([1], max_tokens=1).completions[0].token_ids.tolist() == [2]
    assert len(second.requests) == 1  # the lost request was not sent again behind our back


def test_what_was_not_sent_when_the_connection_was_lost_is_never_sent(connect: Connect, serve: Serve) -> None:
    first = serve(lambda worker, peer, header: worker.vanish(), hwm=1)
    client = connect(first.endpoint, connect_timeout_s=1.0)
    prompt = np.zeros(1 << 18, np.int32)  # more than the system's buffers hold, all together
    settled = list(client.generate_as_completed([prompt] * 40))
    assert all(isinstance(item.error, errors.ConnectionLost) for item in settled) and len(settled) == 40
    first.stop()
    second = serve(endpoint=first.endpoint)
    client.ping()
    assert [header["op"] for header in second.requests] == ["ping"]


def test_a_restart_between_two_requests_goes_unnoticed(connect: Connect, serve: Serve) -> None:
    first = serve()
    client = connect(first.endpoint)
    client.ping()
    first.stop()
    second = serve(endpoint=first.endpoint)
    client.ping()
    assert [header["op"] for header in second.requests] == ["ping"]


def test_what_was_answered_before_the_loss_counts(connect: Connect, serve: Serve) -> None:
    def answer_and_go(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        counting(worker, peer, header)
        worker.vanish()

    worker = serve(answer_and_go)
    connect(worker.endpoint).shutdown("now")
    assert worker.requests[0]["mode"] == "now"


def test_an_endpoint_without_a_worker_is_an_error(connect: Connect) -> None:
    with pytest.raises(errors.ConnectionLost, match="cannot be reached"):
        connect("tcp://127.0.0.1:9", connect_timeout_s=0.05).generate("x")


def test_a_string_that_is_no_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="tcp://host"):
        RolloutClient("localhost:5757")


def test_a_request_may_be_made_before_the_worker_is_there(connect: Connect, serve: Serve) -> None:
    first = serve()
    first.stop()
    client = connect(first.endpoint)
    settled = client.generate_as_completed([[1]], max_tokens=1)
    second = serve(endpoint=first.endpoint)
    assert next(settled).unwrap().completions[0].token_ids.tolist() == [2]
    assert len(second.requests) == 1


def test_what_was_given_up_before_the_worker_was_there_is_never_sent(connect: Connect, serve: Serve) -> None:
    first = serve()
    first.stop()
    client = connect(first.endpoint)
    with pytest.raises(errors.RolloutTimeout):
        client.generate([1], timeout_s=0.02)
    second = serve(endpoint=first.endpoint)
    client.ping()
    assert [header["op"] for header in second.requests] == ["ping"]


def test_a_timeout_is_an_error_and_cancels(connect: Connect, serve: Serve) -> None:
    worker = serve(only_generate(silent))
    client = connect(worker.endpoint)
    client.ping()
    with pytest.raises(errors.RolloutTimeout) as caught:
        client.generate([1], timeout_s=0.05, request_id="slow")
    assert isinstance(caught.value, TimeoutError)
    assert worker.next("cancel")["target"] == "slow"


def test_the_answer_to_something_given_up_is_dropped(connect: Connect, serve: Serve) -> None:
    late: list[Any] = []

    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        late.append((peer, header))
        if header["op"] == "ping":
            for known in late:
                counting(worker, *known)

    client = connect(serve(handle).endpoint)
    with pytest.raises(errors.RolloutTimeout):
        client.generate([1], timeout_s=0.05)
    client.ping()


# --- several endpoints -----------------------------------------------------------------------------------------------


def test_the_least_loaded_endpoint_is_chosen_by_completions(connect: Connect, serve: Serve) -> None:
    first, second = serve(only_generate(silent)), serve(only_generate(silent))
    client = connect(first.endpoint, second.endpoint)
    client.ping()
    eight = client.generate([1], n=8, stream="tokens", endpoint=first.endpoint)
    loads = [client.generate([1], n=3, stream="tokens").endpoint for _ in range(4)]
    assert loads == [second.endpoint] * 3 + [first.endpoint]  # 8:0, 8:3, 8:6, 8:9
    eight.close()
    assert client.generate([1], stream="tokens").endpoint == first.endpoint  # 3:9


def test_many_requests_are_spread_before_all_are_connected(connect: Connect, serve: Serve) -> None:
    workers = [serve(), serve()]
    connect(*(worker.endpoint for worker in workers)).generate_many([[i] for i in range(200)])
    assert [len(worker.requests) for worker in workers] == [100, 100]


def test_an_endpoint_that_was_never_there_attracts_nothing_more(connect: Connect, serve: Serve) -> None:
    there = serve()
    client = connect("tcp://127.0.0.1:9", there.endpoint, connect_timeout_s=0.2)
    settled = list(client.generate_as_completed([[i] for i in range(10)]))
    assert sum(isinstance(item.error, errors.ConnectionLost) for item in settled) == 5
    assert {client.generate([1]).endpoint for _ in range(5)} == {there.endpoint}


def test_equal_loads_are_spread(connect: Connect, serve: Serve) -> None:
    workers = [serve(), serve(), serve()]
    client = connect(*(worker.endpoint for worker in workers))
    client.ping()
    client.generate_many([[i] for i in range(30)], max_in_flight=6)
    counts = [sum(header["op"] == "generate" for header in worker.requests) for worker in workers]
    assert sum(counts) == 30 and min(counts) >= 6


def test_a_session_stays_where_it_is(connect: Connect, serve: Serve) -> None:
    workers = [serve(), serve()]
    client = connect(*(worker.endpoint for worker in workers))
    client.ping()
    places = {name: client.generate([1], session=name).endpoint for name in ("a", "b")}
    assert places["a"] != places["b"]
    for name in "aaabab":
        assert client.generate([1], session=name).endpoint == places[name]


def test_a_worker_that_is_gone_attracts_nothing(connect: Connect, serve: Serve) -> None:
    gone, there = serve(), serve()
    client = connect(gone.endpoint, there.endpoint)
    client.ping()
    gone.stop()
    with pytest.raises((errors.ConnectionLost, errors.RolloutTimeout)):
        client.ping(endpoint=gone.endpoint, timeout_s=0.5)
    assert {client.generate([1]).endpoint for _ in range(4)} == {there.endpoint}


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


# --- broken replies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"op": "result"}, "completions"),
        ({"op": "chunk", **completion([1]), "offset": 0}, "answered generate with 'chunk'"),
        ({"op": "ok"}, "answered generate with 'ok'"),
        ({"op": "result", "v": 2}, "version 2"),
        (result([completion([1], token_ids=[1.5])]), "token_ids"),
        (result([completion([1], token_ids="x")]), "token_ids"),
        (result([completion([1], versions=[[1, "x"]])]), "version run"),
        (result([completion([1], finish_reason="tired")]), "tired"),
        (result([completion([1])], prompt_tokens=None), "prompt_tokens"),
    ],
)
def test_a_reply_that_breaks_the_protocol_is_an_error(connect: Connect, serve: Serve, reply: Any, said: str) -> None:
    worker = serve(only_generate(lambda worker, peer, header: worker.reply(peer, header, reply)))
    client = connect(worker.endpoint)
    with pytest.raises(errors.ProtocolError, match=said):
        client.generate([1])
    client.ping()


def test_a_reply_that_cannot_be_read_fails_the_request_it_names(connect: Connect, serve: Serve) -> None:
    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["prompt"][0] == 13:
            worker.send(peer, [wire.encode({"id": header["id"]})[0] + b"\0"])
        counting(worker, peer, header)

    settled = list(connect(serve(only_generate(handle)).endpoint).generate_as_completed([[1], [13], [2]]))
    failed = [item.index for item in settled if isinstance(item.error, errors.ProtocolError)]
    assert failed == [1] and sum(item.result is not None for item in settled) == 2


@pytest.mark.parametrize("frames", [[b"\xc1"], wire.encode({"v": 1, "id": None, "op": "error", "message": "?"})])
def test_a_reply_that_nobody_can_place_leaves_no_request_hanging(connect: Connect, serve: Serve, frames: Any) -> None:
    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["prompt"][0] == 2:
            worker.send(peer, frames)

    settled = list(connect(serve(only_generate(handle)).endpoint).generate_as_completed([[1], [2]]))
    assert all(isinstance(item.error, errors.ProtocolError) for item in settled) and len(settled) == 2


def test_a_client_that_is_dropped_does_not_hang(serve: Serve) -> None:
    worker = serve(only_generate(silent))
    code = f"""
from trainer_bridge.client import RolloutClient
clients = [RolloutClient({worker.endpoint!r}), RolloutClient("tcp://127.0.0.1:9")]
streams = [client.generate([1], stream="tokens") for client in clients]
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S).returncode == 0


def test_a_closed_client_says_so(serve: Serve) -> None:
    with RolloutClient(serve().endpoint) as client:
        client.ping()
    with pytest.raises(ValueError, match="closed"):
        client.ping()
    client.close()


# --- asyncio alone ---------------------------------------------------------------------------------------------------


def test_many_tasks_share_one_client(serve: Serve) -> None:
    worker = serve(in_reverse(200))

    async def main() -> list[int]:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            outcomes = await asyncio.gather(*(client.generate([i], max_tokens=1) for i in range(200)))
            return [int(outcome.completions[0].token_ids[0]) for outcome in outcomes]

    assert asyncio.run(main()) == list(range(1, 201))


def test_replies_that_arrive_while_others_send_are_not_missed(serve: Serve) -> None:
    worker = serve()

    async def one(client: AsyncRolloutClient, start: int) -> None:
        for token in range(start, start + 50):
            outcome = await client.generate([token], max_tokens=1)
            assert outcome.completions[0].token_ids[0] == token + 1

    async def main() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            await asyncio.gather(*(one(client, 100 * task) for task in range(20)))

    asyncio.run(main())


def test_a_send_that_takes_the_signal_of_a_reply_looks_for_the_reply(serve: Serve) -> None:
    worker = serve(only_generate(silent))

    async def main() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            await client.ping()
            stream = await client.generate([1], stream="tokens")
            ping = asyncio.create_task(client.ping())
            await asyncio.sleep(0)  # the ping is sent
            client._core.connections[0].socket.poll(5000)  # its reply has come, and ZeroMQ has taken back its signal
            stream.close()  # sends
            await ping

    asyncio.run(main())


def test_cancelling_a_task_cancels_its_request(serve: Serve) -> None:
    worker = serve(only_generate(silent))

    async def main() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            task = asyncio.create_task(client.generate([1], request_id="r"))
            await asyncio.to_thread(worker.next, "generate")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await asyncio.to_thread(worker.next, "cancel"))["target"] == "r"

    asyncio.run(main())


def test_a_cancelled_anext_loses_no_chunk(serve: Serve) -> None:
    known: list[Any] = []
    worker = serve(only_generate(lambda worker, peer, header: known.append((peer, header))))

    async def main() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            stream = await client.generate([1], stream="tokens")
            await asyncio.to_thread(worker.next, "generate")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            chunk = {"op": "chunk", **completion([2]), "offset": 0}
            worker.do(lambda: worker.reply(*known[0], chunk))
            assert (await anext(stream)).token_ids.tolist() == [2]

    asyncio.run(main())


def test_closing_the_client_ends_what_waits(serve: Serve) -> None:
    worker = serve(only_generate(silent))

    async def main() -> None:
        client = AsyncRolloutClient(worker.endpoint)
        task = asyncio.create_task(client.generate([1]))
        await asyncio.to_thread(worker.next, "generate")
        await client.close()
        with pytest.raises(errors.ConnectionLost, match="closed"):
            await task
        assert worker.next("cancel")

    asyncio.run(main())


def test_a_client_of_another_loop_says_so(serve: Serve) -> None:
    client = AsyncRolloutClient(serve().endpoint, timeout_s=TIMEOUT_S)
    asyncio.run(client.ping())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(client.ping())
    asyncio.run(client.close())


# --- the protocol without the client ---------------------------------------------------------------------------------


def test_the_minimal_client_needs_nothing_of_ours(serve: Serve) -> None:
    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        item = completion([18, 19], text="18 19", finish_reason="length")
        if header.get("stream"):
            worker.reply(peer, header, {"op": "chunk", **item, "offset": 0})
        worker.reply(peer, header, result([item]))

    worker = serve(handle)
    script = Path(__file__).parents[2] / "scripts" / "minimal_client.py"
    command = [sys.executable, "-I", str(script), worker.endpoint, "--prompt", "17:"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "token_ids [18, 19]" in done.stdout and "completion 0 from token 0: [18, 19]" in done.stdout
    assert [header["prompt"] for header in worker.requests] == ["17:", "17:"]


# --- imports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["client", "async_client", "launch", "wire", "errors"])
def test_clients_import_nothing_heavy(module: str) -> None:
    heavy = ("torch", "pydantic", "transformers", "rollout", "rich", "safetensors", "wandb")
    code = f"import sys, trainer_bridge.{module}; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
