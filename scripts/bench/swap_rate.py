"""Measures tokens a second while updates of the weights keep coming, for each way to treat the KV of running rows.

    PYTHONPATH=.:kernels python -m scripts.bench.swap_rate --out scripts/bench/results/swap_rate_cpu.json

A worker with random weights of a small shape runs for each way:

    keep                rows go on with the KV that they have
    recompute, 1.0      KV is computed again, and every update is applied at once
    recompute, FRACTION    KV is computed again, and updates wait as `engine.recompute_fraction` says

The trainer publishes one update every so many seconds. It waits until its tensors are copied (`held`), but not until
the update is applied. All rows begin anew for each measurement. Prompts are random; with `--prompts` smaller than
`--rows`, rows share a prompt. The measurements of a round follow each other and the table has the median of the rounds,
so a load of the machine that changes slowly affects all of them alike.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from scripts.bench.driver import random_prompt
from scripts.bench.output import DEFAULT_FOLDER, spread, write_results
from scripts.bench.shapes import SHAPES, kv_pages, model_config, write_checkpoint
from scripts.bench.swap_weights import shape_tensors
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker
from trainer_bridge.publish.handle import PublishHandle
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError

_PAGE = 16
_LONG_S = 1e6  # of a request; it is cancelled earlier
_POLL_S = 0.01


class Trainer:
    """Publishes an update every `interval_s` seconds from a thread, until `stop`."""

    def __init__(self, publisher: WeightPublisher, tensors: Any, version: int, interval_s: float) -> None:
        self._publisher, self._tensors, self._interval_s = publisher, tensors, interval_s
        self._next_version = version
        self._handles: list[PublishHandle] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> tuple[int, dict[str, Any]]:
        """End it and wait for the last update; returns the next version, and what became of the updates."""
        self._stop.set()
        self._thread.join()
        waits_s, errors = [], Counter[str]()
        for handle in self._handles:
            try:
                (report,) = handle.applied(60.0)
                waits_s.append(report.phases["wait"])
            except RolloutError as error:
                errors[error.code] += 1
        facts = {"published": len(self._handles), "applied": len(waits_s), "errors": dict(errors)}
        return self._next_version, facts | {"wait_s": statistics.median(waits_s) if waits_s else None}

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.is_set():
            handle = self._publisher.publish(self._tensors, self._next_version)
            self._next_version += 1
            self._handles.append(handle)
            handle.held(60.0)
            due_s = max(due_s + self._interval_s, time.monotonic())
            self._stop.wait(due_s - time.monotonic())


class Bench:
    """One worker and its publisher."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path, endpoint: str) -> None:
        self.args = args
        self.client = RolloutClient(endpoint, timeout_s=60.0)
        self.publisher = WeightPublisher(endpoint)
        self._tensors = shape_tensors(checkpoint, torch.device("cpu"))
        self._version = 1

    def measured(self, interval_s: float | None) -> dict[str, Any]:
        """Tokens a second of rows that begin now, while an update comes every `interval_s` seconds; None: no update."""
        args = self.args
        vocab = model_config(args.shape)["vocab_size"]
        streams = [
            self.client.generate(
                prompt=random_prompt(vocab, args.prompt, i),
                n=args.rows // args.prompts,
                max_tokens=args.new,
                stop={"ignore_eos": True},
                sampling={"temperature": 1.0, "seed": i},
                stream="completions",
                timeout_s=_LONG_S,
            )
            for i in range(args.prompts)
        ]
        while self._running() < args.rows:
            time.sleep(_POLL_S)
        trainer = None if interval_s is None else Trainer(self.publisher, self._tensors, self._version, interval_s)
        time.sleep(args.warm_s)
        tokens, began_s = self._tokens(), time.monotonic()
        time.sleep(args.seconds)
        rate = (self._tokens() - tokens) / (time.monotonic() - began_s)
        facts: dict[str, Any] = {}
        if trainer is not None:
            self._version, facts = trainer.stop()
        for stream in streams:
            stream.cancel()
        self.client.ack([stream.wait().id for stream in streams])
        while self._running():
            time.sleep(_POLL_S)
        return {"tokens_per_s": rate, **facts}

    def close(self) -> None:
        """End the connections."""
        self.publisher.close()
        self.client.close()

    def _running(self) -> int:
        return self.client.status()["rows"]["running"]

    def _tokens(self) -> int:
        return self.client.status()["tokens"]


def run(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start the workers, measure round after round, and end them; returns the rows of the table."""
    checkpoint = write_checkpoint(args.shape, folder / args.shape)
    context = args.prompt + args.new
    settings = {
        "load_format": "random",
        "device": "cpu",
        "max_rows": args.rows,
        "max_context_tokens": context,
        "page_size": _PAGE,
        "kv_pages": kv_pages(args.rows, context, _PAGE),
        "wandb": False,
    }
    ways = {"keep": {"kv_on_swap": "keep"}} | {
        f"recompute, {fraction:g}": {"kv_on_swap": "recompute", "recompute_fraction": fraction}
        for fraction in (1.0, args.fraction)
    }
    found: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        benches = {}
        for way, more in ways.items():
            worker = stack.enter_context(start_worker(checkpoint, **settings, **more))
            benches[way] = Bench(args, checkpoint, worker.endpoint)
            stack.callback(benches[way].close)
        for _ in range(args.rounds):
            for interval_s in (None, *args.every):
                for way, bench in benches.items():
                    row = bench.measured(interval_s)
                    found.setdefault((way, interval_s), []).append(row)
                    print(json.dumps({"kv": way, "every_s": interval_s, **row}), flush=True)
    return [{"kv": way, "every_s": every_s, **over_rounds(rows)} for (way, every_s), rows in found.items()]


def over_rounds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row from the rows of the rounds: the spread of rates and waits, the sums of the counts of updates."""
    row: dict[str, Any] = {"rounds": len(rows), "tokens_per_s": spread([row["tokens_per_s"] for row in rows])}
    if "published" in rows[0]:
        row |= {name: sum(row[name] for row in rows) for name in ("published", "applied")}
        row["errors"] = dict(sum((Counter(row["errors"]) for row in rows), Counter()))
        row["wait_s"] = spread([row["wait_s"] for row in rows if row["wait_s"] is not None])
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print each measurement at once, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="toy")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=24, help="different prompts; divides --rows")
    parser.add_argument("--prompt", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=4096, help="tokens of a completion")
    parser.add_argument("--every", type=float, nargs="+", default=[0.5, 0.1], help="seconds between two updates")
    parser.add_argument("--fraction", type=float, default=0.3, help="recompute_fraction of the third way")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a measurement")
    parser.add_argument("--warm-s", type=float, default=2.0, help="seconds of updates before a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "swap_rate_cpu.json")
    args = parser.parse_args(argv)
    if args.rows % args.prompts:
        parser.error("--prompts must divide --rows")
    with tempfile.TemporaryDirectory(prefix="bench-swap-rate-") as folder:
        rows = run(args, Path(folder))
    write_results(args.out, rows)


if __name__ == "__main__":
    main()
