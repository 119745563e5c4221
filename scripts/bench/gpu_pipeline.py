"""Compares the pipeline with the blocking loop: the speed-up predicted from the parts of a step, and the measured one.

    PYTHONPATH=.:kernels python -m scripts.bench.gpu_pipeline --out scripts/bench/results/pipeline_h200.json

For every shape and number of rows, through the whole engine with random weights, temperature 1, log-probs returned:

    parts      forward, sampling and bookkeeping of a step, each measured alone, in the middle of the completion
    predicted  the cost model's speed-up from these parts and the length of the completions
    observed   wall time of all decode steps at depth 1 over depth 2, for the same tokens, in turns
    active     share of the time in which the device runs a step, by the meter; for other steps of the same run also by
               the profiler (from first to last kernel), and the share of the kernels alone

All rows end together by a stop token (the first run finds a suitable one), so the pipeline pays for its zombie step.
`--device cpu --shapes toy` tries it out.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.config import EngineSettings, ModelSettings, Settings
from rollout.engine.device.streams import make_device
from rollout.engine.messages.requests import SamplingParams
from rollout.metrics.idle import IDLE_CAUSES
from rollout.metrics.step_timing import StepTiming
from rollout.models import load_model
from scripts.bench.cost_model import StepParts, points, zombie_share
from scripts.bench.driver import Driver, random_prompt
from scripts.bench.output import print_table, spread, write_results
from scripts.bench.profiled_steps import active_share, profile_steps, summarise
from scripts.bench.shapes import SHAPES, write_checkpoint
from scripts.bench.step_parts import DeviceParts, measure_device_parts, sleeping_steps

_SPARE = 64  # tokens of context beyond the longest completion: for steps that are run again and again


@dataclass(frozen=True)
class Plan:
    """What to measure of one shape."""

    prompt: int
    new: int
    turns: int
    profiled: int


@dataclass(frozen=True)
class Run:
    """One run of all rows: its steady decode steps."""

    step_s: float  # wall time a step that brought tokens
    steps: int
    zombie_steps: int
    records: list[StepTiming]
    idle_pct: dict[str, float]

    @property
    def active_pct(self) -> float:
        """By the meter's spans."""
        return 100 * active_share(self.records)


class Bench:
    """One shape's engine and the rows that run in it."""

    def __init__(self, shape: str, device: str, rows: list[int], plan: Plan) -> None:
        self.plan = plan
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(shape, Path(folder))
            settings = ModelSettings(path=str(path), load_format="random", device=device)
            model = load_model(settings, torch.device(device)).model
        self.vocab = model.spec.vocab
        most = max(rows)
        engine = EngineSettings(
            max_rows=most,
            max_context_tokens=plan.prompt + plan.new + _SPARE,
            prefill_chunk_tokens=most * plan.prompt,  # all rows begin to decode in the same step
            prefix_cache=False,
            kv_memory_fraction=0.5,
            kv_memory_max_gib=32,
        )
        made = Settings(engine=engine)
        self.driver = Driver(made, make_device(device), model)
        gc.collect()
        gc.freeze()  # no garbage collection of these objects during a run

    def submit(self, rows: int, max_tokens: int, stops: list[int] | None = None) -> None:
        """Submit the rows: the same prompts and seeds every time."""
        for i in range(rows):
            prompt = random_prompt(self.vocab, self.plan.prompt, i)
            stop_ids = () if stops is None else (stops[i],)
            self.driver.submit(f"r{i}", prompt, max_tokens, SamplingParams(seed=i), stop_ids)

    def run(self, rows: int, depth: int, max_tokens: int, stops: list[int] | None = None) -> Run:
        """Run all rows to their end; returns the wall time of the steps in which all of them decode."""
        engine, meter = self.driver.engine, self.driver.engine.meter
        self.driver.completions.clear()
        self.driver.depth(depth)
        self.submit(rows, max_tokens, stops)
        gc.collect()
        before, began_s, idle_s = meter.steps, time.perf_counter(), meter.idle_seconds()
        self.driver.finish()
        ended_s = time.perf_counter()
        ended_idle_s = meter.idle_seconds(ended_s)
        idle_pct = {cause: 100 * (ended_idle_s[cause] - idle_s[cause]) / (ended_s - began_s) for cause in IDLE_CAUSES}
        records = [r for r in meter.recent_steps()[-(meter.steps - before) :] if r.kind == "decode" and r.rows == rows]
        steady = records[1:]
        zombies = sum(record.zombie_rows == record.rows for record in steady)
        first_s = records[0].committed_at_s
        assert first_s is not None and engine.pipeline.in_flight == 0
        steps = len(steady) - zombies
        return Run((ended_s - first_s) / steps, steps, zombies, steady, idle_pct)

    def until_half(self, rows: int) -> None:
        """All rows half-way through their completions, paused."""
        self.driver.completions.clear()
        self.driver.depth(2)
        self.submit(rows, self.plan.new)
        roster = self.driver.engine.roster
        half = self.plan.prompt + self.plan.new // 2
        self.driver.tick_until(lambda: len(roster.decoding) == rows and roster.decoding[0].kv.length >= half)
        self.driver.pause()

    def parts(self, rows: int) -> tuple[DeviceParts, float]:
        """The device's parts of a step half-way, and the bookkeeping of the blocking loop."""
        self.until_half(rows)
        device = measure_device_parts(self.driver.engine)
        self.driver.drop_all()
        with sleeping_steps(self.driver.engine, device.forward_s + device.sampling_s) as asleep_s:
            loops = [self.run(rows, 1, self.plan.new).step_s for _ in range(min(self.plan.turns, 2))]
        return device, statistics.median(loops) - asleep_s

    def profile(self, rows: int, depth: int) -> dict[str, float]:
        """The meter and the profiler over the same steps."""
        driver, meter = self.driver, self.driver.engine.meter
        self.until_half(rows)
        driver.depth(depth)
        before = meter.steps

        def work() -> None:
            driver.resume()
            for _ in range(self.plan.profiled):
                driver.engine.tick()
            driver.pause()

        events = profile_steps(work)
        records = meter.recent_steps()[-(meter.steps - before) :]
        driver.drop_all()
        seen = summarise(events, len(records))
        return {
            "steps": seen.steps,
            "meter_pct": 100 * active_share(records),
            "profiler_pct": 100 * seen.active_share,
            "kernel_busy_pct": 100 * seen.kernel_share,
            "kernels": seen.kernels,
        }


def stop_tokens(tokens: list[list[int]]) -> tuple[int, list[int]] | None:
    """The latest place in the second half at which every row draws a token that is new in it, and those tokens."""
    length = min(map(len, tokens))
    for place in range(length - 2, length // 2, -1):
        if all(row[place] not in row[:place] for row in tokens):
            return place, [row[place] for row in tokens]
    return None


def measure(bench: Bench, shape: str, rows: int) -> dict[str, Any]:
    """One line of the table."""
    plan = bench.plan
    bench.run(rows, 2, plan.new)
    stop = stop_tokens([bench.driver.completions[f"r{i}"].tokens for i in range(rows)])
    place, stops = (plan.new - 2, None) if stop is None else stop
    device, loop_s = bench.parts(rows)
    runs: dict[int, list[Run]] = {1: [], 2: []}
    for _ in range(plan.turns):
        for depth in runs:
            # The stop token is at `place`; a row that drew another token would end one later.
            runs[depth].append(bench.run(rows, depth, place + 2, stops))
    wall_s = {depth: statistics.median(run.step_s for run in of) for depth, of in runs.items()}
    share = zombie_share(runs[1][0].steps) if stops else 0.0
    # Without a graph a step is launched kernel by kernel, by the stream itself: nothing arrives first.
    launch_s = device.launch_s if bench.driver.engine.executor.captures else 0.0
    parts = StepParts(device.forward_s, device.sampling_s, loop_s + launch_s)
    predicted, observed = points(parts.speedup(share)), points(wall_s[1] / wall_s[2])
    line: dict[str, Any] = {
        "shape": shape,
        "rows": rows,
        "f_ms": 1e3 * parts.forward_s,
        "s_ms": 1e3 * parts.sampling_s,
        "b_ms": 1e3 * parts.bookkeeping_s,
        "z_pct": 100 * share,
        "block_ms": 1e3 * wall_s[1],
        "pipe_ms": 1e3 * wall_s[2],
        "predicted_pct": predicted,
        "observed_pct": observed,
        "error_points": predicted - observed,
        "active1_pct": statistics.median(run.active_pct for run in runs[1]),
        "active2_pct": statistics.median(run.active_pct for run in runs[2]),
        "b_loop_ms": 1e3 * loop_s,
        "b_launch_ms": 1e3 * launch_s,
        "whole_step_ms": 1e3 * device.step_s,
        "steps": {depth: of[-1].steps for depth, of in runs.items()},
        "zombie_steps": {depth: of[-1].zombie_steps for depth, of in runs.items()},
        "turns_ms": {depth: spread([1e3 * run.step_s for run in of]) for depth, of in runs.items()},
        "idle_pct": {depth: of[-1].idle_pct for depth, of in runs.items()},
    }
    if plan.profiled:
        line["profiler"] = {depth: bench.profile(rows, depth) for depth in (1, 2)}
    return line


def print_tables(lines: list[dict[str, Any]]) -> None:
    """Compare the prediction with the observation, and the meter with the profiler."""
    shown: tuple[str, ...] = ("shape", "rows", "f_ms", "s_ms", "b_ms", "z_pct", "block_ms", "pipe_ms")
    shown += ("predicted_pct", "observed_pct", "error_points")
    print_table("pipelined over blocking", [{name: line[name] for name in shown} for line in lines])
    active = []
    for line in lines:
        for depth in (1, 2):
            row = {"shape": line["shape"], "rows": line["rows"], "depth": depth, "active": line[f"active{depth}_pct"]}
            row |= {f"idle {cause}": value for cause, value in line["idle_pct"][depth].items()}
            if seen := line.get("profiler", {}).get(depth):
                row |= {
                    "meter": seen["meter_pct"],
                    "profiler": seen["profiler_pct"],
                    "kernels": seen["kernel_busy_pct"],
                }
            active.append(row)
    print_table("the device's time, percent; the idle causes cover the whole run, prefill included", active)
    print(f"predictions are off by at most {max(abs(line['error_points']) for line in lines):.2f} points")
    if apart := [abs(row["meter"] - row["profiler"]) for row in active if "meter" in row]:
        print(f"meter and profiler are at most {max(apart):.2f} points apart")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every shape, print and write each line at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="most tokens of a completion")
    parser.add_argument("--turns", type=int, default=3, help="runs of each depth, in turn")
    parser.add_argument("--profiled", type=int, default=32, help="steps under the profiler at each depth; 0: none")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    plan = Plan(args.prompt, args.new, args.turns, args.profiled if args.device != "cpu" else 0)
    lines = []
    for shape in args.shapes:
        began_s = time.perf_counter()
        bench = Bench(shape, args.device, args.rows, plan)
        print(f"{shape}: ready after {time.perf_counter() - began_s:.1f} s", flush=True)
        for rows in args.rows:
            line = measure(bench, shape, rows)
            lines.append(line)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}, flush=True)
            print(f"{time.perf_counter() - began_s:.1f} s", flush=True)
            write_results(args.out, lines)
        bench.driver.close()
        gc.unfreeze()
        del bench
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
    print_tables(lines)


if __name__ == "__main__":
    main()
