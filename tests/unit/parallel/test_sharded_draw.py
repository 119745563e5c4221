"""Ranks that have parts of the vocabulary draw the tokens that one rank draws, and agree in every bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels import SamplingRows, sample
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.sampling import Sampled, VocabShard, gumbel_noise, sample_shard
from rollout_kernels.sampling.triton_draw import draw_and_advance

from rollout.config import ModelSettings
from rollout.models import load_model
from tests.support.engine.harness import Bench
from tests.support.models.families import make_checkpoint
from tests.support.parallel.ranks import Ranks

CPU = torch.device("cpu")
ROWS, VOCAB = 9, 5003
COLUMNS = {"LAST": 0, "LENGTH": 1, "PROMPT": 2, "SEED": 3, "TEMPERATURE": 0, "NOISE": 1}
SIZES = [2, pytest.param(4, marks=pytest.mark.nightly)]


def _rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and the integers and floats of the row state; every third row is greedy, row 0 is padding."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    logits[4] = 0.0  # only the noise decides
    logits[6, [11, 4990]] = 40.0  # equal ones on different ranks: a greedy row takes the first
    ints, floats = torch.zeros(ROWS + 1, 4, dtype=torch.int64), torch.ones(ROWS + 1, 2)
    ints[:, 1] = torch.arange(ROWS + 1) + 20
    ints[:, 3] = torch.arange(ROWS + 1) * 7919 + 2**40
    floats[:, 0] = torch.linspace(0.5, 2.0, ROWS + 1)
    floats[1::3] = torch.tensor([1.0, 0.0])
    return logits, ints, floats


def _settings(ints: torch.Tensor, floats: torch.Tensor) -> SamplingRows:
    return SamplingRows(floats[1:, 0], floats[1:, 1], ints[1:, 3], ints[1:, 1] + 1 - ints[1:, 2])


def _shard(group: TensorGroup) -> tuple[VocabShard, slice]:
    most = -(-VOCAB // (4 * group.size)) * 4
    return VocabShard(group, group.rank * most, most, VOCAB), slice(group.rank * most, (group.rank + 1) * most)


def _by_torch(group: TensorGroup) -> Sampled:
    logits, ints, floats = _rows()
    shard, part = _shard(group)
    return sample_shard(logits[:, part], replace(_settings(ints, floats), first_token=shard.first_token), shard)


def _by_kernel(group: TensorGroup) -> tuple[torch.Tensor, torch.Tensor]:
    logits, ints, floats = _rows()
    shard, part = _shard(group)
    output = torch.zeros(4, ROWS, dtype=torch.int32)
    draw_and_advance(
        logits[:, part].contiguous(), None, torch.arange(1, ROWS + 1), ints, floats, output, COLUMNS, shard
    )
    return output, ints


@pytest.mark.parametrize("size", SIZES)
def test_the_draw_over_parts_is_that_over_the_whole(size: int, start_ranks: Callable[[int], Ranks]) -> None:
    logits, ints, floats = _rows()
    whole = sample(logits, _settings(ints, floats))
    results = start_ranks(size).run(_by_torch)
    for found in results:
        assert torch.equal(found.tokens_S, whole.tokens_S) and found.tokens_S[6] == 11
        for name in ("logprobs_S", "raw_logprobs_S", "drawn_logprobs_S"):
            assert torch.allclose(getattr(found, name), getattr(whole, name), atol=1e-5)
            assert torch.equal(getattr(found, name), getattr(results[0], name)), "ranks have other bits"


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_draws_over_parts_what_it_draws_over_the_whole(
    size: int, start_ranks: Callable[[int], Ranks]
) -> None:
    logits, ints, floats = _rows()
    whole = torch.zeros(4, ROWS, dtype=torch.int32)
    draw_and_advance(logits, None, torch.arange(1, ROWS + 1), ints, floats, whole, COLUMNS)
    results = start_ranks(size).run(_by_kernel)
    for output, state in results:
        assert torch.equal(output[0], whole[0]) and output[0, 6] == 11 and torch.equal(state, ints)
        assert torch.allclose(output[1:].view(torch.float32), whole[1:].view(torch.float32), atol=2e-5)
        assert torch.equal(output, results[0][0]), "ranks have other bits"


def test_a_tokens_noise_does_not_depend_on_the_part() -> None:
    seed, index = torch.tensor([5, 2**50 + 3]), torch.tensor([7, 1000])
    whole = gumbel_noise(seed, index, 101)
    assert torch.equal(gumbel_noise(seed, index, 41, first=60), whole[:, 60:])


def _nan_by_kernel(group: TensorGroup) -> torch.Tensor:
    logits, ints, floats = _rows()
    logits[:] = float("nan")
    shard, part = _shard(group)
    output = torch.zeros(4, ROWS, dtype=torch.int32)
    rows = torch.arange(1, ROWS + 1)
    draw_and_advance(logits[:, part].contiguous(), None, rows, ints, floats, output, COLUMNS, shard)
    return output


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_logits_that_are_nan_give_a_valid_token_and_log_probs_that_are_nan(start_ranks: Callable[[int], Ranks]) -> None:
    for output in start_ranks(2).run(_nan_by_kernel):
        assert ((output[0] >= 0) & (output[0] < VOCAB)).all()
        assert output[1:].view(torch.float32).isnan().all()


# --- through the engine ----------------------------------------------------------------------------------------------

SAMPLED = {"temperature": 0.8}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt_logprobs": True},
    "drawn": {"sampling": {**SAMPLED, "seed": 5}, "logprobs": 3},
    "top-k and top-p": {"sampling": {**SAMPLED, "seed": 6, "top_k": 12, "top_p": 0.9, "min_p": 0.01}},
    "penalties": {"sampling": {**SAMPLED, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.4}},
    "bias": {"sampling": {**SAMPLED, "seed": 8, "logit_bias": ((3, 4.0), (95, 4.0))}},
    "min_tokens": {"sampling": {**SAMPLED, "seed": 9}, "stop": {"token_ids": tuple(range(0, 97, 2)), "min_tokens": 6}},
}
Completed = dict[str, dict[str, Any]]


def _complete(folder: Path, group: TensorGroup | None) -> Completed:
    """All requests by one engine: prompts in chunks, rows that come and go."""
    bench = Bench(load_model(ModelSettings(path=str(folder)), CPU, group=group).model, max_rows=4)
    for number, (name, options) in enumerate(REQUESTS.items()):
        prompt = torch.randint(0, 97, (9 + 30 * number,), generator=torch.Generator().manual_seed(number)).tolist()
        bench.submit(name, prompt, 24, **options)
    bench.finish()
    return {
        name: {
            "tokens": found.token_ids,
            "top_ids": found.top_ids,
            "floats": [found.logprobs, found.raw_logprobs, found.drawn_logprobs, found.top_logprobs]
            + ([] if found.prompt_logprobs is None else [found.prompt_logprobs[1:].tolist()]),
        }
        for name in REQUESTS
        for found in [bench.completions[name, 0]]
    }


def _engine_of_a_rank(group: TensorGroup, folder: Path) -> Completed:
    return _complete(folder, group)


def test_engines_of_ranks_that_run_the_same_steps_complete_what_one_rank_completes(
    tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    """With every rule of sampling, likeliest tokens and log-probs of prompts."""
    make_checkpoint("qwen3", tmp_path)
    whole = _complete(tmp_path, None)
    first, second = start_ranks(2).run(_engine_of_a_rank, tmp_path)
    assert first == second, "ranks have other bits"
    for name, expected in whole.items():
        assert first[name]["tokens"] == expected["tokens"] and len(expected["tokens"]) > 5
        assert first[name]["top_ids"] == expected["top_ids"]
        for found, floats in zip(first[name]["floats"], expected["floats"], strict=True):
            assert torch.allclose(torch.tensor(found), torch.tensor(floats), atol=2e-4)
