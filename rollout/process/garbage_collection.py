"""Garbage collection: none while large libraries such as torch load, and later not of the objects they leave."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_heap() -> None:
    """Exclude all objects that exist now from later garbage collections."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries report leaks at exit if their objects are still frozen


def collect_and_freeze() -> None:
    """Exclude the objects that exist after start-up from later garbage collections.

    The libraries create half a million objects that live as long as the process. Each full collection would visit all
    of them while the loop waits.
    """
    gc.collect()
    freeze_heap()


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Collect no garbage while libraries load, and exclude their objects from later collections.

    Almost nothing that an import creates is garbage. The collector's repeated scans take a fifth of the import's time.
    """
    gc.disable()
    try:
        yield
    finally:
        freeze_heap()  # otherwise the next collection would scan all of it
        gc.enable()
