"""KV that a new sequence need not compute: from its group, its session, or any sequence with the same beginning.

A page that another prefill computes next is not computed twice: that prefill's frontier is found by the page's key, and
the sequence waits without a page until the tokens that both have are launched (`Reusable.awaited`).

`Prefixes` serves models whose KV is pages alone. Models with states have `state_prefixes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.tier import KVTier, TierPrefix
from rollout.engine.sequence.sequence import Group, Sequence, SharedPrompt
from rollout.engine.sequence.sequence_kv import NO_KEYS, PrefixHit, PrefixKeys, Snapshot


@dataclass(slots=True)
class Reusable:
    """KV of a sequence's first tokens that is in the pool already."""

    shared: list[int] = field(default_factory=list)  # full pages, to be shared
    copied: int = 0  # the page after them, to be copied; 0 where the last shared page is full
    tokens: int = 0  # tokens with KV that the sequence can use
    session_tokens: int = 0  # tokens with KV in the session
    keys: PrefixKeys = NO_KEYS  # keys of the shared pages
    beyond: TierPrefix | None = None  # a longer known prefix, partly in a tier
    awaited: tuple[Sequence, int] | None = None  # a sequence that computes a longer prefix, and its end
    place: int = 0  # place of the snapshot to load, of the state after these tokens
    hit: PrefixHit = "pages"  # source of the KV
    oldest: int = 0  # weights version of a shared prompt's, a session's or a snapshot's KV

    @property
    def pages(self) -> list[int]:
        """The pages that have to stay as they are until the sequence has them, or a copy."""
        return [*self.shared, self.copied] if self.copied else self.shared

    def without_copy(self, page_size: int) -> Reusable:
        """The shared pages only; nothing where a state belongs to the page to copy."""
        if self.place:
            return Reusable(keys=self.keys.fork(0))
        tokens = len(self.shared) * page_size
        keys = self.keys.fork(len(self.shared))
        hit: PrefixHit = "pages" if self.hit == "prompt_end" else self.hit
        session_tokens = min(tokens, self.session_tokens)
        return Reusable(self.shared, 0, tokens, session_tokens, keys, hit=hit, oldest=self.oldest)


#: The content of positions `first` to `end`, in the form that keys are made from.
Content = Callable[[int, int], bytes]


class KnownPages(NamedTuple):
    """The known full pages at the beginning of a prompt."""

    pages: list[int]  # 0 for a page that only a tier has
    keys: PrefixKeys

    @property
    def in_pool(self) -> list[int]:
        """The pages before the first one that only a tier has."""
        return self.pages[: self.pages.index(0)] if 0 in self.pages else self.pages


class Prefixes:
    """Finds KV in the pool and in `sessions`. With `cache` it also makes KV of running sequences findable.

    The KV may belong to weights that are up to `max_age` versions old.
    """

    has_states = False

    def __init__(
        self, pool: PagePool, tier: KVTier, page_size: int, cache: bool, sessions: Sessions, max_age: int = 0
    ) -> None:
        self.pool = pool
        self.tier = tier
        self.page_size = page_size
        self.cache = cache
        self.sessions = sessions
        self.max_age = max_age
        #: Prefills under way, by the key of the page that comes next, or of the snapshot.
        self.frontiers: dict[bytes, Sequence] = {}

    # --- find ---------------------------------------------------------------------------------------------------------

    def find(self, seq: Sequence, version: int) -> Reusable:
        """KV that `seq` need not compute: the prompt of its group, else KV of its session or, if more, of the cache."""
        tokens, shared = seq.identity(seq.history()), seq.group.shared_prompt
        full = (len(tokens) - 1) // self.page_size  # the page of the last token is never shared: it is written again
        usable = (
            shared is not None
            and shared.oldest >= self.oldest_for(seq.group, version)
            and self._is_here(seq, shared.pages)
        )
        if shared is not None and usable and not seq.tokens:
            keys, place = shared.keys.fork(full), shared.place
            found = Reusable(shared.pages[:full], shared.pages[full], len(tokens) - 1, keys=keys, place=place)
            found.hit, found.oldest = "group", shared.oldest
            return found
        if seq.fresh_from is not None:  # the lookup ends at the first token that has to be computed
            tokens = tokens[: seq.fresh_from + 1]
        return self._find(seq, tokens, version) if len(tokens) > 1 else self._nothing(seq, version)

    def _nothing(self, seq: Sequence, version: int) -> Reusable:
        return Reusable(keys=self._no_keys(seq, version) if self.cache else NO_KEYS)

    def _find(self, seq: Sequence, tokens: np.ndarray, version: int) -> Reusable:
        """Pages of the session, then full ones of the cache, then the half-full page with the most tokens."""
        found = self._find_in_session(seq, tokens, version)
        if not self.cache:
            return found
        content, size, most = seq.content_between, self.page_size, len(tokens) - 1
        oldest, keys = self.oldest_for(seq.group, version), found.keys or self._no_keys(seq, version)
        known = self.known_pages(content, KnownPages(found.shared, keys), most // size, oldest)
        pages = known.in_pool
        found.keys = known.keys.fork(len(pages))
        if len(pages) > len(found.shared):
            found.shared, found.copied, found.tokens, found.hit = pages, 0, len(pages) * size, "pages"
        for page, end, hit in self.half_pages(content, found.keys, len(tokens), oldest):
            if end > found.tokens:
                found.copied, found.tokens, found.hit = page, end, hit
        if found.tokens < most:
            found.beyond = self._beyond(content, known, found, len(tokens), oldest)
        if found.tokens < most and not found.beyond:
            found.awaited = self._awaited(seq, tokens, found, oldest)
        return found

    def known_pages(self, content: Content, begin: KnownPages, full: int, oldest: int) -> KnownPages:
        """`begin`, and the known pages after it; `full` pages at most, none with a version before `oldest`."""
        size, pages, keys = self.page_size, list(begin.pages), begin.keys.fork(len(begin.pages))
        for start in range(len(pages) * size, full * size, size):
            key = keys.next_key(content(start, start + size))
            page = self.pool.find(key, oldest)
            if not page and not self.tier.has(key, oldest):
                break
            pages.append(page)
            keys.append(key)
        return KnownPages(pages, keys)

    def half_pages(
        self, content: Content, keys: PrefixKeys, tokens: int, oldest: int
    ) -> Iterator[tuple[int, int, PrefixHit]]:
        """Pages of the pool that can be copied after the full ones with `keys`: (page, tokens with KV, source).

        The prompt has this many tokens; the last one is computed in any case.
        """
        if len(keys) == (tokens - 1) // self.page_size:
            key, full = self._next_key(content, keys, tokens)
            if page := self.pool.find(key, oldest) if full else self.pool.find_tail(key, oldest):
                yield page, tokens - 1, "prompt_end"
        for key, end in self.find_end(content, keys, tokens, oldest):
            if page := self.pool.find(key, oldest):
                yield page, min(end, tokens - 1), "turn_end"

    def _beyond(
        self, content: Content, known: KnownPages, found: Reusable, tokens: int, oldest: int
    ) -> TierPrefix | None:
        """A tier's known pages, and the half-full page after them, if they have more tokens than `found`."""
        ends = self.find_end(content, known.keys, tokens, oldest)
        half = [key for key, end in ends if min(end, tokens - 1) > found.tokens][:1]
        keys = [*known.keys][len(found.shared) :] + half
        return TierPrefix(found.shared, keys, half=bool(half)) if keys else None

    def find_end(self, content: Content, keys: PrefixKeys, most: int, oldest: int) -> Iterator[tuple[bytes, int]]:
        """Known ends of turns in the page after those with `keys`, longest first: (key, tokens), `most` at most."""
        pages = len(keys)
        start = pages * self.page_size
        for after in self.pool.ends.after(keys.last):
            if start + after <= most:
                key = keys.end(pages, content(start, start + after), after).key
                if self.pool.find(key, oldest) or self.tier.has(key, oldest):
                    yield key, start + after

    def _next_key(self, content: Content, keys: PrefixKeys, tokens: int) -> tuple[bytes, bool]:
        """The key of the page after the pages with `keys`, and whether this many tokens fill it."""
        start = len(keys) * self.page_size
        end = min(start + self.page_size, tokens)
        if end == start + self.page_size:
            return keys.next_key(content(start, end)), True
        return keys.end(len(keys), content(start, end), end - start).key, False

    def _awaited(self, seq: Sequence, tokens: np.ndarray, found: Reusable, oldest: int) -> tuple[Sequence, int] | None:
        """The prefill that computes the next page, and how many of its tokens `seq` can use, if they are more.

        A sequence does not wait for one of lower priority, which may itself wait for long.
        """
        key = self._next_key(seq.content_between, found.keys, len(tokens))[0] if self.frontiers else b""
        if key not in self.frontiers:
            return None
        other = self.frontiers[key]
        if other.kv.oldest < oldest or not other.kv.prefilling or other.priority < seq.priority:
            return None
        theirs = other.identity(other.kv.prefill_tokens)
        most = min(len(theirs), len(tokens))
        differ = np.flatnonzero(theirs[:most] != tokens[:most])
        same = int(differ[0]) if len(differ) else most
        if same == len(tokens) and (same == len(theirs) or same % self.page_size == 0):
            return other, same  # the last page of `other` will be copied
        usable = min(same, len(tokens) - 1) // self.page_size * self.page_size
        return (other, usable) if usable > max(found.tokens, other.kv.length) else None

    def no_keys(self, version: int, edition: int, rank: int = 0) -> PrefixKeys:
        """The keys of a prefix without pages; without the weights version if KV of several ones is used."""
        return PrefixKeys.begin(0 if self.max_age else version, edition, rank)

    def _no_keys(self, seq: Sequence, version: int) -> PrefixKeys:
        return self.no_keys(version, seq.group.variant.edition, seq.kv.rank)

    def _is_here(self, seq: Sequence, pages: list[int]) -> bool:
        """True if the rank of a sequence has these pages of another one."""
        return self.pool.rank_of(pages[0]) == seq.kv.rank

    def _find_in_session(self, seq: Sequence, tokens: np.ndarray, version: int) -> Reusable:
        if seq.group.session is None:
            return Reusable()
        oldest = self.oldest_for(seq.group, version)
        kv, same = self.sessions.match(seq.group.session, tokens, oldest, seq.group.variant.edition)
        if kv is None or not self._is_here(seq, kv.pages):
            return Reusable()
        full = same // self.page_size
        copied = kv.pages[full] if same % self.page_size else 0
        return Reusable(kv.pages[:full], copied, same, same, kv.keys.fork(full), hit="turn_end", oldest=kv.oldest)

    # --- age ----------------------------------------------------------------------------------------------------------

    def oldest_for(self, group: Group, version: int) -> int:
        """The oldest weights version in KV that a group may use, besides its sequences' own."""
        asked = group.request.max_kv_age if group.fresh_from is None else 0
        return version - (self.max_age if asked is None else min(asked, self.max_age))

    def of_use(self, seq: Sequence, version: int) -> bool:
        """True if other sequences may use the KV of `seq`: it is young enough, and of one edition."""
        return seq.kv.oldest >= version - self.max_age and seq.kv.edition == seq.group.variant.edition

    def findable(self, seq: Sequence, version: int) -> bool:
        """True if other sequences may find the KV of `seq`, and use it."""
        return seq.kv.keys is not NO_KEYS and self.of_use(seq, version)

    def may_go_on(self, seq: Sequence, version: int) -> bool:
        """True if a sequence that has launched nothing may use what it found before the weights had this version."""
        return self.max_age > 0 and self.of_use(seq, version) and seq.kv.oldest >= self.oldest_for(seq.group, version)

    def too_old(self, group: Group, version: int) -> bool:
        """True if a group cannot use its shared prompt under this version."""
        return group.shared_prompt is not None and group.shared_prompt.oldest < self.oldest_for(group, version)

    def versions(self, found: Reusable) -> list[list[int]]:
        """Runs of [oldest weights version, tokens] of the found KV, by page."""
        runs: list[list[int]] = []
        for index, page in enumerate(found.pages):
            tokens = min(self.page_size, found.tokens - index * self.page_size)
            oldest = self.pool.oldest_of(page, found.oldest)
            if found.place:  # the state after these tokens is as old as the oldest of them
                oldest = min(oldest, found.oldest)
            if runs and runs[-1][0] == oldest:
                runs[-1][1] += tokens
            elif tokens:
                runs.append([oldest, tokens])
        return runs

    # --- room ---------------------------------------------------------------------------------------------------------

    @property
    def snapshots_used_pct(self) -> float:
        """Places of snapshots that are in use; 0 without states."""
        return 0.0

    @property
    def evictable(self) -> int:
        """Pages that `evict_one` can make available."""
        return self.sessions.pages

    def evictable_of(self, rank: int) -> int:
        """Pages of this rank that `evict_one` can make available."""
        return self.sessions.pages_of(rank)

    def evict_one(self, rank: int) -> bool:
        """Have an idle session of this rank give up its pages; False if none has any."""
        return self.sessions.evict_one(rank)

    # --- a sequence runs ----------------------------------------------------------------------------------------------

    def retain(self, reusable: Reusable) -> None:
        """Retain the snapshot of the found KV until the sequence has it."""

    def release(self, reusable: Reusable) -> None:
        """Take `retain` back."""

    def admitted(self, seq: Sequence, version: int) -> None:
        """Note that a sequence has got its found pages, and prefills the rest."""
        self._move_frontier(seq, version)

    def restored(self, seq: Sequence, version: int) -> None:
        """Make the pages that a tier has given back to a sequence findable again."""
        kv = seq.kv
        if self.findable(seq, version):
            for key, page in zip(kv.keys, kv.pages, strict=False):
                self.pool.remember(key, page, kv.oldest)

    def launched(self, seq: Sequence, version: int) -> None:
        """Note that a step in flight computes more of the sequence's KV, up to its length."""
        self.remember(seq, seq.kv.length, version)
        self._move_frontier(seq, version)

    def loaded(self, seq: Sequence) -> None:
        """Note that the first chunk of a sequence is launched or cancelled."""

    def remember(self, seq: Sequence, known: int, version: int) -> None:
        """Make full pages of the first `known` tokens findable, if others may use them under `version`."""
        kv = seq.kv
        if not self.findable(seq, version):
            return
        for index in range(len(kv.keys), min(known, kv.length) // self.page_size):
            start = index * self.page_size
            key = kv.keys.next_key(seq.content_between(start, start + self.page_size))
            kv.keys.append(key)
            self.pool.remember(key, kv.pages[index], kv.oldest)

    def remember_turn(self, seq: Sequence, known: int, version: int) -> None:
        """Make the first `known` tokens of a settled turn findable, and the half-full page in which they end."""
        self.remember(seq, known, version)
        kv, (full, after) = seq.kv, divmod(known, self.page_size)
        if after and len(kv.keys) == full and self.findable(seq, version):
            end = kv.keys.end(full, seq.content_between(known - after, known), after)
            self.pool.remember(end.key, kv.pages[full], kv.oldest)
            self.pool.ends.note(end.digest, after)

    def _move_frontier(self, seq: Sequence, version: int) -> None:
        """Move the frontier to the next page; after the last launch the tail of the prompt can be found."""
        self.drop_frontier(seq)
        kv, page_size = seq.kv, self.page_size
        if not kv.prefilling or not self.findable(seq, version):
            return
        start, end = len(kv.keys) * page_size, len(kv.prefill_tokens)
        if start == end:
            return
        page_key, _ = self._next_key(seq.content_between, kv.keys, end)
        if kv.length == end:
            self.pool.remember_tail(page_key, kv.pages[start // page_size], kv.oldest)
        else:
            self.set_frontier(seq, page_key)

    def set_frontier(self, seq: Sequence, key: bytes) -> None:
        """Let other sequences wait until this prefill computes the page or snapshot with this key."""
        seq.kv.frontier = key
        other = self.frontiers.get(key)
        if other is None or other.priority < seq.priority:  # a sequence does not wait for one of lower priority
            self.frontiers[key] = seq

    def drop_frontier(self, seq: Sequence) -> None:
        """End the waits for this prefill's frontier: the prefill has moved on, or it stops."""
        key, seq.kv.frontier = seq.kv.frontier, b""
        if self.frontiers.get(key) is seq:
            del self.frontiers[key]

    # --- a sequence ends ----------------------------------------------------------------------------------------------

    def turn_end(self, seq: Sequence, known: int) -> tuple[int, tuple[Snapshot, ...]]:
        """Tokens of a settled turn from which its session can go on, at most `known`; and the snapshots for it.

        The caller has a reference to each snapshot, until `turn_kept`.
        """
        return known, ()

    def turn_kept(self, snapshots: tuple[Snapshot, ...]) -> None:
        """Note that the session has taken the turn's KV."""

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """States that the next step begins by saving: (row, place of a snapshot)."""
        return ()

    def left(self, seq: Sequence) -> None:
        """Note that a sequence gives its pages back."""

    def share(self, seq: Sequence, pages: list[int]) -> SharedPrompt | None:
        """The prompt of a prefilled first member for its group; None if it cannot be shared."""
        return SharedPrompt(pages, seq.kv.oldest, seq.kv.keys)

    def unshare(self, shared: SharedPrompt) -> None:
        """Release the prompt of the group."""

    def forget_older(self, oldest: int) -> None:
        """Drop snapshots with a weights version before `oldest`."""

    def check(self) -> set[int]:
        """Assert that nothing leaked; returns pages that are kept in addition to the sessions' pages."""
        assert not self.frontiers, "a prefill is waited for"
        return set()
