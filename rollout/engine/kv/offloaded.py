"""What an offloaded sequence owns: plain data. `offload` keeps the books of it and says what the states are."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.engine.kv.pool import PrefixKeys


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


@dataclass(eq=False, slots=True)
class OffloadedKV:
    """The KV of one offloaded sequence, and what the sequence knew of it."""

    pages: list[OffloadedPage]
    kv_len: int  # tokens
    kv_uniform: int
    kv_version: int
    kv_edition: int  # of its adapter's weights
    keys: PrefixKeys | None  # of its full pages
    restores: list[Restore] = field(default_factory=list)  # not complete: the sequence waits for them
    restored: list[tuple[int, int]] = field(default_factory=list)  # (host page, pool page): all that came from the host
