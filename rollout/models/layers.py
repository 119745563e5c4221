"""Blocks of the decoder: attention, dense and sparse feed-forward. Projections that share an input are fused.

Parameters are created empty; the loader or the random initialisation fills them. Each block names the Hugging Face
tensors that its parameters consist of (see `rollout.models.names`).

Legend: T tokens, H hidden, Q query heads, G KV heads, D head dimension, I intermediate, E experts.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from rollout_kernels import (
    apply_rope,
    head_rms_norm,
    moe_experts,
    paged_decode_attention,
    paged_prefill_attention,
    rms_norm,
    route,
    silu_mul,
    write_kv,
)
from rollout_kernels.moe.formats import ExpertWeights, Format, scale_shape
from torch import nn

from rollout.models.adapters import StepAdapters
from rollout.models.batch import AttentionBatch, KVCache, LayerKV
from rollout.models.coded_experts import CodedView
from rollout.models.names import Region, one_name
from rollout.models.spec import ModelSpec


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without gradient and without defined contents."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Block(nn.Module):
    """A module that is called without `nn.Module.__call__`.

    That call looks for hooks, of which there are none here, and costs as much as a small model's matrix product.
    """

    def __call__(self, *args: Any) -> Any:
        """Run `forward`."""
        return self.forward(*args)


class Linear(Block):
    """`x W^T + b`, optionally added to a residual."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(outputs, inputs, dtype=dtype, device=device)
        self.bias = empty_parameter(outputs, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] to [T, outputs]."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual` plus the result, in one operation where there is no bias."""
        if self.bias is None:
            return torch.addmm(residual, x, self.weight.t())
        return residual + F.linear(x, self.weight, self.bias)

    def regions(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> list[Region]:
        """Hugging Face modules `names` lie one after the other along the outputs."""
        regions = [one_name(f"{n}.weight", w) for n, w in zip(names, self.weight.split(sizes), strict=True)]
        if self.bias is not None:
            regions += [one_name(f"{n}.bias", b) for n, b in zip(names, self.bias.split(sizes), strict=True)]
        return regions


class RMSNorm(Block):
    """Root-mean-square normalisation of the last dimension."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(width, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        return rms_norm(x, self.weight, self.eps)


class Attention(Block):
    """Grouped-query attention over the paged cache; writes this step's keys and values first."""

    def __init__(self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.window = spec.windows[layer]
        self.scale = spec.head_dim**-0.5
        self.qkv_proj = Linear(spec.hidden, spec.q_dim + 2 * spec.kv_dim, spec.qkv_bias, dtype, device)
        self.o_proj = Linear(spec.q_dim, spec.hidden, spec.o_bias, dtype, device)
        if spec.qk_norm == "head":
            self.qk_norm_weight = empty_parameter(2, spec.head_dim, dtype=dtype, device=device)
            kinds = torch.tensor([0] * spec.heads + [1] * spec.kv_heads, device=device)
            self.head_kinds: torch.Tensor  # which of the two weights a head takes
            self.register_buffer("head_kinds", kinds, persistent=False)
        elif spec.qk_norm == "full":
            self.q_norm = RMSNorm(spec.q_dim, spec.eps, dtype, device)
            self.k_norm = RMSNorm(spec.kv_dim, spec.eps, dtype, device)

    def forward(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        slots_T: torch.Tensor,
        batch: AttentionBatch,
        kv: KVCache,
    ) -> torch.Tensor:
        """`residual_TH` plus the attention of the normalised `x_TH`; `slots_T` are the batch's, as int64."""
        cache = kv.layer(self.layer)
        q_TQD = self.project(x_TH, cos_sin, slots_T, cache, batch.adapters)
        out_TK = self.attend(q_TQD, batch, cache).flatten(1)
        y_TH = self.o_proj.add_to(residual_TH, out_TK)
        if batch.adapters is not None:
            batch.adapters.add(self.layer, "o", y_TH, out_TK)
        return y_TH

    def project(
        self,
        x_TH: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        slots_T: torch.Tensor,
        cache: LayerKV,
        adapters: StepAdapters | None = None,
    ) -> torch.Tensor:
        """Queries of the normalised `x_TH`, [T, Q, D]; keys and values go to the cache at `slots_T`, int64."""
        qk_THD, v_TGD = self._project(x_TH, adapters)
        qk_THD = apply_rope(qk_THD, *cos_sin)
        q_TQD, k_TGD = qk_THD[:, : self.spec.heads], qk_THD[:, self.spec.heads :]
        write_kv(k_TGD, v_TGD, cache.k_PSGD, cache.v_PSGD, slots_T, cache.scales_P2GS)
        return q_TQD

    def attend(self, q_TQD: torch.Tensor, batch: AttentionBatch, cache: LayerKV) -> torch.Tensor:
        """Attention of a step's queries over this layer's cache, [T, Q, D]."""
        if batch.chunks is not None:
            return paged_prefill_attention(
                q_TQD,
                cache.k_PSGD,
                cache.v_PSGD,
                batch.page_table_BP,
                batch.chunks,
                scale=self.scale,
                window=self.window,
                scales_P2GS=cache.scales_P2GS,
                query_starts_C1=batch.query_starts_C1,
                context_lens_B=batch.context_lens_B,
            )
        return paged_decode_attention(
            q_TQD,
            cache.k_PSGD,
            cache.v_PSGD,
            batch.page_table_BP,
            batch.context_lens_B,
            scale=self.scale,
            window=self.window,
            max_context=batch.max_context,
            scales_P2GS=cache.scales_P2GS,
            plan=batch.decode_plan(self.window, cache.k_PSGD, q_TQD),
        )

    def _project(self, x_TH: torch.Tensor, adapters: StepAdapters | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key heads side by side, normalised, [T, Q + G, D]; values [T, G, D]."""
        spec = self.spec
        qkv_TK = self.qkv_proj(x_TH)
        if adapters is not None:
            adapters.add(self.layer, "qkv", qkv_TK, x_TH)
        if spec.qk_norm == "full":
            q, k, v = qkv_TK.split((spec.q_dim, spec.kv_dim, spec.kv_dim), dim=-1)
            qkv_TK = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        if spec.clip_qkv is not None:
            qkv_TK = qkv_TK.clamp(-spec.clip_qkv, spec.clip_qkv)
        qkv_THD = qkv_TK.view(x_TH.shape[0], -1, spec.head_dim)
        qk_heads = spec.heads + spec.kv_heads
        qk_THD, v_TGD = qkv_THD[:, :qk_heads], qkv_THD[:, qk_heads:]
        if spec.qk_norm == "head":
            qk_THD = head_rms_norm(qk_THD, self.qk_norm_weight.index_select(0, self.head_kinds), spec.eps)
        return qk_THD, v_TGD

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under `prefix`, the layer's `self_attn.`."""
        spec = self.spec
        qkv = tuple(f"{prefix}{name}_proj" for name in "qkv")
        regions = self.qkv_proj.regions(qkv, (spec.q_dim, spec.kv_dim, spec.kv_dim))
        regions += self.o_proj.regions((f"{prefix}o_proj",), (spec.hidden,))
        if spec.qk_norm == "head":
            norms = list(self.qk_norm_weight.unbind(0))
        else:
            norms = [] if spec.qk_norm == "none" else [self.q_norm.weight, self.k_norm.weight]
        return regions + [one_name(f"{prefix}{n}_norm.weight", w) for n, w in zip("qk", norms, strict=False)]


class DenseMLP(Block):
    """The gated feed-forward block of a dense layer."""

    def __init__(self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.gate_up_proj = Linear(spec.hidden, 2 * spec.intermediate, spec.mlp_bias, dtype, device)
        self.down_proj = Linear(spec.intermediate, spec.hidden, spec.mlp_bias, dtype, device)

    def forward(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, adapters: StepAdapters | None = None
    ) -> torch.Tensor:
        """`residual_TH` plus the block's output."""
        if adapters is None:
            return self.down_proj.add_to(residual_TH, silu_mul(self.gate_up_proj(x_TH)))
        gate_up_T2I = self.gate_up_proj(x_TH)
        adapters.add(self.layer, "gate_up", gate_up_T2I, x_TH)
        gated_TI = silu_mul(gate_up_T2I)
        y_TH = self.down_proj.add_to(residual_TH, gated_TI)
        adapters.add(self.layer, "down", y_TH, gated_TI)
        return y_TH

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under `prefix`, the layer's own."""
        width = self.spec.intermediate
        regions = self.gate_up_proj.regions((f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"), (width, width))
        return regions + self.down_proj.regions((f"{prefix}mlp.down_proj",), (self.spec.hidden,))


class SparseMLP(Block):
    """A mixture of gated feed-forward experts; their weights may be kept as e4m3 codes with scales."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, format: Format = "plain") -> None:
        super().__init__()
        assert spec.moe is not None
        self.moe = moe = spec.moe
        self.format = format
        self.router = empty_parameter(moe.experts, spec.hidden, dtype=dtype, device=device)
        self.gate_up, self.gate_up_scales = self._empty(2 * moe.intermediate, spec.hidden, 2, dtype, device)
        self.down, self.down_scales = self._empty(spec.hidden, moe.intermediate, 1, dtype, device)

    def _empty(
        self, outputs: int, inputs: int, halves: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Room for a projection of all experts, [E, outputs, inputs], and for its scales, if there are any."""
        experts, format = self.moe.experts, self.format
        shape = scale_shape(experts, outputs, inputs, format, halves)
        if shape is None:
            return empty_parameter(experts, outputs, inputs, dtype=dtype, device=device), None
        scale_dtype = torch.uint8 if format == "mxfp8" else torch.float32
        codes = empty_parameter(experts, outputs, inputs, dtype=torch.uint8, device=device)
        return codes, empty_parameter(*shape, dtype=scale_dtype, device=device)

    def weights(self, projection: Literal["gate_up", "down"]) -> ExpertWeights:
        """One projection of all experts as the kernels take it, without a copy; plain ones in 16 bits."""
        wide = projection == "gate_up"
        values, scales = (self.gate_up, self.gate_up_scales) if wide else (self.down, self.down_scales)
        return ExpertWeights(values.data, None if scales is None else scales.data, self.format, 2 if wide else 1)

    def forward(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, kept_TK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`residual_TH` plus the weighted outputs of each token's experts, which are written to `kept_TK`, if there."""
        weights_TK, experts_TK = route(F.linear(x_TH, self.router), self.moe.top_k, self.moe.renormalize)
        if kept_TK is not None:
            kept_TK.copy_(experts_TK)
        gate_up: torch.Tensor = self.gate_up
        down: torch.Tensor = self.down
        if self.format != "plain":  # all experts in each step: for comparison on a CPU
            both = (self.weights("gate_up"), self.weights("down"))
            gate_up, down = (weights.dequantized(torch.float32).to(x_TH.dtype) for weights in both)
        return residual_TH + moe_experts(x_TH, weights_TK, experts_TK, gate_up, down)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under `prefix`, the layer's own: one tensor an expert, or all experts stacked."""
        moe = self.moe
        names = ("gate_proj", "up_proj", "down_proj") if moe.naming == "mlp" else ("w1", "w3", "w2")
        gate_name, up_name, down_name = names
        router = {f"{prefix}mlp.gate.weight": self.router.data}
        gate_up, down = {}, {}
        for expert in range(moe.experts):
            stem = f"{prefix}{moe.naming}.experts.{expert}."
            gate_up[f"{stem}{gate_name}.weight"] = self._view("gate_up", expert, 0)
            gate_up[f"{stem}{up_name}.weight"] = self._view("gate_up", expert, 1)
            down[f"{stem}{down_name}.weight"] = self._view("down", expert)
        routers = (
            [router] if moe.naming == "mlp" else [{f"{prefix}block_sparse_moe.gate.weight": self.router.data}, router]
        )
        return [
            Region(tuple(routers)),
            Region((gate_up, {f"{prefix}mlp.experts.gate_up_proj": self._view("gate_up")})),
            Region((down, {f"{prefix}mlp.experts.down_proj": self._view("down")})),
        ]

    def _view(
        self, projection: Literal["gate_up", "down"], expert: int | None = None, half: int | None = None
    ) -> torch.Tensor:
        """Where the weights of all experts go, or of one, or of one's gate or up rows."""
        view = (self.gate_up if projection == "gate_up" else self.down).data
        if expert is not None:
            view = view[expert]
        if half is not None:
            view = view.unflatten(0, (2, -1))[half]
        if self.format == "plain":
            return view
        weights = self.weights(projection)
        return CodedView.of(weights if expert is None else weights.part(expert, half), tuple(view.shape))
