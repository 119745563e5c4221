"""The attention function that all layers of a fallback model call, and the step that it finds there.

A module of transformers calls the function that its config names, with the queries, keys and values of the step's
tokens: `[1, heads, T, D]`, or `[T, heads, 1, D]` where each token is a row of its own. Nothing in that call says where
the tokens sit in the cache: this is in the `FallbackStep` of the running forward, a context variable, because modules
don't pass unknown arguments through all their layers.

No mask function is registered under this name. transformers then makes no mask, and passes None.

Legend: T tokens of the step, Q query heads, G KV heads, D dimension of queries and keys, V of values.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rollout_kernels import paged_decode_attention, paged_prefill_attention, plan_decode, write_kv
from rollout_kernels.attention import kernels_take
from torch import nn
from transformers import AttentionInterface

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.fallback.probe import LayerFacts

#: The name of our attention implementation in a config.
PAGED = "rollout_paged"


@dataclass(frozen=True, slots=True)
class FallbackStep:
    """One forward: its tokens, the cache, and the layers by the module that calls the attention function."""

    batch: AttentionBatch
    kv: KVCache
    layers: Mapping[nn.Module, LayerFacts]
    slots_T: torch.Tensor  # the batch's KV slots as int64


#: The step of the forward that runs in this thread.
RUNNING: ContextVar[FallbackStep] = ContextVar("rollout_fallback_step")


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the paged cache; [1, T, Q, V] or [T, 1, Q, V]. The probe found the window."""
    step = RUNNING.get()
    facts, batch = step.layers[module], step.batch
    cache = step.kv.layer(facts.index)
    rows = len(query)
    q_TQD, k_TGD, v_TGV = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if not facts.shared:
        write_kv(k_TGD, v_TGV, cache.k_PSGD, cache.v_PSGD, step.slots_T, cache.scales_P2GS)
    scale = q_TQD.shape[-1] ** -0.5 if scaling is None else scaling
    shared: Any = {"scale": scale, "window": facts.window, "scales_P2GS": cache.scales_P2GS, "softcap": softcap}
    shared["sinks_H"], caches = s_aux, (cache.k_PSGD, cache.v_PSGD)
    given = q_TQD.contiguous(), *caches, batch.page_table_BP
    if batch.chunks is not None:
        shared |= {"query_starts_C1": batch.query_starts_C1, "context_lens_B": batch.context_lens_B}
        out_TQV = paged_prefill_attention(*given, batch.chunks, **shared)
        return out_TQV.unflatten(0, (rows, -1)), None
    if kernels_take(*caches, softcap, s_aux):
        plan: Any = batch.decode_plan(facts.window, cache.k_PSGD, q_TQD)
    else:
        rows_of = batch.page_table_BP, batch.context_lens_B, step.kv.page_size
        make = partial(plan_decode, *rows_of, facts.window, batch.max_context, q_TQD.dtype)
        plan = batch.shared(("gathered", facts.window), make)
    shared |= {"max_context": batch.max_context, "plan": plan}
    out_TQV = paged_decode_attention(*given, batch.context_lens_B, **shared)
    return out_TQV.unflatten(0, (rows, -1)), None


AttentionInterface.register(PAGED, paged_attention)
