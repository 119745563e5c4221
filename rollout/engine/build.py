"""Puts an engine together from settings and a loaded model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import torch
from rollout_kernels.linear.coded import CodedMatrix
from rollout_kernels.parallel import ONE_RANK

from rollout.config import EngineSettings, Settings
from rollout.engine.adapters import AdapterRegistry
from rollout.engine.device.cuda_pages import CudaPages
from rollout.engine.device.releasable import HostPages, PermanentMemory, ReleasableMemory
from rollout.engine.device.streams import CpuDevice, Device
from rollout.engine.features.all import FEATURES, MakeFeature
from rollout.engine.features.drafts.drafter import device_drafter
from rollout.engine.features.drafts.verifier import DraftVerifier, draft_rows
from rollout.engine.features.site import Lead, Site, alone
from rollout.engine.gate import Gate
from rollout.engine.kv.allocator import PageAllocator, pages_for
from rollout.engine.kv.disk import NO_DISK, DiskPages, NoDisk
from rollout.engine.kv.host_pages import HostPageBooks, KeptCounts
from rollout.engine.kv.host_states import HostStates
from rollout.engine.kv.offload import Offload, OffloadBooks, OffloadCounts
from rollout.engine.kv.page_mirror import PageMirror
from rollout.engine.kv.page_mover import HostMemory, PageMover
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.prefixes import Prefixes
from rollout.engine.kv.sessions import SessionCounts, Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.kv.state_prefixes import StatePrefixes
from rollout.engine.kv.tier import Tier
from rollout.engine.loop import Engine
from rollout.engine.messages.to_service import Event
from rollout.engine.parts import EngineParts, Links, NoOffload, NoReceiver, Receiver
from rollout.engine.schedule.completion import Counters
from rollout.engine.schedule.feature import StepFeature, find
from rollout.engine.schedule.refusal import SchedulerLimits
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.sizing import (
    DeviceMemory,
    PoolSize,
    adapter_host_bytes,
    check_row_state,
    check_states,
    chunk_tokens,
    context_limit,
    host_kv_pages,
    kv_dtype,
    kv_pages,
    no_room_for_steps,
    staging_bytes,
    state_pool_bytes,
    states_on_host,
    weight_bytes,
)
from rollout.engine.step.device_step import DeviceStep, make_forward
from rollout.engine.step.execute import Executor, Movers, Rank
from rollout.engine.step.feature import DeviceFeature, HostParts
from rollout.engine.step.graphs import NO_GRAPHS, DecodeGraphs, Progress, capturable, make_graphs, untold
from rollout.engine.step.pack import Packer, slot_words, spare_words, upload_words
from rollout.engine.step.pipeline import Pipeline
from rollout.engine.step.rehearsal import StepNeeds, measure_steps
from rollout.engine.step.row_state import RowState
from rollout.engine.step.shared_pages import make_shared_pages, most_shared_rows
from rollout.engine.step.slot import Slot
from rollout.engine.step.streams import Streams
from rollout.metrics.meter import Meter
from rollout.models.batch import KVCache
from rollout.models.decoder import Decoder
from rollout.models.deterministic import check_deterministic
from rollout.models.fused import supports
from rollout.models.language_model import LanguageModel, native
from rollout.models.layers import Linear
from rollout.models.state_pool import NO_STATES, StatePool

log = logging.getLogger(__name__)

_SLOTS = 2
_LEAST_PAGES = 2  # the smallest KV cache: room for steps on padding
_NO_HOST_MEMORY = HostMemory(CpuDevice(), 0, 1)


def longest_sequence(settings: Settings, model: LanguageModel, engine: Engine) -> int:
    """The longest prompt plus completion that the model, the settings and the pool allow, tokens."""
    pages, asked = engine.roster.allocator.pool.total + 1, settings.engine
    return PoolSize(pages, asked.page_size, context_limit(asked, model), asked.max_rows).longest


def local_links(settings: Settings, emit: Callable[[list[Event]], None], receiver: Receiver | None = None) -> Links:
    """Links of an engine without a worker around it, for benchmarks and tests."""
    gate = Gate(settings.service.drain_s, takes_weights=receiver is not None)
    receives = NoReceiver() if receiver is None else receiver
    return Links(SimpleQueue(), emit, gate, receives, adapter_registry(settings.engine))


def adapter_registry(engine: EngineSettings) -> AdapterRegistry | None:
    """An empty registry of adapters, if the settings have slots for any."""
    return AdapterRegistry(engine.max_adapters) if engine.adapter_slots else None


def build_engine(
    settings: Settings,
    device: Device,
    model: LanguageModel,
    links: Links,
    *,
    memory: ReleasableMemory | None = None,
    progress: Progress = untold,
    lead: Lead = alone,
    features: Seq[MakeFeature] = FEATURES,
) -> Engine:
    """An engine that is ready to tick.

    `memory` is the result of `sleeping_memory`, which is called here if it is absent. `progress` is called with (done,
    total) while decode steps are captured as CUDA graphs. `lead` is that of the first rank of a tensor group. Raises
    ValueError with the numbers when rows, steps or KV do not fit into the device's memory next to the weights.
    """
    version = settings.weights.initial_version
    memory = memory or sleeping_memory(settings, device, model)
    site = Site(settings, device, model, links.adapters, memory, lead)
    check_model(settings.engine, model)
    parts = _build_parts(site, version, _Memory.begin(site, features), _Totals(), progress)
    sleeps = parts.executor.orders.memory_of_all(memory)
    return Engine(parts, links, Meter(version=version), sleeps, settings.engine)


def build_follower(
    settings: Settings,
    device: Device,
    model: LanguageModel,
    memory: ReleasableMemory,
    progress: Progress = untold,
) -> tuple[Executor, list[Slot]]:
    """The executor of a rank other than the first. Building it takes part in the first rank's collective operations.

    `memory` is the result of `sleeping_memory`. `progress` is as in `build_engine`.
    """
    check_model(settings.engine, model)
    site = Site(settings, device, model, None, memory, follows=True)
    steps = _build_steps(site, _Memory.begin(site), progress)
    return steps.executor, steps.slots


def sleeping_memory(
    settings: Settings, device: Device, model: LanguageModel, host_pages: type[HostPages] = HostPages
) -> ReleasableMemory:
    """Memory that is given back in a sleep, with the model's weights in it, if this worker can sleep.

    On a CPU it is memory of `host_pages`.
        Views of the weights that were taken before still refer to the old memory.
    """
    if not settings.engine.sleep:
        return PermanentMemory(device)
    on_gpu = device.torch_device.type == "cuda"
    memory = ReleasableMemory(device, CudaPages(device.torch_device) if on_gpu else host_pages())
    memory.take_over(model.parameters(), kept=True)
    return memory


def rebuild_engine(engine: Engine, settings: Settings) -> None:
    """Make a failed engine whole: new streams, slots, row state and books, an empty KV pool, the same weights.

    Only swaps write to the weights, so without a swap under way they are whole. Raises RuntimeError (also of CUDA)
    when the weights or the device are not.
    """
    if engine.gate.swapping:
        raise RuntimeError("the weights were being changed; only a new process has whole ones")
    memory = engine.sleeper.memory
    assert isinstance(memory, ReleasableMemory), "a tensor group is not made whole"
    if memory.released:
        raise RuntimeError("the memory is given back; only a new process has some")
    executor, step = engine.executor, engine.executor.step
    executor.close()  # all launched work has ended: nothing writes to the KV any more
    executor.device.synchronize()  # a broken CUDA context raises here
    if executor.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.inference_mode():
        for cache in step.kv.tensors:
            cache.zero_()  # a page may hold NaN, and masks do not hide NaN
    site = Site(settings, executor.device, step.model, None, memory)  # features have what they need of the links
    engine.restart(_build_parts(site, engine.roster.version, _Memory.of(executor), _Totals.of(engine.roster)))


@dataclass(frozen=True, slots=True)
class _Memory:
    """Large memory that outlives a fault; its content does not."""

    features: Seq[DeviceFeature]
    states: StatePool
    kv: KVCache | None = None  # None before the first start: its size is not known
    host_memory: HostMemory = _NO_HOST_MEMORY  # host memory for KV
    host_states: HostMemory = _NO_HOST_MEMORY

    @classmethod
    def begin(cls, site: Site, features: Seq[MakeFeature] = FEATURES) -> _Memory:
        """The memory that is allocated before the KV."""
        made = [feature for make in features if (feature := make(site)) is not None]
        return cls(made, _states(site))

    @classmethod
    def of(cls, executor: Executor) -> _Memory:
        """The memory of an executor that a fault ended."""
        step = executor.step
        return cls(step.features, step.kv.states, step.kv, *map(_host_memory, executor.movers[:2]))


def _host_memory(mover: PageMover | None) -> HostMemory:
    return _NO_HOST_MEMORY if mover is None else mover.host_memory


@dataclass(frozen=True, slots=True)
class _Totals:
    """Running totals since the start, which continue after a fault."""

    counters: Counters = field(default_factory=Counters)
    sessions: SessionCounts = field(default_factory=SessionCounts)
    offload: OffloadCounts = field(default_factory=OffloadCounts)
    kept: KeptCounts = field(default_factory=KeptCounts)
    features: Seq[StepFeature] = ()  # the features that have totals

    @classmethod
    def of(cls, roster: Roster) -> _Totals:
        """The totals of a roster that a fault ended."""
        allocator = roster.allocator
        counts = allocator.sessions.counts, allocator.offload_books.counts, allocator.tier.host.counts
        return cls(roster.counters, *counts, roster.features)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The executor of steps, and the bounds of their uploads."""

    executor: Executor
    slots: list[Slot]
    context: int  # longest sequence, tokens
    chunk: int  # most tokens of a prefill step
    words: int  # int32 words of the largest upload


def _build_steps(site: Site, memory: _Memory, progress: Progress) -> _Steps:
    """The device's side of an engine: row state, slots, KV, captured steps."""
    settings, device, model = site.settings, site.device, site.model
    engine, vocab = settings.engine, model.spec.vocab
    context = context_limit(settings.engine, model)
    most_pages = pages_for(context, engine.page_size)
    check_row_state(engine, most_pages, model, device.free_bytes())
    features = memory.features
    columns = [feature.name for feature in features if feature.row_column]
    rows = RowState(engine.step_rows, most_pages, vocab, device.torch_device, columns)
    for feature in features:
        feature.begin_rows(rows)
    chunk = chunk_tokens(engine, model)
    words = slot_words(engine.max_rows, most_pages, context, chunk, features)
    more = chunk, features, model.group if isinstance(model, Decoder) else ONE_RANK
    slots = [Slot(device, words, engine.step_rows, vocab, *more) for _ in range(_SLOTS)]
    device.synchronize()  # weights and zeroed buffers were enqueued on a stream that the engine's do not wait for
    executor = _build_executor(site, rows, slots, memory, progress)
    return _Steps(executor, slots, context, chunk, words)


def _build_parts(
    site: Site, version: int, memory: _Memory, totals: _Totals, progress: Progress = untold
) -> EngineParts:
    settings, model = site.settings, site.model
    engine = settings.engine
    steps = _build_steps(site, memory, progress)
    executor, slots = steps.executor, steps.slots
    spare = sum(feature.spare_words for feature in executor.step.features)
    limits = SchedulerLimits(
        max_rows=engine.max_rows,
        max_queue=settings.service.max_queue,
        max_context=steps.context,
        chunk_tokens=steps.chunk,
        upload_words=steps.words - spare_words(engine.max_rows, spare),
    )
    features = _host_features(executor, version, totals.features)
    allocator = _build_allocator(site, executor, features, totals)
    roster = Roster(allocator, engine.max_rows, version, time.perf_counter, totals.counters, features)
    step, movers = executor.step, executor.movers
    offload: Offload | NoOffload = NoOffload()
    if movers.kv is not None:
        offload = Offload(roster, allocator.offload_books, allocator.tier, movers.kv, movers.states)
    shared = make_shared_pages(model, step.kv, engine, step.shares_pages)
    packer = Packer(executor.graphs.sizes, shared, allocator.prefixes.has_states, features)
    scheduler = Scheduler(limits, roster, upload_words)
    return EngineParts(roster, scheduler, Pipeline(slots, engine.pipeline_depth), packer, executor, offload)


def _build_allocator(site: Site, executor: Executor, mirrors: Seq[PageMirror], totals: _Totals) -> PageAllocator:
    """The books of the KV pool: pages, sessions, adapters, offloaded KV."""
    engine, step = site.settings.engine, executor.step
    host_kv, host_states = map(_host_memory, executor.movers[:2])
    states = step.kv.states.layers
    host = HostPageBooks(host_kv.pages, totals.kept)
    places = engine.snapshot_places if states else 0
    known = host_kv.pages > 0 and engine.prefix_cache  # known pages are kept on the host, and so are states after them
    keeps = known and (not states or (places > 0 and host_states.pages > 0))
    pool = PagePool(step.kv.pages, host.note_evicted) if keeps else PagePool(step.kv.pages)
    snapshots = Snapshots(engine.max_rows + 1, places, pool)
    most_pages = int(engine.constants.session_share * pool.total)
    sessions = Sessions(pool, engine.page_size, most_pages, snapshots, totals.sessions)
    on_host = host, HostStates(host_states.pages)
    tier = Tier(
        pool,
        *on_host,
        sessions,
        snapshots,
        engine.page_size,
        not keeps,
        mirrors,
        host_kv.page_bytes,
        executor.movers.disk,
    )
    found_by = pool, tier, engine.page_size, engine.prefix_cache, sessions, engine.max_kv_age
    prefixes = StatePrefixes(*found_by, snapshots) if states else Prefixes(*found_by)
    books = OffloadBooks(pool, engine.page_size, host, host_kv.page_bytes, on_host[1], mirrors, totals.offload)
    return PageAllocator(sessions, prefixes, books, mirrors)


def _host_features(executor: Executor, version: int, before: Seq[StepFeature]) -> list[StepFeature]:
    """The features' parts on the host; they continue the totals of the features `before` a fault."""
    kept = {feature.name: feature for feature in before}
    host_pages = _host_memory(executor.mover).pages
    parts = HostParts(executor.streams, executor.orders, executor.step.kv, host_pages, version)
    made = [feature.host_part(parts, kept.get(feature.name)) for feature in executor.step.features]
    return [feature for feature in made if feature is not None]


def _build_executor(site: Site, rows: RowState, slots: list[Slot], memory: _Memory, progress: Progress) -> Executor:
    """The device's side: streams, KV pool, captured steps. On an error the streams end."""
    settings, device, model, engine = site.settings, site.device, site.model, site.settings.engine
    context = context_limit(settings.engine, model)
    kv = memory.kv or _allocate_kv(model, _LEAST_PAGES, engine, memory.states)
    forward = make_forward(model, engine.deterministic)
    step = DeviceStep(model, forward, kv, rows, engine.deterministic, _shares_pages(site), memory.features)
    captured = engine.cuda_graphs and capturable(model)
    graph_rows = min(engine.step_rows, engine.cuda_graph_rows) if captured else 0
    streams = Streams.make(device, [feature.name for feature in memory.features if feature.own_stream])
    mover, state_mover = None, None
    disk: DiskPages | NoDisk = NO_DISK
    again = memory.kv is not None
    graphs: DecodeGraphs = NO_GRAPHS
    try:
        if memory.kv is None:
            step = step.with_kv(_planned_kv(site, Executor(device, streams, step), slots, graph_rows))
            device.synchronize()
            memory = _with_host_memory(site, memory, step.kv)
        graphs = make_graphs(step, streams.compute, context, graph_rows)
        graphs.capture(slots, progress)
        if (verifier := find(step.features, DraftVerifier)) is not None:
            verifier.measure(Executor(device, streams, step, graphs), slots[0])
        words, width = slots[0].staging.words.numel(), slots[0].masks.host.shape[1]
        # From here on the other ranks follow orders.
        orders = site.lead(words, engine.step_rows, width, chunk_tokens(engine, model))
        piece_bytes = int(engine.constants.host_kv_piece_mib * 2**20)
        if (host := memory.host_memory).pages:
            mover = PageMover(device, step.kv.tensors, host, piece_bytes, streams.compute, orders=orders)
        if (host := memory.host_states).pages:
            tensors = memory.states.tensors  # they are moved one at a time
            state_mover = PageMover(device, tensors, host, 1, streams.compute, "state", orders)
        disk = _disk(engine, model, step.kv, memory.host_memory, again)
    except BaseException:
        Executor(device, streams, step, graphs, Movers(mover, state_mover)).close()
        raise
    rank = Rank(orders, not site.follows, engine.check_ranks and step.group.size > 1)
    return Executor(device, streams, step, graphs, Movers(mover, state_mover, disk), rank)


def _disk(
    engine: EngineSettings, model: LanguageModel, kv: KVCache, host: HostMemory, again: bool
) -> DiskPages | NoDisk:
    """The folder for KV that leaves host memory, if there is one; `again`, after a fault, if it can still be used."""
    if engine.disk_kv_folder is None or not engine.disk_kv_gib:
        return NO_DISK
    identity = repr((model.spec, [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in kv.tensors])).encode()
    most_bytes = int(engine.disk_kv_gib * 2**30)
    try:
        return DiskPages(engine.disk_kv_folder, most_bytes, identity, host.memory_of, host.page_bytes, host.pages)
    except ValueError as error:
        if not again:
            raise
        log.warning("KV is no longer written to disk", extra={"reason": str(error)})
        return NO_DISK


def _with_host_memory(site: Site, memory: _Memory, kv: KVCache) -> _Memory:
    """Add the KV and, if it moves to the host, host memory; every rank has the same number of pages."""
    engine, device = site.settings.engine, site.device
    page_bytes = sum(tensor[0].nbytes for tensor in kv.tensors)
    adapter_bytes = adapter_host_bytes(engine, site.model)
    state_bytes = states_on_host(engine, site.model) * site.model.spec.state_bytes(site.model.embed.dtype)
    pages = host_kv_pages(engine, page_bytes, CpuDevice().free_bytes(), adapter_bytes, state_bytes)
    if pages == 0:
        return replace(memory, kv=kv)
    pages = _least_of_all_ranks(site.model, pages)  # computed before any rank takes memory of the same host
    began_s = time.perf_counter()
    host_memory = HostMemory(device, pages, page_bytes)
    facts = {"pages": pages, "host_bytes": pages * page_bytes, "seconds": round(time.perf_counter() - began_s, 1)}
    log.info("the host has memory for KV", extra=facts)
    return replace(memory, kv=kv, host_memory=host_memory, host_states=_host_states(site))


def _host_states(site: Site) -> HostMemory:
    """Host memory for states of linear attention, if the model has any."""
    spec, count = site.model.spec, states_on_host(site.settings.engine, site.model)
    return HostMemory(site.device, count, spec.state_bytes(site.model.embed.dtype)) if count else _NO_HOST_MEMORY


def check_model(engine: EngineSettings, model: LanguageModel) -> None:
    """Raise ValueError if the settings ask for something that this model does not have."""
    if engine.disk_kv_gib and model.spec.state_bytes(model.embed.dtype):
        raise ValueError("disk_kv_gib keeps no states of linear attention, which this model has: set disk_kv_gib = 0")
    if isinstance(model, Decoder):
        _check_format(engine, model)
        _check_deterministic(engine, model)
        needed = engine.speculation == "heads" or engine.speculation_model is not None
        assert model.draft is not None or not needed, "the model was loaded for other settings"
    else:
        _check_fallback(engine, model.spec.architecture)


def _check_fallback(engine: EngineSettings, architecture: str) -> None:
    """Raise ValueError for a setting that only native families have."""
    asked = {
        "adapter_slots = 0": engine.adapter_slots > 0,
        "routing = false": engine.routing,
        "deterministic = false": engine.deterministic,
        "speculation = off": engine.speculation != "off",
        "weight_dtype = auto": engine.weight_format not in ("auto", "plain"),
    }
    if wrong := [setting for setting, is_asked in asked.items() if is_asked]:
        raise ValueError(
            f"{architecture} runs through transformers' own code, which has no adapters, routing, deterministic mode, "
            f"speculation or coded weights: set {' and '.join(wrong)}"
        )


def _check_format(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError for coded experts that no kernel reads: on a GPU each step would decode all of them."""
    assert engine.weight_format in ("auto", model.format), "the model was loaded for other settings"
    if model.format != "plain" and model.spec.moe is not None and model.embed.is_cuda and not supports(model):
        raise ValueError(
            f"weight_dtype = {model.format}, and the fused kernels don't run {model.spec.architecture} in "
            f"{model.embed.dtype} with the biases of this checkpoint: use weight_dtype = bf16, or bfloat16"
        )


def _check_deterministic(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError if steps cannot be made deterministic: only steps of the fused kernels can."""
    if not engine.deterministic:
        return
    if not supports(model):
        raise ValueError(
            f"engine.deterministic needs the fused kernels: a GPU, a model in 16 bits without biases of its output and "
            f"MLP products; on a {model.embed.device.type} torch's products have other bits in other batches"
        )
    check_deterministic(model.spec)
    for name, module in model.named_modules():
        stored = module.stored if isinstance(module, Linear) else None
        if isinstance(stored, CodedMatrix) and not stored.kernels_take(model.embed.dtype):
            raise ValueError(
                f"no kernel reads {name} as {stored.format}: set deterministic = false, or weight_dtype = bf16"
            )


def _shares_pages(site: Site) -> bool:
    """Whether decode attention reads pages that several rows share once. The torch twin has no gain from it."""
    engine, on_gpu = site.settings.engine, site.device.torch_device.type == "cuda"
    if not (engine.group_attention and on_gpu and isinstance(site.model, Decoder)):
        return False
    return most_shared_rows(site.model.spec, engine.kv_dtype != "auto", engine.deterministic) > 1


def _planned_kv(site: Site, executor: Executor, slots: list[Slot], graph_rows: int) -> KVCache:
    """The KV pool, in the memory that the largest steps leave; on a GPU these are run to find out."""
    settings, model, device = site.settings, site.model, site.device
    engine, context, needs = settings.engine, context_limit(settings.engine, model), StepNeeds()
    free_bytes = device.free_bytes() - staging_bytes(engine, model.spec.state_bytes(model.embed.dtype))
    try:
        if device.torch_device.type == "cuda":
            chunk = chunk_tokens(engine, model)
            sizes = engine.step_rows, chunk, context, graph_rows
            needs = measure_steps(executor, slots, *sizes)
    except torch.OutOfMemoryError as error:
        raise no_room_for_steps(engine, model, free_bytes) from error
    there = DeviceMemory(weight_bytes(model), free_bytes, needs)
    pages = kv_pages(engine, model, kv_dtype(engine, model), context, there)
    pages = _least_of_all_ranks(model, pages)
    size = PoolSize(pages, engine.page_size, context, engine.max_rows)
    log.info("%s; %s", size, there, extra=size.facts)
    return _allocate_kv(model, pages, engine, executor.step.kv.states, site.memory.zeros)


def _least_of_all_ranks(model: LanguageModel, pages: int) -> int:
    """The pages that every rank of the model's tensor group has room for."""
    if not isinstance(model, Decoder):
        return pages
    mine = torch.tensor([pages], dtype=torch.int64, device=model.embed.device)
    return int(model.group.all_gather(mine).min())


def _allocate_kv(
    model: LanguageModel,
    pages: int,
    engine: EngineSettings,
    states: StatePool,
    zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
) -> KVCache:
    dtype = kv_dtype(engine, model)
    tokens = device_drafter(engine, model) == "ngram"
    return KVCache.allocate(model.spec, pages, engine.page_size, dtype, model.embed.device, zeros, states, tokens)


def _states(site: Site) -> StatePool:
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
    of_model = native(model).spec, places, model.embed.dtype, model.embed.device, site.memory.zeros
    return StatePool.allocate(*of_model, draft_rows(engine))
