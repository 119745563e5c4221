"""Progress of long stages, such as loading weights: a bar on a terminal, lines elsewhere.

    stderr is a terminal       a bar, removed at the end of the stage; not if TERM is dumb
    the process keeps a log    log lines with the fields `stage`, `done`, `total` and `took_s`
    otherwise                  the same lines on stderr
    quiet                      nothing, for commands whose output is read by a program

A stage of less than two seconds prints nothing. A stage that fails prints no closing line. stdout is never used: it
is for launchers and results.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

#: The name by which a launcher finds the progress of its worker in the log (`trainer_bridge.client.launch`).
log = logging.getLogger("rollout.progress")

#: Reports progress: (done, total) in any unit; a total of 0 means unknown. May be called from any thread.
Advance = Callable[[int, int], None]

QUICK_S = 2.0  # a shorter stage prints nothing
EVERY_S = 15.0  # between two lines


@contextmanager
def stage(what: str, *, quiet: bool = False, quick_s: float = QUICK_S, every_s: float = EVERY_S) -> Iterator[Advance]:
    """Show the progress of a stage; yields the function that reports it.

    `what` names the stage, as in "loading weights". With `quiet` there is a bar on a terminal, but no lines. A stage of
    less than `quick_s` prints nothing; then a line comes every `every_s`.
    """
    console = Console(file=sys.stderr)
    shown = console.is_terminal and not console.is_dumb_terminal
    lines = _Lines(what, shown or quiet, quick_s, every_s)
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
    if took_s >= quick_s and not quiet:
        _say(f"{what} took {took_s:.1f} s", stage=what, took_s=round(took_s, 1))


def advance_both(first: Advance, second: Advance) -> Advance:
    """Reports to both."""

    def advance(done: int, total: int) -> None:
        first(done, total)
        second(done, total)

    return advance


class _Lines:
    """A thread that prints the progress after `quick_s`, and then every `every_s`."""

    def __init__(self, what: str, silent: bool, quick_s: float, every_s: float) -> None:
        self.at = (0, 0)
        self._what = what
        self._silent = silent
        self._quick_s, self._every_s = quick_s, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        if not silent:
            self._thread.start()

    def end(self) -> None:
        """Stop. After the return no line is printed."""
        self._over.set()
        if not self._silent:
            self._thread.join()

    def _run(self) -> None:
        if self._over.wait(self._quick_s):
            return
        _say(self._what, stage=self._what)
        while not self._over.wait(self._every_s):
            done, total = self.at
            share = f": {100 * done / total:.0f} %" if total else ", still"
            _say(f"{self._what}{share}", stage=self._what, done=done, total=total)


def _say(line: str, **fields: object) -> None:
    """Print a line in the log if the process keeps one, otherwise on stderr."""
    if logging.getLogger().hasHandlers():
        log.info("%s", line, extra=fields)
    else:
        print(line, file=sys.stderr, flush=True)
