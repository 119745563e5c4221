"""The queue for rows: by priority, then fairly between clients, then by arrival.

Clients of one priority that wait together get equal numbers of tokens, however many completions each has queued. A
client has a virtual time, in tokens, and the client with the smallest one is next:

    its first sequence enters the queue     time = now + cost
    a sequence of it gets its first row     now = time; then time = now + cost
    none of its sequences waits any more    the queue forgets it

`now` is the virtual time of the client that was admitted last. So a client gets no credit for time in which it did not
wait, and an endless stream of new clients cannot starve the others. `cost` is the number of tokens that a sequence of
the client computes and generates. This is known only at the end, so `cost` is a running mean over the sequences that
have ended: of this client if there are any, otherwise of all clients. Its errors do not add up: they move the mean
until costs and tokens agree.

A preempted sequence, once it is the oldest of its client that waits, is ahead of those that had no row yet. It costs
nothing: its client has paid.

The method is self-clocked fair queueing (S. J. Golestani, "A self-clocked fair queueing scheme for broadband
applications", INFOCOM 1994), with measured costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from rollout.engine.schedule.swept_heap import SweptHeap
from rollout.engine.sequence.sequence import Sequence

_SEQUENCES = 8  # about the number of sequences in a mean of costs
_PREEMPTED = -1.0  # virtual time of preempted sequences: first in line


class WaitingQueue:
    """Sequences without a row. A sequence is in it once; pushing, removing and finding the first take O(log n).

    Sequences with an adapter stand apart: only they wait for its slot. Both kinds share their client's virtual time.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}  # key: priority
        self._heads = SweptHeap(_Head.outdated), SweptHeap(_Head.outdated)  # sequences without an adapter, with one
        self._costs = _Costs()  # costs of all clients
        self._serial = count()

    @property
    def clients(self) -> int:
        """Clients that wait; one that waits at several priorities counts once."""
        return len(set().union(*(level.clients for level in self._levels.values())))

    def push(self, seq: Sequence, time: float | None = None) -> None:
        """Add a sequence. Its client waits from now on, or since the virtual time that `withdraw` returned."""
        level = self._levels.setdefault(seq.priority, _Level())
        client = level.clients.get(seq.group.client)
        if client is None:
            new = level.now + min(self._costs.mean, seq.prompt_len + seq.max_tokens)
            client = level.clients[seq.group.client] = _WaitingClient(new if time is None else min(time, new))
        client.waiting[_kind(seq)].push(seq.rank, seq)
        self._renew(seq)

    def first(self, ready: Callable[[Sequence], bool]) -> Sequence | None:
        """The next sequence, which stays in the queue; if its adapter is not `ready`, the next without an adapter.

        Other sequences with an adapter wait too: if they took the slots, the first would never get one.
        """
        heads = sorted((head for kind in self._heads if (head := kind.first())), key=lambda head: head.key)
        return next((head.seq for head in heads if not _kind(head.seq) or ready(head.seq)), None)

    def take(self, seq: Sequence) -> None:
        """Remove the sequence that `first` returned: it gets a row. Its client pays if it is its first row."""
        level = self._levels[seq.priority]
        client = level.clients[seq.group.client]
        if not seq.begun:
            level.now = max(level.now, client.time)
            client.time = level.now + (client.costs if client.costs.known else self._costs).mean
        self.withdraw(seq)

    def withdraw(self, seq: Sequence) -> float:
        """Remove the sequence that `first` returned, without a row; returns its client's virtual time, for `push`."""
        client = self._levels[seq.priority].clients[seq.group.client]
        client.waiting[_kind(seq)].pop()
        self._renew(seq)
        return client.time

    def remove(self, seqs: list[Sequence]) -> None:
        """Remove these sequences of one group."""
        client = self._client(seqs[0]) if seqs else None
        if client is not None:
            client.waiting[_kind(seqs[0])].remove({seq.rank for seq in seqs})
            self._renew(seqs[0])

    def ended(self, seq: Sequence) -> None:
        """A sequence is finalized, in the queue or elsewhere: it leaves the queue, or its cost is known now."""
        client = self._client(seq)
        if seq.begun:
            self._costs.add(seq.cost)
            if client is not None:
                client.costs.add(seq.cost)
        if client is not None:
            self._renew(seq)

    def _client(self, seq: Sequence) -> _WaitingClient | None:
        level = self._levels.get(seq.priority)
        return None if level is None else level.clients.get(seq.group.client)

    def _renew(self, seq: Sequence) -> None:
        """Bring the heads of a sequence's client up to date: its virtual time or its sequences have changed."""
        level = self._levels[seq.priority]
        client = level.clients[seq.group.client]
        firsts = [waiting.first() for waiting in client.waiting]
        for kind, first in enumerate(firsts):
            if first is None:
                client.heads[kind] = None
                continue
            key = (-first.priority, _PREEMPTED if first.begun else client.time, first.arrival)
            if (old := client.heads[kind]) is None or old.key != key:
                client.heads[kind] = head = _Head(key, first, client)
                self._heads[kind].push((*key, next(self._serial)), head)
        if all(first is None for first in firsts):
            del level.clients[seq.group.client]
            if not level.clients:
                del self._levels[seq.priority]


@dataclass(eq=False, slots=True)
class _Level:
    """The waiting sequences of one priority."""

    now: float = 0.0  # virtual time of the client that was admitted last
    clients: dict[str, _WaitingClient] = field(default_factory=dict)


class _WaitingClient:
    """One client's waiting sequences of one priority, without and with an adapter: never empty between two calls."""

    __slots__ = ("costs", "heads", "time", "waiting")

    def __init__(self, time: float) -> None:
        self.time = time  # virtual, tokens
        self.costs = _Costs()  # costs of its sequences that ended while others waited
        self.waiting: tuple[SweptHeap[Sequence], SweptHeap[Sequence]] = (SweptHeap(_finalized), SweptHeap(_finalized))
        self.heads: list[_Head | None] = [None, None]


class _Costs:
    """A running mean of the costs of sequences, tokens; 1 before the first has ended, so that all count alike."""

    __slots__ = ("known", "mean")

    def __init__(self) -> None:
        self.known = 0  # sequences in the mean, up to _SEQUENCES
        self.mean = 1.0

    def add(self, cost: int) -> None:
        """A sequence has ended."""
        self.known = min(self.known + 1, _SEQUENCES)
        self.mean += (cost - self.mean) / self.known


@dataclass(eq=False, slots=True)
class _Head:
    """A client's first sequence, with or without an adapter, in the order of all clients."""

    key: tuple[int, float, int]
    seq: Sequence
    client: _WaitingClient

    def outdated(self) -> bool:
        """True if another one has replaced it."""
        return self.client.heads[_kind(self.seq)] is not self


def _kind(seq: Sequence) -> int:
    return int(seq.group.adapter is not None)


def _finalized(seq: Sequence) -> bool:
    return seq.finalized
