"""The progress of a batch: a bar by rich where that is installed, else a line on stderr, or the caller's function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: False, True, or a function of (finished requests, all requests, received tokens).
Progress = bool | Callable[[int, int, int], object]


@contextmanager
def show_progress(progress: Progress, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function; call it with the number of tokens of each finished request."""
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
