"""Whether this process compiles a kernel now: Triton does so at the first use, which may be long after the start.

A compilation takes seconds, in which a healthy rank launches nothing. So it is not counted as time without progress.
Triton does not report the end of a compilation that fails, so one counts for `MOST_S` at the most. Compilations that
run at once in threads count together, until `MOST_S` after the last one that ended.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Seconds after which a compilation is taken for failed.
MOST_S = 300.0
_running = 0
_begun_s = 0.0  # the last one; of many, the end of the last one


def compiling() -> int:
    """1 while a kernel is compiled, else 0. `watch_compilations` must have been called."""
    return int(_running > 0 and time.monotonic() < _begun_s + MOST_S)


def watch_compilations() -> None:
    """Count the running compilations of Triton from now on. No-op without Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs

    knobs.runtime.jit_cache_hook = begins
    knobs.runtime.jit_post_compile_hook = ended


@contextmanager
def many_compilations() -> Iterator[None]:
    """Within, kernels are compiled ahead of their use. Triton reports the end of each, maybe its begin twice."""
    _begin()
    try:
        yield
    finally:
        _end()


def begins(**facts: Any) -> bool:
    """Triton's hook before a compilation; true would stop it."""
    if not facts.get("is_manual_warmup"):
        _begin()
    return False


def ended(**facts: Any) -> None:
    """Triton's hook after one."""
    global _begun_s
    if facts.get("is_manual_warmup"):
        _begun_s = time.monotonic()
    else:
        _end()


def _begin() -> None:
    global _running, _begun_s
    if not compiling():  # one before may have failed
        _running = 0
    _running, _begun_s = _running + 1, time.monotonic()


def _end() -> None:
    global _running
    _running = max(0, _running - 1)
