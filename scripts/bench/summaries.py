"""Reads the summaries of `scripts/bench/results` for charts and tables: rows, text of figures, how they were measured.

A summary of `compare_peers` may hold several runs of the same work. Then the latest run counts, for each row alone.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.output import DEFAULT_FOLDER

#: Names that scripts had when summaries were written, and the names of the same scripts today.
_RENAMED = (
    (r"^scripts/bench_pipeline\.py", "python -m scripts.bench.gpu_pipeline"),
    (r"^scripts/soak\.py", "python -m scripts.check.run_soak"),
    (r"^scripts/profile_decode\.py", "python -m scripts.bench.profile_decode"),
    (r"^(?:python )?scripts/(bench|check)_(\w+)\.py", r"python -m scripts.\1.\2"),
    (r"^scripts/(\w+)\.py", r"python -m scripts.\1"),
    (r"^python -m scripts\.train_grpo( --steps \d+) --no-wandb", r"python -m scripts.learn --task counting\1"),
    (r"^rollout bench ", "python -m scripts.bench."),
    (r"\bexpert_dtype=", "weight_dtype="),
)

Row = Mapping[str, Any]
#: What a table or a chart shows: text, a figure, or nothing.
Cell = str | float | None
#: The engines of this project, in the summaries of `compare_peers`: in its process, or through its socket.
HERE = ("ours", "service")
_IDENTITY = (
    *("shape", "engine", "experiment", "rows", "prompt", "new", "context", "requests", "completions"),
    *("scale", "chance", "gpus", "workers", "code"),
)


@cache
def summary(name: str, folder: Path = DEFAULT_FOLDER) -> dict[str, Any]:
    """The summary `NAME.json`."""
    return dict(json.loads((folder / f"{name}.json").read_text()))


def rows(name: str, folder: Path = DEFAULT_FOLDER, **where: Any) -> list[Row]:
    """The rows of a summary with all the values of `where`, without rows that were skipped, failed or superseded.

    `engine="here"` stands for both engines of this project. A value of None asks for rows without that field.
    """
    latest: dict[str, Row] = {}
    for row in summary(name, folder)["rows"]:
        key = json.dumps([row.get(field) for field in _IDENTITY]) if "run" in row else str(len(latest))
        if "skipped" not in row and "error" not in row and (key not in latest or row["run"] > latest[key]["run"]):
            latest[key] = row
    return [row for row in latest.values() if all(_has(row, field, value) for field, value in where.items())]


def row(name: str, folder: Path = DEFAULT_FOLDER, **where: Any) -> Row | None:
    """The only row with the values of `where`, or None.

    Raises:
        ValueError: several rows have them.
    """
    found = rows(name, folder, **where)
    if len(found) > 1:
        raise ValueError(f"{name}: {len(found)} rows with {where}")
    return found[0] if found else None


def value(name: str, field: str, **where: Any) -> float | None:
    """One figure of the only row with the values of `where`; None if there is no such row or figure."""
    found = row(name, **where)
    return None if found is None else found.get(field)


def ratio(above: float | None, below: float | None, unit: str = "x") -> str | None:
    """A quotient as text, with two decimals."""
    return None if above is None or below is None else f"{above / below:.2f}{unit}"


def figure(cell: Cell) -> str:
    """A cell as text: three significant digits, one decimal from 100 on, whole from 1,000 on; nothing is a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or cell == 0 or abs(cell) >= 999.5:
        return f"{cell:,.0f}"
    digits = 2 - math.floor(math.log10(abs(float(f"{cell:.2e}"))))
    return f"{cell:.{max(1, digits)}f}"


class Source(NamedTuple):
    """How a summary was measured. `when` has the day or the times of the runs, with the peers."""

    file: str
    machine: str
    when: str
    note: str
    command: str


def source(name: str, folder: Path = DEFAULT_FOLDER) -> Source:
    """The source of a summary."""
    data = summary(name, folder)
    command = data.get("command") or next((fact["command"] for fact in data.get("facts", ()) if "command" in fact), "")
    when = "; ".join(_days(data, rows(name, folder)))
    return Source(f"{name}.json", _machine(data), when, data.get("note", ""), shown_command(command))


def shown_command(command: str) -> str:
    """A recorded command under the name that its script has now, without its output file."""
    command = re.sub(r" --(out|folder) \S+", "", command)
    for old, new in _RENAMED:
        command = re.sub(old, new, command)
    return command


def _has(row: Row, field: str, wanted: Any) -> bool:
    if field == "engine" and wanted == "here":
        return row.get("engine") in HERE
    return bool(row.get(field) == wanted)


def _machine(data: Mapping[str, Any]) -> str:
    gpus = [fact["ceilings"].get("gpu") for fact in data.get("facts", ()) if "ceilings" in fact]
    machine = data.get("machine", {})
    gpu = next(filter(None, [*gpus, machine.get("gpu")]), None)
    if gpu:
        return str(gpu).removeprefix("NVIDIA ").removesuffix(" HBM3")
    return f"CPU, {machine['cores']} cores" if machine.get("cores") else ""


def _days(data: Mapping[str, Any], found: Sequence[Row]) -> Sequence[str]:
    """The day of a summary; for several engines also how long after ours the peers ran, with their versions."""
    runs: dict[str, set[datetime]] = {}
    for row in found:
        if "run" in row:
            engine = "here" if row["engine"].startswith(HERE) else row["engine"]
            runs.setdefault(engine, set()).add(datetime.fromisoformat(row["run"]))
    if not runs:
        return [data["date"]] if "date" in data else []
    versions = {fact["engine"]: fact["version"] for fact in data["facts"] if "version" in fact}
    named = {engine: _peer(engine, versions.get(engine)) for engine in runs}
    ours = "here" if "here" in runs else next(iter(runs))
    first, *again = sorted(runs.pop(ours))
    day = first.strftime("%Y-%m-%d") if ours == "here" else f"{named[ours]} {first:%Y-%m-%d}"
    peers = [f"{named[engine]} {' and '.join(_apart(first, run) for run in sorted(runs[engine]))}" for engine in runs]
    return [", ".join([day, *(f"again {_apart(first, run)}" for run in again)]), *peers]


def _apart(first: datetime, run: datetime) -> str:
    """How long a run began after the first one, or before it."""
    if run == first:
        return "in the same run"
    minutes = round(abs((run - first).total_seconds()) / 60)
    if minutes == 0:
        return "at the same time"
    units = (("day", 1440), ("hour", 60), ("minute", 1))
    unit, size = next((each for each in units if minutes >= 2 * each[1]), units[-1])
    count = round(minutes / size)
    return f"{count} {unit}{'' if count == 1 else 's'} {'later' if run > first else 'earlier'}"


def _peer(engine: str, version: str | None) -> str:
    name = engine.replace("vllm", "vLLM")
    return f"{name} {version}" if version else name
