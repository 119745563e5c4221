"""Sparse feed-forward blocks by the kernels: norm, router and experts, nothing read on the host.

    few tokens      norm_route -> experts                             one launch before the experts
    more            add_rms_norm -> moe_route -> experts              the router's weights are read once
    other routers   add_rms_norm -> logits -> choose_scored -> experts     float32, biases, groups, sigmoid ...
                    add_rms_norm -> logits -> `ROUTES` -> experts     by torch: groups that are no powers of two

Shared experts that are stored with the others are some of them here: the last choices of every token.

The experts read the router's results before the kernels between the two have ended. So every kernel launched there must
wait for the one before it. The kernels read the parameters themselves: the next step sees whatever is copied into them.

Legend: T tokens, S parts, H hidden, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from rollout_kernels.common.triton_math import Activation
from rollout_kernels.linear.table import MOST_ROWS, linear_config
from rollout_kernels.linear.triton_linear import gated_linear, linear
from rollout_kernels.moe.dispatch import MoEShape, Plan, moe_plan, padded_from, run_experts, table_entry
from rollout_kernels.moe.formats import ClampedGLU, ExpertWeights
from rollout_kernels.moe.triton_group_pairs import last_pairs
from rollout_kernels.moe.triton_keep_experts import keep_experts
from rollout_kernels.moe.triton_norm_router import MOST_TOKENS, norm_route, router_scratch
from rollout_kernels.moe.triton_router import MANY_TOKENS, Record, Routing, moe_route, router_logits, sum_of_parts
from rollout_kernels.moe.triton_scored_router import ScoreRule, choose_scored
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm

from rollout.models.batch import ExpertRecord
from rollout.models.decoder import Decoder, DecoderLayer
from rollout.models.deterministic import shared_products
from rollout.models.layers import Chosen, SharedExpert, SparseFeedForward
from rollout.models.spec import MoESpec


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """Both projections of a layer in the kernels' layout, and the activation between them."""

    gate_up: ExpertWeights
    down: ExpertWeights
    glu: ClampedGLU | None
    activation: Activation  # where there is no clamped GLU
    limit: float | None


def experts_of(block: SparseFeedForward) -> LayerExperts:
    """The experts of a layer, without a copy."""
    glu, clamped = None, block.spec.clamped
    if clamped is not None:
        glu = ClampedGLU(block.gate_up_bias.data, clamped.alpha, clamped.limit)
    activation, limits = cast(Activation, block.spec.activation), block.spec.limits
    return LayerExperts(block.weights("gate_up"), block.weights("down"), glu, activation, limits and limits.experts)


@dataclass(frozen=True, slots=True)
class ExpertPlans:
    """Chooses the kernels of sparse blocks by the number of tokens of a step."""

    plan: Callable[..., Plan] = moe_plan
    #: Norm and router are one launch in steps of at most this many tokens; not above `MOST_TOKENS`.
    joined_tokens: int = MOST_TOKENS


PLANS = ExpertPlans()


def kernels_take(spec: MoESpec, dtype: torch.dtype) -> bool:
    """True if the kernels can run these experts: 16 bits, even widths, and an activation that they have."""
    even = not (spec.hidden % 2 or spec.width % 2 or spec.intermediate % 2)
    return dtype in (torch.bfloat16, torch.float16) and even and spec.activation in get_args(Activation)


class FusedExperts:
    """Runs sparse blocks that are alike. They run in turn and share the memory between their kernels.

    `eps` and `unit_offset` belong to the norms before them.
    """

    def __init__(
        self,
        blocks: Sequence[SparseFeedForward],
        eps: float,
        unit_offset: bool = False,
        deterministic: bool = False,
        plans: ExpertPlans = PLANS,
    ) -> None:
        first = blocks[0]
        self._plans = plans
        spec = first.spec
        self._router, self._eps, self._dtype = spec.router, eps, first.router.dtype
        self._unit_offset = unit_offset
        # None: plans for any GPU. Those for this one may have kernels that know SiLU only.
        only_silu = spec.clamped is None and spec.activation == "silu" and spec.limits is None
        self._device = first.router.device if only_silu else None
        self._rule: ScoreRule | None = None  # the rule of routers that are not plain
        if not spec.router.plain or spec.apart is not None:
            router = spec.router
            best = (router.groups, router.top_groups, router.group_best)
            rest = (router.scale, router.least_sum)
            self._rule = ScoreRule(router.scoring, router.top_k, router.renormalize, *best, *rest)
        self._kept = spec.kept_experts
        self._all_kept = len(self._kept) == spec.experts
        self._experts = {block: experts_of(block) for block in blocks}
        self._shared, more = first.shared_choices, first.stacked_shared
        # Where weights are factors of what experts read, each expert of a token has an input of its own.
        self._inputs = spec.router.top_k + more if spec.router.weights_inputs else 1
        top_k = (spec.router.top_k + more) // self._inputs
        self._shape = MoEShape(len(self._kept) + more, top_k, spec.width, spec.intermediate)
        self._format = first.format
        self._scratch = router_scratch(len(first.router), first.router.device)
        self._deterministic = deterministic  # one plan, and one way to the router's logits, for any number of tokens
        self._plan: Plan | None = None  # the plan of the step that is being launched
        self._chosen: list[torch.Tensor] | None = None  # its experts, if it is being captured

    @classmethod
    def of_model(cls, model: Decoder, deterministic: bool = False, plans: ExpertPlans = PLANS) -> FusedExperts:
        """The experts of all sparse layers of a model."""
        blocks = [block for layer in model.layers for block in cast(DecoderLayer, layer).blocks]
        sparse = [block for block in blocks if isinstance(block, SparseFeedForward)]
        return cls(sparse, model.spec.eps, model.spec.unit_offset, deterministic, plans)

    def begin_step(self, tokens: int) -> None:
        """Choose the plan for a step of `tokens` tokens, which all its layers run by. Call this before its launch."""
        shape, deterministic = self._shape, self._deterministic
        rows = tokens * self._inputs
        self._plan = self._plans.plan(
            shape, self._format, self._dtype, rows, deterministic=deterministic, device=self._device
        )
        self._chosen = [] if self._scratch.arrived_T.is_cuda and torch.cuda.is_current_stream_capturing() else None

    def take_chosen(self) -> list[torch.Tensor]:
        """Experts of each sparse layer, [T, K], of the step that was just captured; each replay writes them anew.

        Without shared experts, which are every token's.
        """
        chosen, self._chosen = self._chosen or [], None
        return chosen

    def sizes(self) -> list[int]:
        """Numbers of tokens up to which a step runs by the same kernels, ascending; above the last nothing changes."""
        bands = [most // self._inputs for most, _ in table_entry(self._shape, self._format).bands[:-1]]
        grouping = [pairs // (self._shape.top_k * self._inputs) for pairs in last_pairs()]
        if self._deterministic:
            return sorted({*grouping} - {0})
        padded = 1
        if self._device is not None:
            padded = -(-(padded_from(self._shape, self._format, self._dtype, self._device) or 1) // self._inputs)
        return sorted({*bands, *grouping, self._plans.joined_tokens, MOST_ROWS, MANY_TOKENS - 1, padded - 1} - {0})

    def joins_norm(self, tokens: int) -> bool:
        """True if norm and router of a step of `tokens` tokens are one launch."""
        return self._rule is None and tokens <= self._plans.joined_tokens and not self._deterministic

    def run(
        self,
        layer: DecoderLayer,
        residual_TH: torch.Tensor,
        parts_STH: torch.Tensor | None,
        kept: ExpertRecord | None = None,
        normed_TH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block. `parts_STH` are parts of the mixer's output that are not added yet; the router writes to `kept` if
        given.

        With `normed_TH` that is added already, and this is the norm. A shard's result is part of a sum over the ranks,
        unless experts are apart.

        Returns the residual stream with it (new memory, or `residual_TH` itself), and the block's output in parts.
        """
        tokens, block = len(residual_TH), cast(SparseFeedForward, layer.feed_forward)
        if normed_TH is not None:
            return residual_TH, self._weighted(block, normed_TH, self._routing(block, normed_TH, kept))
        assert layer.feed_forward_norm is not None
        norm_H, offset = layer.feed_forward_norm.weight, self._unit_offset
        if self.joins_norm(tokens):
            assert parts_STH is not None, "so few tokens leave it"
            how = (block.router, self._router.top_k, self._router.renormalize, self._scratch)
            record = _record(block, tokens, kept)
            found = norm_route(residual_TH, parts_STH, norm_H, self._eps, *how, record, offset, self._shared)
            return found.residual_TH, self._weighted(block, found.x_TH, found.routing)
        x_TH = add_rms_norm(residual_TH, parts_STH, norm_H, self._eps, unit_offset=offset)
        return residual_TH, self._weighted(block, x_TH, self._routing(block, x_TH, kept))

    def output(
        self,
        block: SparseFeedForward,
        x_TH: torch.Tensor,
        kept: ExpertRecord | None,
        given: Chosen | None = None,
    ) -> torch.Tensor:
        """The output of one block for the normalised `x_TH`, [T, H]; the router writes to `kept` if given.

        A block with a table has its experts `given`.
        """
        x_TH = x_TH.contiguous()
        routing = self._routing(block, x_TH, kept) if given is None else Routing(given[1].int(), given[0].float())
        parts_STH = self._weighted(block, x_TH, routing)
        return sum_of_parts(parts_STH, x_TH.dtype)

    def _routing(self, block: SparseFeedForward, x_TH: torch.Tensor, kept: ExpertRecord | None) -> Routing:
        """The experts of each token, which also go to `kept` if it is given."""
        record = _record(block, len(x_TH), kept)
        if self._rule is not None:
            return self._by_rule(block, self._rule, x_TH, kept, record)
        how = (self._router.top_k, self._router.renormalize, record)
        return moe_route(x_TH, block.router, *how, deterministic=self._deterministic, shared=self._shared)

    def _by_rule(
        self,
        block: SparseFeedForward,
        rule: ScoreRule,
        x_TH: torch.Tensor,
        kept: ExpertRecord | None,
        record: Record | None,
    ) -> Routing:
        """The experts of a router that is not plain; the record is given in both forms."""
        dtype = torch.float32 if self._router.float32 else x_TH.dtype
        parts_STE = router_logits(block.router_input(x_TH), block.router, self._deterministic, dtype)
        if rule.takes(block.spec.experts):
            biases = {"logit_bias_E": block.logit_bias, "score_bias_E": block.router_bias}
            found = choose_scored(parts_STE, dtype, rule, **biases, record=record, shared=self._shared)
            return Routing(found.experts_TK, block.weighed(found.weights_TK, found.experts_TK))
        logits_TE = sum_of_parts(parts_STE, dtype)
        if block.logit_bias is not None:
            logits_TE = logits_TE + block.logit_bias
        weights_TK, experts_TK = block.choose_experts(logits_TE, kept)
        return Routing(experts_TK.int(), weights_TK.float())

    def _weighted(self, block: SparseFeedForward, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The outputs of each token's experts, weighted, in parts: [S, T, H]."""
        if self._chosen is not None:
            self._chosen.append(routing.experts_TK[:, : self._router.top_k])
        assert self._plan is not None
        weights = self._experts[block]
        if not self._all_kept:
            routing = keep_experts(routing, self._kept.start, len(self._kept), block.spec.experts)
        inner_TH, (tokens, choices) = block.read(x_TH), routing.experts_TK.shape
        if self._router.weights_inputs:
            inner_TH = (inner_TH[:, None] * routing.weights_TK[..., None]).to(x_TH.dtype).flatten(0, 1)
            kept_TK = (routing.weights_TK != 0).float()  # experts of other ranks have a weight of 0
            routing = Routing(routing.experts_TK.view(-1, 1), kept_TK.view(-1, 1))
        both = (weights.gate_up, weights.down)
        how: dict[str, Any] = {"glu": weights.glu, "activation": weights.activation, "limit": weights.limit}
        parts_STH = run_experts(inner_TH, routing, *both, self._plan, parts=True, **how)
        if self._router.weights_inputs and choices > 1:
            parts_STH = parts_STH.unflatten(1, (tokens, choices)).sum(2)
        if block.spec.apart is not None:
            return block.complete(sum_of_parts(parts_STH, x_TH.dtype), x_TH)[None]
        if block.widen_proj is not None:
            parts_STH = block.widen_proj(sum_of_parts(parts_STH, x_TH.dtype))[None]
        if block.biases is not None and block.adds_bias:  # biases of the down projection: each token's sum, weighted
            bias_EH = block.down_bias.float()
            weights_TE = bias_EH.new_zeros(len(x_TH), len(bias_EH))
            weights_TE.scatter_add_(1, routing.experts_TK.long(), routing.weights_TK)
            parts_STH[0].addmm_(weights_TE, bias_EH)
        if block.shared is not None:  # torch runs it after the experts, whose kernels follow each other without a wait
            parts_STH = parts_STH.float()
            parts_STH[0] += self._in_one_order(block.shared, x_TH) if self._deterministic else block.shared(x_TH)
        return parts_STH

    def _in_one_order(self, shared: SharedExpert, x_TH: torch.Tensor) -> torch.Tensor:
        """The output of a shared expert, whose products are added in one order for any number of tokens."""
        configs = {
            name: linear_config(*product, len(x_TH), True, "plain" if name == "shared gate" else self._format)
            for name, product in shared_products(shared.spec).items()
        }
        gate_up, down, gate = (configs[f"shared {name}"] for name in ("gate_up", "down", "gate"))
        assert gate_up is not None and down is not None and gate is not None, "check_deterministic"
        activation = shared.spec.activation
        assert activation in ("silu", "gelu_tanh"), "check_deterministic"
        gated_TI = gated_linear(x_TH, shared.gate_up_proj.stored, gate_up, activation)
        y_TH = linear(gated_TI, shared.down_proj.stored, down)
        return y_TH if shared.gate is None else y_TH * torch.sigmoid(linear(x_TH, shared.gate.weight, gate))


def _record(block: SparseFeedForward, tokens: int, kept: ExpertRecord | None) -> Record | None:
    """The record of a layer as the kernels take it."""
    return None if kept is None else Record(kept.layer(block.sparse_index, tokens), kept.rows_T[:tokens])
