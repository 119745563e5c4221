"""Offload: the KV of preempted sequences is copied to the host and back while steps run.

`OffloadBooks` says where each page is; it touches no tensor. In each tick `host_tier` has `page_mover` copy the pages
that these books and the books of known pages (`known`) name. A sequence passes through four calls:

    take       its row is left and no step in flight names it: its pages become offloaded pages
    next_out   an offloaded page without other users is copied to the host; then its pool page is free
    restore    at its next admission it shares pages still in the pool; the rest is copied to new pool pages
    drop       its first step is launched, it ends, or its KV is invalid: the offloaded pages are no longer needed

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

A failed copy ends offloading: sequences that are offloaded, or preempted later, are computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.tier import PageMirror
from rollout.engine.kv.tiers.host_pages import HostPageBooks
from rollout.engine.kv.tiers.moves import Move, MoveBooks
from rollout.engine.messages.statuses import OffloadStatus
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.sequence.sequence_kv import InTier, KVContent


@dataclass(slots=True)
class OffloadCounts:
    """Running totals since start."""

    offloaded: int = 0  # preempted sequences whose KV was offloaded
    restored: int = 0  # offloaded sequences that went on with their KV
    refused: int = 0  # preempted sequences for whose KV the host had no room
    pages_out: int = 0
    pages_in: int = 0


@dataclass(eq=False, slots=True)
class OffloadedPage:
    """The KV of one page, and where it is. A host page is set aside for it in every state."""

    pool_page: int  # 0 while it is on the host only
    host_page: int
    owners: int = 1  # offloaded sequences that need it
    outgoing: bool = False  # the copy to the host is queued or under way
    copying: bool = False  # the copy to the host is under way
    restore: Restore | None = None  # the copy from the host, queued or under way
    also_on_host: bool = False  # the host page has the content of `pool_page`


@dataclass(eq=False, slots=True)
class Restore:
    """The copy of one page from the host to the pool."""

    page: OffloadedPage
    pool_page: int  # the target
    copying: bool = False  # the copy is under way

    @property
    def host_page(self) -> int:
        return self.page.host_page


@dataclass(eq=False, slots=True)
class HostState:
    """The copy of a row's state to the host. The sequence keeps the row until it is over."""

    host_place: int
    over: bool = False
    failed: bool = False


NO_HOST_STATE = HostState(-1, over=True)


@dataclass(eq=False, slots=True)
class OffloadedKV(KVContent):
    """The KV of one offloaded sequence."""

    pages: list[OffloadedPage] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)  # incomplete copies that the sequence waits for
    restored: list[tuple[int, int]] = field(default_factory=list)  # (host page, pool page), copied from the host
    state: HostState = NO_HOST_STATE  # models with states: its state
    restores_state: Literal["no", "queued", "copying"] = "no"  # the copy of its state to its row

    @property
    def restoring(self) -> bool:
        """True while the sequence waits for copies from the host."""
        return bool(self.restores) or self.restores_state != "no"


#: The offloaded KV of a sequence without any.
NOT_OFFLOADED = OffloadedKV()


@dataclass(eq=False, slots=True)
class InHostTier(InTier):
    """The tier's data on one sequence."""

    fetches: int = 0  # fetches begun since it last had a row
    wants_offload: bool = False  # preempted, with KV that is worth keeping
    #: KV before the preemption, until the next step is launched.
    offloaded: OffloadedKV = field(default_factory=lambda: NOT_OFFLOADED)
    #: The copy of its state to the host, from the end of its last step on.
    host_state: HostState = field(default_factory=lambda: NO_HOST_STATE)

    @property
    def is_offloaded(self) -> bool:
        return self.offloaded is not NOT_OFFLOADED

    @property
    def restoring(self) -> bool:
        return self.offloaded.restoring


def in_host_tier(seq: Sequence) -> InHostTier:
    """The tier's data on a sequence: made when the tier first meets it."""
    if not isinstance(seq.kv.in_tier, InHostTier):
        seq.kv.in_tier = InHostTier()
    assert isinstance(seq.kv.in_tier, InHostTier)
    return seq.kv.in_tier


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

        A sequence that was being restored has its offloaded pages already; an ended sequence needs none.
        """
        mine = in_host_tier(seq)
        mine.fetches = 0
        wanted, mine.wants_offload = mine.wants_offload and not seq.finalized, False
        state, mine.host_state = mine.host_state, NO_HOST_STATE
        if mine.is_offloaded:
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
        in_host_tier(seq).offloaded = OffloadedKV(kv.length, kv.oldest, kv.edition, kv.keys, pages, state=state)
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
        """The pool pages that have, or will have, the KV of an offloaded sequence, one for each page. 0: restore it."""
        pages = [page.restore.pool_page if page.restore else page.pool_page for page in kv.pages]
        if kv.keys and kv.oldest == version:  # a key may be known with KV of several versions
            for i in range(len(kv.keys)):
                pages[i] = pages[i] or self._pool.find(kv.keys[i], version)
        return pages

    def restore(self, seq: Sequence, targets: list[tuple[int, int]]) -> None:
        """Copy pages back for a sequence that is admitted again; `targets` are (index of the page, its pool page)."""
        kv = in_host_tier(seq).offloaded
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
        kv = in_host_tier(seq).offloaded
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
        mine = in_host_tier(seq)
        kv, mine.offloaded = mine.offloaded, NOT_OFFLOADED
        assert kv is not NOT_OFFLOADED and not kv.restoring, "a copy may still read a host page"
        self._sequences -= 1
        self._give_back(kv.state)
        for page in kv.pages:
            page.owners -= 1
            if page.owners == 0 and not page.copying:
                self._free(page)
            elif page.owners == 0:  # the sequence that took the page back writes to it: discard the copy
                self._unlink(page)
                if self._pool.refs[page.pool_page] > 1:  # no page is free after the copy
                    page.outgoing, self.outgoing = False, self.outgoing - page.outgoing

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
        """True while the copy of a row's state to the host is queued or under way; queues it for a preempted row.

        The sequence has no step in flight, and keeps its row and its pages until the copy is over: then it is settled.
        """
        mine = in_host_tier(seq)
        if mine.host_state is not NO_HOST_STATE:
            mine.wants_offload &= not mine.host_state.failed
            return not mine.host_state.over
        if not mine.wants_offload or seq.finalized or mine.is_offloaded or self.closed:
            return False
        if not self.host_states.room:
            self.counts.refused += 1
            mine.wants_offload = False
            return False
        mine.host_state = HostState(self.host_states.take())
        self._states_out.append(_RowState(seq.row, mine.host_state.host_place, seq))
        return True

    def next_states_out(self, most: int) -> list[_RowState]:
        """Up to `most` states of rows whose copies to the host begin now."""
        return [self._states_out.popleft() for _ in range(min(most, len(self._states_out)))]

    def states_copied_out(self, moves: list[_RowState], failed: bool) -> list[Sequence]:
        """End the copies of these states; returns the sequences that can be settled."""
        if failed:
            moves = [*moves, *self.next_states_out(len(self._states_out))]  # the copies of these states are cancelled
        for move in moves:
            state = in_host_tier(move.seq).host_state
            state.over, state.failed = True, failed
        return [move.seq for move in moves]

    def restore_state(self, seq: Sequence) -> None:
        """Copy a state back to the row that its sequence was just given."""
        kv = in_host_tier(seq).offloaded
        assert kv.restores_state == "no"
        kv.restores_state = "queued"
        self._states_in.append(_RowState(seq.row, kv.state.host_place, seq))

    def next_states_in(self, most: int) -> list[_RowState]:
        """Up to `most` states whose copies to their rows begin now."""
        taken = [self._states_in.popleft() for _ in range(min(most, len(self._states_in)))]
        for move in taken:
            in_host_tier(move.seq).offloaded.restores_state = "copying"
        return taken

    def states_copied_in(self, moves: list[_RowState], failed: bool) -> list[Sequence]:
        """End the copies to these rows, failed ones included; returns the sequences that wait for no other copy."""
        seqs = [move.seq for move in moves]
        for seq in seqs:
            in_host_tier(seq).offloaded.restores_state = "no"
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
            self.outgoing -= page.outgoing
            page.outgoing = page.copying = False
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
                in_host_tier(seq).offloaded.restores.remove(restore)
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
