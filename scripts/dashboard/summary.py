"""Prints what workers have done, from their offline W&B runs, without W&B, a network or an account.

    python -m scripts.dashboard.summary runs/wandb           # all runs below it, and the sum of each group
    python -m scripts.dashboard.summary RUN_FOLDER --all     # everything that the run has, also its settings

Also for processes that were killed: their runs have what they had done a few seconds before.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout.metrics.definitions import TOTALS
from scripts.dashboard.offline_run import OfflineRun, read_offline_run

_TOTALS = [metric.name for metric in TOTALS]
_SHOWN = [*_TOTALS, "gpu/active_pct", "rollout/tokens_per_s", "step/decode_ms", "completion/length_mean"]


def read_runs(folder: Path) -> list[OfflineRun]:
    """The run in a folder, or all runs in folders below it. Raises ValueError without a run, or OSError."""
    if list(folder.glob("*.wandb")):
        return [read_offline_run(folder)]
    found: dict[str, OfflineRun] = {}
    for file in sorted(folder.glob("offline-run-*/run-*.wandb")):
        if file.name not in found:
            found[file.name] = read_offline_run(file)
    if not found:
        raise ValueError(f"{folder} has no offline run; give the folder of one (offline-run-...), or the one above it")
    return list(found.values())


def lines(runs: Sequence[OfflineRun], everything: bool = False) -> Iterator[str]:
    """A paragraph for each run, and one for each group of several."""
    for run in runs:
        yield f"{run.name or '-'}: run {run.id or '-'}, project {run.project or '-'}, group {run.group or '-'}"
        if run.processes > 1:
            yield f"  {run.processes} processes, one after the other; only total/... is of all of them"
        if not run.rows and not run.summary:
            yield "  it ended before its first report"
        named = (
            run.summary | dict(_flat(run.config)) if everything else {name: run.summary.get(name) for name in _SHOWN}
        )
        yield from _table({name: value for name, value in named.items() if _is_shown(name, value)})
    for group in dict.fromkeys(run.group for run in runs if run.group):
        members = [run for run in runs if run.group == group]
        if len(members) > 1:
            yield f"group {group}, {len(members)} runs"
            sums = {name: sum(run.summary.get(name, 0) for run in members) for name in _TOTALS}
            yield from _table(sums | {"total/wall_s": max(run.summary.get("total/wall_s", 0) for run in members)})


def _is_shown(name: str, value: Any) -> bool:
    return isinstance(value, int | float | str) and not name.startswith("_")


def _table(values: dict[str, Any]) -> Iterator[str]:
    width = max(map(len, values), default=0)
    for name, value in values.items():
        yield f"  {name:{width}}  {f'{value:.6g}' if isinstance(value, float) else value}"


def _flat(settings: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summaries; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.dashboard.summary", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a run, or the folder of several")
    parser.add_argument("--all", action="store_true", help="all metrics and settings")
    given = parser.parse_args(arguments)
    try:
        for line in lines(read_runs(given.folder), given.all):
            print(line)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
