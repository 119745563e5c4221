"""A heap whose dead items are skipped at its top, and swept out when they may be half of it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Key = tuple[float, ...]

#: The heap is swept when it has this many entries more than twice the number left by the last sweep.
_SLACK = 16


class SweptHeap(Generic[_Item]):
    """Items by key, lowest first. Keys are unique."""

    def __init__(self, dead: Callable[[_Item], bool]) -> None:
        self._dead = dead
        self._heap: list[tuple[_Key, _Item]] = []
        self._sweep_at = _SLACK

    def push(self, key: _Key, item: _Item) -> None:
        """Add an item."""
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) >= self._sweep_at:
            self._sweep(lambda _: False)

    def remove(self, keys: Container[_Key]) -> None:
        """Remove the items with these keys."""
        self._sweep(lambda key: key in keys)

    def first(self, most: float = math.inf) -> _Item | None:
        """The item with the lowest key, which stays in the heap; None if its key begins with more than `most`."""
        while self._heap and self._dead(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap and self._heap[0][0][0] <= most else None

    def pop(self) -> None:
        """Remove the item that `first` returned."""
        heapq.heappop(self._heap)

    def _sweep(self, unwanted: Callable[[_Key], bool]) -> None:
        self._heap = [entry for entry in self._heap if not unwanted(entry[0]) and not self._dead(entry[1])]
        heapq.heapify(self._heap)
        self._sweep_at = 2 * len(self._heap) + _SLACK
