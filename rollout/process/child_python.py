"""Children that run a module of this package: they look for imports where their parent does, and nowhere else."""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module. Without -P every import would be looked for in the current folder first."""
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path() -> dict[str, str]:
    """The variable by which a child looks for imports where this process does."""
    return {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
