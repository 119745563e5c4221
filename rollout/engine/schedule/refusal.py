"""Limits of the scheduler, refusals of requests, and the deadlines of admitted ones."""

from dataclasses import dataclass

from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_service import Rejected
from rollout.engine.schedule.fair_queue import SweptHeap
from rollout.engine.sequence.sequence import Group


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits and rules of the scheduler; `rollout.config.EngineSettings` explains them."""

    max_rows: int
    max_queue: int  # completions that may wait
    max_context: int  # tokens, prompt plus completion
    chunk_tokens: int
    upload_words: int  # int32 words that fit in a slot's staging buffer


def refusal(
    request: Request, limits: SchedulerLimits, pool_tokens: int, waiting: int, session_busy: bool
) -> Rejected | None:
    """The reason to refuse a request at this moment, or None. `rollout/service/requests/intake.py` checks all else."""
    assert len(request.prior.token_ids) <= request.max_tokens, "the service checks max_tokens"
    needed, most = len(request.prompt) + request.max_tokens, min(limits.max_context, pool_tokens)
    if needed > most:  # the service has checked it; benchmarks come without a service
        message = f"too long: prompt and max_tokens are {needed} tokens, and a sequence has at most {most}"
        return Rejected(request.key, "bad_request", message, "max_tokens")
    if request.n > limits.max_queue:
        message = f"n is {request.n} and max_queue is {limits.max_queue} completions: ask for fewer at a time"
        return Rejected(request.key, "bad_request", message, "n")
    if waiting + request.n > limits.max_queue:
        message = f"{waiting} completions wait, max_queue is {limits.max_queue}: come back later, or set a larger one"
        return Rejected(request.key, "overloaded", message)
    if session_busy:
        message = "a turn of this session has not ended yet: wait for its result or cancel it, or use another session"
        return Rejected(request.key, "bad_request", message, "session")
    return None


class Deadlines:
    """Groups by the time at which they must end."""

    def __init__(self) -> None:
        self._groups: SweptHeap[Group] = SweptHeap(lambda group: not group.unfinished)

    def add(self, at_s: float, group: Group) -> None:
        """End `group` at clock time `at_s`."""
        self._groups.push((at_s, group.sequences[0].arrival), group)

    def take_overdue(self, now_s: float) -> list[Group]:
        """Remove the groups whose time has passed; returns the unfinished ones."""
        overdue = []
        while (group := self._groups.first(now_s)) is not None:
            self._groups.pop()
            overdue.append(group)
        return overdue
