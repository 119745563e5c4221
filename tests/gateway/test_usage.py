"""The tokens that answers and streams count, and OpenAI's `stream_options`."""

from typing import Any

import httpx
import pytest

from tests.support.gateway.harness import events, post, refused
from tests.support.worker.harness import token_ids

DRAWN = {"n": 2, "temperature": 2.5, "seed": 4, "max_tokens": 9}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["17:", "9813:"], **DRAWN},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "17:"}], **DRAWN},
    "/inference/v1/generate": {"token_ids": token_ids("9813:"), "sampling_params": DRAWN},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_each_event_counts_the_tokens_of_its_own_choice_and_the_last_one_all(client: httpx.Client, path: str) -> None:
    body = REQUESTS[path] | {"return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(client, path, body | {"stream_options": options})
    total = post(client, path, body)["usage"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == total["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == total["prompt_tokens"]
    so_far: dict[int, int] = {}
    prompts: dict[int, int] = {}
    for event in chunks:
        (choice,), usage = event["choices"], event["usage"]
        index = choice["index"]
        so_far[index] = so_far.get(index, 0) + len(choice["token_ids"])
        assert usage["completion_tokens"] == so_far[index]
        assert prompts.setdefault(index, usage["prompt_tokens"]) == usage["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert sum(so_far.values()) == total["completion_tokens"]
    assert sum(tokens for index, tokens in prompts.items() if index % 2 == 0) == total["prompt_tokens"]


@pytest.mark.parametrize("path", REQUESTS)
def test_usage_is_in_a_stream_only_if_it_is_asked_for(client: httpx.Client, path: str) -> None:
    silent: list[Any] = [None, {}, {"include_usage": False}, {"include_usage": None, "continuous_usage_stats": True}]
    for options in [*silent, {"include_obfuscation": False}]:
        found = events(client, path, REQUESTS[path] | {"stream_options": options})
        assert found and all("usage" not in event and event["choices"] for event in found)
    for options, named in (({"x": 1}, "stream_options.x"), ({"include_usage": 1}, "stream_options.include_usage")):
        assert refused(client, path, REQUESTS[path] | {"stream": True, "stream_options": options}) == named
    assert refused(client, path, REQUESTS[path] | {"stream": True, "stream_options": [1]}) == "stream_options"


def test_a_negative_seed_is_a_seed_and_minus_one_is_none(client: httpx.Client) -> None:
    def drawn(seed: int | None) -> list[str]:
        body = {"prompt": "17:", "n": 4, "temperature": 50.0, "max_tokens": 20, "ignore_eos": True, "seed": seed}
        return [choice["text"] for choice in post(client, "/v1/completions", body)["choices"]]

    assert drawn(-7) == drawn(-7) != drawn(7)
    assert drawn(-1) != drawn(-1) and drawn(None) != drawn(None)
    assert refused(client, "/v1/completions", {"prompt": "17:", "seed": -(2**63) - 1}) == "seed"
