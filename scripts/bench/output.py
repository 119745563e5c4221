"""The output of benchmarks: a table on the terminal, and a summary in a JSON file.

A summary has the command, the date, the machine and the versions of a run, and the figures that a page shows: the
median and the spread of repeated measurements, not each of them. Every entry of the file is one line, and so is every
row, so a change of one figure is a change of one line:

    {
     "command": "python -m scripts.bench.decode --rows 8",
     ...
     "rows": [
      {"rows": 8, "us": 22.5},
      {"rows": 128, "us": 292.0}
     ]
    }
"""

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DEFAULT_FOLDER = Path(__file__).parent / "results"


def write_results(path: Path, rows: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Write a summary: the circumstances of this run, `facts` in the order of their names, and `rows`."""
    write_summary(path, {**circumstances(), **dict(sorted(facts.items())), "rows": list(rows)})


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` as a JSON file with one line for each entry, and for each map of a list of maps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(summary_text(summary))


def summary_text(summary: Mapping[str, Any]) -> str:
    """The text of a summary's file."""
    entries = []
    for name, value in summary.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        entries.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def spread(values: Sequence[float]) -> dict[str, float]:
    """The least, the median and the most of some measurements; empty without measurements."""
    if not values:
        return {}
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def circumstances() -> dict[str, Any]:
    """Command, date, machine and versions of this run."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": command_line(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {"gpu": gpu, "cores": os.cpu_count(), "processor": _processor()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command of this process, or one with other arguments; a module that runs with `-m` is shown by its name."""
    main = sys.modules["__main__"].__spec__
    words = ["python", "-m", main.name.removesuffix(".__main__")] if main is not None else [sys.argv[0]]
    return shlex.join([*words, *(sys.argv[1:] if arguments is None else arguments)])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `rows`, maps with the same keys."""
    # Some benchmarks also run where a peer is installed, and rich may be missing there.
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
