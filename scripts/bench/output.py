"""The output of benchmarks: a table on the terminal, and JSON in a file with the machine and the command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

DEFAULT_FOLDER = Path(__file__).parent / "results"


def write_results(path: Path, rows: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Write `rows` and the circumstances as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**circumstances(), **facts, "rows": list(rows)}, indent=1) + "\n")


def circumstances() -> dict[str, Any]:
    """Date, machine and command of this run."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": _command(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _command() -> str:
    """The command line; a module that runs with `-m` is shown by its name."""
    main = sys.modules["__main__"].__spec__
    words = ["python", "-m", main.name] if main is not None else [sys.argv[0]]
    return shlex.join([*words, *sys.argv[1:]])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `rows`, maps with the same keys."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
