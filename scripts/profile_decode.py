"""Where the time of a decode step goes: kernels of a captured step by name, from the profiler, on a CUDA machine.

    PYTHONPATH=.:kernels python scripts/profile_decode.py --shape qwen3-8b --rows 1 128

Prints, for each number of rows, microseconds a step and launches a step of every kernel, and what of the step's span no
kernel covers. Overlapping launches count twice, so the sum may exceed the span.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from queue import SimpleQueue

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from rollout.bench.peers.ours_engine import load_random
from rollout.bench.shapes import SHAPES
from rollout.config import EngineSettings, Settings
from rollout.engine.build import build_engine
from rollout.engine.device import make_device
from rollout.engine.engine import Engine
from rollout.engine.types import Cancel, Request, SamplingParams, Submit
from rollout.progress import stage

_STEPS = 10


def profile_rows(engine: Engine, rows: int, prompt: int) -> None:
    """Profile some steady steps of `rows` rows and print them."""
    rng = np.random.default_rng(0)
    for i in range(rows):
        tokens = rng.integers(0, 150_000, prompt).astype(np.int32)
        engine.inbox.put(Submit(Request(("p", f"{rows}/{i}"), tokens, 400, sampling=SamplingParams(seed=i))))
    for _ in range(60):
        engine.tick()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            engine.tick()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for event in events:
        spent[event.name[:70]].append(event.time_range.elapsed_us())
    first = min(event.time_range.start for event in events)
    span = max(event.time_range.end for event in events) - first
    print(f"\n{rows} rows: {span / _STEPS:.0f} us a step")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:16]:
        print(f"{sum(times) / _STEPS:9.1f} us {len(times) / _STEPS:7.1f} x {name}")
    print(f"{sum(map(sum, spent.values())) / _STEPS:9.1f} us in kernels")
    for i in range(rows):
        engine.inbox.put(Cancel(("p", f"{rows}/{i}")))
    while engine.busy or not engine.inbox.empty():
        engine.tick()


def main() -> None:
    """Profile each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--prompt", type=int, default=128)
    args = parser.parse_args()
    device = make_device("cuda")
    model = load_random(args.shape, device.torch_device).model
    settings = Settings(
        engine=EngineSettings(
            max_rows=max(args.rows), max_context_tokens=args.prompt + 512, kv_memory_fraction=0.5, fused_experts=True
        )
    )
    with stage("preparing decode steps") as advance:
        engine = build_engine(settings, device, model, SimpleQueue(), lambda events: None, progress=advance)
    for rows in args.rows:
        profile_rows(engine, rows, args.prompt)


if __name__ == "__main__":
    main()
