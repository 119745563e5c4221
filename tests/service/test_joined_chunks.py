"""Chunks of several streams in one message: the same chunks, before the result, without gaps."""

import asyncio
import itertools

import numpy as np
import pytest

from rollout.engine.messages.to_service import Finish
from tests.support.service.harness import delta, done
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.results import split_chunks
from trainer_bridge.wire.errors import ProtocolError

FIELDS = {"prompt": [1], "stream": "tokens", "stream_every": 1}


def read(client, ids):
    """The chunks of each request up to its result, and the ops in the order in which they came."""
    chunks, ops, left = {request_id: [] for request_id in ids}, [], set(ids)
    while left:
        reply = client.receive()
        ops.append(reply["op"])
        if reply["op"] == "result":
            left.remove(reply["id"])
        for chunk in split_chunks(reply) if reply["op"] == "chunks" else [reply] * (reply["op"] == "chunk"):
            assert chunk["id"] in left, "a chunk after the result"
            chunks[chunk["id"]].append(chunk)
    return chunks, ops


def test_chunks_of_one_step_come_in_one_message_and_before_the_results(bench):
    client = bench.client()
    for name in ("a", "b", "c"):
        client.send("generate", name, **FIELDS, n=2, max_tokens=3, join_chunks=name != "c")
    requests = [bench.submitted() for _ in range(3)]
    for step in range(3):
        finish = Finish("length") if step == 2 else None
        events = [
            delta(request.key, index, step, [100 * index + step], finish=finish)
            for request in requests
            for index in range(2)
        ]
        bench.put(*events, *(map(done, requests) if finish else ()))
    chunks, ops = read(client, ["a", "b", "c"])
    assert ops.count("chunks") <= 3 + 1 and ops.count("chunk") == 6, "only the stream that did not ask has its own"
    for each in chunks.values():
        for index in range(2):
            mine = [chunk for chunk in each if chunk["index"] == index]
            assert [chunk["offset"] for chunk in mine] == [0, 1, 2]
            assert [chunk["token_ids"].tolist() for chunk in mine] == [[100 * index + step] for step in range(3)]
            assert [chunk["logprobs"].tolist() for chunk in mine] == [[-step] for step in range(3)]
            assert mine[-1]["finish_reason"] == "length"


def test_attach_may_join_and_without_a_stream_it_is_refused(bench):
    client = bench.client()
    for name in ("a", "b"):
        client.send("generate", name, client="me", prompt=[1], max_tokens=9)
    for request in [bench.submitted() for _ in range(2)]:
        bench.put(delta(request.key, 0, 0, [1, 2], finish=Finish("length")), done(request))
    assert {client.receive()["id"] for _ in range(2)} == {"a", "b"}
    client.send("attach", "x", client="me", target="a", stream="tokens", stream_every=1, join_chunks=True)
    chunks, _ = read(client, ["x"])
    assert [chunk["token_ids"].tolist() for chunk in chunks["x"]] == [[1, 2]]
    assert client.ask("attach", "y", client="me", target="b", join_chunks=True)["field"] == "join_chunks"
    assert client.ask("generate", "z", prompt=[1], join_chunks=True)["field"] == "join_chunks"


def test_client_reads_joined_streams(bench):
    async def stream_all():
        async with AsyncRolloutClient(bench.server.endpoint) as client:
            fields = {"max_tokens": 4, "stream": "tokens", "stream_every": 1, "join_chunks": True}
            streams = [await client.generate([1], **fields) for _ in range(3)]
            requests = await asyncio.to_thread(lambda: [bench.submitted() for _ in streams])
            for step in range(4):
                finish = Finish("length") if step == 3 else None
                tokens = [(request, 10 * i + step) for i, request in enumerate(requests)]
                bench.put(*(delta(request.key, 0, step, [token], finish=finish) for request, token in tokens))
            bench.put(*map(done, requests))
            for i, stream in enumerate(streams):
                tokens = [token async for chunk in stream for token in chunk.token_ids.tolist()]
                assert tokens == [10 * i + step for step in range(4)]
                assert stream.result is not None and stream.result.completions[0].token_ids.tolist() == tokens

    asyncio.run(stream_all())


def reply(heads, tokens):
    columns = {"token_ids": np.zeros(tokens, np.int32)}
    columns |= {name: np.zeros(tokens, np.float32) for name in ("logprobs", "raw_logprobs")}
    return {"v": 1, "op": "chunks", "id": "", "chunks": heads, **columns}


@pytest.mark.parametrize(
    "wrong",
    [
        reply([{"id": "a", "tokens": 3}], 2),
        reply([{"id": "a", "tokens": 1}], 2),
        reply([{"id": "a", "tokens": -1}], 2),
        reply([{"id": "a"}], 2),
        reply([{"tokens": 2}], 2),
        reply([7], 2),
        reply({}, 0),
        reply([{"id": "a", "tokens": 2}], 2) | {"logprobs": np.zeros(3, np.float32)},
        {"v": 1, "op": "chunks", "chunks": []},
    ],
)
def test_joined_chunks_that_do_not_add_up_are_refused(wrong):
    with pytest.raises(ProtocolError):
        list(split_chunks(wrong))
    assert list(itertools.chain(split_chunks(reply([{"id": "a", "tokens": 2}], 2))))
