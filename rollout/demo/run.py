"""`rollout demo`: runs a worker and a trainer, two processes on the CPU, and prints a table of results.

    rollout serve checkpoints/ones  <-- zmq -->  python -m rollout.demo.trainer  (publishes checkpoints/twos)

The models count: the first continues `17:` with ` 18 19 20`, the second in twos. So every token of every completion can
be checked, also across the change of weights. The demo ends with status 1 if a single token is wrong.
"""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rollout.demo.counting import PROBE_TOKENS
from rollout.process.child_processes import import_path, module_command
from trainer_bridge.client.launch import WorkerFailed, WorkerProcess, start_worker

CHECKPOINTS = Path(__file__).parent / "checkpoints"
_PROBE_ROWS = 1


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo with the arguments of `rollout demo`; 0 if every token of every completion is right."""
    console = Console()
    try:
        return _run(args, console)
    except WorkerFailed as error:
        console.print(f"[red]The worker failed: {error}[/red]", highlight=False)
        return 1


def _run(args: argparse.Namespace, console: Console) -> int:
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    rows = len(args.prompts) * args.n + _PROBE_ROWS
    console.print(f"starting a worker on {CHECKPOINTS / 'ones'} ({rows} rows) ...")
    began_s = time.perf_counter()
    worker_command: dict[str, Any] = {} if args.worker is None else {"command": tuple(args.worker)}
    with start_worker(
        CHECKPOINTS / "ones",
        log_file=folder / "worker.log",
        max_rows=rows,
        max_context_tokens=max(args.tokens, PROBE_TOKENS) + 64,
        pipeline_depth=args.pipeline_depth,
        jsonl=folder / "metrics.jsonl",
        wandb=args.wandb,
        env={"WANDB_DIR": str(folder)},
        wandb_project="rollout-demo",
        interval_s=2.0,
        **worker_command,
    ) as worker:
        console.print(f"worker {worker.pid} is ready at {worker.endpoint}; starting a trainer ...")
        status = _run_trainer(worker, args, folder / "report.json")
        _draw_trace(worker, folder, console)
        worker.stop("drain")
        ended = _last_fact(worker.log_path)
    report = _read_report(folder / "report.json")
    if report is not None:
        _print_table(console, report, ended)
    _print_places(console, folder, ended, time.perf_counter() - began_s)
    return _verdict(console, status, report)


def _run_trainer(worker: WorkerProcess, args: argparse.Namespace, report: Path) -> int:
    report.unlink(missing_ok=True)
    command = module_command("rollout.demo.trainer", worker.endpoint, "--twos", str(CHECKPOINTS / "twos"))
    command += ["--report", str(report), "--n", str(args.n), "--tokens", str(args.tokens), "--prompts", *args.prompts]
    return subprocess.run(command, check=False, env={**os.environ, **import_path()}).returncode


def _draw_trace(worker: WorkerProcess, folder: Path, console: Console) -> None:
    """Draw the last steps; if that is not possible, for example without matplotlib, say so and go on."""
    files = ["--out", str(folder / "trace.json"), "--png", str(folder / "trace.png")]
    command = module_command("rollout", "trace", worker.endpoint, *files)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **import_path()})
    if done.returncode:
        console.print(f"[yellow]no picture of the last steps: {done.stderr.strip()}[/yellow]", highlight=False)


def _read_report(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _last_fact(log: Path) -> dict[str, Any]:
    """The worker's last line: its totals and the folder of its W&B run."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith('{"event": "ended"'):
            return json.loads(line)
    return {"wandb_run": None, "totals": {}}


def _print_table(console: Console, report: dict[str, Any], ended: dict[str, Any]) -> None:
    table = Table(title="completions")
    for heading in ("prompt", "#", "tokens", "of each version", "numbers", "counted to", "check"):
        table.add_column(heading, justify="left" if heading in ("prompt", "check") else "right")
    for row in report["completions"]:
        runs = "  ".join(f"v{version}: {count}" for version, count in row["versions"])
        verdict = "right" if row["error"] is None else row["error"]
        numbers = [str(row[key]) for key in ("index", "tokens")]
        table.add_row(row["prompt"], *numbers, runs, str(row["numbers"]), str(row["last"]), verdict)
    console.print(table)
    totals = ended["totals"]
    facts = Table(title="the run", show_header=False)
    facts.add_row("tokens per second", f"{report['tokens'] / report['seconds']:.0f}")
    facts.add_row("device active while generating", f"{report['gpu_active_pct']:.1f} %")
    facts.add_row("weights: publish to applied", f"{report['publish_s'] * 1e3:.0f} ms")
    facts.add_row("weights: pause of decoding", f"{report['swap_pause_s'] * 1e3:.2f} ms")
    facts.add_row("probes that ended at a stop string", str(report["probes"]))
    if totals:
        facts.add_row("zombie rows", f"{totals['rollout/zombie_rows_pct']:.4f} %")
        facts.add_row("prompt tokens from cache", f"{totals['kv/prefix_hit_pct']:.1f} %")
        facts.add_row("bookkeeping per step", f"{totals['step/bookkeeping_ms']:.3f} ms")
        facts.add_row("decode step", f"{totals['step/decode_ms']:.3f} ms")
    console.print(facts)


def _print_places(console: Console, folder: Path, ended: dict[str, Any], seconds: float) -> None:
    for what, where in (
        ("W&B run", ended["wandb_run"] or "off"),
        ("metrics", folder / "metrics.jsonl"),
        ("trace", folder / "trace.png"),
        ("worker's log", folder / "worker.log"),
    ):
        console.print(f"{what:14}{where}", highlight=False, soft_wrap=True)
    console.print(f"{'all of it in':14}{seconds:.0f} s", highlight=False)


def _verdict(console: Console, status: int, report: dict[str, Any] | None) -> int:
    if status == 0 and report is not None and not report["errors"]:
        console.print("[green]Every token of every completion is right.[/green]")
        return 0
    for error in [] if report is None else report["errors"][:10]:
        console.print(f"[red]{error}[/red]", highlight=False)
    console.print(f"[red]The demo failed (trainer status {status}).[/red]")
    return 1
