"""Offload: the KV of preempted sequences is copied to the host and back while steps run.

`OffloadBooks` says where each page is; it touches no tensor. In each tick `Offload` has `page_mover` copy what these
books name, and those of known pages (`tier`). A sequence passes through four calls:

    take       it has left its row and no step in flight names it: its pages become offloaded pages
    next_out   an offloaded page without other users is copied to the host; then its pool page is free
    restore    it is admitted again: it shares what is still in the pool, the rest is copied into new pool pages
    drop       its first step is launched, it ends, or its KV is invalid: it no longer needs its offloaded pages

States of an offloaded page, the KV of one page of preempted sequences:

    shared      in a pool page that others use, too: a copy would free nothing
    outgoing    in a pool page; its copy to the host is queued or under way
    on host     on the host only
    restoring   its copy to a pool page is queued or under way; sequences that are admitted meanwhile share it
    in both     shared again after a restore, and still on the host: some of its owners are not admitted yet

    take --> shared <--> outgoing --> on host <--> restoring --> drop
                                         ^             |
                                         +-- in both <-+

Invariants:
- Each offloaded page has a host page from the start, so it can be copied at any time.
- An offloaded page has one reference to its pool page, however many owners it has, until its copy is complete.
- A host page is used again only when no copy reads or writes it.
- Only pages that no step in flight names are copied to the host: a sequence that may write to a page refers to it until
  its steps are committed.
- A sequence may take a page back and write to it while the page is copied out: that copy is never used.
- A page with several owners is never written to: it is full, and was shared before.

Only `wait` waits; it is for when no step can be launched before a copy is complete. A failed copy ends offloading:
offloaded sequences are computed again, and so are those that are preempted later.
"""

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollout.engine.device.streams import DeviceStream
from rollout.engine.kv.fetches import Fetch
from rollout.engine.kv.host_pages import HostPageBooks
from rollout.engine.kv.moves import Move, MoveBooks
from rollout.engine.kv.page_mirror import PageMirror
from rollout.engine.kv.page_mover import CopyPiece, CopyQueue, PageMover
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.tier import HostTier
from rollout.engine.messages.statuses import OffloadStatus
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.sequence.sequence_kv import (
    NO_HOST_STATE,
    NOT_OFFLOADED,
    HostState,
    OffloadedKV,
    OffloadedPage,
    Restore,
)

log = logging.getLogger(__name__)

_RECENT_MOVES = 4096


@dataclass(slots=True)
class OffloadCounts:
    """Running totals since start."""

    offloaded: int = 0  # preempted sequences whose KV was offloaded
    restored: int = 0  # offloaded sequences that went on with their KV
    refused: int = 0  # preempted sequences for whose KV the host had no room
    pages_out: int = 0
    pages_in: int = 0


@dataclass(eq=False, slots=True)
class _PageOut(Move):
    """A page of preempted sequences on its way to the host."""

    page: OffloadedPage


@dataclass(eq=False, slots=True)
class _PageIn(Move):
    """The page on its way back."""

    restore: Restore


@dataclass(eq=False, slots=True)
class _RowState(Move):
    """The state of a row on its way to the host, or back."""

    seq: Sequence


class OffloadBooks:
    """The place of each page of the offloaded sequences.

    Without pages of the host nothing is offloaded.

    `mirrors` accompany the KV and go to the host with it.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        host: HostPageBooks,
        host_states: HostPageBooks,
        mirrors: Seq[PageMirror] = (),
        counts: OffloadCounts | None = None,
    ) -> None:
        self.counts = counts or OffloadCounts()
        self.closed = host.total == 0  # true, too, after copies failed: nothing is offloaded any more
        self.outgoing = 0  # pages whose pool page is free once they are copied
        self.host = host
        self._pool = pool
        self._page_size = page_size
        self._mirrors = mirrors
        self._in_pool: dict[int, OffloadedPage] = {}  # key: pool page; every state except on host
        self._shared: dict[int, OffloadedPage] = {}  # key: pool page; states shared and both
        self._to_copy_out: deque[OffloadedPage] = deque()  # some may have been dropped since
        self.to_copy_in: deque[Restore] = deque()
        self.host_states = host_states  # places for states of linear attention
        self._states_out: deque[_RowState] = deque()
        self._states_in: deque[_RowState] = deque()
        self._waiting: dict[Restore, list[Sequence]] = {}  # the sequences that wait for this restore
        self._sequences = 0
        self.page_moves = MoveBooks(self.next_out, self.copied_out, self.next_in, self.copied_in)
        self.state_moves = MoveBooks(
            self.next_states_out, self.states_copied_out, self.next_states_in, self.states_copied_in
        )

    # --- sequences ---------------------------------------------------------------------------------------------------

    def take(self, seq: Sequence) -> bool:
        """Take the pages of a sequence. True: they are offloaded pages now. False: the caller must release them.

        A sequence that was being restored has its offloaded pages already; one that has ended needs none.
        """
        wanted, seq.kv.wants_offload = seq.kv.wants_offload and not seq.finalized, False
        state, seq.kv.host_state = seq.kv.host_state, NO_HOST_STATE
        if seq.kv.is_offloaded:
            if not wanted:
                self.drop(seq)
            return False
        taken = wanted and self._take(seq, state)
        if not taken:
            self._give_back(state)
        return taken

    def _take(self, seq: Sequence, state: HostState) -> bool:
        kv = seq.kv
        count = -(-kv.length // self._page_size)
        with_kv, rest = kv.pages[:count], kv.pages[count:]
        if self.closed or not with_kv:
            return False
        if sum(page not in self._in_pool for page in with_kv) > self.host.room:
            self.counts.refused += 1
            return False
        pages = [self._take_page(page) for page in with_kv]
        for page in rest:
            self._pool.release(page)
        for offloaded in reversed(pages):  # the last pages of a prefix go first: the first ones are useful longest
            if not offloaded.outgoing:
                self._send_or_share(offloaded)
        kv.offloaded = OffloadedKV(kv.length, kv.oldest, kv.adapter_edition, kv.keys, pages, state=state)
        self.counts.offloaded += 1
        self._sequences += 1
        return True

    def _take_page(self, page: int) -> OffloadedPage:
        """The offloaded page of a pool page, which takes over the caller's reference."""
        if page not in self._in_pool:
            self._in_pool[page] = OffloadedPage(page, self.host.take())
        else:
            self._in_pool[page].owners += 1
            self._pool.release(page)
        return self._in_pool[page]

    def pool_pages(self, kv: OffloadedKV, version: int) -> list[int]:
        """For each page of an offloaded sequence the pool page that has, or will have, its KV. 0: restore it."""
        pages = [page.restore.pool_page if page.restore else page.pool_page for page in kv.pages]
        if kv.keys and kv.oldest == version:  # a key may be known with KV of several versions
            for i in range(len(kv.keys)):
                pages[i] = pages[i] or self._pool.find(kv.keys[i], version)
        return pages

    def restore(self, seq: Sequence, targets: list[tuple[int, int]]) -> None:
        """Copy pages back for a sequence that is admitted again; `targets` are (index of the page, its pool page)."""
        kv = seq.kv.offloaded
        assert seq.kv.is_offloaded and not kv.restores
        for i, pool_page in targets:
            restore = kv.pages[i].restore = Restore(kv.pages[i], pool_page)
            self.to_copy_in.append(restore)
            self._waiting[restore] = []
        kv.restores = [page.restore for page in kv.pages if page.restore]
        for restore in kv.restores:
            self._waiting[restore].append(seq)
        pages = zip(kv.pages, seq.kv.pages, strict=False)
        kv.restored = [(page.host_page, own) for page, own in pages if page.restore or page.also_on_host]

    def cancel_restores(self, seq: Sequence) -> bool:
        """Stop copying for this sequence alone. True while running copies write to pages that only it has."""
        kv = seq.kv.offloaded
        if kv.restores_state == "queued":
            self._states_in = deque(move for move in self._states_in if move.seq is not seq)
            kv.restores_state = "no"
        needed: list[Restore] = []
        others: list[Restore] = []
        for restore in kv.restores:
            (needed if restore.copying and len(self._waiting[restore]) == 1 else others).append(restore)
        for restore in others:
            self._waiting[restore].remove(seq)
            if not self._waiting[restore]:
                del self._waiting[restore]
                restore.page.restore = None
        if others:
            self.to_copy_in = deque(restore for restore in self.to_copy_in if restore in self._waiting)
            kv.restores = needed
        return bool(needed) or kv.restores_state == "copying"

    def drop(self, seq: Sequence) -> None:
        """Release the offloaded pages of the sequence."""
        kv, seq.kv.offloaded = seq.kv.offloaded, NOT_OFFLOADED
        assert kv is not NOT_OFFLOADED and not kv.restoring, "a copy may still read a host page"
        self._sequences -= 1
        self._give_back(kv.state)
        for page in kv.pages:
            page.owners -= 1
            if page.owners == 0 and not page.copying:
                self._free(page)
            elif page.owners == 0:  # the sequence that took the page back writes to it: discard the copy
                self._unlink(page)

    # --- pages -------------------------------------------------------------------------------------------------------

    def send_unshared(self) -> bool:
        """Pages are short: offload the shared pages that no other sequence uses any more. True if there are any."""
        found = [page for number, page in self._shared.items() if self._pool.refs[number] == 1]
        for page in found:
            self._send_or_share(page)
        return bool(found)

    def _send_or_share(self, page: OffloadedPage) -> None:
        if self._pool.refs[page.pool_page] > 1:
            self._shared[page.pool_page] = page
            return
        self._shared.pop(page.pool_page, None)
        if page.also_on_host:
            self._leave_pool(page)
            return
        page.outgoing = True
        self.outgoing += 1
        self._to_copy_out.append(page)

    def _leave_pool(self, page: OffloadedPage) -> None:
        """Release the pool page, because the host has its content."""
        del self._in_pool[page.pool_page]
        self._pool.release(page.pool_page)
        page.pool_page, page.also_on_host = 0, False

    def _free(self, page: OffloadedPage) -> None:
        """The page has no owner, and no copy reads or writes its host page."""
        if page.pool_page:
            self._unlink(page)
            self._pool.release(page.pool_page)
            page.pool_page = 0
        if page.outgoing:
            page.outgoing = False
            self.outgoing -= 1
        self.host.give_back(page.host_page)

    def _unlink(self, page: OffloadedPage) -> None:
        """A sequence that gives up this pool page from now on makes a new offloaded page of it."""
        if self._in_pool.get(page.pool_page) is page:
            del self._in_pool[page.pool_page]
            self._shared.pop(page.pool_page, None)

    # --- states of linear attention ----------------------------------------------------------------------------------

    def _give_back(self, state: HostState) -> None:
        if state is not NO_HOST_STATE:
            self.host_states.give_back(state.host_place)

    def copies_state(self, seq: Sequence) -> bool:
        """True while the copy of a row's state to the host is queued or under way; queues that of a preempted one.

        The sequence has no step in flight, and keeps its row and its pages until the copy is over: then it is settled.
        """
        kv = seq.kv
        if kv.host_state is not NO_HOST_STATE:
            kv.wants_offload &= not kv.host_state.failed
            return not kv.host_state.over
        if not kv.wants_offload or seq.finalized or kv.is_offloaded or self.closed:
            return False
        if not self.host_states.room:
            self.counts.refused += 1
            kv.wants_offload = False
            return False
        kv.host_state = HostState(self.host_states.take())
        self._states_out.append(_RowState(seq.row, kv.host_state.host_place, seq))
        return True

    def next_states_out(self, most: int) -> list[_RowState]:
        """Up to `most` states of rows whose copies to the host begin now."""
        return [self._states_out.popleft() for _ in range(min(most, len(self._states_out)))]

    def states_copied_out(self, moves: list[_RowState], failed: bool) -> list[Sequence]:
        """End the copies of these states; returns the sequences that can be settled."""
        if failed:
            moves = [*moves, *self.next_states_out(len(self._states_out))]  # the copies of these states are cancelled
        for move in moves:
            move.seq.kv.host_state.over, move.seq.kv.host_state.failed = True, failed
        return [move.seq for move in moves]

    def restore_state(self, seq: Sequence) -> None:
        """Copy a state back to the row that its sequence was just given."""
        kv = seq.kv.offloaded
        assert kv.restores_state == "no"
        kv.restores_state = "queued"
        self._states_in.append(_RowState(seq.row, kv.state.host_place, seq))

    def next_states_in(self, most: int) -> list[_RowState]:
        """Up to `most` states whose copies to their rows begin now."""
        taken = [self._states_in.popleft() for _ in range(min(most, len(self._states_in)))]
        for move in taken:
            move.seq.kv.offloaded.restores_state = "copying"
        return taken

    def states_copied_in(self, moves: list[_RowState], failed: bool) -> list[Sequence]:
        """End the copies to these rows, failed ones included; returns the sequences that wait for no other copy."""
        seqs = [move.seq for move in moves]
        for seq in seqs:
            seq.kv.offloaded.restores_state = "no"
        return [seq for seq in seqs if not seq.kv.restoring]

    # --- copies ------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while copies are queued or under way."""
        return self.outgoing > 0 or bool(self.to_copy_in) or bool(self._states_out) or bool(self._states_in)

    def next_out(self, most: int) -> list[_PageOut]:
        """Up to `most` pages whose copies to the host begin now."""
        taken: list[_PageOut] = []
        while self._to_copy_out and len(taken) < most:
            page = self._to_copy_out.popleft()
            if not page.outgoing:
                continue  # the page was dropped
            assert page.pool_page and not page.copying
            if self._pool.refs[page.pool_page] > 1:  # another sequence has begun to use it
                page.outgoing = False
                self.outgoing -= 1
                self._shared[page.pool_page] = page
                continue
            page.copying = True
            taken.append(_PageOut(page.pool_page, page.host_page, page))
        return taken

    def copied_out(self, moves: list[_PageOut], failed: bool) -> list[Sequence]:
        """Complete copies to the host; after a failure the pages stay in the pool as long as they have owners."""
        for mirror in () if failed else self._mirrors:
            mirror.stow([move.place for move in moves], [move.host_place for move in moves])
        for page in [move.page for move in moves]:
            page.outgoing = page.copying = False
            self.outgoing -= 1
            if page.owners == 0:
                self._free(page)
            elif not failed:
                self._leave_pool(page)
        if not failed:
            self.counts.pages_out += len(moves)
        return []

    def next_in(self, most: int) -> list[_PageIn]:
        """Up to `most` copies from the host that begin now."""
        taken = [self.to_copy_in.popleft() for _ in range(min(most, len(self.to_copy_in)))]
        for restore in taken:
            restore.copying = True
        return [_PageIn(restore.pool_page, restore.host_page, restore) for restore in taken]

    def copied_in(self, moves: list[_PageIn], failed: bool) -> list[Sequence]:
        """Complete copies from the host, or failed ones; returns the sequences that wait for no other copy."""
        ready: list[Sequence] = []
        for restore in [move.restore for move in moves]:
            waiting, page = self._waiting.pop(restore), restore.page
            page.restore = None
            if page.owners > len(waiting) and not failed:
                self._share_again(page, restore.pool_page)
            for seq in waiting:
                seq.kv.offloaded.restores.remove(restore)
                if not seq.kv.restoring:
                    ready.append(seq)
        if not failed:
            self.counts.pages_in += len(moves)
        return ready

    def _share_again(self, page: OffloadedPage, pool_page: int) -> None:
        """Keep the pool page of a restore for the other owners."""
        assert not page.pool_page and pool_page not in self._in_pool
        self._pool.retain(pool_page)
        page.pool_page, page.also_on_host = pool_page, True
        self._in_pool[pool_page] = self._shared[pool_page] = page

    # --- views -------------------------------------------------------------------------------------------------------

    def status(self) -> OffloadStatus:
        """The present status."""
        counts = self.counts
        return OffloadStatus(
            sequences=self._sequences,
            pages=self.host.taken,
            pages_total=self.host.total,
            parked=counts.offloaded,
            restored=counts.restored,
            refused=counts.refused,
            bytes_out=counts.pages_out * self.host.page_bytes,
            bytes_in=counts.pages_in * self.host.page_bytes,
        )

    def check(self) -> None:
        """Assert that nothing is offloaded, and that all host pages are free."""
        assert not self.busy and not self._in_pool and not self._shared and not self._waiting, "a page is left"
        assert self._sequences == 0 and self.host.taken == 0, "a host page is in use"
        assert self.host_states.taken == 0, "a state on the host is left"


# --- the copies ------------------------------------------------------------------------------------------------------


class OffloadWaiters(Protocol):
    """The roster, as `Offload` sees it."""

    def restores_ended(self, seqs: list[Sequence]) -> None:
        """Note that no copy writes to the pages of these sequences any more."""

    def forget_offloaded(self) -> None:
        """Discard offloaded KV: its sequences are computed again."""

    def fetches_ended(self, fetches: list[Fetch]) -> None:
        """Wake sequences whose KV is in the pool, or will not come."""


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """A piece that was copied. Times are seconds of the steps' clock."""

    direction: Literal["out", "in"]
    pages: int
    start_s: float
    end_s: float


class Offload:
    """Has pages copied as the books say, between two steps: pages of preempted sequences before pages of the tier.

    advance:  account for complete copies --> pages are free, rows can be planned again;  then begin the next copies
    """

    def __init__(
        self,
        roster: OffloadWaiters,
        books: OffloadBooks,
        tier: HostTier,
        mover: PageMover,
        state_mover: PageMover | None = None,
    ) -> None:
        self.books = books
        self.tier = tier
        self.mover = mover
        self.failure = ""  # reason why nothing is offloaded any more
        self.recent: deque[MoveRecord] = deque(maxlen=_RECENT_MOVES)
        self._roster = roster
        self._movers = [mover] if state_mover is None else [mover, state_mover]

    def _moves(self) -> list[tuple[PageMover, MoveBooks]]:
        """All books with the mover of their pages or states, in the order in which they are served."""
        books, tier = self.books, self.tier
        of_movers = (books.page_moves, tier.page_moves), (books.state_moves, tier.state_moves)
        return [(mover, moves) for mover, served in zip(self._movers, of_movers, strict=False) for moves in served]

    @property
    def moving(self) -> bool:
        """True while copies are queued or under way."""
        return self.books.busy or self.tier.busy or any(mover.moving for mover in self._movers)

    def advance(self) -> None:
        """Account for the copies that are complete, and begin others. Never waits."""
        self.tier.use_disk()
        if not self.moving:
            return
        self._take_finished()
        if not self.failure:
            self._begin()
        if ended := self.tier.fetches.take_ended():
            self._roster.fetches_ended(ended)

    def wait(self, most_s: float) -> None:
        """Block until a copy is complete, at most `most_s` seconds. No step can be launched before."""
        moving = [mover for mover in reversed(self._movers) if mover.moving]
        if moving:
            moving[0].wait(most_s)
        else:
            self.tier.wait_for_disk(most_s)

    def _take_finished(self) -> None:
        costs = self.tier.costs
        for mover, note in zip(self._movers, (costs.copied, costs.states_copied), strict=False):
            for direction, queue in mover.directions:
                for piece in queue.finished():
                    ended, moves = piece.entries
                    self._roster.restores_ended(ended(moves, bool(piece.failure)))
                    if not piece.failure:
                        self._note(direction, piece, note)
                    elif not self.failure:
                        self._fail(piece.failure)

    def _note(self, direction: Literal["out", "in"], piece: CopyPiece, note: Callable[[int, float], None]) -> None:
        move = MoveRecord(direction, piece.pages, piece.start.time_s, piece.end.time_s)
        self.recent.append(move)
        note(move.pages, move.end_s - move.start_s)

    def _fail(self, why: str) -> None:
        self.failure = f"KV is no longer offloaded, and preempted completions are computed again: {why}"
        log.error("%s", self.failure)
        self.books.closed = True
        self.tier.close()
        stopped = self.books.states_copied_out([], failed=True)
        self._roster.forget_offloaded()
        self._roster.restores_ended(stopped)

    def _begin(self) -> None:
        self.tier.look_at_ends()
        for mover, books in self._moves():
            out, back = mover.out, mover.back
            # After the steps in flight: one of them may still copy from a page that has been free since, belong to the
            # row's last sequence, save its state or a snapshot, or load from the place.
            steps = mover.compute
            while out.capacity and (moves := books.next_out(out.capacity)):
                _start(out, moves, books.out_ended, steps if books.out_after_steps else None)
            while back.capacity and (moves := books.next_in(back.capacity)):
                _start(back, moves, books.in_ended, steps)


def _start(
    queue: CopyQueue, moves: Seq[Move], ended: Callable[[Any, bool], list[Sequence]], after: DeviceStream | None
) -> None:
    queue.start([move.place for move in moves], [move.host_place for move in moves], (ended, moves), after)
