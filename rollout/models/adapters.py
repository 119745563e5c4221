"""Low-rank adapters on the device: slots for every product that they may correct, and what a step does with them.

A slot has room for one adapter of up to `rank` in all attention and dense feed-forward layers. Weights are put into it
in the layout of the kernels (`rollout_kernels.lora`), ranks padded with zeros and scaling folded into B, so that a step
needs nothing but each token's slot. Slot 0 is none.

Legend: T tokens, K inputs, N outputs, J modules of a product, R rank of a slot, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from rollout_kernels.lora import LoraBuffers, lora_add, padded_rank

from rollout.models.spec import ModelSpec

Product = Literal["qkv", "o", "gate_up", "down"]
#: The modules whose outputs are side by side in each product.
PRODUCTS: dict[Product, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
#: Layer and product.
Place = tuple[int, Product]


class ModuleShape(NamedTuple):
    """One module that an adapter may correct."""

    product: Product
    place: int  # among the modules of the product
    begin: int  # of its outputs in the product
    outputs: int
    inputs: int


def module_shapes(spec: ModelSpec) -> dict[str, ModuleShape]:
    """Every module of a dense layer, by its name in checkpoints."""
    sizes: dict[Product, tuple[int, tuple[int, ...]]] = {
        "qkv": (spec.hidden, (spec.q_dim, spec.kv_dim, spec.kv_dim)),
        "o": (spec.q_dim, (spec.hidden,)),
        "gate_up": (spec.hidden, (spec.intermediate, spec.intermediate)),
        "down": (spec.intermediate, (spec.hidden,)),
    }
    shapes = {}
    for product, names in PRODUCTS.items():
        inputs, widths = sizes[product]
        for index, (name, width) in enumerate(zip(names, widths, strict=True)):
            shapes[name] = ModuleShape(product, index, sum(widths[:index]), width, inputs)
    return shapes


def places(spec: ModelSpec) -> list[Place]:
    """Where corrections may be: attention everywhere, feed-forward blocks that are dense."""
    return [
        (layer, product)
        for layer in range(spec.layers)
        for product in PRODUCTS
        if product in ("qkv", "o") or not spec.is_sparse(layer)
    ]


def _modules(spec: ModelSpec) -> list[tuple[Place, list[ModuleShape]]]:
    shapes = module_shapes(spec)
    return [((layer, product), [shapes[name] for name in PRODUCTS[product]]) for layer, product in places(spec)]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter on the host, ready for a slot: for each product that it corrects A [J R, K] and B [N, R]."""

    rank: int  # the largest of its modules
    parts: Mapping[Place, tuple[torch.Tensor, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Host memory, bytes."""
        return sum(tensor.nbytes for pair in self.parts.values() for tensor in pair)


def random_adapter(spec: ModelSpec, rank: int, dtype: torch.dtype, seed: int, scale: float = 1e-3) -> AdapterWeights:
    """An adapter of all modules in slots of `rank`, for benchmarks."""
    generator, parts = torch.Generator().manual_seed(seed), {}
    for place, modules in _modules(spec):
        a = torch.randn(len(modules) * padded_rank(rank), modules[0].inputs, generator=generator) * scale
        b = torch.randn(sum(module.outputs for module in modules), padded_rank(rank), generator=generator) * scale
        parts[place] = (a.to(dtype), b.to(dtype))
    return AdapterWeights(rank, parts)


class AdapterSlots:
    """Device memory of `slots` adapters of up to `rank`; nobody but `write` changes it."""

    def __init__(self, spec: ModelSpec, slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.rank = slots, padded_rank(rank)
        self.buffers: dict[Place, LoraBuffers] = {}
        for (layer, product), modules in _modules(spec):
            ends = tuple(module.begin + module.outputs for module in modules)
            a = torch.zeros(slots, len(modules) * self.rank, modules[0].inputs, dtype=dtype, device=device)
            b = torch.zeros(slots, ends[-1], self.rank, dtype=dtype, device=device)
            self.buffers[layer, product] = LoraBuffers(a, b, ends)

    @staticmethod
    def bytes_for(spec: ModelSpec, slots: int, rank: int, dtype: torch.dtype) -> int:
        """Device memory that slots take, bytes."""
        a_rank = sum(
            len(modules) * modules[0].inputs + sum(module.outputs for module in modules)
            for _, modules in _modules(spec)
        )
        return slots * padded_rank(rank) * a_rank * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Device memory, bytes."""
        return sum(buffers.a_SAK.nbytes + buffers.b_SNR.nbytes for buffers in self.buffers.values())

    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot, from 1; on a device stream that no step which reads the slot runs beside."""
        for place, buffers in self.buffers.items():
            a, b = weights.parts.get(place, (None, None))
            for into, of in ((buffers.a_SAK[slot - 1], a), (buffers.b_SNR[slot - 1], b)):
                if of is None:
                    into.zero_()
                else:
                    into.copy_(of, non_blocking=True)


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Which adapter each token of a step takes."""

    slots: AdapterSlots
    slots_T: torch.Tensor  # int32, 0 for none
    segmented: bool  # chunks of prompts

    def of(self, layer: int, product: Product) -> LoraBuffers:
        """The slots of a product."""
        return self.slots.buffers[layer, product]

    def add(self, layer: int, product: Product, y_TN: torch.Tensor, x_TK: torch.Tensor) -> None:
        """Add the corrections of a product's input `x_TK` to its result `y_TN`, in place."""
        lora_add(y_TN, x_TK, self.of(layer, product), self.slots_T, self.segmented)
