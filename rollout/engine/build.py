"""Puts an engine together from settings and a loaded model; sizes the KV pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

from rollout.config import Settings
from rollout.engine.admission import SchedulerLimits
from rollout.engine.device import Device
from rollout.engine.engine import Engine, EngineParts, Receiver
from rollout.engine.graphs import DecodeGraphs
from rollout.engine.memory import SequenceMemory, pages_for
from rollout.engine.pages import PagePool
from rollout.engine.pipeline import Pipeline
from rollout.engine.rows import RowState
from rollout.engine.runner import Runner, slot_words, upload_words
from rollout.engine.scheduler import Scheduler
from rollout.engine.slot import Slot
from rollout.engine.types import Command, Event
from rollout.metrics.meter import Meter
from rollout.models.batch import KVCache
from rollout.models.decoder import Decoder
from rollout.models.fused import FusedDecoder, supports

_SLOTS = 2

#: Told (done, in all).
Progress = Callable[[int, int], None]


def context_limit(settings: Settings, model: Decoder) -> int:
    """Prompt plus completion that a sequence may have, tokens. Raises ValueError when more is asked for than fits."""
    asked, made_for = settings.engine.max_context_tokens, model.spec.max_positions
    if asked is not None and asked > made_for:
        raise ValueError(f"max_context_tokens is {asked}, the model was made for {made_for}: lower it")
    return asked or made_for


def longest_sequence(settings: Settings, model: Decoder, engine: Engine) -> int:
    """Tokens, prompt and completion, that one sequence may have: what the model, the settings and the pool allow."""
    return min(context_limit(settings, model), engine.scheduler.memory.pool.total * settings.engine.page_size)


def kv_pages(settings: Settings, model: Decoder, dtype: torch.dtype, free_bytes: int) -> int:
    """Pages of the KV pool, the dump page included.

    From `engine.kv_pages`, or else from the memory that is free now, up to what all rows could ever use. Raises
    ValueError with the numbers when not even one page for each row fits.
    """
    engine = settings.engine
    if engine.kv_pages is not None:
        return engine.kv_pages
    page_bytes = model.spec.kv_bytes_per_token(dtype) * engine.page_size
    budget = free_bytes * engine.kv_memory_fraction
    if engine.kv_memory_max_gib is not None:
        budget = min(budget, engine.kv_memory_max_gib * 2**30)
    most = engine.max_rows * pages_for(context_limit(settings, model), engine.page_size) + 1
    pages = min(int(budget // page_bytes), most)
    if pages < engine.max_rows + 1:
        raise ValueError(
            f"{budget / 2**30:.2f} GiB for KV hold {pages} pages of {engine.page_size} tokens ({page_bytes} bytes "
            f"each), fewer than max_rows = {engine.max_rows}: lower max_rows, or raise kv_memory_fraction"
        )
    return pages


def build_engine(
    settings: Settings,
    device: Device,
    model: Decoder,
    inbox: SimpleQueue[Command],
    emit: Callable[[list[Event]], None],
    receiver: Receiver | None = None,
    progress: Progress | None = None,
) -> Engine:
    """An engine that is ready to tick. `emit` takes the events of a tick, on the loop's thread, and must not block.

    `progress` is told (done, in all) while decode steps are captured as CUDA graphs.
    """
    version = settings.weights.initial_version
    return Engine(
        _build_parts(settings, device, model, version, progress=progress),
        Meter(version=version, keep_steps=max(settings.metrics.timeline_steps, 2)),
        inbox,
        emit,
        receiver,
        recompute_on_swap=settings.engine.kv_on_swap == "recompute",
        drain_s=settings.service.drain_s,
    )


def rebuild_engine(engine: Engine, settings: Settings) -> None:
    """Make a failed engine whole: new streams, slots, row state and books, an empty KV pool, the weights as they are.

    Weights are written by swaps alone, so without one under way they are whole. Raises RuntimeError (of CUDA, too)
    when the weights or the device are not.
    """
    if engine.swapping:
        raise RuntimeError("the weights were being changed; only a new process has whole ones")
    runner = engine.runner
    runner.close()  # what was launched has ended: nothing writes to the KV any more
    runner.device.synchronize()  # a broken CUDA context raises here
    runner.graphs = None  # their memory goes with them
    if runner.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.inference_mode():
        for cache in (*runner.kv.k, *runner.kv.v):
            cache.zero_()  # a page may hold NaN, which masks don't hold back
    engine.adopt(_build_parts(settings, runner.device, runner.model, engine.scheduler.version, runner.kv))


def _build_parts(
    settings: Settings,
    device: Device,
    model: Decoder,
    version: int,
    kv: KVCache | None = None,
    progress: Progress | None = None,
) -> EngineParts:
    engine = settings.engine
    dtype = model.embed.dtype
    context = context_limit(settings, model)
    most_pages = pages_for(context, engine.page_size)
    rows = RowState(engine.max_rows, most_pages, model.spec.vocab, device.torch_device)
    words = slot_words(engine.max_rows, most_pages, context, engine.prefill_chunk_tokens)
    slots = [Slot(device, words, engine.max_rows) for _ in range(_SLOTS)]
    if kv is None:
        pages = kv_pages(settings, model, dtype, device.free_bytes())
        kv = KVCache.allocate(model.spec, pages, engine.page_size, dtype, device.torch_device)
    device.synchronize()  # weights and zeroed buffers were enqueued on a stream that the engine's do not wait for
    runner = Runner(device, model, kv, rows)
    if engine.cuda_graphs and supports(model):
        runner.graphs = DecodeGraphs(runner, FusedDecoder(model), context, engine.max_rows)
        runner.graphs.capture(slots, progress)
    limits = SchedulerLimits(
        max_rows=engine.max_rows,
        max_queue=settings.service.max_queue,
        max_context=context,
        chunk_tokens=engine.prefill_chunk_tokens,
        upload_words=words,
    )
    memory = SequenceMemory(PagePool(len(kv.k[0])), engine.page_size, engine.prefix_cache)
    return EngineParts(
        Scheduler(limits, memory, version, time.perf_counter, upload_words),
        Pipeline(slots, engine.pipeline_depth),
        runner,
    )
