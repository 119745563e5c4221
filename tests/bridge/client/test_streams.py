"""Streams, by either client: what comes, what is missing, how one is left and continued."""

from typing import Any

import numpy as np
import pytest

from tests.support.bridge.client_script import Connect, Serve, only_generate
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, result
from trainer_bridge.wire import errors


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


def test_a_stream_that_the_worker_ended_early_goes_on_from_the_result(connect: Connect, serve: Serve) -> None:
    whole = [
        completion([1, 2, 3], version=3, text="abc", stop=None),
        completion([7, 8], 1, text="xy", finish_reason="stop", stop=8),
    ]
    worker = serve(chunks({**completion([1]), "offset": 0, "text": "a"}, then=result(whole)))
    stream = connect(worker.endpoint).generate([0], n=2, stream="tokens", return_text=True)
    seen = [(chunk.index, chunk.offset, chunk.token_ids.tolist(), chunk.part.text) for chunk in stream]
    assert seen == [(0, 0, [1], "a"), (0, 1, [2, 3], "bc"), (1, 0, [7, 8], "xy")]
    first, second = stream.partials()
    assert (first.token_ids.tolist(), first.logprobs.tolist(), first.text) == ([1, 2, 3], [0, -1, -2], "abc")
    assert (first.finish_reason, second.finish_reason, second.stop) == ("length", "stop", 8)


def test_completions_that_no_chunk_brought_come_from_the_result(connect: Connect, serve: Serve) -> None:
    first = {**completion([5, 6], 1), "offset": 0, "finish_reason": "stop"}
    worker = serve(chunks(first, then=result([completion([5]), completion([5, 6], 1)])))
    stream = connect(worker.endpoint).generate([0], n=2, stream="completions")
    assert [(item.index, item.token_ids.tolist()) for item in stream] == [(1, [5, 6]), (0, [5])]


@pytest.mark.parametrize(("chunk", "more"), [([1, 3], {}), ([1, 2, 3], {}), ([1], {"finish_reason": "stop"})])
def test_a_result_that_is_not_what_its_stream_was_is_an_error(
    connect: Connect, serve: Serve, chunk: list[int], more: dict[str, Any]
) -> None:
    worker = serve(chunks({**completion(chunk), "offset": 0, **more}, then=result([completion([1, 2])])))
    stream = connect(worker.endpoint).generate([0], stream="tokens")
    assert next(stream).token_ids.tolist() == chunk
    with pytest.raises(errors.ProtocolError, match="differs from its stream"):
        next(stream)


def test_a_part_of_a_completion_is_no_completion(connect: Connect, serve: Serve) -> None:
    worker = serve(chunks({**completion([1]), "offset": 0}))
    with pytest.raises(errors.ProtocolError, match="not the whole completion"):
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


def test_ending_a_stream_that_has_ended_meanwhile_changes_nothing(connect: Connect, serve: Serve) -> None:
    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] == "generate":
            worker.reply(peer, header, {"op": "chunk", **completion([1]), "offset": 0})
            known.append((peer, header))
            return
        worker.reply(*known[0], {"op": "chunk", **completion([2]), "offset": 1, "finish_reason": "length"})
        worker.reply(*known[0], result([completion([1, 2], versions=[[3, 2]])]))
        worker.reply(peer, header, {"op": "error", "code": "not_found", "message": "no such request is in flight"})

    known: list[Any] = []
    stream = connect(serve(handle).endpoint).generate([0], stream="tokens")
    next(stream)
    stream.cancel()
    assert [chunk.finish_reason for chunk in stream] == ["length"]
