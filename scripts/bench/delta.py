"""Times the kernels of a linear-attention layer in a decode step on a CUDA machine: convolution, rule, gated norm.

    PYTHONPATH=.:kernels python -m scripts.bench.delta --shapes qwen3.5-27b --rows 128 --tiles --out FILE

Each kernel is captured in a CUDA graph that goes through the states of several layers, so that no state is read from
the L2 cache. The floor is the bytes that a kernel must move, over the bandwidth at which a kernel of the same run reads
and writes memory in place. With `--tiles` the rule is also timed in other tiles than its own; each is compared with the
torch twin once.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.delta import Spans, rule, triton_conv, triton_rule
from rollout_kernels.delta.triton_rule import StepTile

from rollout.models.spec import DeltaNetSpec
from scripts.bench.cuda_timing import graph_us, read_bandwidth
from scripts.bench.output import write_results
from scripts.bench.shapes import SHAPES, model_config, model_spec

_STATE_BYTES = 2 << 30  # of all layers together, many times the L2
_VALUES, _WARPS = (8, 16, 32, 64, 128), (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's inputs of a decode step, and its states."""

    inputs_TC: torch.Tensor
    mixed_TC: torch.Tensor
    z_THV: torch.Tensor
    b_TH: torch.Tensor
    a_TH: torch.Tensor
    conv_NCW: torch.Tensor
    recurrent_NHKV: torch.Tensor


def mixer_of(shape: str) -> DeltaNetSpec:
    """The linear attention of a shape."""
    mixers = [layer.mixer for layer in model_spec(shape).layers]
    return next(mixer for mixer in mixers if isinstance(mixer, DeltaNetSpec))


def make_layer(spec: DeltaNetSpec, rows: int) -> Layer:
    """Random inputs and states."""
    q, k, v, z, b, a = spec.input_widths
    inputs_TN = torch.randn(rows, sum(spec.input_widths), device="cuda", dtype=torch.bfloat16)
    inputs_TC, z_TV, b_TH, a_TH = inputs_TN.split((q + k + v, z, b, a), dim=1)
    states = rows + 1, spec.value_heads, spec.key_dim, spec.value_dim
    return Layer(
        inputs_TC,
        torch.randn(rows, spec.mixed, device="cuda", dtype=torch.bfloat16),
        z_TV.unflatten(1, (spec.value_heads, spec.value_dim)),
        b_TH,
        a_TH,
        torch.randn(rows + 1, spec.mixed, spec.conv - 1, device="cuda", dtype=torch.bfloat16),
        torch.randn(*states, device="cuda"),
    )


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a kernel that adds to a large tensor in place."""
    data = torch.zeros(1 << 29, device="cuda")
    return 2 * data.nbytes / graph_us(lambda: data.add_(1.0)) * 1e6


def measure(shape: str, rows: int, read: float, copy: float, tiles: bool) -> list[dict[str, Any]]:
    """A row for each kernel, and for each tile of the rule."""
    spec = mixer_of(shape)
    first = make_layer(spec, rows)
    layers = [first, *(make_layer(spec, rows) for _ in range(_STATE_BYTES // first.recurrent_NHKV.nbytes))]
    spans = Spans(torch.arange(1, rows + 1, device="cuda"), torch.full((rows,), 1000, device="cuda"))
    weight_CW = torch.randn(spec.mixed, spec.conv, device="cuda", dtype=torch.bfloat16)
    a_log_H, dt_bias_H = torch.rand(spec.value_heads, device="cuda"), torch.rand(spec.value_heads, device="cuda")
    norm_V = torch.ones(spec.value_dim, device="cuda", dtype=torch.bfloat16)
    out_THV = torch.randn(rows, spec.value_heads, spec.value_dim, device="cuda", dtype=torch.bfloat16)

    def conv(layer: Layer) -> None:
        triton_conv.short_conv(layer.inputs_TC, weight_CW, layer.conv_NCW, spans)

    def step(layer: Layer, tile: StepTile | None = None) -> torch.Tensor:
        gates = layer.b_TH, layer.a_TH, a_log_H, dt_bias_H
        return triton_rule.gated_delta(layer.mixed_TC, *gates, layer.recurrent_NHKV, spans, spec.beta_scale, tile)

    def norm(layer: Layer) -> None:
        triton_rule.gated_norm(out_THV, layer.z_THV, norm_V, spec.eps)

    state_bytes = 2 * (first.recurrent_NHKV[1:].nbytes)
    conv_bytes = 2 * first.conv_NCW[1:].nbytes + 2 * first.mixed_TC.nbytes
    moved: list[tuple[str, Callable[..., Any], int]] = [
        ("conv", conv, conv_bytes),
        ("rule", step, state_bytes + first.mixed_TC.nbytes + out_THV.nbytes),
        ("norm", norm, 3 * out_THV.nbytes),
    ]
    if tiles:
        for values, warps in itertools.product(_VALUES, _WARPS):
            if values <= spec.value_dim and 16 <= values * spec.key_dim // (32 * warps) <= 256:
                changed = partial(step, tile=StepTile(values, warps))
                check(first, changed, a_log_H, dt_bias_H, spans, spec)
                moved.append((f"rule, {values} values, {warps} warps", changed, moved[1][2]))
    found = []
    for name, work, nbytes in moved:
        took = graph_us(*(partial(work, layer) for layer in layers))
        row = {
            "shape": shape,
            "rows": rows,
            "kernel": name,
            "us": took,
            "floor_us": nbytes / copy * 1e6,
            "read_floor_us": nbytes / read * 1e6,
            "over_floor": took / (nbytes / copy * 1e6),
        }
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        found.append(row)
    return found


def check(
    layer: Layer,
    step: Callable[[Layer], torch.Tensor],
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    spans: Spans,
    spec: DeltaNetSpec,
) -> None:
    """Compare the outputs and states of a few rows with the torch twin on the CPU."""
    rows = slice(0, 3)
    before = layer.recurrent_NHKV.clone()
    got = step(layer)[rows].float().cpu()
    mixed, b, a = (x[rows].float().cpu() for x in (layer.mixed_TC, layer.b_TH, layer.a_TH))
    state, few = before[:4].cpu(), Spans(spans.places_B[rows].cpu(), spans.positions_T[rows].cpu())
    exact = rule.gated_delta(mixed, b, a, a_log_H.cpu(), dt_bias_H.cpu(), state, few, spec.beta_scale)
    after = layer.recurrent_NHKV[1:4].cpu()
    layer.recurrent_NHKV.copy_(before)
    for name, ours, theirs in (("outputs", got, exact), ("states", after, state[1:])):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        assert error < 5e-3, f"{name} of {step} are wrong by {error}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    linear = [shape for shape in SHAPES if "linear_num_value_heads" in model_config(shape)]
    parser.add_argument("--shapes", nargs="+", choices=linear, default=linear)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tiles", action="store_true", help="also time other tiles of the rule")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    read, copy = read_bandwidth(), copy_bandwidth()
    print(f"read {read / 1e12:.2f} TB/s, read and written {copy / 1e12:.2f} TB/s", flush=True)
    found = []
    for shape in args.shapes:
        for rows in args.rows:
            found += measure(shape, rows, read, copy, args.tiles)
            write_results(args.out, found, read_tbps=read / 1e12, copy_tbps=copy / 1e12)


if __name__ == "__main__":
    main()
