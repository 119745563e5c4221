"""How far a batch is: a bar by rich where that is installed, else a line on stderr, or a function of the caller's.

And how far a worker is that starts: what its log says of the stages that take long.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: False, True, or a function of (requests done, requests in all, tokens so far).
Progress = bool | Callable[[int, int, int], object]


@contextmanager
def report(progress: Progress, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of tokens of each request that is done."""
    if callable(progress):
        yield _counting(progress, total)
    elif not progress:
        yield lambda tokens: None
    else:
        with _bar(total) as show:
            yield _counting(show, total)


def _counting(show: Callable[[int, int, int], object], total: int) -> Callable[[int], None]:
    done = tokens_so_far = 0

    def advance(tokens: int) -> None:
        nonlocal done, tokens_so_far
        done += 1
        tokens_so_far += tokens
        show(done, total, tokens_so_far)

    return advance


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int, int], object]]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        yield _print_line
        print(file=sys.stderr)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("0 tokens", total=total)
        yield lambda done, total, tokens: bar.update(task, completed=done, description=f"{tokens:,} tokens")


def _print_line(done: int, total: int, tokens: int) -> None:
    print(f"\r{done}/{total} requests, {tokens:,} tokens", end="", file=sys.stderr, flush=True)


class StageLines:
    """What a worker's log says of long stages, such as loading weights, on this process's stderr as it comes.

    Args:
        log: the worker's log, in text or JSON lines; what is in it by now is of another worker.
    """

    _TEXT = re.compile(r"\S+ INFO (\S+) rollout\.progress: (.*?)(?: \[stage=.*\])?")

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = log.stat().st_size

    def tell(self) -> None:
        """Print what is new. Never raises for what is in the log, or for a log that is gone."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._at)
                lines = file.read().rpartition(b"\n")[:2]
        except OSError:
            return
        text = b"".join(lines)
        self._at += len(text)
        for line in text.decode("utf-8", "replace").splitlines():
            if (found := self._stage(line)) is not None:
                print(f"worker {found[0]}: {found[1]}", file=sys.stderr, flush=True)

    def _stage(self, line: str) -> tuple[str, str] | None:
        """Which worker says what, if the line is of a stage."""
        if not line.startswith("{"):
            match = self._TEXT.fullmatch(line)
            return None if match is None else (match[1], match[2])
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if fields.get("logger") != "rollout.progress":
            return None
        return str(fields.get("worker")), str(fields.get("message"))
