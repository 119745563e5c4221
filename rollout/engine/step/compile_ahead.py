"""Kernels compiled in threads, all at once, before the first step that launches them.

Triton compiles a kernel when it is first launched, and nothing else goes on meanwhile: a start without Triton's cache
waits for some hundred kernels, one after the other. So the steps of a rehearsal run once with their launches left out:
each launch only asks for its kernel, and threads compile what was asked for. What a kernel would have written is not
there, so new tensors hold zeros: whatever uses them as indices stays inside its tables.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

_MOST_THREADS = 16
_aten = torch.ops.aten
#: What returns memory that nobody has written.
_UNWRITTEN = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class ZeroedTensors(TorchDispatchMode):
    """Within, tensors that would hold whatever lay in their memory hold zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _UNWRITTEN else result


@contextmanager
def kernels_compiled_ahead(device: torch.device) -> Iterator[None]:
    """Within, Triton's kernels that this thread launches on `device` do not run; at the end all are ready to.

    On an error within, what was asked for is still compiled. Raises what Triton raises for a kernel that is wrong.
    """
    from triton import AsyncCompileMode, FutureKernel
    from triton.runtime.jit import JITFunction

    began_s, mine = time.perf_counter(), threading.get_ident()
    asked: dict[object, Any] = {}
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))

    def launch_of(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != mine:
                return kernel.run(*args, grid=grid, warmup=False, **options)
            key = id(kernel), _kind(args), _kind(tuple(options.items()))
            if key not in asked:
                asked[key] = kernel.run(*args, grid=grid, warmup=True, **options)
            return asked[key]

        return launch

    with ThreadPoolExecutor(threads) as pool:
        with AsyncCompileMode(pool), ZeroedTensors():
            JITFunction.__getitem__ = launch_of
            try:
                yield
            finally:
                del JITFunction.__getitem__  # the inherited one again
        ran_s = time.perf_counter() - began_s
        # Others were there before.
        made = {id(kernel): kernel.result() for kernel in asked.values() if isinstance(kernel, FutureKernel)}
        list(pool.map(_build_launcher, made.values()))
    for kernel in made.values():
        assert kernel.run is not None  # loads the kernel, and what launches it
    took_s = round(time.perf_counter() - began_s, 1)
    log.info("compiled the kernels", extra={"kernels": len(made), "took_s": took_s, "ran_s": round(ran_s, 1)})


def _kind(value: Any) -> object:
    """All that a kernel may be compiled for in an argument, and more: layers ask with different tensors of one kind."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(base := getattr(value, "base", None), torch.Tensor):  # a descriptor of it
        sizes = value.shape, value.strides, value.block_shape
        return type(value), base.dtype, _kind(sizes), str(getattr(value, "layout", None))
    return type(value), value


def _build_launcher(kernel: Any) -> None:
    """Have a C compiler build what launches the kernel, for Triton's cache.

    It is loaded later: while threads load such modules, all of one name, Python can give a thread that of another.
    """
    from triton.runtime import driver

    driver.active.launcher_cls(kernel.src, kernel.metadata)
