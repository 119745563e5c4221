"""What is left of the requests after a fault: every one ends as `error`, with the tokens that it has.

A fault may come anywhere, so the scheduler's books may be half-way: this reads the sequences' tokens, and the experts
that these took where they are asked for, and gives no row or page back. The scheduler is thrown away afterwards. Two
things make the tokens trustworthy: a token's version run is written last, so tokens beyond the runs are no whole
tokens; and `finalized` is set after the last delta was made, so whoever is not finalized has not been told an end.
"""

from __future__ import annotations

from rollout.engine.messages import Event, Finish
from rollout.engine.schedule.completion import make_delta, make_request_done
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.schedule.sequence import Group, Sequence


def rescue(scheduler: Scheduler, message: str) -> list[Event]:
    """The events that were due and those that end every request; a second call gives none."""
    events, scheduler.events = scheduler.events, []
    groups, scheduler.groups = scheduler.groups, {}
    now_s = scheduler.clock()
    for group in groups.values():
        for seq in group.sequences:
            if not seq.finalized:
                _drop_torn_token(group, seq)
                seq.finish = Finish("error", error=message)
                events.append(make_delta(seq, scheduler.memory.experts))
                seq.finalized = True
        events.append(make_request_done(group, now_s))
    return events


def _drop_torn_token(group: Group, seq: Sequence) -> None:
    """Cut the columns to the tokens that all of them have."""
    prior = group.request.prior
    whole = (len(prior.token_ids) if prior is not None else 0) + sum(count for _, count in seq.versions)
    for column in (seq.tokens, seq.logprobs, seq.raw_logprobs, seq.drawn_logprobs):
        if column is not None:
            del column[whole:]
