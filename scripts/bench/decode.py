"""Measures our decode step in a steady state, and the floor set by memory bandwidth; one process, no peers.

    PYTHONPATH=.:kernels python -m scripts.bench.decode --shape qwen3-8b --rows 1 8 32 128 --out FILE

Random weights of the real shapes; prompts of 128 tokens, --new tokens each, temperature 1, log-probs returned. The time
of a step is the wall time between commits over the second half of the steps. The floor is (weights + KV read once) over
the bandwidth of a kernel that only reads, in the same run. `scripts.bench.compare_peers` measures the same from outside
of the engine, with peers.

With --routing each number of rows is measured without and then with expert records (`engine.routing`); `overhead_pct`
is the extra time of the second.

With --adapters 0 1 4 8 one engine with enough slots measures each number of rows with 0, 1, 4 and 8 adapters of rank 16
in all modules of dense layers. Rows use the adapters in turn; `overhead_pct` is the extra time over 0 adapters.

With --truncate each number of rows is measured without and then with top-k 50, top-p 0.95 and min-p 0.05 in all rows;
`overhead_pct` is the extra time of the second. Random weights give flat logits: nearly every token is a candidate.

--set NAME=VALUE changes a setting of the engine, such as weight_dtype=fp8_block, kv_dtype=fp8_e4m3 or
deterministic=true. The floor uses the dtypes of weights and KV.
"""

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rollout.engine.messages.requests import SamplingParams
from rollout.settings_sources import SettingsError
from scripts.bench.cuda_timing import read_bandwidth
from scripts.bench.output import write_results
from scripts.bench.peers.experiments import Row
from scripts.bench.peers.floors import step_floor_s
from scripts.bench.peers.job import Job
from scripts.bench.peers.ours_engine import ADAPTER_RANK, OursEngine, engine_settings
from scripts.bench.peers.workloads import uniform_work
from scripts.bench.shapes import SHAPES, StepBytes, model_config, step_bytes

_WARM_TOKENS = 8
_TRUNCATED = SamplingParams(top_k=50, top_p=0.95, min_p=0.05)


def step_needs(shape: str, changes: dict[str, str], layers: int = 0) -> StepBytes:
    """The least bytes that a step reads, with weights and KV in the dtypes of these settings."""
    asked = changes.get("weight_dtype", "auto")
    need = step_bytes(shape, layers=layers, format="plain" if asked in ("auto", "bf16") else asked)
    if changes.get("kv_dtype", "auto") != "auto":
        dim = model_config(shape)["head_dim"]
        windows = tuple((window, per_token * (dim + 4) // (2 * dim)) for window, per_token in need.windows)
        per_token = need.kv_per_token * (dim + 4) // (2 * dim)  # a scale for each head
        need = replace(need, kv_per_token=per_token, windows=windows)
    return need


def measure(engine: OursEngine, job: Job, rows: int, bandwidth: float | None, need: StepBytes) -> Row:
    """The steady decode step of `rows` rows. Without a bandwidth there is no floor."""
    for seed, new in enumerate((_WARM_TOKENS, job.new)):
        engine.generate(uniform_work(rows, job.prompt, new, engine.vocab, seed))
    steps = engine.last_steps()
    row = {
        "shape": job.shape,
        **({"layers": job.layers} if job.layers else {}),
        "rows": rows,
        **steps,
        "tokens_per_s": rows / steps["steady_ms"] * 1e3,
    }
    if bandwidth is not None:
        context = job.prompt + job.new * 3 // 4  # of the second half, on average
        chosen = steps.get("distinct_experts")
        floor_ms = step_floor_s(need, rows, rows * context, bandwidth, chosen) * 1e3
        row |= {"floor_ms": floor_ms, "over_floor": steps["steady_ms"] / floor_ms}
    return row


def overhead_pct(row: Row, plain: Row) -> dict[str, float]:
    """Extra time of a step over another one, percent."""
    return {name: (row[name] / plain[name] - 1) * 100 for name in ("steady_ms", "device_ms")}


def measure_all(
    job: Job,
    depth: int,
    bandwidth: float | None,
    changes: dict[str, str],
    routing: bool = False,
    truncate: bool = False,
    fallback: bool = False,
) -> tuple[list[Row], Row]:
    """A row of results for each number of rows, each with its own engine, and a sentence about it."""
    engine = OursEngine(job, depth, routing, changes=changes, fallback=fallback)
    facts = {**engine.facts(), "read_tbps": bandwidth / 1e12 if bandwidth else None, "settings": changes}
    print(json.dumps(facts), flush=True)
    results = []
    for rows in job.rows:
        row = measure(engine, job, rows, bandwidth, step_needs(job.shape, changes, job.layers))
        results.append(row | ({"routing": True} if routing else {}))
        print(json.dumps(results[-1]), flush=True)
        if truncate:
            plain, engine.sampling = results[-1], _TRUNCATED
            row = measure(engine, job, rows, bandwidth, step_needs(job.shape, changes, job.layers))
            results.append(row | {"truncated": True, "overhead_pct": overhead_pct(row, plain)})
            engine.sampling = SamplingParams()
            print(json.dumps(results[-1]), flush=True)
    engine.close()
    return results, facts


def measure_adapters(
    job: Job, depth: int, bandwidth: float | None, changes: dict[str, str], counts: list[int]
) -> tuple[list[Row], Row]:
    """Each number of rows with each number of adapters, by one engine."""
    engine = OursEngine(job, depth, adapters=max(counts), changes=changes)
    facts = {**engine.facts(), "read_tbps": bandwidth / 1e12 if bandwidth else None, "adapter_rank": ADAPTER_RANK}
    print(json.dumps(facts), flush=True)
    results: list[Row] = []
    for rows in job.rows:
        plain: Row | None = None
        for count in sorted(counts):
            engine.use_adapters = count
            row = measure(engine, job, rows, bandwidth, step_needs(job.shape, changes, job.layers)) | {
                "adapters": count
            }
            plain = row if count == 0 else plain
            if plain is not None and count:
                row["overhead_pct"] = overhead_pct(row, plain)
            results.append(row)
            print(json.dumps(row), flush=True)
    engine.close()
    return results, facts


def free_memory() -> None:
    """Release the memory of an engine for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="only the first ones of the shape; 0: all")
    parser.add_argument("--fallback", action="store_true", help="transformers' own code as the model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--depth", type=int, choices=(1, 2), default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--routing", action="store_true", help="measure without and with expert records")
    parser.add_argument("--truncate", action="store_true", help="measure without and with top-k, top-p and min-p")
    parser.add_argument("--adapters", type=int, nargs="+", help="adapters in use at once, 0 for none")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an engine setting; repeatable"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    changes = dict(change.partition("=")[::2] for change in args.set)
    job = Job(
        shape=args.shape,
        layers=args.layers,
        rows=tuple(args.rows),
        prompt=args.prompt,
        new=args.new,
        device=args.device,
    )
    try:
        engine_settings(job, args.depth, changes=changes)
    except SettingsError as error:
        parser.error(str(error))
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    bandwidth = read_bandwidth() if on_gpu else None
    if args.adapters:
        results, facts = measure_adapters(job, args.depth, bandwidth, changes, args.adapters)
    else:
        results, facts = measure_all(
            job, args.depth, bandwidth, changes, truncate=args.truncate, fallback=args.fallback
        )
    if args.routing:
        free_memory()
        routed, _ = measure_all(job, args.depth, bandwidth, changes, routing=True)
        for plain, row in zip(list(results), routed, strict=True):
            row["overhead_pct"] = overhead_pct(row, plain)
            print(json.dumps({"rows": row["rows"], "overhead_pct": row["overhead_pct"]}), flush=True)
        results += routed
    write_results(args.out, results, **facts)


if __name__ == "__main__":
    main()
