"""Whether this process compiles a kernel now: Triton does so at the first use, which may be long after the start.

A compilation takes seconds, in which a healthy rank launches nothing. So it is not counted as time without progress.
"""

from __future__ import annotations

import importlib.util
from typing import Any

_running = 0


def compiling() -> int:
    """1 while a kernel is compiled, else 0. `watch_compilations` must have been called."""
    return int(_running > 0)


def watch_compilations() -> None:
    """Count the running compilations of Triton from now on. No-op without Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs

    def begins(**facts: Any) -> bool:
        global _running
        _running += 1
        return False  # True would stop it

    def ended(**facts: Any) -> None:
        global _running
        _running = max(0, _running - 1)

    knobs.runtime.jit_cache_hook = begins
    knobs.runtime.jit_post_compile_hook = ended
