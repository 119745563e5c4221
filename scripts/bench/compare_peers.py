"""Compares engines in one run: ours, the service around it, vLLM and transformers' continuous batching.

    PYTHONPATH=.:kernels python -m scripts.bench.compare_peers --out FILE --engines ours vllm --experiments decode

The engines run one after the other, each in its own process, on the same shapes, random weights, prompts and lengths.
Rows are printed at once and merged into FILE, where a new row replaces an older one of the same kind. Each row has its
floor: weights once and KV once per step, over the read bandwidth of the same run.

vLLM is measured if it is importable. If it has its own environment, --vllm-python names its Python, and --vllm-env a
file with the environment as `env -0` writes it. The output of an engine goes to FILE's name with `.ENGINE.log`.

`--engines service --gpus 2 --workers 1 2` measures one worker on both GPUs, and then two workers of one GPU each that
share the work, as the client spreads it.

`--experiments repeats --engines ours ours-suffix ours-ngram ours-auto vllm vllm-ngram vllm-ngram-gpu` measures
speculation by what was said before, on text that repeats: the same weights make it in all engines.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from scripts.bench.peers.job import ENGINES, EXPERIMENTS, VLLM, Job
from scripts.bench.peers.runs import Report, child_environment, run_child
from scripts.bench.shapes import SHAPES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the children, print and write; returns 1 if one failed."""
    args = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception, so that the running engine ends, too
    deadline_s = time.monotonic() + args.budget
    report = Report(args.out)
    failed = False
    report.ceilings(run_child(["ceilings"], sys.executable, child_environment(None), None, deadline_s))
    for shape in args.shapes:
        for engine, workers in _engines(args):
            job = replace(_job(args), engine=engine, shape=shape, workers=workers)
            own = engine in VLLM
            python = args.vllm_python if own and args.vllm_python else sys.executable
            environment = child_environment(args.vllm_env if own else None)
            log = args.out.with_suffix(f".{engine}{f'-{workers}' if workers > 1 else ''}.log")
            for row in run_child([job.to_json()], python, environment, log, deadline_s):
                failed |= "error" in row
                report.add(job, row)
    report.compare()
    return int(failed)


def _engines(args: argparse.Namespace) -> list[tuple[str, int]]:
    """The engines, each with its number of workers; only the service has several."""
    return [(engine, count) for engine in args.engines for count in (args.workers if engine == "service" else (1,))]


def _job(args: argparse.Namespace) -> Job:
    given = {name: value for name, value in vars(args).items() if name != "workers"}
    return Job.of({field.name: given[field.name] for field in fields(Job) if field.name in given})


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usual = Job()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file to create or extend")
    add("--engines", nargs="+", choices=ENGINES, default=["ours"])
    add("--experiments", nargs="+", choices=EXPERIMENTS, default=["decode"])
    add("--shapes", nargs="+", choices=SHAPES, default=["qwen3-8b"])
    add("--layers", type=int, default=usual.layers, help="only the first ones of each shape, where memory is short")
    add("--gpus", type=int, default=usual.gpus, help="of service and vllm: they run the model together")
    add(
        "--workers",
        type=int,
        nargs="+",
        default=[1],
        help="of service, in turn: each runs the model on an equal part of --gpus, and they share the work",
    )
    add("--budget", type=float, default=3600.0, help="seconds for the whole run; then the running engine is ended")
    add("--device", default=usual.device, help="device of ours and transformers: auto, cpu or cuda")
    add("--vllm-python", help="Python of the vLLM process")
    add("--vllm-env", type=Path, help="environment of the vLLM process, as env -0 writes it")
    add("--rows", type=int, nargs="+", default=list(usual.rows), help="of decode, contexts and repeats")
    add("--context-rows", type=int, nargs="+", default=list(usual.context_rows), help="of contexts; default: --rows")
    add("--prompt", type=int, default=usual.prompt, help="tokens, of decode and post")
    add("--new", type=int, default=usual.new, help="tokens, of decode")
    add("--repeats", type=int, default=usual.repeats, help="runs of decode, contexts and repeats; the best counts")
    add("--contexts", type=int, nargs="+", default=list(usual.contexts))
    add("--context-steps", type=int, default=usual.context_steps)
    add("--context-groups", type=int, nargs="+", default=list(usual.context_groups), help="rows of one prompt")
    add("--count-experts", action="store_true", help="count vLLM's distinct experts, too; its steps take 1%% longer")
    add("--post-rows", type=int, default=usual.post_rows)
    add("--post-new", type=int, default=usual.post_new)
    add("--short-requests", type=int, default=usual.short_requests)
    add("--short-prompt", type=int, default=usual.short_prompt)
    add("--short-new", type=int, nargs="+", default=list(usual.short_new))
    add("--job-rows", type=int, default=usual.job_rows, help="of short, long_job, prefill and arrivals")
    add("--job-prompts", type=int, default=usual.job_prompts)
    add("--job-completions", type=int, default=usual.job_completions, help="of each prompt")
    add("--job-prompt", type=int, default=usual.job_prompt, help="tokens")
    add("--job-scale", type=float, default=usual.job_scale, help="shortens all completions of long_job")
    add("--group-rows", type=int, nargs="+", default=list(usual.group_rows))
    add("--group-prompts", type=int, nargs="+", default=list(usual.group_prompts), help="tokens")
    add("--group-sizes", type=int, nargs="+", default=list(usual.group_sizes), help="completions of each prompt")
    add("--group-requests", nargs="+", choices=usual.group_requests, default=list(usual.group_requests))
    add("--group-new", type=int, default=usual.group_new, help="tokens of a completion")
    add("--prefill-requests", type=int, default=usual.prefill_requests)
    add("--prefill-prompt", type=int, default=usual.prefill_prompt, help="tokens")
    add("--arrivals-per-s", type=float, nargs="+", default=list(usual.arrivals_per_s))
    add("--arrivals-s", type=float, default=usual.arrivals_s, help="how long requests arrive")
    add("--arrivals-prompt", type=int, default=usual.arrivals_prompt, help="tokens")
    add("--arrivals-new", type=int, default=usual.arrivals_new, help="tokens of a completion")
    add("--repeat-prompts", type=int, nargs="+", default=list(usual.repeat_prompts), help="tokens")
    add("--repeat-new", type=int, default=usual.repeat_new, help="tokens of a completion")
    add(
        "--repeat-chances",
        type=float,
        nargs="+",
        default=list(usual.repeat_chances),
        help="that the text of repeats goes on as before: drafts are right about as often",
    )
    add("--drafts", type=int, default=usual.drafts, help="of a row in a step, at most, in engines that speculate")
    args = parser.parse_args(argv)
    if wrong := [count for count in args.workers if count < 1 or args.gpus % count]:
        parser.error(f"--workers {wrong[0]} must divide --gpus {args.gpus}")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
