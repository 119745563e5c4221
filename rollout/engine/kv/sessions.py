"""Sessions: conversations whose KV stays between their turns.

    begin        a turn is submitted
    match        its tokens against those that the session holds: what of their KV can be used
    hand_over    the turn is admitted: the row has the pages that match, the session holds none
    keep         the row is settled, no step names it: the session holds what the turn has left
    ... idle, until the next turn, the end of its lease, or somebody who needs the pages

A session holds a reference to each page and knows the tokens whose KV is in them; pages and prefix keys are the pool's.

Invariants:
- A session holds pages only between its turns, and none that a step in flight may write to.
- All KV of a session is of one weights version, the present one.
- Together sessions hold at most `most_pages` pages; pages that several share count once. There are no more sessions
  than that, and in all of them no more tokens than `_SHARING` times what fits in these pages: each takes host memory.
- A session with neither a turn nor a page is forgotten.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from rollout.engine.kv.pool import PagePool, PrefixKeys
from rollout.engine.messages import Request, RequestKey, SessionKey, SessionStatus

#: Entries that the heap of leases may hold beyond twice those that are in use.
_SLACK = 16
#: Sessions that a page may be held by, in the mean.
_SHARING = 64


@dataclass(frozen=True, slots=True)
class Held:
    """What a session holds."""

    tokens: np.ndarray  # int32 [tokens]: KV of these positions is there
    pages: list[int]  # those of `tokens`, the last one may be half full
    version: int  # weights version of the KV
    keys: PrefixKeys | None  # of all full pages at least; None without a prefix cache
    generation: int = 0  # of the adapter's weights, 0 for none


@dataclass(eq=False, slots=True)
class Session:
    """One conversation."""

    key: SessionKey
    lease_s: float
    turns: int = 0  # submitted and not settled: one, and those that ended early and whose steps are in flight
    turn: RequestKey | None = None  # the last one
    over: bool = False  # it keeps nothing more
    held: Held | None = None
    until_s: float = 0.0  # end of its lease, while it has no turn


@dataclass(slots=True)
class SessionCounts:
    """Running totals since start."""

    turns: int = 0
    hits: int = 0  # turns that found KV in their session
    reused_tokens: int = 0  # tokens whose KV they found there
    evicted: int = 0  # sessions that lost their pages to rows or to other sessions


class Sessions:
    """All sessions of one page pool. Times are of the scheduler's clock, seconds."""

    def __init__(self, pool: PagePool, page_size: int, most_pages: int, counts: SessionCounts | None = None) -> None:
        self.counts = counts or SessionCounts()
        self._pool = pool
        self._page_size = page_size
        self._most_pages = most_pages
        self._sessions: dict[SessionKey, Session] = {}
        self._of_client: dict[str, dict[SessionKey, None]] = {}
        self._holding: OrderedDict[SessionKey, Session] = OrderedDict()  # least recently used first
        self._refs: dict[int, int] = {}  # references that sessions have, by page
        self._held_pages = 0  # the sum of them
        self._leases: list[tuple[float, int, Session]] = []
        self._serial = 0

    @property
    def pages(self) -> int:
        """Pages that sessions hold, some of them perhaps together with rows."""
        return len(self._refs)

    def count(self, pages: list[int]) -> int:
        """How many of these pages sessions hold."""
        return sum(page in self._refs for page in pages)

    @property
    def holding(self) -> int:
        """Sessions that hold pages."""
        return len(self._holding)

    def status(self) -> SessionStatus:
        """How many there are, and what has become of them."""
        counts = self.counts
        return SessionStatus(self.holding, self.pages, counts.turns, counts.hits, counts.reused_tokens, counts.evicted)

    def turn_of(self, request: Request) -> RequestKey | None:
        """The last turn of this request's session, None if there is none."""
        session = None if request.session is None else self._sessions.get(request.session)
        return None if session is None else session.turn

    # --- a turn ------------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> Session | None:
        """A turn is submitted: its session is there from now on. None if the request is no turn."""
        key = request.session
        if key is None:
            return None
        session = self._sessions.setdefault(key, Session(key, request.session_lease_s))
        self._of_client.setdefault(key[0], {})[key] = None
        session.lease_s, session.turn = request.session_lease_s, request.key
        session.turns += 1
        self.counts.turns += 1
        if session.held is not None:
            self._holding.move_to_end(key)
        return session

    def match(self, session: Session, tokens: np.ndarray, version: int, generation: int = 0) -> tuple[Held | None, int]:
        """What the session holds, and how many of the first `tokens` (int32) it has the KV of: all but one at most."""
        held = session.held
        if held is None or held.version != version or held.generation != generation:
            return None, 0
        most = min(len(held.tokens), len(tokens) - 1)
        differing = np.flatnonzero(held.tokens[:most] != tokens[:most])
        return held, int(differing[0]) if len(differing) else most

    def hand_over(self, session: Session, reused: int) -> None:
        """The turn has what it can use of the session's KV, that of `reused` tokens; the rest is let go."""
        self.counts.hits += reused > 0
        self.counts.reused_tokens += reused
        self._let_go(session)

    def keep(self, session: Session, left: Held, now_s: float) -> None:
        """A turn is settled and has left this: `left.tokens` is empty if its KV is of no use."""
        session.turns -= 1
        if session.over:
            return
        if session.held is None:  # otherwise the turn was never admitted
            self._hold(session, left)
        if session.turns:
            return
        if session.held is None:
            self._forget(session.key)
            return
        session.until_s = now_s + session.lease_s
        self._serial += 1
        heapq.heappush(self._leases, (session.until_s, self._serial, session))
        if len(self._leases) > 2 * len(self._holding) + _SLACK:
            self._leases = [entry for entry in self._leases if _expires(entry)]
            heapq.heapify(self._leases)

    # --- ends --------------------------------------------------------------------------------------------------------

    def evict_one(self) -> bool:
        """Take its pages from the session that was used least recently; False if none holds any."""
        if not self._holding:
            return False
        self.counts.evicted += 1
        self._drop(next(iter(self._holding.values())))
        return True

    def end(self, client: str, name: str | None = None) -> None:
        """A session is over, or all of a client's; a turn that runs goes on and leaves nothing."""
        for key in list(self._of_client.get(client, ())) if name is None else [(client, name)]:
            session = self._sessions.get(key)
            if session is not None:
                self._forget(key)
                session.over = True
                self._let_go(session)

    def expire(self, now_s: float) -> None:
        """End the sessions whose lease is over."""
        while self._leases and self._leases[0][0] <= now_s:
            entry = heapq.heappop(self._leases)
            if _expires(entry):
                self._drop(entry[2])

    def drop_all(self) -> None:
        """No KV is of use any more: the weights have changed."""
        for session in list(self._holding.values()):
            self._drop(session)

    def check(self) -> None:
        """Assert that the books agree."""
        refs: dict[int, int] = {}
        for session in self._holding.values():
            held = session.held
            assert held is not None and not session.over
            assert held.keys is None or len(held.keys) >= len(held.tokens) // self._page_size, "a page has no key"
            for page in held.pages:
                refs[page] = refs.get(page, 0) + 1
        assert refs == self._refs and sum(refs.values()) == self._held_pages, "sessions count their pages wrongly"
        assert not self._too_many, "sessions hold more than they may"
        assert all(session.turns or session.held for session in self._sessions.values()), "an empty session is left"
        assert {key for keys in self._of_client.values() for key in keys} == set(self._sessions), "a client's are wrong"
        assert all(self._of_client.values()), "a client without a session is left"

    # --- pages -------------------------------------------------------------------------------------------------------

    def _hold(self, session: Session, left: Held) -> None:
        count = min(len(left.tokens), self._most_pages * self._page_size)
        if count == 0:
            return
        pages = left.pages[: -(-count // self._page_size)]
        for page in pages:
            self._pool.retain(page)
            self._refs[page] = self._refs.get(page, 0) + 1
        self._held_pages += len(pages)
        # A copy: a view would keep all tokens of a prompt of which little was computed.
        session.held = Held(left.tokens[:count].copy(), pages, left.version, left.keys, left.generation)
        self._holding[session.key] = session
        while self._too_many:
            self.evict_one()  # never this one: it is the newest, and by itself within the limits

    @property
    def _too_many(self) -> bool:
        most = self._most_pages
        return len(self._refs) > most or len(self._holding) > most or self._held_pages > _SHARING * most

    def _drop(self, session: Session) -> None:
        self._let_go(session)
        if not session.turns:
            self._forget(session.key)

    def _forget(self, key: SessionKey) -> None:
        del self._sessions[key]
        del self._of_client[key[0]][key]
        if not self._of_client[key[0]]:
            del self._of_client[key[0]]

    def _let_go(self, session: Session) -> None:
        if session.held is None:
            return
        for page in reversed(session.held.pages):  # of a prefix, the end is evicted before its begin
            self._pool.release(page)
            self._refs[page] -= 1
            if not self._refs[page]:
                del self._refs[page]
        self._held_pages -= len(session.held.pages)
        session.held = None
        del self._holding[session.key]


def _expires(entry: tuple[float, int, Session]) -> bool:
    """True if this is the end of a lease, and not one that was begun anew."""
    at_s, _, session = entry
    return session.held is not None and not session.turns and session.until_s == at_s
