"""Layers of experts, exact results, timing and floors for `bench.moe_kernels` and `tune.moe`.

The floor is measured: two launches only read the bytes of the chosen experts, and overlap like the kernels' launches.

Legend: T tokens, E experts, K experts a token, H hidden, D distinct experts.
"""

# A kernel collects tiles in a tuple, whose type changes as it grows.
# mypy: disable-error-code="assignment,misc"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from rollout_kernels.common.triton_math import follow, follow_options
from rollout_kernels.moe.dispatch import MoEShape, Plan, moe_plan, table_entry
from rollout_kernels.moe.formats import ExpertWeights, Format
from rollout_kernels.moe.triton_quantize import quantize_on_device
from rollout_kernels.moe.triton_router import Routing

from scripts.bench.cuda_timing import graph_us

SHAPES = {
    "qwen3-30b-a3b": MoEShape(experts=128, top_k=8, hidden=2048, inner=768),
    "qwen3-30b-a3b-tp2": MoEShape(experts=128, top_k=8, hidden=2048, inner=384),
    "qwen3-30b-a3b-tp4": MoEShape(experts=128, top_k=8, hidden=2048, inner=192),
    "qwen3-235b-a22b": MoEShape(experts=128, top_k=8, hidden=4096, inner=1536),
    "qwen3-235b-a22b-tp4": MoEShape(experts=128, top_k=8, hidden=4096, inner=384),
    "olmoe-1b-7b": MoEShape(experts=64, top_k=8, hidden=2048, inner=1024),
    "mixtral-8x7b": MoEShape(experts=8, top_k=2, hidden=4096, inner=14336),
    "qwen3.5-35b-a3b": MoEShape(experts=257, top_k=9, hidden=2048, inner=512),  # with the shared expert
    "gpt-oss-20b": MoEShape(experts=32, top_k=4, hidden=2880, inner=2880),
    "glm-4.5-air": MoEShape(experts=129, top_k=9, hidden=4096, inner=1408),  # with the shared expert
    "moonlight-16b-a3b": MoEShape(experts=66, top_k=8, hidden=2048, inner=1408),  # with two shared experts
}
#: Above so many tokens the path by output is not measured.
MOST_WARP_TOKENS = 64


@dataclass(frozen=True)
class Layer:
    """Weights of one layer."""

    gate_up: ExpertWeights
    down: ExpertWeights

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert in both projections."""
        return self.gate_up.bytes_per_expert + self.down.bytes_per_expert


@dataclass(frozen=True)
class Tokens:
    """Inputs of a layer, and their number of distinct experts."""

    x_TH: torch.Tensor
    routing: Routing
    distinct: int


def make_layers(shape: MoEShape, format: Format, count: int, seed: int = 0) -> list[Layer]:
    """Random layers whose projections keep the magnitude of activations."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def weights(outputs: int, inputs: int, halves: int) -> ExpertWeights:
        w_ENK = torch.empty(shape.experts, outputs, inputs, dtype=torch.bfloat16, device="cuda")
        w_ENK.normal_(0, inputs**-0.5, generator=generator)
        return quantize_on_device(w_ENK, format, halves)

    return [
        Layer(weights(2 * shape.inner, shape.hidden, 2), weights(shape.hidden, shape.inner, 1)) for _ in range(count)
    ]


def make_tokens(shape: MoEShape, tokens: int, seed: int, skew: float = 0.0) -> Tokens:
    """Random tokens; `skew` is the spread of a preference for experts that all tokens share."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda")

    logits = normal(tokens, shape.experts) + skew * normal(shape.experts)
    chosen = logits.topk(shape.top_k)
    routing = Routing(chosen.indices.int().contiguous(), chosen.values.softmax(-1).contiguous())
    return Tokens(normal(tokens, shape.hidden).bfloat16(), routing, int(chosen.indices.unique().numel()))


def exact(layer: Layer, tokens: Tokens, rounded: bool = False) -> torch.Tensor:
    """The layer's output in float64, [T, H].

    `rounded` rounds the result of each step to bf16, as sorting and grouped GEMMs do. It is the best case of such a
    path, since its sums are exact.
    """

    def stored(value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16().double() if rounded else value

    routing = tokens.routing
    out = torch.zeros_like(tokens.x_TH, dtype=torch.float64)
    for expert in routing.experts_TK.unique().tolist():
        token, slot = (routing.experts_TK == expert).nonzero(as_tuple=True)
        gate_up = layer.gate_up.part(expert).dequantized()[0]
        gate, up = stored(tokens.x_TH[token].double() @ gate_up.T).chunk(2, dim=1)
        hidden = stored(stored(torch.nn.functional.silu(gate)) * up)
        weight = routing.weights_TK[token, slot, None].double()
        out.index_add_(0, token, stored(weight * (hidden @ layer.down.part(expert).dequantized()[0].T)))
    return stored(out)


def plans(shape: MoEShape, format: Format, tokens: int) -> dict[str, Plan]:
    """The chosen plan, the deterministic one, and both paths as in the table for the nearest number of tokens.

    The path by output is left out for many tokens.
    """
    found: dict[str, Plan] = {"chosen": moe_plan(shape, format, torch.bfloat16, tokens)}
    found["deterministic"] = moe_plan(shape, format, torch.bfloat16, tokens, deterministic=True)
    for most, plan in table_entry(shape, format).bands:
        if plan.path not in found or most <= tokens:
            found[plan.path] = plan
    if tokens > MOST_WARP_TOKENS:
        found.pop("warp", None)
    return found


@dataclass(frozen=True)
class Errors:
    """The errors of a result."""

    relative: float
    min_cosine: float
    max_difference: float


def errors(got: torch.Tensor, expected: torch.Tensor) -> Errors:
    """Of `got` [T, H] against float64; what was not written shows as NaN."""
    difference = got.double() - expected
    cosine = torch.nn.functional.cosine_similarity(got.double(), expected, dim=-1)
    return Errors((difference.norm() / expected.norm()).item(), cosine.min().item(), difference.abs().max().item())


_LOADS = 16
_CHUNK_INTS = 4 * 128 * _LOADS


@triton.jit
def _read_kernel(data_ptr, experts_ptr, out_ptr, ints, CHUNK: tl.constexpr, LOADS: tl.constexpr):
    expert = tl.load(experts_ptr + tl.program_id(1)).to(tl.int64)
    lane = tl.arange(0, 4)[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = data_ptr + expert * ints + tl.program_id(0) * CHUNK + lane
    tiles = ()
    for load in tl.static_range(LOADS):
        tiles += (tl.load(at + load * 512, eviction_policy="evict_first"),)
    follow()
    acc = tiles[0]
    for load in tl.static_range(1, LOADS):
        acc = acc ^ tiles[load]
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out_ptr + program * 4 + tl.arange(0, 4), tl.sum(acc, axis=1))


def read_experts(weights: ExpertWeights, experts_D: torch.Tensor, out: torch.Tensor) -> None:
    """Only read the values of some experts (without their scales, and up to 32 KB less than all)."""
    data = weights.values_ENK.view(torch.int32)
    ints = data[0].numel()
    _read_kernel[(ints // _CHUNK_INTS, len(experts_D))](
        data, experts_D, out, ints, CHUNK=_CHUNK_INTS, LOADS=_LOADS, num_warps=4, **follow_options(data.device)
    )


def floor_us(layers: list[Layer], tokens: list[Tokens]) -> float:
    """Microseconds to read a layer's chosen experts in two launches."""
    out = torch.empty(1 << 22, dtype=torch.int32, device="cuda")

    def read(layer: Layer, experts_D: torch.Tensor) -> None:
        read_experts(layer.gate_up, experts_D, out)
        read_experts(layer.down, experts_D, out)

    chosen = [t.routing.experts_TK.unique().int() for t in tokens]
    works = [lambda pair=pair: read(*pair) for pair in zip(layers, chosen, strict=True)]
    return graph_us(*works)


def read_bandwidth() -> float:
    """Bytes per second of a kernel that only reads."""
    whole = ExpertWeights(torch.empty(1, 1 << 15, 1 << 16, dtype=torch.bfloat16, device="cuda").normal_())
    out = torch.empty(1 << 22, dtype=torch.int32, device="cuda")
    first = torch.zeros(1, dtype=torch.int32, device="cuda")
    return whole.bytes_per_expert / graph_us(lambda: read_experts(whole, first, out)) * 1e6
