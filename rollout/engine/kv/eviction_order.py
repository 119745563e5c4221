"""The order in which KV is evicted: the least recently used first, entries with a lease last.

A lease is a hint of the client: the KV is needed within that time (`lease_s`). It is no claim: when room is short and
nothing else gives way, leased KV does, too. What has lost its lease gives way next. Sessions have an order on the
device, pages on the host. There, copies of pages that are still on the device are spare: they give way before all.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Set
from itertools import chain
from typing import Generic, TypeVar

#: The heap of times is cleaned when it has more entries than this plus twice the entries in use.
_SLACK = 16

K = TypeVar("K", bound=Hashable)


class EndTimes(Generic[K]):
    """An end time in seconds for each key."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # entries whose key was dropped or has another time since, too
        self._serial = 0

    def set(self, key: K, at_s: float) -> None:
        self._at[key] = at_s
        self._serial += 1
        heapq.heappush(self._heap, (at_s, self._serial, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Forget the time of a key, if it has one."""
        self._at.pop(key, None)

    def take_over(self, now_s: float) -> list[K]:
        """Drop and return the keys whose time is over, the earliest first."""
        over: list[K] = []
        while self._heap and self._heap[0][0] <= now_s:
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                over.append(entry[2])
                del self._at[entry[2]]
        return over

    def _counts(self, entry: tuple[float, int, K]) -> bool:
        return self._at.get(entry[2]) == entry[0]


class EvictionOrder(Generic[K]):
    """The keys of entries that can be evicted. Times are seconds of the scheduler's clock."""

    def __init__(self) -> None:
        self._spare: OrderedDict[K, None] = OrderedDict()
        self._others: OrderedDict[K, None] = OrderedDict()  # least recently used first, as the next
        self._leased: OrderedDict[K, None] = OrderedDict()
        self._ends = EndTimes[K]()  # ends of leases

    def __bool__(self) -> bool:
        return bool(self._spare or self._others or self._leased)

    @property
    def spare(self) -> int:
        """Entries that `put_first` named."""
        return len(self._spare)

    @property
    def first(self) -> K:
        """The next entry to evict. There must be one."""
        return next(iter(self))

    def __iter__(self) -> Iterator[K]:
        """The entries in the order of their eviction."""
        return chain(self._spare, self._others, self._leased)

    def add(self, key: K, until_s: float, now_s: float) -> None:
        """Add an entry that was used just now, with a lease until `until_s`, unless that is over."""
        if until_s <= now_s:
            self._others[key] = None
        else:
            self._leased[key] = None
            self._ends.set(key, until_s)

    def use(self, key: K) -> None:
        """Note that an entry was used just now."""
        if key in self._spare:
            del self._spare[key]
            self._others[key] = None
        else:
            self._of(key).move_to_end(key)

    def put_first(self, key: K) -> None:
        """Have an entry without a lease evicted before all that are in use, until its next `use`."""
        if key in self._others:
            del self._others[key]
            self._spare[key] = None

    def use_spare(self) -> None:
        """Take back what `put_first` did: these entries were used just now."""
        self._others.update(self._spare)
        self._spare.clear()

    def drop(self, key: K) -> None:
        """Remove an evicted entry."""
        del self._of(key)[key]
        self._ends.drop(key)

    def clear(self) -> None:
        self._spare.clear()
        self._others.clear()
        self._leased.clear()
        self._ends = EndTimes()

    def expire(self, now_s: float, needed: Callable[[K], bool] = lambda key: False) -> None:
        """End the leases whose time is over. Entries that are not `needed` are evicted next."""
        for key in reversed(self._ends.take_over(now_s)):
            del self._leased[key]
            self._others[key] = None
            self._others.move_to_end(key, last=needed(key))

    def check(self, keys: Set[K]) -> None:
        """Assert that exactly these entries can be evicted."""
        listed = list(self)
        assert set(listed) == keys, "an entry to evict is not there"
        assert len(listed) == len(keys), "an entry is in two orders"

    def _of(self, key: K) -> OrderedDict[K, None]:
        return next(order for order in (self._leased, self._spare, self._others) if key in order)
