"""The second tier of KV: known pages that are kept on the host and on disk, and their way there.

A known page is found by its prefix key: in the pool (`pool`), on the host (`host_pages`) or on disk (`disk_pages`).
This module says what leaves the device, and what leaves the host; `fetches` brings it back.

    to the host    the pool runs short: the oldest cached pages, then idle sessions' pages, are copied before the pool
                   needs the room. Once a page is on the host, its eviction loses nothing
    to disk        the host runs short: its oldest pages and states are written in the same way

With states of linear attention the *end* of a prefix goes along: the state after it, and the page in which it ends if
that is half full. Both have the key of the snapshot.

Admissions wait until the pages that they take are on the host (`writing`). A row that grows does not wait: if it takes
a page before its copy is on the host, the page's KV is lost. The next sequence with that prefix computes it again.

Invariants:
- Only pages that no step in flight writes to are copied to the host: cached pages, idle sessions' pages, and pages of
  ends whose sequence is settled. A state is copied after the steps in flight: one of them may save it.
- A page or place that is given up during its copy is not kept (`Copies`).
- After `forget_all`, the results of copies under way are discarded.
"""

from collections import deque
from collections.abc import Sequence as Seq

from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.tier import PageMirror
from rollout.engine.kv.tiers.disk_pages import DiskPages
from rollout.engine.kv.tiers.fetches import Fetches, KnownMove
from rollout.engine.kv.tiers.host_pages import HostPageBooks
from rollout.engine.kv.tiers.moves import CopyCosts, MoveBooks
from rollout.engine.messages.statuses import KeptStatus
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.sequence.sequence_kv import NO_POINT, PrefixEnd

#: Pages are copied to the host while fewer than this part of the pool can be given up without loss. An admission takes
#: the pages of a whole context at once, and a page is copied once, so a large part costs no more copies.
_SHARE = 0.5
#: The part while each copy costs another page: the host is full, and has no disk below it.
_SHARE_IF_FULL = 1 / 8
#: The most cached pages that one call of `next_pages` looks at.
_LOOKS = 256
#: The most states whose copies to the host are due.
_STATES_DUE = 2


class KnownBooks:
    """The books of known pages on the host and on disk. When `closed`, nothing is copied. `mirrors` accompany KV."""

    def __init__(
        self,
        sessions: Sessions,
        host: HostPageBooks,
        host_states: HostPageBooks,
        closed: bool,
        mirrors: Seq[PageMirror] = (),
    ) -> None:
        pool, snapshots = sessions.pool, sessions.snapshots
        self.costs = CopyCosts(sessions.page_size)
        self.closed = closed
        self.host, self.states = host, host_states
        self.fetches = Fetches(pool, snapshots, host, host_states, self.costs, mirrors)
        self._writing = 0  # pages whose copy to the host is due or under way
        self._writing_states = 0
        self._pool, self._sessions, self._snapshots = pool, sessions, snapshots
        self._page_size, self._mirrors = sessions.page_size, mirrors
        self.wanted = 0  # pages that the first sequence of the queue waits for
        self._oldest = 0  # oldest weights version of usable KV
        self._half_due: deque[KnownMove] = deque()
        self._states_due: deque[KnownMove] = deque()
        back = self.fetches
        self.page_moves = MoveBooks(self.next_pages, self.pages_ended, back.next_pages, back.pages_ended)
        self.state_moves = MoveBooks(self.next_states, self.states_ended, back.next_states, back.states_ended, True)

    @property
    def room(self) -> int:
        """Pages that the host can take without losing other pages."""
        return 0 if self.closed else self.host.spare

    @property
    def busy(self) -> bool:
        """True while copies are due, or fetches are under way."""
        return self._short or self._ends_due or self.fetches.busy or self.copies_out or self._reading is not None

    @property
    def copies_out(self) -> bool:
        """True while copies to the host are due or under way."""
        return self._writing > 0 or self._writing_states > 0

    def has(self, key: bytes, oldest: int = 0) -> bool:
        """Whether the page with this key can be fetched, or is being fetched; its KV has no version before `oldest`."""
        known = self.host.has(key, oldest) or (self.host.disk.has(key, oldest) and self.costs.disk_pays)
        return known and self.costs.pays and not self.closed

    def has_end(self, point: PrefixEnd, tokens: int, oldest: int) -> bool:
        """Whether the end of a prefix with this many tokens can be fetched, or is being fetched."""
        half, on_disk = not point.after or self.has(point.key, oldest), not self.states.has(point.key, oldest)
        known = not on_disk or self.states.disk.has(point.key, oldest)
        return half and known and self.costs.state_pays(tokens, on_disk) and not self.closed

    def lease(self, keys: Seq[bytes], until_s: float) -> None:
        """Until this time, evict pages and states with these keys, in prefix order, after all others."""
        for books in (self.host, self.states):
            if books.total:
                books.lease(keys, until_s)

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over."""
        for books in (self.host, self.states):
            books.expire(now_s)

    # --- from the device to the host ----------------------------------------------------------------------------------

    @property
    def writing(self) -> int:
        """Pages withheld from admissions: `next_pages` has not looked at them, or they are being copied."""
        return self._writing + (self._pool.unseen if self.costs.pays and not self.closed else 0)

    @property
    def _pool_short(self) -> bool:
        below = int((_SHARE if self.host.spare or self.host.disk.total else _SHARE_IF_FULL) * self._pool.total)
        return self._pool.available - self._pool.unseen < max(below, self.wanted)

    @property
    def _short(self) -> bool:
        unseen = self._pool.unseen > 0 or self._sessions.unseen
        return self._pool_short and unseen and self.costs.pays and not self.closed

    @property
    def _ends_due(self) -> bool:
        short = self._snapshots.unseen and (self._pool_short or self._snapshots.short)
        return short and self.costs.pays and not self.closed

    def look_at_ends(self) -> None:
        """Have ends of prefixes copied to the host, if pages or places run short."""
        while self._ends_due and len(self._states_due) < _STATES_DUE:
            place, page, point, oldest = self._snapshots.look()
            if not self.states.use(point.key, oldest) and self.states.room:
                state = KnownMove(place, self.states.begin_write(), point.key, oldest, point)
                self._states_due.append(state)
                self._snapshots.copies.begin(place, state)
                self._writing_states += 1
            if page and not self.host.use(point.key, oldest) and self.host.room:
                half = KnownMove(page, self.host.begin_write(), point.key, oldest, point)
                self._half_due.append(half)
                self._pool.half_copies.begin(page, half)
                self._writing += 1

    def next_pages(self, most: int) -> list[KnownMove]:
        """Up to `most` pages whose copies to the host begin now."""
        taken = _first(self._half_due, most)
        begun = len(taken)
        for _ in range(_LOOKS):
            if len(taken) == most or not self._short:
                break
            key, page = self._pool.look() if self._pool.unseen else self._sessions.look()
            if self._pool.find(key, self._oldest) != page:
                continue  # too old, or another page with the same KV is known
            oldest = self._pool.oldest_of(page, 0)
            if not self.host.use(key, oldest) and self.host.room:
                taken.append(KnownMove(page, self.host.begin_write(), key, oldest, NO_POINT))
                self._pool.begin_copy(page, taken[-1])
        self._writing += len(taken) - begun
        return taken

    def pages_ended(self, moves: list[KnownMove], failed: bool) -> list[Sequence]:
        """End copies of pages. A page that the pool has evicted meanwhile is not kept; no sequence waits for it."""
        self._writing -= len(moves)
        half, full = self._pool.half_copies.end, self._pool.end_copy
        valid = [move for move in moves if (half if move.end.key else full)(move.place, move)]
        good = [] if failed or self.closed else valid
        for mirror in self._mirrors if good else ():
            mirror.stow([move.place for move in good], [move.host_place for move in good])
        _end_writes(self.host, moves, good)
        return []

    def next_states(self, most: int) -> list[KnownMove]:
        """Up to `most` states whose copies to the host begin now."""
        return _first(self._states_due, most)

    def states_ended(self, moves: list[KnownMove], failed: bool) -> list[Sequence]:
        """End copies of states to the host; no sequence waits for them."""
        self._writing_states -= len(moves)
        valid = [move for move in moves if self._snapshots.copies.end(move.place, move)]
        good = [] if failed or self.closed else valid
        _end_writes(self.states, moves, good)
        for move in good:
            self._pool.ends.note(move.end.digest, move.end.after)
        return []

    # --- disk ---------------------------------------------------------------------------------------------------------

    def use_disk(self) -> None:
        """Account for pages and states that were written and read, and begin others. Never waits."""
        for host, mirrors in ((self.host, self._mirrors), (self.states, ())):
            disk, counts = host.disk, host.counts
            for job in disk.finished():
                counts.disk_failed += bool(job.failure)
                if job.kind == "write":
                    good = host.spills.end(job.page, job)
                    disk.keep(job, good)
                    counts.disk_written += good and not job.failure
                else:
                    self.fetches.read_ended(job)
                    counts.disk_read += not job.failure
            self.fetches.begin_reads(host)
            while host.short and disk.may_write and not self.closed:
                key, kept = host.look()
                if not disk.has(key, kept.oldest):
                    beside = b"".join(mirror.beside(kept.page) for mirror in mirrors)
                    host.spills.begin(kept.page, disk.write(key, kept.page, kept.oldest, beside))

    @property
    def _reading(self) -> DiskPages | None:
        return next((host.disk for host in (self.host, self.states) if host.disk.reading), None)

    def wait_for_disk(self, most_s: float) -> None:
        """Block until a read from disk has ended, for `most_s` seconds at most; no-op if none is under way."""
        if (disk := self._reading) is not None:
            disk.wait(most_s)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """Forget all kept KV, and discard the results of fetches under way."""
        for kept in (self.host, self.states):
            kept.forget_all()
        self._pool.half_copies.give_up_all()
        self._snapshots.copies.give_up_all()
        self.fetches.give_up_all()

    def forget_older(self, oldest: int) -> None:
        """Forget KV with a weights version before `oldest`; the results of fetches under way are not found."""
        self._oldest = self.fetches.oldest = oldest
        for kept in (self.host, self.states):
            kept.forget_older(oldest)

    def close(self) -> None:
        """Stop keeping pages, because copies fail."""
        self.closed = True
        self.forget_all()
        self.pages_ended(_first(self._half_due, len(self._half_due)), failed=True)
        self.states_ended(_first(self._states_due, len(self._states_due)), failed=True)

    def status(self) -> KeptStatus:
        counts = self.host.counts
        return KeptStatus(
            pages=self.host.kept,
            bytes_out=counts.written * self.host.page_bytes,
            bytes_in=counts.fetched * self.host.page_bytes,
            fetched_tokens=counts.fetched * self._page_size,
            lost_pages=counts.lost,
            disk_pages=self.host.disk.pages,
            disk_pages_total=self.host.disk.total,
            disk_read=counts.disk_read,
            disk_failed=counts.disk_failed + self.states.counts.disk_failed,
        )

    def check(self) -> None:
        """Assert that no copy is queued or under way."""
        self.fetches.check()
        assert not self.copies_out and not self._half_due and not self._states_due, "a copy is left"
        for kept in (self.host, self.states):
            kept.check()


def _first(due: deque[KnownMove], most: int) -> list[KnownMove]:
    return [due.popleft() for _ in range(min(most, len(due)))]


def _end_writes(host: HostPageBooks, moves: list[KnownMove], good: list[KnownMove]) -> None:
    """The host keeps the good pages; the room of the other pages is free."""
    kept = set(good)
    for move in moves:
        if move in kept:
            host.end_write(move.host_place, move.key, move.oldest)
        else:
            host.drop_write(move.host_place)
    host.counts.written += len(good)
