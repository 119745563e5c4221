"""What a worker shows of its start: a bar for each stage on a terminal, a line at its begin and end elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)

#: Told (done, in all), in whatever unit.
Advance = Callable[[int, int], None]


@contextmanager
def stage(what: str) -> Iterator[Advance]:
    """Show a stage of the start, `what` as in "loading weights"; gives what is told how far it is.

    Nothing is drawn on stdout, which belongs to the launcher.
    """
    console = Console(file=sys.stderr)
    shown = console.is_terminal
    if not shown:
        log.info("%s", what)
    began_s = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
    log.info("%s took %.1f s", what, time.perf_counter() - began_s)
