"""What is in memory, for tests of things that must not be kept."""

import gc
import sys
from typing import TypeVar

T = TypeVar("T")


def alive(kind: type[T]) -> list[T]:
    """All objects of exactly this type that anything in the process still refers to.

    No other thread runs until the list of all objects is gone again: that list refers to the tuples that CPython is
    just building elsewhere (`tuple(generator)`), and building them then ends in a SystemError.
    """
    gc.collect()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        return [thing for thing in gc.get_objects() if type(thing) is kind]
    finally:
        sys.setswitchinterval(interval)
