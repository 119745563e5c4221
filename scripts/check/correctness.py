"""Checks the engine on a device against transformers in the same process; exit status 1 if a check fails.

    PYTHONPATH=.:kernels python -m scripts.check.correctness --out FILE
    PYTHONPATH=.:kernels python -m scripts.check.correctness --shapes qwen3.5-27b gpt-oss-20b --out FILE
    PYTHONPATH=.:kernels python -m scripts.check.correctness --long --out scripts/bench/results/long_h200.json

`--shapes` takes layers of real models, a few of each, in the place of families. For each one, with random weights whose
next-token entropy is 0.5 to 2 nats:

    logits    decode steps at many contexts: the error against float32 is compared with the error of transformers' own
              forward in the same dtype with a float32 output layer (its own output layer is shown as well)
    logprobs  sampled tokens, compared with a trainer's recomputation over prompt and completion
    greedy    after long prompts: every token is the float32 reference's first choice, or so close to it that an error
              as large as that of transformers' logits explains the difference
    depths    blocking loop and pipeline draw the same tokens bit for bit if all lengths are equal and for one row; for
              other lengths the first divergence and its gap are reported

With `--fallback` the models run through transformers' own code, with the same bounds.
`--break rope` or `--break page` breaks the engine on purpose; the check must then fail. `--long` runs many long rows of
one shape instead and checks for leaks. `--device cpu --size toy --dtype float32` tries the script on a CPU.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from rollout.config import EngineSettings, Settings
from rollout.engine.device.streams import make_device
from rollout.engine.loop import Engine
from rollout.engine.messages.requests import SamplingParams
from rollout.models.fused import FusedDecoder
from rollout.models.language_model import LanguageModel
from scripts.bench.driver import Driver, random_prompt
from scripts.bench.long_rows import LongRun, run_long
from scripts.bench.output import print_table, write_results
from scripts.bench.reference import (
    FAMILIES,
    SIZES,
    Recomputed,
    Trainer,
    agreement,
    config_of,
    entropy_of,
    load_fallback,
    logprobs_of,
    make_model,
    rms,
    save_weights,
)
from scripts.bench.shapes import SHAPES, model_config, shrunk
from scripts.bench.step_parts import borrowed_slot, stage_next_step
from scripts.check.family_sizes import FAMILY_SIZES, family_config

_GREEDY = SamplingParams(temperature=0.0)
_ENTROPY = (0.5, 2.0)
#: Smaller errors are float32 rounding: of log-probs in nats, of logits relative to their spread.
_FLOOR = 2e-4
#: Share of greedy tokens that we may miss beyond those that transformers misses in bf16: three deviations of 128.
_LESS_AGREED = 0.1


@dataclass(frozen=True)
class Work:
    """Sizes of the checks."""

    prompts: tuple[int, ...]  # tokens of each row's prompt
    new: int  # tokens of a completion
    looks: int  # number of times that the logits are read
    long_prompts: tuple[int, ...]
    long_new: int


_WORK = {size: Work((40, 61, 90, 133, 200, 301, 450, 700), 160, 8, (4000, 8000), 128) for size in SIZES}
_WORK["toy"] = Work((13, 21, 34, 60), 48, 4, (300,), 24)
#: Of shapes: their attention may be eager in transformers, which makes the scores of all heads.
_SHAPE_WORK = Work((40, 61, 90, 133, 200, 301, 450, 700), 96, 6, (1500, 3000), 64)
#: Layers that show each kind of layer of a shape at least once. Experts are large: fewer layers of those.
_SHAPE_LAYERS = {"gemma-3-12b": 6, "glm-4.5-air": 3, "moonlight-16b-a3b": 3, "glm-4.7-flash": 3}


def run_engine(model: LanguageModel, device: str, max_rows: int, context: int, chunk: int = 512) -> Driver:
    """An engine without a prefix cache: every run computes its prompts again."""
    engine = EngineSettings(
        max_rows=max_rows,
        max_context_tokens=context,
        prefill_chunk_tokens=chunk,
        prefix_cache=False,
        kv_memory_fraction=0.5,
        kv_memory_max_gib=16,
    )
    return Driver(Settings(engine=engine), make_device(device), model)


def next_logits(engine: Engine) -> dict[tuple[str, int], torch.Tensor]:
    """The logits for the next tokens of the running rows, by (request, index of the token).

    The engine is paused. A row that needs another page for its next token is left out. The states of linear attention
    are put back: the step that was looked at comes again.
    """
    executor, seqs = engine.executor, engine.roster.decoding
    states = executor.step.kv.states
    before: list[torch.Tensor] = []
    with borrowed_slot(engine.pipeline) as slot:
        upload, size = stage_next_step(engine, slot)
        kept: list[torch.Tensor] = []

        def forward() -> None:
            if executor.captures:
                step = executor.graphs.captured(slot, size)
                step.forward.replay()
                kept.append(step.logits_SV[: len(seqs)].clone())
                return
            context = max(seq.kv.length for seq in seqs) + 1
            token_ids_B, batch = executor.step.begin_decode(upload["rows"], upload["new_pages"], context)
            kept.append(executor.step.model.compute_logits(executor.step.model(token_ids_B, batch, executor.step.kv)))

        def look() -> None:
            if not states.layers:
                forward()
                return
            before.extend(tensor.clone() for tensor in states.tensors)
            forward()
            for tensor, old in zip(states.tensors, before, strict=True):
                tensor.copy_(old)

        executor.compute.run(look)
        executor.compute.record(slot.end)
        slot.end.synchronize()
        executor.check()
    page_size = executor.step.kv.page_size
    return {
        (seq.group.key[1], seq.kv.length + 1 - seq.prompt_len): logits_V
        for seq, logits_V in zip(seqs, kept[0], strict=False)
        if seq.kv.length % page_size
    }


def spoil_pages(engine: Engine) -> None:
    """Put the first page of each running row in the place of its second one."""
    executor = engine.executor
    for seq in engine.roster.decoding:
        if len(seq.kv.pages) > 2:
            executor.compute.run(lambda seq=seq: executor.step.rows.pages[seq.row, 1].fill_(seq.kv.pages[0]))


def same_pages_as_ever(engine: Engine) -> None:
    """Have an idle engine hand out its pages in the order of their numbers.

    Rows of a step are in the order of their pages, and where decode attention cuts a row depends on the rows before it.
    So two runs have the same bits only if they have the same pages.
    """
    pool = engine.roster.allocator.pool
    assert pool.free == pool.total, "no page is used or known"
    pool.sort_free()


class Checker:
    """One family or shape: its engine, its trainer, and the findings."""

    def __init__(self, family: str, args: argparse.Namespace, folder: Path) -> None:
        toy = args.size == "toy"
        self.args, self.work, layers = args, _WORK[args.size], 0
        if args.shapes:
            known = family in FAMILY_SIZES
            layers = args.layers or (0 if known else _SHAPE_LAYERS.get(family, 4))
            config = family_config(family, layers) if known else model_config(family, layers)
            layers = config["num_hidden_layers"]
            self.work = self.work if toy else _SHAPE_WORK
            config = shrunk(config) if toy else config
        else:
            config = config_of(family, args.size)
        model = make_model({**config, "torch_dtype": args.dtype}, args.dtype, args.device, folder)
        self.trainer = Trainer(model, folder, args.dtype, args.device)
        self.vocab = model.spec.vocab
        self.context = max(self.work.long_prompts) + self.work.long_new + 64
        if args.break_ == "rope":
            rope: Any = model.ropes[0]
            rope.inv_freq_D.mul_(1.01)
        served: LanguageModel = model
        if args.fallback:
            save_weights(model, folder)
            del model
            served = load_fallback(folder, args.dtype, args.device)
        self.driver = run_engine(served, args.device, len(self.work.prompts), self.context)
        self.failures: list[str] = []
        executor = self.driver.engine.executor
        self.found: dict[str, Any] = {
            "family": family,
            **({"layers": layers} if layers else {}),
            "captured": executor.captures,
            "fused": isinstance(executor.step.forward, FusedDecoder),
            "fallback": args.fallback,
        }

    def check(self) -> dict[str, Any]:
        """Run all checks."""
        for step in (self.sampled, self.greedy, self.depths):
            began_s = time.perf_counter()
            step()
            print(f"  {step.__name__}: {time.perf_counter() - began_s:.1f} s", flush=True)
        self.driver.close()
        return {**self.found, "failures": self.failures}

    def expect(self, right: bool, message: str) -> None:
        """Note what is not right."""
        if not right:
            self.failures.append(message)

    def within(self, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Check that our errors are at most `slack` times theirs, plus three standard errors of the difference."""
        excess = ours.double() - self.args.slack * theirs.double() - _FLOOR
        doubt = 3 * excess.std().item() / len(excess) ** 0.5
        message = f"{what}: {ours.mean():.2e} on average, transformers has {theirs.mean():.2e}"
        self.expect(excess.isfinite().all().item() and excess.mean().item() <= doubt, message)

    # --- logits and log-probs ----------------------------------------------------------------------------------------

    def sampled(self) -> None:
        """Sampled rows of many lengths: logits at some steps, log-probs of every token."""
        work = self.work
        for i, length in enumerate(work.prompts):
            prompt = random_prompt(self.vocab, length, i)
            self.driver.submit(f"r{i}", prompt, work.new, SamplingParams(seed=i))
        roster = self.driver.engine.roster
        self.driver.tick_until(lambda: len(roster.decoding) == len(work.prompts))
        seen: dict[tuple[str, int], torch.Tensor] = {}
        for look in range(work.looks):
            # The steps are not a multiple of a page apart, so contexts end everywhere within a page.
            for _ in range((work.new - 16) // work.looks - (look % 3)):
                self.driver.engine.tick()
            self.driver.pause()
            if look == 0 and self.args.break_ == "page":
                spoil_pages(self.driver.engine)
            seen |= next_logits(self.driver.engine)
            self.driver.resume()
        self.driver.finish()
        done = [self.driver.completions[f"r{i}"] for i in range(len(work.prompts))]
        again = [
            self.trainer.recompute(random_prompt(self.vocab, length, i), one.tokens)
            for i, (length, one) in enumerate(zip(work.prompts, done, strict=True))
        ]
        self._judge_logits(seen, again)
        self._judge_logprobs([one.logprobs for one in done], [one.tokens for one in done], again)
        entropy = torch.cat([entropy_of(one.exact) for one in again]).mean().item()
        self.found["entropy"] = entropy
        low, high = _ENTROPY
        self.expect(low <= entropy <= high, f"entropy is {entropy:.2f} nats; take weights with {low} to {high}")

    def _judge_logits(self, seen: dict[tuple[str, int], torch.Tensor], again: list[Recomputed]) -> None:
        places = [(int(name[1:]), index) for name, index in seen]
        ours = torch.stack(list(seen.values())).to(again[0].exact.device)
        exact = torch.stack([again[i].exact[k] for i, k in places])
        spread = rms(exact - exact.mean(-1, keepdim=True))
        errors = {"ours": ours - exact}
        for name in ("wide", "own"):
            errors[name] = torch.stack([getattr(again[i], name)[k] for i, k in places]) - exact
        of = {name: {"rms": rms(e) / spread, "worst": e.abs().max().item()} for name, e in errors.items()}
        self.found["logits"] = {"looks": len(places), "spread": spread, **of}
        self.found["logits_ratio"] = of["ours"]["rms"] / max(of["wide"]["rms"], 1e-12)
        each = {name: e.square().mean(-1).sqrt() / spread for name, e in errors.items()}
        # One token with other experts counts for more than all others in the mean: say what most tokens have.
        self.found["median_ratio"] = (each["ours"].median() / each["wide"].median().clamp_min(1e-12)).item()
        self.within("logits, relative", each["ours"], each["wide"])

    def _judge_logprobs(self, logprobs: list[list[float]], tokens: list[list[int]], again: list[Recomputed]) -> None:
        device = again[0].exact.device
        ours = torch.cat([torch.tensor(row, device=device) for row in logprobs])
        by = {
            name: torch.cat([logprobs_of(getattr(a, name), row) for a, row in zip(again, tokens, strict=True)])
            for name in ("exact", "wide", "own")
        }
        pairs = {
            "ours_exact": agreement(ours, by["exact"]),
            "ours_trainer": agreement(ours, by["own"]),
            "wide_exact": agreement(by["wide"], by["exact"]),
            "trainer_exact": agreement(by["own"], by["exact"]),
        }
        self.found["logprobs"] = {"tokens": len(ours), **{name: asdict(pair) for name, pair in pairs.items()}}
        wide, own = (by["wide"] - by["exact"]).abs(), (by["own"] - by["exact"]).abs()
        self.within("log-probs against float32, nats", (ours - by["exact"]).abs(), wide)
        self.within("log-probs against a trainer's, nats", (ours - by["own"]).abs(), wide + own)

    # --- greedy ------------------------------------------------------------------------------------------------------

    def greedy(self) -> None:
        """Long prompts, in one batch."""
        for i, length in enumerate(self.work.long_prompts):
            self.driver.submit(f"g{i}", random_prompt(self.vocab, length, i), self.work.long_new, _GREEDY)
        if self.args.break_ == "page":
            roster = self.driver.engine.roster
            self.driver.tick_until(lambda: len(roster.decoding) == len(self.work.long_prompts))
            self.driver.pause()
            spoil_pages(self.driver.engine)
            self.driver.resume()
        self.driver.finish()
        self.found["greedy"] = []
        for i, length in enumerate(self.work.long_prompts):
            tokens = self.driver.completions[f"g{i}"].tokens
            again = self.trainer.recompute(random_prompt(self.vocab, length, i), tokens)
            self._judge_greedy(length, tokens, again)

    def _judge_greedy(self, length: int, tokens: list[int], again: Recomputed) -> None:
        chosen_K = torch.tensor(tokens, device=again.exact.device)
        best = again.exact.max(-1)
        gap_K = best.values - again.exact.gather(1, chosen_K[:, None])[:, 0]
        parted = (best.indices != chosen_K).nonzero()[:, 0].tolist()
        worst = (again.wide - again.exact).abs().max().item()
        agreed = 1 - len(parted) / len(tokens)
        theirs = (again.own.argmax(-1) == best.indices).float().mean().item()
        first = parted[0] if parted else None
        found = {
            "prompt": length,
            "tokens": len(tokens),
            "agreed": agreed,
            "transformers_agreed": theirs,
            "first_divergence": first,
            "gap_there": gap_K[first].item() if first is not None else None,
            "largest_gap": gap_K.max().item(),
            "explained_gap": 2 * worst,
        }
        self.found["greedy"].append(found)
        limit = 2 * worst * self.args.slack + _FLOOR
        self.expect(
            gap_K.max().item() <= limit,
            f"greedy after {length} tokens: {len(parted)} of {len(tokens)} tokens are not the reference's, one by "
            f"{gap_K.max().item():.3f} nats, more than {limit:.3f}",
        )
        # With experts, rounding may change the routing and cause large gaps: check the share of equal tokens, too.
        least = theirs - _LESS_AGREED * self.args.slack
        self.expect(
            agreed >= least,
            f"greedy after {length} tokens: {agreed:.3f} of the tokens are the reference's, less than {least:.3f}",
        )

    # --- depths ------------------------------------------------------------------------------------------------------

    def depths(self) -> None:
        """The same requests at depth 1 and 2: of equal lengths, and of lengths that change the batch."""
        equal = self._both_depths(lambda i: (self.work.prompts[0], self.work.new))
        mixed = self._both_depths(lambda i: (self.work.prompts[i], self.work.new - 5 * i))
        self.found["depths"] = {"equal": equal, "mixed": mixed}
        self.expect(equal["parted"] == 0 and equal["logprobs_equal"], f"depths: equal rows part: {equal}")

    def _both_depths(self, lengths: Callable[[int], tuple[int, int]]) -> dict[str, Any]:
        rows, runs = len(self.work.prompts), []
        for depth in (1, 2):
            self.driver.completions.clear()
            self.driver.depth(depth)
            same_pages_as_ever(self.driver.engine)
            for i in range(rows):
                prompt, new = lengths(i)
                self.driver.submit(f"r{i}", random_prompt(self.vocab, prompt, i), new, SamplingParams(seed=i))
            self.driver.finish()
            runs.append([self.driver.completions[f"r{i}"] for i in range(rows)])
        partings = []
        for one, other in zip(*runs, strict=True):
            pairs = zip(one.tokens, other.tokens, strict=True)
            first = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
            if first is not None:
                partings.append((first, abs(one.logprobs[first] - other.logprobs[first])))
        return {
            "rows": rows,
            "parted": len(partings),
            "first_divergence": min((k for k, _ in partings), default=None),
            "largest_gap": max((gap for _, gap in partings), default=None),
            "logprobs_equal": all(a.logprobs == b.logprobs for a, b in zip(*runs, strict=True)),
        }


# --- the command -----------------------------------------------------------------------------------------------------


def write_found(path: Path, results: list[dict[str, Any]]) -> None:
    """Write the results; single greedy prompts are left out, because they are printed."""
    write_results(path, [{name: value for name, value in found.items() if name != "greedy"} for found in results])


def check_families(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Check each family and print its result."""
    results = []
    for family in args.shapes or args.families:
        began_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            checker = Checker(family, args, Path(folder))
        print(f"{family}: ready after {time.perf_counter() - began_s:.1f} s", flush=True)
        results.append(checker.check())
        print(results[-1], flush=True)
        write_found(args.out, results)  # a time limit loses only what was not checked
        del checker
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
    table = [
        {
            "family": r["family"],
            "entropy": r["entropy"],
            "logits": f"{r['logits']['ours']['rms']:.2e}",
            "transformers": f"{r['logits']['wide']['rms']:.2e}",
            "ratio": r["logits_ratio"],
            "median": r["median_ratio"],
            "mean": f"{r['logprobs']['ours_trainer']['mean']:.2e}",
            "max": f"{r['logprobs']['ours_trainer']['worst']:.2e}",
            "K3": f"{r['logprobs']['ours_trainer']['k3']:.2e}",
            "greedy": min(g["agreed"] for g in r["greedy"]),
            "depths": "equal" if r["depths"]["equal"]["logprobs_equal"] else "PARTED",
            "right": not r["failures"],
        }
        for r in results
    ]
    print_table("against transformers", table)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and write the results; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--shapes", nargs="+", choices=(*SHAPES, *FAMILY_SIZES), help="layers of real models")
    parser.add_argument("--layers", type=int, default=0, help="layers of each shape; 0: a few")
    parser.add_argument("--fallback", action="store_true", help="run the models through transformers' own code")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--slack", type=float, default=1.1, help="allowed factor on transformers' errors")
    parser.add_argument(
        "--break", dest="break_", choices=("rope", "page"), help="break the engine: the check must fail"
    )
    parser.add_argument("--long", action="store_true", help="run many long rows of one shape instead")
    parser.add_argument("--long-shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--long-rows", type=int, default=32)
    parser.add_argument("--long-tokens", type=int, default=16384)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    long = LongRun(args.long_shape, args.device, args.long_rows, args.long_tokens)
    results = [run_long(long)] if args.long else check_families(args)
    write_found(args.out, results)
    failures = [failure for result in results for failure in result["failures"]]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print("right" if not failures else f"{len(failures)} failures", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
