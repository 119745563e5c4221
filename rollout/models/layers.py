"""Blocks of the decoder: rotary embeddings, attention, and dense and sparse feed-forward blocks.

A block takes the normalised hidden states and returns its output; products that share an input are one. Its layer owns
the norms and the residual stream. A shard's block makes a part of its output, which becomes whole by a sum over the
ranks of the block's tensor group (`Linear.complete`). Parameters are created empty; the loader or the random
initialisation fills them. Each block names the Hugging Face tensors that its parameters consist of (see
`rollout.models.names`).

Legend: T tokens, H hidden, K inputs, N outputs, Q query heads, G KV heads, D head dimension, I intermediate, E experts,
F = D / 2 frequencies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from rollout_kernels import (
    apply_rope,
    gated,
    head_rms_norm,
    moe_experts,
    paged_decode_attention,
    paged_prefill_attention,
    rms_norm,
    rope_cos_sin,
    route,
    write_kv,
)
from rollout_kernels.linear.coded import CodedMatrix, Weights, scales_shape
from rollout_kernels.linear.products import add_product, product
from rollout_kernels.moe import clamped_glu
from rollout_kernels.moe.formats import ExpertWeights, Format, Shared, scale_dtype, scale_shape
from rollout_kernels.parallel import ONE_RANK, TensorGroup
from torch import nn

from rollout.models.batch import AttentionBatch, ExpertRecord, KVCache, LayerKV
from rollout.models.coded import CodedView, scale_cut
from rollout.models.cut import Cut, CutView
from rollout.models.joined import JoinedView
from rollout.models.lora_slots import Product, StepAdapters
from rollout.models.names import Region, one_name
from rollout.models.spec import (
    AttentionSpec,
    DenseSpec,
    LinearSpec,
    MoESpec,
    QueryGrowth,
    RopeSpec,
    RouterSpec,
    Scoring,
    joined_cut,
)
from rollout.models.split_context import attend_split, gathered_chunks, whole_context


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of the dimensions that turn, float32 [F], fastest first."""
    width = rope.width(head_dim)
    if rope.kind == "none":
        return torch.zeros(width // 2)
    if rope.frequencies:
        return torch.tensor(rope.frequencies)
    return 1.0 / rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


class Rope(nn.Module):
    """Cosines and sines of a step's positions, computed once for all layers that share it; any position works."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        super().__init__()
        inv_freq_F = inverse_frequencies(rope, head_dim)
        sign_F = torch.full_like(inv_freq_F, rope.amplitude)
        self.inv_freq_D: torch.Tensor
        self.sign_D: torch.Tensor
        signs = (-sign_F, sign_F)
        axes_F = torch.tensor(rope.axes or (0,) * len(inv_freq_F), dtype=torch.int64)
        axes_D = axes_F.repeat_interleave(2) if rope.interleaved else axes_F.repeat(2)
        self.axes_D: torch.Tensor
        self.register_buffer("axes_D", axes_D.to(device), persistent=False)
        if rope.interleaved:
            inv_freq_D, sign_D = inv_freq_F.repeat_interleave(2), torch.stack(signs, 1).flatten()
        else:
            inv_freq_D, sign_D = inv_freq_F.repeat(2), torch.cat(signs)
        self.register_buffer("inv_freq_D", inv_freq_D.to(device), persistent=False)
        self.register_buffer("sign_D", sign_D.to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of `apply_rope`. Positions are [T], or [3, T] by axis."""
        if positions.dim() == 2:
            positions_TD = positions.index_select(0, self.axes_D).t().contiguous()
            return rope_cos_sin(positions_TD, self.inv_freq_D, self.sign_D)
        return rope_cos_sin(positions, self.inv_freq_D, self.sign_D)


#: Maps router logits [T, E] and the router's bias [E], float32 or None, to weights and experts of each token, [T, K].
Route = Callable[[torch.Tensor, torch.Tensor | None, RouterSpec], tuple[torch.Tensor, torch.Tensor]]


def route_by_softmax(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, router: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the largest logits, weighted by their softmax."""
    if bias_E is None and router.groups == 1:
        weights_TK, experts_TK = route(logits_TE, router.top_k, router.renormalize)
        return weights_TK * router.scale, experts_TK
    return _route_by_scores(torch.softmax(logits_TE, dim=-1, dtype=torch.float32), bias_E, router)


def route_by_sigmoid(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, router: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the largest sigmoids, weighted by these (arXiv 2412.19437, section 2.1.2)."""
    return _route_by_scores(logits_TE.float().sigmoid(), bias_E, router)


def route_by_sqrtsoftplus(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, router: RouterSpec, experts_TK: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the largest square roots of softplus, or the given ones, weighted by these (DeepSeek-V4)."""
    return _route_by_scores(F.softplus(logits_TE.float()).sqrt(), bias_E, router, experts_TK)


def _route_by_scores(
    scores_TE: torch.Tensor, bias_E: torch.Tensor | None, router: RouterSpec, experts_TK: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if router.groups > 1:
        choice_TGE = choice_TE.unflatten(1, (router.groups, -1))
        sums_TG = choice_TGE.topk(router.group_best, dim=-1).values.sum(-1)
        taken_TG = torch.zeros_like(sums_TG).scatter_(1, sums_TG.topk(router.top_groups, dim=-1).indices, 1.0)
        choice_TE = choice_TGE.masked_fill(taken_TG[..., None] == 0, -math.inf).flatten(1)
    experts_TK = choice_TE.topk(router.top_k, dim=-1).indices if experts_TK is None else experts_TK
    weights_TK = scores_TE.gather(1, experts_TK)
    if router.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True).clamp_min(router.least_sum) + 1e-20)
    return weights_TK * router.scale, experts_TK


#: Scoring functions by the router's spec. They read nothing on the host, so that steps can be captured.
ROUTES: dict[Scoring, Route] = {
    "softmax": route_by_softmax,
    "sigmoid": route_by_sigmoid,
    "sqrtsoftplus": route_by_sqrtsoftplus,
}


class Build(NamedTuple):
    """The values that all blocks of a model are built with."""

    dtype: torch.dtype
    device: torch.device
    group: TensorGroup = ONE_RANK  # the ranks of the other shards
    format: Format = "plain"  # the format of weights that may be codes

    @property
    def plain(self) -> Build:
        """The same for weights that are never codes."""
        return self._replace(format="plain")

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A parameter without gradient and without defined contents."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)


class Embedding(NamedTuple):
    """The embedding of all tokens, or one rank's part of it: the rows from token `first` on."""

    weight_VH: torch.Tensor
    first: int | None = None  # None: it is whole
    group: TensorGroup = ONE_RANK

    def rows(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the whole embedding, [T, H]. Each is on one rank; the others add zeros."""
        if self.first is None:
            return F.embedding(token_ids_T, self.weight_VH)
        kept_T = token_ids_T - self.first
        foreign_T = (kept_T < 0) | (kept_T >= len(self.weight_VH))
        x_TH = F.embedding(kept_T.masked_fill(foreign_T, 0), self.weight_VH)
        return self.group.all_reduce(x_TH.masked_fill_(foreign_T[:, None], 0.0))


def float32_product(x_SH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """The product of the output layer, float32 [S, V].

    Logits rounded to 16 bits would cost log-probs more precision than everything else does.
    """
    if x_SH.is_cuda and x_SH.dtype != torch.float32:
        return torch.mm(x_SH, weight_VH.t(), out_dtype=torch.float32)
    return F.linear(x_SH.float(), weight_VH.float())


class Block(nn.Module):
    """A module that is called without `nn.Module.__call__`.

    That call looks for hooks. Here are no hooks, and the search costs as much as a small model's matrix product.
    """

    #: True if `forward` reads a value from the device on the host: a step with it cannot be captured.
    reads_host = False

    def __call__(self, *args: Any) -> Any:
        """Run `forward`."""
        return self.forward(*args)


#: Weights and experts of each token, [T, K] each.
Chosen = tuple[torch.Tensor, torch.Tensor]
#: From a sparse block, its normalised input [T, H], the record of experts, and the experts of a block that has a table,
#: to its output, [T, H]. Of a shard it is this rank's part of a sum.
RunExperts = Callable[["SparseFeedForward", torch.Tensor, ExpertRecord | None, Chosen | None], torch.Tensor]


class StepContext(NamedTuple):
    """The values that all layers of a step share."""

    cos_sin: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # cosines and sines of each rotary embedding of the model
    slots_T: torch.Tensor  # the batch's KV slots as int64
    batch: AttentionBatch
    kv: KVCache
    run_experts: RunExperts | None = None  # runs sparse blocks in the place of their own code
    token_inputs_TLD: torch.Tensor | None = None  # the inputs of layers that are made of tokens
    token_ids_T: torch.Tensor | None = None  # ids for blocks with a table of experts
    own: OwnTokens | None = None  # this rank's tokens, if rows are dealt to ranks


class OwnTokens(NamedTuple):
    """The tokens of a step whose attention this rank runs (`rollout.models.dealt_rows`)."""

    context: StepContext  # in the mixers' form
    at_N: torch.Tensor | None  # int64: where they are in a prefill; None in a decode, which has all rows
    foreign_T1: torch.Tensor | None  # bool: the tokens of other ranks, in a decode

    @property
    def none(self) -> bool:
        """True if this rank has no token of the step."""
        return self.at_N is not None and not len(self.at_N)

    def take(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The rows of `x_TH` that mixers take."""
        return x_TH if self.at_N is None else x_TH[self.at_N]

    def give(self, out_NK: torch.Tensor, tokens: int) -> torch.Tensor:
        """The results of mixers in a step of `tokens` tokens, with zeros for the other ranks' tokens."""
        if self.at_N is None:
            assert self.foreign_T1 is not None
            return out_NK.masked_fill(self.foreign_T1, 0.0)
        return out_NK.new_zeros(tokens, out_NK.shape[1]).index_copy_(0, self.at_N, out_NK)


# --- outputs of blocks -----------------------------------------------------------------------------------------------


class Computed(NamedTuple):
    """The output of a block, complete."""

    y_TH: torch.Tensor

    def value(self) -> torch.Tensor:
        """The output, [T, H]."""
        return self.y_TH

    def add_to(self, residual_TH: torch.Tensor) -> torch.Tensor:
        """`residual_TH` plus the output."""
        return residual_TH + self.y_TH


class LastProduct(NamedTuple):
    """The output of a block before its last product: product and residual sum can be one operation."""

    linear: Linear
    x_TK: torch.Tensor
    adapters: StepAdapters | None
    layer: int
    product: Product

    def value(self) -> torch.Tensor:
        """The output, [T, H]."""
        return self.linear.complete(self._corrected(self.linear.product(self.x_TK)))

    def add_to(self, residual_TH: torch.Tensor) -> torch.Tensor:
        """`residual_TH` plus the output."""
        if self.linear.partial:
            return residual_TH + self.value()
        return self._corrected(self.linear.add_to(residual_TH, self.x_TK))

    def _corrected(self, y_TH: torch.Tensor) -> torch.Tensor:
        if self.adapters is not None:
            self.adapters.add(self.layer, self.product, y_TH, self.x_TK)
        return y_TH


# --- parts of blocks -------------------------------------------------------------------------------------------------


class Linear(Block):
    """`x W^T + b`, optionally added to a residual. Its weight is of `dtype`, or codes with scales in a format.

    Where a shard has a part of the inputs only, `product` is this rank's part of the sum that `complete` makes.
    """

    def __init__(self, spec: LinearSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.group, self.format = spec, build.group, build.format
        self.partial = spec.input_cut is not None
        self.weight_scales: nn.Parameter | None = None
        if self.format != "plain":
            scales, dtype_of_scales = scales_shape(spec.widths, spec.inputs, self.format), scale_dtype(self.format)
            self.weight_scales = build.empty(*scales, dtype=dtype_of_scales)
        stored = build.dtype if self.format == "plain" else torch.uint8
        self.weight = build.empty(spec.outputs, spec.inputs, dtype=stored)
        self.bias = build.empty(spec.outputs) if spec.bias else None

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N]."""
        return self.complete(self.product(x_TK))

    def product(self, x_TK: torch.Tensor) -> torch.Tensor:
        """The result, [T, N], or this rank's part of it without the bias."""
        return product(x_TK, self.stored, None if self.partial else self.bias)

    @property
    def stored(self) -> Weights:
        """The weight as the kernels take it."""
        if self.weight_scales is None:
            return self.weight
        return CodedMatrix(self.weight.data, self.weight_scales.data, self.format, self.spec.widths)

    def complete(self, y_TN: torch.Tensor) -> torch.Tensor:
        """The whole result of what `product` made on each rank."""
        if not self.partial:
            return y_TN
        y_TN = self.group.all_reduce(y_TN)
        return y_TN if self.bias is None else y_TN + self.bias

    def add_to(self, residual_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
        """`residual_TN` plus the result, in one operation where there is no bias; not for a part of a sum."""
        assert not self.partial
        return add_product(residual_TN, x_TK, self.stored, self.bias)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        modules, widths = self.spec.modules, self.spec.widths
        cuts: tuple[Cut | None, ...] = self.spec.output_cuts or (None,) * len(modules)
        views = {
            f"{prefix}{module}.weight": CutView.of(view, self.spec.input_cut or cut)
            for module, view, cut in zip(modules, self._views(), cuts, strict=True)
        }
        regions = [Region(({name: view},)) for name, view in views.items()]
        if self.spec.joined:
            regions = [Region((views, {f"{prefix}{self.spec.joined}.weight": self._joined_view()}))]
        if self.bias is not None:
            biases = zip(modules, self.bias.split(widths), cuts, strict=True)
            regions += [one_name(f"{prefix}{module}.bias", bias, cut) for module, bias, cut in biases]
        return regions

    def _views(self) -> list[torch.Tensor]:
        """The views that take the weights of each module."""
        stored = self.stored
        if not isinstance(stored, CodedMatrix):
            return [view.detach() for view in stored.split(self.spec.widths)]
        return [CodedView.of(part, tuple(part.values_ENK.shape[1:])) for part in stored.parts()]

    def _joined_view(self) -> torch.Tensor:
        """The view that takes the weights of both modules, side by side."""
        view, scales = self.weight.detach(), self.weight_scales
        if scales is not None:
            view = CodedView.of(ExpertWeights(view[None], scales.data[None], self.format, 2), tuple(view.shape))
        return CutView.of(view, joined_cut(self.spec.output_cuts))

    def scale_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """The views that take a checkpoint's scales of each module, by the name of its weight; none if plain."""
        stored, modules = self.stored, self.spec.modules
        if not isinstance(stored, CodedMatrix):
            return {}
        cuts: tuple[Cut | None, ...] = self.spec.output_cuts or (None,) * len(modules)
        views = {}
        for module, part, cut in zip(modules, stored.parts(), cuts, strict=True):
            assert part.scales is not None
            cut = scale_cut(self.spec.input_cut or cut, self.format)
            views[f"{prefix}{module}.weight"] = CutView.of(part.scales[0], cut)
        return views


class RMSNorm(Block):
    """Root-mean-square normalisation of the last dimension; with `unit_offset` its weight is stored less 1."""

    def __init__(self, width: int, eps: float, build: Build, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = build.empty(width)
        self.eps, self.unit_offset = eps, unit_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        return rms_norm(x, self.weight, self.eps, self.unit_offset)


class HeadsNorm(RMSNorm):
    """Root-mean-square normalisation of all heads together; a shard has some of them.

    Each head is kept by equally many ranks, so the mean over all ranks is that over all heads.
    """

    def __init__(self, width: int, cut: Cut | None, spec: AttentionSpec, build: Build) -> None:
        super().__init__(width, spec.eps, build, spec.unit_offset)
        self.cut, self.group = cut, ONE_RANK if spec.shard.size == 1 else build.group

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, width] to the same."""
        if self.group.size == 1:
            return super().forward(x_TK)
        mean_T1 = self.group.all_reduce(x_TK.float().pow(2).mean(-1, keepdim=True)) / self.group.size
        weight = self.weight.float() + 1.0 if self.unit_offset else self.weight.float()
        return (x_TK.float() * torch.rsqrt(mean_T1 + self.eps) * weight).to(x_TK.dtype)


def gate_output(out_TK: torch.Tensor, gate_TK: torch.Tensor | None) -> torch.Tensor:
    """The output of a mixer, weighted by the sigmoid of its gates, if it has any."""
    return out_TK if gate_TK is None else out_TK * torch.sigmoid(gate_TK)


def grown(q_TQD: torch.Tensor, growth: QueryGrowth | None, batch: AttentionBatch) -> torch.Tensor:
    """Queries times the factor that grows with their positions, if any."""
    if growth is None:
        return q_TQD

    def factors() -> torch.Tensor:
        steps_T = ((batch.positions_T + growth.first) // growth.positions).float()
        return (1.0 + growth.beta * torch.log1p(steps_T)).to(q_TQD.dtype)[:, None, None]

    return q_TQD * batch.shared(growth, factors)


# --- mixers ----------------------------------------------------------------------------------------------------------


class Attention(Block):
    """Grouped-query attention over the paged cache; writes this step's keys and values first.

    `rope` is the index of its rotary embedding in the model, `kv_index` counts the layers with KV.
    """

    def __init__(self, spec: AttentionSpec, layer: int, kv_index: int, rope: int, build: Build) -> None:
        super().__init__()
        self.spec, self.layer, self.kv_index, self.rope = spec, layer, kv_index, rope
        self.scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.qkv_proj = Linear(spec.qkv, build)
        self.o_proj = Linear(spec.o, build)
        own_kv = spec.kv != "shared"
        self.q_dim, self.kv_dim, self.v_dim = spec.q_dim, spec.kv_dim, spec.v_dim
        self.sinks = build.empty(spec.heads) if spec.sinks else None
        gate = spec.output_gate
        self.gate_proj = None if gate is None else Linear(gate, build.plain)
        if spec.qk_norm in ("head", "unit"):
            self.qk_norm_weight: torch.Tensor
            if spec.qk_norm == "head":
                self.qk_norm_weight = build.empty(2 if own_kv else 1, spec.head_dim)
            else:
                ones = torch.ones(2, spec.head_dim, dtype=build.dtype, device=build.device)
                self.register_buffer("qk_norm_weight", ones, persistent=False)
            kinds = torch.tensor([0] * spec.heads + [1] * (spec.kv_heads * own_kv), device=build.device)
            self.head_kinds: torch.Tensor  # the weight, of two, that each head takes
            self.register_buffer("head_kinds", kinds, persistent=False)
        elif spec.qk_norm == "full":
            q_cut, k_cut = spec.q_cut(spec.head_dim), spec.kv_cut(spec.head_dim)
            self.q_norm = HeadsNorm(self.q_dim, q_cut, spec, build)
            self.k_norm = HeadsNorm(self.kv_dim, k_cut, spec, build)

    def forward(self, x_TH: torch.Tensor, context: StepContext) -> LastProduct:
        """Attention of the normalised `x_TH`."""
        batch, cache = context.batch, context.kv.layer(self.kv_index)
        q_TQD, gate_TK = self.project(x_TH, context.cos_sin[self.rope], context.slots_T, cache, batch.adapters)
        out_TQD = self.mix(x_TH, self.grown(q_TQD, batch), context)
        out_TK = out_TQD[..., : self.v_dim].flatten(1)
        if self.gate_proj is not None:
            gate_TK = self.gate_proj(x_TH)
        return LastProduct(self.o_proj, gate_output(out_TK, gate_TK), batch.adapters, self.layer, "o")

    def mix(self, x_TH: torch.Tensor, q_TQD: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Attention of queries made of the normalised `x_TH`, [T, Q, D]."""
        return self.attend(q_TQD, context.batch, context.kv.layer(self.kv_index))

    def project(
        self,
        x_TH: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        slots_T: torch.Tensor,
        cache: LayerKV,
        adapters: StepAdapters | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries of the normalised `x_TH`, [T, Q, D], and their gates of the output before the sigmoid, [T, Q D].

        Keys and values of its own go to the cache at `slots_T`, int64.
        """
        qk_THD, v_TGD, gate_TK = self._project(x_TH, adapters)
        qk_THD = apply_rope(qk_THD, *cos_sin, self.spec.rope.interleaved)
        if self.spec.kv == "shared":
            return qk_THD, gate_TK
        q_TQD, k_TGD = qk_THD[:, : self.spec.heads], qk_THD[:, self.spec.heads :]
        write_kv(k_TGD, v_TGD, cache.k_PSGD, cache.v_PSGD, slots_T, cache.scales_P2GS)
        return q_TQD, gate_TK

    def grown(self, q_TQD: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Queries times the factor that grows with their positions, if the spec has it."""
        return grown(q_TQD, self.spec.growth, batch)

    def attend(self, q_TQD: torch.Tensor, batch: AttentionBatch, cache: LayerKV) -> torch.Tensor:
        """Attention of a step's queries over this layer's cache, [T, Q, D]."""
        if self.spec.split != "context":
            return self._attend(q_TQD, None, batch, cache)
        group, heads = self.o_proj.group, self.spec.own_kv_heads
        if batch.chunks is None:
            return attend_split(q_TQD, group, functools.partial(self._attend, batch=batch, cache=cache))
        parts = gathered_chunks(batch, cache.k_PSGD.shape[1] * group.size)
        outs = [
            self._attend(q_TQD[tokens], None, part, whole_context(cache, pages_M, group, heads))
            for tokens, pages_M, part in parts
        ]
        return torch.cat(outs)

    def _attend(
        self, q_TQD: torch.Tensor, log_sum_BQ: torch.Tensor | None, batch: AttentionBatch, cache: LayerKV
    ) -> torch.Tensor:
        """Attention over the positions that are in `cache`; a decode also tells the logarithms of heads' sums."""
        window = self.spec.window
        if self.spec.chunk is not None:
            batch = batch.in_chunks(self.spec.chunk, cache.k_PSGD.shape[1])
        given = q_TQD, cache.k_PSGD, cache.v_PSGD, batch.page_table_BP
        how: dict[str, Any] = {"scale": self.scale, "window": window, "scales_P2GS": cache.scales_P2GS}
        how |= {"softcap": self.spec.softcap, "sinks_H": self.sinks}
        if batch.chunks is not None:
            starts_C1, lens_B = batch.query_starts_C1, batch.context_lens_B
            return paged_prefill_attention(
                *given, batch.chunks, **how, query_starts_C1=starts_C1, context_lens_B=lens_B
            )
        how |= {"max_context": batch.max_context, "plan": batch.decode_plan(window, cache.k_PSGD, q_TQD)}
        return paged_decode_attention(*given, batch.context_lens_B, **how, log_sum_BH=log_sum_BQ)

    def _project(
        self, x_TH: torch.Tensor, adapters: StepAdapters | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Query heads and key heads of its own, normalised, [T, Q + G, D]; values [T, G, D]; gates [T, Q D], if any."""
        spec, gate_TK = self.spec, None
        qkv_TN = self.qkv_proj(x_TH)
        if adapters is not None:
            adapters.add(self.layer, "qkv", qkv_TN, x_TH)
        if spec.query_gate:
            gated_TQX, kv_TN = qkv_TN[:, : 2 * self.q_dim].unflatten(1, (spec.heads, -1)), qkv_TN[:, 2 * self.q_dim :]
            q_TQD, gate_TQD = gated_TQX.chunk(2, dim=-1)
            qkv_TN, gate_TK = torch.cat((q_TQD.flatten(1), kv_TN), dim=1), gate_TQD.flatten(1)
        if spec.qk_norm == "full":
            q, k, v = qkv_TN.split((self.q_dim, self.kv_dim, self.kv_dim), dim=-1)
            qkv_TN = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        if spec.clip_qkv is not None:
            qkv_TN = qkv_TN.clamp(-spec.clip_qkv, spec.clip_qkv)
        qk_TN, v_TN = qkv_TN.tensor_split((self.q_dim + (0 if spec.kv == "shared" else self.kv_dim),), dim=1)
        qk_THD = qk_TN.unflatten(1, (-1, spec.head_dim))
        v_TGD = v_TN.unflatten(1, (v_TN.shape[1] // self.v_dim, self.v_dim))
        if spec.kv == "keys":
            v_TGD = qk_THD[:, spec.heads :]
        if spec.value_norm:
            v_TGD = F.rms_norm(v_TGD.float(), (self.v_dim,), eps=spec.eps).to(v_TGD.dtype)
        if spec.value_scale != 1.0:
            v_TGD = v_TGD * spec.value_scale
        if spec.value_dim is not None:
            v_TGD = F.pad(v_TGD, (0, spec.head_dim - self.v_dim))
        if spec.qk_norm in ("head", "unit"):
            weight_HD = self.qk_norm_weight.index_select(0, self.head_kinds)
            qk_THD = head_rms_norm(qk_THD, weight_HD, spec.eps, spec.unit_offset)
        return qk_THD, v_TGD, gate_TK

    def scale_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return self.qkv_proj.scale_views(prefix) | self.o_proj.scale_views(prefix)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        regions = self.qkv_proj.regions(prefix) + self.o_proj.regions(prefix)
        if self.gate_proj is not None:
            regions += self.gate_proj.regions(prefix)
        if self.sinks is not None:
            regions.append(one_name(f"{prefix}{self.spec.names.sinks}", self.sinks, self.spec.q_cut(1)))
        q_name, k_name = (f"{prefix}{name}.weight" for name in self.spec.names.qk_norm)
        if self.spec.qk_norm == "head":
            names = (q_name, k_name)[: len(self.qk_norm_weight)]
            regions += [one_name(*region) for region in zip(names, self.qk_norm_weight, strict=True)]
        elif self.spec.qk_norm == "full":
            q_norm, k_norm = self.q_norm, self.k_norm
            regions += [one_name(q_name, q_norm.weight, q_norm.cut), one_name(k_name, k_norm.weight, k_norm.cut)]
        return regions


# --- feed-forward blocks ---------------------------------------------------------------------------------------------


class DenseFeedForward(Block):
    """The gated feed-forward block of a dense layer."""

    def __init__(self, spec: DenseSpec, layer: int, build: Build) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.gate_up_proj = Linear(spec.gate_up, build)
        self.down_proj = Linear(spec.down, build)

    def forward(self, x_TH: torch.Tensor, context: StepContext) -> LastProduct:
        """The block's output for the normalised `x_TH`."""
        adapters = context.batch.adapters
        gate_up_T2I = self.gate_up_proj(x_TH)
        if adapters is not None:
            adapters.add(self.layer, "gate_up", gate_up_T2I, x_TH)
        gated_TI = gated(gate_up_T2I, self.spec.activation, self.spec.limit)
        return LastProduct(self.down_proj, gated_TI, adapters, self.layer, "down")

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        return self.gate_up_proj.regions(prefix) + self.down_proj.regions(prefix)

    def scale_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return self.gate_up_proj.scale_views(prefix) | self.down_proj.scale_views(prefix)


class SharedExpert(Block):
    """The expert that every token takes, weighted by a sigmoid of the token if it has a gate; without adapters.

    A shard's product is this rank's part of a sum; its block adds up the parts of all ranks.
    """

    def __init__(self, spec: DenseSpec, gate: str | None, build: Build, limit: float | None = None) -> None:
        super().__init__()
        self.gate_up_proj = Linear(spec.gate_up, build)
        self.down_proj = Linear(spec.down, build)
        self.spec, self.limit = spec, limit
        self.gate = None if gate is None else Linear(LinearSpec(spec.hidden, (gate,), (1,), False), build.plain)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Its output for the normalised `x_TH`, [T, H], or this rank's part of it."""
        y_TH = self.down_proj.product(gated(self.gate_up_proj(x_TH), self.spec.activation, self.limit))
        return y_TH if self.gate is None else y_TH * torch.sigmoid(self.gate(x_TH))

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        gate = [] if self.gate is None else self.gate.regions(prefix)
        return self.gate_up_proj.regions(prefix) + self.down_proj.regions(prefix) + gate

    def scale_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return self.gate_up_proj.scale_views(prefix) | self.down_proj.scale_views(prefix)


class SparseFeedForward(Block):
    """A mixture of gated feed-forward experts; their weights may be kept as e4m3 codes with scales.

    A shared expert that is as wide as k experts is stored as k more (`stacked_shared`), which every token takes, and
    its gate as one more row of the router. Then the kernels need no code for it. If it has another width, or if the
    experts are codes, it is kept apart; it may be coded, too, but its gate is not. For a shard, the widths that its
    rank keeps count.

    `sparse_index` counts the sparse layers: the record of a step has one entry for each of them, without shared
    experts.
    """

    reads_host = True

    def __init__(self, spec: MoESpec, sparse_index: int, build: Build) -> None:
        super().__init__()
        self.spec, self.sparse_index, self.format, self.group = spec, sparse_index, build.format, build.group
        self.stacked_shared = spec.shared_like_others if self.format == "plain" else 0
        #: The number of shared experts that follow the routed experts, and whether the router has a row for their gate.
        self.shared_choices = Shared(self.stacked_shared, self.stacked_shared > 0 and spec.shared_gate)
        logits = spec.experts + self.shared_choices.gated
        self.router = build.empty(logits, spec.hidden)
        self.router_bias: nn.Parameter | None = None
        if spec.router.bias and spec.table is None:
            self.router_bias = build.empty(spec.experts, dtype=torch.float32)
        self.table_VK: nn.Parameter | None = None  # the experts of each token, where the router does not choose them
        if spec.table is not None:
            self.table_VK = build.empty(spec.table, spec.router.top_k, dtype=torch.int64)
        self.logit_bias: nn.Parameter | None = None
        if spec.router.logit_bias:
            self.logit_bias = build.empty(spec.experts)
        self.shared: SharedExpert | None = None  # the shared expert, if it is kept apart
        if spec.shared is not None and not self.stacked_shared:
            gate = spec.names.shared_gate if spec.shared_gate else None
            limit = None if spec.limits is None else spec.limits.shared
            self.shared = SharedExpert(spec.shared, gate, build, limit)
        wide, halves = spec.halves * spec.intermediate, spec.halves
        self.gate_up, self.gate_up_scales = self._empty(wide, spec.width, halves, build)
        self.down, self.down_scales = self._empty(spec.width, spec.intermediate, 1, build)
        self.narrow_proj = self.widen_proj = None
        if spec.inner is not None:
            narrow = LinearSpec(spec.hidden, (spec.names.narrow,), (spec.inner,), False)
            widen = LinearSpec(spec.inner, (spec.names.widen,), (spec.hidden,), False)
            self.narrow_proj, self.widen_proj = Linear(narrow, build.plain), Linear(widen, build.plain)
        self.biases: tuple[nn.Parameter, nn.Parameter] | None = None
        how: dict[str, Any] = {"activation": spec.activation, "limit": spec.limits and spec.limits.experts}
        self.activation: Callable[[torch.Tensor], torch.Tensor] = functools.partial(gated, **how)
        if spec.clamped is not None:
            kept = len(spec.kept_experts)
            self.gate_up_bias = build.empty(kept, 2 * spec.intermediate)
            self.down_bias = build.empty(kept, spec.hidden)
            self.biases = (self.gate_up_bias, self.down_bias)
            self.activation = functools.partial(clamped_glu, alpha=spec.clamped.alpha, limit=spec.clamped.limit)

    def _empty(self, outputs: int, inputs: int, halves: int, build: Build) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Memory for a projection of all experts, [E, outputs, inputs], and for its scales, if the format has any.

        E counts shared experts that are stored with the others.
        """
        experts, format = len(self.spec.kept_experts) + self.stacked_shared, self.format
        shape = scale_shape(experts, outputs, inputs, format, halves)
        if shape is None:
            return build.empty(experts, outputs, inputs), None
        codes = build.empty(experts, outputs, inputs, dtype=torch.uint8)
        return codes, build.empty(*shape, dtype=scale_dtype(format))

    def weights(self, projection: Literal["gate_up", "down"]) -> ExpertWeights:
        """One projection of all experts in the kernels' layout, without a copy; plain weights must have 16 bits."""
        wide = projection == "gate_up"
        values, scales = (self.gate_up, self.gate_up_scales) if wide else (self.down, self.down_scales)
        halves = self.spec.halves if wide else 1
        return ExpertWeights(values.data, None if scales is None else scales.data, self.format, halves)

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The router's logits, [T, E], in float32 if its spec says so. A row of the shared expert's gate comes last."""
        if self.spec.router.float32:
            return F.linear(x_TH.float(), self.router.float(), self.logit_bias)
        return F.linear(x_TH, self.router, self.logit_bias)

    def choose_experts(
        self, logits_TE: torch.Tensor, record: ExpertRecord | None, token_ids_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts of each token, [T, K]; the experts also go to the step's record, if it has one.

        Shared experts that are stored with the others come last, and do not go to the record.
        """
        router, experts = self.spec.router, self.spec.experts
        if self.table_VK is None:
            weights_TK, experts_TK = ROUTES[router.scoring](logits_TE[:, :experts], self.router_bias, router)
        else:
            assert token_ids_T is not None, "the decoder knows them"
            given_TK = self.table_VK.index_select(0, token_ids_T)
            weights_TK, experts_TK = route_by_sqrtsoftplus(logits_TE[:, :experts], None, router, given_TK)
        weights_TK = self.weighed(weights_TK, experts_TK)
        if record is not None:
            record.layer(self.sparse_index, len(logits_TE)).copy_(experts_TK)
        if not self.stacked_shared:
            return weights_TK, experts_TK
        tokens, count = len(logits_TE), self.stacked_shared
        last_T1 = logits_TE[:, experts:].sigmoid() if self.spec.shared_gate else weights_TK.new_ones(tokens, 1)
        shared_N = torch.arange(experts, experts + count, dtype=experts_TK.dtype, device=experts_TK.device)
        weights_TK = torch.cat((weights_TK, last_T1.expand(tokens, count)), dim=1)
        return weights_TK, torch.cat((experts_TK, shared_N.expand(tokens, count)), dim=1)

    def _chosen(self, x_TH: torch.Tensor, context: StepContext) -> Chosen:
        logits_TE = self.logits(self.router_input(x_TH))
        return self.choose_experts(logits_TE, context.batch.experts, context.token_ids_T)

    def _kept(self, experts_TK: torch.Tensor) -> torch.Tensor:
        """The places of experts in this rank's memory; experts of other ranks have no place."""
        spec = self.spec
        kept_TK = experts_TK - spec.kept_experts.start
        if spec.expert_cut is None:
            return kept_TK
        count, after_TK = len(spec.kept_experts), experts_TK - spec.experts  # shared experts come after all others
        routed_TK = torch.where(kept_TK < count, kept_TK, -1)
        return torch.where(after_TK < 0, routed_TK, after_TK + count)

    def router_input(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The router's part of the block's input."""
        return x_TH

    def read(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The experts' part of the block's input."""
        return x_TH if self.narrow_proj is None else self.narrow_proj(x_TH)

    def weighed(self, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        """The weights of chosen experts, from the weights that the router gives them."""
        return weights_TK

    def complete(self, y_TH: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        """The block's output of all ranks, from the experts' outputs."""
        y_TH = y_TH if self.widen_proj is None else self.widen_proj(y_TH)
        return self.group.all_reduce(y_TH if self.shared is None else y_TH + self.shared(x_TH))

    def forward(self, x_TH: torch.Tensor, context: StepContext) -> Computed:
        """The weighted outputs of each token's experts."""
        if context.run_experts is not None:
            given = None if self.table_VK is None else self._chosen(x_TH, context)
            y_TH = context.run_experts(self, x_TH, context.batch.experts, given)
            return Computed(self.group.all_reduce(y_TH))
        weights_TK, experts_TK = self._chosen(x_TH, context)
        gate_up: torch.Tensor = self.gate_up
        down: torch.Tensor = self.down
        if self.format != "plain":  # decodes all experts in each step: for comparison on a CPU
            both = (self.weights("gate_up"), self.weights("down"))
            gate_up, down = (weights.dequantized(torch.float32).to(x_TH.dtype) for weights in both)
        kept_TK, inner_TH = self._kept(experts_TK), self.read(x_TH)
        how = gate_up, down, self.activation, self.biases, self.adds_bias
        if self.spec.router.weights_inputs:  # each expert of a token has an input of its own
            inner_TKH = (inner_TH[:, None] * weights_TK[..., None]).to(x_TH.dtype)
            ones_P1 = torch.ones_like(weights_TK).view(-1, 1)
            y_PH = moe_experts(inner_TKH.flatten(0, 1), ones_P1, kept_TK.reshape(-1, 1), *how)
            y_TH = y_PH.unflatten(0, kept_TK.shape).sum(1)
        else:
            y_TH = moe_experts(inner_TH, weights_TK, kept_TK, *how)
        return Computed(self.complete(y_TH, x_TH))

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the biases of down projections: one rank does for all parts of a sum."""
        return self.spec.whole_experts or self.spec.shard.rank == 0

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`: one tensor an expert, or all experts stacked."""
        names = self.spec.names
        if self._turned:
            return [*self._router_regions(prefix), *self._shared_regions(prefix), *self._transposed_regions(prefix)]
        gate_up, down, count = {}, {}, self.spec.experts
        for expert in range(count):
            for half, name in enumerate((names.gate, names.up)[-self.spec.halves :]):
                gate_up[f"{prefix}{name.format(expert)}.weight"] = self._view("gate_up", expert, half)
            down[f"{prefix}{names.down.format(expert)}.weight"] = self._view("down", expert)
        around = [proj for proj in (self.narrow_proj, self.widen_proj) if proj is not None]
        return [
            *self._router_regions(prefix),
            *self._shared_regions(prefix),
            *(region for proj in around for region in proj.regions(prefix)),
            Region((gate_up, {f"{prefix}{names.stacked_gate_up}": self._view("gate_up")})),
            Region((down, {f"{prefix}{names.stacked_down}": self._view("down")})),
        ]

    @property
    def _turned(self) -> bool:
        """Whether checkpoints have the tensors of all experts alone, with inputs before outputs."""
        return self.spec.clamped is not None or self.spec.turned

    def _shared_regions(self, prefix: str) -> list[Region]:
        if not self.stacked_shared:
            return [] if self.shared is None else self.shared.regions(prefix)
        names, shared, first = self.spec.names, self.spec.shared, len(self.spec.kept_experts)
        assert shared is not None
        outputs = shared.gate_up.output_cuts or (None, None)
        halves = self.gate_up.data[first:].split(self.spec.intermediate, dim=1)
        views = {
            name: CutView.of(JoinedView.of(half, 0), cut)
            for name, half, cut in zip(names.shared.gate_up, halves, outputs, strict=True)
        }
        views[names.shared.down] = CutView.of(JoinedView.of(self.down.data[first:], 1), shared.down.input_cut)
        regions = [Region(({f"{prefix}{name}.weight": view},)) for name, view in views.items()]
        if self.spec.shared_gate:
            regions.append(one_name(f"{prefix}{names.shared_gate}.weight", self.router.data[self.spec.experts :]))
        return regions

    def _router_regions(self, prefix: str) -> list[Region]:
        names = self.spec.names
        router_EH = self.router.data[: self.spec.experts]
        regions = [Region(tuple({f"{prefix}{name}.weight": router_EH} for name in names.router))]
        if self.logit_bias is not None:
            regions.append(Region(tuple({f"{prefix}{name}.bias": self.logit_bias.data} for name in names.router)))
        if self.table_VK is not None:
            regions.append(Region(({f"{prefix}{names.table}": self.table_VK.data},), kept_if_absent=True))
        if self.router_bias is not None:
            bias = self.router_bias.data[None] if names.bias_row else self.router_bias.data
            views = tuple({f"{prefix}{name}": bias} for name in names.router_bias)
            regions.append(Region(views, kept_if_absent=True))
        return regions

    def _transposed_regions(self, prefix: str) -> list[Region]:
        """The regions of all experts, with inputs before outputs."""
        names, by_expert = self.spec.names, self.spec.expert_cut
        stacked = f"{prefix}{names.stacked_gate_up}", f"{prefix}{names.stacked_down}"
        regions = [Region(({stacked[0]: self._view("gate_up")},)), Region(({stacked[1]: self._view("down")},))]
        if self.biases is not None:
            regions += [
                one_name(f"{stacked[0]}_bias", self.gate_up_bias, by_expert or _at(self.spec.gate_up_cut, 1)),
                one_name(f"{stacked[1]}_bias", self.down_bias, by_expert),
            ]
        return regions

    def scale_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """Like `Linear.scale_views`, of each expert."""
        if self.format == "plain":
            return {}
        names, views = self.spec.names, {} if self.shared is None else self.shared.scale_views(prefix)
        for expert in range(0 if self._turned else self.spec.experts):
            for name, projection, half in (
                (names.gate, "gate_up", 0),
                (names.up, "gate_up", 1),
                (names.down, "down", None),
            ):
                view = self._scales(projection, expert, half)  # type: ignore[arg-type]
                views[f"{prefix}{name.format(expert)}.weight"] = view
        return views

    def _scales(self, projection: Literal["gate_up", "down"], expert: int, half: int | None) -> torch.Tensor:
        spec = self.spec
        cut = spec.width_cut if projection == "gate_up" else _at(spec.width_cut, 1)
        if expert in spec.kept_experts:
            scales = self.weights(projection).part(expert - spec.kept_experts.start, half).scales
            assert scales is not None
            return CutView.of(scales[0], scale_cut(cut, self.format))
        whole = self.weights(projection).part(0, half).scales
        assert whole is not None
        return CutView.of(whole[0][:0], Cut(0, whole.shape[1], ((0, 0),)))

    def _view(
        self, projection: Literal["gate_up", "down"], expert: int | None = None, half: int | None = None
    ) -> torch.Tensor:
        """The destination of the weights of all experts, of one expert, or of its gate (half 0) or up (half 1) rows."""
        wide, spec = projection == "gate_up", self.spec
        view = (self.gate_up if wide else self.down).data
        if self.stacked_shared:
            view = view[: len(spec.kept_experts)]
        cut = spec.gate_up_cut if wide and half is None else spec.width_cut
        cut = cut if wide else _at(cut, 1)  # the cut of one expert
        if expert is None:
            cut = spec.expert_cut or (None if cut is None else cut.at(2 - cut.dim if self._turned else cut.dim + 1))
        elif expert in spec.kept_experts:
            expert -= spec.kept_experts.start
            view = view[expert]
        else:
            outputs = view.shape[1] if half is None else view.shape[1] // spec.halves
            return CutView.of(view.new_empty(0, view.shape[2]), Cut(0, outputs, ((0, 0),)))
        if half is not None:
            view = view.unflatten(0, (spec.halves, -1))[half]
        if self.format != "plain":
            weights = self.weights(projection)
            weights = weights if expert is None else weights.part(expert, half)
            view = CodedView.of(weights, tuple(view.shape), self._turned)
        elif self._turned:
            view = view.mT
        return CutView.of(view, cut)


def _at(cut: Cut | None, dim: int) -> Cut | None:
    return None if cut is None else cut.at(dim)
