"""Random weights give text that is neither noise nor a repetition of one token."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import LoadedModel, load_model
from rollout.models.coded import CodedView
from rollout.models.cut import kept_values
from rollout.models.layers import SparseFeedForward
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_model
from tests.support.models.paged import PagedRunner
from tests.support.settings import settings_of


def _random(folder: Path, family: str, seed: int = 0, dtype: str = "auto", **overrides: Any) -> LoadedModel:
    settings = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
    config = make_model(family, **(settings | overrides)).config
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(folder)
    settings_ = settings_of(ModelSettings, path=str(folder), load_format="random", random_seed=seed, dtype=dtype)
    return load_model(settings_, torch.device("cpu"))


def _sampled(loaded: LoadedModel, steps: int = 60) -> tuple[torch.Tensor, list[int]]:
    """Sample a text; returns the entropy of each step, and the tokens."""
    generator = torch.Generator().manual_seed(1)
    runner = PagedRunner(loaded.model, rows=1, max_tokens=20 + steps)
    ids = [random.Random(i).randrange(loaded.spec.vocab) for i in range(20)]
    logits = runner.prefill({0: ids})[0][-1]
    entropies, tokens = [], []
    for _ in range(steps):
        probs = torch.softmax(logits, -1)
        entropies.append(-(probs * probs.clamp_min(1e-30).log()).sum())
        tokens.append(int(torch.multinomial(probs, 1, generator=generator)))
        logits = runner.decode({0: tokens[-1]})[0]
    return torch.stack(entropies), tokens


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "olmoe"])
def test_entropy_is_between_half_a_nat_and_two(family: str, tied: bool, tmp_path: Path) -> None:
    entropies, tokens = _sampled(_random(tmp_path, family, vocab_size=1000, tie_word_embeddings=tied))
    assert 0.5 < entropies.mean() < 2.0
    assert len(set(tokens)) > 20


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_entropy_holds_for_a_large_vocabulary(tied: bool, tmp_path: Path) -> None:
    entropies, tokens = _sampled(_random(tmp_path, "qwen3", vocab_size=150_001, tie_word_embeddings=tied), steps=30)
    assert 0.5 < entropies.mean() < 2.0
    assert len(set(tokens)) > 15


def test_entropy_holds_below_a_softcap_of_the_logits(tmp_path: Path) -> None:
    """Of Gaussian logits it is 4 nats or more at this softcap and vocabulary, whatever their deviation."""
    sizes = {"head_dim": 16, "query_pre_attn_scalar": 16, "intermediate_size": 96, "final_logit_softcapping": 30.0}
    loaded = _random(tmp_path, "Gemma2", vocab_size=60_000, tie_word_embeddings=False, **sizes)
    entropies, tokens = _sampled(loaded)
    assert loaded.spec.logit_softcap == 30.0
    assert 0.5 < entropies.mean() < 2.0
    assert len(set(tokens)) > 15


def test_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, again, other = (_random(tmp_path, "mixtral", seed=seed).model for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embed, other.embed)


def test_every_parameter_is_filled_in_bfloat16(tmp_path: Path) -> None:
    model = _random(tmp_path, "qwen3_moe", dtype="bfloat16").model
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert bool(parameter.isfinite().all()), name
        if not name.endswith("bias"):
            assert 0.05 < parameter.float().square().mean().sqrt() < 3.0, name


@pytest.mark.parametrize("shared", [48, *nightly(32, 64)])
def test_experts_in_codes_are_those_of_the_same_seed(shared: int, tmp_path: Path) -> None:
    """Without codes the shared expert is stored with the others if its width is one of theirs or several."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"shared_expert_intermediate_size": shared}
    plain = _random(tmp_path, "Qwen2Moe", dtype="bfloat16", **sizes)
    settings = ModelSettings(path=str(tmp_path), load_format="random", dtype="bfloat16")
    coded = load_model(settings, torch.device("cpu"), weights="fp8_block")
    views = plain.trainer_views()
    for name, view in coded.trainer_views().items():
        if isinstance(view, CodedView):
            exact = kept_values(views[name]).float()
            assert (view.decoded_values() - exact).abs().max() < 0.1 * exact.abs().max(), name
        elif ".experts." not in name and name in views:
            assert torch.equal(kept_values(view), kept_values(views[name])), name
    for ours, theirs in zip(_experts(coded), _experts(plain), strict=True):
        for projection in ("gate_up", "down"):
            exact = theirs.weights(projection).dequantized()[:4]
            assert (ours.weights(projection).dequantized() - exact).abs().max() < 0.1 * exact.abs().max()


def _experts(loaded: LoadedModel) -> list[SparseFeedForward]:
    return [block for block in loaded.model.modules() if isinstance(block, SparseFeedForward)]
