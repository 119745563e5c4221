"""Milliseconds of a decode step through the whole engine, beside the floor that memory sets.

    PYTHONPATH=.:kernels python scripts/bench_decode.py --shape qwen3-8b --rows 1 8 32 128 --out FILE

Random weights of the real shapes; prompts of 128 tokens, --new tokens each, temperature 1. A step's time is wall time
between commits, median over the second half; the floor is (weights + KV read once) over the read bandwidth that a sum
reaches in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from rollout.config import EngineSettings, ModelSettings, Settings
from rollout.engine.build import build_engine
from rollout.engine.device import make_device
from rollout.engine.engine import Engine
from rollout.engine.types import Request, SamplingParams, Submit
from rollout.models import load_model

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}


def read_bandwidth() -> float:
    """Bytes per second of a sum over 4 GiB."""
    data = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        data.sum()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return data.numel() * 4 / statistics.median(times)


def load(shape: str, folder: Path) -> Any:
    """The model with random weights."""
    config = {"tie_word_embeddings": False, **_QWEN3, **SHAPES[shape]}
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(ModelSettings(path=str(folder), load_format="random"), torch.device("cuda")).model


def run_rows(engine: Engine, rows: int, prompt: int, new: int, name: str) -> list[tuple[float, float]]:
    """Generate; returns (moment of the commit, length of the step on the device) of the full steps, seconds."""
    rng = np.random.default_rng(rows)
    engine.meter._recent.clear()
    for i in range(rows):
        tokens = rng.integers(0, 150_000, prompt).astype(np.int32)
        engine.inbox.put(Submit(Request((name, str(i)), tokens, new, sampling=SamplingParams(seed=i))))
    engine.tick()
    while engine.busy:
        engine.tick()
    steps = [step for step in engine.meter.recent_steps() if step.kind == "decode" and step.rows == rows]
    return [(step.committed_at_s or 0.0, step.end_s - step.start_s, step.start_s) for step in steps]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--depth", type=int, choices=(1, 2), default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        model = load(args.shape, Path(folder))
        loaded_s = time.perf_counter() - began_s
    weights = sum(parameter.nbytes for parameter in model.parameters())
    weights -= 0 if model.spec.tied else model.embed.nbytes  # a row of the embedding is read, not all of it
    most = max(args.rows)
    context = args.prompt + args.new + 16
    settings = Settings(
        engine=EngineSettings(
            max_rows=most, max_context_tokens=context, kv_memory_fraction=0.7, pipeline_depth=args.depth
        )
    )
    settings = settings.model_copy(update={"metrics": settings.metrics.model_copy(update={"timeline_steps": 2000})})
    began_s = time.perf_counter()
    engine = build_engine(settings, make_device("cuda"), model, SimpleQueue(), lambda events: None)
    captured_s = time.perf_counter() - began_s
    results = []
    for rows in args.rows:
        run_rows(engine, rows, args.prompt, 8, f"warm{rows}")
        steps = run_rows(engine, rows, args.prompt, args.new, f"rows{rows}")
        half = steps[len(steps) // 2 :]
        wall_ms = (half[-1][0] - half[0][0]) / (len(half) - 1) * 1e3
        kv = model.spec.kv_bytes_per_token(torch.bfloat16) * rows * (args.prompt + args.new * 3 // 4)
        floor_ms = (weights + kv) / bandwidth * 1e3
        results.append(
            {
                "shape": args.shape,
                "rows": rows,
                "depth": args.depth,
                "ms": wall_ms,
                "device_ms": statistics.median(step[1] for step in half) * 1e3,
                "idle_ms": statistics.median(b[2] - (a[2] + a[1]) for a, b in zip(half, half[1:], strict=False)) * 1e3,
                "floor_ms": floor_ms,
                "over_floor": wall_ms / floor_ms,
                "tokens_per_s": rows / wall_ms * 1e3,
            }
        )
        print(json.dumps(results[-1]), flush=True)
    engine.check_integrity()
    facts = {
        "read_tbps": bandwidth / 1e12,
        "load_s": loaded_s,
        "capture_s": captured_s,
        "gpu": torch.cuda.get_device_name(),
    }
    print(json.dumps(facts))
    when = time.strftime("%Y-%m-%d")
    args.out.write_text(json.dumps({"date": when, **facts, "torch": torch.__version__, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
