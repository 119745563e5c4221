"""Measures a layer of experts on a CUDA machine: each path and format, and the time to read its bytes.

    PYTHONPATH=.:kernels python -m scripts.bench.moe_kernels --out FILE [--shapes qwen3-30b-a3b]
        [--formats plain mxfp8] [--tokens 1 8 32] [--skew 1.5]

Microseconds per layer for each number of tokens, in a CUDA graph that rotates over 8 layers with new routing for each;
TB/s by distinct experts; errors against float64. The errors are compared with the exact result rounded to bf16, and
with sorting and grouped GEMMs that keep bf16 between their steps. vLLM's fused MoE is measured in the same run if it is
importable. Rows are printed and written at once; TB/s are only printed.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.moe.dispatch import MoEShape, run_experts
from rollout_kernels.moe.formats import FORMATS, Format
from rollout_kernels.moe.triton_router import moe_route

from scripts.bench.cuda_timing import graph_us
from scripts.bench.moe_layers import (
    SHAPES,
    Layer,
    Tokens,
    errors,
    exact,
    floor_us,
    make_layers,
    make_tokens,
    plans,
    read_bandwidth,
)
from scripts.bench.output import write_results

LAYERS = 8


def vllm_layer() -> Callable[[Layer, Tokens], torch.Tensor] | None:
    """The fused MoE of vLLM on plain weights, or None without vLLM."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
        from vllm.platforms import current_platform
    except ImportError as error:
        print(f"no vLLM here: {error}", flush=True)
        return None
    current_platform.import_kernels()

    def run(layer: Layer, tokens: Tokens) -> torch.Tensor:
        routing = tokens.routing
        weights = (layer.gate_up.values_ENK, layer.down.values_ENK)
        with torch.inference_mode(), set_current_vllm_config(VllmConfig()):
            return fused_experts(tokens.x_TH, *weights, routing.weights_TK, routing.experts_TK)

    return run


def measure(
    shape: MoEShape, format: Format, layers: list[Layer], tokens: int, skew: float, peer: Any, accurate: bool
) -> dict[str, Any]:
    """One row: times, bandwidth and errors for a number of tokens."""
    batches = [make_tokens(shape, tokens, seed=1000 * i + tokens, skew=skew) for i in range(len(layers))]
    distinct = sum(batch.distinct for batch in batches) / len(batches)
    layer_bytes = distinct * layers[0].bytes_per_expert
    paths: dict[str, dict[str, Any]] = {}
    row: dict[str, Any] = {
        "tokens": tokens,
        "distinct": distinct,
        "floor_us": floor_us(layers, batches),
        "paths": paths,
    }
    expected = exact(layers[0], batches[0]) if accurate else None
    if expected is not None:
        row["rounded"] = asdict(errors(expected.bfloat16(), expected))
        row["sorted_gemm"] = asdict(errors(exact(layers[0], batches[0], rounded=True), expected))
    timed: dict[str, Callable[[Layer, Tokens], torch.Tensor]] = {
        name: lambda layer, batch, plan=plan: run_experts(batch.x_TH, batch.routing, layer.gate_up, layer.down, plan)
        for name, plan in plans(shape, format, tokens).items()
    }
    if peer is not None and format == "plain":
        timed["vllm"] = peer
    for name, run in timed.items():
        pairs = list(zip(layers, batches, strict=True)) * (4 if tokens <= 8 else 1)
        us = graph_us(*(lambda run=run, pair=pair: run(*pair) for pair in pairs))
        paths[name] = {"us": us, "tbps": layer_bytes / us / 1e6, "of_floor": row["floor_us"] / us}
        if expected is not None:
            paths[name]["errors"] = asdict(errors(run(layers[0], batches[0]), expected))
    return row


def measure_router(shape: MoEShape, tokens: int) -> float:
    """Microseconds of the router; its weights rotate over the layers."""
    routers = [torch.randn(shape.experts, shape.hidden, device="cuda").bfloat16() for _ in range(64)]
    x_TH = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
    return graph_us(*(lambda w=w: moe_route(x_TH, w, shape.top_k, True) for w in routers))


def line(name: str, format: str, row: dict[str, Any]) -> str:
    """A row for reading along."""
    paths = "  ".join(f"{path} {at['us']:.1f} us {at['tbps']:.2f} TB/s" for path, at in row["paths"].items())
    text = f"{name} {format} T {row['tokens']} distinct {row['distinct']:.1f} floor {row['floor_us']:.1f} us  {paths}"
    if "rounded" in row:
        text += "\n    relative error, 1 - cosine, largest difference:"
        rows = {"rounding": row["rounded"], "sorted GEMM": row["sorted_gemm"]}
        rows |= {path: at["errors"] for path, at in row["paths"].items()}
        for path, e in rows.items():
            text += f"\n    {path:14} {e['relative']:.3e} {1 - e['min_cosine']:.2e} {e['max_difference']:.6f}"
    return text


def summary(name: str, format: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row for the file: microseconds by path, and errors where they were computed."""
    sizes = {key: row[key] for key in ("tokens", "distinct", "floor_us")}
    found = {"shape": name, "format": format, **sizes, "us": {path: at["us"] for path, at in row["paths"].items()}}
    if "rounded" in row:
        errors_by = {key: row[key] for key in ("rounded", "sorted_gemm")}
        found["errors"] = errors_by | {path: at["errors"] for path, at in row["paths"].items()}
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b"], choices=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["plain", "fp8_block", "mxfp8"], choices=FORMATS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--accurate-at", type=int, nargs="*", default=[8, 32], help="numbers of tokens to check")
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    read_tbps = read_bandwidth() / 1e12
    router_us: dict[str, dict[int, float]] = {}
    rows: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, read bandwidth {read_tbps:.2f} TB/s", flush=True)
    peer = vllm_layer()
    for name in args.shapes:
        shape = SHAPES[name]
        router_us[name] = {t: measure_router(shape, t) for t in args.tokens}
        print(f"{name} router us: {router_us[name]}", flush=True)
        for format in args.formats:
            layers = make_layers(shape, format, LAYERS)
            for tokens in args.tokens:
                row = measure(shape, format, layers, tokens, args.skew, peer, tokens in args.accurate_at)
                rows.append(summary(name, format, row))
                print(line(name, format, row), flush=True)
                write_results(args.out, rows, read_tbps=read_tbps, router_us=router_us, skew=args.skew)
            del layers
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
