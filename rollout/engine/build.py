"""Puts an engine together from settings and a loaded model."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from rollout.config import EngineSettings, Settings
from rollout.engine.adapter_table import AdapterRegistry, AdapterTable
from rollout.engine.device.cuda_pages import CudaPages
from rollout.engine.device.group_memory import GroupMemory, SleepMemory
from rollout.engine.device.releasable import HostPages, ReleasableMemory
from rollout.engine.device.streams import CpuDevice, Device
from rollout.engine.gate import Gate
from rollout.engine.kv.allocator import PageAllocator, pages_for
from rollout.engine.kv.encodings import BLOCK, EncodingCounts, Encodings
from rollout.engine.kv.offload import Offload, OffloadBooks, OffloadCounts
from rollout.engine.kv.page_mover import HostMemory, PageMover
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.sessions import SessionCounts, Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.loop import Engine
from rollout.engine.messages import Event, RoutingShape
from rollout.engine.parts import EngineParts, Links, Receiver
from rollout.engine.schedule.admission import SchedulerLimits
from rollout.engine.schedule.completion import Counters
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.schedule.speculation import Speculation
from rollout.engine.sequence.experts import ExpertPages
from rollout.engine.sizing import (
    DeviceMemory,
    PoolSize,
    adapter_host_bytes,
    check_row_state,
    check_states,
    chunk_tokens,
    host_kv_pages,
    kv_dtype,
    kv_pages,
    no_room_for_steps,
    staging_bytes,
    states_on_host,
    weight_bytes,
)
from rollout.engine.speculation.drafter import DRAFTERS, guesser_of
from rollout.engine.speculation.step_costs import StepCosts
from rollout.engine.step.decode_costs import measure_decode_costs
from rollout.engine.step.device_step import DeviceStep, make_forward
from rollout.engine.step.execute import Executor, Orders, Streams
from rollout.engine.step.expert_trace import routing_shape
from rollout.engine.step.graphs import DecodeGraphs, Progress, capturable
from rollout.engine.step.head_drafts import HeadDrafts
from rollout.engine.step.image_encoder import ImageEncoder
from rollout.engine.step.ngram_drafts import NgramDrafts
from rollout.engine.step.pack import Packer, slot_words, spare_words, upload_words, verify_words
from rollout.engine.step.pipeline import Pipeline
from rollout.engine.step.rehearsal import StepNeeds, measure_steps
from rollout.engine.step.row_state import RowState
from rollout.engine.step.scores import scored_multiple
from rollout.engine.step.shared_pages import make_shared_pages, most_shared_rows
from rollout.engine.step.slot import Slot
from rollout.metrics.meter import Meter
from rollout.models.batch import KVCache
from rollout.models.decoder import Decoder
from rollout.models.deterministic import check_deterministic
from rollout.models.fused import supports
from rollout.models.language_model import LanguageModel, native
from rollout.models.lora_slots import AdapterSlots
from rollout.models.state_pool import StatePool

log = logging.getLogger(__name__)

#: Waits for the other ranks of a tensor group; gets the bytes of the largest orders: upload words, rows, words of a
#: mask, tokens of a step.
Lead = Callable[[int, int, int, int], Orders | None]

_SLOTS = 2
_LEAST_PAGES = 2  # of a KV cache for steps on padding


def context_limit(settings: Settings, model: LanguageModel) -> int:
    """The longest prompt plus completion, tokens. Raises ValueError if the settings ask for more than the model has."""
    asked, made_for = settings.engine.max_context_tokens, model.spec.max_positions
    if asked is not None and asked > made_for:
        raise ValueError(f"max_context_tokens is {asked}, the model allows {made_for}: lower it")
    return asked or made_for


def longest_sequence(settings: Settings, model: LanguageModel, engine: Engine) -> int:
    """The longest prompt plus completion that the model, the settings and the pool allow, tokens."""
    pages = engine.roster.allocator.pool.total + 1
    return PoolSize(pages, settings.engine.page_size, context_limit(settings, model), settings.engine.max_rows).longest


def local_links(settings: Settings, emit: Callable[[list[Event]], None], receiver: Receiver | None = None) -> Links:
    """Links of an engine without a worker around it, for benchmarks and tests."""
    gate = Gate(settings.service.drain_s, takes_weights=receiver is not None)
    return Links(SimpleQueue(), emit, gate, receiver, adapter_registry(settings.engine))


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
    progress: Progress | None = None,
    lead: Lead | None = None,
) -> Engine:
    """An engine that is ready to tick.

    `memory` is the result of `sleeping_memory`, which is called here if it is absent. `progress` is called with (done,
    total) while decode steps are captured as CUDA graphs. With `lead` this is the first rank of a tensor group. Raises
    ValueError with the numbers when rows, steps or KV do not fit into the device's memory next to the weights.
    """
    version = settings.weights.initial_version
    site = _Site(settings, device, model, links.adapters, memory or sleeping_memory(settings, device, model), lead)
    parts = _build_parts(site, version, None, progress)
    sleeps: SleepMemory | None = site.memory
    if site.memory is not None and parts.executor.orders is not None:
        sleeps = GroupMemory(site.memory, parts.executor.orders)
    return Engine(parts, links, Meter(version=version), sleeps, settings.engine)


def build_follower(
    settings: Settings,
    device: Device,
    model: LanguageModel,
    memory: ReleasableMemory | None,
    progress: Progress | None = None,
) -> tuple[Executor, list[Slot]]:
    """What another rank than the first one runs steps with. It is built as that one's is, collective operations too.

    `memory` is the result of `sleeping_memory`. `progress` is as in `build_engine`.
    """
    check_model(settings.engine, model)
    site = _Site(settings, device, model, None, memory, None, follows=True)
    steps = _build_steps(site, None, progress)
    return steps.executor, steps.slots


def sleeping_memory(settings: Settings, device: Device, model: LanguageModel) -> ReleasableMemory | None:
    """Memory that is given back in a sleep, with the model's weights in it; None for a worker that cannot sleep.

    Views of the weights that were taken before still refer to the old memory.
    """
    if not settings.engine.sleep:
        return None
    on_gpu = device.torch_device.type == "cuda"
    memory = ReleasableMemory(device, CudaPages(device.torch_device) if on_gpu else HostPages())
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
    assert memory is None or isinstance(memory, ReleasableMemory), "a tensor group is not made whole"
    if memory is not None and memory.released:
        raise RuntimeError("the memory is given back; only a new process has some")
    executor, step, books = engine.executor, engine.executor.step, engine.roster.allocator
    executor.close()  # all launched work has ended: nothing writes to the KV any more
    executor.device.synchronize()  # a broken CUDA context raises here
    if executor.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.inference_mode():
        for cache in step.kv.tensors:
            cache.zero_()  # a page may hold NaN, and masks do not hide NaN
    registry = None if books.adapters is None else books.adapters.registry
    site = _Site(settings, executor.device, step.model, registry, memory, None)
    engine.restart(_build_parts(site, engine.roster.version, _Lasting.of(engine.parts)))


@dataclass(frozen=True, slots=True)
class _Site:
    """What the parts of an engine are built from, at the start and after each fault."""

    settings: Settings
    device: Device
    model: LanguageModel
    registry: AdapterRegistry | None
    memory: ReleasableMemory | None  # for what a sleep gives back; of this rank
    lead: Lead | None  # of the first of several ranks
    follows: bool = False  # this is another rank


@dataclass(frozen=True, slots=True)
class _Lasting:
    """What outlives a fault: large memory whose content is dropped, a version, and the totals since start."""

    kv: KVCache
    adapters: AdapterSlots | None
    host_memory: HostMemory | None
    host_states: HostMemory | None
    draft_version: int
    counters: Counters
    session_counts: SessionCounts
    offload_counts: OffloadCounts | None
    encoder: ImageEncoder | None
    encoding_counts: EncodingCounts | None

    @classmethod
    def of(cls, parts: EngineParts) -> _Lasting:
        """The lasting things of parts that a fault ended."""
        executor, roster, offload = parts.executor, parts.roster, parts.offload
        return cls(
            executor.step.kv,
            executor.step.adapters,
            None if executor.mover is None else executor.mover.host_memory,
            None if executor.state_mover is None else executor.state_mover.host_memory,
            roster.draft_version,
            roster.counters,
            roster.allocator.sessions.counts,
            None if offload is None else offload.books.counts,
            executor.step.encoder,
            None if roster.allocator.encodings is None else roster.allocator.encodings.counts,
        )


@dataclass(frozen=True, slots=True)
class _Steps:
    """What runs steps, and the bounds of their uploads."""

    executor: Executor
    costs: StepCosts | None  # with speculation
    slots: list[Slot]
    routing: RoutingShape | None
    context: int  # longest sequence, tokens
    chunk: int  # most tokens of a prefill step
    prompt_words: int  # of an upload without drafts


def _build_steps(site: _Site, lasting: _Lasting | None, progress: Progress | None) -> _Steps:
    """The device's side of an engine: row state, slots, KV, captured steps."""
    settings, device, model = site.settings, site.device, site.model
    engine, vocab = settings.engine, model.spec.vocab
    routing = kept_routing(engine, model)
    context = context_limit(settings, model)
    most_pages = pages_for(context, engine.page_size)
    check_row_state(engine, most_pages, model, device.free_bytes())
    adapters = _adapter_slots(site) if lasting is None else lasting.adapters
    states = _states(site) if lasting is None else lasting.kv.states
    guesses = engine.speculation_tokens if guesser_of(engine, model) else 0
    rows = RowState(engine.step_rows, most_pages, vocab, device.torch_device, adapters is not None, guesses)
    chunk = chunk_tokens(engine, model)
    encoder = _image_encoder(site) if lasting is None else lasting.encoder
    images = encoder is not None
    prompt_words = slot_words(engine.max_rows, most_pages, context, chunk, images)
    words = prompt_words + verify_words(engine.max_rows, engine.draft_rows, engine.speculation_tokens)
    speculates = engine.draft_rows > 0
    peers = model.group.peers if isinstance(model, Decoder) else None
    fault = None if peers is None else peers.fault
    more = chunk, routing, speculates, fault, guesses
    slots = [Slot(device, words, engine.step_rows, vocab, *more) for _ in range(_SLOTS)]
    device.synchronize()  # weights and zeroed buffers were enqueued on a stream that the engine's do not wait for
    executor, costs = _build_executor(site, rows, adapters, states, encoder, slots, lasting, progress)
    return _Steps(executor, costs, slots, routing, context, chunk, prompt_words)


def _build_parts(site: _Site, version: int, lasting: _Lasting | None, progress: Progress | None = None) -> EngineParts:
    settings, device, model = site.settings, site.device, site.model
    engine = settings.engine
    check_model(engine, model)
    steps = _build_steps(site, lasting, progress)
    executor, slots, prompt_words = steps.executor, steps.slots, steps.prompt_words
    limits = SchedulerLimits(
        max_rows=engine.max_rows,
        max_queue=settings.service.max_queue,
        max_context=steps.context,
        chunk_tokens=steps.chunk,
        upload_words=prompt_words - spare_words(engine.max_rows),
        fair_queue=engine.fair_queue,
    )
    allocator = _build_allocator(site, executor, steps.routing, lasting)
    counters = Counters() if lasting is None else lasting.counters
    draft_names = model.draft_names() if isinstance(model, Decoder) else frozenset()
    roster = Roster(allocator, engine.max_rows, version, time.perf_counter, counters, draft_names)
    if lasting is not None:
        roster.draft_version = lasting.draft_version
    mover, books = executor.mover, allocator.offload_books
    offload = None if mover is None or books is None else Offload(roster, books, mover, executor.state_mover)
    sizes, multiple = None if executor.graphs is None else executor.graphs.sizes, scored_multiple(device.torch_device)
    step, shared = executor.step, None
    if step.shares_pages:
        shared = make_shared_pages(native(model).spec, step.kv, engine.deterministic)
    packer = Packer(multiple, step.adapters is not None, sizes, shared, _draft_rows(engine), step.kv.states is not None)
    words_of = functools.partial(upload_words, images=step.encoder is not None)
    scheduler = Scheduler(limits, roster, words_of, _speculation(engine, model, steps.costs))
    return EngineParts(roster, scheduler, Pipeline(slots, engine.pipeline_depth), packer, executor, offload)


def _speculation(engine: EngineSettings, model: LanguageModel, costs: StepCosts | None) -> Speculation | None:
    if costs is None:
        return None
    adapts = engine.speculation == "auto"
    make = DRAFTERS.get("suffix" if adapts else engine.speculation)
    drafter = None if make is None else make(engine.constants.speculation_kept_tokens)
    most = engine.speculation_tokens, engine.speculation_rows
    return Speculation(drafter, *most, costs, adapts, guesser_of(engine, model))


def _build_allocator(
    site: _Site, executor: Executor, routing: RoutingShape | None, lasting: _Lasting | None
) -> PageAllocator:
    """The books of the KV pool: pages, sessions, adapters, offloaded KV."""
    engine, step, mover, streams = site.settings.engine, executor.step, executor.mover, executor.streams
    pages = step.kv.pages
    pool = PagePool(pages)
    host_pages, page_bytes = (0, 0) if mover is None else (mover.host_memory.pages, mover.host_memory.page_bytes)
    experts = None if routing is None else ExpertPages(routing, pages, engine.page_size, host_pages)
    if experts is not None:
        log.info("experts of tokens are kept", extra={"host_bytes": experts.nbytes})
    table = None
    if step.adapters is not None and streams.adapters is not None:
        assert site.registry is not None, "adapters have slots but no registry"
        table = AdapterTable(
            site.registry, step.adapters, site.device, streams.adapters, streams.compute, executor.orders
        )
    session_counts = None if lasting is None else lasting.session_counts
    snapshots = None
    if step.kv.states is not None:
        snapshots = Snapshots(engine.max_rows + 1, engine.snapshot_places, pool)
    most_idle = int(engine.constants.session_share * pool.total)
    sessions = Sessions(pool, engine.page_size, most_idle, session_counts, snapshots)
    offload_books = None
    if mover is not None:
        counts = None if lasting is None else lasting.offload_counts
        host_places = 0 if executor.state_mover is None else executor.state_mover.host_memory.pages
        offload_books = OffloadBooks(pool, engine.page_size, host_pages, page_bytes, counts, experts, host_places)
    encodings = None
    if step.encoder is not None:
        encodings = Encodings(
            len(step.encoder.buffer_PW),
            step.encoder.most_patches,
            step.encoder.spec.family.beginnings,
            None if lasting is None else lasting.encoding_counts,
        )
    return PageAllocator(
        pool, engine.page_size, engine.prefix_cache, sessions, experts, table, offload_books, snapshots, encodings
    )


def _build_executor(
    site: _Site,
    rows: RowState,
    adapters: AdapterSlots | None,
    states: StatePool | None,
    encoder: ImageEncoder | None,
    slots: list[Slot],
    lasting: _Lasting | None,
    progress: Progress | None,
) -> tuple[Executor, StepCosts | None]:
    """The device's side: streams, KV pool, captured steps; and what steps cost, for speculation.

    On an error the streams end.
    """
    settings, device, model, engine = site.settings, site.device, site.model, site.settings.engine
    context = context_limit(settings, model)
    kv = _allocate_kv(model, _LEAST_PAGES, engine, states) if lasting is None else lasting.kv
    forward = make_forward(model, engine.fused_experts, engine.deterministic)
    guesser: HeadDrafts | NgramDrafts | None = None
    match guesser_of(engine, model):
        case "heads":
            guesser = HeadDrafts(native(model), rows, engine.step_rows, engine.fused_experts)
        case "ngram":
            guesser = NgramDrafts(rows)
    step = DeviceStep(model, forward, kv, rows, adapters, engine.deterministic, _shares_pages(site), encoder, guesser)
    captured = engine.cuda_graphs and capturable(model, engine.fused_experts)
    graph_rows = min(engine.step_rows, engine.cuda_graph_rows) if captured else None
    streams = Streams.make(device, adapters is not None)
    mover, state_mover, graphs = None, None, None
    try:
        if lasting is None:
            step = step.with_kv(_planned_kv(site, Executor(device, streams, step), slots, graph_rows))
            device.synchronize()
        if lasting is None:
            host_memory = _host_memory(site, step.kv)
            host_states = None if host_memory is None else _host_states(site)
        else:
            host_memory, host_states = lasting.host_memory, lasting.host_states
        if graph_rows is not None:
            graphs = DecodeGraphs(step, streams.compute, context, graph_rows)
            graphs.capture(slots, progress)
        costs = None
        if engine.speculation != "off":
            costs = measure_decode_costs(Executor(device, streams, step, graphs), slots[0], engine.step_rows)
        orders = None
        if site.lead is not None:  # from here on the other ranks run what they are ordered to
            words, width = slots[0].staging.words.numel(), slots[0].masks.host.shape[1]
            orders = site.lead(words, engine.step_rows, width, chunk_tokens(engine, model))
        piece_bytes = int(engine.constants.host_kv_piece_mib * 2**20)
        if host_memory is not None:
            mover = PageMover(device, step.kv.tensors, host_memory, piece_bytes, streams.compute, orders=orders)
        if host_states is not None:
            assert step.kv.states is not None
            tensors = step.kv.states.tensors  # they are moved one at a time
            state_mover = PageMover(device, tensors, host_states, 1, streams.compute, "state", orders)
    except BaseException:
        Executor(device, streams, step, graphs, mover, state_mover).close()
        raise
    checked = model.group if engine.check_ranks and isinstance(model, Decoder) and model.group.size > 1 else None
    movers = mover, state_mover
    return Executor(device, streams, step, graphs, *movers, orders, not site.follows, checked), costs


def _host_memory(site: _Site, kv: KVCache) -> HostMemory | None:
    """Host memory for the KV of preempted sequences; of as many pages on every rank. None without offloading."""
    engine, device = site.settings.engine, site.device
    page_bytes = sum(tensor[0].nbytes for tensor in kv.tensors)
    adapter_bytes = adapter_host_bytes(engine, site.model)
    state_bytes = states_on_host(engine, site.model) * site.model.spec.state_bytes(site.model.embed.dtype)
    pages = host_kv_pages(engine, page_bytes, CpuDevice().free_bytes(), adapter_bytes, state_bytes)
    if pages == 0:
        return None
    pages = _least_of_all_ranks(site.model, pages)  # before any rank takes memory of the same host
    began_s = time.perf_counter()
    host_memory = HostMemory(device, pages, page_bytes)
    facts = {"pages": pages, "host_bytes": pages * page_bytes, "seconds": round(time.perf_counter() - began_s, 1)}
    log.info("KV of preempted sequences is kept on the host", extra=facts)
    return host_memory


def _host_states(site: _Site) -> HostMemory | None:
    """Host memory for states of linear attention, if the model has any."""
    spec, count = site.model.spec, states_on_host(site.settings.engine, site.model)
    return HostMemory(site.device, count, spec.state_bytes(site.model.embed.dtype)) if count else None


def _adapter_slots(site: _Site) -> AdapterSlots | None:
    """Device memory for adapters, if any are served. Raises ValueError with the numbers if there is too little."""
    engine, device, memory = site.settings.engine, site.device, site.memory
    if not engine.adapter_slots:
        return None
    model = native(site.model)
    needed = AdapterSlots.bytes_for(model.spec, engine.adapter_slots, engine.adapter_rank, model.embed.dtype)
    if needed > device.free_bytes():
        raise ValueError(
            f"adapter_slots = {engine.adapter_slots} of adapter_rank = {engine.adapter_rank} take "
            f"{needed / 2**30:.2f} GiB and there are {device.free_bytes() / 2**30:.2f} GiB: lower one of them"
        )
    slots = AdapterSlots(model.spec, engine.adapter_slots, engine.adapter_rank, model.embed.dtype, model.embed.device)
    if memory is not None:
        tensors = (tensor for b in slots.buffers.values() for tensor in (b.a_SAK, b.b_SNR))
        memory.take_over(tensors, kept=False)  # they are loaded again from the host
    log.info("slots for adapters", extra={"slots": slots.slots, "rank": slots.rank, "bytes": slots.nbytes})
    return slots


def _image_encoder(site: _Site) -> ImageEncoder | None:
    """The tower with its embedding buffer, if the model has one. Raises ValueError if the buffer does not fit."""
    engine, device, memory = site.settings.engine, site.device, site.memory
    tower = site.model.tower if isinstance(site.model, Decoder) else None
    if tower is None:
        return None
    places = -(-engine.constants.image_tokens // BLOCK) * BLOCK
    assert tower.spec.merge**2 <= engine.constants.image_patches <= places * tower.spec.merge**2, "two constants"
    dtype, where = site.model.embed.dtype, site.model.embed.device
    needed = places * tower.spec.width * dtype.itemsize
    if needed > device.free_bytes():
        raise ValueError(
            f"image_tokens = {engine.constants.image_tokens} take {needed / 2**30:.2f} GiB and there are "
            f"{device.free_bytes() / 2**30:.2f} GiB: set model.images = false, or use a device with more memory"
        )
    log.info("buffer for embeddings of images", extra={"tokens": places, "bytes": needed})
    zeros = None if memory is None else memory.zeros
    return ImageEncoder(tower, places, engine.constants.image_patches, dtype, where, engine.deterministic, zeros)


def check_model(engine: EngineSettings, model: LanguageModel) -> None:
    """Raise ValueError if the settings ask for something that this model does not have."""
    if isinstance(model, Decoder):
        _check_experts(engine, model)
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
        "expert_dtype = auto": engine.expert_dtype != "auto",
    }
    if wrong := [setting for setting, is_asked in asked.items() if is_asked]:
        raise ValueError(
            f"{architecture} runs through transformers' own code, which has no adapters, routing, deterministic mode, "
            f"speculation or coded experts: set {' and '.join(wrong)}"
        )


def _check_experts(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError for coded experts that no kernel reads: on a GPU each step would decode all of them."""
    assert model.experts == engine.expert_format, "the model was loaded for other settings"
    if model.experts != "plain" and model.embed.is_cuda and not supports(model, engine.fused_experts):
        raise ValueError(
            f"expert_dtype = {model.experts}, and the fused kernels don't run {model.spec.architecture} in "
            f"{model.embed.dtype} with the biases of this checkpoint: use expert_dtype = auto, or bfloat16"
        )


def kept_routing(engine: EngineSettings, model: LanguageModel) -> RoutingShape | None:
    """The shape of the routing that is recorded; None if none is. Raises ValueError for a model without experts."""
    if not engine.routing:
        return None
    shape = routing_shape(native(model).spec)
    if shape is None:
        raise ValueError(
            f"engine.routing is set, but {model.spec.architecture} of this checkpoint has no experts: leave it out"
        )
    return shape


def _check_deterministic(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError if steps cannot be made deterministic: only steps of the fused kernels can."""
    if not engine.deterministic:
        return
    if not supports(model, engine.fused_experts):
        experts = ", with fused_experts" if model.spec.moe is not None else ""
        raise ValueError(
            f"engine.deterministic needs the fused kernels: a GPU, a model in 16 bits without biases of its output and "
            f"MLP products{experts}; torch's own products on a {model.embed.device.type} depend on the batch"
        )
    check_deterministic(model.spec)


def _shares_pages(site: _Site) -> bool:
    """Whether decode attention reads pages that several rows share once. The torch twin has no gain from it."""
    engine, on_gpu = site.settings.engine, site.device.torch_device.type == "cuda"
    if not (engine.group_attention and on_gpu and isinstance(site.model, Decoder)):
        return False
    return most_shared_rows(site.model.spec, engine.kv_dtype != "auto", engine.deterministic) > 1


def _planned_kv(site: _Site, executor: Executor, slots: list[Slot], graph_rows: int | None) -> KVCache:
    """The KV pool, in the memory that the largest steps leave; on a GPU these are run to find out."""
    settings, model, device = site.settings, site.model, site.device
    engine, context, needs = settings.engine, context_limit(settings, model), StepNeeds()
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
    return _allocate_kv(model, pages, engine, executor.step.kv.states, site.memory)


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
    states: StatePool | None,
    memory: ReleasableMemory | None = None,
) -> KVCache:
    zeros, dtype = None if memory is None else memory.zeros, kv_dtype(engine, model)
    tokens = guesser_of(engine, model) == "ngram"
    return KVCache.allocate(model.spec, pages, engine.page_size, dtype, model.embed.device, zeros, states, tokens)


def _states(site: _Site) -> StatePool | None:
    """Memory for the states of rows and snapshots, if the model has any. Raises ValueError if there is too little."""
    engine, model, memory = site.settings.engine, site.model, site.memory
    each = model.spec.state_bytes(model.embed.dtype)
    if each == 0:
        return None
    check_states(engine, model, site.device.free_bytes())
    zeros = None if memory is None else memory.zeros
    places = 1 + engine.max_rows + engine.snapshot_places
    drafts = engine.draft_rows * native(model).spec.draft_bytes(model.embed.dtype)
    facts = {"rows": engine.max_rows, "snapshots": engine.snapshot_places, "bytes": places * each + drafts}
    log.info("states of linear attention", extra=facts)
    of_model = native(model).spec, places, model.embed.dtype, model.embed.device, zeros
    return StatePool.allocate(*of_model, _draft_rows(engine))


def _draft_rows(engine: EngineSettings) -> range:
    """The rows of the row state for drafts."""
    return range(engine.max_rows + 1, engine.step_rows + 1)
