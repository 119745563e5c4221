"""Profiles a decode step on a CUDA machine: the kernels of a captured step by name.

    PYTHONPATH=.:kernels python -m scripts.bench.profile_decode --shape qwen3-8b --rows 1 128 --out FILE

For each number of rows it prints microseconds per step and launches per step of every kernel. Overlapping launches
count twice, so the sum may exceed the span. Then it prints the timeline of one layer: for each kernel the gap after the
end of all its predecessors, its duration, the time that it adds, and its floor: the bytes of its weights over the read
bandwidth of this run. The floors do not include KV and activations.
"""

import argparse
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rollout.config import EngineSettings, Settings
from rollout.engine.build import build_engine, local_links
from rollout.engine.device.streams import make_device
from rollout.engine.loop import Engine
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request, SamplingParams
from rollout.engine.messages.to_engine import Cancel, Submit
from rollout.models.decoder import Decoder, DecoderLayer
from rollout.models.language_model import native
from rollout.models.layers import Attention, DenseFeedForward, SparseFeedForward
from rollout.process.progress import stage
from scripts.bench.cuda_timing import read_bandwidth
from scripts.bench.layer_timeline import KernelTime, layer_timeline
from scripts.bench.output import write_results
from scripts.bench.peers.ours_engine import load_random
from scripts.bench.profiled_steps import profile_steps
from scripts.bench.shapes import SHAPES

_STEPS = 10
_ATTENTION = "_decode_kernel"
_PRODUCTS = ("_linear_kernel", "_stream_kernel", "_gemv_kernel", "nvjet")


def weight_bytes(model: Decoder, distinct: float) -> list[tuple[tuple[str, ...], float]]:
    """The weights that a layer reads from its attention to the next layer's: kernels and bytes, in order.

    A layer of experts reads `distinct` experts.
    """
    layer = cast(DecoderLayer, model.layers[0])
    attention, block = layer.mixer, layer.feed_forward
    assert isinstance(attention, Attention)
    o = (_PRODUCTS, attention.o_proj.weight.nbytes)
    qkv = (_PRODUCTS, attention.qkv_proj.weight.nbytes)
    if isinstance(block, DenseFeedForward):
        return [o, (_PRODUCTS, block.gate_up_proj.weight.nbytes), (_PRODUCTS, block.down_proj.weight.nbytes), qkv]
    assert isinstance(block, SparseFeedForward)
    share = distinct / block.spec.experts
    router = (("_norm_router_kernel", *_PRODUCTS), block.router.nbytes)
    experts = [(("_gate_up_kernel",), block.gate_up.nbytes * share), (("_down_kernel",), block.down.nbytes * share)]
    return [o, router, *experts, qkv]


def with_floors(
    timeline: list[KernelTime], weights: list[tuple[tuple[str, ...], float]], bandwidth: float
) -> list[dict[str, str | float]]:
    """The timeline; each kernel with the time to read its weights."""
    left, rows = list(weights), []
    for kernel in timeline:
        reads = left.pop(0)[1] if left and kernel.name.startswith(left[0][0]) else 0.0
        rows.append({**dataclasses.asdict(kernel), "floor_us": reads / bandwidth * 1e6})
    return rows


def profile_rows(engine: Engine, rows: int, prompt: int, bandwidth: float) -> dict[str, Any]:
    """Profile some steady steps of `rows` rows and print them; returns the timeline of a layer."""
    rng = np.random.default_rng(0)
    for i in range(rows):
        tokens = Prompt.of_tokens(rng.integers(0, 150_000, prompt).astype(np.int32))
        engine.inbox.put(Submit(Request(("p", f"{rows}/{i}"), tokens, 400, sampling=SamplingParams(seed=i))))
    for _ in range(60):
        engine.tick()
    engine.gate.pause(0)
    while engine.pipeline.in_flight:
        engine.tick()
    engine.gate.resume(0)

    def some_steps() -> None:
        for _ in range(_STEPS):
            engine.tick()
        engine.gate.pause(0)
        while engine.pipeline.in_flight:
            engine.tick()
        engine.gate.resume(0)

    events = profile_steps(some_steps)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in events:
        spent[event["name"][:70]].append(event["dur"])
    span = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
    print(f"\n{rows} rows: {span / _STEPS:.0f} us a step")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:16]:
        print(f"{sum(times) / _STEPS:9.1f} us {len(times) / _STEPS:7.1f} x {name}")
    graphs = engine.executor.graphs
    chosen = graphs.chosen.get(graphs.sizes.size_for(rows), [])
    distinct = statistics.mean(experts_TK[:rows].unique().numel() for experts_TK in chosen) if chosen else 0.0
    measured: dict[str, Any] = {"rows": rows, "step_us": span / _STEPS, "distinct_experts": distinct}
    model = native(engine.executor.step.model)
    if len({(type(layer.mixer), type(layer.feed_forward)) for layer in model.spec.layers}) == 1:
        timeline = layer_timeline(events, _STEPS, _ATTENTION)
        layer = with_floors(timeline, weight_bytes(model, distinct), bandwidth)
        layer_us = sum(kernel.adds_us for kernel in timeline)
        print(f"one layer, {layer_us:.1f} us: gap, runs, adds, floor of its weights")
        for kernel in layer:
            print("{gap_us:7.2f} {duration_us:7.2f} {adds_us:7.2f} {floor_us:7.2f}  {name:.60}".format_map(kernel))
        written = ("name", "adds_us", "floor_us")
        measured |= {"layer_us": layer_us, "layer": [{name: kernel[name] for name in written} for kernel in layer]}
    for i in range(rows):
        engine.inbox.put(Cancel(("p", f"{rows}/{i}")))
    while engine.busy or not engine.inbox.empty():
        engine.tick()
    return measured


def main(argv: Sequence[str] | None = None) -> None:
    """Profile each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="only the first layers of the shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--out", type=Path, help="JSON file for what each kernel of a layer adds, and its floor")
    args = parser.parse_args(argv)
    device = make_device("cuda")
    bandwidth = read_bandwidth()
    model = load_random(args.shape, device.torch_device, layers=args.layers).model
    settings = Settings(
        engine=EngineSettings(max_rows=max(args.rows), max_context_tokens=args.prompt + 512, kv_memory_fraction=0.5)
    )
    with stage("preparing decode steps") as advance:
        engine = build_engine(settings, device, model, local_links(settings, lambda events: None), progress=advance)
    measured: list[dict[str, Any]] = []
    for rows in args.rows:
        measured.append(
            {"shape": args.shape, "layers": args.layers, **profile_rows(engine, rows, args.prompt, bandwidth)}
        )
        if args.out is not None:
            write_results(args.out, measured, read_tbps=bandwidth / 1e12)


if __name__ == "__main__":
    main()
