"""Drafts over several ranks: these complete what one rank completes.

Every rank has the whole draft model, and all draft the same tokens. Every rank has a part of the states of linear
attention, and all go on after the same drafts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_kernels.parallel import TensorGroup
from transformers import AutoConfig

from rollout.config import ModelSettings
from rollout.models import load_model
from tests.support.engine.drafting import drafting, watch_drafts
from tests.support.engine.harness import Bench
from tests.support.kernels.grids import nightly
from tests.support.models.draft_heads import head_config, random_head, save_head
from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import make_hybrid
from tests.support.models.mtp_layers import make_predicting
from tests.support.parallel.ranks import Ranks

CPU = torch.device("cpu")
KINDS = ["MiMo", *nightly("mapped", "Glm4Moe", "DeepseekV3", "shared")]
STOPS = tuple(range(0, 80, 2))
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt_logprobs": True},
    "drawn": {"sampling": {"temperature": 0.8}, "logprobs": 3},
    "top-k and top-p": {"sampling": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01}},
    "penalties": {"sampling": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4}},
    "bias": {"sampling": {"temperature": 0.8, "logit_bias": ((3, 4.0), (75, 4.0))}},
    "min_tokens": {"sampling": {"temperature": 0.8}, "stop": {"token_ids": STOPS, "min_tokens": 6}},
}
#: By name: tokens, log-probs, drafts with the place at which they were made.
Found = dict[str, Any]


def make(kind: str, folder: Path) -> None:
    """A target with a layer for multi-token prediction; or with a head: of a part of its tokens, or with its output."""
    if kind not in ("mapped", "shared"):
        make_predicting(kind, folder)
        return
    make_checkpoint("qwen3", folder)
    config = head_config(AutoConfig.from_pretrained(folder), 60 if kind == "mapped" else None)
    tensors = random_head(config)
    if kind == "shared":
        del tensors["lm_head.weight"]
    save_head(folder / "head", config, tensors)


def complete(folder: Path, group: TensorGroup | None, drafts: bool = True) -> Found:
    head = folder / "head"
    settings, draft = ModelSettings(path=str(folder)), head if drafts and head.exists() else None
    loaded = load_model(settings, CPU, group=group, draft=draft, mtp="needed" if drafts and draft is None else "unused")
    bench = Bench(loaded.model, max_rows=4, speculation="heads" if drafts else "off")
    seen = watch_drafts(bench) if drafts else []
    for number, (name, options) in enumerate(REQUESTS.items()):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(0, loaded.spec.vocab, (9 + 10 * number,), generator=generator).tolist()
        sampling = {"temperature": 0.0, **options.get("sampling", {}), "seed": number}
        bench.submit(name, prompt, 14, **{**options, "sampling": sampling})
    bench.finish()
    done = {name: bench.completions[name, 0] for name in REQUESTS}
    return {
        "tokens": {name: one.token_ids for name, one in done.items()},
        "logprobs": {name: one.raw_logprobs for name, one in done.items()},
        "guesses": [(*ints, *guesses) for ints, _, guesses in seen],
        "drafted": bench.drafts.drafted,
    }


def complete_on_a_rank(group: TensorGroup, folder: Path) -> Found:
    return complete(folder, group)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_draft_the_same_and_complete_what_one_rank_completes(
    tmp_path: Path, start_ranks: Callable[[int], Ranks], kind: str
) -> None:
    make(kind, tmp_path)
    plain, one = complete(tmp_path, None, drafts=False), complete(tmp_path, None)
    first, second = start_ranks(2).run(complete_on_a_rank, tmp_path)
    assert first == second, "ranks have other bits"
    assert first["tokens"] == plain["tokens"] == one["tokens"]
    for name, expected in plain["logprobs"].items():
        assert np.allclose(first["logprobs"][name], expected, rtol=0, atol=2e-4)
    assert first["drafted"] > 100
    same = len(set(first["guesses"]) & set(one["guesses"]))
    assert same > 0.95 * len(set(one["guesses"])) > 40, "up to the rounding of another sum"


def complete_with_other_logits(group: TensorGroup, folder: Path) -> Found:
    """Each rank has a head with an output layer of its own."""
    load = load_model

    def load_changed(*how: Any, **more: Any) -> Any:
        loaded = load(*how, **more)
        generator = torch.Generator().manual_seed(group.rank)
        weight_VH = loaded.model.draft.lm_head
        weight_VH.data += torch.randn(weight_VH.shape, generator=generator)
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "load_model", load_changed)
        return complete(folder, group)


@pytest.mark.nightly
def test_drafts_of_rank_0_count_where_logits_differ(tmp_path: Path, start_ranks: Callable[[int], Ranks]) -> None:
    """Products of different GPUs may differ in their last bits."""
    make("mapped", tmp_path)
    plain = complete(tmp_path, None, drafts=False)
    first, second = start_ranks(2).run(complete_with_other_logits, tmp_path)
    assert first["guesses"] == second["guesses"] and first["drafted"] > 100
    assert first["tokens"] == second["tokens"] == plain["tokens"]


def complete_with_states(folder: Path, group: TensorGroup | None, answers: dict[str, list[int]] | None) -> Found:
    """With `answers`, some of them wrong, as drafts; None: without drafts."""
    loaded = load_model(ModelSettings(path=str(folder)), CPU, group=group)
    with pytest.MonkeyPatch.context() as patch:
        fields = {"max_rows": 8, "kv_pages": 90}
        if answers is None:
            bench = Bench(loaded.model, **fields)
        else:
            recorded = {(name, 0): tokens for name, tokens in answers.items()}
            bench, _ = drafting(patch, loaded.model, recorded, 0.2, ragged=True, speculation_tokens=4, **fields)
        for i in range(6):
            generator = torch.Generator().manual_seed(i)
            prompt = torch.randint(0, loaded.spec.vocab, (5 + 4 * i,), generator=generator).tolist()
            bench.submit(f"r{i}", prompt, 40, sampling={"temperature": 0.8, "seed": i}, n=1 + i % 2)
        bench.run()
    bench.close()
    done = bench.completions
    return {
        "tokens": {key: one.token_ids for key, one in done.items()},
        "logprobs": {key: one.raw_logprobs for key, one in done.items()},
        "accepted": bench.drafts.accepted,
    }


def complete_with_states_on_a_rank(group: TensorGroup, folder: Path, answers: dict[str, list[int]] | None) -> Found:
    return complete_with_states(folder, group, answers)


@pytest.mark.nightly
@pytest.mark.parametrize("stem", ["Qwen3_5", *nightly("Qwen3Next", "OlmoHybrid")])
def test_states_of_every_rank_follow_the_accepted_drafts(
    tmp_path: Path, start_ranks: Callable[[int], Ranks], stem: str
) -> None:
    make_hybrid(stem, tmp_path, **({"num_experts": 8} if stem == "Qwen3Next" else {}))
    plain = complete_with_states(tmp_path, None, None)
    answers = {name: tokens for (name, index), tokens in plain["tokens"].items() if index == 0}
    first, second = start_ranks(2).run(complete_with_states_on_a_rank, tmp_path, answers)
    assert first == second, "ranks have other bits"
    assert first["accepted"] > 60
    assert first["tokens"] == plain["tokens"]
    for key, expected in plain["logprobs"].items():
        assert np.allclose(first["logprobs"][key], expected, rtol=0, atol=2e-4)


def random_weights(folder: Path, group: TensorGroup | None) -> dict[str, torch.Tensor]:
    loaded = load_model(ModelSettings(path=str(folder), load_format="random"), CPU, group=group, mtp="needed")
    assert loaded.model.draft is not None
    return {name: parameter.data.clone() for name, parameter in loaded.model.draft.named_parameters()}


def random_weights_of_a_rank(group: TensorGroup, folder: Path) -> dict[str, torch.Tensor]:
    return random_weights(folder, group)


def test_random_weights_are_the_same_on_every_rank(tmp_path: Path, start_ranks: Callable[[int], Ranks]) -> None:
    make_predicting("Glm4Moe", tmp_path)
    expected = random_weights(tmp_path, None)
    for found in start_ranks(2).run(random_weights_of_a_rank, tmp_path):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], values) for name, values in expected.items())
