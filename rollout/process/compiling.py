"""Whether this process compiles a kernel now: Triton does so at the first use, which may be long after the start.

A compilation takes seconds, in which a healthy rank launches nothing. So it is not counted as time without progress.
Triton does not report the end of a compilation that fails, so one counts for `MOST_S` at the most. Compilations that
run at once in threads count together, until `MOST_S` after the last one that ended.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Seconds after which a compilation is taken for failed.
MOST_S = 300.0


class Compilations:
    """Counts the compilations that run. `clock` is in seconds, and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._begun_s = 0.0  # the last kernel; of many, the end of the last

    def running(self) -> bool:
        """True while a kernel is compiled."""
        return self._running > 0 and self._clock() < self._begun_s + MOST_S

    @contextmanager
    def many(self) -> Iterator[None]:
        """Within, kernels are compiled ahead of their use. Triton reports the end of each, maybe its begin twice."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def begins(self, **facts: Any) -> bool:
        """Triton's hook before a compilation; true would stop it."""
        if not facts.get("is_manual_warmup"):
            self._begin()
        return False

    def ended(self, **facts: Any) -> None:
        """Triton's hook after one."""
        if facts.get("is_manual_warmup"):
            self._begun_s = self._clock()
        else:
            self._end()

    def _begin(self) -> None:
        if not self.running():  # one before may have failed
            self._running = 0
        self._running, self._begun_s = self._running + 1, self._clock()

    def _end(self) -> None:
        self._running = max(0, self._running - 1)


_here = Compilations()
many_compilations = _here.many


def compiling() -> int:
    """1 while this process compiles a kernel, else 0. `watch_compilations` must have been called."""
    return int(_here.running())


def watch_compilations() -> None:
    """Count the running compilations of Triton from now on. No-op without Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs

    knobs.runtime.jit_cache_hook = _here.begins
    knobs.runtime.jit_post_compile_hook = _here.ended


def use_kernels(shipped: str | None) -> None:
    """Read compiled kernels from this folder, too, from now on. No-op without Triton.

    Raises ValueError if there is no such folder.
    """
    if shipped is not None and not Path(shipped).is_dir():
        raise ValueError(f"kernel_cache: there is no folder {shipped}; `rollout kernels MODEL --into FOLDER` makes one")
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs

    from rollout.process.kernel_cache import KernelCache

    KernelCache.shipped = None if shipped is None else Path(shipped)
    knobs.cache.manager_class = KernelCache
