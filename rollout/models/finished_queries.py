"""One kernel for all that follows a q/k/v product: norms, rotary embedding, keys and values into the cache.

Legend: T tokens, S parts, N outputs, Q query heads, D head dimension, K = Q D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from rollout_kernels.lora import Correction
from rollout_kernels.norm_rope.triton_elementwise import finish_qkv

from rollout.models.batch import LayerKV
from rollout.models.layers import Attention
from rollout.models.spec import AttentionSpec


class Queries(NamedTuple):
    """Queries of an attention block, and the gates of its output before their sigmoid, if there are any."""

    q_TQD: torch.Tensor
    gate_TK: torch.Tensor | None

    def select(self, at_S: torch.Tensor) -> Queries:
        """Queries and gates of some tokens."""
        gate_TK = self.gate_TK
        return Queries(self.q_TQD.index_select(0, at_S), None if gate_TK is None else gate_TK.index_select(0, at_S))


def takes_corrections(spec: AttentionSpec) -> bool:
    """True if the kernel adds the corrections of adapters; else the product has to be corrected before."""
    return not spec.query_gate and spec.qk_norm != "full" and spec.kv == "own"


def finish_queries(
    attention: Attention,
    parts_STN: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    cache: LayerKV,
    dtype: torch.dtype,
    correction: Correction | None = None,
) -> Queries:
    """Queries of the block's product in parts, with the gates that are inside of it; writes keys and values."""
    spec, gates_TQD = attention.spec, None
    if spec.query_gate:
        gates_TQD = torch.empty(parts_STN.shape[1], spec.heads, spec.head_dim, dtype=dtype, device=parts_STN.device)
    norm_2D = attention.qk_norm_weight if spec.qk_norm in ("head", "unit") else None
    whole_norms = (attention.q_norm.weight, attention.k_norm.weight) if spec.qk_norm == "full" else None
    how: dict[str, Any] = {"scales_P2GS": cache.scales_P2GS, "dtype": dtype, "correction": correction}
    how |= {"unit_offset": spec.unit_offset, "gates_MHD": gates_TQD, "whole_norms": whole_norms, "clip": spec.clip_qkv}
    how |= {"interleaved": spec.rope.interleaved, "kv": spec.kv, "value_norm": spec.value_norm}
    product = parts_STN, attention.qkv_proj.bias, norm_2D, spec.eps
    q_TQD = finish_qkv(*product, *cos_sin, slots_T, cache.k_PSGD, cache.v_PSGD, spec.heads, **how)
    return Queries(q_TQD, None if gates_TQD is None else gates_TQD.flatten(1))
