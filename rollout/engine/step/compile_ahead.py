"""Kernels compiled in threads, all at once, before the first step that launches them.

Triton compiles a kernel when it is first launched, and nothing else goes on meanwhile: a start without Triton's cache
waits for some hundred kernels, one after the other. So the steps of a rehearsal run once with their launches left out:
each launch only asks for its kernel, and threads compile the requested kernels. The kernels' outputs do not exist
then, so new tensors hold zeros: code that uses them as indices stays inside its tables.
"""

import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from rollout.process.compiling import many_compilations

log = logging.getLogger(__name__)

#: Functions that return uninitialized memory.
_UNWRITTEN = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


@contextmanager
def zeroed_tensors() -> Iterator[None]:
    """Context in which uninitialized tensors of this thread hold zeros."""
    mine = threading.get_ident()

    def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **options: Any) -> torch.Tensor:
            tensor = make(*args, **options)
            return tensor.zero_() if threading.get_ident() == mine else tensor

        return made

    with ExitStack() as replacements:
        for owner, name in _UNWRITTEN:
            replacements.enter_context(replaced(owner, name, zeroed))
        yield


def compile_kernels_of(run: Callable[[], object], threads: int) -> None:
    """Call `run` without running the Triton kernels that it launches, and make all of them ready on the current device.

    At most `threads` threads compile, and no more than there are cores. The requested kernels are compiled even if
    `run` raises. Raises what Triton raises for a kernel that is wrong.
    """
    from triton import FutureKernel

    began_s = time.perf_counter()
    with many_compilations(), ThreadPoolExecutor(min(threads, len(os.sched_getaffinity(0)))) as pool:
        # A separate context, because Triton 3.6 leaves its mode on if a compilation fails.
        asked = contextvars.copy_context().run(_ask, run, pool)
        ran_s = time.perf_counter() - began_s
        # All others were compiled before.
        made = {id(kernel): kernel.result() for kernel in asked if isinstance(kernel, FutureKernel)}
        list(pool.map(_build_launcher, made.values()))
    launchers = [kernel.run for kernel in made.values()]  # the first access loads the kernel and what launches it
    took_s = round(time.perf_counter() - began_s, 1)
    log.info("compiled the kernels", extra={"kernels": len(launchers), "took_s": took_s, "ran_s": round(ran_s, 1)})


def _ask(run: Callable[[], object], pool: ThreadPoolExecutor) -> list[Any]:
    """Call `run`, whose launches on this thread ask for their kernels; returns these, compiled."""
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    mine, asked = threading.get_ident(), {}

    def launch_of(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != mine:
                return kernel.run(*args, grid=grid, warmup=False, **options)
            key = id(kernel), _kind(args), _kind(tuple(options.items()))
            if key not in asked:
                asked[key] = kernel.run(*args, grid=grid, warmup=True, **options)
            return asked[key]

        return launch

    with AsyncCompileMode(pool), zeroed_tensors(), replaced(JITFunction, "__getitem__", lambda _: launch_of):
        run()
    return list(asked.values())


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which an attribute of `owner` is replaced by `make` of it."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _kind(value: Any) -> object:
    """A key of an argument that is finer than a compilation needs: layers ask with different tensors of one kind."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(base := getattr(value, "base", None), torch.Tensor):  # a descriptor of it
        sizes = value.shape, value.strides, value.block_shape
        return type(value), base.dtype, _kind(sizes), str(getattr(value, "layout", None)), value.padding
    return type(value), value


def _build_launcher(kernel: Any) -> None:
    """Have a C compiler build the launcher of the kernel, for Triton's cache.

    The module that the thread loads is not used: all have one name, and Python can give a thread the module of another.
    """
    from triton.runtime import driver

    driver.active.launcher_cls(kernel.src, kernel.metadata)
