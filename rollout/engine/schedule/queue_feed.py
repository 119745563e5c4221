"""Sequences without a row: what enters the queue, and what waits for a prefill or for newer weights.

At first one member of a group is queued. The other members are queued when its prefill is launched, and share the
prompt's pages from then on. A request with a `min_version` enters the queue when the weights have that version.

A sequence whose KV is in a tier leaves the queue until the KV is back in the pool.

A sequence whose tokens another sequence is prefilling leaves the queue until the tokens are launched. If the prefill
stops, the first waiting sequence computes the tokens, and the other ones wait for it. A new session may wait for room
(`newcomer_waits`).
"""

import operator
from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.kv.tier import Fetch
from rollout.engine.messages.requests import RequestKey
from rollout.engine.schedule.fair_queue import WaitingQueue
from rollout.engine.sequence.sequence import Group, Sequence

#: The misfit when none is known; see `QueueFeed.note_misfit`.
_FITS: tuple[Sequence | None, list[int], list[int]] = None, [], []
_MOST_LOOKED_AT = 32  # bounds the time of an admission while many sessions wait for room


class _Joined(NamedTuple):
    """A sequence that waits for another sequence's prefill, or for a fetch."""

    seq: Sequence
    tokens: int  # tokens that the prefill has to launch
    time: float  # virtual time of its client when it left the queue


class _Held(NamedTuple):
    """A sequence of a session that waits for room."""

    seq: Sequence
    pages: int  # pages that it needs
    time: float  # virtual time of its client when it left the queue


class QueueFeed:
    """The queue, and what enters it later: sequences that wait for a prefill, requests for newer weights."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.queue = WaitingQueue()
        self.early: dict[RequestKey, Group] = {}  # requests that wait for a newer weights version
        self._joined: dict[Sequence | Fetch, list[_Joined]] = {}  # key: the fetch or the sequence that prefills
        self._held: list[_Held] = []  # sequences that wait for room among the sessions, in order
        self._allocator = allocator
        # The last sequence that did not fit, with the running rows and `_room` at that time.
        self._misfit = _FITS

    def enter(self, group: Group, version: int) -> None:
        """Enter a new request; `version` is the version of the weights."""
        group.first, group.others = group.sequences[0], group.sequences[1:]
        if group.request.min_version > version:
            self.early[group.key] = group
        else:
            self.queue.push(group.first)

    def queue_early(self, version: int) -> None:
        """Queue the requests that waited for weights of this version."""
        for group in [group for group in self.early.values() if group.request.min_version <= version]:
            del self.early[group.key]
            self.queue.push(group.sequences[0])

    def take(self, seq: Sequence) -> None:
        """Remove the first sequence of the queue: it gets a row."""
        self._forget_misfit()
        self.queue.take(seq)
        self._started(seq)

    @property
    def joined(self) -> bool:
        """True if a sequence waits for another one's prefill, or for a fetch."""
        return bool(self._joined)

    def join(self, seq: Sequence, other: Sequence | Fetch, tokens: int = 0) -> None:
        """Have the first sequence of the queue wait until the prefill of `other` has launched this number of tokens.

        If `other` is a fetch, it waits until that has ended.
        """
        self._forget_misfit()  # a fetch that ends may leave less room than there was
        self._joined.setdefault(other, []).append(_Joined(seq, tokens, self.queue.withdraw(seq)))

    def wait_for_room(self, seq: Sequence, pages: int) -> None:
        """Have the first sequence of the queue wait until there is room for `pages` pages."""
        insort(self._held, _Held(seq, pages, self.queue.withdraw(seq)), key=lambda held: held.seq.order)

    def queue_held(self, waits: Callable[[Sequence, int], bool]) -> None:
        """Queue the first sequence that waited for room and has it now, among the first `_MOST_LOOKED_AT`."""
        first = self._held[:_MOST_LOOKED_AT]
        held = next((held for held in first if not waits(held.seq, held.pages)), None)
        if held is not None:
            self._held.remove(held)
            self.queue.push(held.seq, held.time)

    @property
    def has_room_waiters(self) -> bool:
        """True if a sequence waits for room among other sessions."""
        return bool(self._held)

    def joined_sequences(self) -> set[Sequence]:
        """The sequences that wait for another sequence's prefill, or for a fetch."""
        return {waiting.seq for joined in self._joined.values() for waiting in joined}

    def fetch_ended(self, fetch: Fetch) -> None:
        """Queue the sequences that waited for a fetch."""
        self._queue_again(self._joined.pop(fetch, []))

    def prefill_launched(self, seq: Sequence) -> None:
        """Queue the sequences that waited for the tokens of a launched chunk."""
        joined = self._joined.pop(seq, [])
        self._queue_again([waiting for waiting in joined if waiting.tokens <= seq.kv.length])
        if later := [waiting for waiting in joined if waiting.tokens > seq.kv.length]:
            self._joined[seq] = later

    def prefill_stopped(self, seq: Sequence) -> None:
        """The prefill stops, or its KV is of no use to the sequences that waited for it: queue them."""
        self._allocator.prefixes.drop_frontier(seq)
        self._queue_again(self._joined.pop(seq, []))

    @property
    def _room(self) -> list[int]:
        """Pages of each rank for an admission; then all pages that need no copy first, so none of sessions."""
        return [*self._allocator.admissible, self._allocator.pool.available - self._allocator.tier.writing]

    def note_misfit(self, seq: Sequence, rows: list[int], pages: int) -> None:
        """Note that the first sequence, which needs `pages` pages, did not fit beside these rows of each rank."""
        self._allocator.tier.want(pages)
        self._misfit = seq, rows, self._room

    def _forget_misfit(self) -> None:
        self._allocator.tier.want(0)
        self._misfit = _FITS

    def still_misfits(self, seq: Sequence, rows: list[int]) -> bool:
        """True if this sequence did not fit, and no rank has got more room since."""
        misfit, least_rows, most = self._misfit
        return misfit is seq and all(map(operator.ge, rows, least_rows)) and all(map(operator.le, self._room, most))

    def close_shared_prompts(self, of: Callable[[Group], bool] = lambda group: True) -> None:
        """Close shared prompts of some groups: in each, one member that has not started prefills the prompt again."""
        self._forget_misfit()
        for group in list(self._allocator.sharing):
            if of(group):
                self._lead_again(group)

    def first_launched(self, first: Sequence, version: int) -> None:
        """A first member's last chunk is launched: queue all others if they can share its pages, else the next."""
        group = first.group
        group.first = None
        if group.others and self._allocator.share_prompt(first, version):
            for seq in group.others:
                seq.queued.may_share = True
                self.queue.push(seq)
            group.unstarted, group.others = len(group.others), []
        else:
            self._next_first(group)

    def ended(self, seq: Sequence) -> None:
        """Remove a finalized sequence, whatever its state was."""
        group = seq.group
        if seq is self._misfit[0]:
            self._forget_misfit()
        if seq is group.first:
            group.first = None
            self._next_first(group)
        elif seq in group.others:
            group.others.remove(seq)
        self._started(seq)
        self._held = [held for held in self._held if held.seq is not seq]
        self.queue.ended(seq)  # called last: the next first member keeps its client in the queue

    def _queue_again(self, joined: list[_Joined]) -> None:
        for waiting in joined:
            if not waiting.seq.finalized:
                self.queue.push(waiting.seq, waiting.time)

    def _started(self, seq: Sequence) -> None:
        """Note that a sequence got a row or ended: it no longer needs the shared prompt."""
        if seq.queued.may_share:
            seq.queued.may_share = False
            seq.group.unstarted -= 1
            if seq.group.unstarted == 0:
                self._allocator.close_shared_prompt(seq.group)

    def _next_first(self, group: Group) -> None:
        if group.others:
            group.first = group.others.pop(0)
            self.queue.push(group.first)

    def _lead_again(self, group: Group) -> None:
        """Close the shared prompt of a group: of the members that have not started, the first prefills again."""
        unstarted = [seq for seq in group.sequences if seq.queued.may_share]
        for seq in unstarted:
            self._started(seq)
        group.first, group.others = unstarted[0], unstarted[1:]
        self.queue.remove(group.others)
