"""How far something is that takes long: a bar on a terminal, plain lines elsewhere. One way for all that does.

    stderr is a terminal       a bar, which is gone when the stage is over; not on one that TERM calls dumb
    the process keeps a log    lines in it, with `stage`, `done`, `total` and `took_s` as their data
    otherwise                  the same lines, on stderr
    quiet                      nothing: the output is for a program, and nobody looks

What is over within two seconds leaves nothing, and a stage that fails is not said to have ended. stdout is never
touched: it belongs to the launcher, or to results.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)

#: Told (done, in all), in whatever unit; 0 in all where that is not known yet. May be called from any thread.
Advance = Callable[[int, int], None]

_QUICK_S = 2.0  # seconds within which nothing is said
_EVERY_S = 15.0  # between two lines


@contextmanager
def stage(what: str, *, quiet: bool = False) -> Iterator[Advance]:
    """Show a stage, `what` as in "loading weights"; gives what is told how far it is.

    `quiet` where the command's output is for a program: then it is a bar on a terminal, and nothing elsewhere.
    """
    console = Console(file=sys.stderr)
    shown = console.is_terminal and not console.is_dumb_terminal
    lines = _Lines(what, silent=shown or quiet)
    began_s = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown) as bar:
            task = bar.add_task(what, total=None)

            def advance(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total or None)
                lines.at = (done, total)

            yield advance
    finally:
        lines.end()
    took_s = time.perf_counter() - began_s
    if took_s >= _QUICK_S and not quiet:
        _say(f"{what} took {took_s:.1f} s", stage=what, took_s=round(took_s, 1))


class _Lines:
    """A thread that says how far it is: once after two seconds, then now and then."""

    def __init__(self, what: str, silent: bool) -> None:
        self.at = (0, 0)
        self._what = what
        self._silent = silent
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        if not silent:
            self._thread.start()

    def end(self) -> None:
        """Say nothing more, from when this returns."""
        self._over.set()
        if not self._silent:
            self._thread.join()

    def _run(self) -> None:
        if self._over.wait(_QUICK_S):
            return
        _say(self._what, stage=self._what)
        while not self._over.wait(_EVERY_S):
            done, total = self.at
            share = f": {100 * done / total:.0f} %" if total else ", still"
            _say(f"{self._what}{share}", stage=self._what, done=done, total=total)


def _say(line: str, **fields: object) -> None:
    """A line in the log, where the process keeps one; else on stderr."""
    if logging.getLogger().hasHandlers():
        log.info("%s", line, extra=fields)
    else:
        print(line, file=sys.stderr, flush=True)
