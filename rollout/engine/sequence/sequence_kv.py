"""The KV of one sequence: plain data. `allocator` gives it pages, `offload` copies it to the host and back.

While a sequence is offloaded, its KV is in `SequenceKV.offloaded`, and it has no pages of its own. When it is admitted
again it gets pages, and it needs the offloaded ones until its next step is launched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np

from rollout.engine.sequence.prefix_keys import PrefixKeys

#: Where KV was found that a sequence does not compute: with its group; full pages in the cache; a whole prompt in the
#: cache; the end of the last turn of its session, or as much of it as the turn agrees with.
PrefixHit = Literal["group", "pages", "prompt_end", "turn_end"]
PREFIX_HITS: tuple[PrefixHit, ...] = get_args(PrefixHit)


class Point(NamedTuple):
    """Where a prefix ends."""

    digest: bytes  # of its full pages
    after: int  # tokens after them
    key: bytes  # of all its tokens


class Snapshot(NamedTuple):
    """A state after a prefix, in a place of the state pool."""

    place: int
    tokens: int  # of the prefix


class PlannedSnapshot(NamedTuple):
    """A snapshot that a prefill will save when it has computed this number of tokens."""

    place: int
    tokens: int
    point: Point | None  # None without a prefix cache


@dataclass(eq=False, slots=True)
class KVContent:
    """KV of a sequence's first positions, and what it depends on."""

    length: int = 0  # positions
    uniform: int = 0  # leading positions whose KV is all of `version`
    version: int = -1  # of the weights; -1 for several adapter editions: no other sequence may use it
    adapter_edition: int = 0  # 0 without an adapter
    keys: PrefixKeys | None = None  # of its full pages


class Prefill(NamedTuple):
    """A prefill: it computed the KV of the prompt and of these tokens."""

    tokens: int
    version: int  # of the weights
    adapter_edition: int


@dataclass(eq=False, slots=True)
class SequenceKV(KVContent):
    """The KV of a sequence in the pool, once everything launched has run; empty while it has no row."""

    pages: list[int] = field(default_factory=list)
    capacity: int = 0  # tokens that fit in `pages`
    prefill_tokens: np.ndarray | None = None  # all tokens that the prefill under way goes through
    #: The prefill computes the last token only, after KV that the row has: it was decoding, and draws a token again.
    drawn_again: bool = False
    copy_source: int | None = None  # page to copy in the first chunk; referenced until that is launched
    hit: PrefixHit | None = None  # where the KV came from that it did not compute, at its last admission
    fetches: int = 0  # that the sequence has had begun since it last had a row
    wants_offload: bool = False  # preempted, with KV that is worth keeping
    offloaded: OffloadedKV | None = None  # its KV before it was preempted, until its next step is launched
    prefills: list[Prefill] = field(default_factory=list)
    #: Key of the page, or of the snapshot, that its prefill computes next; others may wait for it.
    frontier: bytes | None = None
    # Of models with states. A sequence has a reference to each of these places.
    load_from: int | None = None  # place of the snapshot that the first chunk loads; until that is launched
    planned_snapshot: PlannedSnapshot | None = None  # that its prefill will save
    snapshot: Snapshot | None = None  # that its prefill has saved
    host_state: HostState | None = None  # the copy of its state to the host, from the end of its last step on

    def add_pages(self, pages: Iterable[int], page_size: int) -> None:
        """Append pages to the sequence's table."""
        self.pages.extend(pages)
        self.capacity = len(self.pages) * page_size

    def give_up_pages(self) -> None:
        """The pages belong to others now: nothing is in the pool."""
        self.pages = []
        self.capacity = self.length = self.uniform = 0
        self.prefill_tokens = self.keys = None
        self.drawn_again = False

    def begin_prefill(self, tokens: int) -> None:
        """A prefill starts at position 0: forget the record of an unfinished one of the same tokens."""
        while self.prefills and self.prefills[-1].tokens == tokens:
            self.prefills.pop()

    def note_prefill(self, start: int, end: int, prefill: Prefill, consumed: int) -> None:
        """`prefill` is writing the KV of positions start..end-1; the drawn tokens depend on `consumed` positions."""
        # What was restored, or is there still, lacks the KV of the last token only.
        whole = self.own and start == consumed
        if not whole and prefill not in self.prefills[-1:]:
            self.prefills.append(prefill)
        if start == 0:
            self.version, self.uniform = prefill.version, end

    def take_back(self, refused: int, known: int) -> None:
        """The last `refused` positions hold no tokens of the sequence; `known` is its length before later steps."""
        self.uniform = self.uniform - refused if self.uniform == self.length else min(self.uniform, known)
        self.length -= refused

    @property
    def own(self) -> bool:
        """True if a prefill goes on after KV of its own, which no row of the device state has yet."""
        return self.offloaded is not None or self.drawn_again

    @property
    def recomputed(self) -> tuple[tuple[int, int], ...]:
        """(tokens, version) of each prefill of more than the prompt, and of the prompt if it had several."""
        one_of_prompt = [prefill.tokens for prefill in self.prefills].count(0) == 1
        return tuple((prefill.tokens, prefill.version) for prefill in self.prefills[one_of_prompt:])


# --- on the host -----------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class OffloadedPage:
    """The KV of one page, and where it is. A host page is set aside for it in every state."""

    pool_page: int | None  # None while it is on the host only
    host_page: int
    owners: int = 1  # offloaded sequences that need it
    outgoing: bool = False  # its copy to the host is queued or under way
    copying: bool = False  # that copy is under way
    restore: Restore | None = None  # its copy from the host, queued or under way
    also_on_host: bool = False  # what is in `pool_page` is on the host, too


@dataclass(eq=False, slots=True)
class Restore:
    """The copy of one page from the host to the pool."""

    page: OffloadedPage
    pool_page: int  # the target
    copying: bool = False  # the copy is under way

    @property
    def host_page(self) -> int:
        """The source."""
        return self.page.host_page


@dataclass(eq=False, slots=True)
class HostState:
    """The copy of a row's state to the host. The sequence keeps the row until it is over."""

    host_place: int
    over: bool = False
    failed: bool = False


@dataclass(eq=False, slots=True)
class OffloadedKV(KVContent):
    """The KV of one offloaded sequence. `offload` keeps the books of it and says what the states of a page are."""

    pages: list[OffloadedPage] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)  # not complete: the sequence waits for them
    restored: list[tuple[int, int]] = field(default_factory=list)  # (host page, pool page): all that came from the host
    host_place: int | None = None  # of its state, for models with states
    restores_state: Literal["no", "queued", "copying"] = "no"  # the copy of its state to its row

    @property
    def restoring(self) -> bool:
        """True while the sequence waits for copies from the host."""
        return bool(self.restores) or self.restores_state != "no"
