"""The order in which sessions give their pages up: the least recently used first, those with a lease after the others.

A lease is a hint of the client: the KV is needed within that time (`lease_s`). It is no claim: when rows need pages and
no other session has any, leased ones give way, too. A session whose lease is over gives way next, unless its next turn
is here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from rollout.engine.messages.requests import SessionKey
from rollout.engine.sequence.session import Session

#: The heap of leases is cleaned when it has more entries than this plus twice those in use.
_SLACK = 16


class EvictionOrder:
    """The sessions with pages. Times are seconds of the scheduler's clock."""

    def __init__(self) -> None:
        self._others: OrderedDict[SessionKey, Session] = OrderedDict()  # least recently used first, as the next
        self._leased: OrderedDict[SessionKey, Session] = OrderedDict()
        self._ends: list[tuple[float, int, Session]] = []
        self._serial = 0

    @property
    def first(self) -> Session | None:
        """The session to evict next; None if there is none."""
        return next(iter((self._others or self._leased).values()), None)

    def add(self, session: Session, now_s: float) -> None:
        """Add a session with pages."""
        if session.last_until_s <= now_s:
            self._others[session.key] = session
            return
        self._leased[session.key] = session
        self._serial += 1
        heapq.heappush(self._ends, (session.last_until_s, self._serial, session))
        if len(self._ends) > 2 * len(self._leased) + _SLACK:
            self._ends = [entry for entry in self._ends if self._counts(entry)]
            heapq.heapify(self._ends)

    def use(self, key: SessionKey) -> None:
        """Note that a session with pages is used now: its next turn is here."""
        (self._leased if key in self._leased else self._others).move_to_end(key)

    def drop(self, key: SessionKey) -> None:
        """Remove a session without pages."""
        del (self._leased if key in self._leased else self._others)[key]

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over."""
        while self._ends and self._ends[0][0] <= now_s:
            entry = heapq.heappop(self._ends)
            if self._counts(entry):
                session = entry[2]
                key = session.key
                self._others[key] = self._leased.pop(key)
                if not session.turns:
                    self._others.move_to_end(key, last=False)

    def check(self, sessions: OrderedDict[SessionKey, Session]) -> None:
        """Assert that these are the sessions with pages."""
        assert self._others.keys() | self._leased.keys() == sessions.keys(), "a session that gives way has no pages"
        assert len(self._others) + len(self._leased) == len(sessions), "a session gives way twice"

    def _counts(self, entry: tuple[float, int, Session]) -> bool:
        until_s, _, session = entry
        return self._leased.get(session.key) is session and session.last_until_s == until_s
