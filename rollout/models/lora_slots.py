"""Low-rank adapters on the device: slots for every product that they may correct, and how a step uses them.

A slot has room for one adapter of up to `rank` in all mixers and dense feed-forward blocks; a shard's slot for the
parts of A and B that belong to its inputs and outputs. Weights are stored in the layout of the kernels
(`rollout_kernels.lora`): ranks are padded with zeros and scaling is folded into B. So a step needs nothing but the slot
of each token. Slot 0 means no adapter.

Legend: T tokens, K inputs, N outputs, J modules of a product, R rank of a slot, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from rollout_kernels.lora import LoraBuffers, lora_add, padded_rank

from rollout.models.cut import Cut
from rollout.models.spec import AttentionSpec, CompressedSpec, DenseSpec, LatentSpec, LayerSpec, LinearSpec, ModelSpec

Product = Literal["qkv", "q_b", "index", "in", "o", "gate_up", "down"]
#: A product of one layer.
LayerProduct = tuple[int, Product]


def corrected_products(layer: LayerSpec) -> dict[Product, LinearSpec]:
    """The products of a layer that adapters may correct: in its mixer and in dense feed-forward blocks."""
    products: dict[Product, LinearSpec] = {}
    if isinstance(layer.mixer, AttentionSpec):
        products = {"qkv": layer.mixer.qkv, "o": layer.mixer.o}
        if layer.mixer.blocks is not None:
            products["index"] = layer.mixer.index
    elif isinstance(layer.mixer, LatentSpec):  # its `kv_b` is absorbed by queries and outputs
        products = {"qkv": layer.mixer.inputs, "o": layer.mixer.o}
        if (q_b := layer.mixer.q_b) is not None:
            products["q_b"] = q_b
    elif layer.mixer is not None:
        products = {"in": layer.mixer.inputs, "o": layer.mixer.out}
        if isinstance(layer.mixer, CompressedSpec):
            products["q_b"] = layer.mixer.q_b
            if layer.mixer.indexer is not None:
                products["index"] = layer.mixer.indexer.q
    if isinstance(layer.feed_forward, DenseSpec):
        products |= {"gate_up": layer.feed_forward.gate_up, "down": layer.feed_forward.down}
    return products


def model_products(spec: ModelSpec) -> dict[LayerProduct, LinearSpec]:
    """The products of all layers that adapters may correct."""
    return {
        (index, product): linear
        for index, layer in enumerate(spec.layers)
        for product, linear in corrected_products(layer).items()
    }


class CorrectedModule(NamedTuple):
    """One module that an adapter may correct, and where it lies in its product."""

    layer: int
    product: Product
    number: int  # among the modules of the product
    begin: int  # the first of its outputs in the product
    outputs: int
    inputs: int
    output_cut: Cut | None = None  # the module's outputs that a shard keeps
    input_cut: Cut | None = None  # the inputs that it keeps

    @property
    def whole_outputs(self) -> int:
        """Outputs of the module in checkpoints."""
        return self.outputs if self.output_cut is None else self.output_cut.whole

    @property
    def whole_inputs(self) -> int:
        """Inputs of the module in checkpoints."""
        return self.inputs if self.input_cut is None else self.input_cut.whole

    def kept_a(self, a_RK: torch.Tensor) -> torch.Tensor:
        """The part of an adapter's A that belongs to the kept inputs."""
        return a_RK if self.input_cut is None else self.input_cut.take(a_RK)

    def kept_b(self, b_NR: torch.Tensor) -> torch.Tensor:
        """The part of an adapter's B that belongs to the kept outputs."""
        return b_NR if self.output_cut is None else self.output_cut.take(b_NR)


def corrected_modules(spec: ModelSpec) -> dict[str, CorrectedModule]:
    """Every module that an adapter may correct, by its name in checkpoints."""
    modules: dict[str, CorrectedModule] = {}
    for (layer, product), linear in model_products(spec).items():
        for index, (name, width) in enumerate(zip(linear.modules, linear.widths, strict=True)):
            begin = sum(linear.widths[:index])
            cut = linear.output_cuts[index] if linear.output_cuts else None
            module = CorrectedModule(layer, product, index, begin, width, linear.inputs, cut, linear.input_cut)
            names = spec.names.spellings(spec.names.layer.format(layer) + name)
            modules |= dict.fromkeys(names, module)
    return modules


class SharedParts:
    """The memory of an adapter that the ranks of a tensor group share; they know it by `number`."""

    def __init__(self, number: int) -> None:
        self.number = number


_NOT_SHARED = SharedParts(0)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter on the host in the layout of a slot: A [J R, K] and B [N, R] of each product that it corrects."""

    rank: int  # the largest of its modules
    parts: Mapping[LayerProduct, tuple[torch.Tensor, torch.Tensor]]
    shared: SharedParts = _NOT_SHARED  # parts shared with the other ranks of a tensor group

    @property
    def nbytes(self) -> int:
        """Host memory, bytes."""
        return sum(tensor.nbytes for pair in self.parts.values() for tensor in pair)


NO_WEIGHTS = AdapterWeights(0, {})


class AdapterSlots:
    """Device memory of `slots` adapters of up to `rank`; only `write` changes it."""

    def __init__(self, spec: ModelSpec, slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.rank = slots, padded_rank(rank)
        self.buffers: dict[LayerProduct, LoraBuffers] = {}
        for key, linear in model_products(spec).items():
            ends = tuple(sum(linear.widths[: i + 1]) for i in range(len(linear.widths)))
            a = torch.zeros(slots, len(linear.modules) * self.rank, linear.inputs, dtype=dtype, device=device)
            b = torch.zeros(slots, linear.outputs, self.rank, dtype=dtype, device=device)
            self.buffers[key] = LoraBuffers(a, b, ends)

    @staticmethod
    def bytes_for(spec: ModelSpec, slots: int, rank: int, dtype: torch.dtype) -> int:
        """Device memory that slots take, bytes."""
        products = model_products(spec).values()
        values = sum(len(linear.modules) * linear.inputs + linear.outputs for linear in products)
        return slots * padded_rank(rank) * values * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Device memory, bytes."""
        return sum(buffers.a_SAK.nbytes + buffers.b_SNR.nbytes for buffers in self.buffers.values())

    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot, from 1. No step that reads the slot may run at the same time."""
        for key, buffers in self.buffers.items():
            a, b = weights.parts.get(key, (None, None))
            for target, source in ((buffers.a_SAK[slot - 1], a), (buffers.b_SNR[slot - 1], b)):
                if source is None:
                    target.zero_()
                else:
                    target.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step's tokens."""

    slots: AdapterSlots
    slots_T: torch.Tensor  # int32, 0 for none
    segmented: bool  # chunks of prompts

    def of(self, layer: int, product: Product) -> LoraBuffers:
        return self.slots.buffers[layer, product]

    def at(self, at_S: torch.Tensor) -> StepAdapters:
        """The adapters of these tokens, each a chunk of its own."""
        return StepAdapters(self.slots, self.slots_T.index_select(0, at_S), segmented=False)

    def add(self, layer: int, product: Product, y_TN: torch.Tensor, x_TK: torch.Tensor) -> None:
        """Add the corrections of a product's input `x_TK` to its result `y_TN`, in place."""
        lora_add(y_TN, x_TK, self.of(layer, product), self.slots_T, self.segmented)
