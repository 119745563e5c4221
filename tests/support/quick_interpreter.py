"""Triton's interpreter in half the time: it skips repeated and useless work.

It runs the kernels where there is no GPU, a call of Python for each operation, and its own affairs take longer than
what is computed. What a kernel gets from it stays the same:

    patches of the language     once a launch; it would patch anew at each call of a device function too
    the check of int overflow   not computed: it makes some ten operations of each sum and product, and without a debug
                                mode, which the interpreter does not have, nobody looks at what they say
    NumPy's type for Triton's   looked up; it would make the table for each look
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_PARTS = ("GridExecutor", "_LangPatchScope", "_get_np_dtype", "_patch_lang", "interpreter_builder")


def make_quick() -> None:
    """Change the interpreter of this process; one of a Triton that is made in another way stays as it is."""
    if not all(hasattr(interpreter, part) for part in _PARTS):
        return
    _patch_once_a_launch()
    _look_types_up()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_once_a_launch() -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[bool] = set()  # in the launch that runs: where functions see Triton's core, and where not

    @functools.cache
    def sees_core(fn: Any) -> bool:
        return any(value is tl.core for value in fn.__globals__.values())

    def patch_once(fn: Any) -> Any:
        if sees_core(fn) in patched:
            return interpreter._LangPatchScope()
        patched.add(sees_core(fn))
        return patch(fn)

    @functools.wraps(launch)
    def launch_patched(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_patched


def _look_types_up() -> None:
    of_scalar = functools.cache(interpreter._get_np_dtype)

    def np_dtype(triton_type: Any) -> Any:
        scalar = triton_type.scalar
        return of_scalar(tl.uint64 if scalar.is_ptr() else scalar)

    interpreter._get_np_dtype = np_dtype
