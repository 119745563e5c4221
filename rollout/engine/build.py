"""Puts an engine together from settings and a loaded model; sizes the KV pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from rollout.config import EngineSettings, Settings
from rollout.engine.adapter_table import AdapterTable
from rollout.engine.device.capacity import (
    DeviceMemory,
    adapter_host_bytes,
    check_row_state,
    host_kv_pages,
    kv_dtype,
    kv_pages,
    no_room_for_steps,
    staging_bytes,
    weight_bytes,
)
from rollout.engine.device.releasable import ReleasableMemory
from rollout.engine.device.streams import CpuDevice, Device
from rollout.engine.kv.memory import SequenceMemory, pages_for
from rollout.engine.kv.offload import Offload
from rollout.engine.kv.page_mover import HostRoom, PageMover
from rollout.engine.kv.parking import Parking
from rollout.engine.kv.pool import PagePool
from rollout.engine.loop import Engine, EngineParts
from rollout.engine.messages import Command, Event, RoutingShape
from rollout.engine.schedule.admission import SchedulerLimits
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.sleep import Sleeper
from rollout.engine.step.expert_trace import ExpertPages
from rollout.engine.step.graphs import DecodeGraphs, Progress, capturable
from rollout.engine.step.masks import usual_threads
from rollout.engine.step.packing import PADDING_WORDS, slot_words, upload_words
from rollout.engine.step.pipeline import Pipeline
from rollout.engine.step.rehearsal import StepNeeds, measure_steps
from rollout.engine.step.row_state import RowState
from rollout.engine.step.runner import Runner
from rollout.engine.step.slot import ALIGNMENT_WORDS, Slot
from rollout.engine.step.step_record import routing_shape
from rollout.metrics.meter import Meter
from rollout.models.adapters import AdapterSlots
from rollout.models.batch import KVCache
from rollout.models.decoder import Decoder
from rollout.models.deterministic import check_deterministic
from rollout.models.fused import supports
from rollout.weights.updates import Receiver

log = logging.getLogger(__name__)

_SLOTS = 2
_LEAST_PAGES = 2  # of a KV cache for steps on padding


def context_limit(settings: Settings, model: Decoder) -> int:
    """Prompt plus completion that a sequence may have, tokens. Raises ValueError when more is asked for than fits."""
    asked, made_for = settings.engine.max_context_tokens, model.spec.max_positions
    if asked is not None and asked > made_for:
        raise ValueError(f"max_context_tokens is {asked}, the model was made for {made_for}: lower it")
    return asked or made_for


def longest_sequence(settings: Settings, model: Decoder, engine: Engine) -> int:
    """Tokens, prompt and completion, that one sequence may have: what the model, the settings and the pool allow."""
    return min(context_limit(settings, model), engine.scheduler.memory.pool.total * settings.engine.page_size)


def build_engine(
    settings: Settings,
    device: Device,
    model: Decoder,
    inbox: SimpleQueue[Command],
    emit: Callable[[list[Event]], None],
    receiver: Receiver | None = None,
    progress: Progress | None = None,
    memory: ReleasableMemory | None = None,
) -> Engine:
    """An engine that is ready to tick. `emit` takes the events of a tick, on the loop's thread, and must not block.

    `progress` is told (done, in all) while decode steps are captured as CUDA graphs. `memory` is what `sleeping_memory`
    gave; without it that is called here. Raises ValueError with the numbers when rows, steps or KV don't fit into the
    device's memory beside the weights.
    """
    version, engine = settings.weights.initial_version, settings.engine
    memory = memory or sleeping_memory(settings, device, model)
    return Engine(
        _build_parts(settings, device, model, version, progress=progress, memory=memory),
        Meter(version=version),
        inbox,
        emit,
        receiver,
        recompute_on_swap=engine.kv_on_swap == "recompute",
        drain_s=settings.service.drain_s,
        mask_s=engine.mask_s,
        mask_threads=engine.mask_threads or usual_threads(),
        sleeper=Sleeper(memory, engine.sleep_rows, engine.sleep_requests, engine.sleep_kv_s),
    )


def sleeping_memory(settings: Settings, device: Device, model: Decoder) -> ReleasableMemory | None:
    """Memory that goes when the worker sleeps, with the model's weights in it; None for one that cannot sleep.

    Views of the weights that were taken before are of other memory.
    """
    if not settings.engine.sleep:
        return None
    memory = ReleasableMemory(device)
    memory.take_over(model.parameters(), kept=True)
    return memory


def rebuild_engine(engine: Engine, settings: Settings) -> None:
    """Make a failed engine whole: new streams, slots, row state and books, an empty KV pool, the weights as they are.

    Weights are written by swaps alone, so without one under way they are whole. Raises RuntimeError (of CUDA, too)
    when the weights or the device are not.
    """
    if engine.swapping:
        raise RuntimeError("the weights were being changed; only a new process has whole ones")
    if engine.sleeper.memory is not None and engine.sleeper.memory.released:
        raise RuntimeError("the memory is given back; only a new process has some")
    runner = engine.runner
    runner.close()  # what was launched has ended: nothing writes to the KV any more
    runner.device.synchronize()  # a broken CUDA context raises here
    runner.graphs = None  # their memory goes with them
    if runner.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.inference_mode():
        for cache in runner.kv.tensors:
            cache.zero_()  # a page may hold NaN, which masks don't hold back
    room = None if runner.mover is None else runner.mover.room
    lasting = _Lasting(runner.kv, runner.adapters, room)
    parts = _build_parts(settings, runner.device, runner.model, engine.scheduler.version, lasting)
    if (old := engine.scheduler.memory.adapters) is not None and (new := parts.scheduler.memory.adapters) is not None:
        new.inherit(old)
    engine.adopt(parts)


@dataclass(frozen=True, slots=True)
class _Lasting:
    """Memory that a fault leaves as it is: large, and nothing in it is counted on."""

    kv: KVCache
    adapters: AdapterSlots | None
    room: HostRoom | None


def _build_parts(
    settings: Settings,
    device: Device,
    model: Decoder,
    version: int,
    lasting: _Lasting | None = None,
    progress: Progress | None = None,
    memory: ReleasableMemory | None = None,
) -> EngineParts:
    engine, vocab = settings.engine, model.spec.vocab
    _check_experts(engine, model)
    _check_deterministic(engine, model)
    routing = kept_routing(engine, model)
    context = context_limit(settings, model)
    most_pages = pages_for(context, engine.page_size)
    check_row_state(engine, most_pages, model, device.free_bytes())
    adapters = _adapter_slots(engine, model, device, memory) if lasting is None else lasting.adapters
    rows = RowState(engine.max_rows, most_pages, vocab, device.torch_device, adapters is not None)
    words = slot_words(engine.max_rows, most_pages, context, engine.prefill_chunk_tokens)
    slots = [Slot(device, words, engine.max_rows, vocab, engine.prefill_chunk_tokens, routing) for _ in range(_SLOTS)]
    device.synchronize()  # weights and zeroed buffers were enqueued on a stream that the engine's do not wait for
    kv_now = _allocate_kv(model, _LEAST_PAGES, engine) if lasting is None else lasting.kv
    runner = Runner(device, model, kv_now, rows, engine.fused_experts, engine.deterministic, adapters)
    captured = engine.cuda_graphs and capturable(model, engine.fused_experts)
    try:
        graph_rows = min(engine.max_rows, engine.cuda_graph_rows) if captured else None
        if lasting is None:
            runner.kv = _planned_kv(settings, runner, slots, graph_rows, memory)
            device.synchronize()
        runner.mover = _mover(settings, runner, None if lasting is None else lasting.room)
        if graph_rows is not None:
            runner.graphs = DecodeGraphs(runner, context, graph_rows)
            runner.graphs.capture(slots, progress)
    except BaseException:
        runner.close()
        raise
    limits = SchedulerLimits(
        max_rows=engine.max_rows,
        max_queue=settings.service.max_queue,
        max_context=context,
        chunk_tokens=engine.prefill_chunk_tokens,
        upload_words=words - ALIGNMENT_WORDS - PADDING_WORDS,
    )
    pool = PagePool(len(runner.kv.k[0]))
    session_pages = int(engine.session_share * pool.total)
    mover = runner.mover
    room_pages, page_bytes = (0, 0) if mover is None else (mover.room.pages, mover.room.page_bytes)
    experts = None if routing is None else ExpertPages(routing, len(runner.kv.k[0]), engine.page_size, room_pages)
    if experts is not None:
        log.info("experts of tokens are kept", extra={"host_bytes": experts.nbytes})
    table = None
    if adapters is not None and runner.loads is not None:
        table = AdapterTable(adapters, device, runner.loads, runner.compute, engine.max_adapters)
    parking = None if mover is None else Parking(pool, engine.page_size, room_pages, page_bytes)
    books = SequenceMemory(pool, engine.page_size, engine.prefix_cache, experts, session_pages, table, parking)
    scheduler = Scheduler(limits, books, version, time.perf_counter, upload_words)
    offload = None if mover is None or parking is None else Offload(scheduler, parking, mover)
    return EngineParts(scheduler, Pipeline(slots, engine.pipeline_depth), runner, offload)


def _mover(settings: Settings, runner: Runner, room: HostRoom | None) -> PageMover | None:
    """What takes pages to the host, with the memory for them there (`room`, if there is some already)."""
    engine, device = settings.engine, runner.device
    if room is None:
        page_bytes = sum(tensor[0].nbytes for tensor in runner.kv.tensors)
        adapter_bytes = adapter_host_bytes(engine, runner.model)
        pages = host_kv_pages(engine, page_bytes, CpuDevice().free_bytes(), adapter_bytes)
        if pages == 0:
            return None
        began_s = time.perf_counter()
        room = HostRoom(device, pages, page_bytes)
        facts = {"pages": pages, "host_bytes": pages * page_bytes, "seconds": round(time.perf_counter() - began_s, 1)}
        log.info("KV of preempted sequences is kept on the host", extra=facts)
    return PageMover(device, runner.kv, room, int(engine.host_kv_piece_mib * 2**20), runner.compute)


def _adapter_slots(
    engine: EngineSettings, model: Decoder, device: Device, memory: ReleasableMemory | None
) -> AdapterSlots | None:
    """Device memory for adapters, if any are served. Raises ValueError with the numbers where there is too little."""
    if not engine.adapter_slots:
        return None
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


def _check_experts(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError for coded experts that no kernel reads: on a GPU each step would decode all of them."""
    assert model.experts == engine.expert_format, "the model was loaded for other settings"
    if model.experts != "plain" and model.embed.is_cuda and not supports(model, engine.fused_experts):
        raise ValueError(
            f"expert_dtype = {model.experts}, and the fused kernels don't run {model.spec.architecture} in "
            f"{model.embed.dtype} with the biases of this checkpoint: use expert_dtype = auto, or bfloat16"
        )


def kept_routing(engine: EngineSettings, model: Decoder) -> RoutingShape | None:
    """What is kept of the experts that tokens take. Raises ValueError where that is asked of a model without any."""
    if not engine.routing:
        return None
    shape = routing_shape(model.spec)
    if shape is None:
        raise ValueError(
            f"routing is set, but {model.spec.architecture} of this checkpoint has no experts: leave it out"
        )
    return shape


def _check_deterministic(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError where steps can't be made deterministic: only the fused kernels' can."""
    if not engine.deterministic:
        return
    if not supports(model, engine.fused_experts):
        experts = ", with fused_experts" if model.spec.moe is not None else ""
        raise ValueError(
            f"deterministic needs the fused kernels: a GPU, a model in 16 bits without biases of its output and MLP "
            f"products{experts}; torch's own products on a {model.embed.device.type} depend on the batch"
        )
    check_deterministic(model.spec)


def _planned_kv(
    settings: Settings, runner: Runner, slots: list[Slot], graph_rows: int | None, memory: ReleasableMemory | None
) -> KVCache:
    """The KV pool, of what memory the largest steps leave; on a GPU these are run to find out."""
    engine, model, device = settings.engine, runner.model, runner.device
    context, needs = context_limit(settings, model), StepNeeds()
    free_bytes = device.free_bytes() - staging_bytes(engine)
    on_gpu = device.torch_device.type == "cuda"
    try:
        if on_gpu:
            chunk_tokens = engine.prefill_chunk_tokens
            needs = measure_steps(runner, slots, engine.max_rows, chunk_tokens, context, graph_rows)
    except torch.OutOfMemoryError as error:
        raise no_room_for_steps(engine, model, free_bytes) from error
    there = DeviceMemory(weight_bytes(model), free_bytes, needs)
    pages = kv_pages(engine, model, kv_dtype(engine, model), context, there)
    if on_gpu:
        log.info("%s", there, extra={"kv_pages": pages, "page_size": engine.page_size})
    return _allocate_kv(model, pages, engine, memory)


def _allocate_kv(model: Decoder, pages: int, engine: EngineSettings, memory: ReleasableMemory | None = None) -> KVCache:
    zeros = None if memory is None else memory.zeros
    return KVCache.allocate(model.spec, pages, engine.page_size, kv_dtype(engine, model), model.embed.device, zeros)
