"""`rollout status`: the state of a worker, of several in one table, or of a gateway; in full, or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.cli.connect import add_connection, connect, is_http, where
from rollout.cli.parser import CommandError, UsageError

if TYPE_CHECKING:
    from rollout.cli.gateway_status import GatewayStatus

DESCRIPTION = (
    "Show the state of a worker, of several in one table, or of a gateway. The exit status is 1 if one does not answer."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "endpoints",
        metavar="ADDRESS",
        nargs="+",
        help="address of a worker, such as tcp://127.0.0.1:5757, or of a gateway, such as http://127.0.0.1:8000",
    )
    add_connection(parser, timeout_s=10.0)
    parser.add_argument("--api-key-file", metavar="FILE", help="file whose first line is a token of the gateway")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--all", action="store_true", help="show every field of the reply")
    shape.add_argument(
        "--json", action="store_true", help="print the reply as JSON; for several addresses, one object a line"
    )


class _Answer(NamedTuple):
    """The answer of an address: the status of a worker or a gateway, or a sentence about the error."""

    address: str
    status: Mapping[str, Any] | GatewayStatus | None
    error: str | None = None


def run(args: argparse.Namespace) -> int:
    """Print the status. All addresses are asked at once."""
    if len(set(args.endpoints)) != len(args.endpoints):
        raise UsageError("an address is given twice; give each once")
    with ThreadPoolExecutor(len(args.endpoints)) as threads:
        answers = list(threads.map(lambda address: _ask(address, args), args.endpoints))
    if len(answers) == 1 and answers[0].error is not None:
        raise CommandError(answers[0].error)
    if args.json:
        for answer in answers:
            print(json.dumps(_as_json(answer, several=len(answers) > 1)))
    else:
        _print(answers, args.all)
    return int(any(answer.error is not None for answer in answers))


def _ask(address: str, args: argparse.Namespace) -> _Answer:
    from trainer_bridge.wire.errors import RolloutError

    try:
        if is_http(address):
            from rollout.cli.gateway_status import ask_gateway

            return _Answer(address, ask_gateway(address, args.timeout_s, args.api_key_file))
        with connect(address, args) as client:
            return _Answer(address, client.status())
    except CommandError as error:
        return _Answer(address, None, str(error))
    except RolloutError as error:
        return _Answer(address, None, where(address, error))


def _as_json(answer: _Answer, several: bool) -> dict[str, Any]:
    if answer.status is None:
        return {"endpoint": answer.address, "error": answer.error}
    fields = dict(answer.status) if isinstance(answer.status, Mapping) else answer.status.fields()
    return {"endpoint": answer.address, **fields} if several else fields


def _print(answers: Sequence[_Answer], every_field: bool) -> None:
    workers = [answer for answer in answers if not is_http(answer.address)]
    joined = workers if len(workers) > 1 and not every_field else []
    if joined:
        _print_several(joined)
    for answer in answers:
        if answer not in joined:
            _print_table(answer.address, _lines(answer, every_field))


def _lines(answer: _Answer, every_field: bool) -> Iterator[tuple[str, str]]:
    if answer.status is None:
        yield "error", str(answer.error)
    elif every_field:
        yield from _every_field(_as_json(answer, several=False))
    elif isinstance(answer.status, Mapping):
        yield from _summary(answer.status)
    else:
        yield from answer.status.lines()


#: Columns of the table of several workers, and their texts; `used` is added to the fields of a reply.
_COLUMNS = {
    "STATE": "{state}",
    "VERSION": "{weights_version}",
    "ROWS": "{rows[running]}/{rows[max]}",
    "QUEUE": "{queue[waiting]}",
    "TOK/S": "{tokens_per_s:.0f}",
    "ACTIVE": "{gpu_active_pct:.1f}%",
    "KV": "{used}",
    "UP": "{uptime_s:.0f}s",
    "PID": "{pid}",
    "MODEL": "{model}",
    "METRICS": "{metrics_url}",
}


def _print_several(workers: Sequence[_Answer]) -> None:
    """A line for each worker, and below the table the problems of each."""
    rows, wrong = [("WORKER", *_COLUMNS)], []
    for answer in workers:
        if not isinstance(answer.status, Mapping):
            rows.append((answer.address, "no answer", *[""] * (len(_COLUMNS) - 1)))
            wrong.append(str(answer.error))
            continue
        status = answer.status
        part = _Fields({**status, "used": _used(status), "metrics_url": status.get("metrics_url") or "-"})
        rows.append((answer.address, *map(part.text, _COLUMNS.values())))
        problems = [status.get("stale"), *status.get("problems", ())]
        wrong += [f"{answer.address}: {problem}" for problem in problems if problem]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for line in wrong:
        print(line)


def _used(status: Mapping[str, Any]) -> str:
    pages = status.get("pages") or {}
    return f"{100 * pages['used'] / pages['total']:.1f}%" if pages.get("total") else ""


def _every_field(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in status.items():
        yield name, shown(value)


def _summary(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The most important lines. A line is left out if the worker did not send its fields."""
    part = _Fields(status)
    yield from part.line("model", "{model}")
    yield from part.line("state", "{state}")
    yield from part.line("up for", "{uptime_s:.0f} s, process {pid}")
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
    if status.get("metrics_url"):
        yield from part.line("metrics", "{metrics_url}")
    yield from part.line("capabilities", "{capabilities}")
    for rank in status.get("ranks") or ():
        name = f"rank {rank['rank']}"
        yield name, "{device}, process {pid}, {done} steps, beat {beat_age_s:.1f} s ago".format_map(rank)
    for problem in status.get("problems") or ():
        yield "problem", problem


class _Fields:
    """Formats texts from the fields of a reply."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self.stale = bool(status.get("stale"))
        self._status = dict(status) | {"capabilities": shown(status.get("capabilities", []))}

    def text(self, text: str) -> str:
        """The text; empty if the reply, of an older worker, lacks one of the text's fields."""
        try:
            return text.format_map(self._status)
        except KeyError:
            return ""

    def line(self, name: str, text: str) -> Iterator[tuple[str, str]]:
        """The line, or nothing if the reply lacks a field of the line."""
        if filled := self.text(text):
            yield name, filled


def _print_table(title: str, lines: Iterable[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, text in lines:
        table.add_row(name, text)
    Console(markup=False, highlight=False).print(table)


def shown(value: Any) -> str:
    """A value of a reply as text."""
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.2g}"
    return str(value)
