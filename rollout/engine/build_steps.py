"""The device's side of an engine: row state, slots, KV, captured steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from rollout_kernels.parallel import ONE_RANK

from rollout.engine.build_kv import (
    NO_HOST_MEMORY,
    allocate_host_states,
    allocate_kv,
    allocate_states,
    host_memory_of,
    open_disk,
)
from rollout.engine.device.streams import CpuDevice, DeviceStream, Streams
from rollout.engine.features.all import FEATURES, MakeFeature, MeasuresSteps, host_bytes
from rollout.engine.kv.allocator import pages_for
from rollout.engine.kv.tiers.page_mover import HostMemory, PageMover
from rollout.engine.schedule.step_feature import find_feature, of_kind
from rollout.engine.sizing import (
    DeviceMemory,
    PoolSize,
    check_row_state,
    chunk_tokens,
    context_limit,
    host_kv_pages,
    kv_dtype,
    kv_pages,
    no_room_for_steps,
    staging_bytes,
    states_on_host,
    weight_bytes,
)
from rollout.engine.step.device_feature import AheadFeature, DeviceFeature, Orders, OrderSizes, Site
from rollout.engine.step.device_step import DeviceStep, make_forward
from rollout.engine.step.execute import Executor, Movers, RankRole
from rollout.engine.step.graphs import Progress, capturable, make_graphs
from rollout.engine.step.pack import slot_words
from rollout.engine.step.rehearsal import StepNeeds, StepSizes, measure_steps
from rollout.engine.step.row_state import RowState
from rollout.engine.step.shared_pages import most_shared_rows
from rollout.engine.step.slot import Slot
from rollout.models.batch import KVCache
from rollout.models.decoder import Decoder
from rollout.models.language_model import LanguageModel
from rollout.models.state_pool import States

log = logging.getLogger(__name__)

_SLOTS = 2
_LEAST_PAGES = 2  # the smallest KV cache: room for steps on padding


@dataclass(frozen=True, slots=True)
class Memory:
    """Large memory that outlives a fault; its content does not."""

    features: Seq[DeviceFeature]
    states: States
    kv: KVCache | None = None  # None before the first start: its size is not known
    host_memory: HostMemory = NO_HOST_MEMORY  # host memory for KV
    host_states: HostMemory = NO_HOST_MEMORY

    @classmethod
    def begin(cls, site: Site, features: Seq[MakeFeature] = FEATURES) -> Memory:
        """The memory that is allocated before the KV."""
        made = [feature for make in features if (feature := make(site)) is not None]
        find_feature(made, AheadFeature)  # type: ignore[type-abstract]  # raises for two
        return cls(made, allocate_states(site))

    @classmethod
    def of(cls, executor: Executor) -> Memory:
        """The memory of an executor that a fault ended."""
        step = executor.step
        movers = executor.movers
        return cls(step.features, step.kv.states, step.kv, host_memory_of(movers.kv), host_memory_of(movers.states))


def _with_host_memory(site: Site, memory: Memory, kv: KVCache) -> Memory:
    """Add the KV and, if it moves to the host, host memory; every rank has the same number of pages."""
    engine, device = site.settings.engine, site.device
    page_bytes = sum(tensor[0].nbytes for tensor in kv.tensors)
    reserved_bytes = host_bytes(engine, site.model)
    state_bytes = states_on_host(engine, site.model) * site.model.spec.state_bytes(site.model.embed.dtype)
    pages = host_kv_pages(engine, page_bytes, CpuDevice().free_bytes(), reserved_bytes, state_bytes)
    if pages == 0:
        return replace(memory, kv=kv)
    pages = _least_of_all_ranks(site.model, pages)  # computed before any rank takes memory of the same host
    began_s = time.perf_counter()
    host_memory = HostMemory(device, pages, page_bytes)
    facts = {"pages": pages, "host_bytes": pages * page_bytes, "seconds": round(time.perf_counter() - began_s, 1)}
    log.info("the host has memory for KV", extra=facts)
    return replace(memory, kv=kv, host_memory=host_memory, host_states=allocate_host_states(site))


@dataclass(frozen=True, slots=True)
class Steps:
    """The executor of steps, and the bounds of their uploads."""

    executor: Executor
    slots: list[Slot]
    context: int  # longest sequence, tokens
    chunk: int  # most tokens of a prefill step
    words: int  # int32 words of the largest upload


def build_steps(site: Site, memory: Memory, progress: Progress) -> Steps:
    """The device's side of an engine: row state, slots, KV, captured steps."""
    settings, device, model = site.settings, site.device, site.model
    engine, vocab = settings.engine, model.spec.vocab
    context = context_limit(settings.engine, model)
    most_pages = pages_for(context, engine.page_size)
    check_row_state(engine, most_pages, model, device.free_bytes())
    features = memory.features
    columns = [feature.name for feature in features if feature.row_column]
    rows = RowState(engine.step_rows, most_pages, vocab, device.torch_device, columns)
    for feature in of_kind(features, AheadFeature):  # type: ignore[type-abstract]
        feature.begin_rows(rows)
    chunk = chunk_tokens(engine, model)
    words = slot_words(engine.max_rows, most_pages, context, chunk, features)
    group = model.group if isinstance(model, Decoder) else ONE_RANK
    slots = [Slot(device, words, engine.step_rows, vocab, chunk, features, group) for _ in range(_SLOTS)]
    device.synchronize()  # weights and zeroed buffers were enqueued on a stream that the engine's do not wait for
    executor = _build_executor(site, rows, slots, memory, progress)
    return Steps(executor, slots, context, chunk, words)


def _build_executor(site: Site, rows: RowState, slots: list[Slot], memory: Memory, progress: Progress) -> Executor:
    """The device's side: streams, KV pool, captured steps. On an error the streams end."""
    settings, device, model, engine = site.settings, site.device, site.model, site.settings.engine
    context = context_limit(settings.engine, model)
    kv = memory.kv or allocate_kv(model, _LEAST_PAGES, engine, memory.states)
    forward = make_forward(model, engine.deterministic, engine.fp8_activations_from)
    step = DeviceStep(model, forward, kv, rows, engine.deterministic, _shares_pages(site), memory.features)
    captured = engine.cuda_graphs and capturable(model)
    graph_rows = min(engine.step_rows, engine.cuda_graph_rows) if captured else 0
    streams = Streams.make(device, [feature.name for feature in memory.features if feature.own_stream])
    again = memory.kv is not None
    with contextlib.ExitStack() as failed:
        failed.callback(streams.close)
        if memory.kv is None:
            step = step.with_kv(_planned_kv(site, Executor(device, streams, step), slots, graph_rows))
            device.synchronize()
            memory = _with_host_memory(site, memory, step.kv)
        graphs = make_graphs(step, streams.compute, context, graph_rows)
        graphs.capture(slots, progress)
        measured = Executor(device, streams, step, graphs)
        for feature in step.features:
            if isinstance(feature, MeasuresSteps):
                feature.measure(measured, slots[0])
        words, width = slots[0].staging.words.numel(), slots[0].masks.host.shape[1]
        # From here on the other ranks follow orders.
        orders = site.lead(OrderSizes(words, engine.step_rows, width, chunk_tokens(engine, model)))
        movers = _make_movers(site, memory, step.kv, streams.compute, orders, again)
        failed.pop_all()
    rank = RankRole(orders, not site.follows, engine.check_ranks and step.group.size > 1)
    return Executor(device, streams, step, graphs, movers, rank)


def _make_movers(site: Site, memory: Memory, kv: KVCache, compute: DeviceStream, orders: Orders, again: bool) -> Movers:
    """The movers to the host memory; on the first rank also folders. On an error they end. `again`: after a fault."""
    engine, device, movers = site.settings.engine, site.device, Movers()
    host, host_states = memory.host_memory, memory.host_states
    try:
        if host.pages:
            piece_bytes = int(engine.constants.host_kv_piece_mib * 2**20)
            movers = movers._replace(kv=PageMover(device, kv.tensors, host, piece_bytes, compute, orders=orders))
        if host_states.pages:
            tensors = memory.states.tensors  # they are moved one at a time
            movers = movers._replace(states=PageMover(device, tensors, host_states, 1, compute, "state", orders))
        if not site.follows:
            share = host_states.nbytes / max(1, host_states.nbytes + host.nbytes)
            movers = movers._replace(disk=open_disk(engine, movers.kv, 1 - share, again, "kv", orders))
            movers = movers._replace(state_disk=open_disk(engine, movers.states, share, again, "state", orders))
    except BaseException:
        movers.close()
        raise
    return movers


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
            sizes = StepSizes(engine.step_rows, chunk_tokens(engine, model), context, graph_rows)
            needs = measure_steps(executor, slots, sizes)
    except torch.OutOfMemoryError as error:
        raise no_room_for_steps(engine, model, free_bytes) from error
    there = DeviceMemory(weight_bytes(model), free_bytes, needs)
    pages = kv_pages(engine, model, kv_dtype(engine, model), context, there)
    pages = _least_of_all_ranks(model, pages)
    size = PoolSize(pages, engine.page_size, context, engine.max_rows)
    log.info("%s; %s", size, there, extra=size.facts)
    return allocate_kv(model, pages, engine, executor.step.kv.states, site.memory.zeros)


def _least_of_all_ranks(model: LanguageModel, pages: int) -> int:
    """The pages that every rank of the model's tensor group has room for."""
    if not isinstance(model, Decoder):
        return pages
    mine = torch.tensor([pages], dtype=torch.int64, device=model.embed.device)
    return int(model.group.all_gather(mine).min())
