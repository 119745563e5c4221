"""Measures the cost of top log-probs for each token, and of the log-probs of a prompt.

    PYTHONPATH=.:kernels python -m scripts.bench.scores --shape qwen3-8b --rows 32 --out FILE

Random weights of the real shape. No row, one row and all rows request `--tops` tokens. Measured are the wall time
between commits over the second half of the decode steps, and the device time of a step. All rows of a step are drawn
together: one row that requests top log-probs makes all of them use the graph that ends at the logits. Then one prompt
of `--long` tokens is prefilled without and with its log-probs: device time of its prefill steps.

With `--batch N` it measures a teacher instead: N sequences of `--long` tokens, sent at once, in wall time.

    plain    computed, not scored: the rate of prefill
    last     the `--last` last tokens of each are scored: `--chosen` named tokens at each, and the entropy
    all      all tokens, by their own log-probs
    chosen   all tokens, with `--chosen` named ones at each, and the entropy
    shared   as `last`; `--samples` sequences each share what comes before

`of_plain` is a way's rate over that of `plain`, its ceiling; `computed` has the tokens that were read.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from rollout.config import EngineSettings, Settings
from rollout.engine.build import build_engine, local_links
from rollout.engine.device.streams import make_device
from rollout.engine.loop import Engine
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request, SamplingParams
from rollout.engine.messages.to_engine import Submit
from rollout.metrics.step_timing import StepTiming
from scripts.bench.output import print_table, write_results
from scripts.bench.peers.ours_engine import load_random, steady_figures
from scripts.bench.shapes import SHAPES


def run(engine: Engine, requests: list[Request]) -> list[StepTiming]:
    """The steps that some requests took."""
    before = engine.meter.steps
    for request in requests:
        engine.inbox.put(Submit(request))
    engine.tick()
    while engine.busy:
        engine.tick()
    return list(engine.meter.recent_steps())[-(engine.meter.steps - before) :]


def decode_row(engine: Engine, vocab: int, rows: int, asking: int, args: argparse.Namespace) -> dict[str, Any]:
    """A decode step in which `asking` rows request top log-probs."""
    rng = np.random.default_rng(asking)
    steps = run(
        engine,
        [
            Request(
                ("bench", f"decode-{asking}-{i}"),
                Prompt.of_tokens(rng.integers(0, vocab, args.prompt).astype(np.int32)),
                args.new,
                sampling=SamplingParams(seed=i),
                logprobs=args.tops if i < asking else 0,
            )
            for i in range(rows)
        ],
    )
    full = [step for step in steps if step.kind == "decode" and step.rows == rows]
    return {"rows": rows, "asking": asking, **steady_figures(full[len(full) // 2 :])}


def prefill_row(engine: Engine, vocab: int, scored: bool, args: argparse.Namespace) -> dict[str, Any]:
    """The prefill of one long prompt: the best of three."""
    rng, best = np.random.default_rng(7), float("inf")
    for i in range(3):
        prompt = Prompt.of_tokens(rng.integers(0, vocab, args.long).astype(np.int32))
        steps = run(engine, [Request(("bench", f"prefill-{scored}-{i}"), prompt, 1, prompt_logprobs=scored)])
        best = min(best, sum(step.end_s - step.start_s for step in steps if step.kind == "prefill"))
    return {"prompt": args.long, "scored": scored, "prefill_ms": best * 1e3}


def batch_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A batch of sequences, computed and scored; the best of `--repeats`."""
    device = make_device(args.device)
    loaded = load_random(args.shape, device.torch_device)
    vocab, rows = loaded.spec.vocab, args.rows[0]
    pages = args.kv_pages or rows * (-(-args.long // 16) + 2) + 2
    sizes = {"max_rows": rows, "max_context_tokens": args.long, "kv_pages": pages, "prefill_chunk_tokens": args.chunk}
    settings = Settings(engine=EngineSettings(**sizes))
    engine = build_engine(settings, device, loaded.model, local_links(settings, SimpleQueue[Any]().put))
    rng = np.random.default_rng(0)

    def tokens(*shape: int) -> np.ndarray:
        return rng.integers(0, vocab, shape).astype(np.int32)

    named = {"prompt_logprob_token_ids": tokens(args.chosen), "prompt_entropy": True}
    last = {"prompt_logprobs": True, "prompt_logprobs_last": args.last, **named}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "last": last,
        "all": {"prompt_logprobs": True},
        "chosen": {"prompt_logprobs": True, **named},
        "shared": last,
    }
    plain = 0.0
    run(engine, [Request(("bench", "warm-up"), Prompt.of_tokens(tokens(args.long)), 0, **last)])
    for way, fields in ways.items():
        best, computed = float("inf"), 0
        for repeat in range(args.repeats):
            samples = args.samples if way == "shared" else 1
            prompts = [
                np.concatenate([beginning, tokens(args.last)])
                for beginning in tokens(-(-args.batch // samples), args.long - args.last)
                for _ in range(samples)
            ]
            requests = [
                Request(("bench", f"{way}-{repeat}-{i}"), Prompt.of_tokens(prompt), 0, **fields)
                for i, prompt in enumerate(prompts[: args.batch])
            ]
            before, began = engine.roster.counters.prefilled_tokens, time.perf_counter()
            run(engine, requests)
            best = min(best, time.perf_counter() - began)
            computed = engine.roster.counters.prefilled_tokens - before
        rate = args.batch * args.long / best
        plain = plain or rate
        row = {"way": way, "sequences": args.batch, "tokens": args.long, "computed": computed, "tokens_per_s": rate}
        yield row | {"of_plain": rate / plain}
    engine.check_integrity()
    engine.executor.close()


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the rows of results, one by one."""
    if args.batch:
        yield from batch_rows(args)
        return
    device = make_device(args.device)
    loaded = load_random(args.shape, device.torch_device)
    context = max(args.prompt + args.new, args.long + 1)
    pages = max(max(args.rows) * (-(-(args.prompt + args.new) // 16) + 1), -(-args.long // 16) + 1) + 2
    engine_settings = EngineSettings(
        max_rows=max(args.rows), max_context_tokens=context, kv_pages=pages, prefix_cache=False
    )
    settings = Settings(engine=engine_settings)
    engine = build_engine(settings, device, loaded.model, local_links(settings, SimpleQueue[Any]().put))
    vocab = loaded.spec.vocab
    for rows in args.rows:
        for asking in (0, 1, rows):
            yield decode_row(engine, vocab, rows, asking, args)
    for scored in (False, True):
        yield prefill_row(engine, vocab, scored, args)
    engine.check_integrity()
    engine.executor.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--tops", type=int, default=20)
    parser.add_argument("--long", type=int, default=16_384, help="tokens of the prompt that is scored")
    parser.add_argument(
        "--batch", type=int, default=0, help="sequences that a teacher scores; 0: the other experiments"
    )
    parser.add_argument("--last", type=int, default=1024, help="tokens at the end of each that are scored")
    parser.add_argument("--chosen", type=int, default=64, help="named tokens at each of these")
    parser.add_argument("--samples", type=int, default=8, help="sequences that share what comes before")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk", type=int, help="tokens of a step; absent: as the worker chooses")
    parser.add_argument("--kv-pages", type=int, help="absent: as many as the rows fill")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    results = []
    for row in cases(args):
        results.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
        print(json.dumps(results[-1]), flush=True)
    for title, key in (("likeliest tokens", "asking"), ("log-probs of a prompt", "scored"), ("a teacher", "way")):
        if any(key in row for row in results):
            print_table(f"{args.shape}, {title}", [row for row in results if key in row])
    write_results(args.out, results, shape=args.shape)


if __name__ == "__main__":
    main()
