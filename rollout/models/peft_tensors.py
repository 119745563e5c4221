"""Brings the tensors of a PEFT adapter, from a folder or over the bridge, into the layout of a slot.

An adapter is untrusted: all names, shapes and types are checked before the first tensor is read, and they bound the
memory that is allocated.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [r, inputs]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [outputs, r]
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rollout_kernels.lora import padded_rank
from safetensors import SafetensorError, safe_open

from rollout.checkpoint_folder import CheckpointError, check_links, read_json
from rollout.models.checkpoint_tensors import StoredTensor, read_header
from rollout.models.lora_slots import AdapterWeights, CorrectedModule, LayerProduct, corrected_modules, model_products
from rollout.models.peft_config import PeftConfig, read_peft_config
from rollout.models.spec import LinearSpec, ModelSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+?)\.lora_([AB])(?:\.\w+)?\.weight")
_TYPES = ("F32", "F16", "BF16")
_SHOWN = 8
_RANKS_POLL_S = 0.005

#: Makes a zeroed tensor on the host.
Zeros = Callable[[tuple[int, int], torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The two tensors of one corrected module, and their destination."""

    module: CorrectedModule
    rank: int
    scaling: float
    a: str  # names of the tensors
    b: str


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """An adapter whose names and shapes fit a model."""

    modules: tuple[ModuleTensors, ...]
    slot_rank: int
    products: Mapping[LayerProduct, LinearSpec]
    dtype: torch.dtype

    def of(self, spec: ModelSpec) -> AdapterPlan:
        """The same adapter for the shard of another rank."""
        places = {(module.layer, module.product, module.number): module for module in corrected_modules(spec).values()}
        modules = tuple(
            replace(tensors, module=places[tensors.module.layer, tensors.module.product, tensors.module.number])
            for tensors in self.modules
        )
        return replace(self, modules=modules, products=model_products(spec))

    def pack(
        self, tensors: Mapping[str, torch.Tensor], pinned: bool = False, zeros: Zeros | None = None
    ) -> AdapterWeights:
        """The layout of a slot, in the model's dtype; `tensors` have the shapes that were checked.

        `zeros` makes the tensors of this layout; by default torch makes them, in pinned memory if asked for. Raises
        CheckpointError for values that are not finite: no row could be drawn with them.
        """
        make = zeros or functools.partial(_zeros, pinned)
        parts: dict[LayerProduct, tuple[torch.Tensor, torch.Tensor]] = {}
        rank = self.slot_rank
        for tensors_of in self.modules:
            module = tensors_of.module
            key = (module.layer, module.product)
            if key not in parts:
                linear = self.products[key]
                a = make((len(linear.modules) * rank, linear.inputs), self.dtype)
                b = make((linear.outputs, rank), self.dtype)
                parts[key] = (a, b)
            a, b = parts[key]
            first = module.number * rank
            own_a = a[first : first + tensors_of.rank]
            own_b = b[module.begin : module.begin + module.outputs, : tensors_of.rank]
            own_a[:] = module.kept_a(tensors[tensors_of.a])
            own_b[:] = module.kept_b(tensors[tensors_of.b]).float() * tensors_of.scaling
            for name, values in ((tensors_of.a, own_a), (tensors_of.b, own_b)):
                if not torch.isfinite(values).all():
                    raise CheckpointError(
                        f"{name:.200} has NaN or infinite values, or values too large for {self.dtype} with the "
                        f"adapter's scaling of {tensors_of.scaling:g}: send finite ones"
                    )
        return AdapterWeights(max(module.rank for module in self.modules), parts)


class AdapterPacker:
    """Packs adapters for the one rank that serves a model; a tensor group has one that packs for all ranks.

    With `pinned` the weights are in pinned memory.
    """

    size = 1  # ranks

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned

    def pack(self, plan: AdapterPlan, tensors: Mapping[str, torch.Tensor], since_s: float) -> AdapterWeights | None:
        """Pack like `AdapterPlan.pack`, for all ranks; None while there is no memory: ask again.

        `since_s` is the `time.monotonic` at which it was asked for. Raises `RolloutError` if no place becomes free.
        """
        return plan.pack(tensors, self._pinned)

    def ready(self, weights: AdapterWeights) -> bool:
        """Whether all ranks have their parts. Raises CheckpointError if one cannot, `RolloutError` if one is lost."""
        return True


def _zeros(pinned: bool, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=pinned)


def plan_adapter(
    config: PeftConfig,
    shapes: Mapping[str, tuple[int, ...]],
    spec: ModelSpec,
    most_rank: int,
    dtype: torch.dtype,
    where: str,
) -> AdapterPlan:
    """The destination of each tensor. Raises CheckpointError with the tensors that do not fit the model or the slots.

    Args:
        config: the adapter's.
        shapes: of all tensors, by their PEFT names.
        spec: the model's.
        most_rank: the largest rank that the slots have room for.
        dtype: the model's.
        where: names the adapter in errors.
    """
    targets = corrected_modules(spec)
    found: dict[str, dict[str, str]] = {}
    unknown: list[str] = []
    for name in shapes:
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in targets:
            unknown.append(name)
        elif match[2] in (pair := found.setdefault(match[1], {})):
            raise CheckpointError(f"{where}: {name:.200} and {pair[match[2]]:.200} are the same tensor")
        else:
            pair[match[2]] = name
    if unknown:
        names = dict.fromkeys(target.rpartition(".")[2] for target in targets)
        raise CheckpointError(
            f"{where}: {len(unknown)} tensors cannot be served: {_some(unknown)}; supported are lora_A and lora_B of "
            f"{', '.join(names)} in layers 0 to {len(spec.layers) - 1}, feed-forward modules in dense layers only"
        )
    if not found:
        raise CheckpointError(f"{where} has no tensors")
    modules = tuple(_module(name, pair, config, shapes, targets[name], where) for name, pair in found.items())
    largest = max(modules, key=lambda module: module.rank)
    if largest.rank > most_rank:
        raise CheckpointError(
            f"{where}: {largest.a:.200} has rank {largest.rank}, but slots have room for rank {most_rank}: "
            "raise engine.adapter_rank"
        )
    return AdapterPlan(modules, padded_rank(most_rank), model_products(spec), dtype)


def load_peft_folder(
    folder: Path,
    spec: ModelSpec,
    most_rank: int,
    dtype: torch.dtype,
    packer: AdapterPacker | None = None,
    asked_s: float | None = None,
) -> AdapterWeights:
    """The adapter in a folder that PEFT has written. Raises CheckpointError with the reason if it cannot be served.

    With the `packer` of a tensor group it returns when all ranks have their parts; call it in a thread that may wait.
    Raises `RolloutError` if they cannot have them now. `asked_s` is the `time.monotonic` at which it was asked for.
    """
    packer = packer or AdapterPacker()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    check_links(folder)
    config = read_peft_config(read_json(folder / CONFIG), str(folder / CONFIG))
    file = folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; other formats than safetensors are not supported")
    stored = read_header(file)
    mistyped = [f"{name} {tensor.dtype}" for name, tensor in stored.items() if tensor.dtype not in _TYPES]
    if mistyped:
        raise CheckpointError(f"{file}: {len(mistyped)} tensors of an unsupported type: {_some(mistyped)}")
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    plan = plan_adapter(config, shapes, spec, most_rank, dtype, str(folder))
    tensors, since_s = _read(file, stored), time.monotonic() if asked_s is None else asked_s
    while (weights := packer.pack(plan, tensors, since_s)) is None:
        time.sleep(_RANKS_POLL_S)
    while not packer.ready(weights):
        time.sleep(_RANKS_POLL_S)
    return weights


def _read(file: Path, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            return {name: reader.get_tensor(name) for name in stored}
    except (SafetensorError, OSError, MemoryError) as error:
        raise CheckpointError(f"{file!s:.500} cannot be read: {error!s:.500}") from error


def _module(
    name: str,
    pair: Mapping[str, str],
    config: PeftConfig,
    shapes: Mapping[str, tuple[int, ...]],
    module: CorrectedModule,
    where: str,
) -> ModuleTensors:
    if len(pair) != 2:
        missing = "B" if "A" in pair else "A"
        raise CheckpointError(f"{where}: {name:.200} has no lora_{missing}")
    rank = config.rank_of(name)
    for tensor, wanted in ((pair["A"], (rank, module.whole_inputs)), (pair["B"], (module.whole_outputs, rank))):
        if tuple(shapes[tensor]) != wanted:
            raise CheckpointError(f"{where}: {tensor:.200} is {list(shapes[tensor])!s:.100}; it must be {list(wanted)}")
    return ModuleTensors(module, rank, config.scaling(name), pair["A"], pair["B"])


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(f"{name:.200}" for name in names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
