"""Measures verify steps: tokens a second with drafts, relative to plain steps, in one process and one engine.

    PYTHONPATH=.:kernels python -m scripts.bench.speculation --shape qwen3-8b --contexts 4096 --out FILE

Random weights of the real shapes. A plain run is recorded, and its tokens are the drafts of the other runs, corrupted
so that a verify step of --most drafts yields an accepted length (AL, the step's own token included) of --lengths. For
each number of rows and each context there are these runs:

    plain     speculation is off
    auto      drafts where they pay by acceptance and costs, as `speculation = auto`, which has the device draft by
              n-grams, too, where it has no draft model
    always    drafts in every step, as `speculation = suffix`
    diverge   auto, and after its first wrong token the rest of a path is wrong, too. So it is with real drafters: at a
              pipeline of depth 2 a refused draft costs those of the next step as well
    nothing   auto, and every draft of the host is wrong: the price of a drafter that is never right
    heads     with --draft-model only: a random EAGLE-3 head drafts after every step, and recorded tokens take the
              place of its drafts, on the device. So it is `speculation = heads` with a head that is right so often
    unpaid    auto with the drafter on the device alone, and every draft is wrong: such a head, or else n-grams

`speedup` is tokens a second over those of the plain run, by the wall time between the commits of the first and last
step with all rows; `al` the tokens that these steps yielded for a row, whatever was asked for. `floor_ms` is the time
to read weights once and the KV of all rows once, and to read and write the states of linear attention of all rows once,
over the bandwidth of a kernel that only reads, in the same run. With experts, every draft brings its own, under even
routing. `--layers` cuts a shape to its first layers, so that it fits beside its states. `costs` of the output file is
what `--costs` of `scripts.check.shadow_acceptance` takes.

`--job-scale` adds the long job (see `compare_peers`; 1: whole) with as many rows as --rows has at most, in the same
modes. Its `speedup` is that of the total time, `tail_speedup` that of the last tenth of its completions.

Prompts are random; they are prefilled once and come from the prefix cache then. At --temperature 100, the default,
draws depend on seed and position nearly alone. So the recorded tokens stay right where rounding differs between steps
of different sizes: `equal_pct` is the share of tokens that are as in the plain run. With `--set deterministic=true` all
tokens and log-probs must be equal, else the script fails.

--least-saved N ... repeats the runs of `always` for each N: attention reads the KV of a row and its drafts once if that
saves N MiB in a layer (0: always; a large number: never). --set NAME=VALUE changes a setting of the engine, such as
group_attention=false.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rollout.config import EngineConstants
from rollout.engine.features.drafts.decode_costs import measure_decode_costs
from rollout.engine.features.drafts.drafter import NO_HOST_DRAFTER, DeviceDrafterName, device_drafter
from rollout.engine.features.drafts.feature import DraftsFeature
from rollout.engine.features.drafts.planner import DraftPlanner
from rollout.engine.features.drafts.step_costs import StepCosts
from rollout.engine.features.drafts.verifier import DraftVerifier
from rollout.engine.messages.requests import SamplingParams
from rollout.engine.schedule.step_feature import find_feature
from rollout.engine.step.shared_pages import SharedPages
from rollout.settings_sources import SettingsError
from scripts.bench.cuda_timing import read_bandwidth
from scripts.bench.decode import step_needs
from scripts.bench.output import print_table, write_results
from scripts.bench.peers.experiments import Finished, Row
from scripts.bench.peers.floors import job_floor, step_floor_s
from scripts.bench.peers.job import Job
from scripts.bench.peers.ours_engine import OursEngine, engine_settings, speculation_changes, steady_figures
from scripts.bench.peers.workloads import Work, long_job, nested_prompts
from scripts.bench.replay_drafter import ReplayDrafter, ReplayOnDevice, chance_of
from scripts.bench.shapes import SHAPES, StepBytes

MODES = ("auto", "always", "diverge", "nothing", "heads", "unpaid")
_BY_DEVICE = ("heads", "unpaid")
_WARM_TOKENS, _SKIPPED_STEPS, _LEAST_STEPS = 8, 4, 8
#: Pages that a row needs beside those of its context and its new tokens, in tokens.
_SPARE_TOKENS = 64
_LEAST_SAVED_BYTES = EngineConstants().ahead_saved_bytes
#: Makes the figures of a run from its work and its times; `tokens_per_s` is among them.
Figures = Callable[[Work, Finished], Row]
_SHOWN = (
    "rows",
    "context",
    "mode",
    "aim",
    "al",
    "speedup",
    "step_ms",
    "device_ms",
    "idle_ms",
    "host_ms",
    "floor_ms",
    "total_s",
    "tail_speedup",
)


class TooFewStepsError(RuntimeError):
    """Rows hardly decoded together: their KV does not fit, or they have too few new tokens."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run: the tokens and log-probs of each request, and its tokens a second."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, np.ndarray]
    tokens_per_s: float

    def same_as(self, other: Recorded) -> Row:
        """Share of tokens that are equal, and whether tokens and log-probs are so bit for bit."""
        same = sum(a == b for key in self.tokens for a, b in zip(self.tokens[key], other.tokens[key], strict=True))
        bits = all(np.array_equal(self.logprobs[key], other.logprobs[key]) for key in self.tokens)
        total = sum(map(len, self.tokens.values()))
        return {"equal_pct": 100 * same / total, "equal_bits": same == total and bits}


class Bench:
    """One engine, and the runs of it. `most` drafts of a row in a step, at most."""

    def __init__(self, engine: OursEngine, need: StepBytes, args: argparse.Namespace, bandwidth: float | None) -> None:
        self.engine, self._need, self._bandwidth = engine, need, bandwidth
        self._most = args.most
        parts = engine.engine.parts
        self._most_rows = args.draft_rows
        self._on_device = device_drafter(
            engine_settings(_job(args), args.depth, changes=args.changes), parts.executor.step.model
        )
        step_rows = max(args.rows) + args.draft_rows
        slot = parts.pipeline.free_slots[0]
        self.costs: StepCosts = measure_decode_costs(parts.executor, slot, step_rows, self._on_device != "none")

    def read_drafts_together(self, saved_bytes: int) -> None:
        """Have a row and its drafts read their pages once, from `saved_bytes` bytes of KV on that a layer saves."""
        shared = self.engine.engine.parts.packer.shared
        if isinstance(shared, SharedPages):
            shared.least_ahead_bytes = saved_bytes

    def warm(self, prompts: list[list[int]]) -> None:
        """Leave the prompts in the prefix cache."""
        self.engine.generate(Work(prompts, [_WARM_TOKENS] * len(prompts)))

    def plain(self, work: Work, figures: Figures) -> tuple[Recorded, Row]:
        """A run without a drafter."""
        return self._run(work, figures, None)

    def drafted(self, work: Work, figures: Figures, plain: Recorded, p: float, mode: str) -> Row:
        """A run with the drafts of `plain`, each right with probability `p`."""
        drafter, adapts = (
            ReplayDrafter(plain.tokens, p, self.engine.vocab, diverges=mode == "diverge"),
            mode != "always",
        )
        costs = copy.deepcopy(self.costs)  # what it learns is forgotten
        if mode in _BY_DEVICE:
            verifier = find_feature(self.engine.engine.executor.step.features, DraftVerifier)
            assert verifier is not None and self._on_device != "none", "checked with the arguments"
            recorded = [plain.tokens[str(i)] for i in range(len(plain.tokens))]
            by_device = NO_HOST_DRAFTER, self._most, self._most_rows, costs
            planner = DraftPlanner(*by_device, mode == "unpaid", self._on_device)
            with ReplayOnDevice(verifier.drafter, recorded, p, self.engine.vocab):
                run, row = self._run(work, figures, planner)
            return row | {"speedup": run.tokens_per_s / plain.tokens_per_s, **run.same_as(plain)}
        ngrams: DeviceDrafterName = "ngram" if adapts and self._on_device == "ngram" else "none"
        planner = DraftPlanner(drafter, self._most, self._most_rows, costs, adapts, ngrams)
        run, row = self._run(work, figures, planner)
        return row | {"speedup": run.tokens_per_s / plain.tokens_per_s, **run.same_as(plain)}

    def _run(self, work: Work, figures: Figures, planner: DraftPlanner | None) -> tuple[Recorded, Row]:
        engine = self.engine.engine
        drafting = find_feature(engine.roster.features, DraftsFeature)
        assert drafting is not None, "the engine has speculation"
        counts, costs = drafting.counts, copy.deepcopy(self.costs)
        nothing = DraftPlanner(NO_HOST_DRAFTER, self._most, self._most_rows, costs)
        before = counts.drafted, counts.accepted
        drafting.planner = planner or nothing
        finished = self.engine.generate(work)
        drafting.planner = nothing
        row = figures(work, finished)
        row |= {"drafted": counts.drafted - before[0], "accepted": counts.accepted - before[1]}
        told = self.engine.completions
        recorded = {key: [token for delta in deltas for token in delta.token_ids] for key, deltas in told.items()}
        logprobs = {key: np.concatenate([delta.logprobs for delta in deltas]) for key, deltas in told.items()}
        tokens = {key: list(map(int, of)) for key, of in recorded.items()}
        return Recorded(tokens, logprobs, row["tokens_per_s"]), row

    def steady(self, context: int, work: Work, finished: Finished) -> Row:
        """Figures of the steps with all rows, whose prompts have `context` tokens."""
        steps = [step for step in self.engine.full_steps() if not step.zombie_rows][_SKIPPED_STEPS:]
        if len(steps) < _LEAST_STEPS or steps[0].rows < len(work.prompts):
            together = steps[0].rows if steps else 0
            raise TooFewStepsError(
                f"{len(steps)} steps had {together} of {len(work.prompts)} rows: not enough to measure"
            )
        rows, tokens = steps[0].rows, sum(step.tokens for step in steps[1:])
        assert steps[0].committed_at_s is not None and steps[-1].committed_at_s is not None
        timing = steady_figures(steps)
        inputs = sum(step.input_tokens for step in steps) / len(steps)
        row: Row = {
            "al": tokens / (len(steps) - 1) / rows,
            "tokens_per_s": tokens / (steps[-1].committed_at_s - steps[0].committed_at_s),
            "step_ms": timing.pop("steady_ms"),
            **timing,
            "steps": len(steps),
            "step_tokens": inputs,
        }
        if self._bandwidth is not None:
            reached = context + work.lengths[0] // 2
            distinct = self._need.even_experts(round(inputs))
            floor_s = step_floor_s(self._need, rows, rows * reached, self._bandwidth, distinct)
            row |= {"floor_ms": floor_s * 1e3, "over_floor": row["step_ms"] / (floor_s * 1e3)}
        return row

    def whole(self, rows: int, work: Work, finished: Finished) -> Row:
        """Figures of a job from its start to its end, on this number of rows; the floor is the plain steps'."""
        row: Row = {
            "total_s": finished.total_s,
            "tail_s": finished.tail_s(),
            "tokens": work.tokens,
            "tokens_per_s": work.tokens / finished.total_s,
        }
        if self._bandwidth is not None:
            prompts = [len(prompt) for prompt in work.prompts]
            floor = job_floor(self._need, prompts, work.lengths, rows, self._bandwidth)
            row |= {"floor_s": floor.total_s, "tail_floor_s": floor.tail_s}
        return row


def measure(bench: Bench, args: argparse.Namespace, note: Callable[[Row], None]) -> None:
    """All runs of all rows and contexts; each gives a row to `note`."""
    for context in sorted(args.contexts):
        for rows in sorted(args.rows):
            cell = {"rows": rows, "context": context}
            needs = rows * (context + args.new + args.most + _SPARE_TOKENS)
            if needs > bench.engine.capacity_tokens:
                note({**cell, "skipped": f"needs KV of {needs} tokens, there are {bench.engine.capacity_tokens}"})
                continue
            prompts = nested_prompts(rows, context, max(args.contexts), bench.engine.vocab)
            bench.warm(prompts)
            work = Work(prompts, [args.new] * rows)
            figures = partial(bench.steady, context)
            try:
                plain, row = bench.plain(work, figures)
            except TooFewStepsError as error:
                note({**cell, "skipped": str(error)})
                continue
            note({**cell, "mode": "plain", **row})
            for mode, aim, least in _runs(args):
                bench.read_drafts_together(_LEAST_SAVED_BYTES if least is None else least << 20)
                p = 0.0 if aim is None else chance_of(aim, args.most)
                run = {**cell, "mode": mode, "aim": aim, "least_saved_mib": least}
                try:
                    note({**run, **bench.drafted(work, figures, plain, p, mode)})
                except TooFewStepsError as error:
                    note({**run, "skipped": str(error)})


def measure_job(bench: Bench, args: argparse.Namespace, note: Callable[[Row], None]) -> None:
    """The long job, plain and with drafts; each run gives a row to `note`."""
    rows = max(args.rows)
    work = long_job(bench.engine.vocab, scale=args.job_scale)
    cell = {"rows": rows, "job_scale": args.job_scale}
    figures = partial(bench.whole, rows)
    bench.warm(work.prompts)
    plain, plain_row = bench.plain(work, figures)
    note({**cell, "mode": "plain", **plain_row})
    for mode, aim, _ in _runs(args):
        p = 0.0 if aim is None else chance_of(aim, args.most)
        row = bench.drafted(work, figures, plain, p, mode)
        note({**cell, "mode": mode, "aim": aim, **row, "tail_speedup": plain_row["tail_s"] / row["tail_s"]})


def _runs(args: argparse.Namespace) -> list[tuple[str, float | None, int | None]]:
    """Mode, AL and least MiB of saved reads of each run with drafts; None where there is none or the usual one."""
    lengths: dict[str, list[float | None]] = dict.fromkeys(MODES, args.lengths) | {"nothing": [None], "unpaid": [None]}
    least = dict.fromkeys(MODES, [None]) | {"always": args.least_saved or [None]}
    return [(mode, aim, mib) for mode in args.modes for aim in lengths[mode] for mib in least[mode]]


def cost_of(costs: StepCosts, rows: int, k: int) -> Row:
    """What a step with k drafts a row takes with short contexts, as `scripts.check.shadow_acceptance` reads it."""
    seconds = float(costs.verify_s(rows, 0, np.array([rows * k]))[0]) if k else costs.plain_s(rows, 0)
    return {"rows": rows, "k": k, "ms": round(seconds * 1e3, 4)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if deterministic runs differ."""
    args = _parse(argv)
    began_s = time.perf_counter()
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    bandwidth = read_bandwidth() if on_gpu else None
    engine = OursEngine(_job(args), args.depth, changes=args.changes, draft=args.draft_model)
    engine.sampling = replace(SamplingParams(), temperature=args.temperature)
    bench = Bench(engine, step_needs(args.shape, args.changes, args.layers), args, bandwidth)
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    table = {size: round(bench.costs.plain_s(size, 0) * 1e3, 3) for size in sizes if size <= args.step_rows}
    facts = {**engine.facts(), "read_tbps": bandwidth / 1e12 if bandwidth else None, "step_ms_by_rows": table}
    facts["costs"] = [cost_of(bench.costs, rows, k) for rows in sorted(args.rows) for k in range(args.most + 1)]
    facts |= {"most": args.most, "settings": args.changes, "layers": args.layers}
    if args.draft_model:
        facts["guess_ms_by_rows"] = {size: round(bench.costs.draft_s(size) * 1e3, 3) for size in table}
    print(json.dumps(facts), flush=True)
    results: list[Row] = []

    def note(row: Row) -> None:
        """Print and write at once: a run that ends early leaves what it has measured."""
        results.append({"shape": args.shape, **row})
        print(json.dumps(results[-1]), flush=True)
        write_results(args.out, results, **facts, total_s=time.perf_counter() - began_s)

    measure(bench, args, note)
    if args.job_scale:
        measure_job(bench, args, note)
    engine.close()
    print_table(args.shape, [{name: row.get(name, "") for name in _SHOWN} for row in results if "skipped" not in row])
    if args.changes.get("deterministic") == "true" and not all(row.get("equal_bits", True) for row in results):
        print("FAILED: deterministic, and tokens or log-probs differ from the plain run", flush=True)
        return 1
    return 0


def _job(args: argparse.Namespace) -> Job:
    # An engine takes no more KV than its rows need, so the pages to spare are part of the context.
    context = max(args.contexts, default=0) + args.most + _SPARE_TOKENS
    return Job(
        shape=args.shape,
        rows=tuple(args.rows),
        prompt=context,
        new=args.new,
        device=args.device,
        layers=args.layers,
        experiments=("decode", "long_job") if args.job_scale else ("decode",),
        job_rows=max(args.rows),
        job_scale=args.job_scale,
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-8b")
    add("--layers", type=int, default=0, help="only the first layers of the shape; 0: all")
    add("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    add("--contexts", type=int, nargs="*", default=[4096], help="tokens of the prompts; none: the long job alone")
    add("--new", type=int, default=256, help="tokens of a completion")
    add("--lengths", type=float, nargs="+", default=[1.7, 2.5, 3.3], help="accepted lengths of the drafts")
    add("--most", type=int, default=3, help="drafts of a row in a step")
    add("--modes", nargs="+", choices=MODES, default=["auto", "always", "nothing"])
    add(
        "--draft-model",
        nargs="?",
        const="head",
        choices=("head", "mtp"),
        help="load a random draft model, for the modes heads and unpaid: an EAGLE-3 head, or a layer for multi-token "
        "prediction of shapes that have one",
    )
    add("--draft-rows", type=int, help="drafts of all rows in a step; by default --most for each row")
    add("--temperature", type=float, default=100.0)
    add("--least-saved", type=int, nargs="+", metavar="MIB", help="reads saved in a layer, from which on drafts share")
    add("--job-scale", type=float, default=0.0, help="also run the long job with completions this much as long")
    add("--depth", type=int, choices=(1, 2), default=2)
    add("--device", default="auto")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine setting; repeatable")
    add("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.draft_rows = args.draft_rows or max(args.rows) * args.most
    args.step_rows = max(args.rows) + args.draft_rows
    args.changes = {
        **speculation_changes("auto", max(args.rows), args.most, args.draft_rows),
        **({"speculation_model": "random"} if args.draft_model == "head" else {}),
        **dict(change.partition("=")[::2] for change in args.set),
    }
    if not args.draft_model and "heads" in args.modes:
        parser.error("the mode heads needs --draft-model")
    if "unpaid" in args.modes and args.changes.get("speculation") in ("off", "suffix"):
        parser.error("the mode unpaid needs a drafter on the device: no --set speculation=off or suffix")
    try:
        for length in args.lengths:
            chance_of(length, args.most)
        engine_settings(_job(args), args.depth, changes=args.changes)
    except (SettingsError, ValueError) as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    raise SystemExit(main())
