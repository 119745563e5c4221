"""Which kernels a layer of experts takes, and the layer itself: one call, nothing read on the host, a fixed grid.

The choice comes from `table.json`, which `scripts/tune/moe.py` writes from measurements: for a shape and a format, the
path and the configurations up to a number of tokens. It is made once, when a step is captured; nothing is tuned while
serving. Beside the fast bands an entry has one deterministic plan for any number of tokens, so that a token's sums have
one order whatever the batch. A shape that is not in the table takes a plan that fits its size, and says so once.

    warp       moe_gate_up, moe_down                                    two launches
    grouped    group_pairs, grouped_gate_up, grouped_down [, combine]   three or four

Legend: T tokens, E experts, K experts a token, H hidden, S parts.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import torch

from rollout_kernels.moe.formats import ExpertWeights, Format
from rollout_kernels.moe.triton_group_pairs import group_pairs
from rollout_kernels.moe.triton_grouped_experts import GroupedConfig, combine, grouped_down, grouped_gate_up
from rollout_kernels.moe.triton_router import Routing
from rollout_kernels.moe.triton_warp_experts import WarpConfig, moe_down, moe_gate_up


@dataclass(frozen=True, slots=True)
class MoEShape:
    """What the table is keyed by, beside the format."""

    experts: int
    top_k: int
    hidden: int
    inner: int


@dataclass(frozen=True, slots=True)
class WarpPlan:
    """Organised by output."""

    gate_up: WarpConfig
    down: WarpConfig
    path: Literal["warp"] = "warp"


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """Organised by expert, in tiles of `tile_rows` tokens."""

    gate_up: GroupedConfig
    down: GroupedConfig
    tile_rows: int = 16
    path: Literal["grouped"] = "grouped"


Plan = WarpPlan | GroupedPlan


@dataclass(frozen=True, slots=True)
class Entry:
    """Plans for a shape and format: `bands` with the number of tokens up to which each is taken, and one for any."""

    bands: tuple[tuple[int, Plan], ...]
    deterministic: Plan

    def plan(self, tokens: int, deterministic: bool) -> Plan:
        """The plan for a number of tokens; past the last band, the last."""
        if deterministic:
            return self.deterministic
        return next((plan for most, plan in self.bands if tokens <= most), self.bands[-1][1])


def moe_plan(shape: MoEShape, format: Format, dtype: torch.dtype, tokens: int, *, deterministic: bool = False) -> Plan:
    """The plan for `tokens` tokens with weights in `format` and activations in `dtype`."""
    if format == "mxfp8" and dtype == torch.float16:
        # The tensor cores have no room for e8m0 scales in f16.
        return _default_warp(format)
    return table_entry(shape, format).plan(tokens, deterministic)


def table_entry(shape: MoEShape, format: Format) -> Entry:
    """All plans for a shape and format."""
    return measured_table().get((shape, format)) or _unmeasured(shape, format)


@lru_cache(maxsize=64)
def _unmeasured(shape: MoEShape, format: Format) -> Entry:
    """An entry for a shape that is not in the table; warns, once for each since the result is kept."""
    message = f"no measured plan for {shape} in {format}: taking one for its size; scripts/tune/moe.py measures it"
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
) -> torch.Tensor:
    """The weighted sum of each token's experts, [T, H] in x's dtype.

    With `parts`: float32 [S, T, H] whose sum over S that is, in the order in which `add_rms_norm` adds; S is 1 or K.
    The launches must follow each other: each may begin before the one before has ended.
    """
    if isinstance(plan, WarpPlan):
        h_TKI = moe_gate_up(x_TH, routing.experts_TK, gate_up, plan.gate_up)
        return moe_down(h_TKI, routing.experts_TK, routing.weights_TK, down, plan.down, parts=parts)
    experts, top_k = gate_up.values_ENK.shape[0], routing.experts_TK.shape[1]
    groups = group_pairs(routing.experts_TK, experts, plan.tile_rows)
    h_PI = grouped_gate_up(x_TH, groups, gate_up, top_k, plan.gate_up)
    parts_KTH = grouped_down(h_PI, groups, routing.weights_TK, down, plan.down)
    return parts_KTH if parts else combine(parts_KTH, x_TH.dtype)


def default_entry(shape: MoEShape, format: Format) -> Entry:
    """Plans for a shape that nobody measured: what most measured shapes came to."""
    # An expert of few rows is re-read from the cache for each token; past some tokens that costs more than grouping.
    most_warp = 4 if format == "plain" else 8
    bands: list[tuple[int, Plan]] = [(most_warp, _default_warp(format))]
    for tile_rows in (16, 32, 64):
        # Tiles are chosen so that an expert's tokens mostly fit in one.
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
    # The copy engine takes rows of a multiple of 16 bytes.
    gate_up = replace(config, bulk=shape.hidden * element_bytes % 16 == 0)
    return GroupedPlan(gate_up, replace(config, bulk=shape.inner * element_bytes % 16 == 0), tile_rows)


@lru_cache(maxsize=1)
def measured_table() -> dict[tuple[MoEShape, Format], Entry]:
    """The table in the package."""
    text = files("rollout_kernels.moe").joinpath("table.json").read_text(encoding="utf-8")
    return read_table(json.loads(text))


def read_table(document: dict[str, Any]) -> dict[tuple[MoEShape, Format], Entry]:
    """The table from what `write_table` made."""
    table: dict[tuple[MoEShape, Format], Entry] = {}
    for row in document["entries"]:
        bands = tuple((band["tokens"], _plan_from(band["plan"])) for band in row["bands"])
        assert [most for most, _ in bands] == sorted({most for most, _ in bands}), "bands in rising order"
        table[MoEShape(**row["shape"]), row["format"]] = Entry(bands, _plan_from(row["deterministic"]))
    return table


def write_table(table: dict[tuple[MoEShape, Format], Entry], measured: dict[str, Any]) -> dict[str, Any]:
    """The table as JSON, with what it was `measured` on."""
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
