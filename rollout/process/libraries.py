"""Garbage collection around the import of large libraries such as torch and transformers."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_heap() -> None:
    """Exclude all objects that exist now from later garbage collections."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries report leaks at exit if their objects are still frozen


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
