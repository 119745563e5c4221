"""Puts an engine together from settings and a loaded model."""

import functools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from queue import SimpleQueue

import torch

from rollout.config import Settings
from rollout.engine.build_kv import Totals, build_allocator, host_memory_of
from rollout.engine.build_steps import Memory, build_steps
from rollout.engine.device.cuda_pages import CudaPages
from rollout.engine.device.releasable import HostPages, PermanentMemory, ReleasableMemory
from rollout.engine.device.streams import Device
from rollout.engine.features.all import FEATURES, MakeFeature
from rollout.engine.gate import Gate
from rollout.engine.kv.tier import PageMirror
from rollout.engine.loop import Engine
from rollout.engine.messages.to_service import Event
from rollout.engine.model_checks import check_model
from rollout.engine.parts import EngineLinks, EngineParts, NoReceiver, Receiver
from rollout.engine.schedule.admission import SchedulerLimits
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.sizing import PoolSize, context_limit
from rollout.engine.step.device_feature import HostParts, Lead, Site, alone
from rollout.engine.step.execute import Executor
from rollout.engine.step.graphs import Progress, no_progress
from rollout.engine.step.pack import Packer, spare_words, upload_words
from rollout.engine.step.pipeline import Pipeline
from rollout.engine.step.shared_pages import make_shared_pages
from rollout.engine.step.slot import Slot
from rollout.metrics.meter import Meter
from rollout.models.language_model import LanguageModel


def longest_sequence(settings: Settings, model: LanguageModel, engine: Engine) -> int:
    """The longest prompt plus completion that the model, the settings and the pool allow, tokens."""
    pages, asked = engine.roster.allocator.pool.total_of_rank + 1, settings.engine
    return PoolSize(pages, asked.page_size, context_limit(asked, model), asked.max_rows).longest


def local_links(
    settings: Settings, emit: Callable[[list[Event]], None], receiver: Receiver | None = None
) -> EngineLinks:
    """Links of an engine without a worker around it, for benchmarks and tests."""
    gate = Gate(settings.service.drain_s, takes_weights=receiver is not None)
    return EngineLinks(SimpleQueue(), emit, gate, receiver or NoReceiver())


def build_engine(
    settings: Settings,
    device: Device,
    model: LanguageModel,
    links: EngineLinks,
    *,
    memory: ReleasableMemory | None = None,
    progress: Progress = no_progress,
    lead: Lead = alone,
    features: Seq[MakeFeature] = FEATURES,
    shared: Seq[object] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """An engine that is ready to tick.

    `memory` is the result of `sleeping_memory`, which is called here if it is absent. `progress` is called with (done,
    total) while decode steps are captured as CUDA graphs. `lead` is the lead of a tensor group's first rank. `shared`
    is as in `Site`. `clock` gives the time of deadlines and leases, seconds. Raises ValueError with the numbers when
    rows, steps or KV do not fit into the device's memory next to the weights.
    """
    version = settings.weights.initial_version
    memory = memory or sleeping_memory(settings, device, model)
    site = Site(settings, device, model, memory, lead, shared=shared)
    check_model(settings.engine, model)
    parts = _build_parts(site, version, Memory.begin(site, features), Totals(), clock, progress)
    sleeps = parts.executor.orders.memory_of_all(memory)
    return Engine(parts, links, Meter(version=version), sleeps, settings.engine)


def build_follower(
    settings: Settings,
    device: Device,
    model: LanguageModel,
    memory: ReleasableMemory,
    progress: Progress = no_progress,
) -> tuple[Executor, list[Slot]]:
    """The executor of a rank other than the first. Building it takes part in the first rank's collective operations.

    `memory` is the result of `sleeping_memory`. `progress` is as in `build_engine`.
    """
    check_model(settings.engine, model)
    site = Site(settings, device, model, memory, follows=True)
    steps = build_steps(site, Memory.begin(site), progress)
    return steps.executor, steps.slots


def sleeping_memory(
    settings: Settings, device: Device, model: LanguageModel, host_pages: type[HostPages] = HostPages
) -> ReleasableMemory:
    """Memory that a sleep gives back, with the model's weights in it, if this worker can sleep.

    The weights move there, so views of them that were taken before still refer to the old memory. On a CPU it is memory
    of `host_pages`.
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
        raise RuntimeError("a fault interrupted a change of the weights, so they may be mixed: restart the worker")
    memory = engine.sleeper.memory
    assert isinstance(memory, ReleasableMemory), "a tensor group is not made whole"
    if memory.released:
        raise RuntimeError("the fault came during a sleep, when the memory was released: restart the worker")
    executor, step = engine.executor, engine.executor.step
    executor.close()  # all launched work has ended: nothing writes to the KV any more
    executor.device.synchronize()  # a broken CUDA context raises here
    if executor.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.inference_mode():
        for cache in step.kv.tensors:
            cache.zero_()  # a page may hold NaN, and masks do not hide NaN
    site = Site(settings, executor.device, step.model, memory)
    roster = engine.roster
    engine.restart(_build_parts(site, roster.version, Memory.of(executor), Totals.of(roster), roster.clock))


def _build_parts(
    site: Site,
    version: int,
    memory: Memory,
    totals: Totals,
    clock: Callable[[], float],
    progress: Progress = no_progress,
) -> EngineParts:
    settings, model = site.settings, site.model
    engine = settings.engine
    steps = build_steps(site, memory, progress)
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
    mirrors = [feature for feature in features if isinstance(feature, PageMirror)]
    allocator = build_allocator(site, executor, mirrors, totals)
    roster = Roster(allocator, engine.max_rows, version, clock, totals.counters, features)
    step = executor.step
    shared = make_shared_pages(model, step.kv, engine, step.shares_pages)
    packer = Packer(executor.graphs.sizes, shared, allocator.prefixes.has_states, roster.in_step)
    scheduler = Scheduler(limits, roster, functools.partial(upload_words, features=step.features))
    return EngineParts(roster, scheduler, Pipeline(slots, engine.pipeline_depth), packer, executor, allocator.tier)


def _host_features(executor: Executor, version: int, before: Seq[StepFeature]) -> list[StepFeature]:
    """The features' parts on the host; they continue the totals of the features `before` a fault."""
    kept = {feature.name: feature for feature in before}
    host_pages = host_memory_of(executor.mover).pages
    parts = HostParts(executor.streams, executor.orders, executor.step.kv, host_pages, version)
    return [feature.host_part(parts, kept.get(feature.name)) for feature in executor.step.features]
