"""New sessions wait while existing sessions need their pages.

Agents come back: an idle session is one whose tool runs. If every new agent starts at once, each turn takes the pages
of a session that comes back next, and that one computes its whole context again. So a turn waits if its session has no
KV (it is the first turn, or the KV gave way) and if the pages that no session has, together with free pages on the
host, are too few for the turn. It takes pages of sessions when no row runs, when a session was idle for long, or when
the turn itself has waited for long. A turn whose KV is on the host does not wait: it needs no prefill.
"""

from __future__ import annotations

from rollout.engine.schedule.roster import Roster
from rollout.engine.sequence.sequence import Sequence

#: Seconds. 95% of agents' turns come within the first after the turn before.
LONG_IDLE_S, LONGEST_WAIT_S = 10.0, 30.0


def newcomer_waits(roster: Roster, seq: Sequence, pages: int) -> bool:
    """True if `seq`, which needs `pages` pages, has to wait although idle sessions could be evicted."""
    group, allocator = seq.group, roster.allocator
    if group.session is None or group.session.kv is not None or seq.begun or not roster.running:
        return False
    if allocator.pool.available + allocator.tier.room >= pages + roster.running:
        return False
    now_s = roster.clock()
    idle_s = allocator.sessions.longest_idle_s(now_s)
    return idle_s is not None and idle_s <= LONG_IDLE_S and now_s - group.arrived_s <= LONGEST_WAIT_S
