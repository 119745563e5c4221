"""Sessions: conversations whose KV stays in the pool between their turns.

    begin        a turn is submitted
    match        its tokens against the session's: how much of the KV can be used
    hand_over    the turn is admitted: the sequence has the pages that match, the session has none
    keep         the turn is settled, no step in flight names it: the session has the KV that the turn leaves
    ... idle, until the next turn, the end of its lease, or until rows or other sessions need the pages

A request outside of sessions that asks for a lease leaves its KV to a session of its own, without a name (`unnamed`).

A session has a reference to each of its pages and knows the tokens of their KV; pages and prefix keys are the pool's.

Invariants:
- A session has pages only between its turns. No step in flight writes to them.
- All KV of a session has the present weights version, or is at most `engine.max_kv_age` versions older.
- All sessions together have at most `most_pages` pages; a page that several share counts once. There are at most
  `most_pages` sessions with KV, and a page belongs to at most `_SHARING` of them on average: a session keeps its tokens
  in host memory, and this bounds it.
- A session with neither a turn nor a page is forgotten.
"""

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from rollout.engine.kv.eviction_order import EndTimes, EvictionOrder
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.snapshots import CachedSnapshot, Snapshots
from rollout.engine.messages.requests import Request, RequestKey, SessionKey
from rollout.engine.messages.statuses import SessionStatus
from rollout.engine.sequence.sequence_kv import NO_KEYS, KeptSession, SessionKV
from trainer_bridge.wire.codec import MAX_ID_CHARS

#: The most sessions that a page may belong to, on average.
_SHARING = 64


@dataclass(slots=True)
class SessionCounts:
    """Running totals since start."""

    turns: int = 0
    hits: int = 0  # turns that found KV in their session
    reused_tokens: int = 0  # tokens of that KV
    evicted: int = 0  # sessions that lost their pages to rows or to other sessions


class Sessions:
    """All sessions of one pool. Times are seconds of the scheduler's clock."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        most_pages: int,
        snapshots: Snapshots,
        counts: SessionCounts | None = None,
    ) -> None:
        self.counts = counts or SessionCounts()
        self.pool, self.snapshots = pool, snapshots
        self.page_size = page_size
        self._most_pages = most_pages
        self._sessions: dict[SessionKey, KeptSession] = {}
        self._of_client: dict[str, dict[SessionKey, None]] = {}
        self._with_kv: dict[SessionKey, KeptSession] = {}
        self._order = EvictionOrder[SessionKey]()
        self._unseen: OrderedDict[SessionKey, int] = OrderedDict()  # first pages that `look` has not returned
        self._refs: dict[int, int] = {}  # how many sessions have a page, by page
        self._refs_sum = 0
        self._pages_of = [0] * pool.ranks  # pages of each rank
        self._leases = EndTimes[SessionKey]()  # when sessions between two turns end

    @property
    def pages(self) -> int:
        """Pages that sessions have; rows may use some of them, too."""
        return len(self._refs)

    def pages_of(self, rank: int) -> int:
        """Pages of this rank that sessions have."""
        return self._pages_of[rank]

    @property
    def holding(self) -> int:
        """Sessions that have pages."""
        return len(self._with_kv)

    @property
    def places(self) -> Counter[int]:
        """References of sessions to places of snapshots."""
        return Counter(snapshot.place for session in self._with_kv.values() for snapshot in session.held.snapshots)

    def longest_idle_s(self, now_s: float) -> float:
        """Idle time of the session to evict next; 0 if its next turn is here; infinite if no session has pages."""
        if not self._order:
            return math.inf
        first = self._with_kv[self._order.first]
        return 0.0 if first.turns else now_s - (first.until_s - first.lease_s)

    def count_alone(self, pages: set[int]) -> int:
        """Number of pages that belong to sessions or are among `pages`."""
        return len(self._refs.keys() | pages)

    def count(self, pages: list[int]) -> int:
        """Number of these pages that belong to sessions."""
        return sum(page in self._refs for page in pages)

    def status(self) -> SessionStatus:
        """A snapshot of now, with the totals since start."""
        counts = self.counts
        return SessionStatus(
            len(self._with_kv), self.pages, counts.turns, counts.hits, counts.reused_tokens, counts.evicted
        )

    def turn_of(self, request: Request) -> RequestKey | None:
        """The last turn of this request's session; None if it has none."""
        session = None if request.session is None else self._sessions.get(request.session)
        return None if session is None else session.turn

    # --- a turn ------------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> KeptSession | None:
        """Submit a turn; returns its session, which is created if necessary. None if the request names no session."""
        key = request.session
        if key is None:
            return None
        session = self._sessions.setdefault(key, KeptSession(key, request.session_lease_s))
        self._of_client.setdefault(key[0], {})[key] = None
        session.lease_s, session.turn = max(request.session_lease_s, request.lease_s), request.key
        session.last_s = request.lease_s
        session.turns += 1
        self.counts.turns += 1
        if session.kv is not None:
            self._order.use(key)
            self._leases.drop(key)
        if key in self._unseen:
            self._unseen.move_to_end(key)
        return session

    def match(
        self, session: KeptSession, tokens: np.ndarray, oldest: int, edition: int = 0
    ) -> tuple[SessionKV | None, int]:
        """The session's KV, and how many of `tokens` (`Sequence.identity`) have it: never the last one.

        KV with a weights version before `oldest` is not used.
        """
        kv = session.kv
        if kv is None or kv.oldest < oldest or kv.edition != edition:
            return None, 0
        most = min(len(kv.tokens), len(tokens) - 1)
        differing = np.flatnonzero(kv.tokens[:most] != tokens[:most])
        return kv, int(differing[0]) if len(differing) else most

    def hand_over(self, session: KeptSession, reused: int) -> None:
        """Admit the turn with the KV of `reused` tokens of the session; the session releases all its pages."""
        self.counts.hits += reused > 0
        self.counts.reused_tokens += reused
        self._release(session)

    def keep(self, session: KeptSession, left: SessionKV, now_s: float) -> None:
        """Settle a turn that leaves this KV; `left.tokens` is empty if its KV cannot be reused."""
        session.turns -= 1
        if session.over:
            return
        if session.kv is None:  # the session still has KV if the turn was never admitted
            session.last_until_s = now_s + session.last_s
            self._take(session, left, now_s)
        if session.turns:
            return
        if session.kv is None:
            if session.key in self._sessions:  # else it was evicted at once: all other sessions have a lease
                self._forget(session.key)
            return
        session.until_s = now_s + session.lease_s
        self._leases.set(session.key, session.until_s)

    # --- ends --------------------------------------------------------------------------------------------------------

    def evict_one(self, rank: int | None = None) -> bool:
        """Release the pages of the least recently used session, of this rank if one is given; False if none has any."""
        sessions = map(self._with_kv.__getitem__, self._order)
        for session in sessions:
            if rank is None or self.pool.rank_of(session.held.pages[0]) == rank:
                self.counts.evicted += 1
                self._drop(session)
                return True
        return False

    def end(self, client: str, name: str | None = None) -> None:
        """End a session, or all of a client's; a turn that runs goes on and leaves nothing."""
        for key in list(self._of_client.get(client, ())) if name is None else [(client, name)]:
            session = self._sessions.get(key)
            if session is not None:
                self._forget(key)
                session.over = True
                self._release(session)

    def expire(self, now_s: float) -> None:
        """End the sessions whose lease is over."""
        if not self._with_kv:
            return
        self._order.expire(now_s, lambda key: self._with_kv[key].turns > 0)
        for key in self._leases.take_over(now_s):
            self._drop(self._with_kv[key])

    def drop_older(self, oldest: int) -> None:
        """Release the pages of sessions with KV of a weights version before `oldest`."""
        for session in list(self._with_kv.values()):
            if session.held.oldest < oldest:
                self._drop(session)

    def check(self) -> None:
        """Assert that the books agree."""
        refs: dict[int, int] = {}
        for session in self._with_kv.values():
            kv = session.held
            assert not session.over
            assert kv.keys is NO_KEYS or len(kv.keys) >= len(kv.tokens) // self.page_size, "a page has no key"
            for page in kv.pages:
                refs[page] = refs.get(page, 0) + 1
        of_ranks = Counter(map(self.pool.rank_of, refs))
        assert self._pages_of == [of_ranks[rank] for rank in range(self.pool.ranks)], "a rank's pages are wrong"
        assert refs == self._refs and sum(refs.values()) == self._refs_sum, "sessions count their pages wrongly"
        self._order.check(self._with_kv.keys())
        assert self._unseen.keys() <= self._with_kv.keys(), "a session without pages is to be copied"
        assert not self._too_many, "sessions have more than they may"
        assert all(session.turns or session.kv for session in self._sessions.values()), "an empty session is left"
        assert {key for keys in self._of_client.values() for key in keys} == set(self._sessions), "a client's are wrong"
        assert all(self._of_client.values()), "a client without a session is left"

    # --- pages -------------------------------------------------------------------------------------------------------

    @property
    def unseen(self) -> bool:
        """Whether there are known pages that `look` has not returned."""
        return bool(self._unseen)

    def look(self) -> tuple[bytes, int]:
        """Key and number of a page that `look` has not returned: the last of the least recently used session.

        The key is empty if another page is known by it.
        """
        key, count = next(iter(self._unseen.items()))
        if count == 1:
            del self._unseen[key]
        else:
            self._unseen[key] = count - 1
        page = self._with_kv[key].held.pages[count - 1]
        return self.pool.key_of(page), page

    def _take(self, session: KeptSession, left: SessionKV, now_s: float) -> None:
        count = min(len(left.tokens), self._most_pages * self.page_size)
        if count == 0:
            return
        pages = left.pages[: -(-count // self.page_size)]
        for page in pages:
            self.pool.retain(page)
            self._pages_of[self.pool.rank_of(page)] += page not in self._refs
            self._refs[page] = self._refs.get(page, 0) + 1
        self._refs_sum += len(pages)
        # A copy: a view would keep the tokens of a whole prompt, though little of it was computed.
        snapshots = tuple(snapshot for snapshot in left.snapshots if snapshot.tokens <= count)
        for snapshot in snapshots:
            self.snapshots.retain(snapshot.place)
        session.kv = kv = SessionKV(left.tokens[:count].copy(), pages, left.oldest, left.keys, left.edition, snapshots)
        for end in self._ends(kv):
            self.snapshots.offer(end)
        self._with_kv[session.key] = session
        self._order.add(session.key, session.last_until_s, now_s)
        known = len(pages) - (not self.pool.key_of(pages[-1]))  # a half-full page may have no key
        if left.keys is not NO_KEYS and known:
            self._unseen[session.key] = known
        while self._too_many:
            self.evict_one()

    @property
    def _too_many(self) -> bool:
        most = self._most_pages
        return len(self._refs) > most or len(self._with_kv) > most or self._refs_sum > _SHARING * most

    def _ends(self, kv: SessionKV) -> list[CachedSnapshot]:
        """Snapshots that only this session has, with the pages in which their prefixes end."""
        return [
            CachedSnapshot(place, kv.pages[tokens // self.page_size] if point.after else 0, point, kv.oldest)
            for place, tokens, point in kv.snapshots
            if point.key
        ]

    def _drop(self, session: KeptSession) -> None:
        """Evict the session: its full pages and its snapshots stay in the cache."""
        for end in self._ends(session.held):
            self.snapshots.keep(end.point, end.place, end.page, end.oldest)
        self._release(session)
        if not session.turns:
            self._forget(session.key)

    def _forget(self, key: SessionKey) -> None:
        del self._sessions[key]
        del self._of_client[key[0]][key]
        if not self._of_client[key[0]]:
            del self._of_client[key[0]]

    def _release(self, session: KeptSession) -> None:
        if session.kv is None:
            return
        for page in reversed(session.kv.pages):  # the end of a prefix is evicted before its beginning
            self.pool.release(page)
            self._refs[page] -= 1
            if not self._refs[page]:
                del self._refs[page]
                self._pages_of[self.pool.rank_of(page)] -= 1
        self._refs_sum -= len(session.kv.pages)
        for end in self._ends(session.kv):
            self.snapshots.withdraw(end)
        for snapshot in session.kv.snapshots:
            self.snapshots.release(snapshot.place)
        session.kv = None
        del self._with_kv[session.key]
        self._order.drop(session.key)
        self._leases.drop(session.key)
        self._unseen.pop(session.key, None)

    # --- leases of other requests ------------------------------------------------------------------------------------

    def unnamed(self, request: Request, index: int) -> KeptSession:
        """A session for the KV of completion `index` of a request without a session; `keep` gives it the KV."""
        client, name = request.key
        key = client, f"{name:{MAX_ID_CHARS}}/{index}"  # longer than any name that a client gives
        session = self._sessions[key] = KeptSession(key, request.lease_s, turns=1, last_s=request.lease_s)
        self._of_client.setdefault(client, {})[key] = None
        return session
