"""The time of recomputation after an update, and whether the next update waits for it.

    update applied                                  the next one may be applied
       |-- rows that lost their KV are prefilled --|-- rows decode --|
       |          `_pending` is not empty                            |
       |<----------- time since: `spent_s` is at most `most` of it ->|

An update drops the KV of all rows, and their prefills begin again. If the next update came before the last prefill was
complete, the rows at the end of the queue would never decode. So the next update waits until no prefill is pending, and
until the prefills took at most the part `most` of the time since the last update.

The wait is bounded. A pending sequence holds a row, or waits for the prefill of one that does: it needs nothing but
steps. One that gets no row at once, because pages are short or requests of a higher priority came first, is no longer
pending. When none is pending, `spent_s` is fixed, and the wait ends `spent_s / most` after the last update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.roster import Roster
from rollout.engine.sequence.sequence import Sequence, SequenceState


class Recomputation:
    """Counts the time of prefills that an update caused. Only the loop calls it.

    Args:
        most: largest part of the time since an update that they may take before the next one; 1.0: no update waits.
        clock: monotonic seconds.
    """

    def __init__(self, most: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most = most
        self.clock = clock
        self.spent_s = 0.0  # time spent on these prefills since the last update
        self._since_s = clock()
        self._pending: set[Sequence] = set()

    def begin(self, seqs: Iterable[Sequence]) -> None:
        """Note that an update was applied, and that these sequences lost their KV."""
        self._pending = set(seqs)
        self.spent_s, self._since_s = 0.0, self.clock()

    def admitted(self, roster: Roster) -> None:
        """Every waiting sequence that can get a row now has got one: sequences without a row are no longer pending."""
        if not self._pending:
            return
        joined = roster.feed.joined_sequences()
        self._pending = {
            seq
            for seq in self._pending
            if not seq.finalized and (seq.state is not SequenceState.WAITING or seq in joined)
        }

    def committed(self, plan: Plan, ran_s: float) -> float:
        """A step was committed that ran for `ran_s` seconds; returns how many of them computed KV again."""
        if not self._pending or plan.kind == "decode":
            return 0.0
        tokens = 0
        for span in plan.spans:
            # The sequence was taken off since: the step is older than the update.
            if span.seq in self._pending and span.seq.state in (SequenceState.PREFILL, SequenceState.DECODE):
                tokens += span.tokens_in
                if span.draws:
                    self._pending.remove(span.seq)
        spent_s = ran_s * tokens / plan.tokens
        self.spent_s += spent_s
        return spent_s

    def delays(self, roster: Roster) -> bool:
        """True if the next update has to wait. Without rows it costs nothing, so it may be applied."""
        if self.most == 1.0:
            return False
        if any(not seq.finalized for seq in self._pending):
            return True
        return roster.running > 0 and self.spent_s > self.most * (self.clock() - self._since_s)
