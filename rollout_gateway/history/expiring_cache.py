"""Values by name in memory, within a limit of bytes and of age. The value unused for the longest goes first."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_MOST = 65_536  # values

T = TypeVar("T")


class ExpiringCache(Generic[T]):
    """A cache of at most `most_bytes`. A value that was not used for `idle_s` seconds is dropped."""

    def __init__(self, most_bytes: int, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most_bytes = most_bytes
        self._idle_s = idle_s
        self._values: OrderedDict[str, tuple[T, int, float]] = OrderedDict()  # (value, bytes, time of last use)
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str) -> T | None:
        """The value of a name, which counts as a use; None if it is not kept."""
        self._forget()
        if name not in self._values:
            return None
        value, size, _ = self._values.pop(name)
        self._values[name] = value, size, self._clock()
        return value

    def put(self, name: str, value: T, size: int) -> None:
        """Keep a value of `size` bytes, instead of an earlier one of this name.

        One that is larger than all may be together is not kept: no other value has to go for it.
        """
        self.drop(name)
        if size > self._most_bytes:
            return
        self._values[name] = value, size, self._clock()
        self._bytes += size
        self._forget()

    def drop(self, name: str) -> bool:
        """Forget a value; False if it is not kept."""
        if name not in self._values:
            return False
        self._bytes -= self._values.pop(name)[1]
        return True

    def _forget(self) -> None:
        limit_s = self._clock() - self._idle_s
        while self._values:
            name, (_, _, used_s) = next(iter(self._values.items()))
            if used_s > limit_s and self._bytes <= self._most_bytes and len(self._values) <= _MOST:
                return
            self.drop(name)
