"""Who gives way when pages run short: idle sessions, then shares, then the lowest priority, of these the youngest.

Where the KV of preempted sequences is kept, their pages can be given to others only once they are copied. So somebody
is preempted a little before the pages are needed, and a row whose page has not come back yet goes without for a step.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.engine.kv.memory import SequenceMemory
from rollout.engine.schedule.sequence import Sequence, State

#: Tokens before a page is needed at which somebody is preempted for it, where it has to be copied first.
_SOON = 4


class Shortage:
    """Finds pages for rows that grow. The lists are the scheduler's own; `preempt` takes a sequence out of them."""

    def __init__(
        self,
        memory: SequenceMemory,
        decoding: list[Sequence],
        prefilling: list[Sequence],
        leaving: list[Sequence],
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._memory = memory
        self._decoding, self._prefilling, self._leaving = decoding, prefilling, leaving
        self._preempt = preempt

    def grow(self, full: list[Sequence]) -> None:
        """One page more for each of these, first come first served; some may go without for this step."""
        for seq in sorted(full, key=lambda seq: seq.rank):
            self._grow(seq)
        if self._memory.parking is not None:
            self._make_way(self._memory.parking.going)

    def _grow(self, seq: Sequence) -> None:
        memory = self._memory
        while seq.state is State.DECODE and not memory.try_grow(seq):
            if memory.sharing:
                memory.close_share(memory.sharing[-1])
            elif self._leaving or memory.making_room:
                return  # pages are on their way back
            else:
                self._preempt(self._last())

    def _make_way(self, going: int) -> None:
        """Preempt somebody if pages will be needed soon that are neither there nor among the `going` ones.

        Never while there is so much room that whoever is preempted could come back at once.
        """
        available, running = self._memory.available + going, len(self._decoding) + len(self._prefilling)
        if self._leaving or running < 2 or available >= running:
            return
        if sum(map(_grows_soon, self._decoding)) > available:
            self._preempt(self._last())

    def _last(self) -> Sequence:
        return max(self._decoding + self._prefilling, key=lambda seq: seq.rank)


def _grows_soon(seq: Sequence) -> bool:
    has_all = seq.kv_capacity >= seq.prompt_len + seq.max_tokens - 1
    return seq.kv_capacity - seq.kv_len < _SOON and not has_all
