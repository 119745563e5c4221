"""Plans how a worker divides the memory of a GPU, without that GPU and without the weights.

    GPU memory | weights | update | rows, states, ... | steps | KV pool | kept free |
                                                      |<------ kv_memory_fraction ------>| of what is left

The model is an outline: shapes on torch's meta device, from config.json and the headers of the tensors. Everything is
counted by the functions with which the engine sizes itself (`rollout.engine.sizing`, `rollout.weights`). One figure is
an estimate: what the largest steps take, which a worker on a GPU measures when it starts (`steps_estimate`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rollout_kernels.parallel import TensorGroup

from rollout.config import EngineSettings, Settings
from rollout.engine.features.all import host_bytes
from rollout.engine.features.images.encoder import image_buffer_bytes
from rollout.engine.kv.allocator import pages_for
from rollout.engine.sizing import (
    DeviceMemory,
    DeviceTarget,
    PoolSize,
    check_row_state,
    check_states,
    chunk_tokens,
    context_limit,
    host_kv_pages,
    kv_budget,
    kv_dtype,
    kv_pages,
    page_bytes_of,
    staging_bytes,
    state_pool_bytes,
    states_on_host,
    weight_bytes,
)
from rollout.engine.step.rehearsal import StepNeeds
from rollout.engine.step.row_state import RowState
from rollout.models import load_model
from rollout.models.coded import coded_products
from rollout.models.decoder import Decoder
from rollout.models.language_model import native
from rollout.models.loader import check_cut
from rollout.models.lora_slots import AdapterSlots, corrected_products
from rollout.models.spec import DenseSpec, LayerSpec, MoESpec
from rollout.process.host_memory import available_bytes
from rollout.weights.kept_memory import parameter_bytes, takes_device
from rollout.weights.staging import HOST_SHARE

GIB = 2**30
_META = torch.device("meta")


class Gpu(NamedTuple):
    """A kind of GPU."""

    gib: float  # memory as CUDA reports it, which is less than the name says
    capability: tuple[int, int]


#: Bytes of a card by its name. Cards of one kind differ by some tens of MiB; these are the smaller ones.
GPUS = {
    "l4": Gpu(22.03, (8, 9)),
    "rtx4090": Gpu(23.64, (8, 9)),
    "a100-40": Gpu(39.38, (8, 0)),
    "l40s": Gpu(44.40, (8, 9)),
    "a100-80": Gpu(79.14, (8, 0)),
    "h100": Gpu(79.18, (9, 0)),
    "h200": Gpu(139.72, (9, 0)),
}
#: Memory of steps on a GPU: a part that hardly depends on the model (CUDA, kernels, captured steps), and a multiple of
#: what the largest steps write. Both are the least squares of eleven KV pools that workers measured; the worst is 6 %
#: off (scripts/bench/results, tests/unit/test_memory_plan.py).
_STEPS_FIXED, _STEPS_FACTOR = 2 * GIB, 1.6


class Machine(NamedTuple):
    """The machine of a plan: a device for each rank."""

    name: str
    total: int  # bytes that a rank has for everything
    target: DeviceTarget
    host: float = float("inf")  # free memory of the host, bytes; infinite if it is not known

    @classmethod
    def gpu(cls, name: str) -> Machine:
        """A GPU of the table, or one with the GiB that `name` states. Raises ValueError for another name."""
        try:
            known = GPUS.get(name.lower()) or Gpu(float(name), (9, 0))
        except ValueError:
            raise ValueError(
                f"the GPU {name!r} is unknown: write its memory in GiB, or one of {', '.join(GPUS)}"
            ) from None
        if not 0 < known.gib < 10_000:
            raise ValueError(f"a GPU must have more than 0 and less than 10000 GiB, not {name}")
        return cls(name.lower(), int(known.gib * GIB), DeviceTarget("cuda", known.capability))

    @classmethod
    def this_cpu(cls) -> Machine:
        """The CPU of this machine, with the memory that is free now."""
        free = available_bytes()
        return cls("cpu", int(free), DeviceTarget("cpu"), free)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one rank, bytes. `problem` says why a worker would not start; then there is no pool."""

    machine: str
    ranks: int
    dtype: str
    from_headers: bool  # sizes were checked against the tensors' headers; else they follow from config.json alone
    total: int
    weights: int
    update: int  # the staged copy of an update
    staging: Literal["device", "host", "in_place"]
    row_state: int
    states: int  # states of linear attention
    adapters: int
    images: int
    kv_buffers: int  # buffers for KV on its way to the host
    steps: int  # estimate on a GPU; not measured, and 0, on a CPU
    kv_room: int  # room for a pool
    page_bytes: int
    kv_dtype: str
    pool: PoolSize | None
    host_kv_tokens: int
    host_states: int
    host_adapters: int  # the most that adapters can take on the host
    problem: str | None = None
    advice: list[str] = field(default_factory=list)

    @property
    def before_kv(self) -> int:
        """Bytes that are allocated before the pool."""
        parts = self.row_state, self.states, self.adapters, self.images, self.kv_buffers
        return self.weights + self.update_on_device + sum(parts)

    @property
    def update_on_device(self) -> int:
        """Bytes of a staged update in the GPU's memory."""
        return self.update if self.staging == "device" else 0

    @property
    def kv_pool(self) -> int:
        return 0 if self.pool is None else self.pool.pages * self.page_bytes

    @property
    def fits(self) -> bool:
        """Whether a worker would start, and one sequence of full length would fit."""
        return self.pool is not None and self.pool.longest == self.pool.context

    def rows_of(self, tokens: int) -> int:
        """Rows of this length for which there is memory, however many `max_rows` allows."""
        return (
            0
            if self.pool is None
            else max(0, self.kv_room // self.page_bytes - 1) // pages_for(tokens, self.pool.page_size)
        )

    def fields(self) -> dict[str, Any]:
        pool = self.pool
        return {
            "device": self.machine,
            "ranks": self.ranks,
            "dtype": self.dtype,
            "from_headers": self.from_headers,
            "fits": self.fits,
            "problem": self.problem,
            "advice": self.advice,
            "bytes_a_rank": {
                "total": self.total,
                "weights": self.weights,
                "update": self.update_on_device,
                "row_state": self.row_state,
                "states": self.states,
                "adapters": self.adapters,
                "images": self.images,
                "kv_buffers": self.kv_buffers,
                "steps_estimate": self.steps,
                "kv_pool": self.kv_pool,
                "kept_free": max(0, self.total - self.before_kv - self.steps - self.kv_pool),
            },
            "staging": self.staging,
            "kv": None
            if pool is None
            else {
                "dtype": self.kv_dtype,
                "pages": pool.pages,
                "page_size": pool.page_size,
                "tokens": pool.tokens,
                "bytes_a_token": self.page_bytes // pool.page_size,
                "context": pool.context,
                "longest_sequence": pool.longest,
                "max_rows": pool.max_rows,
                "rows_at_full_context": self.rows_of(pool.context),
                "rows_at_a_quarter": self.rows_of(max(1, pool.context // 4)),
            },
            "host": {
                "kv_tokens": self.host_kv_tokens,
                "states": self.host_states,
                "adapters_bytes": self.host_adapters,
                "update_bytes": self.update if self.staging == "host" else 0,
            },
        }


class Outline(NamedTuple):
    """The shapes of the first rank's part of a model."""

    model: Decoder  # on the meta device
    from_headers: bool  # headers of tensors were read for it
    weights: int  # bytes
    update: int  # bytes of an update of all weights


def outline(settings: Settings, folder: Path, draft: Path | None = None) -> Outline:
    """The outline of the model in `folder`, with a model that drafts for it in `draft`.

    A folder without safetensors has the shapes of its config.json. Raises ValueError as a worker does.
    """
    engine, model = settings.engine, settings.model
    on_cpu = model.device == "cpu"
    if on_cpu and model.dtype == "auto":
        model = model.model_copy(update={"dtype": "float32"})
    headers = model.load_format != "random" and any(folder.glob("model*.safetensors*"))
    if not headers:
        model = model.model_copy(update={"load_format": "random"})
    check_cut(model, folder, engine.tensor_parallel, engine.weight_format, engine.attention_split)
    group = TensorGroup(0, engine.tensor_parallel, _META)
    how = (engine.weight_format, group, draft, engine.mtp, engine.attention_split)
    loaded = load_model(model, _META, None, folder, *how)
    model_outline = native(loaded.model)
    return Outline(model_outline, headers, weight_bytes(model_outline), parameter_bytes(model_outline.hf_views()))


def steps_estimate(engine: EngineSettings, model: Decoder, target: DeviceTarget) -> StepNeeds:
    """Bytes of the largest steps: an estimate for a GPU, 0 on a CPU, where workers do not count it.

    The largest prefill step has `chunk_tokens` tokens, and each layer writes the outputs of its products; its logits
    are float32, for the rows and for 128 scored tokens. The weights of one product of codes are decoded.
    """
    if target.kind == "cpu":
        return StepNeeds()
    hidden, item = model.embed.shape[1], model.embed.dtype.itemsize
    a_token = 2 * hidden + max(_values_written(layer, hidden) for layer in model.spec.layers)
    of_tokens = chunk_tokens(engine, model, target) * a_token * item
    logits = 2 * (engine.step_rows + 128) * len(model.embed) * torch.float32.itemsize
    coded = [] if model.format == "plain" else coded_products(model.spec)
    decoded = max((part.outputs * part.inputs * item for part in coded), default=0)
    return StepNeeds(int(_STEPS_FACTOR * (of_tokens + logits)) + decoded, _STEPS_FIXED)


def _values_written(layer: LayerSpec, hidden: int) -> int:
    """Values that the products of a layer write for a token of a prefill."""
    values = sum(product.outputs for product in corrected_products(layer).values())
    block = layer.feed_forward
    if isinstance(block, MoESpec):
        values += block.router.top_k * (3 * block.intermediate + block.width)
        block = block.shared
    return values + (block.intermediate if isinstance(block, DenseSpec) else 0)


def plan_memory(settings: Settings, machine: Machine, folder: Path, draft: Path | None = None) -> MemoryPlan:
    """The plan of a worker with these settings on `machine`. Raises ValueError for settings that fit no machine."""
    return plan_outline(settings, machine, outline(settings, folder, draft))


def plan_outline(settings: Settings, machine: Machine, shapes: Outline) -> MemoryPlan:
    """Like `plan_memory`, for an outline with the same experts' format, ranks and draft model."""
    model, weights, update = shapes.model, shapes.weights, shapes.update
    engine, target, dtype = settings.engine, machine.target, model.embed.dtype
    context, kept_as = context_limit(engine, model), kv_dtype(engine, model, target)
    page_bytes = page_bytes_of(engine, model, kept_as)
    staging, problem = _staging(settings, machine, weights, update)
    tower = model.tower
    most_pages = pages_for(context, engine.page_size)
    row_state = RowState.nbytes(engine.step_rows, most_pages, model.spec.vocab)
    adapters = 0
    if engine.adapter_slots:
        adapters = AdapterSlots.bytes_for(model.spec, engine.adapter_slots, engine.adapter_rank, dtype)
    states, state = state_pool_bytes(engine, model), model.spec.state_bytes(dtype)
    images = 0 if tower is None else image_buffer_bytes(engine, tower.spec, dtype)
    kv_buffers, needs = staging_bytes(engine, state), steps_estimate(engine, model, target)
    left = machine.total - weights - (update if staging == "device" else 0)
    free = left - row_state - states - adapters - images - kv_buffers
    there = DeviceMemory(weights, free, needs)
    pool, host_tokens, on_host = None, 0, 0
    try:
        if weights > machine.total:
            raise ValueError(
                f"the weights take {weights / GIB:.2f} GiB, but there are only {machine.total / GIB:.2f} GiB"
            )
        if problem is not None:
            raise ValueError(problem)
        check_row_state(engine, most_pages, model, left)
        check_states(engine, model, left - row_state - adapters)
        pages = kv_pages(engine, model, kept_as, context, there, target)
        pool = PoolSize(pages, engine.page_size, context, engine.max_rows)
        host, on_host = host_bytes(engine, model), states_on_host(engine, model)
        available = 1 << 62 if machine.host == float("inf") else int(machine.host)
        host_tokens = host_kv_pages(engine, page_bytes, available, host, on_host * state) * engine.page_size
    except ValueError as error:
        problem, pool = str(error), None
    asked = None if engine.kv_pages is None else engine.kv_pages * page_bytes
    return MemoryPlan(
        machine=machine.name,
        ranks=engine.tensor_parallel,
        dtype=str(dtype).removeprefix("torch."),
        from_headers=shapes.from_headers,
        total=machine.total,
        weights=weights,
        update=update,
        staging=staging,
        row_state=row_state,
        states=states,
        adapters=adapters,
        images=images,
        kv_buffers=kv_buffers,
        steps=needs.total,
        kv_room=int(max(0, kv_budget(engine, there, target))) if asked is None else asked,
        page_bytes=page_bytes,
        kv_dtype=str(kept_as).removeprefix("torch."),
        pool=pool,
        host_kv_tokens=host_tokens,
        host_states=on_host,
        host_adapters=host_bytes(engine, model),
        problem=problem,
    )


def _staging(
    settings: Settings, machine: Machine, weights: int, update: int
) -> tuple[Literal["device", "host", "in_place"], str | None]:
    """Choose where updates are staged, as `weights.staging.make_staging` does; also what is wrong with it."""
    asked = settings.weights
    if asked.apply == "in_place":
        return "in_place", None
    free = max(0, machine.total - weights) if machine.target.kind == "cuda" else 0
    try:
        if takes_device(update, _META, asked.staging, free_bytes=free):
            return "device", None
    except ValueError as error:
        return "device", str(error)
    if asked.apply == "auto" and settings.engine.tensor_parallel == 1 and update > HOST_SHARE * machine.host:
        return "in_place", None
    return "host", None
