"""Budgets of thoughts and ends of loops, from a real worker that counts, through both Python clients."""

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.support.worker.harness import token_ids
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import Completion
from trainer_bridge.wire.errors import BadRequest

#: A thought begins with the colon of the prompt, and ends with "9 " said twice: the model would never write that.
START, END = token_ids(":"), token_ids("99")
PROMPT = token_ids("17:")
FIELDS: dict[str, Any] = {
    "max_tokens": 40, "temperature": 1.5, "seed": 4, "stop": {"ignore_eos": True}, "thinking_token_budget": 7,
    "thinking": {"start": START, "end": END},
}  # fmt: skip


def same(one: Completion, other: Completion) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist() and one.forced == other.forced
    assert one.finish_reason == other.finish_reason
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-3)
    np.testing.assert_allclose(one.drawn_logprobs, other.drawn_logprobs, atol=2e-3)


def test_both_clients_get_the_forced_tokens(client: RolloutClient, worker: WorkerProcess) -> None:
    result = client.generate(PROMPT, n=3, **FIELDS)
    for completion in result.completions:
        assert completion.forced[:2] == [7, 8] and completion.token_ids[[7, 8]].tolist() == END
        assert completion.drawn_logprobs is not None
        assert (completion.drawn_logprobs[completion.forced] == 0).all()
        assert (completion.logprobs[completion.forced] < -1).all(), "the policy would not have chosen them"
        assert completion.to_dict()["forced"] == completion.forced

    async def streamed() -> list[Completion]:
        async with AsyncRolloutClient(worker.endpoint) as other:
            stream = await other.generate(PROMPT, n=3, **FIELDS, stream="tokens", stream_every=1)
            chunks = [chunk async for chunk in stream]
            for index, completion in enumerate(stream.result.completions):
                parts = [chunk.part.forced for chunk in chunks if chunk.index == index]
                assert [place for part in parts for place in part] == completion.forced
            return stream.result.completions

    for one, other in zip(result.completions, asyncio.run(streamed()), strict=True):
        same(one, other)


@pytest.mark.parametrize("count", [0, 5, 7, 8, 9, 20])
def test_a_completion_goes_on_in_the_middle_of_a_forced_end(client: RolloutClient, count: int) -> None:
    (whole,) = client.generate(PROMPT, **FIELDS).completions
    partial = {
        "token_ids": whole.token_ids[:count],
        "seed": whole.seed,
        "forced": [p for p in whole.forced if p < count],
    }
    rest = {name: value for name, value in FIELDS.items() if name != "seed"}
    (again,) = client.generate(PROMPT, continue_from=partial, **rest).completions
    assert again.token_ids.tolist() == whole.token_ids.tolist() and again.forced == whole.forced
    (once_more,) = client.generate(PROMPT, continue_from=again, **rest | {"max_tokens": 44}).completions
    assert once_more.forced[: len(whole.forced)] == whole.forced and len(once_more) == 44


def test_a_loop_ends(client: RolloutClient) -> None:
    fields = {"max_tokens": 60, "temperature": 0.0, "constraint": {"token_ids": START}}
    loop = {"max_pattern_size": 8, "min_count": 6}
    for completion in client.generate(PROMPT, n=2, repetition_detection=loop, **fields).completions:
        assert completion.token_ids.tolist() == START * 6
        assert (completion.finish_reason, completion.stop, completion.error) == ("repetition", None, None)
    stream = client.generate(PROMPT, repetition_detection=loop, **fields, stream="tokens", stream_every=1)
    assert sum(len(chunk.token_ids) for chunk in stream) == 6


def test_wrong_fields_are_named(client: RolloutClient) -> None:
    with pytest.raises(BadRequest) as caught:
        client.generate(PROMPT, max_tokens=4, thinking_token_budget=3)
    assert caught.value.field == "thinking"
    with pytest.raises(BadRequest) as caught:
        client.generate(PROMPT, max_tokens=4, repetition_detection={"max_pattern_size": 4})
    assert caught.value.field == "repetition_detection.min_count"
    with pytest.raises(TypeError, match="thinking_token_budget"):
        client.generate(PROMPT, max_tokens=4, thinking_tokens_budget=3)  # type: ignore[call-arg]
