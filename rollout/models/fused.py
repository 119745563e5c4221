"""Steps of a model on a GPU with the fused kernels: seven or eight launches a layer, nothing read on the host.

    add_rms_norm -> q/k/v product -> finish_qkv -> attention -> output product
    add_rms_norm -> gate/up product with SiLU -> down product       dense layers
    norm and router -> experts                                      sparse layers, see `fused_experts`

Each block of each layer is fused if the kernels take it, and otherwise run by its own generic code. Blocks of both
kinds are connected by the residual stream, which only the norms read and write, and by the last block's output, not yet
added to the stream (`Unsummed`). A norm or factor of a block's output, or a layer's factor, is a part of the next
norm's kernel.

Decode and prefill differ in the attention, few and many tokens in the products. For token counts in
`rollout_kernels.linear.table` we use our own kernel, which also reads coded weights; a sum for the residual stream
comes in parts, float32 if several. The other products are cuBLAS's, which add to the residual stream at once
(`ADDED_FROM`); codes are decoded for them first. On Hopper the gated product of many tokens is our own again (`GATED`).
The residual stream is kept in the model's dtype.

From `codes_from` tokens on, activations that meet codes of blocks are rounded to codes, too, and the tensor cores
multiply codes (`triton_code_rows`).

A step with adapters has a small kernel beside each product, and the activation is then a kernel of its own: the kernel
that reads a product adds its correction. Corrections are added in place for many tokens, before experts, and where one
norm spans all heads. Where the heads of such a norm belong to several ranks, generic operations run between the q/k/v
product and attention.

The output and down products of a shard, and its experts, make parts of a sum over the ranks of its tensor group. The
next norm adds the parts up: in its own kernel if there are few tokens, else after an all-reduce. Such products are
corrected in place.

Legend: T tokens, S selected tokens, H hidden, K inputs, N outputs, I intermediate, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from rollout_kernels.linear.coded import CodedMatrix, CodedRows
from rollout_kernels.linear.products import cublas_takes_codes, dense, product_of_codes
from rollout_kernels.linear.table import Config, Kind, last_rows, linear_config
from rollout_kernels.linear.triton_linear import gated_linear, linear, linear_parts
from rollout_kernels.lora import Correction
from rollout_kernels.lora.triton_lora import adds_later, shrink_beside
from rollout_kernels.moe import gluon_experts
from rollout_kernels.moe.formats import Format
from rollout_kernels.moe.triton_padded_groups import PaddedGroups
from rollout_kernels.moe.triton_router import sum_of_parts
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm, embed_rope, gated, gated_codes
from rollout_kernels.parallel.triton_all_reduce import all_reduce_norm, all_reduce_rows

from rollout.models import deterministic as one_order
from rollout.models.batch import AttentionBatch, KVCache, WantedTokens
from rollout.models.dealt_rows import deal, mixed
from rollout.models.decoder import Decoder, DecoderLayer, Norms
from rollout.models.delta_net import DeltaNet
from rollout.models.deterministic import KernelProduct, head_product, kernel_product
from rollout.models.finished_queries import Queries, finish_queries, takes_corrections
from rollout.models.fused_experts import PLANS, ExpertPlans, FusedExperts
from rollout.models.fused_experts import kernels_take as experts_take
from rollout.models.layers import (
    Attention,
    Block,
    DenseFeedForward,
    Linear,
    RMSNorm,
    Rope,
    SparseFeedForward,
    StepContext,
    gate_output,
)
from rollout.models.lora_slots import Product, StepAdapters
from rollout.models.spec import AttentionSpec, DeltaNetSpec, DenseSpec, FeedForwardSpec, MixerSpec, MoESpec


def supports(model: Decoder) -> bool:
    """True if `FusedDecoder` is to run the steps of this model: on a GPU, in 16 bits, with blocks that are fused.

    The experts of all sparse layers must be fused: the generic ones read on the host.
    """
    return model.embed.is_cuda and obstacle(model) is None


def obstacle(model: Decoder) -> str | None:
    """Why torch runs the steps of this model on a GPU, and not `FusedDecoder`; None if that runs them."""
    dtype, spec = model.embed.dtype, model.spec
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels are for 16 bits, and the model is in {dtype}"
    if spec.moe is not None:
        return None if takes_feed_forward(spec.moe, dtype) else "its experts have odd widths, or another activation"
    if any(takes(block, dtype) for layer in spec.layers for block in layer.blocks):
        return None
    return "its attention and its feed-forward blocks are variants that no kernel has"


def takes(spec: MixerSpec | FeedForwardSpec, dtype: torch.dtype) -> bool:
    """True if the kernels run this block of a layer."""
    return takes_feed_forward(spec, dtype) if isinstance(spec, DenseSpec | MoESpec) else takes_mixer(spec)


def takes_mixer(spec: MixerSpec) -> bool:
    """True if the kernels run this mixer: linear, or attention to all tokens with values like keys and no factor."""
    if not isinstance(spec, AttentionSpec):
        return isinstance(spec, DeltaNetSpec)
    return not spec.value_dim and spec.value_scale == 1.0 and spec.blocks is None


def takes_feed_forward(spec: FeedForwardSpec, dtype: torch.dtype) -> bool:
    """True if the kernels run this block: dense with their activations and no biases, or experts that they take.

    Dense blocks may be in float32: in Triton's interpreter, on a CPU.
    """
    if isinstance(spec, MoESpec):
        return experts_take(spec, dtype)
    return not spec.bias and spec.activation in ("silu", "gelu_tanh")


#: Numbers of tokens for which the gated product of a dense layer is our own, with SiLU in its registers: there it is
#: faster on an H100.
GATED = range(4096, 8193)
#: From this number of tokens on, the last product of a block is added to the residual stream by cuBLAS.
ADDED_FROM = 1024


#: Inputs of a product of many tokens.
ProductInput = torch.Tensor | CodedRows


class Unsummed(NamedTuple):
    """The result of a product as the kernel that reads it takes it."""

    parts_STN: torch.Tensor
    correction: Correction | None  # the adapters' part, not yet added
    partial: bool = False  # one rank's part of a sum over the ranks; without a correction
    norm: RMSNorm | None = None  # norm of the result, before it is added to the residual stream
    scale: float = 1.0  # factor of what is added
    factor_1: torch.Tensor | None = None  # factor of the residual stream after that

    @property
    def plain(self) -> bool:
        """True if the result is added to the residual stream as it is."""
        return self.norm is None and self.scale == 1.0 and self.factor_1 is None


class FormattedProduct(NamedTuple):
    """A product, the format of its weights, and whether kernels know that: else it is computed as for many tokens."""

    product: KernelProduct
    format: Format
    by_kernels: bool
    takes_codes: bool


def _formatted(module: Linear, kind: Kind, dtype: torch.dtype) -> FormattedProduct:
    stored = module.stored
    by_kernels = not isinstance(stored, CodedMatrix) or stored.kernels_take(dtype)
    takes_codes = isinstance(stored, CodedMatrix) and stored.takes_codes
    return FormattedProduct(kernel_product(module.spec, kind), module.format, by_kernels, takes_codes)


class FusedDecoder:
    """Runs steps of a `Decoder` with the fused kernels; shares its parameters and stands in for it.

    With `deterministic` a token's results do not depend on the step that it is in; see `rollout.models.deterministic`.
    Experts choose their kernels by `plans`. `codes_from` is the least number of tokens whose activations are rounded to
    codes where weights are codes of blocks; none: they never are.
    """

    def __init__(
        self,
        model: Decoder,
        deterministic: bool = False,
        plans: ExpertPlans = PLANS,
        codes_from: int | None = None,
    ) -> None:
        if deterministic:
            one_order.check_deterministic(model.spec)
            if not model.group.one_order:
                raise ValueError(f"deterministic is not possible with {model.group.size} GPUs a worker: use one or two")
        self._model = model
        self._deterministic, self._codes_from = deterministic, codes_from
        self._ropes = [cast(Rope, rope) for rope in model.ropes]
        dtype, layers = model.embed.dtype, [cast(DecoderLayer, layer) for layer in model.layers]
        self._layers = list(enumerate(layers))
        blocks = [block for layer in layers for block in layer.blocks]
        self._fused: set[Block] = {block for block in blocks if takes(block.spec, dtype)}
        self._generic_blocks = len(self._fused) < len(blocks)
        if deterministic and self._generic_blocks:
            architecture = model.spec.architecture
            raise ValueError(f"deterministic is not possible for this {architecture}: not all its blocks have kernels")
        sparse = any(isinstance(block, SparseFeedForward) for block in self._fused)
        self._experts = FusedExperts.of_model(model, deterministic, plans) if sparse else None
        self._products: dict[Linear, FormattedProduct] = {}
        for block in self._fused:
            if isinstance(block, Attention):
                self._products[block.qkv_proj] = _formatted(block.qkv_proj, "parts", dtype)
                self._products[block.o_proj] = _formatted(block.o_proj, "parts", dtype)
            elif isinstance(block, DeltaNet):
                self._products[block.in_proj] = _formatted(block.in_proj, "whole", dtype)
                self._products[block.o_proj] = _formatted(block.o_proj, "parts", dtype)
            elif isinstance(block, DenseFeedForward):
                self._products[block.gate_up_proj] = _formatted(block.gate_up_proj, "silu", dtype)
                self._products[block.down_proj] = _formatted(block.down_proj, "parts", dtype)
        dense = [block.spec for block in self._fused if isinstance(block, DenseFeedForward)]
        self._gates = not deterministic and any(_gates_many(spec, model.embed.device, dtype) for spec in dense)
        self._kinds = tuple(dict.fromkeys(self._products.values()))
        # Parts of the step that is being launched:
        self._configs: dict[FormattedProduct, Config | None] = {}
        self._codes = False  # whether activations become codes
        self._tiles: PaddedGroups | None = None  # tiles of its rows, if our own kernel runs the gated products

    @torch.inference_mode()
    def __call__(self, token_ids_T: torch.Tensor, batch: AttentionBatch, kv: KVCache) -> torch.Tensor:
        """Run one step: writes its KV, returns hidden states after the final norm, of all or only wanted tokens."""
        model = self._model
        self._begin(len(token_ids_T))
        if model.spec.streams is not None:
            return model.forward(token_ids_T, batch, kv, None if self._experts is None else self._experts.output)
        first, *others = self._ropes
        residual_TH, cos_sin = self._embed(token_ids_T, batch, first)
        slots_T = batch.kv_slots_T.long() if self._generic_blocks else batch.kv_slots_T
        inputs_TLD = None if model.token_inputs is None else model.token_inputs(token_ids_T, residual_TH)
        all_cos_sin = (cos_sin, *(rope(batch.rotary_positions) for rope in others))
        context = StepContext(all_cos_sin, slots_T, batch, kv, token_inputs_TLD=inputs_TLD)
        if not kv.whole:
            context = deal(context)
        *before, (last_index, last) = self._layers
        added = None
        for index, layer in before:
            residual_TH, added = self._layer(layer, residual_TH, added, context, index)
            if batch.images is not None:  # never after the last layer: `tower_spec`
                residual_TH = batch.images.add_after(index, residual_TH)
        if batch.wanted is None:
            residual_TH, added = self._layer(last, residual_TH, added, context, last_index)
        else:
            residual_TH, added = self._last_layer(last, residual_TH, added, context, batch.wanted)
        x_TH = self._norm(residual_TH, added, model.norm)
        if batch.taps is not None and batch.wanted is None:
            batch.taps.take(len(model.layers), residual_TH)
        return x_TH

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits of selected hidden states, float32 [S, V]."""
        config = linear_config(*head_product(self._model.spec), len(hidden_SH), self._deterministic)
        if config is None:
            return self._model.compute_logits(hidden_SH)
        return self._model.bounded(linear(hidden_SH, self._model.lm_head, config, out_dtype=torch.float32))

    def kernel_sizes(self) -> list[int]:
        """Numbers of tokens up to which a step runs by the same products and kernels of experts, ascending.

        A step of a size between two of these may compile a kernel while serving, unless the next larger one ran before.
        """
        gated = {GATED.start - 1, GATED.stop - 1} if self._gates else set()
        own = {ADDED_FROM - 1} if self._codes_from is None else {ADDED_FROM - 1, max(1, self._codes_from - 1)}
        return sorted({*last_rows(), *own, *gated, *([] if self._experts is None else self._experts.sizes())})

    def take_chosen(self) -> list[torch.Tensor]:
        """Experts of each sparse layer, int32 [T, K], of the step that was just captured; a replay writes them anew."""
        return [] if self._experts is None else self._experts.take_chosen()

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Context in which a step has few layers, which launch the kernels of all. Its results mean nothing.

        Kernels may differ between two layers with one spec if their neighbours do: a block's output is added by the
        norm of the next one.
        """
        every, kinds = self._layers, []
        specs = [None, *(layer.spec for _, layer in every), None]
        kept = []
        for index, numbered in enumerate(every):
            kind = specs[index : index + 3]
            if kind not in kinds:
                kinds.append(kind)
                kept.append(numbered)
        self._layers = kept
        try:
            yield
        finally:
            self._layers = every

    @property
    def takes_wanted(self) -> bool:
        """True if steps may name the tokens whose hidden states are wanted."""
        last = self._model.layers[-1].mixer
        if self._model.spec.split == "rows":
            return False
        return last in self._fused and isinstance(last, Attention) and not self._deterministic

    def _embed(
        self, token_ids_T: torch.Tensor, batch: AttentionBatch, rope: Rope
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The residual stream before the first layer, and the cosines and sines of the first rotary embedding."""
        model, positions = self._model, batch.rotary_positions
        if positions.dim() == 1 and batch.images is None:
            token = None if model.spec.shard.size == 1 else model.spec.kept_vocab.start
            tables = (model.embed, rope.inv_freq_D, rope.sign_D)
            residual_TH, cos_sin = embed_rope(token_ids_T, positions, *tables, token, model.embed_scale)
            return residual_TH if token is None else model.group.all_reduce(residual_TH), cos_sin
        residual_TH = model.embedded(token_ids_T)
        return residual_TH if batch.images is None else batch.images.replace_in(residual_TH), rope(positions)

    def _begin(self, tokens: int) -> None:
        """Choose how `tokens` tokens are computed, from here on."""
        self._codes = self._codes_from is not None and tokens >= self._codes_from
        how = tokens, self._deterministic
        self._configs = {
            kind: linear_config(*kind.product, *how, kind.format, self._codes and kind.takes_codes)
            if kind.by_kernels
            else None
            for kind in self._kinds
        }
        device = self._model.embed.device
        self._tiles = gluon_experts.all_rows(tokens, device) if tokens in GATED and self._gates else None
        if self._experts is not None:
            self._experts.begin_step(tokens)

    def _layer(
        self, layer: DecoderLayer, residual_TH: torch.Tensor, last: Unsummed | None, context: StepContext, index: int
    ) -> tuple[torch.Tensor, Unsummed | None]:
        """One layer. `last`: product of the layer before, not yet added. Returns the residual and its own `last`."""
        taps = context.batch.taps
        if layer.mixer is None:
            if taps is not None:
                residual_TH, last = self._norm(residual_TH, last, None), None
                taps.take(index, residual_TH)
            return self._after_mixer(layer, residual_TH, last, context)
        x_TH = self._norm(residual_TH, last, layer.mixer_norms.before)
        if taps is not None:  # the norm has added what was left
            taps.take(index, residual_TH)
        added: Unsummed | None
        if layer.mixer in self._fused and isinstance(layer.mixer, DeltaNet):
            added = self._linear_attention(layer, layer.mixer, x_TH, residual_TH, context)
        elif layer.mixer in self._fused:
            assert isinstance(layer.mixer, Attention)
            if context.own is None:
                queries = self._queries(layer.mixer, x_TH, context)
                out_TK = self._attend(layer.mixer, queries, context.batch, context.kv)
            elif context.own.none:
                out_TK = x_TH.new_zeros(len(x_TH), layer.mixer.o_proj.spec.inputs)
            else:
                batch, kv = context.own.context.batch, context.own.context.kv
                queries = self._queries(layer.mixer, context.own.take(x_TH), context.own.context)
                out_TK = context.own.give(self._attend(layer.mixer, queries, batch, kv), len(x_TH))
            added = self._output("o", out_TK, layer, context.batch.adapters, residual_TH)
        else:
            own = context.own
            output = layer.mixer(x_TH, context) if own is None else mixed(layer.mixer, x_TH, own, context)
            added = _unsummed(output.value()[None], layer, layer.mixer_norms)
        return self._after_mixer(layer, residual_TH, added, context)

    def _last_layer(
        self,
        layer: DecoderLayer,
        residual_TH: torch.Tensor,
        last: Unsummed | None,
        context: StepContext,
        wanted: WantedTokens,
    ) -> tuple[torch.Tensor, Unsummed | None]:
        """Compute keys and values of all tokens, and the rest of `_layer` only for wanted tokens."""
        assert isinstance(layer.mixer, Attention)
        x_TH = self._norm(residual_TH, last, layer.mixer_norms.before)
        if context.batch.taps is not None:
            context.batch.taps.take(len(self._model.layers) - 1, residual_TH)
        queries = self._queries(layer.mixer, x_TH, context).select(wanted.at_S)
        residual_SH = residual_TH.index_select(0, wanted.at_S)
        if not len(residual_SH):
            return residual_SH, None
        self._begin(len(residual_SH))
        out_SK = self._attend(layer.mixer, queries, wanted.batch, context.kv)
        output = self._output("o", out_SK, layer, wanted.batch.adapters, residual_SH)
        inputs_TLD = context.token_inputs_TLD
        inputs_SLD = None if inputs_TLD is None else inputs_TLD.index_select(0, wanted.at_S)
        context = context._replace(batch=wanted.batch, token_inputs_TLD=inputs_SLD)
        return self._after_mixer(layer, residual_SH, output, context)

    def _after_mixer(
        self, layer: DecoderLayer, residual_TH: torch.Tensor, last: Unsummed | None, context: StepContext
    ) -> tuple[torch.Tensor, Unsummed | None]:
        """The rest of a layer. Returns the residual, and what is left to add of the layer."""
        if layer.feed_forward is not None:
            residual_TH, last = self._feed_forward(layer, residual_TH, last, context)
        if layer.token_input is not None:
            x_TH = self._norm(residual_TH, last, None)
            last = Unsummed(layer.token_input.widened(x_TH, context)[None], None, norm=layer.token_input.output_norm)
        if layer.factor is None:
            return residual_TH, last
        if last is None:
            return residual_TH.mul_(layer.factor), None
        return residual_TH, last._replace(factor_1=layer.factor)

    def _feed_forward(
        self, layer: DecoderLayer, residual_TH: torch.Tensor, mixed: Unsummed | None, context: StepContext
    ) -> tuple[torch.Tensor, Unsummed | None]:
        """The feed-forward block. Returns the residual with `mixed`, and what is left to add of the block."""
        assert layer.feed_forward is not None
        feed_forward, fused = layer.feed_forward, layer.feed_forward in self._fused
        norms = layer.feed_forward_norms
        experts = self._experts if fused and isinstance(feed_forward, SparseFeedForward) else None
        if experts is not None:
            normed_TH = None
            parts = None if mixed is None else mixed.parts_STN
            if mixed is None or norms.before is None or not mixed.plain:
                normed_TH = self._norm(residual_TH, mixed, norms.before)
            elif mixed.partial:
                if experts.joins_norm(len(residual_TH)):
                    parts = self._all_reduced(mixed.parts_STN, residual_TH.dtype)
                else:
                    normed_TH = self._norm(residual_TH, mixed, norms.before)
            residual_TH, parts = experts.run(layer, residual_TH, parts, context.batch.experts, normed_TH)
            assert isinstance(feed_forward, SparseFeedForward)
            partial = self._model.spec.shard.size > 1 and feed_forward.spec.apart is None
            return residual_TH, _unsummed(parts, layer, norms, partial)
        x_TH = self._norm(residual_TH, mixed, norms.before)
        if not fused:
            return residual_TH, _unsummed(feed_forward(x_TH, context).value()[None], layer, norms)
        assert isinstance(feed_forward, DenseFeedForward)
        adapters = context.batch.adapters
        gated_TI = self._gated(x_TH, feed_forward, adapters)
        return residual_TH, self._output("down", gated_TI, layer, adapters, residual_TH)

    def _norm(self, residual_TH: torch.Tensor, added: Unsummed | None, norm: RMSNorm | None) -> torch.Tensor:
        """The norm of the residual stream, or that itself, once what is left is added to it."""
        spec, weight_H = self._model.spec, None if norm is None else norm.weight
        if added is None:
            if weight_H is None:
                return residual_TH
            return add_rms_norm(residual_TH, None, weight_H, spec.eps, None, spec.unit_offset)
        parts = added.parts_STN
        if added.partial:
            peers = self._model.group.peers_for(len(residual_TH), spec.hidden, residual_TH.dtype)
            if peers is not None and added.plain and weight_H is not None:
                return all_reduce_norm(residual_TH, parts, weight_H, spec.eps, peers, spec.unit_offset)
            parts = self._all_reduced(parts, residual_TH.dtype)
        output_weight_H = None if added.norm is None else added.norm.weight
        how = (spec.eps, added.correction, spec.unit_offset, output_weight_H, added.scale, added.factor_1)
        return add_rms_norm(residual_TH, parts, weight_H, *how)

    def _all_reduced(self, parts_STH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of the parts over all ranks, as one part."""
        group = self._model.group
        peers = group.peers_for(parts_STH.shape[1], parts_STH.shape[2], dtype)
        if peers is not None:
            return all_reduce_rows(parts_STH, peers, dtype)[None]
        return group.all_reduce(sum_of_parts(parts_STH, dtype))[None]

    def _many(self, x_TK: ProductInput, module: Linear) -> torch.Tensor:
        """`x W^T`, [T, N], where no kernel of ours was chosen."""
        weight = module.stored
        if self._codes and self._products[module].takes_codes:
            assert isinstance(weight, CodedMatrix)
            return product_of_codes(x_TK, weight)
        assert isinstance(x_TK, torch.Tensor)
        return F.linear(x_TK, dense(weight, x_TK.dtype))

    def _product(
        self,
        name: Product,
        x_TK: ProductInput,
        module: Linear,
        layer: int,
        adapters: StepAdapters | None,
        later: bool = True,
    ) -> Unsummed:
        """`x W^T` in parts. Unless the correction may be added `later`, the first part contains it already."""
        config = self._configs[self._products[module]]
        beside = later and not module.partial and adapters is not None and _adds_later(adapters, layer, name)
        weight = module.stored
        if config is None:
            parts = self._many(x_TK, module)[None]
        else:
            assert isinstance(x_TK, torch.Tensor)
            parts = linear_parts(x_TK, weight, config, beside)
        return Unsummed(parts, _correct(adapters, layer, name, parts[0], x_TK, beside), module.partial)

    def _output(
        self,
        name: Literal["o", "down"],
        x_TK: ProductInput,
        layer: DecoderLayer,
        adapters: StepAdapters | None,
        residual_TH: torch.Tensor,
    ) -> Unsummed | None:
        """The last product of a block, and its bias. Of many tokens it is added to the residual stream: then None.

        Of a shard it is this rank's part of a sum, to which the first rank adds the bias.
        """
        block: Attention | DeltaNet | DenseFeedForward
        if name == "o":
            assert isinstance(layer.mixer, Attention | DeltaNet)
            block, module, norms = layer.mixer, layer.mixer.o_proj, layer.mixer_norms
        else:
            assert isinstance(layer.feed_forward, DenseFeedForward)
            block, module, norms = layer.feed_forward, layer.feed_forward.down_proj, layer.feed_forward_norms
        product = self._products[module]
        cublas = self._configs[product] is None and not (self._codes and product.takes_codes)
        plain = norms.after is None and layer.spec.residual_scale == 1.0
        if cublas and plain and adapters is None and len(residual_TH) >= ADDED_FROM and not module.partial:
            assert isinstance(x_TK, torch.Tensor)
            if module.bias is not None:
                residual_TH += module.bias
            residual_TH.addmm_(x_TK, dense(module.stored, x_TK.dtype).T)
            return None
        # Experts take the sum of a mixer's parts: nothing may be added to it later.
        experts = layer.feed_forward in self._fused and isinstance(layer.feed_forward, SparseFeedForward)
        later = name == "down" or not experts
        result = self._product(name, x_TK, module, block.layer, adapters, later)
        if module.bias is not None and (not module.partial or self._model.group.rank == 0):
            result.parts_STN[0] += module.bias
        return result._replace(norm=norms.after, scale=layer.spec.residual_scale)

    def _gated(self, x_TH: torch.Tensor, block: DenseFeedForward, adapters: StepAdapters | None) -> ProductInput:
        """The gated input of the down product, [T, I]."""
        config, weights = self._configs[self._products[block.gate_up_proj]], block.gate_up_proj.stored
        activation = block.spec.activation
        assert activation in ("silu", "gelu_tanh"), "takes_feed_forward"
        if adapters is not None:  # adapters correct the activation's input, so the activation is no part of the product
            beside = _adds_later(adapters, block.layer, "gate_up")
            if config is None:
                gate_up = self._many(x_TH, block.gate_up_proj)
            else:
                gate_up = linear(x_TH, weights, config, beside=beside)
            correction = _correct(adapters, block.layer, "gate_up", gate_up, x_TH, beside)
            return gated(gate_up, correction, activation)
        if config is not None:
            return gated_linear(x_TH, weights, config, activation)
        codes = self._codes and self._products[block.gate_up_proj].takes_codes
        if self._tiles is not None and not codes and _gates_many(block.spec, x_TH.device, x_TH.dtype):
            return gluon_experts.padded_gate_up(x_TH, self._tiles, dense(weights, x_TH.dtype)[None], at_once=8)
        gate_up, width = self._many(x_TH, block.gate_up_proj), block.spec.intermediate
        down = self._products[block.down_proj]
        codes = self._codes and down.takes_codes and self._configs[down] is None
        if codes and cublas_takes_codes(x_TH.device, x_TH.dtype, width):
            return gated_codes(gate_up, activation)
        return gated(gate_up, None, activation)

    def _queries(self, attention: Attention, x_TH: torch.Tensor, context: StepContext) -> Queries:
        """Queries of the attention block and their gates; writes this layer's keys and values."""
        batch, cache = context.batch, context.kv.layer(attention.kv_index)
        cos_sin = context.cos_sin[attention.rope]
        if attention.spec.qk_norm == "full" and attention.spec.shard.size > 1:
            slots_T = batch.kv_slots_T.long()
            q_TQD, gate_TK = attention.project(x_TH, cos_sin, slots_T, cache, batch.adapters)
        else:
            later = takes_corrections(attention.spec)
            product = self._product("qkv", x_TH, attention.qkv_proj, attention.layer, batch.adapters, later)
            given = (product.parts_STN, cos_sin, batch.kv_slots_T, cache, x_TH.dtype, product.correction)
            q_TQD, gate_TK = finish_queries(attention, *given)
        if attention.gate_proj is not None:
            gate_TK = attention.gate_proj(x_TH)
        return Queries(attention.grown(q_TQD, batch), gate_TK)

    def _attend(self, attention: Attention, queries: Queries, batch: AttentionBatch, kv: KVCache) -> torch.Tensor:
        """The input of the attention block's output product for these queries, [T, K]."""
        cache = kv.layer(attention.kv_index)
        if self._deterministic:
            out_TQD = one_order.attend(queries.q_TQD, batch, cache, attention.scale, attention.spec.window)
        else:
            out_TQD = attention.attend(queries.q_TQD, batch, cache)
        return gate_output(out_TQD.flatten(1), queries.gate_TK)

    def _linear_attention(
        self,
        layer: DecoderLayer,
        mixer: DeltaNet,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        context: StepContext,
    ) -> Unsummed | None:
        """The output of a linear attention block; None if the residual stream has it already.

        With `deterministic` tokens go through the block one by one.
        """
        config, adapters = self._configs[self._products[mixer.in_proj]], context.batch.adapters
        weight = mixer.in_proj.weight
        inputs_TN = F.linear(x_TH, weight) if config is None else linear(x_TH, weight, config)
        if adapters is not None:
            adapters.add(mixer.layer, "in", inputs_TN, x_TH)
        gated_TV = mixer.mix(inputs_TN, context, one_by_one=self._deterministic)
        return self._output("o", gated_TV, layer, adapters, residual_TH)


def _unsummed(parts_STN: torch.Tensor, layer: DecoderLayer, norms: Norms, partial: bool = False) -> Unsummed:
    """The output of a block of this layer, in parts."""
    return Unsummed(parts_STN, None, partial, norms.after, layer.spec.residual_scale)


def _gates_many(spec: DenseSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our own kernel runs the gated product of a dense block in steps of `GATED` tokens."""
    return spec.activation == "silu" and gluon_experts.takes_gated(device, dtype, spec.hidden, spec.intermediate)


#: Modules of a product, for the kernels that add corrections later to the outputs of each module.
_MODULES: dict[Product, int] = {"qkv": 3, "q_b": 1, "gate_up": 2, "o": 1, "down": 1}


def _adds_later(adapters: StepAdapters, layer: int, name: Product) -> bool:
    buffers = adapters.of(layer, name)
    return len(buffers.ends) == _MODULES[name] and adds_later(len(adapters.slots_T), buffers, adapters.segmented)


def _correct(
    adapters: StepAdapters | None, layer: int, name: Product, y: torch.Tensor, x: ProductInput, beside: bool
) -> Correction | None:
    """The correction of the product `y` that was just launched: run at the same time, or added to it in place."""
    if adapters is None:
        return None
    assert isinstance(x, torch.Tensor), "with adapters, activations become codes in the product"
    if beside:
        return shrink_beside(x, adapters.of(layer, name), adapters.slots_T)
    adapters.add(layer, name, y, x)
    return None
