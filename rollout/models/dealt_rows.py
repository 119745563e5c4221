"""Attention of rows that are dealt to ranks: each rank has its weights whole, and the KV of its own rows.

    each rank    x of all tokens --take--> own tokens --> q, k, v --> attention --give--> output product --> part
    all ranks    sum of the parts --> residual --> norm --> x

`give` puts zeros in the places of other ranks' tokens. Pages are numbered over all ranks (`KVCache.local_pages`), so a
row's first page says which rank has it. A decode keeps its shape, because it may be captured: there rows of other ranks
have no context. A prefill takes its own chunks out.

Legend: T tokens of the step, N own tokens, B rows, C own chunks, H hidden, K inputs of the output product.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from rollout.models.batch import AttentionBatch, KVCache, PromptChunk
from rollout.models.latent import LatentAttention
from rollout.models.layers import Attention, Block, LastProduct, OwnTokens, StepContext
from rollout.models.split_context import own_positions


def deal(context: StepContext) -> StepContext:
    """The context of a step with this rank's own tokens, if rows are dealt, or own positions, if contexts are split."""
    batch, kv = context.batch, context.kv
    if kv.split.size > 1:
        return _with(context, own_positions(batch, kv))
    if batch.chunks is None:
        foreign_B = ~kv.has_page(batch.page_table_BP[:, 0])
        own = replace(
            batch,
            kv_slots_T=kv.local_slots(batch.kv_slots_T),
            page_table_BP=kv.local_pages(batch.page_table_BP),
            context_lens_B=batch.context_lens_B.masked_fill(foreign_B, 0),
            segments_SW=None if batch.segments_SW is None else _segments(batch.segments_SW, foreign_B),
        )
        return context._replace(own=OwnTokens(_with(context, own), None, foreign_B[:, None]))
    mine = range(len(batch.chunks)) if batch.own_chunks is None else batch.own_chunks
    spans = [batch.chunks[index] for index in mine]
    device = batch.positions_T.device
    # Made of slices: a tensor of host numbers would wait for the device.
    spans_N = [torch.arange(start, start + length, device=device) for start, length, _ in spans]
    at_N = torch.cat(spans_N) if spans else torch.zeros(0, dtype=torch.int64, device=device)
    if not spans:
        return context._replace(own=OwnTokens(context, at_N, None))

    def of_chunks(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[index : index + 1] for index in mine])

    own = _chunks(batch, kv, at_N, spans, of_chunks)
    cos_sin = tuple((cos[at_N], sin[at_N]) for cos, sin in context.cos_sin)
    return context._replace(own=OwnTokens(_with(context, own)._replace(cos_sin=cos_sin), at_N, None))


def _segments(segments_SW: torch.Tensor, foreign_B: torch.Tensor) -> torch.Tensor:
    """The segments of own rows: rows that share pages have one rank."""
    first_rows_B = segments_SW[len(foreign_B) :, 0].long()
    return segments_SW.masked_fill(torch.cat((foreign_B, foreign_B[first_rows_B]))[:, None], 0)


def _chunks(
    batch: AttentionBatch,
    kv: KVCache,
    at_N: torch.Tensor,
    spans: list[PromptChunk],
    of_chunks: Callable[[torch.Tensor], torch.Tensor],
) -> AttentionBatch:
    """The prefill of these tokens alone, whose chunks are `spans` of the step."""
    chunks, start = list[PromptChunk](), 0
    for _, length, end in spans:
        chunks.append(PromptChunk(start, length, end))
        start += length
    starts_C1 = batch.query_starts_C1
    if starts_C1 is not None:
        starts_C1 = F.pad(of_chunks(starts_C1.diff()).cumsum(0), (1, 0)).int()
    return AttentionBatch(
        positions_T=batch.positions_T[at_N],
        kv_slots_T=kv.local_slots(batch.kv_slots_T[at_N]),
        page_table_BP=kv.local_pages(of_chunks(batch.page_table_BP)),
        context_lens_B=of_chunks(batch.context_lens_B),
        max_context=batch.max_context,
        chunks=tuple(chunks),
        query_starts_C1=starts_C1,
        adapters=None if batch.adapters is None else batch.adapters.at(at_N),
    )


def _with(context: StepContext, batch: AttentionBatch) -> StepContext:
    slots_T = batch.kv_slots_T
    return context._replace(batch=batch, slots_T=slots_T.to(context.slots_T.dtype))


def mixed(mixer: Block, x_TH: torch.Tensor, own: OwnTokens, context: StepContext) -> LastProduct:
    """The output of a mixer for the normalised `x_TH`: zeros for tokens that are not this rank's own."""
    assert isinstance(mixer, Attention | LatentAttention), "no other layers are dealt"
    if own.none:
        zeros_TK = x_TH.new_zeros(len(x_TH), mixer.o_proj.spec.inputs)
        return LastProduct(mixer.o_proj, zeros_TK, context.batch.adapters, mixer.layer, "o")
    output: LastProduct = mixer(own.take(x_TH), own.context)
    return output._replace(x_TK=own.give(output.x_TK, len(x_TH)), adapters=context.batch.adapters)
