"""How many KV pages there are: what the driver says is free, less what the largest steps were measured to take.

    device memory   | weights | row state, slots | activations | graphs | KV pages | kept free |
                                                 |<--------- free, before anything ran ------->|
                                                 |<--------- kv_memory_fraction ---->|

On a CPU steps are not measured and their share is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.config import EngineSettings
from rollout.engine.kv.memory import pages_for
from rollout.engine.step.rehearsal import StepNeeds
from rollout.engine.step.row_state import RowState
from rollout.models.adapters import AdapterSlots
from rollout.models.decoder import Decoder

_GIB = 2**30
#: From which on a GPU converts e4m3.
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the KV pool is sized from, bytes."""

    weights: int
    free: int  # once weights, row state and slots are there, before any step has run
    needs: StepNeeds  # of the largest steps; nothing on a CPU, where it is not measured

    def __str__(self) -> str:
        """In one sentence."""
        text = f"the weights take {_gib(self.weights)} and leave {_gib(self.free)} free"
        if self.needs.total:
            text += f", the largest steps take {_gib(self.needs.activations)}, captured ones {_gib(self.needs.graphs)}"
        return text


def weight_bytes(model: Decoder) -> int:
    """Bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def check_row_state(settings: EngineSettings, most_pages: int, model: Decoder, free_bytes: int) -> None:
    """Raise ValueError with the numbers where the rows' state alone is more than there is room for."""
    needed = RowState.nbytes(settings.max_rows, most_pages, model.spec.vocab)
    if needed > free_bytes:
        raise ValueError(
            f"the state of max_rows = {settings.max_rows} rows takes {_gib(needed)}, and beside "
            f"{_gib(weight_bytes(model))} of weights there are {_gib(free_bytes)}: lower max_rows or max_context_tokens"
        )


def no_room_for_steps(settings: EngineSettings, model: Decoder, free_bytes: int) -> ValueError:
    """The error for steps that ran out of memory before there was a KV pool."""
    return ValueError(
        f"the weights take {_gib(weight_bytes(model))} and leave {_gib(free_bytes)} free, which is too little for one "
        f"step of max_rows = {settings.max_rows} rows or prefill_chunk_tokens = {settings.prefill_chunk_tokens} "
        "tokens: lower these, or use a device with more memory"
    )


def kv_dtype(settings: EngineSettings, model: Decoder) -> torch.dtype:
    """What keys and values are kept as: the model's dtype, or e4m3 codes with scales.

    Raises ValueError for codes on a GPU whose kernels cannot read them, or not of heads of that size.
    """
    if settings.kv_dtype == "auto":
        return model.embed.dtype
    device = model.embed.device
    if device.type == "cuda" and (dim := model.spec.head_dim) % 4:
        raise ValueError(f"kv_dtype = fp8_e4m3 needs a head dimension that is a multiple of 4, not {dim}: use auto")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ValueError("kv_dtype = fp8_e4m3 needs a GPU of compute capability 8.9 or later: use auto")
    return torch.float8_e4m3fn


def adapter_host_bytes(settings: EngineSettings, model: Decoder) -> int:
    """Host memory that adapters may take in time: those that are known are there, with a slot or without."""
    if not settings.adapter_slots:
        return 0
    each = AdapterSlots.bytes_for(model.spec, 1, settings.adapter_rank, model.embed.dtype)
    return settings.max_adapters * each


def host_kv_pages(settings: EngineSettings, page_bytes: int, available_bytes: int, adapter_bytes: int = 0) -> int:
    """Pages of host memory for KV of preempted sequences, 0 if there are to be none.

    Raises ValueError with the numbers when what is asked for holds no page, or is more than the machine has left
    beside `adapter_bytes`, which are not taken yet.
    """
    asked = int(settings.host_kv_gib * _GIB)
    if asked == 0 and settings.host_kv_gib == 0:
        return 0
    if asked < page_bytes:
        raise ValueError(f"host_kv_gib = {settings.host_kv_gib} holds no page of {page_bytes} bytes: raise it")
    if asked > available_bytes - adapter_bytes:
        left, lower = f"{_gib(available_bytes)} of memory left", "lower it"
        if adapter_bytes:
            left += f", of which max_adapters = {settings.max_adapters} adapters may take {_gib(adapter_bytes)}"
            lower = "lower one of them"
        raise ValueError(f"host_kv_gib = {settings.host_kv_gib}, and this machine has {left}: {lower}")
    return asked // page_bytes


def staging_bytes(settings: EngineSettings) -> int:
    """Device memory that KV passes through on its way to the host and back."""
    return 2 * int(settings.host_kv_piece_mib * 2**20) if settings.host_kv_gib else 0


def kv_pages(settings: EngineSettings, model: Decoder, dtype: torch.dtype, context: int, memory: DeviceMemory) -> int:
    """Pages of the KV pool, the dump page included.

    From `engine.kv_pages`, or else from the memory, up to what all rows could ever use. Raises ValueError with the
    numbers when the pages asked for don't fit, or when not even one page for each row does.
    """
    page_bytes = model.spec.kv_bytes_per_token(dtype) * settings.page_size
    if settings.kv_pages is not None:
        asked, room = settings.kv_pages * page_bytes, memory.free - memory.needs.total
        if asked > room:
            raise ValueError(
                f"kv_pages = {settings.kv_pages} are {_gib(asked)} of KV, and there is room for {_gib(max(room, 0))}: "
                f"{memory}; lower kv_pages, max_rows or prefill_chunk_tokens"
            )
        return settings.kv_pages
    budget = memory.free * settings.kv_memory_fraction - memory.needs.total
    if settings.kv_memory_max_gib is not None:
        budget = min(budget, settings.kv_memory_max_gib * _GIB)
    most = settings.max_rows * pages_for(context, settings.page_size) + 1
    pages = min(int(max(budget, 0) // page_bytes), most)
    if pages < settings.max_rows + 1:
        raise ValueError(
            f"{_gib(max(budget, 0))} for KV hold {pages} pages of {settings.page_size} tokens ({page_bytes} bytes "
            f"each), fewer than max_rows = {settings.max_rows}: {memory}, and kv_memory_fraction = "
            f"{settings.kv_memory_fraction} bounds all but the weights; lower max_rows or prefill_chunk_tokens, or "
            "raise kv_memory_fraction"
        )
    return pages


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
