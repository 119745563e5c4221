"""The seam for KV that is kept beside the pool: in host memory, and from there on disk.

A worker without such memory has `NO_TIER`, whose hooks do nothing. With `engine.host_kv_gib` it has the `HostTier` of
`tiers`. The pool, prefixes, the scheduler and the loop know no more of a tier than this module says:

    a known prefix        has, has_end      it goes on in the tier
                          fetch_for, fetch  bring it to the pool; sequences wait for a `Fetch` outside of the queue
    a preempted sequence  preempted         its KV is worth keeping
                          holds_back, take  it is settled once no copy uses its row or pages; the tier takes these
                          restore, started  it gets pages, then a row
                          restored, drop    its first step is launched, or its KV is invalid
    between two steps     advance, wait     copies go on
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from rollout.engine.messages.statuses import KeptStatus, OffloadStatus
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.sequence.sequence_kv import NO_POINT, PrefixEnd, PrefixKeys


class Fetch:
    """KV of a known prefix on its way to the pool."""

    __slots__ = ()


class TierPrefix(NamedTuple):
    """A known prefix with pages, or a state after it, that are in a tier alone."""

    first: list[int]  # pages of the pool
    keys: list[bytes]  # keys of the pages after `first`
    end: PrefixEnd = NO_POINT  # models with states: the end of the prefix, if it is in the tier
    half: bool = False  # the last key is of a half-full page, which is to be copied


class Room(Protocol):
    """The allocator, as a tier sees it."""

    @property
    def admissible(self) -> list[int]:
        """Pages of each rank that a sequence without a row can get now."""

    @property
    def given_way(self) -> int:
        """Sessions and snapshots that made room for others, since start."""

    def pages_wanted(self, seq: Sequence) -> int:
        """Pages that a sequence needs when it gets a row."""

    def claim(self, retained: list[int], count: int, spare: int) -> list[int] | None:
        """Retain pages and allocate `count` new ones. None, without a change, if fewer than `spare` would be left."""


class TierWaiters(Protocol):
    """The roster, as a tier sees it."""

    @property
    def clock(self) -> Callable[[], float]:
        """Its clock, seconds."""

    def restores_ended(self, seqs: list[Sequence]) -> None:
        """Note that no copy writes to the pages of these sequences any more."""

    def forget_offloaded(self) -> None:
        """Discard offloaded KV: its sequences are computed again."""

    def fetches_ended(self, fetches: Seq[Fetch]) -> None:
        """Wake sequences whose KV is in the pool, or will not come."""


class KVTier:
    """A tier. A hook that is not overridden does nothing."""

    pages = 0  # pages of host memory
    failure = ""  # reason why nothing is copied any more

    # --- room ---------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Pages that the tier can take without losing KV."""
        return 0

    @property
    def writing(self) -> int:
        """Known pages whose copy to the tier is due or under way: a sequence without a row cannot get them."""
        return 0

    def want(self, pages: int) -> None:
        """Note that the first sequence of the queue waits for this many pages; 0: it got them."""

    @property
    def outgoing(self) -> int:
        """Pages of preempted sequences that are free once they are copied."""
        return 0

    def send_unshared(self) -> bool:
        """Begin to copy the pages that only preempted sequences use any more. True if there are any."""
        return False

    # --- known prefixes -----------------------------------------------------------------------------------------------

    def has(self, key: bytes, oldest: int) -> bool:
        """Whether the page with this key can be fetched, or is being fetched; its KV has no version before `oldest`."""
        return False

    def has_end(self, point: PrefixEnd, tokens: int, oldest: int) -> bool:
        """Whether the end of a prefix with this many tokens can be fetched, or is being fetched."""
        return False

    def fetch_for(self, room: Room, seq: Sequence, prefix: TierPrefix, oldest: int, spare: int) -> Fetch | None:
        """The fetch of a known prefix that `seq` must wait for; None if it is better computed, or would not fit.

        KV with a version before `oldest` is not used. `spare` pages stay available.
        """
        return None

    def fetch(self, room: Room, prefix: TierPrefix, oldest: int, spare: int) -> Fetch | None:
        """The fetch of a known prefix, whatever wants it; else as `fetch_for`."""
        return None

    def in_pool(self, keys: PrefixKeys | Seq[bytes]) -> None:
        """Note that a sequence has got pages with these keys, in their order: their copies may give way first."""

    def pool_emptied(self) -> None:
        """Note that the pool has no known page any more."""

    def lease(self, keys: Seq[bytes], until_s: float) -> None:
        """Until this time, evict pages and states with these keys, in prefix order, after all others."""

    # --- preempted sequences ------------------------------------------------------------------------------------------

    def preempted(self, seq: Sequence) -> None:
        """Note that a sequence that leaves its row has KV that is worth keeping."""

    def holds_back(self, seq: Sequence) -> bool:
        """True while copies use the row or the pages of a leaving sequence; begins the copies that it needs."""
        return False

    def take(self, seq: Sequence) -> bool:
        """Take the pages of a sequence that leaves its row. False: the caller must release them."""
        return False

    def restore(self, room: Room, seq: Sequence, version: int, spare: int) -> bool:
        """Give a sequence with KV in the tier pages for it and have it copied back, if `spare` pages stay available."""
        raise AssertionError("no KV is in a tier")

    def started(self, seq: Sequence) -> None:
        """Note that an admitted sequence has got its row."""

    def restored(self, seq: Sequence) -> None:
        """Note that the first step of a sequence with its restored KV is launched."""

    def drop(self, seq: Sequence) -> None:
        """Discard the KV that a preempted sequence has in the tier, or would have there."""

    # --- between two steps --------------------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """True while copies are due or under way."""
        return False

    @property
    def copies_out(self) -> bool:
        """True while copies of known KV to the tier are due or under way."""
        return False

    def advance(self, waiters: TierWaiters) -> None:
        """Account for the copies that are complete, and begin others. Never waits."""

    def wait(self, most_s: float) -> None:
        """Block until a copy is complete, at most `most_s` seconds. No step can be launched before."""

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note the time of a step of prompts: with it the costs of a copy are compared."""

    # --- all KV -------------------------------------------------------------------------------------------------------

    def forget_older(self, oldest: int) -> None:
        """Forget known KV with a weights version before `oldest`."""

    def forget_all(self) -> None:
        """Forget all known KV, and discard the results of fetches under way."""

    def status(self) -> tuple[OffloadStatus, KeptStatus]:
        """Snapshots of now: KV of preempted sequences, and of known prefixes."""
        return OffloadStatus(), KeptStatus()

    def check(self) -> None:
        """Assert that no sequence has KV in the tier, and that nothing is copied."""


NO_TIER = KVTier()


class PageMirror(ABC):
    """Data that is kept for the tokens of each page. A `StepFeature` of this class follows all moves of KV."""

    @abstractmethod
    def stow(self, pages: Seq[int], host_pages: Seq[int]) -> None:
        """Called when the KV of these pages was copied to the host; the pages may be given up next."""

    @abstractmethod
    def fetched(self, host_pages: Seq[int], pages: Seq[int]) -> None:
        """Called when KV was copied from the host to these pages, which only steps launched from now on name."""

    @abstractmethod
    def beside(self, host_page: int) -> memoryview:
        """Called before the KV of a host page is written to disk, and when it was read from there.

        Return the memory of the page's data, as bytes that can be written; their number is always the same.
        """
