"""Objects with sockets, threads or an event loop belong to the process that made them.

`os.fork` copies such an object, but not its threads, and both processes would use the same sockets and locks: calls
would hang, and messages of two processes would mix. So in a forked process

- every use of the copy raises RuntimeError at once, which says what to do instead; data that needs no socket and no
  lock stays readable;
- leaving a `with` block, dropping the copy and ending the process do nothing to the original.

Copying and pickling raise TypeError, for which a class needs no more than the base `ProcessBound`. It works by a hook
that Python calls in the child of a fork. It gives each object another class, so the owner's process pays nothing.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar, NoReturn, Self
from weakref import WeakSet

_process = os.getpid()
_bound: WeakSet[ProcessBound] = WeakSet()  # objects of this process


class ProcessBound:
    """Base of a class whose objects only their process can use."""

    #: Name of the object in errors; empty: its class.
    _called: ClassVar[str] = ""
    #: Advice in errors for another process.
    _instead: ClassVar[str] = "make one in each process"
    #: Attributes, properties and methods that a forked process may still use.
    _readable_after_fork: ClassVar[frozenset[str]] = frozenset()
    #: Methods that do nothing in a forked process: for clean-up that runs without the user's call.
    _idle_after_fork: ClassVar[frozenset[str]] = frozenset()
    #: False in a forked process. `__exit__` asks: the block may end because the forked process ends.
    _owned: ClassVar[bool] = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Register the object before its constructor runs: another thread may fork meanwhile."""
        made = super().__new__(cls)
        _bound.add(made)
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {_name(type(self))} cannot be copied or pickled: only its process can use it; {self._instead}"
        )

    def _leave_after_fork(self) -> None:
        """Called in a forked process, before the object becomes unusable there. It may not be complete."""


class Closing(ProcessBound):
    """Base of a class whose objects close themselves at the end of a `with` block, but not in a forked process."""

    def close(self) -> None:
        """End the use of the object. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._owned:
            self.close()


def _name(kind: type[ProcessBound]) -> str:
    return kind._called or kind.__name__


def _get(self: Any, name: str) -> Any:
    kind = type(self)
    if name in kind._idle_after_fork:
        return _nothing
    if name == "_owned" or name in kind._readable_after_fork or (name.startswith("__") and name.endswith("__")):
        return object.__getattribute__(self, name)
    raise RuntimeError(kind.refusal)


def _refuse(self: Any) -> NoReturn:
    raise RuntimeError(type(self).refusal)


def _nothing(*args: object, **kwargs: object) -> None:
    """Replaces a method that does nothing in a forked process."""


def _foreign(kind: type[ProcessBound], owner: int) -> Any:
    """The class of objects of this kind that the process `owner` made. It has their memory layout."""
    refusal = (
        f"this {_name(kind)} belongs to process {owner} and cannot be used in process {_process}, which was forked "
        f"from it; {kind._instead}"
    )
    names = {
        "__slots__": (),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__getattribute__": _get,
        "__repr__": object.__repr__,
        "__enter__": _refuse,
        "__aenter__": _refuse,
        "_owned": False,
        "refusal": refusal,
    }
    return type(kind.__name__, (kind,), names)


def _give_up() -> None:
    """Disown the parent's objects; called in the child of a fork."""
    global _process
    owner, _process = _process, os.getpid()
    kinds: dict[type[ProcessBound], Any] = {}
    for each in list(_bound):
        kind = type(each)
        each._leave_after_fork()
        if kind not in kinds:
            kinds[kind] = _foreign(kind, owner)
        each.__class__ = kinds[kind]
    _bound.clear()


os.register_at_fork(after_in_child=_give_up)
