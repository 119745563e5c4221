"""`rollout status`: the state of a worker in about ten lines, in full with `--all`, or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollout.cli.connection import add_worker, connect, where
from rollout.cli.parser import CommandError

DESCRIPTION = "Show the state of a worker."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = DESCRIPTION
    add_worker(parser, timeout_s=10.0)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--all", action="store_true", help="show every field of the reply")
    shape.add_argument("--json", action="store_true", help="print the reply as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the status."""
    from trainer_bridge.wire.errors import RolloutError

    try:
        with connect(args.endpoint, args) as client:
            status = client.status()
    except RolloutError as error:
        raise CommandError(where(args.endpoint, error)) from error
    if args.json:
        print(json.dumps(status))
    else:
        _print_table(args.endpoint, _every_field(status) if args.all else _summary(status))
    return 0


def _every_field(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in status.items():
        yield name, _shown(value)


def _summary(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The most important lines. A line is left out if the worker did not send its fields."""
    part = _Fields(status)
    yield from part.line("model", "{model}")
    yield from part.line("state", "{state}")
    yield from part.line("up for", "{uptime_s:.0f} s")
    if part.stale:
        yield from part.line("stale", "{stale}")
    yield from part.line("weights", "version {weights_version}")
    yield from part.line("rows", "{rows[running]} of {rows[max]} generate")
    yield from part.line("queue", "{queue[waiting]} of {queue[max]} completions wait for a row")
    yield from part.line("clients", "{queue[clients]} have completions in the queue")
    yield from part.line("speed", "{tokens_per_s:.0f} tokens/s")
    yield from part.line("device", "{gpu_active_pct:.1f}% of the time active")
    yield from part.line("KV pages", "{pages[used]} used, {pages[cached]} cached, {pages[free]} free of {pages[total]}")
    yield from part.line("preemptions", "{preemptions}")
    yield from part.line("capabilities", "{capabilities}")
    for rank in status.get("ranks") or ():
        name = f"rank {rank['rank']}"
        yield name, "{device}, process {pid}, {done} steps, beat {beat_age_s:.1f} s ago".format_map(rank)
    for problem in status.get("problems") or ():
        yield "problem", problem


class _Fields:
    """Formats lines from the fields of a reply."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self.stale = bool(status.get("stale"))
        self._status = dict(status) | {"capabilities": _shown(status.get("capabilities", []))}

    def line(self, name: str, text: str) -> Iterator[tuple[str, str]]:
        """The line, or nothing if the reply of an older worker lacks one of its fields."""
        try:
            yield name, text.format_map(self._status)
        except KeyError:
            return


def _print_table(endpoint: str, lines: Iterator[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=endpoint, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, text in lines:
        table.add_row(name, text)
    Console(markup=False, highlight=False).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.2g}"
    return str(value)
