"""Fetches: KV of known prefixes on its way back, from disk to the host and from the host to the device.

A fetch brings the pages of one prefix that the pool lacks, and with states of linear attention the end of the prefix:
the state after it, and its half-full page. Sequences wait for it without a row or pages, and then find their prefix in
the pool. A sequence that wants a page on its way waits for the same fetch (`of`).

    to read      the page or the state is on disk only: it is read to the host first
    queued       the page or the state is on the host; fetches take turns
    copying      `page_mover` copies it to its place on the device
    over         full pages are known at once, the end with the fetch

What fails costs hits alone. A page that cannot be read is left out, and sequences compute from there. After a failed
copy, or when all KV is given up (`give_up_all`), the fetch brings nothing: it ends when its copies have ended.

Invariants:
- A fetch has a reference to each page of its prefix and to the place of its state. It writes to new pages and places
  only, and they are known when the copies have ended.
- Pages on the host stay while a copy reads them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.kv.tier import Fetch, PageMirror
from rollout.engine.kv.tiers.disk_files import DiskJob
from rollout.engine.kv.tiers.host_pages import HostPageBooks
from rollout.engine.kv.tiers.moves import CopyCosts, Move
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.sequence.sequence_kv import NO_POINT, PrefixEnd


@dataclass(eq=False, slots=True)
class KnownMove(Move):
    """A page or a state of a known prefix on its way to the host, or back."""

    key: bytes
    oldest: int  # oldest weights version in its KV
    end: PrefixEnd  # the end of the prefix, for its state and its half-full page; `NO_POINT` for full pages


@dataclass(eq=False, slots=True)
class FetchedMove(KnownMove):
    """A page or a state that a fetch brings."""

    fetch: PrefixFetch
    queued: _Queued


@dataclass(eq=False, slots=True)
class PrefixFetch(Fetch):
    """Pages of one prefix on their way from the host to the pool."""

    prefix: list[int]  # all its pages in the pool, in order
    end: PrefixEnd  # the end of the prefix, if its state comes along
    state_place: int  # place of that state
    moves: list[FetchedMove]  # pages in order, then the state
    left: int = 0  # moves that have not ended
    over: bool = False  # the result is discarded


class _Queued:
    """Queued moves of pages, or of states. Fetches take turns; reads from disk do not."""

    def __init__(self, host: HostPageBooks) -> None:
        self.host = host
        self.to_read: deque[FetchedMove] = deque()
        self._of: OrderedDict[PrefixFetch, deque[FetchedMove]] = OrderedDict()

    def begin(self, move: FetchedMove) -> None:
        """Queue a move, or its read from disk before that."""
        if self.host.has(move.key, move.oldest):
            self.add(move)
        else:
            self.to_read.append(move)

    def add(self, move: FetchedMove) -> None:
        """Queue a move whose page or state is on the host, and stays there until the end of the copy."""
        move.host_place, move.oldest = self.host.begin_read(move.key)
        self._of.setdefault(move.fetch, deque()).append(move)

    def next(self, most: int) -> list[FetchedMove]:
        """Up to `most` moves of one fetch, which begin now."""
        if not self._of:
            return []
        fetch, queued = self._of.popitem(last=False)
        taken = [queued.popleft() for _ in range(min(most, len(queued)))]
        if queued:
            self._of[fetch] = queued
        return taken

    def give_up_all(self) -> list[FetchedMove]:
        """Take all moves that are queued or not read."""
        moves = [move for queued in self._of.values() for move in queued]
        self._of.clear()
        for move in moves:
            self.host.end_read(move.key, move.host_place)
        moves += self.to_read
        self.to_read.clear()
        return moves

    def __bool__(self) -> bool:
        return bool(self._of or self.to_read)


class Fetches:
    """The running fetches. `mirrors` accompany KV."""

    def __init__(
        self,
        pool: PagePool,
        snapshots: Snapshots,
        host: HostPageBooks,
        host_states: HostPageBooks,
        costs: CopyCosts,
        mirrors: Seq[PageMirror] = (),
    ) -> None:
        self.oldest = 0  # oldest weights version of usable KV
        self._pool, self._snapshots = pool, snapshots
        self._costs, self._mirrors = costs, mirrors
        self._of: dict[bytes, PrefixFetch] = {}  # the fetches under way, by each key that they bring
        self._pages, self._states = _Queued(host), _Queued(host_states)
        self._ended: list[PrefixFetch] = []

    @property
    def busy(self) -> bool:
        """True while fetches are under way, or were not returned by `take_ended`."""
        return bool(self._of or self._ended)

    def of(self, key: bytes) -> PrefixFetch | None:
        """The running fetch that brings the page or state with this key."""
        return self._of.get(key)

    def begin(
        self,
        prefix: list[int],
        targets: Seq[tuple[bytes, int]],
        oldest: int = 0,
        end: PrefixEnd = NO_POINT,
        state_place: int = 0,
    ) -> PrefixFetch:
        """Begin to copy kept pages into new pages of the pool: `targets` are their keys and these pages.

        Their KV has no version before `oldest`. `prefix` are all pages of the prefix. Each has a reference, which the
        fetch takes over. With an `end` the state there goes to this new place of a snapshot; if its page is half full,
        that is the last target.
        """
        fetch = PrefixFetch(prefix, end, state_place, [])
        for key, page in targets:
            self._begin(FetchedMove(page, -1, key, oldest, end if key == end.key else NO_POINT, fetch, self._pages))
        if end.key:
            self._begin(FetchedMove(state_place, -1, end.key, oldest, end, fetch, self._states))
        return fetch

    def _begin(self, move: FetchedMove) -> None:
        self._of[move.key] = move.fetch
        move.fetch.moves.append(move)
        move.fetch.left += 1
        move.queued.begin(move)

    def take_ended(self) -> list[PrefixFetch]:
        """The fetches that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # --- from disk to the host ----------------------------------------------------------------------------------------

    def begin_reads(self, host: HostPageBooks) -> None:
        """Read pages or states that are only on disk to `host`."""
        queued, disk = self._pages if host is self._pages.host else self._states, host.disk
        while queued.to_read:
            move = queued.to_read[0]
            if host.has(move.key, self.oldest):  # it has come to the host meanwhile
                queued.add(move)
            elif not disk.has(move.key, self.oldest) or not host.room:
                self._leave_out(move)
            elif disk.may_read:
                disk.read(move.key, host.begin_write(), move)
            else:
                return
            queued.to_read.popleft()

    def read_ended(self, job: DiskJob) -> None:
        """End the read of a page or a state."""
        move: FetchedMove = job.entry
        host = move.queued.host
        if job.failure or move.fetch.over:
            host.drop_write(job.page)
            self._leave_out(move)
            return
        self._costs.read(job.seconds, move.queued is self._states)
        start = 0
        for mirror in self._mirrors if move.queued is self._pages else ():
            beside = mirror.beside(job.page)
            beside[:] = job.beside[start : start + len(beside)]
            start += len(beside)
        host.end_write(job.page, job.key, job.oldest)
        move.queued.add(move)

    def _leave_out(self, move: FetchedMove) -> None:
        """End a fetch before a missing page: its sequences compute from there.

        A half-full page and its state have one key, which stays with the fetch until both are read.
        """
        if not move.end.key:
            self._forget(move)
        self._end(move, failed=bool(move.end.key))

    # --- from the host to the device ----------------------------------------------------------------------------------

    def next_pages(self, most: int) -> list[FetchedMove]:
        """Up to `most` pages of one fetch whose copies begin now."""
        return self._pages.next(most)

    def pages_ended(self, moves: list[FetchedMove], failed: bool) -> list[Sequence]:
        """End copies of pages of one fetch. No sequence has these pages yet."""
        good = () if failed or moves[0].fetch.over else moves
        for mirror in self._mirrors if good else ():
            mirror.fetched([move.host_place for move in good], [move.place for move in good])
        for move in good:
            if not move.end.key:
                self._pool.remember(move.key, move.place, move.oldest)
        return self._end_reads(self._pages.host, moves, failed)

    def next_states(self, most: int) -> list[FetchedMove]:
        """Up to `most` states whose copies begin now."""
        return self._states.next(most)

    def states_ended(self, moves: list[FetchedMove], failed: bool) -> list[Sequence]:
        """End copies of states. No sequence has them yet."""
        return self._end_reads(self._states.host, moves, failed)

    def _end_reads(self, host: HostPageBooks, moves: list[FetchedMove], failed: bool) -> list[Sequence]:
        for move in moves:
            host.end_read(move.key, move.host_place)
            host.counts.fetched += not failed and not move.fetch.over
            self._end(move, failed)
        return []

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, move: FetchedMove, failed: bool) -> None:
        """End a move; the last one ends its fetch."""
        fetch = move.fetch
        fetch.over |= failed
        fetch.left -= 1
        if fetch.left:
            return
        if fetch.end.key:
            self._end_state(fetch)
        for page in reversed(fetch.prefix):  # the end of a prefix is evicted before its beginning
            self._pool.release(page)
        for done in reversed(fetch.moves):
            self._forget(done)
            self._pages.host.use(done.key)
        if not fetch.over:
            self._pages.host.in_pool([done.key for done in fetch.moves if not done.end.key])
        self._ended.append(fetch)

    def _end_state(self, fetch: PrefixFetch) -> None:
        if not fetch.over:
            state, page = fetch.moves[-1], fetch.prefix[-1] if fetch.end.after else 0
            self._snapshots.keep(fetch.end, fetch.state_place, page, state.oldest)
            self._states.host.use(fetch.end.key)
        self._snapshots.release(fetch.state_place)

    def _forget(self, move: FetchedMove) -> None:
        if self._of.get(move.key) is move.fetch:
            del self._of[move.key]

    def give_up_all(self) -> None:
        """Cancel the running fetches: nothing more is copied, and copies under way have no effect."""
        for fetch in self._of.values():
            fetch.over = True
        self._of.clear()
        for move in [*self._pages.give_up_all(), *self._states.give_up_all()]:
            self._end(move, failed=True)

    def check(self) -> None:
        """Assert that nothing is fetched."""
        assert not self._of and not self._ended, "a fetch is left"
        assert not self._pages and not self._states, "a copy is left"
