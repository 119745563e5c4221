"""What a launcher is told: one JSON object a line on stdout, and the ready file. Imports nothing heavy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def say(fact: Mapping[str, Any]) -> None:
    """Print a fact as one line of JSON on stdout."""
    print(json.dumps(fact), flush=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


def withdraw(path: Path) -> None:
    """Take a file of `write_whole` away at the end, if what it tells is still of this process."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    if isinstance(told, dict) and told.get("pid") == os.getpid():
        path.unlink(missing_ok=True)
