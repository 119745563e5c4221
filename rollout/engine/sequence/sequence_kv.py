"""The KV of one sequence, and of a session between its turns: plain data.

`allocator` gives a sequence pages. While a preempted sequence is offloaded, its KV is in a tier (`kv/tier.py`), and it
has no pages of its own. A new admission gives the sequence pages; the offloaded pages are needed until the next step is
launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Literal, NamedTuple, get_args

import numpy as np

from rollout.engine.messages.requests import RequestKey, SessionKey


class PrefixKeys:
    """The digests of one sequence's full pages, made page by page as its tokens become known.

    By these keys other sequences find the pages (`kv/pool`).
    """

    def __init__(self, digests: list[bytes]) -> None:
        self._digests = digests  # Digests of the first 0, 1, 2, ... pages.

    @classmethod
    def begin(cls, version: int, edition: int = 0, rank: int = 0) -> PrefixKeys:
        """The keys of no page, under this weights version; rank and edition of the variant are part of all keys."""
        of_variant = edition.to_bytes(8, "little") if edition else b""
        of_rank = b"rank" + rank.to_bytes(4, "little") if rank else b""
        return cls([blake2b(version.to_bytes(8, "little") + of_variant + of_rank, digest_size=16).digest()])

    def __len__(self) -> int:
        return len(self._digests) - 1

    def __getitem__(self, index: int) -> bytes:
        return self._digests[index + 1]

    def __iter__(self) -> Iterator[bytes]:
        return islice(self._digests, 1, None)

    @property
    def last(self) -> bytes:
        """The digest of all present full pages."""
        return self._digests[-1]

    def digest(self, pages: int) -> bytes:
        """The digest of the first `pages` pages."""
        return self._digests[pages]

    def fork(self, pages: int) -> PrefixKeys:
        """A copy with the keys of the first `pages` pages, to go on with another content."""
        return PrefixKeys(self._digests[: pages + 1])

    def next_key(self, content: bytes) -> bytes:
        """The key of the next page if it has this content (of `page_size` positions)."""
        return blake2b(content, key=self.last, digest_size=16).digest()

    def end(self, pages: int, content: bytes, positions: int) -> PrefixEnd:
        """The end of a prefix of the first `pages` pages and as many positions after them, which have this content.

        The number is in the key, because the content of a position after a video is longer than a token's.
        """
        digest, person = self._digests[pages], b"tail" + positions.to_bytes(4, "little")
        return PrefixEnd(digest, positions, blake2b(content, key=digest, digest_size=16, person=person).digest())

    def append(self, key: bytes) -> None:
        """Add the key of the next page."""
        self._digests.append(key)


class _NoKeys(PrefixKeys):
    """The keys of KV that only its sequence finds: none, however many pages it has."""

    def fork(self, pages: int) -> PrefixKeys:
        return self

    def append(self, key: bytes) -> None:
        raise AssertionError("KV that others do not find gets no key")


NO_KEYS: PrefixKeys = _NoKeys([b""])


#: The source of KV that a sequence reuses: its group; full pages in the cache; a whole prompt in the
#: cache; the end of the last turn of its session, or as much of it as the turn agrees with.
PrefixHit = Literal["group", "pages", "prompt_end", "turn_end"]
NO_TOKENS = np.zeros(0, np.int32)
PREFIX_HITS: tuple[PrefixHit, ...] = get_args(PrefixHit)


class PrefixEnd(NamedTuple):
    """The end of a prefix."""

    digest: bytes  # digest of its full pages
    after: int  # tokens after them
    key: bytes  # key of all tokens of the prefix


NO_POINT = PrefixEnd(b"", 0, b"")


class Snapshot(NamedTuple):
    """A state after a prefix, in a place of the state pool, or planned to be there."""

    place: int
    tokens: int  # length of the prefix
    point: PrefixEnd = NO_POINT  # its end, with a prefix cache


#: It has no place, and no prefix is that long.
NO_SNAPSHOT = Snapshot(0, 1 << 63)


@dataclass(eq=False, slots=True)
class SnapshotUse:
    """The snapshots of one sequence of a model with states. It has a reference to each of these places."""

    load_from: int = 0  # place of the snapshot that the first chunk loads; until that is launched; 0: none
    planned: Snapshot = NO_SNAPSHOT  # the snapshot that its prefill will save
    saved: Snapshot = NO_SNAPSHOT  # the snapshot that its prefill has saved


@dataclass(eq=False, slots=True)
class KVContent:
    """KV of a sequence's first positions, and what it depends on."""

    length: int = 0  # positions
    oldest: int = 0  # oldest weights version in it: later KV has newer versions
    edition: int = 0  # edition of the sequence's variant at its start
    keys: PrefixKeys = NO_KEYS  # keys of its full pages


class InTier:
    """A tier's data on one sequence. This base class is for a worker without a tier."""

    __slots__ = ()

    @property
    def is_offloaded(self) -> bool:
        """See `SequenceKV`."""
        return False

    @property
    def restoring(self) -> bool:
        """See `SequenceKV`."""
        return False


NOT_IN_TIER = InTier()


class Prefill(NamedTuple):
    """A prefill: it computed the KV of the prompt and of these tokens."""

    tokens: int
    version: int  # weights version
    edition: int  # edition of the sequence's variant


@dataclass(eq=False, slots=True)
class SequenceKV(KVContent):
    """The KV of a sequence in the pool, once everything launched has run; empty while it has no row."""

    pages: list[int] = field(default_factory=list)
    rank: int = 0  # rank that has its pages, if rows are dealt to ranks
    capacity: int = 0  # tokens that fit in `pages`
    #: All tokens that the prefill under way goes through, int32; empty if none is.
    prefill_tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    #: The prefill computes the last token only, after KV that the row has: it was decoding, and draws a token again.
    drawn_again: bool = False
    copy_source: int = 0  # page to copy in the first chunk; referenced until that is launched; 0: none
    hit: PrefixHit | None = None  # source of the KV that it reused at its last admission
    in_tier: InTier = NOT_IN_TIER
    prefills: list[Prefill] = field(default_factory=list)
    #: Reused KV: (completion length at admission, oldest weights version, reused tokens). Empty where only KV of the
    #: present weights is used.
    found: tuple[tuple[int, int, int], ...] = ()
    #: Key of the page, or of the snapshot, that its prefill computes next; other sequences may wait for it.
    frontier: bytes = b""
    snapshots: SnapshotUse = field(default_factory=SnapshotUse)

    @property
    def prefilling(self) -> bool:
        """True while a prefill is under way."""
        return len(self.prefill_tokens) > 0

    @property
    def restoring(self) -> bool:
        """True while its prefill waits for copies from the host."""
        return self.in_tier.restoring

    @property
    def is_offloaded(self) -> bool:
        """True while a tier has its KV from before a preemption: until the next step is launched."""
        return self.in_tier.is_offloaded

    @property
    def chunk_end(self) -> int:
        """The latest end of the next chunk of its prefill: a state is saved between two steps."""
        end, planned = len(self.prefill_tokens), self.snapshots.planned.tokens
        return min(planned, end) if self.length < planned else end

    def copies_to(self, page: int) -> tuple[tuple[int, int], ...]:
        """The copy of a page with which its next chunk begins, if any: (source, `page`)."""
        return ((self.copy_source, page),) if self.copy_source else ()

    def saves_of(self, row: int) -> tuple[tuple[int, int], ...]:
        """The save of the row's state with which its next chunk begins, if any: (row, place)."""
        planned = self.snapshots.planned
        return ((row, planned.place),) if self.length == planned.tokens else ()

    def loads_of(self, row: int) -> tuple[tuple[int, int], ...]:
        """The load of the row's state with which its next chunk begins, if any: (place, row)."""
        return ((self.snapshots.load_from, row),) if self.snapshots.load_from else ()

    def add_pages(self, pages: Iterable[int], page_size: int) -> None:
        """Append pages to the sequence's table."""
        self.pages.extend(pages)
        self.capacity = len(self.pages) * page_size

    def give_up_pages(self) -> None:
        """Forget the pages, which have other owners now: no KV of the sequence is in the pool."""
        self.pages = []
        self.capacity = self.length = 0
        self.prefill_tokens, self.keys = NO_TOKENS, NO_KEYS
        self.drawn_again = False

    def begin_prefill(self, tokens: int) -> None:
        """A prefill starts at position 0: forget the record of an unfinished one of the same tokens."""
        while self.prefills and self.prefills[-1].tokens == tokens:
            self.prefills.pop()

    def note_found(self, tokens: int, runs: Iterable[Iterable[int]]) -> None:
        """The sequence, with this number of tokens, gets a row and KV: runs of (oldest weights version, tokens)."""
        before = [run for run in self.found if run[0] < tokens]
        self.found = (*before, *((tokens, oldest, count) for oldest, count in runs))

    def found_older(self, tokens: int, version: int) -> int:
        """Positions whose KV was found when the sequence had this number of tokens, of weights before `version`."""
        return sum(count for at, oldest, count in self.found if at == tokens and oldest < version)

    def note_prefill(self, start: int, end: int, prefill: Prefill, consumed: int) -> None:
        """Note that `prefill` writes KV of positions start..end-1; the drawn tokens depend on `consumed` positions."""
        # Restored or kept KV lacks only the last token.
        whole = self.own and start == consumed
        if not whole and prefill not in self.prefills[-1:]:
            self.prefills.append(prefill)
        if start == 0:
            self.oldest = prefill.version

    def take_back(self, refused: int) -> None:
        """Remove the last `refused` positions, which hold no tokens of the sequence."""
        self.length -= refused

    @property
    def own(self) -> bool:
        """True if a prefill continues after its own KV without a set-up row on the device."""
        return self.is_offloaded or self.drawn_again

    @property
    def recomputed(self) -> tuple[tuple[int, int], ...]:
        """(tokens, version) of each prefill of more than the prompt, and of the prompt if it had several."""
        one_of_prompt = [prefill.tokens for prefill in self.prefills].count(0) == 1
        return tuple((prefill.tokens, prefill.version) for prefill in self.prefills[one_of_prompt:])


# --- of sessions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionKV:
    """The KV of a session."""

    tokens: np.ndarray  # int32 or int64 [tokens]: the tokens of the KV, as in `Sequence.identity`
    pages: list[int]  # the last one may be half full
    oldest: int  # oldest weights version of the KV
    keys: PrefixKeys  # keys of at least all full pages; none without a prefix cache
    edition: int = 0  # edition of its variant
    snapshots: tuple[Snapshot, ...] = ()  # models with states, longest first: KV is usable up to a snapshot


@dataclass(eq=False, slots=True)
class KeptSession:
    """One conversation; `kv/sessions` has the books of all."""

    key: SessionKey
    lease_s: float
    turns: int = 0  # submitted turns that are not settled: the last one, and earlier ones with steps in flight
    turn: RequestKey | None = None  # the last turn
    over: bool = False  # the session was ended: it keeps no KV
    kv: SessionKV | None = None
    until_s: float = 0.0  # end of its lease, while it has no turn
    last_s: float = 0.0  # time after a turn in which it is evicted after others
    last_until_s: float = 0.0  # end of that time, while it has no turn

    @property
    def held(self) -> SessionKV:
        """Its KV; only for a session that has some."""
        assert self.kv is not None
        return self.kv
