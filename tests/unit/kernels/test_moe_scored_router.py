"""Routers with biases, sigmoids, groups and factors, in one launch: as in the torch code beside transformers."""

import pytest
import torch
from rollout_kernels.moe.formats import NO_SHARED, Shared
from rollout_kernels.moe.triton_router import Record
from rollout_kernels.moe.triton_scored_router import ScoreRule, choose_scored

from rollout.models.layers import ROUTES
from rollout.models.spec import RouterSpec
from tests.support.kernels.grids import nightly
from tests.support.kernels.moe_cases import DEVICE

#: Rules of models, with numbers of experts: gpt-oss, GLM-4.5, Moonlight, DeepSeek-V3, DeepSeek-V2, Kimi-K2, AFMoE.
RULES: dict[str, tuple[int, RouterSpec]] = {
    "gpt-oss": (32, RouterSpec("softmax", 4, True, logit_bias=True)),
    "glm": (128, RouterSpec("sigmoid", 8, True, bias=True, float32=True, scale=1.5)),
    "moonlight": (64, RouterSpec("sigmoid", 6, True, bias=True, float32=True, scale=2.4)),
    "deepseek-v3": (
        64,
        RouterSpec("sigmoid", 8, True, bias=True, float32=True, groups=8, top_groups=4, scale=2.5),
    ),
    "deepseek-v2": (
        32,
        RouterSpec("softmax", 6, False, float32=True, groups=8, top_groups=3, group_best=1, scale=16.0),
    ),
    "kimi": (384, RouterSpec("sigmoid", 8, True, bias=True, float32=True, scale=2.8)),
    "not renormalised": (40, RouterSpec("sigmoid", 3, False, bias=True, scale=0.7)),
    "ernie": (40, RouterSpec("softmax", 3, True, bias=True, float32=True, least_sum=0.4)),
    "softmax with a bias": (40, RouterSpec("softmax", 3, True, bias=True)),
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rule_of(spec: RouterSpec) -> ScoreRule:
    best = (spec.groups, spec.top_groups, spec.group_best)
    return ScoreRule(spec.scoring, spec.top_k, spec.renormalize, *best, spec.scale, spec.least_sum)


@pytest.mark.parametrize("shared", [NO_SHARED, *nightly((Shared(1),), (Shared(1, True),), (Shared(2),))])
@pytest.mark.parametrize("name", RULES)
def test_a_choice_is_that_of_its_twin(name, shared):
    experts, spec = RULES[name]
    tokens, dtype = 7, torch.float32 if spec.float32 else torch.bfloat16
    parts = normal(3, tokens, experts + shared.gated, seed=1)
    logit_bias = normal(experts, seed=2).bfloat16() if spec.logit_bias else None
    score_bias = 0.3 * normal(experts, seed=3) if spec.bias else None
    kept = torch.zeros(tokens, spec.top_k, dtype=torch.uint16 if experts > 256 else torch.uint8, device=DEVICE)
    record = Record(kept, torch.arange(tokens, device=DEVICE))
    got = choose_scored(
        parts, dtype, rule_of(spec), logit_bias_E=logit_bias, score_bias_E=score_bias, record=record, shared=shared
    )
    logits = ((parts[0] + parts[1]) + parts[2]).to(dtype)
    routed = logits[:, :experts] if logit_bias is None else logits[:, :experts] + logit_bias
    weights, chosen = ROUTES[spec.scoring](routed, score_bias, spec)
    assert got.experts_TK[:, : spec.top_k].tolist() == chosen.tolist() == kept.tolist()
    assert torch.allclose(got.weights_TK[:, : spec.top_k], weights.float(), rtol=1e-4, atol=1e-6)
    gate = logits[:, experts:].float().sigmoid() if shared.gated else torch.ones(tokens, 1, device=DEVICE)
    assert got.experts_TK[:, spec.top_k :].tolist() == [list(range(experts, experts + shared.experts))] * tokens
    assert torch.allclose(got.weights_TK[:, spec.top_k :], gate.expand(-1, shared.experts), rtol=1e-5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_any_logits_give_valid_experts(scoring, groups):
    """Equal choices go to the lower index; NaN and infinities come in no order, but experts are valid and distinct."""
    rule = ScoreRule(scoring, 4, True, groups, 2)
    logits = torch.zeros(4, 32, device=DEVICE)
    logits[1] = float("nan")
    logits[2, ::2], logits[2, 1::4] = float("inf"), float("-inf")
    logits[3, 5] = float("nan")
    got = choose_scored(logits[None].contiguous(), torch.float32, rule)
    assert got.experts_TK[0].tolist() == [0, 1, 2, 3]
    for row in got.experts_TK.tolist():
        assert len(set(row)) == 4 and all(0 <= expert < 32 for expert in row)


def test_groups_that_are_no_powers_of_two_are_left_to_torch():
    assert not ScoreRule("sigmoid", 4, True, 3, 2).takes(48)
    assert not ScoreRule("sigmoid", 4, True, 4, 2).takes(48)
    assert ScoreRule("sigmoid", 4, True, 4, 2).takes(64) and ScoreRule("sigmoid", 4, True).takes(48)
