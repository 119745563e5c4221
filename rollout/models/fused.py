"""Steps of a dense model on a GPU with the fused kernels: eight launches a layer, nothing read on the host.

    add_rms_norm -> q/k/v product -> finish_qkv -> attention -> output product
    add_rms_norm -> gate/up product with SiLU -> down product

Decode and prefill differ in the attention, few and many tokens in the products: those with few tokens are our own, as
far as `rollout_kernels.linear_table` goes, the others cuBLAS's. The residual stream is kept in the model's dtype and is
read and written by `add_rms_norm` alone; products whose sum is added to it come in parts, float32 where there are
several.

Legend: T tokens, S selected tokens, H hidden, W fused q/k/v width, I intermediate, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from rollout_kernels.linear_table import Kind, linear_config
from rollout_kernels.triton_fused import add_rms_norm, finish_qkv, silu_mul
from rollout_kernels.triton_linear import LinearConfig, gate_up_silu, linear, linear_parts
from rollout_kernels.triton_step import embed_rope

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.decoder import Decoder, DecoderLayer
from rollout.models.layers import Attention, DenseMLP
from rollout.models.spec import ModelSpec


def supports(model: Decoder) -> bool:
    """True if `FusedDecoder` can run this model: dense, on a GPU in 16 bits, without the rarer options."""
    spec = model.spec
    rare = spec.moe is not None or spec.qk_norm == "full" or spec.clip_qkv is not None or spec.mlp_bias or spec.o_bias
    return model.embed.is_cuda and model.embed.dtype in (torch.bfloat16, torch.float16) and not rare


def _configs(spec: ModelSpec, tokens: int) -> dict[str, LinearConfig | None]:
    products: dict[str, tuple[int, int, Kind]] = {
        "qkv": (spec.q_dim + 2 * spec.kv_dim, spec.hidden, "parts"),
        "o": (spec.hidden, spec.q_dim, "parts"),
        "gate_up": (2 * spec.intermediate, spec.hidden, "silu"),
        "down": (spec.hidden, spec.intermediate, "parts"),
    }
    return {name: linear_config(*product, tokens) for name, product in products.items()}


class FusedDecoder:
    """Runs steps of a `Decoder` that `supports` accepts; shares its parameters and stands in for it."""

    def __init__(self, model: Decoder) -> None:
        assert supports(model)
        self._model = model
        self._configs: dict[str, LinearConfig | None] = {}  # of the step that is being launched

    @torch.inference_mode()
    def __call__(self, token_ids_T: torch.Tensor, batch: AttentionBatch, kv: KVCache) -> torch.Tensor:
        """Run one step: writes its KV, returns its hidden states after the final norm, [T, H]."""
        model = self._model
        self._configs = _configs(model.spec, len(token_ids_T))
        rope = model.rope
        residual_TH, cos_sin = embed_rope(token_ids_T, batch.positions_T, model.embed, rope.inv_freq_D, rope.sign_D)
        parts = None
        for layer in model.layers:
            parts = self._layer(cast(DecoderLayer, layer), residual_TH, parts, cos_sin, batch, kv)
        return add_rms_norm(residual_TH, parts, model.norm.weight, model.spec.eps)

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits of selected hidden states, float32 [S, V]."""
        spec = self._model.spec
        config = linear_config(spec.vocab, spec.hidden, "whole", len(hidden_SH))
        if config is None:
            return self._model.compute_logits(hidden_SH)
        return linear(hidden_SH, self._model.lm_head, config, out_dtype=torch.float32)

    def _layer(
        self,
        layer: DecoderLayer,
        residual_TH: torch.Tensor,
        parts: torch.Tensor | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        kv: KVCache,
    ) -> torch.Tensor:
        """One layer; `parts` are the last layer's output, not yet added. Returns this layer's."""
        eps = self._model.spec.eps
        mlp = cast(DenseMLP, layer.mlp)
        x_TH = add_rms_norm(residual_TH, parts, layer.input_norm.weight, eps)
        parts = self._attention(layer.attention, x_TH, cos_sin, batch, kv)
        x_TH = add_rms_norm(residual_TH, parts, layer.post_attention_norm.weight, eps)
        return self._product("down", self._gated(x_TH, mlp.gate_up_proj.weight), mlp.down_proj.weight)

    def _product(self, name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x weight^T` in parts, [parts, T, outputs]."""
        config = self._configs[name]
        return F.linear(x, weight)[None] if config is None else linear_parts(x, weight, config)

    def _gated(self, x_TH: torch.Tensor, weight_2IH: torch.Tensor) -> torch.Tensor:
        config = self._configs["gate_up"]
        return silu_mul(F.linear(x_TH, weight_2IH)) if config is None else gate_up_silu(x_TH, weight_2IH, config)

    def _attention(
        self,
        attention: Attention,
        x_TH: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        kv: KVCache,
    ) -> torch.Tensor:
        """The attention block's output, in parts; writes this layer's keys and values."""
        spec = self._model.spec
        k_cache, v_cache = kv.k[attention.layer], kv.v[attention.layer]
        q_TQD = finish_qkv(
            self._product("qkv", x_TH, attention.qkv_proj.weight),
            attention.qkv_proj.bias,
            attention.qk_norm_weight if spec.qk_norm == "head" else None,
            spec.eps,
            *cos_sin,
            batch.kv_slots_T,
            k_cache,
            v_cache,
            spec.heads,
        )
        out_TQD = attention.attend(q_TQD, batch, k_cache, v_cache)
        return self._product("o", out_TQD.flatten(1), attention.o_proj.weight)
