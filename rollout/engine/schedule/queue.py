"""Sequences without a row: the queue, groups whose members wait for one of them, requests that wait for newer weights.

Of a group that shares a prompt one member, the leader, is queued first; the others follow when its prefill is launched,
and take the prompt's pages from the share that is opened then. A request with a `min_version` is in no queue before the
weights are of that version.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from rollout.engine.adapter_table import Adapter
from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.messages import RequestKey
from rollout.engine.schedule.sequence import Group, Sequence

#: Entries that the heap may hold beyond twice those that it needed when it was last cleaned.
_SLACK = 16


class _Heap:
    """Sequences by rank. Finalized ones are skipped, and swept out when they are many."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._sweep_at = _SLACK

    def push(self, seq: Sequence) -> None:
        """Add a sequence; its rank is unique."""
        heapq.heappush(self._heap, (seq.rank, seq))
        if len(self._heap) >= self._sweep_at:
            self._keep(lambda seq: not seq.finalized)

    def remove(self, seqs: list[Sequence]) -> None:
        """Take out these sequences."""
        ranks = {seq.rank for seq in seqs}
        self._keep(lambda seq: seq.rank not in ranks and not seq.finalized)

    def _keep(self, wanted: Callable[[Sequence], bool]) -> None:
        self._heap = [entry for entry in self._heap if wanted(entry[1])]
        heapq.heapify(self._heap)
        self._sweep_at = 2 * len(self._heap) + _SLACK

    def first(self) -> Sequence | None:
        """The sequence that is next, left where it is."""
        while self._heap and self._heap[0][1].finalized:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out what `first` returned."""
        heapq.heappop(self._heap)


class WaitingQueue:
    """Sequences without a row, by rank; those that take an adapter apart, so that others need not wait for its slot."""

    def __init__(self) -> None:
        self._plain, self._adapted = _Heap(), _Heap()

    def push(self, seq: Sequence) -> None:
        """Add a sequence; its rank is unique."""
        self._with(seq).push(seq)

    def remove(self, seqs: list[Sequence]) -> None:
        """Take out these sequences."""
        for heap in (self._plain, self._adapted):
            heap.remove(seqs)

    def first(self, ready: Callable[[Sequence], bool]) -> Sequence | None:
        """The sequence that is next, left in the queue; if it is not `ready`, the next that takes no adapter.

        Others with an adapter wait behind it: the slot that it needs would never be free.
        """
        plain, adapted = self._plain.first(), self._adapted.first()
        if adapted is None or (plain is not None and plain.rank < adapted.rank):
            return plain
        return adapted if ready(adapted) else plain

    def pop(self, seq: Sequence) -> None:
        """Take out what `first` returned."""
        self._with(seq).pop()

    def _with(self, seq: Sequence) -> _Heap:
        return self._plain if seq.group.adapter is None else self._adapted


class WaitingRoom:
    """Who waits for what."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.queue = WaitingQueue()
        self.early: dict[RequestKey, Group] = {}  # wait for a newer weights version
        self._allocator = allocator

    def enter(self, group: Group, version: int) -> None:
        """A new request; `version` is that of the weights."""
        group.leader, group.followers = group.sequences[0], group.sequences[1:]
        if group.request.min_version > version:
            self.early[group.key] = group
        else:
            self.queue.push(group.leader)

    def weights_changed(self, version: int) -> None:
        """Let in who waited for these weights; what was prefilled under older ones is shared no more."""
        for group in [group for group in self.early.values() if group.request.min_version <= version]:
            assert group.leader is not None
            del self.early[group.key]
            self.queue.push(group.leader)
        self.close_shares()

    def close_shares(self) -> None:
        """What was prefilled for groups is shared no more: of those that have not started one prefills it again."""
        for group in list(self._allocator.sharing):
            self._lead_again(group)

    def adapter_changed(self, adapter: Adapter) -> None:
        """What was prefilled with this adapter's weights of before is shared no more."""
        for group in list(self._allocator.sharing):
            if group.adapter is adapter:
                self._lead_again(group)

    def leader_launched(self, leader: Sequence, version: int) -> None:
        """The last chunk of a leader's prefill is launched: the others may come, with its pages if there is a share."""
        group = leader.group
        group.leader = None
        if group.followers and self._allocator.open_share(leader, version):
            for seq in group.followers:
                seq.may_share = True
                self.queue.push(seq)
            group.unstarted, group.followers = len(group.followers), []
        else:
            self._next_leader(group)

    def ended(self, seq: Sequence) -> None:
        """A sequence is finalized, wherever it was."""
        group = seq.group
        if seq is group.leader:
            group.leader = None
            self._next_leader(group)
        elif seq in group.followers:
            group.followers.remove(seq)
        self.started(seq)

    def started(self, seq: Sequence) -> None:
        """It has a row, or wants none: it needs the share no more."""
        if seq.may_share:
            seq.may_share = False
            seq.group.unstarted -= 1
            if seq.group.unstarted == 0:
                self._allocator.close_share(seq.group)

    def _next_leader(self, group: Group) -> None:
        if group.followers:
            group.leader = group.followers.pop(0)
            self.queue.push(group.leader)

    def _lead_again(self, group: Group) -> None:
        """The share is of an old version: of those that have not started, one prefills for all."""
        unstarted = [seq for seq in group.sequences if seq.may_share]
        self.queue.remove(unstarted)
        for seq in unstarted:
            self.started(seq)
        group.leader, group.followers = unstarted[0], unstarted[1:]
        self.queue.push(group.leader)
