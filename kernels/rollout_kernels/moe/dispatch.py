"""A layer of experts on a GPU: which kernels it uses, and the layer itself in one call.

    warp       moe_gate_up, moe_down                                    two launches
    grouped    group_pairs, grouped_gate_up, grouped_down [, combine]   three or four launches
    padded     pad_groups, spread_rows, padded_gate_up, padded_down, gather_sum   six launches; 16 bits, on Hopper

A plan names the path and the configurations of its kernels. Plans come from `table.json`, which `scripts/tune/moe.py`
writes from measurements: for each shape and format, a plan for each band of tokens. The plan is chosen once, when a
step is captured; nothing is tuned while serving. An entry also has one deterministic plan for every number of tokens,
so the order of a token's sums does not depend on the batch. A shape that is not in the table gets a plan by its size,
with one warning. The padded path is not in the table: on GPUs that can run it, it takes over from a number of tokens
for each expert on (`padded_from`).

The host reads nothing, and the grids depend only on shapes, so a graph can capture the layer.

Legend: T tokens, K experts a token, H hidden, S parts.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import torch

from rollout_kernels.common.device import multiprocessors
from rollout_kernels.common.triton_math import Activation
from rollout_kernels.moe import gluon_experts
from rollout_kernels.moe.formats import ClampedGLU, ExpertWeights, Format
from rollout_kernels.moe.triton_group_pairs import group_pairs
from rollout_kernels.moe.triton_grouped_experts import GroupedConfig, combine, grouped_down, grouped_gate_up
from rollout_kernels.moe.triton_padded_groups import gather_sum, pad_groups, spread_rows
from rollout_kernels.moe.triton_router import Routing
from rollout_kernels.moe.triton_warp_experts import WarpConfig, moe_down, moe_gate_up

#: Tokens an expert, on average, from which on the padded path is used. On an H200, a layer of Qwen3-30B-A3B takes as
#: long by either path with a quarter of them.
_PADDED_PAIRS = 128


@dataclass(frozen=True, slots=True)
class MoEShape:
    """The sizes of a layer; together with the format, a key of the table."""

    experts: int
    top_k: int
    hidden: int
    inner: int  # intermediate size of one expert


@dataclass(frozen=True, slots=True)
class WarpPlan:
    """Few tokens: one warp for each output."""

    gate_up: WarpConfig
    down: WarpConfig
    path: Literal["warp"] = "warp"


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """Many tokens: tiles of `tile_rows` tokens that share an expert."""

    gate_up: GroupedConfig
    down: GroupedConfig
    tile_rows: int = 16
    path: Literal["grouped"] = "grouped"


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """A whole tile of tokens for most experts, on Hopper: persistent products."""

    programs: int = 132  # multiprocessors of the device
    path: Literal["padded"] = "padded"


Plan = WarpPlan | GroupedPlan | PaddedPlan


@dataclass(frozen=True, slots=True)
class Entry:
    """The plans of a shape and format: one for each band of token counts, and the deterministic plan."""

    bands: tuple[tuple[int, Plan], ...]
    deterministic: Plan

    def plan(self, tokens: int, deterministic: bool) -> Plan:
        """The plan for a number of tokens; past the last band, the plan of the last band."""
        if deterministic:
            return self.deterministic
        return next((plan for most, plan in self.bands if tokens <= most), self.bands[-1][1])


def moe_plan(
    shape: MoEShape,
    format: Format,
    dtype: torch.dtype,
    tokens: int,
    *,
    deterministic: bool = False,
    device: torch.device | None = None,
) -> Plan:
    """The plan for `tokens` tokens with weights in `format` and activations in `dtype`.

    Without `device` it is one for any GPU. A deterministic plan is never padded, as it serves few tokens as well.
    """
    if format == "mxfp8" and dtype == torch.float16:
        # f16 cannot represent e8m0 scales, so the tensor cores cannot multiply these weights.
        return _default_warp(format)
    if device is not None and not deterministic:
        first = padded_from(shape, format, dtype, device)
        if first is not None and tokens >= first:
            return PaddedPlan(multiprocessors(device))
    return table_entry(shape, format).plan(tokens, deterministic)


def padded_from(shape: MoEShape, format: Format, dtype: torch.dtype, device: torch.device) -> int | None:
    """The smallest number of tokens that run by a `PaddedPlan` on this device; None if no number does."""
    if format != "plain" or not gluon_experts.takes(device, dtype, shape.experts, shape.hidden, shape.inner):
        return None
    return -(-_PADDED_PAIRS * shape.experts // shape.top_k)


def table_entry(shape: MoEShape, format: Format) -> Entry:
    """All plans for a shape and format. Warns once for each shape that is not in the table."""
    return measured_table().get((shape, format)) or _unmeasured(shape, format)


@lru_cache(maxsize=64)
def _unmeasured(shape: MoEShape, format: Format) -> Entry:
    """An entry for a shape that is not in the table. The cache makes the warning appear once for each shape."""
    message = f"no measured plan for {shape} in {format}: using a plan by size; scripts/tune/moe.py can measure it"
    warnings.warn(message, RuntimeWarning, stacklevel=4)
    return default_entry(shape, format)


def run_experts(
    x_TH: torch.Tensor,
    routing: Routing,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    plan: Plan,
    *,
    parts: bool = False,
    glu: ClampedGLU | None = None,
    activation: Activation = "silu",
    limit: float | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, [T, H] in x's dtype. The twin is `rollout_kernels.moe_experts`.

    With `parts`: [S, T, H], whose sum over S is the result, in the order in which `add_rms_norm` adds; S is 1 or K.
    They are float32, or of a padded plan one part in x's dtype, rounded as the norm would. No other kernel may be
    launched between these launches, because each may start before its predecessor ends.

    Args:
        x_TH: bf16 or f16, contiguous.
        routing: the experts of each token, from `moe_route` or `norm_route`.
        gate_up: gate rows, then up rows, of all experts (2 halves); without a gate 1 half.
        down: the down projection of all experts.
        plan: from `moe_plan`.
        parts: return parts, for a consumer that adds them.
        glu: the activation of weights whose gate and up rows alternate; None: `activation`. The biases of the
            down projection are not added here.
        activation: of the gates, or of the values without a gate.
        limit: see `rollout_kernels.gated`.
    """
    how: dict[str, Any] = {"glu": glu, "activation": activation, "limit": limit}
    if isinstance(plan, WarpPlan):
        h_TKI = moe_gate_up(x_TH, routing.experts_TK, gate_up, plan.gate_up, **how)
        return moe_down(h_TKI, routing.experts_TK, routing.weights_TK, down, plan.down, parts=parts)
    experts, top_k = gate_up.values_ENK.shape[0], routing.experts_TK.shape[1]
    if isinstance(plan, PaddedPlan):
        assert how == {"glu": None, "activation": "silu", "limit": None}, "kernels for padded groups have SiLU only"
        programs, padded = plan.programs, pad_groups(routing.experts_TK, experts)
        x_RH = spread_rows(x_TH, padded, top_k)
        h_RI = gluon_experts.padded_gate_up(x_RH, padded, gate_up.values_ENK, programs=programs)
        del x_RH  # its memory takes the outputs
        out_RH, scales_RS = gluon_experts.padded_down(h_RI, padded, down.values_ENK, programs=programs)
        out_TH = gather_sum(out_RH, scales_RS, padded, routing.weights_TK, x_TH.dtype)
        return out_TH[None] if parts else out_TH
    groups = group_pairs(routing.experts_TK, experts, plan.tile_rows)
    h_PI = grouped_gate_up(x_TH, groups, gate_up, top_k, plan.gate_up, **how)
    parts_KTH = grouped_down(h_PI, groups, routing.weights_TK, down, plan.down)
    return parts_KTH if parts else combine(parts_KTH, x_TH.dtype)


def default_entry(shape: MoEShape, format: Format) -> Entry:
    """Plans for a shape that was not measured: what was best for most measured shapes."""
    # The warp path reads an expert's weights once for each token; past a few tokens that costs more than grouping.
    most_warp = 4 if format == "plain" else 8
    bands: list[tuple[int, Plan]] = [(most_warp, _default_warp(format))]
    for tile_rows in (16, 32, 64):
        # Tiles are so large that the tokens of an expert mostly fit in one.
        bands.append(
            (
                max(most_warp + 1, tile_rows * shape.experts // (2 * shape.top_k)),
                _default_grouped(shape, format, tile_rows),
            )
        )
    bands.append((1 << 30, _default_grouped(shape, format, 128)))
    return Entry(tuple(bands), _default_grouped(shape, format, 16))


def _default_warp(format: Format) -> WarpPlan:
    at_once = 8 if format == "plain" else 4
    return WarpPlan(WarpConfig(at_once=at_once), WarpConfig(at_once=8 if format == "plain" else 4))


def _default_grouped(shape: MoEShape, format: Format, tile_rows: int) -> GroupedPlan:
    element_bytes = 2 if format == "plain" else 1
    tall = tile_rows >= 64
    block_k = 64 if format == "plain" else 128
    config = GroupedConfig(
        block_n=128 if tall and format == "plain" else 64,
        block_k=block_k,
        num_warps=8 if tall else 4,
        num_stages=3 if tall else 4,
    )
    # The copy engine needs rows whose length is a multiple of 16 bytes.
    gate_up = replace(config, bulk=shape.hidden * element_bytes % 16 == 0)
    return GroupedPlan(gate_up, replace(config, bulk=shape.inner * element_bytes % 16 == 0), tile_rows)


@lru_cache(maxsize=1)
def measured_table() -> dict[tuple[MoEShape, Format], Entry]:
    """The table that comes with the package."""
    text = files("rollout_kernels.moe").joinpath("table.json").read_text(encoding="utf-8")
    return read_table(json.loads(text))


def read_table(document: dict[str, Any]) -> dict[tuple[MoEShape, Format], Entry]:
    """The table from a document that `write_table` made."""
    table: dict[tuple[MoEShape, Format], Entry] = {}
    for row in document["entries"]:
        bands = tuple((band["tokens"], _plan_from(band["plan"])) for band in row["bands"])
        assert [most for most, _ in bands] == sorted({most for most, _ in bands}), "bands in rising order"
        table[MoEShape(**row["shape"]), row["format"]] = Entry(bands, _plan_from(row["deterministic"]))
    return table


def write_table(table: dict[tuple[MoEShape, Format], Entry], measured: dict[str, Any]) -> dict[str, Any]:
    """The table as a JSON document; `measured` says on which device and when it was measured."""
    entries = [
        {
            "shape": asdict(shape),
            "format": format,
            "bands": [{"tokens": most, "plan": asdict(plan)} for most, plan in entry.bands],
            "deterministic": asdict(entry.deterministic),
        }
        for (shape, format), entry in table.items()
    ]
    return {"measured": measured, "entries": entries}


def _plan_from(row: dict[str, Any]) -> Plan:
    if row["path"] == "warp":
        return WarpPlan(WarpConfig(**row["gate_up"]), WarpConfig(**row["down"]))
    return GroupedPlan(GroupedConfig(**row["gate_up"]), GroupedConfig(**row["down"]), row["tile_rows"])
