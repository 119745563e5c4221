"""The number of KV pages: free memory that the driver reports, minus the memory of the largest steps.

    device memory   | weights | row state, slots | activations | graphs | KV pages | kept free |
                                                 |<--------- free, before the first step ----->|
                                                 |<--------- kv_memory_fraction ---->|

The memory of the largest steps is measured, with a margin for fragments. The memory kept free on a GPU is for
communicators and buckets of updates, and for whole tensors of updates in place. Needs of the start and of steps do not
grow with the GPU, so by default little more than a constant is kept.

On a CPU steps are not measured and count as 0, and the default fraction is small: the trainer, the page cache and
other programs share this memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from rollout.config import EngineSettings
from rollout.engine.features.all import keeps_token_ids
from rollout.engine.kv.allocator import pages_for
from rollout.engine.step.rehearsal import StepNeeds
from rollout.engine.step.row_state import RowState
from rollout.models.decoder import Decoder
from rollout.models.language_model import LanguageModel
from rollout.models.spec import LatentSpec

_GIB = 2**30
#: States on the host for each row, with known prefixes' states.
_KEPT_STATES = 8
#: `kv_memory_fraction` on a CPU when it is absent.
CPU_FRACTION = 0.25
#: Memory kept free on a GPU without that setting: this share of the memory that the weights leave, at least these
#: bytes, and at most the largest share. With sleep the largest share stays free: a trainer uses the same GPU meanwhile.
KEPT_SHARE, KEPT_BYTES, KEPT_MOST = 0.05, 3 << 30, 0.15
#: `prefill_chunk_tokens` when it is absent. Mixtures of experts take more: each expert gets a small share of a chunk.
GPU_CHUNK, GPU_EXPERTS_CHUNK, CPU_CHUNK = 8192, 16384, 2048
#: The first compute capability that converts e4m3.
_FP8_CAPABILITY = (8, 9)


class DeviceTarget(NamedTuple):
    """The kind of device that a model runs on. A plan names one, since its model has shapes without memory."""

    kind: Literal["cpu", "cuda"]
    capability: tuple[int, int] | None = None  # compute capability of a GPU; None: the one of the model's device

    @classmethod
    def of(cls, model: LanguageModel) -> DeviceTarget:
        """The device that has the model's weights."""
        return cls("cuda" if model.embed.device.type == "cuda" else "cpu")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The figures that the KV pool is sized from, bytes."""

    weights: int
    free: int  # free memory after weights, row state and slots, before the first step
    needs: StepNeeds  # needs of the largest steps; 0 on a CPU

    def __str__(self) -> str:
        """One sentence for the log and for errors."""
        text = f"the weights take {_gib(self.weights)} and leave {_gib(self.free)} free"
        if self.needs.total:
            text += f", the largest steps take {_gib(self.needs.activations)}, captured ones {_gib(self.needs.graphs)}"
        return text


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The contents of a KV pool."""

    pages: int  # the dump page included
    page_size: int
    context: int  # longest sequence that model and settings allow, tokens
    max_rows: int

    @property
    def tokens(self) -> int:
        """Tokens of KV that fit."""
        return (self.pages - 1) * self.page_size

    @property
    def longest(self) -> int:
        """The longest sequence that fits, prompt and completion, tokens."""
        return min(self.context, self.tokens)

    @property
    def full_rows(self) -> int:
        """Rows that fit at once when all have that length."""
        return min(self.max_rows, (self.pages - 1) // pages_for(self.longest, self.page_size))

    @property
    def facts(self) -> dict[str, int]:
        """The figures for a log line."""
        return {
            "kv_pages": self.pages,
            "page_size": self.page_size,
            "kv_tokens": self.tokens,
            "longest_sequence": self.longest,
            "rows_of_that_length": self.full_rows,
        }

    def __str__(self) -> str:
        limit = f" (model and settings allow {self.context})" if self.longest < self.context else ""
        return (
            f"KV pool: {self.pages} pages of {self.page_size} hold {self.tokens} tokens; the longest sequence is "
            f"{self.longest} tokens{limit}, and {self.full_rows} of {self.max_rows} rows fit at that length"
        )


def weight_bytes(model: LanguageModel) -> int:
    """Bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def check_row_state(settings: EngineSettings, most_pages: int, model: LanguageModel, free_bytes: int) -> None:
    """Raise ValueError with the numbers if the rows' state alone does not fit."""
    needed = RowState.nbytes(settings.step_rows, most_pages, model.spec.vocab)
    if needed > free_bytes:
        raise ValueError(
            f"the state of max_rows = {settings.max_rows} rows takes {_gib(needed)}, but {_gib(weight_bytes(model))} "
            f"of weights leave only {_gib(free_bytes)} free: lower max_rows or max_context_tokens"
        )


def chunk_tokens(settings: EngineSettings, model: LanguageModel, target: DeviceTarget | None = None) -> int:
    """The most prompt tokens of a prefill step. On a GPU, experts are faster the more tokens each of them gets."""
    if settings.prefill_chunk_tokens is not None:
        return settings.prefill_chunk_tokens
    if (target or DeviceTarget.of(model)).kind == "cpu":
        return CPU_CHUNK
    return GPU_CHUNK if model.spec.moe is None else GPU_EXPERTS_CHUNK


def state_pool_bytes(settings: EngineSettings, model: LanguageModel) -> int:
    """Device memory for the states of rows, snapshots and tokens ahead of linear attention; 0 for other models."""
    each = model.spec.state_bytes(model.embed.dtype)
    if each == 0:
        return 0
    draft_bytes = (settings.step_rows - settings.max_rows) * model.spec.draft_bytes(model.embed.dtype)
    return (1 + settings.max_rows + settings.snapshot_places) * each + draft_bytes


def check_states(settings: EngineSettings, model: LanguageModel, free_bytes: int) -> None:
    """Raise ValueError with the numbers if the states of linear attention do not fit."""
    needed = state_pool_bytes(settings, model)
    if needed > free_bytes:
        each = model.spec.state_bytes(model.embed.dtype)
        rows, snapshots = settings.max_rows + 1, settings.snapshot_places
        draft_bytes = needed - (rows + snapshots) * each
        of_drafts, lower = "", "max_rows or state_snapshots"
        if draft_bytes:
            of_drafts = f", {_gib(draft_bytes)} for speculation_rows = {settings.speculation_rows}"
            lower = "max_rows, state_snapshots or speculation_rows"
        raise ValueError(
            f"the states of linear attention take {_gib(each)} each, {_gib(rows * each)} for max_rows = "
            f"{settings.max_rows} and {_gib(snapshots * each)} for {snapshots} snapshots{of_drafts}, and beside "
            f"{_gib(weight_bytes(model))} of weights {_gib(free_bytes)} are free: lower {lower}"
        )


def no_room_for_steps(settings: EngineSettings, model: LanguageModel, free_bytes: int) -> ValueError:
    """The error for steps that run out of memory before the KV pool is allocated."""
    return ValueError(
        f"the weights take {_gib(weight_bytes(model))} and leave {_gib(free_bytes)} free, which is too little for one "
        f"step of max_rows = {settings.max_rows} rows or prefill_chunk_tokens = "
        f"{chunk_tokens(settings, model)} tokens: lower these, or use a device with more memory"
    )


def context_limit(settings: EngineSettings, model: LanguageModel) -> int:
    """The longest prompt plus completion, tokens. Raises ValueError if the settings ask for more than the model has."""
    made_for = model.spec.max_positions
    limit = settings.max_context_tokens or made_for
    if limit > made_for:
        raise ValueError(f"max_context_tokens is {limit}, the model allows {made_for}: lower it")
    return limit


def kv_dtype(settings: EngineSettings, model: LanguageModel, target: DeviceTarget | None = None) -> torch.dtype:
    """The dtype of keys and values in the pool: the model's dtype, or of `CODED_KV`.

    Raises ValueError for codes that the kernels of this GPU cannot read, or not for heads of this size.
    """
    asked = settings.kv_dtype
    if asked == "auto":
        return model.embed.dtype
    target = target or DeviceTarget.of(model)
    if isinstance(model, Decoder) and any(isinstance(layer.mixer, LatentSpec) for layer in model.spec.layers):
        raise ValueError(f"kv_dtype = {asked} is not possible for latent attention: use auto")
    if isinstance(model, Decoder) and model.spec.indexed_layers:
        raise ValueError(f"kv_dtype = {asked} is not possible for attention that chooses blocks or entries: use auto")
    odd = next((dim for shape in model.spec.kv_shapes for dim in (shape.k_dim, shape.v_dim) if dim % 4), None)
    if target.kind == "cuda" and odd is not None:
        raise ValueError(f"kv_dtype = {asked} needs a head dimension that is a multiple of 4, not {odd}: use auto")
    if target.kind == "cuda" and not model.spec.plain_scores:
        raise ValueError(f"kv_dtype = {asked} has no kernels for attention with a softcap or sinks: use auto")
    capability = target.capability
    if target.kind == "cuda" and (capability or torch.cuda.get_device_capability(model.embed.device)) < _FP8_CAPABILITY:
        raise ValueError(f"kv_dtype = {asked} needs a GPU of compute capability 8.9 or later: use auto")
    return torch.int8 if asked == "fp8_int8" else torch.float8_e4m3fn


def states_on_host(settings: EngineSettings, model: LanguageModel) -> int:
    """States of linear attention that the host has room for, within half of `host_kv_gib`.

    One for each row, and with a prefix cache more for known prefixes.

    Raises ValueError with the numbers if that holds none.
    """
    each, half = model.spec.state_bytes(model.embed.dtype), _host_bytes(settings) // 2
    if each == 0 or settings.host_kv_gib == 0:
        return 0
    if half < each:
        raise ValueError(
            f"half of host_kv_gib = {settings.host_kv_gib} is for states of linear attention, and one takes "
            f"{_gib(each * settings.tensor_parallel)}: raise it"
        )
    return min(settings.max_rows * (_KEPT_STATES if settings.prefix_cache else 1), half // each)


def _host_bytes(settings: EngineSettings) -> int:
    """One rank's part of `host_kv_gib`."""
    return int(settings.host_kv_gib * _GIB) // settings.tensor_parallel


def host_kv_pages(
    settings: EngineSettings, page_bytes: int, available_bytes: int, reserved_bytes: int = 0, state_bytes: int = 0
) -> int:
    """Pages of host memory for KV; 0 without any.

    With several ranks it is the number of one rank. `state_bytes` of its part are for states of linear attention.

    Raises ValueError with the numbers when `host_kv_gib` holds no page, or is more than the machine has left beside
    `reserved_bytes`, which features may take.
    """
    asked, mine = int(settings.host_kv_gib * _GIB), _host_bytes(settings)
    if settings.host_kv_gib == 0:
        return 0
    if mine - state_bytes < page_bytes:
        raise ValueError(f"host_kv_gib = {settings.host_kv_gib} holds no page of {page_bytes} bytes: raise it")
    if asked > available_bytes - reserved_bytes:
        left, lower = f"{_gib(available_bytes)} of memory left", "lower it"
        if reserved_bytes:
            left += f"; max_adapters = {settings.max_adapters} adapters may take {_gib(reserved_bytes)}"
            lower = "lower one of them"
        raise ValueError(f"host_kv_gib = {settings.host_kv_gib}, and this machine has {left}: {lower}")
    return (mine - state_bytes) // page_bytes


def staging_bytes(settings: EngineSettings, state_bytes: int) -> int:
    """Device memory of the buffers that KV passes through on its way to the host and back, and states too."""
    return 2 * int(settings.constants.host_kv_piece_mib * 2**20) + 2 * state_bytes if settings.host_kv_gib else 0


def page_bytes_of(settings: EngineSettings, model: LanguageModel, dtype: torch.dtype) -> int:
    """Bytes of a KV page of all layers, on one rank."""
    ranks = settings.tensor_parallel if settings.attention_split == "context" else 1
    id_bytes = torch.int32.itemsize if keeps_token_ids(settings, model) else 0
    return model.spec.kv_bytes_per_token(dtype) * (settings.page_size // ranks) + id_bytes * settings.page_size


def usable_bytes(settings: EngineSettings, free: int, target: DeviceTarget) -> float:
    """Bytes that steps and KV may use of the memory left by the weights, `free`."""
    if settings.kv_memory_fraction or target.kind == "cpu":
        return (settings.kv_memory_fraction or CPU_FRACTION) * free
    least = KEPT_MOST * free if settings.sleep else max(KEPT_SHARE * free, KEPT_BYTES)
    return free - min(KEPT_MOST * free, least)


def kv_budget(settings: EngineSettings, memory: DeviceMemory, target: DeviceTarget) -> float:
    """Bytes that a KV pool may take where `kv_pages` does not say its size; negative if steps do not fit."""
    budget = usable_bytes(settings, memory.free, target) - memory.needs.total
    return budget if settings.kv_memory_max_gib is None else min(budget, settings.kv_memory_max_gib * _GIB)


def kv_pages(
    settings: EngineSettings,
    model: LanguageModel,
    dtype: torch.dtype,
    context: int,
    memory: DeviceMemory,
    target: DeviceTarget | None = None,
) -> int:
    """Pages of the KV pool, the dump page included.

    They are `engine.kv_pages`, or as many as fit into the memory, at most what all rows can use. Raises ValueError
    with the numbers when `kv_pages` do not fit, or when not even one page for each row fits.
    """
    page_bytes = page_bytes_of(settings, model, dtype)
    if settings.kv_pages is not None:
        asked, left = settings.kv_pages * page_bytes, memory.free - memory.needs.total
        if asked > left:
            raise ValueError(
                f"kv_pages = {settings.kv_pages} take {_gib(asked)}, but only {_gib(max(left, 0))} are left for KV: "
                f"{memory}; lower kv_pages, max_rows or prefill_chunk_tokens"
            )
        return settings.kv_pages
    target = target or DeviceTarget.of(model)
    budget, kept = kv_budget(settings, memory, target), memory.free - usable_bytes(settings, memory.free, target)
    most = settings.max_rows * pages_for(context, settings.page_size) + 1
    pages = min(int(max(budget, 0) // page_bytes), most)
    if pages < settings.max_rows + 1:
        raise ValueError(
            f"{_gib(max(budget, 0))} for KV hold {pages} pages of {settings.page_size} tokens ({page_bytes} bytes "
            f"each), fewer than max_rows = {settings.max_rows}: {memory}, and {_gib(kept)} are kept free; lower "
            "max_rows or prefill_chunk_tokens, or raise kv_memory_fraction, the share of the free memory for both"
        )
    return pages


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
