"""From the tensors of a PEFT adapter to what a slot holds; from a folder, or from whoever has the tensors.

All names, shapes and types are checked before the first tensor is read, and bound what is allocated: a folder may come
from anyone.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [r, inputs]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [outputs, r]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rollout_kernels.lora import padded_rank
from safetensors import SafetensorError, safe_open

from rollout.models.adapters import PRODUCTS, AdapterWeights, ModuleShape, Place, module_shapes
from rollout.models.checkpoint import StoredTensor, read_header
from rollout.models.errors import CheckpointError
from rollout.models.peft_config import PeftConfig, read_peft_config
from rollout.models.source import check_links, read_json
from rollout.models.spec import ModelSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MODULE = r"model\.layers\.(0|[1-9][0-9]{0,3})\.(\w+)\.(\w+)"
_NAME = re.compile(rf"(?:base_model\.model\.)?({_MODULE})\.lora_([AB])(?:\.\w+)?\.weight")
_TYPES = ("F32", "F16", "BF16")
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """Where the two tensors of one corrected module go."""

    layer: int
    shape: ModuleShape
    rank: int
    scaling: float
    a: str  # names of the tensors
    b: str


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """An adapter whose names and shapes are known to fit a model."""

    modules: tuple[ModuleTensors, ...]
    slot_rank: int
    outputs: Mapping[str, int]  # of each product
    dtype: torch.dtype

    def pack(self, tensors: Mapping[str, torch.Tensor], pinned: bool = False) -> AdapterWeights:
        """The layout of a slot, in the model's dtype; `tensors` have the shapes that were checked."""
        parts: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}
        rank = self.slot_rank
        for module in self.modules:
            shape, product = module.shape, module.shape.product
            if (module.layer, product) not in parts:
                a = torch.zeros(len(PRODUCTS[product]) * rank, shape.inputs, dtype=self.dtype, pin_memory=pinned)
                b = torch.zeros(self.outputs[product], rank, dtype=self.dtype, pin_memory=pinned)
                parts[module.layer, product] = (a, b)
            a, b = parts[module.layer, product]
            a[shape.place * rank : shape.place * rank + module.rank] = tensors[module.a]
            b[shape.begin : shape.begin + shape.outputs, : module.rank] = tensors[module.b].float() * module.scaling
        return AdapterWeights(max(module.rank for module in self.modules), parts)


def plan_adapter(
    config: PeftConfig,
    shapes: Mapping[str, tuple[int, ...]],
    spec: ModelSpec,
    most_rank: int,
    dtype: torch.dtype,
    where: str,
) -> AdapterPlan:
    """Where each tensor goes. Raises CheckpointError that names what does not fit the model or the slots.

    Args:
        config: the adapter's.
        shapes: of all tensors, by their PEFT names.
        spec: the model's.
        most_rank: that the slots were made for.
        dtype: the model's.
        where: names the adapter in errors.
    """
    targets = module_shapes(spec)
    found: dict[tuple[int, str], dict[str, str]] = {}
    unknown: list[str] = []
    for name in shapes:
        match = _NAME.fullmatch(name)
        target = targets.get(match[4]) if match is not None else None
        if match is None or target is None or not _is_there(spec, int(match[2]), match[3], target):
            unknown.append(name)
        elif match[5] in (pair := found.setdefault((int(match[2]), match[1]), {})):
            raise CheckpointError(f"{where}: {name:.200} and {pair[match[5]]:.200} are the same tensor")
        else:
            pair[match[5]] = name
    if unknown:
        raise CheckpointError(
            f"{where}: {len(unknown)} tensors cannot be served: {_some(unknown)}; supported are lora_A and lora_B of "
            f"{', '.join(targets)} in layers 0 to {spec.layers - 1}, feed-forward modules in dense layers only"
        )
    if not found:
        raise CheckpointError(f"{where} has no tensors")
    modules = tuple(
        _module(layer, module, pair, config, shapes, targets[module.rpartition(".")[2]], where)
        for (layer, module), pair in found.items()
    )
    largest = max(modules, key=lambda module: module.rank)
    if largest.rank > most_rank:
        raise CheckpointError(
            f"{where}: {largest.a:.200} has rank {largest.rank} and slots were made for {most_rank}: "
            "raise engine.adapter_rank"
        )
    outputs: dict[str, int] = {}
    for shape in targets.values():
        outputs[shape.product] = max(outputs.get(shape.product, 0), shape.begin + shape.outputs)
    return AdapterPlan(modules, padded_rank(most_rank), outputs, dtype)


def load_peft_folder(
    folder: Path, spec: ModelSpec, most_rank: int, dtype: torch.dtype, pinned: bool = False
) -> AdapterWeights:
    """The adapter in a folder that PEFT has written. Raises CheckpointError that says what is wrong with it."""
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
    return plan.pack(_read(file, stored), pinned)


def _read(file: Path, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            return {name: reader.get_tensor(name) for name in stored}
    except (SafetensorError, OSError, MemoryError) as error:
        raise CheckpointError(f"{file!s:.500} cannot be read: {error!s:.500}") from error


def _is_there(spec: ModelSpec, layer: int, block: str, target: ModuleShape) -> bool:
    if layer >= spec.layers:
        return False
    attention = target.product in ("qkv", "o")
    return block == ("self_attn" if attention else "mlp") and (attention or not spec.is_sparse(layer))


def _module(
    layer: int,
    module: str,
    pair: Mapping[str, str],
    config: PeftConfig,
    shapes: Mapping[str, tuple[int, ...]],
    shape: ModuleShape,
    where: str,
) -> ModuleTensors:
    if len(pair) != 2:
        missing = "B" if "A" in pair else "A"
        raise CheckpointError(f"{where}: {module:.200} has no lora_{missing}")
    rank = config.rank_of(module)
    for name, wanted in ((pair["A"], (rank, shape.inputs)), (pair["B"], (shape.outputs, rank))):
        if tuple(shapes[name]) != wanted:
            raise CheckpointError(f"{where}: {name:.200} is {list(shapes[name])!s:.100}; it must be {list(wanted)}")
    return ModuleTensors(layer, shape, rank, config.scaling(module), pair["A"], pair["B"])


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(f"{name:.200}" for name in names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
