"""The second tier of KV: known pages that are kept on the host, and their way there and back.

A known page is found by its prefix key, in the pool (`pool`) or on the host (`host_pages`). This module says what is
copied when; it touches no tensor. `Offload` has `page_mover` carry it out.

    out    the pool gets short: the oldest cached pages, then those of idle sessions, are copied to the host before the
           pool needs the room. Once a page is on the host, its eviction loses nothing
    in     a sequence's prefix is on the host: a *fetch* copies it into new pages of the pool, which are cached then.
           The sequence waits for the fetch without row or pages, and then finds its prefix in the pool

With states of linear attention the *end* of a prefix goes along: the state after it, and the page in which it ends if
that is half full. Both have the key of the snapshot, and a fetch brings them after the full pages.

With a folder on disk (`disk`) the host works like the pool: its oldest pages are written before it needs their room.
A fetch first reads the pages that are on disk to the host.

No sequence waits for a copy to the host. If the pool needs a page that is not on the host yet, the page is lost. The
next sequence with that prefix computes it again.

Invariants:
- Only pages that no step in flight writes to are copied to the host: cached ones, full ones of idle sessions, and those
  of ends whose sequence is settled. A state is copied after the steps in flight: one of them may save it.
- A page or place that is given up during its copy is not kept (`PagePool.end_copy`).
- A fetch has a reference to each page of its prefix and to the place of its state. It writes to new pages and places
  only, and they are known when the copies have ended.
- Kept pages stay while a copy reads them. After `forget_all`, the results of copies under way are discarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from rollout.engine.kv.disk import NO_DISK, DiskJob, DiskPages, NoDisk
from rollout.engine.kv.host_pages import HostPageBooks
from rollout.engine.kv.host_states import HostStates
from rollout.engine.kv.page_mirror import PageMirror
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.messages.statuses import KeptStatus
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.sequence.sequence_kv import Point

#: Pages are copied to the host while fewer than this part of the pool can be given up without loss. An admission takes
#: the pages of a whole context at once, and a page is copied once, so a large part costs no more copies.
_AHEAD = 0.5
#: The longest copy of a page, relative to its computation. Copies run during steps, and most of the measured time is
#: a wait for room beside their kernels; prompt steps replace other steps.
_WORTH = 8
#: The most cached pages that one call of `next_out` looks at.
_LOOKS = 256
#: The most states whose copies to the host are due.
_STATES_DUE = 2


@dataclass(eq=False, slots=True)
class MovedPage:
    """A page on its way to the host, or back."""

    key: bytes
    pool_page: int
    host_page: int
    fetch: Fetch | None = None
    oldest: int = 0  # weights version of its KV, where keys do not contain the version
    half: bool = False  # the key is that of a snapshot: the prefix ends in this page


@dataclass(eq=False, slots=True)
class MovedState:
    """A state on its way to the host, or back."""

    point: Point
    place: int
    host_place: int
    oldest: int
    page: int | None = None  # the pool page in which the prefix ends; None if that page is full
    fetch: Fetch | None = None


@dataclass(eq=False, slots=True)
class Fetch:
    """Pages of one prefix on their way from the host to the pool."""

    prefix: list[int]  # all its pages in the pool, in order
    keys: list[bytes]  # keys of the pages to copy, in order
    queued: deque[MovedPage]
    end: MovedState | None = None  # the state after the prefix
    copying: int = 0  # copies under way: pages, reads from disk included, and the state
    over: bool = False  # the result will be discarded


class CopyCosts:
    """Whether it is better to copy a page than to compute it; True until both are measured."""

    def __init__(self, page_size: int) -> None:
        self.pays = True
        self._page_size = page_size
        self._copies: deque[float] = deque(maxlen=8)  # seconds a page; the first copies of a device are slow
        self._state_copies: deque[float] = deque(maxlen=8)  # seconds a state
        self._reads: deque[float] = deque(maxlen=8)  # seconds a page, from disk
        self._tokens = self._seconds = 0.0  # tokens and time of prompt steps; recent steps weigh more

    def copied(self, pages: int, seconds: float) -> None:
        """Note the copy of a piece of this many pages."""
        self._copies.append(seconds / pages)
        self._compare()

    def state_copied(self, seconds: float) -> None:
        """Note the copy of a state."""
        self._state_copies.append(seconds)

    def read(self, seconds: float) -> None:
        """Note the read of a page from disk."""
        self._reads.append(seconds)

    @property
    def disk_pays(self) -> bool:
        """Whether it is better to read a page from disk than to compute it."""
        return self._worth(self._reads, self._page_size)

    def state_pays(self, tokens: int) -> bool:
        """Whether it is better to copy a state than to compute that many tokens."""
        return self.pays and self._worth(self._state_copies, tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """Note the time of a step of prompts."""
        self._tokens = 0.9 * self._tokens + tokens
        self._seconds = 0.9 * self._seconds + seconds
        self._compare()

    def _compare(self) -> None:
        self.pays = self._worth(self._copies, self._page_size)

    def _worth(self, copies: deque[float], tokens: int) -> bool:
        return not copies or not self._tokens or min(copies) < _WORTH * tokens * self._seconds / self._tokens


class Tier:
    """The books of known pages on the host. When `closed`, nothing is copied. `mirrors` go along with KV."""

    def __init__(
        self,
        pool: PagePool,
        host: HostPageBooks,
        host_states: HostStates,
        sessions: Sessions,
        snapshots: Snapshots,
        page_size: int,
        closed: bool,
        mirrors: Seq[PageMirror] = (),
        page_bytes: int = 0,
        disk: DiskPages | NoDisk = NO_DISK,
    ) -> None:
        self.costs = CopyCosts(page_size)
        self._page_size, self._page_bytes = page_size, page_bytes
        self.closed = closed
        self.host, self.states, self.disk = host, host_states, disk
        self.writing = 0  # pages whose copy to the host is due or under way
        self._writing_states = 0
        self._pool = pool
        self._sessions = sessions
        self._snapshots = snapshots
        self._mirrors = mirrors
        self._ahead = int(_AHEAD * pool.total)
        self._oldest = 0  # oldest weights version of usable KV
        self._fetching: dict[bytes, Fetch] = {}
        self._fetches: deque[Fetch] = deque()  # fetches with queued pages, served in turn
        self._ended: list[Fetch] = []
        self._to_read: deque[MovedPage] = deque()  # pages to read from disk
        self._half_out: deque[MovedPage] = deque()
        self._states_out: deque[MovedState] = deque()
        self._states_in: deque[MovedState] = deque()

    @property
    def room(self) -> int:
        """Pages that the host can take without losing others."""
        return 0 if self.closed else self.host.free

    @property
    def busy(self) -> bool:
        """True while copies are due, or fetches are under way."""
        return (
            self._short
            or self._ends_due
            or bool(self._fetching)
            or bool(self._ended)
            or self.copies_out
            or self.disk.reading
        )

    @property
    def copies_out(self) -> bool:
        """True while copies to the host are due or under way."""
        return self.writing > 0 or self._writing_states > 0

    # --- to the host --------------------------------------------------------------------------------------------------

    @property
    def _pool_short(self) -> bool:
        return self._pool.available - self._pool.unseen < self._ahead

    @property
    def _short(self) -> bool:
        unseen = self._pool.unseen > 0 or self._sessions.unseen
        return self._pool_short and unseen and self.costs.pays and not self.closed

    @property
    def _ends_due(self) -> bool:
        short = self._snapshots.unseen and (self._pool_short or self._snapshots.short)
        return short and self.costs.pays and not self.closed

    def look_at_ends(self) -> None:
        """Have ends of prefixes copied to the host, if pages or places get short."""
        while self._ends_due and len(self._states_out) < _STATES_DUE:
            place, page, point, oldest = self._snapshots.look()
            if not self.states.use(point.key, oldest) and (host_place := self.states.begin_write()) is not None:
                state = MovedState(point, place, host_place, oldest)
                self._states_out.append(state)
                self._snapshots.begin_copy(place, state)
                self._writing_states += 1
            if page is None or self.host.use(point.key, oldest):
                continue
            if (host_page := self.host.begin_write()) is not None:
                half = MovedPage(point.key, page, host_page, oldest=oldest, half=True)
                self._half_out.append(half)
                self._pool.begin_half_copy(page, half)
                self.writing += 1

    def next_out(self, most: int) -> list[MovedPage]:
        """Up to `most` pages whose copies to the host begin now."""
        taken: list[MovedPage] = []
        while self._half_out and len(taken) < most:
            taken.append(self._half_out.popleft())
        begun = len(taken)
        for _ in range(_LOOKS):
            if len(taken) == most or not self._short:
                break
            key, page = self._pool.look() if self._pool.unseen else self._sessions.look()
            if self._pool.find(key, self._oldest) != page:
                continue  # too old, or a session's page that is known by another one with the same KV
            oldest = self._pool.oldest_of(page) or 0
            if not self.host.use(key, oldest) and (host_page := self.host.begin_write()) is not None:
                taken.append(MovedPage(key, page, host_page, oldest=oldest))
                self._pool.begin_copy(page, taken[-1])
        self.writing += len(taken) - begun
        return taken

    def copied_out(self, pages: list[MovedPage], failed: bool) -> None:
        """End copies to the host; pages that the pool has evicted meanwhile are not kept."""
        self.writing -= len(pages)
        good = [page for page in pages if self._end_copy(page) and not failed and not self.closed]
        for mirror in self._mirrors if good else ():
            mirror.stow([page.pool_page for page in good], [page.host_page for page in good])
        kept = set(good)
        for page in pages:
            self.host.end_write(page.host_page, page.key if page in kept else None, page.oldest)
        self.host.counts.written += len(good)

    def _end_copy(self, page: MovedPage) -> bool:
        end = self._pool.end_half_copy if page.half else self._pool.end_copy
        return end(page.pool_page, page)

    def next_states_out(self, most: int) -> list[MovedState]:
        """Up to `most` states whose copies to the host begin now, after the steps in flight."""
        return [self._states_out.popleft() for _ in range(min(most, len(self._states_out)))]

    def states_copied_out(self, states: list[MovedState], failed: bool) -> Seq[Sequence]:
        """End copies of states to the host; no sequence waits for them."""
        self._writing_states -= len(states)
        for state in states:
            good = self._snapshots.end_copy(state.place, state) and not failed and not self.closed
            self.states.end_write(state.host_place, state.point.key if good else None, state.oldest)
            if good:
                self.states.note(state.point)
                self.states.counts.written += 1
        return ()

    # --- fetches ------------------------------------------------------------------------------------------------------

    def has(self, key: bytes, oldest: int = 0) -> bool:
        """Whether the page with this key can be fetched, or is being fetched; its KV has no version before `oldest`."""
        known = self.host.has(key, oldest) or (self.disk.has(key, oldest) and self.costs.disk_pays)
        return known and self.costs.pays and not self.closed

    def has_end(self, point: Point, tokens: int, oldest: int) -> bool:
        """Whether the end of a prefix with this many tokens can be fetched, or is being fetched."""
        half = not point.after or self.has(point.key, oldest)
        return half and self.states.has(point.key, oldest) and self.costs.state_pays(tokens) and not self.closed

    def may_fetch(self, key: bytes, oldest: int = 0) -> bool:
        """Whether a fetch of the page with this key may begin."""
        return key not in self._fetching and self.has(key, oldest)

    def fetch_of(self, key: bytes) -> Fetch | None:
        """The fetch under way that brings the page with this key."""
        return self._fetching.get(key)

    def fetch(
        self,
        prefix: list[int],
        targets: Seq[tuple[bytes, int]],
        oldest: int = 0,
        end: tuple[Point, int] | None = None,
    ) -> Fetch:
        """Begin to copy kept pages into new pages of the pool: `targets` are their keys and these pages.

        Their KV has no version before `oldest`. `prefix` are all pages of the prefix. Each has a reference, which the
        fetch takes over. The state of `end` goes to this new place of a snapshot; the page in which that prefix ends,
        if it is half full, is the last target.
        """
        fetch = Fetch(prefix, [key for key, _ in targets], deque())
        for key, page in targets:
            half = end is not None and end[0].key == key
            moved = MovedPage(key, page, -1, fetch, half=half)
            self._fetching[key] = fetch
            if self.host.has(key, oldest):
                self._queue(moved)
            else:
                self._to_read.append(moved)
                fetch.copying += 1
        if end is not None:
            point, place = end
            kept = self.states.begin_read(point.key)
            ends_in = targets[-1][1] if point.after else None
            fetch.end = state = MovedState(point, place, kept.page, kept.oldest, ends_in, fetch)
            fetch.copying += 1
            self._states_in.append(state)
            self._fetching[point.key] = fetch
        return fetch

    def _queue(self, moved: MovedPage) -> None:
        """Queue this page of a fetch: it is on the host now."""
        assert moved.fetch is not None
        moved.host_page, moved.oldest = self.host.begin_read(moved.key)
        if not moved.fetch.queued:
            self._fetches.append(moved.fetch)
        moved.fetch.queued.append(moved)

    def next_in(self, most: int) -> list[MovedPage]:
        """Up to `most` pages of one fetch whose copies from the host begin now."""
        if not self._fetches:
            return []
        fetch = self._fetches.popleft()
        taken = [fetch.queued.popleft() for _ in range(min(most, len(fetch.queued)))]
        fetch.copying += len(taken)
        if fetch.queued:
            self._fetches.append(fetch)
        return taken

    def copied_in(self, pages: list[MovedPage], failed: bool) -> None:
        """End copies from the host."""
        fetch = pages[0].fetch
        assert fetch is not None
        good = not failed and not fetch.over
        for mirror in self._mirrors if good else ():
            mirror.fetched([page.host_page for page in pages], [page.pool_page for page in pages])
        for page in pages:
            if good and not page.half:
                self._pool.remember(page.key, page.pool_page, page.oldest)
            self._fetched(page)
        fetch.over |= failed
        self.host.counts.fetched += len(pages) if good else 0
        fetch.copying -= len(pages)
        self._end_if_done(fetch)

    def next_states_in(self, most: int) -> list[MovedState]:
        """Up to `most` states whose copies from the host begin now."""
        return [self._states_in.popleft() for _ in range(min(most, len(self._states_in)))]

    def states_copied_in(self, states: list[MovedState], failed: bool) -> Seq[Sequence]:
        """End copies of states from the host; sequences wait for the fetch."""
        for state in states:
            assert state.fetch is not None
            self._state_fetched(state, failed)
            self._end_if_done(state.fetch)
        return ()

    def _state_fetched(self, state: MovedState, failed: bool) -> None:
        fetch = state.fetch
        assert fetch is not None
        fetch.copying -= 1
        fetch.over |= failed
        self.states.counts.fetched += not failed
        self.states.end_read(state.point.key, state.host_place)

    def take_ended(self) -> list[Fetch]:
        """The fetches that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _fetched(self, page: MovedPage) -> None:
        if not page.half:
            self._forget_fetching(page.key, page.fetch)
        self.host.end_read(page.key, page.host_page)

    def _forget_fetching(self, key: bytes, fetch: Fetch | None) -> None:
        if self._fetching.get(key) is fetch:
            del self._fetching[key]

    def _end_if_done(self, fetch: Fetch) -> None:
        if fetch.queued or fetch.copying:
            return
        if (end := fetch.end) is not None:
            self._forget_fetching(end.point.key, fetch)
            if not fetch.over:
                self._snapshots.keep(end.point, end.place, end.page, end.oldest)
                self.states.use(end.point.key)
            self._snapshots.release(end.place)
        for page in reversed(fetch.prefix):  # the end of a prefix is evicted before its beginning
            self._pool.release(page)
        for key in reversed(fetch.keys):
            self.host.use(key)
        self._ended.append(fetch)

    # --- disk ---------------------------------------------------------------------------------------------------------

    def use_disk(self) -> None:
        """Account for pages that were written and read, and begin others. Never waits."""
        for job in self.disk.finished():
            if job.kind == "write":
                self.disk.keep(job, self.host.end_spill(job.page, job))
            else:
                self._read(job, job.entry)
        while self._to_read and self.disk.may_read:
            moved = self._to_read.popleft()
            if self.host.has(moved.key, self._oldest):
                self._arrived(moved)
                continue
            known = self.disk.has(moved.key, self._oldest)  # False if it was evicted meanwhile
            if not known or (page := self.host.begin_write()) is None:
                self._not_read(moved)
            else:
                self.disk.read(moved.key, page, moved)
        while self.host.short and self.disk.may_write and not self.closed:
            key, kept = self.host.look()
            if not self.disk.has(key, kept.oldest):
                beside = b"".join(mirror.bytes_beside(kept.page) for mirror in self._mirrors)
                self.host.begin_spill(kept.page, self.disk.write(key, kept.page, kept.oldest, beside))

    def _read(self, job: DiskJob, moved: MovedPage) -> None:
        fetch = moved.fetch
        assert fetch is not None
        if job.failure or fetch.over:
            self.host.end_write(job.page, None)
            self._not_read(moved)
            return
        self.costs.read(job.seconds)
        start = 0
        for mirror in self._mirrors:
            end = start + len(mirror.bytes_beside(job.page))
            mirror.take_bytes_beside(job.page, job.beside[start:end])
            start = end
        self.host.end_write(job.page, moved.key, job.oldest)
        self._arrived(moved)

    def _arrived(self, moved: MovedPage) -> None:
        assert moved.fetch is not None
        moved.fetch.copying -= 1
        self._queue(moved)

    def _not_read(self, moved: MovedPage) -> None:
        """Cut a fetch at a missing page: its sequences compute from there."""
        fetch = moved.fetch
        assert fetch is not None
        self._forget_fetching(moved.key, fetch)
        fetch.copying -= 1
        fetch.over |= moved.half
        self._end_if_done(fetch)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """Forget all kept KV, and discard the results of fetches under way."""
        fetches = dict.fromkeys(self._fetching.values())
        self._fetches.clear()
        self._fetching.clear()
        self.host.forget_all()
        self.states.forget_all()
        self.disk.forget_all()
        to_read, self._to_read = self._to_read, deque()
        self._pool.forget_half_copies()
        self._snapshots.forget_copies()
        for fetch in fetches:
            fetch.over = True
            while fetch.queued:
                self._fetched(fetch.queued.popleft())
            fetch.copying -= sum(moved.fetch is fetch for moved in to_read)
            for state in [state for state in self._states_in if state is fetch.end]:
                self._states_in.remove(state)
                self._state_fetched(state, failed=True)
            self._end_if_done(fetch)

    def forget_older(self, oldest: int) -> None:
        """Forget KV with a weights version before `oldest`; the results of fetches under way are not found."""
        self._oldest = oldest
        self.host.forget_older(oldest)
        self.disk.forget_older(oldest)
        self.states.forget_older(oldest)

    def close(self) -> None:
        """Stop keeping pages, because copies fail."""
        self.closed = True
        self.forget_all()
        self.copied_out(self.next_out(len(self._half_out)), failed=True)
        self.states_copied_out(self.next_states_out(len(self._states_out)), failed=True)

    def status(self) -> KeptStatus:
        """A snapshot of now."""
        counts = self.host.counts
        return KeptStatus(
            pages=self.host.kept,
            bytes_out=counts.written * self._page_bytes,
            bytes_in=counts.fetched * self._page_bytes,
            fetched_tokens=counts.fetched * self._page_size,
            lost_pages=counts.lost,
            disk_pages=self.disk.pages,
            disk_pages_total=self.disk.total,
            disk_read=self.disk.counts.read,
            disk_failed=self.disk.counts.failed,
        )

    def check(self) -> None:
        """Assert that no copy is queued or under way."""
        assert not self._fetching and not self._fetches and not self._ended, "a fetch is left"
        assert not self.copies_out and not self._states_in and not self._to_read, "a copy is left"
        self.host.check()
        self.states.check()
