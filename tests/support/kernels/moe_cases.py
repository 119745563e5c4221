"""Layers of experts for tests, and their result in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rollout_kernels.moe.formats import ExpertWeights, Format
from rollout_kernels.moe.quantize import quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Layer:
    """Tokens, their experts, and the weights of all experts."""

    x_TH: torch.Tensor
    experts_TK: torch.Tensor
    weights_TK: torch.Tensor
    gate_up: ExpertWeights
    down: ExpertWeights

    def rows(self, which: slice | list[int]) -> Layer:
        """The same layer with some of its tokens."""
        x, experts, weights = (t[which].contiguous() for t in (self.x_TH, self.experts_TK, self.weights_TK))
        return Layer(x, experts, weights, self.gate_up, self.down)


def layer(
    tokens: int,
    *,
    experts: int = 6,
    top_k: int = 2,
    hidden: int = 256,
    inner: int = 64,
    format: Format = "plain",
    dtype: torch.dtype = torch.bfloat16,
    routing: str = "even",
    seed: int = 0,
    device: str = DEVICE,
) -> Layer:
    """Random weights and tokens; `routing` is even, skewed, or one (all tokens on the same experts)."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    logits_TE = normal(tokens, experts)
    if routing == "skewed":
        logits_TE += 3 * normal(experts)
    elif routing == "one":
        logits_TE = logits_TE[:1].expand(tokens, -1)
    chosen = logits_TE.topk(top_k)
    return Layer(
        normal(tokens, hidden).to(dtype),
        chosen.indices.int().contiguous(),
        chosen.values.softmax(-1).contiguous(),
        quantize((normal(experts, 2 * inner, hidden) * hidden**-0.5).to(dtype), format, halves=2),
        quantize((normal(experts, hidden, inner) * inner**-0.5).to(dtype), format),
    )


def exact(case: Layer) -> torch.Tensor:
    """The layer's output in float64, [T, H], computed with the values that the codes represent."""
    out = torch.zeros_like(case.x_TH, dtype=torch.float64)
    for expert in case.experts_TK.unique().tolist():
        token, slot = (case.experts_TK == expert).nonzero(as_tuple=True)
        gate_up, down = (_of(w, expert) for w in (case.gate_up, case.down))
        gate, up = (case.x_TH[token].double() @ gate_up.T).chunk(2, dim=1)
        weight = case.weights_TK[token, slot, None].double()
        out.index_add_(0, token, weight * ((torch.nn.functional.silu(gate) * up) @ down.T))
    return out


def _of(weights: ExpertWeights, expert: int) -> torch.Tensor:
    at = slice(expert, expert + 1)
    scales = None if weights.scales is None else weights.scales[at]
    return ExpertWeights(weights.values_ENK[at], scales, weights.format, weights.halves).dequantized()[0]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, divided by the norm of the expected result; infinite if there is a NaN."""
    error = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
    return error if error == error else float("inf")


def assert_close(got: torch.Tensor, expected: torch.Tensor, most: float = 4e-3, what: object = "") -> None:
    """Check relative error, cosine of each token and largest difference against bounds for two roundings to 16 bits.

    Exact sums with both roundings come to 2.4e-3, 1 - 3.5e-6 and 1.5 times the largest difference of the rounded result
    in bf16, for 512 tokens of 2,048 values; fewer values vary more.
    """
    rounded = expected.to(got.dtype).double()
    error, largest = relative(got, expected), (got.double() - expected).abs().max().item()
    cosine = torch.nn.functional.cosine_similarity(got.double(), expected, dim=-1).min().item()
    assert error < most, (what, error)
    assert cosine >= 1 - 0.6 * most**2, (what, cosine)
    assert largest <= 3 * (rounded - expected).abs().max().item(), (what, largest)


def poison(*shape: int, dtype: torch.dtype, device: str = DEVICE) -> torch.Tensor:
    """An output full of NaN, as if no kernel had written it."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
