"""How runs that share a GPU begin: their workers start in turn, and training begins together.

A worker measures the free memory while it starts, so nothing may start beside it. `compare` gives all runs of a GPU one
lock file, waits until each has said that it is ready, and then tells all of them how long to train.
"""

import argparse
import fcntl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: The line that a run prints when its worker and its trainer wait.
READY = "ready to train"


@dataclass(frozen=True)
class Start:
    """How a run begins. By default at once, and beside whatever else starts."""

    lock: Path | None = None
    hold: bool = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside it, no other run with this lock file starts."""
        if self.lock is None:
            yield
            return
        with self.lock.open("a") as file:  # closing it, or the end of the process, gives the lock back
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def wait(self, seconds: float, tell: Callable[[str], None]) -> float:
        """Say that the run is ready and wait for a line with its seconds; without `hold` return `seconds` at once."""
        if not self.hold:
            return seconds
        tell(READY)
        line = sys.stdin.readline()
        if not line:
            raise SystemExit("the command that holds this run has ended")
        return float(line)


def add_start_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `Start`."""
    parser.add_argument("--start-lock", type=Path, metavar="FILE", help="start while no other run has a lock on it")
    parser.add_argument(
        "--hold", action="store_true", help=f"print `{READY}`, and read a line with the seconds to train"
    )


def read_start(arguments: argparse.Namespace) -> Start:
    """What the flags say."""
    return Start(arguments.start_lock, arguments.hold)
