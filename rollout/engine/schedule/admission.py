"""Gives rows to waiting sequences.

Admission takes the prompt's pages and one more, never those of `max_tokens`. A sequence waits for KV that another one
computes or that comes back from the host, and a new session for those that were active of late.
"""

import functools

from rollout.engine.kv.tier import Fetch
from rollout.engine.schedule.roster import Roster
from rollout.engine.sequence.sequence import Sequence

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
            allocator.tier.want(allocator.pages_wanted(seq) + running)
            feed.note_misfit(seq, rows)  # noted now: sessions may have lost their pages
            return True
        else:
            allocator.close_shared_prompt(allocator.sharing[0])  # nothing runs that could give pages back
    return True


def newcomer_waits(roster: Roster, seq: Sequence, pages: int) -> bool:
    """True if `seq`, which needs `pages` pages, has to wait although idle sessions could be evicted.

    Agents come back: an idle session is one whose tool runs. If every new agent starts at once, each turn takes the
    pages of a session that comes back next, and that one computes its whole context again. So a turn waits if its
    session has no KV (it is the first turn, or the KV gave way) and if the pages that no session has, together with
    free pages on the host, are too few for the turn; where rows are dealt to ranks, on each rank. It takes pages of
    sessions when no row runs, when a session was idle for long, or when the turn itself has waited for long. A turn
    whose KV is on the host does not wait: it needs no prefill.
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
