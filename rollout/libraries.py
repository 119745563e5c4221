"""Imports that take long, as of torch and transformers."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_heap() -> None:
    """Keep what is there out of later garbage collections."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries complain of leaks where a process takes itself apart without


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Collect no garbage while libraries load.

    Next to nothing of what they make then is garbage, and looking through it again and again is a fifth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        freeze_heap()  # else the next look would be at all of it
        gc.enable()
