"""The queue for rows: by priority, then fairly between clients, then by arrival; and the order of prompts of rows.

Clients of one priority that wait together get equal numbers of tokens, however many completions each has queued. A
client has a virtual time, in tokens, and the client with the smallest time is next:

    its first sequence enters the queue     time = now + cost
    a sequence gets its first row           now = time; then time = now + cost
    no sequence waits any more              the queue forgets it

`now` is the virtual time of the client that was admitted last. So a client gets no credit for time in which it did not
wait, and an endless stream of new clients cannot starve the others. `cost` is the number of tokens that a sequence of
the client computes and generates. That number is known only at the end, so `cost` is a running mean over ended
sequences: of this client, or of all clients if this client has none. Errors do not add up: they move the mean until
costs and tokens agree.

A preempted sequence that is its client's oldest in the queue comes before sequences that had no row yet. It costs
nothing: its client has paid.

The method is self-clocked fair queueing (S. J. Golestani, "A self-clocked fair queueing scheme for broadband
applications", INFOCOM 1994), with measured costs.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from rollout.engine.sequence.sequence import Sequence, Variant

_SEQUENCES = 8  # about the number of sequences in a mean of costs
_PREEMPTED = -1.0  # virtual time of preempted sequences: first in line


class WaitingQueue:
    """Sequences without a row. A sequence is in it once; pushing and removing take O(log n).

    The sequences of each variant have a line of their own: a variant that is not ready delays its line alone. The lines
    of a client share its virtual time.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}  # key: priority
        self._lines: dict[Variant, SweptHeap[_Head]] = {}  # the first sequence of each client; a key may be too small
        self._in_order: list[Sequence] | None = None  # the heads, until the queue changes
        self._costs = _Costs()  # costs of all clients
        self._serial = count()

    @property
    def clients(self) -> int:
        """Clients that wait; one that waits at several priorities counts once."""
        return len(set().union(*(level.clients for level in self._levels.values())))

    def push(self, seq: Sequence, time: float = math.inf) -> None:
        """Add a sequence. Its client waits from now on, or since the virtual time that `withdraw` returned."""
        level = self._levels.setdefault(seq.priority, _Level())
        client = level.clients.get(seq.group.client)
        if client is None:
            new = level.now + min(self._costs.mean, seq.prompt_len + seq.max_tokens)
            client = level.clients[seq.group.client] = _WaitingClient(min(time, new))
        client.waiting.setdefault(seq.group.variant, SweptHeap(_finalized)).push(seq.order, seq)
        self._renew(seq)

    def heads(self) -> list[Sequence]:
        """The first sequence of each line, in the order of the queue. They stay in it; the list is the queue's own."""
        if self._in_order is not None:
            return self._in_order
        found = []
        for line in list(self._lines):
            head = self._first(self._lines[line])
            if head is None:
                del self._lines[line]
            else:
                found.append(head)
        self._in_order = [head.seq for head in sorted(found, key=lambda head: head.key)]
        return self._in_order

    def take(self, seq: Sequence) -> None:
        """Remove a head of a line: it gets a row. Its client pays if it is its first row."""
        level = self._levels[seq.priority]
        client = level.clients[seq.group.client]
        if not seq.begun:
            level.now = max(level.now, client.time)
            client.time = level.now + (client.costs if client.costs.known else self._costs).mean
        self.withdraw(seq)

    def withdraw(self, seq: Sequence) -> float:
        """Remove a head of a line, without a row; returns its client's virtual time, for `push`."""
        client = self._levels[seq.priority].clients[seq.group.client]
        client.waiting[seq.group.variant].pop()
        self._renew(seq)
        return client.time

    def remove(self, seqs: list[Sequence]) -> None:
        """Remove these sequences of one group."""
        client = self._client(seqs[0]) if seqs else None
        if client is not None:
            client.of_line(seqs[0]).remove({seq.order for seq in seqs})
            self._renew(seqs[0])

    def ended(self, seq: Sequence) -> None:
        """A sequence is finalized, in the queue or elsewhere: it leaves the queue, or its cost is known now."""
        client = self._client(seq)
        if seq.begun:
            self._costs.add(seq.cost)
        if client is not None:
            if seq.begun:
                client.costs.add(seq.cost)
            self._renew(seq)

    def _client(self, seq: Sequence) -> _WaitingClient | None:
        return self._levels.get(seq.priority, _NO_LEVEL).clients.get(seq.group.client)

    def _renew(self, seq: Sequence) -> None:
        """Update the client's head of this line, after its sequences there have changed."""
        self._in_order = None
        level, line = self._levels[seq.priority], seq.group.variant
        client = level.clients[seq.group.client]
        if first := client.of_line(seq).first():
            self._place(client, first)
            return
        client.heads.pop(line, None)
        client.waiting.pop(line, None)
        if not client.waiting:
            del level.clients[seq.group.client]
            if not level.clients:
                del self._levels[seq.priority]

    def _place(self, client: _WaitingClient, first: Sequence) -> None:
        line, key = first.group.variant, client.key(first)
        if (old := client.heads.get(line)) is None or old.key != key:
            client.heads[line] = head = _Head(key, first, client)
            self._lines.setdefault(line, SweptHeap(_Head.outdated)).push((*key, next(self._serial)), head)

    def _first(self, heads: SweptHeap[_Head]) -> _Head | None:
        """The first head of a line. A client's virtual time only grows, so a key that is too small comes to the top."""
        while (head := heads.first()) is not None and head.key != head.client.key(head.seq):
            heads.pop()
            self._place(head.client, head.seq)
        return head


@dataclass(eq=False, slots=True)
class _Level:
    """The waiting sequences of one priority."""

    now: float = 0.0  # virtual time of the client that was admitted last
    clients: dict[str, _WaitingClient] = field(default_factory=dict)


_NO_LEVEL = _Level()


class _WaitingClient:
    """One client's waiting sequences of one priority, by line: never empty between two calls."""

    __slots__ = ("costs", "heads", "time", "waiting")

    def __init__(self, time: float) -> None:
        self.time = time  # virtual, tokens
        self.costs = _Costs()  # costs of its sequences that ended while others waited
        self.waiting: dict[Variant, SweptHeap[Sequence]] = {}
        self.heads: dict[Variant, _Head] = {}

    def of_line(self, seq: Sequence) -> SweptHeap[Sequence]:
        """The waiting sequences of its line."""
        return self.waiting.get(seq.group.variant, _NONE_WAIT)

    def key(self, first: Sequence) -> tuple[int, float, int]:
        """The order of a client's first sequence among the first sequences of all clients in a line."""
        return -first.priority, _PREEMPTED if first.begun else self.time, first.arrival


class _Costs:
    """A running mean of the costs of sequences, tokens; 1 before the first has ended, so that all count alike."""

    __slots__ = ("known", "mean")

    def __init__(self) -> None:
        self.known = 0  # sequences in the mean, up to _SEQUENCES
        self.mean = 1.0

    def add(self, cost: int) -> None:
        self.known = min(self.known + 1, _SEQUENCES)
        self.mean += (cost - self.mean) / self.known


@dataclass(eq=False, slots=True)
class _Head:
    """A client's first sequence of a line, in the order of all clients."""

    key: tuple[int, float, int]
    seq: Sequence
    client: _WaitingClient

    def outdated(self) -> bool:
        """True if a newer entry has replaced it."""
        return self.client.heads.get(self.seq.group.variant) is not self


def _finalized(seq: Sequence) -> bool:
    return seq.finalized


_Item = TypeVar("_Item")
_Key = tuple[float, ...]

#: The heap is swept when it has this many entries more than twice the number left by the last sweep.
_SLACK = 16


class SweptHeap(Generic[_Item]):
    """Items by key, lowest first. Keys are unique. Dead items are swept out when they may be half of the heap."""

    def __init__(self, dead: Callable[[_Item], bool]) -> None:
        self._dead = dead
        self._heap: list[tuple[_Key, _Item]] = []
        self._sweep_at = _SLACK

    def push(self, key: _Key, item: _Item) -> None:
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) >= self._sweep_at:
            self._sweep(lambda _: False)

    def remove(self, keys: Container[_Key]) -> None:
        """Remove the items with these keys."""
        self._sweep(lambda key: key in keys)

    def first(self, most: float = math.inf) -> _Item | None:
        """The item with the lowest key, which stays in the heap; None if its key begins with more than `most`."""
        while self._heap and self._dead(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap and self._heap[0][0][0] <= most else None

    def pop(self) -> None:
        """Remove the item that `first` returned."""
        heapq.heappop(self._heap)

    def _sweep(self, unwanted: Callable[[_Key], bool]) -> None:
        self._heap = [entry for entry in self._heap if not unwanted(entry[0]) and not self._dead(entry[1])]
        heapq.heapify(self._heap)
        self._sweep_at = 2 * len(self._heap) + _SLACK


_NONE_WAIT = SweptHeap[Sequence](_finalized)


class PromptOrder:
    """Keeps the rows with prompts of a roster in their order: fair between clients, within a client by admission.

    Rows may be free for hundreds of prompts, but a step computes only a few. So a place in the queue is not enough: one
    prompt would wait for all that another client sent before. A row is *due* at a time that is counted in tokens. It
    gets this time when it is admitted:

        due = max(now, due time of its client's last row) + tokens of its prompt that are to be computed

    `now` is the latest due time of a row that has begun. A prompt that has begun goes on to its end.
    Every row that is admitted and begins moves `now` on, so a row waits for a bounded number of others, whatever
    clients come. A row that was preempted, or whose KV is computed again, costs its client nothing. With one client,
    or without fair queueing, this is the order of admission.

    A sequence may wait for the prefill of another client's row (`QueueFeed.join`). If the sequence would be due
    earlier, the row gets that time, and the sequence's client pays as if the sequence computed the prompt itself. This
    is self-clocked fair queueing, too, here with costs that are known.
    """

    def __init__(self, prefilling: list[Sequence]) -> None:
        self._prefilling = prefilling
        self._now = 0
        self.last_due: dict[str, int] = {}  # client -> due time of its last row; past times may be missing

    def admit(self, seq: Sequence, tokens: int) -> None:
        """Add a sequence that has got a row, and has to compute this many tokens of its prompt."""
        if seq.group.client not in self.last_due:
            self.last_due = {client: due for client, due in self.last_due.items() if due > self._now}
        seq.queued.due = self.last_due[seq.group.client] = self._next(seq, tokens)
        self._insert(seq)

    def begin(self, seq: Sequence) -> None:
        """Note that the first chunk of a row is launched."""
        self._now = max(self._now, seq.queued.due)

    def hasten(self, other: Sequence, seq: Sequence, tokens: int) -> None:
        """Note that `seq`, which has no row and would compute this many tokens, waits for the prefill of `other`."""
        due = self._next(seq, tokens)
        if due < other.queued.due and not other.row_ready:
            other.queued.due = self.last_due[seq.group.client] = due
            self._prefilling.remove(other)
            self._insert(other)

    def _next(self, seq: Sequence, tokens: int) -> int:
        cost = 0 if seq.begun else tokens
        return max(self._now, self.last_due.get(seq.group.client, 0)) + cost

    def _insert(self, seq: Sequence) -> None:
        rows = self._prefilling
        begun = next((place for place in range(len(rows), 0, -1) if rows[place - 1].row_ready), 0)
        insort(rows, seq, lo=begun, key=_due)


def _due(seq: Sequence) -> int:
    return seq.queued.due
