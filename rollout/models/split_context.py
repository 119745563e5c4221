"""Attention whose context is split over ranks: each rank keeps an equal part of the positions of every page.

    page of 8 positions, two ranks    | 0 1 2 3 | 4 5 6 7 |     one number on all ranks; the books count whole pages

    decode     q of own heads --gather--> q of all heads --> attention over own positions --> outputs, sums
               outputs, sums --exchange--> own heads' from all ranks --> merged --> output product --> part
    prefill    KV of the chunks' contexts --gather--> attention of own heads, as without a split

A prefill gathers KV: that needs no masks of its own, and takes little time beside the products of a chunk. Weights are
cut by heads, but each rank makes the KV of all KV heads, and keeps the KV of its positions.

Legend: T tokens, B rows, N ranks, H query heads, Q a rank's query heads, G KV heads, D head dimension, V dimension of
results, P pages, M gathered pages, S positions of a page, C chunks.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from rollout_kernels.parallel import TensorGroup

from rollout.models.batch import AttentionBatch, KVCache, LayerKV, PromptChunk

#: Tokens whose KV is gathered at once, or one whole context. Of latents of 576 values they take 72 MiB twice.
GATHERED_TOKENS = 1 << 16


def own_positions(batch: AttentionBatch, kv: KVCache) -> AttentionBatch:
    """The step with KV slots, and in a decode with contexts, as this rank counts its own positions.

    Tokens that other ranks keep go to the dump page.
    """
    (rank, ranks), page = kv.split, kv.page_size
    part = page // ranks
    slots_T, lens_B, segments_SW = batch.kv_slots_T, batch.context_lens_B, batch.segments_SW
    offsets_T = slots_T % page - rank * part
    own_T = (offsets_T >= 0) & (offsets_T < part)
    slots_T = (slots_T // page * part + offsets_T).masked_fill(~own_T, 0)
    if batch.chunks is not None:
        return replace(batch, kv_slots_T=slots_T)
    lens_B = lens_B // page * part + (lens_B % page - rank * part).clamp(0, part)
    if segments_SW is not None:  # they begin and end with pages
        segments_SW = torch.cat((segments_SW[:, :2], segments_SW[:, 2:4] // ranks, segments_SW[:, 4:]), dim=1)
    most = -(-batch.max_context // page) * part
    return replace(batch, kv_slots_T=slots_T, context_lens_B=lens_B, max_context=most, segments_SW=segments_SW)


# --- decode ----------------------------------------------------------------------------------------------------------


def attend_split(
    q_BQD: torch.Tensor, group: TensorGroup, attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Attention of own heads over the contexts of all ranks, [B, Q, V].

    `attend` takes queries [B, H, D] and the memory for the logarithms of their sums, [B, H]; it returns [B, H, V].
    """
    q_BHD = group.all_gather(q_BQD).transpose(0, 1).flatten(1, 2)
    log_sum_BH = torch.empty(q_BHD.shape[:2], dtype=torch.float32, device=q_BHD.device)
    out_BHV = attend(q_BHD, log_sum_BH)
    # One exchange: the bits of a logarithm take the place of one or two more values.
    sent_BHX = torch.cat((out_BHV, log_sum_BH[..., None].view(out_BHV.dtype)), dim=-1)
    parts_NBQX = group.all_to_all(sent_BHX.unflatten(1, (group.size, -1)).transpose(0, 1))
    width = out_BHV.shape[-1]
    log_sum_NBQ1 = parts_NBQX[..., width:].contiguous().view(torch.float32)
    weights_NBQ1 = torch.softmax(log_sum_NBQ1 * math.log(2), dim=0)
    return (weights_NBQ1 * parts_NBQX[..., :width]).sum(0).to(out_BHV.dtype)


# --- prefill ---------------------------------------------------------------------------------------------------------


class GatheredChunks(NamedTuple):
    """Chunks of a prefill whose contexts are gathered at once."""

    tokens: slice
    pages_M: torch.Tensor  # int32: the pages of their contexts
    batch: AttentionBatch  # the step of these chunks, over the gathered pages


def gathered_chunks(batch: AttentionBatch, page_size: int) -> list[GatheredChunks]:
    """The chunks of a prefill, in groups of `GATHERED_TOKENS`; all layers share them."""
    return batch.shared("gathered chunks", lambda: list(_gathered_chunks(batch, page_size)))


def _gathered_chunks(batch: AttentionBatch, page_size: int) -> list[GatheredChunks]:
    assert batch.chunks is not None
    groups, tokens = list[list[int]](), GATHERED_TOKENS
    for index, chunk in enumerate(batch.chunks):
        if tokens + chunk.context_len > GATHERED_TOKENS:
            groups.append([])
            tokens = 0
        groups[-1].append(index)
        tokens += chunk.context_len
    return [_gathered(batch, batch.chunks[group[0] : group[-1] + 1], group[0], page_size) for group in groups]


def _gathered(batch: AttentionBatch, chunks: tuple[PromptChunk, ...], first: int, page_size: int) -> GatheredChunks:
    rows, begin = slice(first, first + len(chunks)), chunks[0].query_start
    tokens = slice(begin, chunks[-1].query_start + chunks[-1].query_len)
    counts, starts_C1 = [-(-chunk.context_len // page_size) for chunk in chunks], batch.query_starts_C1
    pages_M = torch.cat([batch.page_table_BP[first + i, :count] for i, count in enumerate(counts)])
    device, width = pages_M.device, max(counts)
    spans = [torch.arange(sum(counts[:i]), sum(counts[:i]) + width, device=device) for i in range(len(counts))]
    return GatheredChunks(
        tokens,
        pages_M,
        AttentionBatch(
            positions_T=batch.positions_T[tokens],
            kv_slots_T=batch.kv_slots_T[tokens],
            page_table_BP=torch.stack(spans).clamp_(max=len(pages_M) - 1).int(),
            context_lens_B=batch.context_lens_B[rows],
            max_context=max(chunk.context_len for chunk in chunks),
            chunks=tuple(PromptChunk(start - begin, length, end) for start, length, end in chunks),
            query_starts_C1=None if starts_C1 is None else starts_C1[first : rows.stop + 1] - begin,
        ),
    )


def whole_context(cache: LayerKV, pages_M: torch.Tensor, group: TensorGroup, heads: slice) -> LayerKV:
    """The KV of these pages from all ranks, for some of the KV heads."""

    def whole(x_PSGD: torch.Tensor) -> torch.Tensor:
        parts_NMSGD = group.all_gather(x_PSGD.index_select(0, pages_M))
        return parts_NMSGD[..., heads, :].transpose(0, 1).flatten(1, 2)

    scales_M2GS = None
    if cache.scales_P2GS is not None:
        parts_NM2GS = group.all_gather(cache.scales_P2GS.index_select(0, pages_M))
        scales_M2GS = parts_NM2GS[:, :, :, heads].permute(1, 2, 3, 0, 4).flatten(3).contiguous()
    k_MSGD = whole(cache.k_PSGD)
    v_MSGD = whole(cache.v_PSGD) if cache.v_PSGD.shape[-1] else k_MSGD[..., :0]
    return LayerKV(k_MSGD, v_MSGD, scales_M2GS)
