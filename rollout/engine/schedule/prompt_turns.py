"""The order in which prompts of rows are computed: fair between clients, within a client by admission.

Rows may be free for hundreds of prompts, of which a step computes a few. So a place in the queue is not enough: one
prompt would wait for all that another client sent before. A row gets its turn when it is admitted, in tokens:

    turn = max(now, the turn of its client's last row) + tokens of its prompt that are to be computed

`now` is the latest turn that has begun. Rows go by their turns, and a prompt that has begun goes on to its end. Every
row that is admitted and begins moves `now` on, so a row waits for a bounded number of others, whatever clients come.
A row that was preempted, or whose KV is computed again, costs its client nothing. With one client, or without fair
queueing, this is the order of admission.

A sequence may wait for the prefill of another client's row (`QueueFeed.join`). If its own turn would be earlier, the
row takes that turn, and the client of the sequence pays: it is served as if the sequence computed the prompt itself.

As in `fair_queue`, the method is self-clocked fair queueing, here with costs that are known.
"""

from __future__ import annotations

from bisect import insort

from rollout.engine.sequence.sequence import Sequence


class PromptTurns:
    """Keeps the rows with prompts of a roster in their order."""

    def __init__(self, prefilling: list[Sequence]) -> None:
        self._prefilling = prefilling
        self._now = 0
        self.last_turns: dict[str, int] = {}  # client -> its last row's turn; past turns may be missing

    def admit(self, seq: Sequence, tokens: int) -> None:
        """Add a sequence that has got a row, and has to compute this many tokens of its prompt."""
        if seq.group.client not in self.last_turns:
            self.last_turns = {client: turn for client, turn in self.last_turns.items() if turn > self._now}
        seq.turn = self.last_turns[seq.group.client] = self._next(seq, tokens)
        self._insert(seq)

    def begin(self, seq: Sequence) -> None:
        """Note that the first chunk of a row is launched."""
        self._now = max(self._now, seq.turn)

    def hasten(self, other: Sequence, seq: Sequence, tokens: int) -> None:
        """Note that `seq`, which has no row and would compute this many tokens, waits for the prefill of `other`."""
        turn = self._next(seq, tokens)
        if turn < other.turn and not other.row_ready:
            other.turn = self.last_turns[seq.group.client] = turn
            self._prefilling.remove(other)
            self._insert(other)

    def _next(self, seq: Sequence, tokens: int) -> int:
        cost = 0 if seq.begun else tokens
        return max(self._now, self.last_turns.get(seq.group.client, 0)) + cost

    def _insert(self, seq: Sequence) -> None:
        rows = self._prefilling
        begun = next((place for place in range(len(rows), 0, -1) if rows[place - 1].row_ready), 0)
        insort(rows, seq, lo=begun, key=_turn)


def _turn(seq: Sequence) -> int:
    return seq.turn
