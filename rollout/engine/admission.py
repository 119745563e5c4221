"""Who may come in, and in which order: limits, the waiting queue, deadlines."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rollout.engine.sequence import Group, Sequence
from rollout.engine.types import Rejected, Request

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds the scheduler; see `rollout.config.EngineSettings` for the meanings."""

    max_rows: int
    max_queue: int  # completions that may wait
    max_context: int  # tokens, prompt plus completion
    chunk_tokens: int
    upload_words: int  # int32 words that fit in a slot's staging buffer


def refusal(request: Request, limits: SchedulerLimits, pool_tokens: int, waiting: int) -> Rejected | None:
    """Why a request can't be taken, or None if it can."""
    total, most = len(request.prompt) + request.max_tokens, min(limits.max_context, pool_tokens)
    if total > most:
        message = f"prompt plus max_tokens is {total} tokens and this worker holds at most {most}: ask for fewer"
        return Rejected(request.key, "too_long", message, "max_tokens")
    if waiting + request.n > limits.max_queue:
        message = f"{waiting} completions wait, the queue holds {limits.max_queue}: come back later"
        return Rejected(request.key, "overloaded", message, retry_after_s=_RETRY_AFTER_S)
    if request.prior is not None and len(request.prior.token_ids) >= request.max_tokens:
        message = "continue_from has max_tokens tokens already: raise max_tokens, which counts them"
        return Rejected(request.key, "bad_request", message, "continue_from.token_ids")
    return None


class WaitingQueue:
    """Sequences without a row, by rank. Finalized ones are skipped, not searched for."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []

    def push(self, seq: Sequence) -> None:
        """Add a sequence; its rank is unique."""
        heapq.heappush(self._heap, (seq.rank, seq))

    def first(self) -> Sequence | None:
        """The sequence that is next, left in the queue."""
        while self._heap and self._heap[0][1].finalized:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out what `first` returned."""
        heapq.heappop(self._heap)


class Deadlines:
    """Groups by the time at which they must end."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Group]] = []

    def add(self, at_s: float, group: Group) -> None:
        """End `group` at clock time `at_s`."""
        heapq.heappush(self._heap, (at_s, group.sequences[0].arrival, group))

    def take_overdue(self, now_s: float) -> list[Group]:
        """The unfinished groups whose time has passed, taken out."""
        overdue = []
        while self._heap and self._heap[0][0] <= now_s:
            group = heapq.heappop(self._heap)[2]
            if group.unfinished:
                overdue.append(group)
        return overdue
