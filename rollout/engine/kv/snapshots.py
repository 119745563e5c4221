"""Snapshots: copies of the states of linear attention after known prefixes, and the books of their places.

A place is free, or it has references: of the sequence that saves or loads it, of a group's share, of sessions, and of
the cache. The cache finds a snapshot by the content of its prefix. It keeps the page in which the prefix ends; another
sequence copies that page, because the first one goes on writing there. Full pages are found in the page pool.

    key of a snapshot     the chain of digests of its full pages, then one of the tokens after them (`PrefixKeys.end`)
    point                 a digest of full pages with a number of tokens after them, at which a snapshot is or will be

A save copies a row's state to a place. It belongs to the step that continues the row, or to the next step whatever it
does (`save_soon`): that step may begin another sequence in the row, so in a step saves come first, then loads.

A tier copies snapshots to the host before their places are needed: cached snapshots and idle sessions' snapshots, once
their sequence is settled.

Invariants:
- A place is written only by the save of the reference that was taken with it, and never again while it has references.
- The cache has only snapshots of the present weights version, or at most `engine.max_kv_age` versions older.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from rollout.engine.kv.pool import Copies, PagePool
from rollout.engine.sequence.sequence_kv import PrefixEnd


class CachedSnapshot(NamedTuple):
    """A snapshot in the cache."""

    place: int
    page: int  # the page in which the prefix ends; 0 if that page is full
    point: PrefixEnd
    oldest: int  # weights version of the prefix's KV and states


class Snapshots:
    """The places `first` to `first + count - 1` of a state pool."""

    def __init__(self, first: int, count: int, pool: PagePool) -> None:
        self.places = range(first, first + count)
        self._pool = pool
        self._free = list(reversed(self.places))
        self._refs: Counter[int] = Counter()
        self._cached: OrderedDict[bytes, CachedSnapshot] = OrderedDict()  # least recently used first
        self._points: dict[bytes, Counter[int]] = {}  # tokens after the full pages, by the digest of these
        self._soon: dict[int, int] = {}  # place to row: saves of the next step
        self._void: set[int] = set()  # places whose save was given up
        self._unseen = OrderedDict[int, CachedSnapshot]()  # places not yet returned by `look`, oldest first
        self.copies = Copies()  # copies to the host, by place

    # --- places ------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Places that hold a snapshot, or will."""
        return len(self.places) - len(self._free)

    @property
    def has_place(self) -> bool:
        """Whether `take` would find a place."""
        return bool(self._free) or any(True for _ in self._only_cached())

    def take(self) -> int:
        """A place with one reference; evicts the least recently used cached snapshot. There has to be a place."""
        if not self._free:
            self._evict(next(self._only_cached()))
        place = self._free.pop()
        self._refs[place] = 1
        return place

    def _only_cached(self) -> Iterator[bytes]:
        """Keys of snapshots that only the cache has, least recently used first."""
        return (key for key, cached in self._cached.items() if self._refs[cached.place] == 1)

    def retain(self, place: int) -> None:
        """Add a reference to a place that has one."""
        assert self._refs[place] > 0
        self._refs[place] += 1

    def release(self, place: int) -> None:
        """Take a reference away; the last one frees the place."""
        assert self._refs[place] > 0, f"place {place} released more often than it was retained"
        self._refs[place] -= 1
        if not self._refs[place]:
            del self._refs[place]
            self._soon.pop(place, None)
            self._void.discard(place)
            self._unseen.pop(place, None)
            self.copies.give_up(place)
            self._free.append(place)

    def save_soon(self, row: int, place: int) -> None:
        """Have the next step save a row that no later step belongs to."""
        self._soon[place] = row

    def give_up_saves(self, row: int) -> None:
        """Give up the save of this row: its state is overwritten before the next step."""
        void = [place for place, saved in self._soon.items() if saved == row]
        self._void.update(void)
        for place in void:
            del self._soon[place]
            self._unseen.pop(place, None)
        for key in [key for key, cached in self._cached.items() if cached.place in void]:
            self._evict(key)

    def is_void(self, place: int) -> bool:
        """True for a place whose save was given up: it holds no snapshot."""
        return place in self._void

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """The saves that the next step begins with: (row, place)."""
        saves, self._soon = tuple((row, place) for place, row in self._soon.items()), {}
        return saves

    # --- copies to the host -------------------------------------------------------------------------------------------

    @property
    def short(self) -> bool:
        """Whether fewer than half of the places can be given up without loss."""
        return 2 * len(self._unseen) > len(self.places)

    @property
    def unseen(self) -> bool:
        """Whether there is a saved snapshot that `look` has not returned."""
        return bool(self._unseen) and next(iter(self._unseen)) not in self._soon

    def look(self) -> CachedSnapshot:
        """The oldest snapshot that `look` has not returned. Such a snapshot must exist."""
        return self._unseen.popitem(last=False)[1]

    def settled(self, place: int) -> None:
        """Note that the sequence of this snapshot is settled: a cached snapshot may be copied now."""
        for cached in [cached for cached in self._cached.values() if cached.place == place]:
            self._unseen[place] = cached

    def offer(self, snapshot: CachedSnapshot) -> None:
        """Note that a session has this snapshot, and the page in which its prefix ends."""
        self._unseen[snapshot.place] = snapshot

    def withdraw(self, snapshot: CachedSnapshot) -> None:
        """Note that the session gives up the snapshot and its page; the cache may have them now."""
        if self._cached.get(snapshot.point.key) != snapshot:
            self._unseen.pop(snapshot.place, None)

    # --- the cache ---------------------------------------------------------------------------------------------------

    @property
    def pages(self) -> set[int]:
        """Pages that the cache keeps."""
        return {cached.page for cached in self._cached.values() if cached.page}

    def tokens_after(self, digest: bytes) -> list[int]:
        """Numbers of tokens after these full pages at which snapshots exist or are expected."""
        return list(self._points.get(digest, ()))

    def expect(self, point: PrefixEnd) -> None:
        """Note that a prefill goes to this point."""
        self._points.setdefault(point.digest, Counter())[point.after] += 1

    def expect_no_more(self, point: PrefixEnd) -> None:
        """Note that the prefill is over, or that its snapshot is in the cache."""
        after = self._points[point.digest]
        after[point.after] -= 1
        if not after[point.after]:
            del after[point.after]
        if not after:
            del self._points[point.digest]

    def keep(self, point: PrefixEnd, place: int, page: int, oldest: int) -> None:
        """Put a snapshot into the cache, with the page in which its prefix ends; no-op if one is as new."""
        known = self._cached.get(point.key)
        if (known is not None and known.oldest >= oldest) or place in self._void:
            return
        if known is not None:
            self._evict(point.key)
        self.retain(place)
        if page:
            self._pool.retain(page)
        self.expect(point)
        self._cached[point.key] = CachedSnapshot(place, page, point, oldest)

    def find(self, key: bytes, oldest: int) -> CachedSnapshot | None:
        """The snapshot with this key, if it has no weights version before `oldest`; else None.

        The caller has to retain place and page before the next `take`.
        """
        cached = self._cached.get(key)
        if cached is None or cached.oldest < oldest:
            return None
        self._cached.move_to_end(key)
        return cached

    def evict_page(self) -> bool:
        """Give up the least recently used snapshot that only the cache has, with a page; False if there is none.

        Every other owner of a snapshot also has its page.
        """
        alone = (key for key, cached in self._cached.items() if cached.page and self._refs[cached.place] == 1)
        for key in alone:
            self._evict(key)
            return True
        return False

    def forget_older(self, oldest: int) -> None:
        """Take the snapshots with a weights version before `oldest` out of the cache."""
        for key in [key for key, cached in self._cached.items() if cached.oldest < oldest]:
            self._evict(key)

    def _evict(self, key: bytes) -> None:
        cached = self._cached.pop(key)
        self.expect_no_more(cached.point)
        if cached.page:
            self._pool.release(cached.page)
        self._unseen.pop(cached.place, None)
        self.release(cached.place)

    def check(self, kept: Counter[int]) -> None:
        """Assert that the books agree: `kept` are the references of sessions; no other references exist."""
        assert sorted([*self._free, *self._refs]) == list(self.places), "a place is lost"
        expected = kept + Counter(cached.place for cached in self._cached.values())
        assert expected == self._refs, "the references to a place are not counted right"
        assert self._unseen.keys() <= self._refs.keys() and not self.copies, "a snapshot is to be copied"
        points = Counter((cached.point.digest, cached.point.after) for cached in self._cached.values())
        left = {(digest, after): count for digest, some in self._points.items() for after, count in some.items()}
        assert points == left, "a prefill is waited for"
