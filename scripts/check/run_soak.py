"""Runs mixed traffic with faults against supervised workers, and checks every completion.

    PYTHONPATH=.:kernels python -m scripts.check.run_soak --seconds 600 --workers 2 --seed 1 --out
        scripts/bench/results/soak.json
    PYTHONPATH=.:kernels python -m scripts.check.run_soak --workers 1 --tensor-parallel 2 --device cuda

The exit status is 1 if a token was wrong, a request was lost, a resource leaked, or memory grew.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.output import circumstances, print_table, spread, write_results
from scripts.check.soak.run import SoakReport, soak

_SPARE_MIB = 40.0  # allowed growth of a process, from a fifth of the time to the end
_SPARE_SHARE = 0.1
_SETTLED_S = 100.0  # a younger process still fills its pools


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak; 0 if it was clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds with new requests and faults")
    parser.add_argument("--workers", type=int, default=2, help="supervised worker processes")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of each worker; they are lost, too")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests and faults")
    parser.add_argument("--clients", type=int, default=10, help="number of clients")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="folder for the workers' log")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True)
    traffic = args.seconds, args.workers, args.seed, args.clients
    report = asyncio.run(soak(*traffic, args.folder, console.print, args.tensor_parallel, args.device))
    grown = grown_processes(report)
    show(console, report)
    for complaint in [*report.complaints, *grown]:
        console.print(f"[red]{complaint}[/red]", highlight=False)
    clean = report.clean and not grown
    if args.out is not None:
        facts: dict[str, Any] = {**asdict(report), "restart_s": spread(report.restart_s)}
        rows = facts.pop("memory")
        write_results(args.out, rows, clean=clean, **facts)
    console.print("[green]clean[/green]" if clean else "[red]not clean[/red]")
    return 0 if clean else 1


def grown_processes(report: SoakReport) -> list[str]:
    """A sentence for every process whose memory grew; young processes are left out."""
    whole_s = report.seconds + report.drain_s
    return [
        f"{row['process']} grew from {row['mib']:.0f} to {row['at_end']:.0f} MiB"
        for row in report.memory
        if whole_s - row["from_s"] >= _SETTLED_S and row["at_end"] > row["mib"] * (1 + _SPARE_SHARE) + _SPARE_MIB
    ]


def show(console: Console, report: SoakReport) -> None:
    """Print the figures."""
    table = Table(title=f"soak: {report.seconds:g} s, {report.workers} workers, seed {report.seed}", show_header=False)
    simple = ("tokens", "resumes", "swapped_while_running", "restarts", "preemptions", "reclaimed", "wrong", "lost")
    table.add_row("requests", str(sum(report.requests.values())))
    table.add_row("completions", str(sum(report.finished.values())))
    for name in simple:
        table.add_row(name.replace("_", " "), f"{getattr(report, name):,}")
    table.add_row("longest restart, s", f"{max(report.restart_s, default=0.0):.1f}")
    table.add_row("longest pause of a swap, ms", f"{report.most_pause_s * 1e3:.1f}")
    table.add_row("until the last request was done, s", f"{report.drain_s:.1f}")
    for title in ("requests", "finished", "faults", "excused"):
        facts = getattr(report, title)
        table.add_row(f"{title}, by kind", "\n".join(f"{name}: {count}" for name, count in facts.items()))
    console.print(table)
    print_table("resident memory, MiB", report.memory)
    machine = circumstances()["machine"]
    console.print(f"{machine['processor']}, {machine['cores']} cores", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
