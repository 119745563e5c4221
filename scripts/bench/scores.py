"""Measures the cost of top log-probs for each token, and of the log-probs of a prompt.

    PYTHONPATH=.:kernels python -m scripts.bench.scores --shape qwen3-8b --rows 32 --out FILE

Random weights of the real shape. No row, one row and all rows request `--tops` tokens. Measured are the wall time
between commits over the second half of the decode steps, and the device time of a step. All rows of a step are drawn
together: one row that requests top log-probs makes all of them use the graph that ends at the logits. Then one prompt
of `--long` tokens is prefilled without and with its log-probs: device time of its prefill steps.
"""

from __future__ import annotations

import argparse
import json
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
                top_logprobs=args.tops if i < asking else 0,
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


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the rows of results, one by one."""
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
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    results = []
    for row in cases(args):
        results.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
        print(json.dumps(results[-1]), flush=True)
    for title, key in (("likeliest tokens", "asking"), ("log-probs of a prompt", "scored")):
        print_table(f"{args.shape}, {title}", [row for row in results if key in row])
    write_results(args.out, results, shape=args.shape)


if __name__ == "__main__":
    main()
