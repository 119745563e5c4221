"""Values by key in memory, within a limit of bytes and of age. The value unused for the longest goes first."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_MOST = 65_536  # values

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class ExpiringCache(Generic[K, T]):
    """A cache of at most `most_bytes`. A value that was not used for `idle_s` seconds is dropped.

    `dropped` is called with each key and value that is forgotten and has no successor.
    """

    def __init__(
        self,
        most_bytes: int,
        idle_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        dropped: Callable[[K, T], object] = lambda key, value: None,
    ) -> None:
        self._clock = clock
        self._most_bytes = most_bytes
        self._idle_s = idle_s
        self._dropped = dropped
        self._values: OrderedDict[K, tuple[T, int, float]] = OrderedDict()  # (value, bytes, time of last use)
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> T | None:
        """The value of a key, which counts as a use; None if it is not kept."""
        self._forget()
        if key not in self._values:
            return None
        value, size, _ = self._values.pop(key)
        self._values[key] = value, size, self._clock()
        return value

    def put(self, key: K, value: T, size: int) -> None:
        """Keep a value of `size` bytes, instead of an earlier one of this key.

        One that is larger than all may be together is not kept: no other value has to go for it.
        """
        if size > self._most_bytes:
            self.drop(key)
            return
        self._bytes += size - self._values.pop(key, (value, 0, 0.0))[1]
        self._values[key] = value, size, self._clock()
        self._forget()

    def drop(self, key: K) -> bool:
        """Forget a value; False if it is not kept."""
        if key not in self._values:
            return False
        value, size, _ = self._values.pop(key)
        self._bytes -= size
        self._dropped(key, value)
        return True

    def _forget(self) -> None:
        limit_s = self._clock() - self._idle_s
        while self._values:
            key, (_, _, used_s) = next(iter(self._values.items()))
            if used_s > limit_s and self._bytes <= self._most_bytes and len(self._values) <= _MOST:
                return
            self.drop(key)
