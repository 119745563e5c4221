"""The KV of an engine: its memory on the device and on the host, and its books."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from rollout.config import EngineSettings
from rollout.engine.device.rank_orders import RankOrders
from rollout.engine.device.streams import CpuDevice
from rollout.engine.features.all import keeps_token_ids
from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.prefixes import Prefixes
from rollout.engine.kv.sessions import SessionCounts, Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.kv.state_prefixes import StatePrefixes
from rollout.engine.kv.tier import NO_TIER, KVTier, PageMirror
from rollout.engine.kv.tiers.disk_pages import NO_DISK, DiskPages
from rollout.engine.kv.tiers.host_pages import HostEntryCounts, HostPageBooks
from rollout.engine.kv.tiers.host_tier import HostTier
from rollout.engine.kv.tiers.known import KnownBooks
from rollout.engine.kv.tiers.offload import OffloadBooks, OffloadCounts
from rollout.engine.kv.tiers.page_mover import HostMemory, PageMover
from rollout.engine.schedule.completion_events import Counters
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.sizing import check_states, kv_dtype, state_pool_bytes, states_on_host
from rollout.engine.step.device_feature import Site
from rollout.engine.step.execute import Executor
from rollout.models.batch import KVCache
from rollout.models.decoder import Decoder
from rollout.models.language_model import LanguageModel
from rollout.models.spec import WHOLE
from rollout.models.state_pool import NO_STATES, StatePool, States

log = logging.getLogger(__name__)

NO_HOST_MEMORY = HostMemory(CpuDevice(), 0, 1)


@dataclass(frozen=True, slots=True)
class Totals:
    """Running totals since the start, which continue after a fault."""

    counters: Counters = field(default_factory=Counters)
    sessions: SessionCounts = field(default_factory=SessionCounts)
    tier: KVTier = NO_TIER
    features: Seq[StepFeature] = ()  # the features that have totals

    @classmethod
    def of(cls, roster: Roster) -> Totals:
        """The totals of a roster that a fault ended."""
        allocator = roster.allocator
        return cls(
            counters=roster.counters,
            sessions=allocator.sessions.counts,
            tier=allocator.tier,
            features=roster.features,
        )


def host_memory_of(mover: PageMover | None) -> HostMemory:
    """The host memory that a mover moves to; none without a mover."""
    return NO_HOST_MEMORY if mover is None else mover.host_memory


def allocate_kv(
    model: LanguageModel,
    pages: int,
    engine: EngineSettings,
    states: States,
    zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
) -> KVCache:
    """A KV cache of zeros; `zeros` allocates it, by default torch does."""
    dtype = kv_dtype(engine, model)
    tokens = keeps_token_ids(engine, model)
    shards = dict.fromkeys(("rows", "context"), WHOLE)
    if isinstance(model, Decoder):
        shards[model.spec.split] = model.spec.shard
    how = (dtype, model.embed.device, zeros, states, tokens, shards["context"])
    return replace(KVCache.allocate(model.spec, pages, engine.page_size, *how), dealt=shards["rows"])


def allocate_states(site: Site) -> States:
    """Memory for the states of rows and snapshots, if the model has any. Raises ValueError if there is too little."""
    engine, model = site.settings.engine, site.model
    each = model.spec.state_bytes(model.embed.dtype)
    if each == 0:
        return NO_STATES
    check_states(engine, model, site.device.free_bytes())
    places = 1 + engine.max_rows + engine.snapshot_places
    needed = state_pool_bytes(engine, model)
    facts = {"rows": engine.max_rows, "snapshots": engine.snapshot_places, "bytes": needed}
    log.info("states of linear attention", extra=facts)
    dtype, device, zeros = model.embed.dtype, model.embed.device, site.memory.zeros
    if not isinstance(model, Decoder):
        return model.spec.allocate_states(places, dtype, device, zeros)
    draft_places = range(engine.max_rows + 1, engine.step_rows + 1)
    return StatePool.allocate(model.spec, places, dtype, device, zeros, draft_places)


def allocate_host_states(site: Site) -> HostMemory:
    """Host memory for states of linear attention, if the model has any."""
    spec, count = site.model.spec, states_on_host(site.settings.engine, site.model)
    return HostMemory(site.device, count, spec.state_bytes(site.model.embed.dtype)) if count else NO_HOST_MEMORY


def open_disk(
    engine: EngineSettings, mover: PageMover | None, share: float, again: bool, name: str, orders: RankOrders
) -> DiskPages:
    """The folder for KV that leaves a mover's host memory, with a share of `disk_kv_gib`, if settings ask for one.

    `again`: after a fault, if it can still be used. Other ranks that take `orders` have equal parts of the share.
    """
    if engine.disk_kv_folder is None or not engine.disk_kv_gib or mover is None:
        return NO_DISK
    most_bytes = int(share * engine.disk_kv_gib * 2**30) // engine.tensor_parallel
    try:
        return DiskPages(engine.disk_kv_folder, most_bytes, mover.host_memory, name, orders)
    except ValueError as error:
        if not again:
            raise
        log.warning("KV is no longer written to disk", extra={"reason": str(error)})
        return NO_DISK


def build_allocator(site: Site, executor: Executor, mirrors: Seq[PageMirror], totals: Totals) -> PageAllocator:
    """The books of the KV pool, of sessions and, with host memory for KV, of a tier."""
    engine, step, movers = site.settings.engine, executor.step, executor.movers
    host_kv, host_states = map(host_memory_of, movers[:2])
    states = step.kv.states.layers
    offloads, kept, kept_states = _counts_of(totals.tier)
    host = HostPageBooks(host_kv.pages, host_kv.page_bytes, kept, movers.disk)
    places = engine.snapshot_places if states else 0
    known = host_kv.pages > 0 and engine.prefix_cache  # known pages are kept on the host, and so are states after them
    keeps = known and (not states or (places > 0 and host_states.pages > 0))
    elsewhere = host.total + host.disk.total
    pages, ranks = step.kv.pages_of_all, step.kv.dealt.size
    pool = PagePool(pages, host.note_evicted, elsewhere) if keeps else PagePool(pages, ranks=ranks)
    snapshots = Snapshots(engine.max_rows + 1, places, pool)
    most_pages = int(engine.constants.session_share * pool.total)
    sessions = Sessions(pool, engine.page_size, most_pages, snapshots, totals.sessions)
    tier: KVTier = NO_TIER
    if host.total:
        states_on_host = HostPageBooks(host_states.pages, host_states.page_bytes, kept_states, movers.state_disk)
        books = KnownBooks(sessions, host, states_on_host, not keeps, mirrors)
        offload = OffloadBooks(pool, engine.page_size, host, states_on_host, mirrors, offloads)
        tier = HostTier(sessions, books, offload, movers.all, bool(states), mirrors)
    size, known_after, max_age = engine.page_size, engine.prefix_cache, engine.max_kv_age
    if states:
        prefixes: Prefixes = StatePrefixes(pool, tier, size, known_after, sessions, max_age, snapshots)
    else:
        prefixes = Prefixes(pool, tier, size, known_after, sessions, max_age)
    return PageAllocator(sessions, prefixes)


def _counts_of(tier: KVTier) -> tuple[OffloadCounts, HostEntryCounts, HostEntryCounts]:
    """The totals of a tier that a fault ended: of preempted sequences, known pages and known states."""
    if isinstance(tier, HostTier):
        return tier.offload.counts, tier.known.host.counts, tier.known.states.counts
    return OffloadCounts(), HostEntryCounts(), HostEntryCounts()
