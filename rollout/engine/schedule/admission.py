"""Refuses requests, ends overdue requests, and gives rows to waiting sequences.

Admission takes the prompt's pages and one more, but none for the rest of `max_tokens`. A sequence waits for KV that
another one computes or that comes back from the host, and a new session for sessions that were active of late.
"""

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rollout.engine.kv.tier import Fetch
from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_engine import Prefetch
from rollout.engine.messages.to_service import Rejected
from rollout.engine.schedule.fair_queue import SweptHeap
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.step_feature import RequestFeature
from rollout.engine.sequence.sequence import Group, Sequence, asked_fields


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


def untaken(asked: Request | Prefetch, features: Collection[RequestFeature]) -> Iterator[tuple[str, str]]:
    """The fields that ask for features which this worker lacks, each with the reason to refuse the request."""
    names = {feature.name for feature in features}
    for entry in asked_fields(asked):
        if entry.feature not in names:
            start = f"start it with {entry.flag}, or " if entry.flag else ""
            cure = f"{start}remove the field (see 'capabilities' in the status)"
            yield entry.name, f"this worker does not offer {entry.name!r}; {cure}"


class Deadlines:
    """Groups by the time at which they must end."""

    def __init__(self) -> None:
        self._groups: SweptHeap[Group] = SweptHeap(lambda group: not group.unfinished)

    def add(self, at_s: float, group: Group) -> None:
        """End `group` at clock time `at_s`."""
        self._groups.push((at_s, group.sequences[0].arrival), group)

    def take_overdue(self, now_s: float) -> list[Group]:
        """Remove the overdue groups; returns the unfinished groups."""
        overdue = []
        while (group := self._groups.first(now_s)) is not None:
            self._groups.pop()
            overdue.append(group)
        return overdue


#: Seconds. 95% of agents' turns begin within `LONG_IDLE_S` of the end of the turn before.
LONG_IDLE_S, LONGEST_WAIT_S = 10.0, 30.0


def admit(roster: Roster) -> bool:
    """Give rows to waiting sequences. False if it goes on once steps in flight are committed."""
    allocator, feed = roster.allocator, roster.feed
    if roster.ending:
        return False
    waits = functools.partial(newcomer_waits, roster)
    while roster.free_rows:
        if feed.has_room_waiters:
            feed.queue_held(waits)
        seq = roster.first_waiting()
        if seq is None:
            return True
        if seq.group.waits_for_turn:
            return False
        # A page for each running row stays free: otherwise the newcomer is preempted as soon as the rows grow.
        rows = roster.rows_by_rank()
        if feed.still_misfits(seq, rows):
            return True
        reusable = allocator.find_reusable(seq, roster.version, rows)
        running = rows[seq.kv.rank]
        if reusable.awaited is not None:
            other, awaited = reusable.awaited
            roster.prompt_order.hasten(other, seq, awaited - reusable.tokens)
            feed.join(seq, other, awaited)
        elif isinstance(usable := allocator.fetch_for(seq, reusable, roster.version, spare=running), Fetch):
            feed.join(seq, usable)
        elif waits(seq, pages := allocator.pages_for_new(seq, usable)):
            feed.wait_for_room(seq, pages)
        elif allocator.try_admit(seq, usable, roster.version, spare=running):
            roster.start(seq)
        elif any(rows) or not allocator.sharing:
            wanted = allocator.pages_wanted(seq) + running
            feed.note_misfit(seq, rows, wanted)  # noted now: sessions may have lost their pages
            return True
        else:
            allocator.close_shared_prompt(allocator.sharing[0])  # nothing runs that could give pages back
    return True


def newcomer_waits(roster: Roster, seq: Sequence, pages: int) -> bool:
    """True if `seq`, which needs `pages` pages, has to wait although idle sessions could be evicted.

    Agents come back: the tool of an idle session runs. If every new agent starts at once, each turn takes the pages of
    the session that comes back next, which then computes its whole context again. So a turn waits if its session has no
    KV (it is the first turn, or the KV gave way) and if the pages that no session has, together with free pages on the
    host, are too few for the turn; where rows are dealt to ranks, on each rank. It takes pages of sessions when no row
    runs, when a session was idle for long, or when the turn itself has waited for long. A turn whose KV is on the host
    does not wait: it needs no prefill.
    """
    group, allocator = seq.group, roster.allocator
    if group.session is None or group.session.kv is not None or seq.begun or not roster.running:
        return False
    room = [
        allocator.pool.available_of(rank) + allocator.tier.room - rows
        for rank, rows in enumerate(roster.rows_by_rank())
    ]
    if max(room) >= pages:
        return False
    now_s = roster.clock()
    idle_s = allocator.sessions.longest_idle_s(now_s)
    return idle_s <= LONG_IDLE_S and now_s - group.arrived_s <= LONGEST_WAIT_S
