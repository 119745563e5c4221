"""A whole worker of several ranks through its socket: start-up, ms a decode step, and a killed follower.

    PYTHONPATH=.:kernels python -m scripts.bench.rank_workers [--shape qwen3-8b] [--ranks 2] [--rows 1 8 32] --out FILE

The weights are random. A step is (t(new) - t(1)) / (new - 1), as a client sees it. In the end one follower is killed
while a completion runs, and the time is taken until the client knows.
"""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.driver import random_prompt
from scripts.bench.output import print_table, write_results
from scripts.bench.shapes import model_config, write_checkpoint
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess, start_worker

_START_S = 240.0
_WHOLE: dict[str, Any] = {"stop": {"ignore_eos": True}}


def main(argv: Sequence[str] | None = None) -> int:
    """Start the worker, measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.rank_workers", description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--attention-split", choices=("heads", "rows", "context"), default="heads")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(args.shape, Path(folder, "model"))
        flags = {"load_format": "random", "max_rows": max(args.rows), "max_context_tokens": args.prompt + args.new + 64}
        flags["device"] = args.device
        more = {"tensor_parallel": args.ranks, "wandb": False, "log_file": Path(folder, "worker.log")}
        more["attention_split"] = args.attention_split
        began_s = time.monotonic()
        with start_worker(path, wait=False, **flags, **more) as worker:
            worker.wait_ready(_START_S)
            results.append({"what": "start", "s": time.monotonic() - began_s})
            print(results[-1], flush=True)
            with RolloutClient(worker.endpoint, timeout_s=120) as client:
                for rows in args.rows:
                    found = {"what": "step", "split": args.attention_split, "rows": rows}
                    results.append(found | {"ms": _step_ms(client, args, rows)})
                    print(results[-1], flush=True)
            if args.ranks > 1:
                results.append({"what": "killed follower known", "s": _killed_s(args, worker)})
    print_table(f"{args.shape}, {args.ranks} ranks, through the socket", results)
    write_results(args.out, results, shape=args.shape, ranks=args.ranks)
    return 0


def _step_ms(client: RolloutClient, args: argparse.Namespace, rows: int) -> float:
    """Milliseconds of a step with `rows` completions."""
    vocab = model_config(args.shape)["vocab_size"]

    def seconds(new: int, seed: int) -> float:
        requests = [
            {
                "prompt": random_prompt(vocab, args.prompt, seed * 1000 + i),
                "max_tokens": new,
                "seed": i,
                "temperature": 1.0,
                **_WHOLE,
            }
            for i in range(rows)
        ]
        began_s = time.monotonic()
        results = client.generate_many(requests)
        assert all(len(result.completions[0].token_ids) == new for result in results)
        return time.monotonic() - began_s

    seconds(args.new, 1)
    return (
        (min(seconds(args.new, seed) for seed in (2, 3)) - min(seconds(1, seed) for seed in (4, 5)))
        / (args.new - 1)
        * 1e3
    )


def _killed_s(args: argparse.Namespace, worker: WorkerProcess) -> float:
    """Kill a follower while a completion runs; seconds until its client knows."""
    with RolloutClient(worker.endpoint, timeout_s=60) as client:
        stream = client.generate([5, 6, 7], stream="tokens", max_tokens=args.new, stream_every=1, **_WHOLE)
        next(stream)
        os.kill(client.status()["ranks"][1]["pid"], signal.SIGKILL)
        began_s = time.monotonic()
        for _ in stream:
            pass
        assert stream.result is not None
        (completion,) = stream.result.completions
        assert completion.finish_reason == "error", completion
        return time.monotonic() - began_s


if __name__ == "__main__":
    raise SystemExit(main())
