"""Top tokens and prompt log-probs of a real worker, over its socket, equal those of transformers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine.scores import Wanted
from tests.support.models.families import make_checkpoint
from tests.support.worker.harness import launch
from tests.support.worker.raw_client import RawClient
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import Completion, GenerateResult
from trainer_bridge.wire.errors import BadRequest, TooLong

#: Few pages and small chunks: rows are preempted, and prompts come in pieces.
FLAGS = {"max_rows": 6, "dtype": "float32", "page_size": 8, "kv_pages": 40, "prefill_chunk_tokens": 16}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small model, saved."""
    folder = tmp_path_factory.mktemp("scores")
    model = make_checkpoint("qwen3", folder / "model", seed=3)
    model.folder = folder
    return model.float().eval()


@pytest.fixture(scope="module")
def scorer(reference: Any) -> Iterator[WorkerProcess]:
    with launch(reference.folder / "model", log=reference.folder / "log", **FLAGS) as worker:
        yield worker


@pytest.fixture
def scores(scorer: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(scorer.endpoint, timeout_s=60) as client:
        yield client


def prompt_of(length: int, vocab: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def log_softmax_after(reference: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, V]: row i is of what follows token i."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check_tops(reference: Any, prompt: list[int], part: Completion, k: int) -> None:
    expected_NV = log_softmax_after(reference, prompt + part.token_ids.tolist())[len(prompt) - 1 : -1]
    assert part.top_ids is not None and part.top_logprobs is not None and part.top_ids.shape == (len(part), k)
    ours = torch.tensor(part.top_logprobs)
    assert torch.allclose(ours, expected_NV.topk(k).values, atol=1e-4)
    assert torch.allclose(ours, expected_NV.gather(1, torch.tensor(part.top_ids).long()), atol=1e-4)


def check_prompt(reference: Any, prompt: list[int], values: Any) -> None:
    expected_NV = log_softmax_after(reference, prompt)[:-1]
    expected = expected_NV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    values = np.array(values, np.float32)
    assert len(values) == len(prompt) and np.isnan(values[0])
    assert torch.allclose(torch.tensor(values[1:]), expected, atol=1e-4)


def check_prompt_tops(reference: Any, prompt: list[int], tops: Any, k: int) -> None:
    expected_NV = log_softmax_after(reference, prompt)[:-1]
    chosen_N1 = expected_NV.gather(1, torch.tensor(prompt[1:])[:, None])
    surely, perhaps = ((expected_NV > chosen_N1 + margin).sum(1) + 1 for margin in (1e-4, -1e-4))
    ranks, ids, ours = (torch.tensor(values[1:]) for values in (tops.ranks, tops.ids, tops.logprobs))
    assert (surely <= ranks).all() and (ranks <= perhaps).all() and tops.ids.shape == (len(prompt), k)
    assert torch.allclose(ours, expected_NV.topk(k).values, atol=1e-4)
    assert torch.allclose(ours, expected_NV.gather(1, ids.long()), atol=1e-4)


def test_a_mixed_batch_with_preemptions_is_scored_as_transformers_does(reference: Any, scores: RolloutClient) -> None:
    vocab = reference.config.vocab_size
    wishes: list[dict[str, Any]] = [
        {"logprobs": 5, "prompt_logprobs": True},
        {"logprobs": 20, "top_p": 0.7, "repetition_penalty": 1.3},
        {},
        {"prompt_logprobs": True, "n": 3, "prompt_top_logprobs": 20},
        {"logprobs": 1, "prompt_logprobs": True, "n": 2, "temperature": 0.6},
        {"logprobs": 3, "constraint": {"token_ids": [3, 4, 5]}, "stop": {"token_ids": [3]}},
    ]
    prompts = [prompt_of(10 + 9 * i, vocab, i) for i in range(len(wishes))]
    asked = [{"prompt": p, "seed": i, **wish} for i, (p, wish) in enumerate(zip(prompts, wishes, strict=True))]
    common: Any = {"max_tokens": 60}
    results = scores.generate_many({"stop": {"ignore_eos": True}, **common, **each} for each in asked)
    assert scores.status()["preemptions"] > 0
    for prompt, wish, result in zip(prompts, wishes, results, strict=True):
        assert (result.prompt_logprobs is not None) == ("prompt_logprobs" in wish)
        if result.prompt_logprobs is not None:
            check_prompt(reference, prompt, result.prompt_logprobs)
        assert (result.prompt_tops is not None) == ("prompt_top_logprobs" in wish)
        if result.prompt_tops is not None:
            check_prompt_tops(reference, prompt, result.prompt_tops, wish["prompt_top_logprobs"])
        for part in result.completions:
            if "logprobs" in wish:
                check_tops(reference, prompt, part, wish["logprobs"])
            else:
                assert part.top_ids is None and part.top_logprobs is None


def test_a_prompt_in_the_cache_is_computed_for_who_wants_its_logprobs(reference: Any, scores: RolloutClient) -> None:
    prompt = prompt_of(50, reference.config.vocab_size, 77)
    cached = []
    for wish in ({}, {"prompt_logprobs": True}, {}):
        result = scores.generate(prompt, max_tokens=2, temperature=0.0, **wish)
        cached.append(result.cached_tokens)
        if wish:
            check_prompt(reference, prompt, result.prompt_logprobs)
    assert cached == [0, 0, 49]


def test_a_stream_that_is_continued_elsewhere_is_one_completion(reference: Any, scores: RolloutClient) -> None:
    prompt = prompt_of(20, reference.config.vocab_size, 5)
    fields: Any = {"max_tokens": 40, "logprobs": 4, "prompt_logprobs": True, "stop": {"ignore_eos": True}}
    whole = scores.generate(prompt, seed=9, **fields)
    # At most 16: the worker runs on while this process waits for a CPU, and a stream of 40 could be whole by then.
    stream = scores.generate(prompt, seed=9, stream="tokens", stream_every=4, **{**fields, "max_tokens": 16})
    first = next(stream)
    check_prompt(reference, prompt, first.prompt_logprobs)
    (partial,) = stream.partials()
    stream.close()
    rest = scores.generate(prompt, continue_from=partial, **fields)
    assert 4 <= len(partial) <= 16
    np.testing.assert_array_equal(rest.completions[0].top_ids, whole.completions[0].top_ids)
    np.testing.assert_allclose(rest.completions[0].top_logprobs, whole.completions[0].top_logprobs, atol=1e-4)
    check_tops(reference, prompt, rest.completions[0], 4)
    check_prompt(reference, prompt, rest.prompt_logprobs)


def test_prompts_up_to_the_whole_context_are_scored_without_a_token(reference: Any, scores: RolloutClient) -> None:
    vocab, context = reference.config.vocab_size, scores.status()["max_context_tokens"]
    tokens = scores.status()["tokens"]
    prompts = [prompt_of(length, vocab, length) for length in (1, 2, 33, context - 1, context)]
    results = scores.generate_many(prompts, max_tokens=0, prompt_top_logprobs=2, n=2, return_text=False)
    for prompt, result in zip(prompts, results, strict=True):
        check_prompt(reference, prompt, result.prompt_logprobs)
        check_prompt_tops(reference, prompt, result.prompt_tops, 2)
        assert result.prompt_tokens == len(prompt) and result.prompt_version == (0 if len(prompt) > 1 else None)
        for part in result.completions:
            assert (len(part), part.finish_reason, part.versions, part.stop) == (0, "length", [], None)
    assert scores.status()["tokens"] == tokens
    for more, field in (({}, "prompt"), ({"max_tokens": 1}, "max_tokens")):
        with pytest.raises(TooLong) as refused:
            scores.generate(prompts[-1], **more)
        assert refused.value.field == field
    with pytest.raises(TooLong):
        scores.generate([*prompts[-1], 3], max_tokens=0, prompt_logprobs=True)


def test_scores_without_a_token_come_in_streams_turns_and_continuations(
    reference: Any, scores: RolloutClient, scorer: WorkerProcess, tmp_path: Path
) -> None:
    prompt = prompt_of(41, reference.config.vocab_size, 6)
    wanted: Any = {"max_tokens": 0, "prompt_logprobs": True}
    first, second = sorted(scores.generate(prompt, stream="tokens", n=2, **wanted), key=lambda chunk: chunk.index)
    assert (len(first.token_ids), first.finish_reason, second.finish_reason) == (0, "length", "length")
    assert first.prompt_version == 0 and second.prompt_logprobs is None
    check_prompt(reference, prompt, first.prompt_logprobs)
    ended = [(len(part), part.finish_reason) for part in scores.generate(prompt, stream="completions", n=2, **wanted)]
    assert ended == [(0, "length"), (0, "length")]
    with scores.session() as talk:
        check_prompt(reference, prompt, talk.generate(prompt, **wanted).prompt_logprobs)
        turn = talk.generate([*prompt, 5], max_tokens=3, stop={"ignore_eos": True})
        assert turn.cached_tokens == len(prompt)
    partial = scores.generate(prompt, max_tokens=4, seed=2, stop={"ignore_eos": True}).completions[0]
    whole = scores.generate(prompt, continue_from=partial, **{**wanted, "max_tokens": 4})
    np.testing.assert_array_equal(whole.completions[0].token_ids, partial.token_ids)
    check_prompt(reference, prompt, whole.prompt_logprobs)
    with pytest.raises(BadRequest, match="max_tokens"):
        scores.generate(prompt, continue_from=partial, **wanted)
    for _ in range(2):  # the second time from the journal
        with RolloutClient(scorer.endpoint, journal=tmp_path / "journal", timeout_s=60) as kept:
            result = kept.generate(prompt, request_id="r", n=2, **wanted)
            check_prompt(reference, prompt, result.prompt_logprobs)
            assert result.prompt_version == 0 and [len(part) for part in result.completions] == [0, 0]


def test_over_zeromq_and_msgpack_alone_they_are_blobs_as_documented(reference: Any, scorer: WorkerProcess) -> None:
    prompt = prompt_of(30, reference.config.vocab_size, 8)
    with RawClient(scorer.endpoint) as raw:
        assert {"logprobs", "prompt_logprobs"} <= set(raw.ask("status", "s")["capabilities"])
        fields = {"prompt": prompt, "max_tokens": 12, "logprobs": 3, "prompt_logprobs": True}
        raw.send("generate", "a", stream="tokens", stream_every=5, stop={"ignore_eos": True}, **fields)
        chunks, result = raw.receive_all("a")
        expected = {"top_ids": "<i4", "top_logprobs": "<f4", "prompt_logprobs": "<f4"}
        assert expected.items() <= raw.types.items()
        (fields,) = result["completions"]
        for name in ("top_ids", "top_logprobs"):
            assert sum((chunk[name] for chunk in chunks), []) == fields[name]
            assert [len(row) for row in fields[name]] == [3] * 12
        assert ["prompt_logprobs" in chunk for chunk in chunks] == [True, *[False] * (len(chunks) - 1)]
        assert chunks[0]["prompt_logprobs"][1:] == result["prompt_logprobs"][1:]
        check_prompt(reference, prompt, result["prompt_logprobs"])
        none = np.zeros(0, np.float32)
        tops = np.array(fields["top_ids"], np.int32), np.array(fields["top_logprobs"], np.float32)
        tokens = np.array(fields["token_ids"], np.int32)
        check_tops(reference, prompt, Completion(0, tokens, none, none, [], top_ids=tops[0], top_logprobs=tops[1]), 3)
        refused = raw.ask("generate", "b", prompt=prompt, max_tokens=2, logprobs=21)
        assert (refused["code"], refused["field"]) == ("bad_request", "logprobs")


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_named_tokens_are_scored_on_prefixes_that_are_known(reference: Any, scorer: WorkerProcess, kind: str) -> None:
    vocab = reference.config.vocab_size
    prompt, rng = prompt_of(64, vocab, 77 + len(kind)), np.random.default_rng(3)
    named = rng.integers(0, vocab, (12, 256)).astype(np.int32)
    fields = {"max_tokens": 0, "prompt_logprobs_last": 12, "prompt_entropy": True}
    wanted = Wanted(last=12, tops=min(256, vocab), chosen=named, entropy=True)
    requests = [
        {"prompt": prompt, "prompt_logprob_token_ids": named, "prompt_top_logprobs": wanted.tops, **fields}
        for _ in range(3)
    ]

    async def asked() -> list[GenerateResult]:
        async with AsyncRolloutClient(scorer.endpoint, timeout_s=60) as client:
            return [await client.generate(**request) for request in requests]

    if kind == "asyncio":
        results = asyncio.run(asked())
    else:
        with RolloutClient(scorer.endpoint, timeout_s=60) as client:
            results = [client.generate(**request) for request in requests]
    assert [result.cached_tokens for result in results] == [0, 48, 48]
    for result in results:
        wanted.check(result, prompt, reference)
        assert result.prompt_version == 0 and len(result.completions[0]) == 0
