"""A decode step of a dense model on a GPU, with the fused kernels: eight launches a layer, nothing read on the host.

    add_rms_norm -> q/k/v product -> finish_qkv -> attention -> output product
    add_rms_norm -> gate/up product with SiLU -> down product

The residual stream is kept in the model's dtype and is read and written by `add_rms_norm` alone. Products whose sum is
added to it come as float32 parts (see `rollout_kernels.triton_linear`).

Legend: B rows, H hidden, W fused q/k/v width, I intermediate, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from rollout_kernels import paged_decode_attention
from rollout_kernels.linear_table import Kind, linear_config
from rollout_kernels.triton_fused import add_rms_norm, finish_qkv
from rollout_kernels.triton_linear import LinearConfig, gate_up_silu, linear, linear_parts
from rollout_kernels.triton_step import embed_rope

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.decoder import Decoder, DecoderLayer
from rollout.models.layers import Attention, DenseMLP
from rollout.models.spec import ModelSpec

#: Rows up to which the few-row products are used; above, the generic path is.
MOST_ROWS = 128


def supports(model: Decoder) -> bool:
    """True if `FusedDecoder` can run this model: dense, on a GPU in 16 bits, without the rarer options."""
    spec = model.spec
    rare = spec.moe is not None or spec.qk_norm == "full" or spec.clip_qkv is not None or spec.mlp_bias or spec.o_bias
    sixteen = model.embed.is_cuda and model.embed.dtype in (torch.bfloat16, torch.float16)
    return sixteen and not rare and None not in _configs(spec, 1).values()


def _configs(spec: ModelSpec, rows: int) -> dict[str, LinearConfig | None]:
    products: dict[str, tuple[int, int, Kind]] = {
        "qkv": (spec.q_dim + 2 * spec.kv_dim, spec.hidden, "parts"),
        "o": (spec.hidden, spec.q_dim, "parts"),
        "gate_up": (2 * spec.intermediate, spec.hidden, "silu"),
        "down": (spec.hidden, spec.intermediate, "parts"),
        "head": (spec.vocab, spec.hidden, "whole"),
    }
    return {name: linear_config(*product, rows) for name, product in products.items()}


class FusedDecoder:
    """Runs decode steps of a `Decoder` that `supports` accepts; shares its parameters."""

    def __init__(self, model: Decoder) -> None:
        assert supports(model)
        self._model = model
        self._configs: dict[str, LinearConfig] = {}  # of the step that is being captured

    def __call__(self, token_ids_B: torch.Tensor, batch: AttentionBatch, kv: KVCache) -> torch.Tensor:
        """Logits of each row's next token, float32 [B, V]; writes the step's KV."""
        configs = _configs(self._model.spec, len(token_ids_B))
        head = configs.pop("head")
        self._configs = cast(dict[str, LinearConfig], configs)
        model, eps = self._model, self._model.spec.eps
        rope = model.rope
        residual_BH, cos_sin = embed_rope(token_ids_B, batch.positions_T, model.embed, rope.inv_freq_D, rope.sign_D)
        parts = None
        for layer in model.layers:
            parts = self._layer(cast(DecoderLayer, layer), residual_BH, parts, cos_sin, batch, kv)
        x_BH = add_rms_norm(residual_BH, parts, model.norm.weight, eps)
        if head is None:
            return model.compute_logits(x_BH)
        return linear(x_BH, model.lm_head, head, out_dtype=torch.float32)

    def _layer(
        self,
        layer: DecoderLayer,
        residual_BH: torch.Tensor,
        parts: torch.Tensor | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        kv: KVCache,
    ) -> torch.Tensor:
        """One layer; `parts` are the last layer's output, not yet added. Returns this layer's."""
        eps = self._model.spec.eps
        mlp = cast(DenseMLP, layer.mlp)
        x_BH = add_rms_norm(residual_BH, parts, layer.input_norm.weight, eps)
        out_BQD = self._attention(layer.attention, x_BH, cos_sin, batch, kv)
        parts = linear_parts(out_BQD.flatten(1), layer.attention.o_proj.weight, self._configs["o"])
        x_BH = add_rms_norm(residual_BH, parts, layer.post_attention_norm.weight, eps)
        gated_BI = gate_up_silu(x_BH, mlp.gate_up_proj.weight, self._configs["gate_up"])
        return linear_parts(gated_BI, mlp.down_proj.weight, self._configs["down"])

    def _attention(
        self,
        attention: Attention,
        x_BH: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        kv: KVCache,
    ) -> torch.Tensor:
        spec = self._model.spec
        k_cache, v_cache = kv.k[attention.layer], kv.v[attention.layer]
        parts = linear_parts(x_BH, attention.qkv_proj.weight, self._configs["qkv"])
        norm = attention.qk_norm_weight if spec.qk_norm == "head" else None
        q_BQD = finish_qkv(
            parts,
            attention.qkv_proj.bias,
            norm,
            spec.eps,
            *cos_sin,
            batch.kv_slots_T,
            k_cache,
            v_cache,
            spec.heads,
        )
        return paged_decode_attention(
            q_BQD,
            k_cache,
            v_cache,
            batch.page_table_BP,
            batch.context_lens_B,
            scale=attention.scale,
            window=attention.window,
            max_context=batch.max_context,
            plan=batch.decode_plan(attention.window, k_cache),
        )
