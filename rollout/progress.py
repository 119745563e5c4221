"""How far something is that takes long: a bar on a terminal, lines in the log elsewhere."""

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

#: Told (done, in all), in whatever unit.
Advance = Callable[[int, int], None]
_QUICK_S = 2.0  # seconds within which nothing is said


@contextmanager
def stage(what: str) -> Iterator[Advance]:
    """Show a stage, `what` as in "loading weights"; gives what is told how far it is.

    The log has a line when it has taken two seconds, and one at its end if it took that long: what fails at once, and
    what is quick, leaves nothing but what it says itself. Nothing is drawn on stdout, which belongs to the launcher.
    """
    console = Console(file=sys.stderr)
    shown = console.is_terminal
    begin = threading.Timer(_QUICK_S, lambda: None if shown else log.info("%s", what))
    begin.daemon = True
    began_s = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    begin.start()
    try:
        with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        begin.cancel()
    took_s = time.perf_counter() - began_s
    if took_s >= _QUICK_S:
        log.info("%s took %.1f s", what, took_s)
