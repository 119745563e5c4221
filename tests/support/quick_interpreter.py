"""Triton's interpreter in a third of the time: it skips repeated and useless work.

It runs the kernels where there is no GPU, a call of Python for each operation, and its own affairs take longer than
what is computed. What a kernel gets from it stays the same:

    patches of the language     once a launch; it would patch anew at each call of a device function too. What to patch
                                is listed once, with functions that go straight to Triton's own
    the check of int overflow   not computed: it makes some ten operations of each sum and product, and without a debug
                                mode, which the interpreter does not have, nobody looks at what they say
    NumPy's type for Triton's   looked up; it would make the table for each look
    a block's shape             checked and wrapped once, then looked up; it would do so for each result. Two blocks
                                whose shapes are one object need no broadcast
"""

import dataclasses
import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_PARTS = ("GridExecutor", "_LangPatchScope", "_get_np_dtype", "_patch_lang", "interpreter_builder", "TritonSemantic")
_PARTS += ("_patch_builtin", "interpreter_semantic")


def make_quick() -> None:
    """Change the interpreter of this process; one of a Triton that is made in another way stays as it is."""
    if not all(hasattr(interpreter, part) for part in _PARTS):
        return
    _patch_once_a_launch()
    _list_builtins_once()
    _look_types_up()
    _look_shapes_up()
    _skip_broadcasts_of_equal_shapes()
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


def _list_builtins_once() -> None:
    plain, semantic = interpreter._patch_builtin, interpreter.interpreter_semantic
    if len(inspect.signature(plain).parameters) != 3:
        return
    listed: dict[Any, list[tuple[str, Any]]] = {}  # by module or class

    def quick(builtin: Any) -> Any:
        inner = inspect.unwrap(builtin)  # without the check that there is a semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return call

    def patch_listed(package: Any, builder: Any, scope: Any) -> None:
        if package not in listed:  # no launch has patched it yet
            members = inspect.getmembers(package, tl.core.is_builtin)
            listed[package] = [(name, quick(member)) for name, member in members]
        for name, member in listed[package]:
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch_listed


def _look_types_up() -> None:
    of_scalar = functools.cache(interpreter._get_np_dtype)

    def np_dtype(triton_type: Any) -> Any:
        scalar = triton_type.scalar
        return of_scalar(tl.uint64 if scalar.is_ptr() else scalar)

    interpreter._get_np_dtype = np_dtype


def _look_shapes_up() -> None:
    """Blocks of one shape share its two forms: ints for their type, constexprs for the tensor; nothing changes them."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    of_type: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensor: dict[int, tuple[Any, Any, Any]] = {}  # by the identity of the type's shape, which the value keeps alive

    @functools.wraps(make_type)
    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        known = of_type.get(sizes)
        if known is None or not all(type(size) is int for size in sizes):  # 4.0 equals 4, and is an error
            make_type(self, element_ty, shape)
            of_type.setdefault(sizes, (self.shape, self.numel, f"<{self.shape}, "))
            return
        self.element_ty = element_ty
        self.shape, self.numel, begin = known
        self.name = f"{begin}{element_ty}>"

    @functools.wraps(make_tensor)
    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        shape = type.shape if type.is_block() else None
        known = of_tensor.get(id(shape))
        if known is None:
            make_tensor(self, handle, type)
            of_tensor[id(shape)] = shape, self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = known

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor


def _skip_broadcasts_of_equal_shapes() -> None:
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value

    @functools.wraps(broadcast)
    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None):  # scalars have none
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_unless_equal
