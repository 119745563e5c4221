"""`rollout demo`: hands its arguments to the demo's own `main(argv) -> int`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

COMMANDS = {"demo": "a worker and a trainer that checks 16K-token completions across a weight swap"}


def add_parsers(commands: Any) -> None:
    """Declare the command for `rollout --help`; `run` runs it before the parser sees it."""
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)


def run(command: str, arguments: Sequence[str]) -> int:
    """Run the demo; returns its exit code."""
    from rollout.libraries import loading_libraries
    from rollout.progress import stage

    with stage("loading libraries", quiet=True), loading_libraries():
        main = importlib.import_module(f"rollout.{command}.run").main
    code: int = main(list(arguments))
    return code
