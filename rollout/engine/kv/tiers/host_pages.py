"""The pages of host memory, and the state of each.

Every page is in exactly one of five states:

    free       without an owner
    taken      owned by a preempted sequence (`offload`)
    written    a copy of a known page of the pool is on its way to it
    kept       has the KV of a known prefix, found by the same key as in the pool
    read       kept, and a copy reads it: it stays until the copy has ended

A kept page may be written to disk meanwhile (`disk_pages`); the write is valid if the page stays kept until its end.
States of linear attention on the host are kept in the same way, by books of their own: a place is a page there.

Preempted sequences come first: kept pages get the rest of the room. Spare pages give way first: copies of pages that
the pool has, too, and will look at again before it evicts them. Then the least recently used kept page gives way; pages
of sessions with a lease give way last.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from rollout.engine.kv.eviction_order import EvictionOrder
from rollout.engine.kv.pool import Copies
from rollout.engine.kv.tiers.disk_pages import NO_DISK, DiskPages
from rollout.engine.sequence.sequence_kv import PrefixKeys


class HostEntry(NamedTuple):
    """A kept page."""

    page: int
    oldest: int  # oldest weights version of its KV and of the KV that it was computed from


@dataclass(slots=True)
class HostEntryCounts:
    """Running totals since start, pages."""

    written: int = 0  # known pages that were copied to the host
    fetched: int = 0  # pages that were copied back
    lost: int = 0  # known pages that the pool gave up before they were on the host
    disk_written: int = 0
    disk_read: int = 0
    disk_failed: int = 0  # failed writes and reads


class HostPageBooks:
    """The `total` pages of host memory, whose content may move on to `disk`."""

    def __init__(
        self,
        total: int,
        page_bytes: int = 0,
        counts: HostEntryCounts | None = None,
        disk: DiskPages = NO_DISK,
    ) -> None:
        self.counts = counts or HostEntryCounts()
        self.total, self.page_bytes, self.disk = total, page_bytes, disk
        self.taken = 0
        self._free = list(range(total - 1, -1, -1))
        self._kept: dict[bytes, HostEntry] = {}
        self._order = EvictionOrder[bytes]()  # the order in which kept pages give way
        self._leases: OrderedDict[bytes, float] = OrderedDict()  # ends of leases, also of keys that are not kept yet
        self._now_s = 0.0
        self._read: dict[bytes, HostEntry] = {}
        self._unseen: OrderedDict[bytes, None] = OrderedDict()  # keys that `look` has not returned
        self.spills = Copies()  # writes to disk

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def spare(self) -> int:
        """Pages that can be handed out now without losing KV."""
        return len(self._free) + self._order.spare

    # --- of preempted sequences ---------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Pages that `take` or `begin_write` can hand out now."""
        return len(self._free) + len(self._kept)

    def take(self) -> int:
        """A page for a preempted sequence. One must be free."""
        self.taken += 1
        return self.begin_write()

    def give_back(self, page: int) -> None:
        """Free the page of a preempted sequence."""
        self.taken -= 1
        self._free.append(page)

    # --- known pages --------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """Pages with KV of known prefixes."""
        return len(self._kept) + len(self._read)

    def use(self, key: bytes, oldest: int = 0) -> bool:
        """True if the page with this key is kept, and no KV is older than `oldest`. Marks the page as used just now."""
        if key in self._kept:
            self._order.use(key)
            if key in self._unseen:
                self._unseen.move_to_end(key)
        return self.has(key, oldest)

    def has(self, key: bytes, oldest: int = 0) -> bool:
        """True if the page with this key is kept, and no KV is older than `oldest`."""
        kept = self._kept.get(key) or self._read.get(key)
        return kept is not None and kept.oldest >= oldest

    def note_evicted(self, key: bytes) -> None:
        """Note that the pool evicts the page with this key."""
        self.counts.lost += not self.use(key)

    def in_pool(self, keys: PrefixKeys | Seq[bytes]) -> None:
        """Note that the pool has the pages with these keys, in their order in a prefix, and will look at them again."""
        for key in reversed(keys):  # the end of a prefix gives way before its beginning
            self._order.put_first(key)

    def pool_emptied(self) -> None:
        """Note that the pool has no known page any more."""
        self._order.use_spare()

    def begin_write(self) -> int:
        """A page for a copy to the host. One must be free."""
        return self._free.pop() if self._free else self._give_up(self._order.first)

    def end_write(self, page: int, key: bytes, oldest: int = 0) -> None:
        """End a copy to this page. A key is kept once, with its newest KV."""
        if self.has(key, oldest):
            self._free.append(page)
            return
        if key in self._read:  # freed when the copy that reads it ends
            self.spills.give_up(self._read.pop(key).page)
        if key in self._kept:
            self._free.append(self._give_up(key))
        self._keep(key, HostEntry(page, oldest))
        self._unseen[key] = None

    def _keep(self, key: bytes, kept: HostEntry) -> None:
        self._kept[key] = kept
        self._order.add(key, self._leases.get(key, 0.0), self._now_s)

    def drop_write(self, page: int) -> None:
        """End a copy to this page that is void: the page is free."""
        self._free.append(page)

    def begin_read(self, key: bytes) -> HostEntry:
        """Mark the kept page with this key as read by a copy."""
        self._order.drop(key)
        kept = self._read[key] = self._kept.pop(key)
        return kept

    def end_read(self, key: bytes, page: int) -> None:
        """End or cancel the copy. The page becomes free if it was forgotten or replaced by newer KV."""
        if key in self._read and self._read[key].page == page:
            self._keep(key, self._read.pop(key))
        else:
            self._free.append(page)

    # --- leases -------------------------------------------------------------------------------------------------------

    def lease(self, keys: Seq[bytes], until_s: float) -> None:
        """Give a lease until this time to the pages with these keys, in the order of their prefix."""
        for key in reversed(keys):  # the end of a prefix gives way before its beginning
            self._leases[key] = until_s
            self._leases.move_to_end(key)
            if key in self._kept:
                self._order.drop(key)
                self._order.add(key, until_s, self._now_s)
        while len(self._leases) > 2 * self.total:
            self._leases.popitem(last=False)

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over."""
        self._now_s = now_s
        self._order.expire(now_s)

    # --- to disk ------------------------------------------------------------------------------------------------------

    @property
    def short(self) -> bool:
        """True if fewer than half of the pages can be evicted without loss, and `look` has more to return."""
        return 0 < len(self._unseen) and 2 * (len(self._free) + self.kept - len(self._unseen)) < self.total

    def look(self) -> tuple[bytes, HostEntry]:
        """Key and page of the least recently used page that `look` has not returned. Such a page must exist."""
        key, _ = self._unseen.popitem(last=False)
        return key, self._kept.get(key) or self._read[key]

    # --- ends ---------------------------------------------------------------------------------------------------------

    def forget_older(self, oldest: int) -> None:
        """Forget known pages with a weights version before `oldest`, also on disk."""
        self.disk.forget_older(oldest)
        for key in [key for key, kept in self._kept.items() if kept.oldest < oldest]:
            self._free.append(self._give_up(key))

    def forget_all(self) -> None:
        """Forget all known pages, also on disk; a page that a copy reads is free once the copy has ended."""
        self.disk.forget_all()
        self._free += [kept.page for kept in self._kept.values()]
        for known in (self._kept, self._read, self._unseen, self._order):
            known.clear()
        self.spills.give_up_all()

    def check(self) -> None:
        """Assert that no sequence and no copy has a page."""
        assert self.taken == 0 and not self._read, "a host page is in use"
        kept = {kept.page for kept in self._kept.values()}
        assert sorted([*self._free, *kept]) == list(range(self.total)), "a host page is lost"
        assert self.spills.sources() <= kept, "a page that is not kept is being written to disk"
        self._order.check(self._kept.keys())
        assert self._unseen.keys() <= self._kept.keys(), "a page that is not kept is to be written to disk"
        self.disk.check()

    def _give_up(self, key: bytes) -> int:
        kept = self._kept.pop(key)
        self._order.drop(key)
        self._unseen.pop(key, None)
        self.spills.give_up(kept.page)
        return kept.page
