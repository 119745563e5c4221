"""Prefixes of models with states of linear attention: KV of a prefix is usable only with the state after it.

So a shared prompt has a snapshot of the state, a session has snapshots of its prompt and of its end, and the prefix
cache is searched for prefixes that end at a snapshot. Every prefill saves a snapshot before the last token of its
prompt, if there is a place.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.prefixes import Content, KnownPages, Prefixes, Reusable
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.snapshots import CachedSnapshot, Snapshots
from rollout.engine.kv.tier import KVTier, TierPrefix
from rollout.engine.sequence.sequence import Sequence, SharedPrompt
from rollout.engine.sequence.sequence_kv import (
    NO_KEYS,
    NO_POINT,
    NO_SNAPSHOT,
    PrefixEnd,
    PrefixHit,
    PrefixKeys,
    Snapshot,
)
from rollout.metrics.samples import percent


class KnownEnd(NamedTuple):
    """An end of a prefix of a prompt at which a snapshot is known or expected."""

    tokens: int
    pages: int  # full pages
    point: PrefixEnd
    cached: CachedSnapshot | None  # its snapshot, if that is cached


_NO_END = KnownEnd(0, 0, NO_POINT, None)


class StatePrefixes(Prefixes):
    """Finds KV that ends at a snapshot, and saves snapshots."""

    has_states = True

    def __init__(
        self,
        pool: PagePool,
        tier: KVTier,
        page_size: int,
        cache: bool,
        sessions: Sessions,
        max_age: int,
        snapshots: Snapshots,
    ) -> None:
        super().__init__(pool, tier, page_size, cache, sessions, max_age)
        self.snapshots = snapshots

    # --- find ---------------------------------------------------------------------------------------------------------

    def _find(self, seq: Sequence, tokens: np.ndarray, version: int) -> Reusable:
        """The longest known prefix of `tokens` that ends at a snapshot, in the session or in the cache."""
        found = self._find_in_session(seq, tokens, version)
        if not self.cache:
            return found
        content, most, oldest = seq.content_between, len(tokens) - 1, self.oldest_for(seq.group, version)
        begin = KnownPages([], self._no_keys(seq, version))
        found.keys = found.keys or begin.keys
        known = self.known_pages(content, begin, most // self.page_size, oldest)
        ends = list(self.ends(content, known.keys, most, oldest))
        cached, in_tier = self.longest_cached(ends, known), self.longest_in_tier(ends, known, oldest)
        if cached.tokens > found.tokens:
            found = self._reusable(cached, known, found.session_tokens)
        if in_tier.tokens > found.tokens:
            pages = known.in_pool[: in_tier.pages]
            keys, point = [*known.keys][len(pages) : in_tier.pages], NO_POINT if in_tier.cached else in_tier.point
            found.beyond = TierPrefix(pages, keys, point)
        awaited = self.longest_awaited(ends, seq, oldest)
        if awaited.tokens > max(found.tokens, in_tier.tokens):
            found.awaited = self.frontiers[awaited.point.key], awaited.tokens + 1
        return found

    def ends(self, content: Content, keys: PrefixKeys, most: int, oldest: int) -> Iterator[KnownEnd]:
        """The known ends after pages with `keys`, within `most` tokens, and those that prefills may be computing."""
        size, keys = self.page_size, keys.fork(len(keys))
        for pages, start in enumerate(range(0, most + 1, size)):
            if pages > len(keys):
                if not self.frontiers:
                    return
                keys.append(keys.next_key(content(start - size, start)))
            digest = keys.digest(pages)
            for after in {*self.snapshots.tokens_after(digest), *self.pool.ends.after(digest)}:
                if (end := start + after) <= most:
                    point = keys.end(pages, content(start, end), after)
                    yield KnownEnd(end, pages, point, self.snapshots.find(point.key, oldest))

    def longest_cached(self, ends: list[KnownEnd], known: KnownPages) -> KnownEnd:
        """The end that can be used now."""
        most = len(known.in_pool)
        return _longest(end for end in ends if end.cached and end.pages <= most)

    def longest_in_tier(self, ends: list[KnownEnd], known: KnownPages, oldest: int) -> KnownEnd:
        """The end that can be used once a tier has given back what the pool and the cache lack."""
        reached = (end for end in ends if end.pages <= len(known.pages))
        return _longest(end for end in reached if end.cached or self.tier.has_end(end.point, end.tokens, oldest))

    def longest_awaited(self, ends: list[KnownEnd], seq: Sequence, oldest: int) -> KnownEnd:
        """The end that a prefill computes next with at least the priority of `seq`."""

        def comes(other: Sequence) -> bool:
            return other.priority >= seq.priority and other.kv.oldest >= oldest

        expected = (end for end in ends if end.point.key in self.frontiers)
        return _longest(end for end in expected if comes(self.frontiers[end.point.key]))

    def _reusable(self, end: KnownEnd, known: KnownPages, session_tokens: int) -> Reusable:
        assert end.cached
        pages, keys, (place, half, _, oldest) = known.pages[: end.pages], known.keys.fork(end.pages), end.cached
        return Reusable(pages, half, end.tokens, session_tokens, keys, place=place, hit="prompt_end", oldest=oldest)

    def _find_in_session(self, seq: Sequence, tokens: np.ndarray, version: int) -> Reusable:
        if seq.group.session is None:
            return Reusable()
        oldest = self.oldest_for(seq.group, version)
        kv, same = self.sessions.match(seq.group.session, tokens, oldest, seq.group.variant.edition)
        void = self.snapshots.is_void
        known = () if kv is None else kv.snapshots
        snapshot = next((s for s in known if s.tokens <= same and not void(s.place)), None)
        if kv is None or snapshot is None:
            return Reusable()
        full, after = divmod(snapshot.tokens, self.page_size)
        place, end, keys = snapshot.place, snapshot.tokens, kv.keys.fork(full)
        copied = kv.pages[full] if after else 0
        hit: PrefixHit = "turn_end" if end == len(kv.tokens) else "prompt_end"
        return Reusable(kv.pages[:full], copied, end, end, keys, place=place, hit=hit, oldest=kv.oldest)

    # --- room ---------------------------------------------------------------------------------------------------------

    @property
    def snapshots_used_pct(self) -> float:
        return percent(self.snapshots.used, len(self.snapshots.places))

    @property
    def evictable(self) -> int:
        """Pages of sessions and of cached snapshots."""
        return self.sessions.count_alone(self.snapshots.pages)

    def evictable_of(self, rank: int) -> int:
        """Equal to `evictable`: rows with states are not dealt to ranks."""
        return self.evictable

    def evict_one(self, rank: int) -> bool:
        """Have an idle session, or a cached snapshot that keeps a page, give up its pages; False if there is none."""
        return self.sessions.evict_one() or self.snapshots.evict_page()

    # --- a sequence runs ----------------------------------------------------------------------------------------------

    def retain(self, reusable: Reusable) -> None:
        """Retain the snapshot: making room may evict its session."""
        if reusable.place:
            self.snapshots.retain(reusable.place)

    def release(self, reusable: Reusable) -> None:
        if reusable.place:
            self.snapshots.release(reusable.place)

    def admitted(self, seq: Sequence, version: int) -> None:
        """See `Prefixes`; plan a snapshot within the prefill."""
        self._plan_snapshot(seq)
        self._move_frontier(seq, version)

    def _plan_snapshot(self, seq: Sequence) -> None:
        """Take a place for the snapshot before the last token of the prompt, if its prefill goes past that.

        If only the last tokens of a prompt need fresh KV, it is taken before them: other prompts may share the rest.
        """
        kv, tokens = seq.kv, seq.prompt_len - 1
        if not (seq.group.others or seq.group.session):
            tokens = seq.fresh_from or tokens
        if kv.length >= tokens or not (self.cache or seq.group.others or seq.group.session):
            return
        if place := self._take_place(bool(seq.group.others)):
            kv.snapshots.planned = Snapshot(place, tokens, self._point_of(seq, tokens))

    def _point_of(self, seq: Sequence, tokens: int) -> PrefixEnd:
        """The end of a prefix of this many tokens; `NO_POINT` without a prefix cache."""
        if seq.kv.keys is NO_KEYS:
            return NO_POINT
        full, after = divmod(tokens, self.page_size)
        keys = seq.kv.keys.fork(full)
        for start in range(len(keys) * self.page_size, full * self.page_size, self.page_size):
            keys.append(keys.next_key(seq.content_between(start, start + self.page_size)))
        return keys.end(full, seq.content_between(tokens - after, tokens), after)

    def _take_place(self, evict_sessions: bool) -> int:
        while not self.snapshots.has_place and evict_sessions and self.sessions.evict_one():
            pass
        return self.snapshots.take() if self.snapshots.has_place else 0

    def launched(self, seq: Sequence, version: int) -> None:
        """See `Prefixes`; if the chunk in flight began with the save of a snapshot, other sequences may use that."""
        self.remember(seq, seq.kv.length, version)
        self._snapshot_launched(seq, version)
        self._move_frontier(seq, version)

    def remember_turn(self, seq: Sequence, known: int, version: int) -> None:
        """See `Prefixes`; the end of the turn is a snapshot."""
        self.remember(seq, known, version)

    def _snapshot_launched(self, seq: Sequence, version: int) -> None:
        kv, planned, snapshots = seq.kv, seq.kv.snapshots.planned, self.snapshots
        if kv.length <= planned.tokens:
            return
        self.drop_frontier(seq)
        kv.snapshots.planned = NO_SNAPSHOT
        if not self.of_use(seq, version):
            snapshots.release(planned.place)
            return
        kv.snapshots.saved = Snapshot(planned.place, planned.tokens)
        if planned.point.key:
            page = kv.pages[planned.tokens // self.page_size] if planned.point.after else 0
            snapshots.keep(planned.point, planned.place, page, kv.oldest)

    def loaded(self, seq: Sequence) -> None:
        """Release the snapshot that the first chunk of the sequence loads."""
        if seq.kv.snapshots.load_from:
            self.snapshots.release(seq.kv.snapshots.load_from)
            seq.kv.snapshots.load_from = 0

    def _move_frontier(self, seq: Sequence, version: int) -> None:
        """Its prefill computes the planned snapshot next."""
        self.drop_frontier(seq)
        kv = seq.kv
        if not kv.prefilling or not self.findable(seq, version):
            return
        point = kv.snapshots.planned.point
        if point.key:
            self.snapshots.expect(point)
            self.set_frontier(seq, point.key)

    def drop_frontier(self, seq: Sequence) -> None:
        if seq.kv.frontier:
            self.snapshots.expect_no_more(seq.kv.snapshots.planned.point)
        super().drop_frontier(seq)

    # --- a sequence ends ----------------------------------------------------------------------------------------------

    def turn_end(self, seq: Sequence, known: int) -> tuple[int, tuple[Snapshot, ...]]:
        """Snapshots from which the session can continue, longest first.

        The state of the row has seen `kv.length` tokens. If the last of them are none of the completion's, because it
        ended while they were in flight, only the snapshot of the prompt is left.
        """
        kv, kept = seq.kv, list[Snapshot]()
        if known == kv.length > 0 and seq.row_ready and (place := self._take_place(True)):
            self.snapshots.save_soon(seq.row, place)
            kept.append(Snapshot(place, known, self._point_of(seq, known)))
        if kv.snapshots.saved.tokens <= known:
            self.snapshots.retain(kv.snapshots.saved.place)
            kept.append(kv.snapshots.saved)
        return (kept[0].tokens if kept else 0), tuple(kept)

    def turn_kept(self, snapshots: tuple[Snapshot, ...]) -> None:
        for snapshot in snapshots:
            self.snapshots.release(snapshot.place)

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        return self.snapshots.take_saves()

    def left(self, seq: Sequence) -> None:
        """Give the sequence's places back. It is settled, so its saved snapshots may be copied to the host."""
        planned, saved = seq.kv.snapshots.planned.place, seq.kv.snapshots.saved.place
        if saved:
            self.snapshots.settled(saved)
        for place in filter(None, (planned, saved)):
            self.snapshots.release(place)
        seq.kv.snapshots.planned = seq.kv.snapshots.saved = NO_SNAPSHOT

    def share(self, seq: Sequence, pages: list[int]) -> SharedPrompt | None:
        """See `Prefixes`; the snapshot before the last token of the prompt belongs to it."""
        if seq.prompt_len == 1:  # no state exists before the only token of the prompt
            return super().share(seq, pages)
        if seq.kv.snapshots.saved.tokens != seq.prompt_len - 1:
            return None
        self.snapshots.retain(seq.kv.snapshots.saved.place)
        return SharedPrompt(pages, seq.kv.oldest, seq.kv.keys, seq.kv.snapshots.saved.place)

    def unshare(self, shared: SharedPrompt) -> None:
        if shared.place:
            self.snapshots.release(shared.place)

    def forget_older(self, oldest: int) -> None:
        self.snapshots.forget_older(oldest)

    def check(self) -> set[int]:
        super().check()
        self.snapshots.check(self.sessions.places)
        return self.snapshots.pages


def _longest(ends: Iterable[KnownEnd]) -> KnownEnd:
    return max(ends, key=lambda end: end.tokens, default=_NO_END)
