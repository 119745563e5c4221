"""The block of multi-head latent attention: the paged cache holds one latent a token instead of keys and values.

    x --one product--> queries, or their latent --norm, product--> queries | latent --norm--> c | what turns --> r
                                                                            (c, r) --> cache
    decode, short spans   queries absorb the keys' product, attend to (c, r), and sums of c meet the values' product
    long spans            keys and values of the context are made of c first

`kv_b` is used as it lies in the checkpoint, so an update is a copy and nothing follows from it. It is never coded.

Legend: T tokens, H hidden, Q query heads, X dimensions of a head, R width of the latent, L what is kept of a token, Y
keys and values that a head makes of a latent, V dimension of a head's values.
"""

from functools import partial
from typing import NamedTuple

import torch
from rollout_kernels import apply_rope
from rollout_kernels.attention.latent import (
    ABSORBED_AT_ONCE,
    MOST_ABSORBED,
    expanded_attention,
    latent_decode_attention,
    plan_latent_decode,
    write_latent,
)

from rollout.models.batch import AttentionBatch, PromptChunk
from rollout.models.indexer import Choice, Indexer, chosen_attention
from rollout.models.layers import Block, Build, LastProduct, Linear, RMSNorm, StepContext, gate_output, grown
from rollout.models.names import Region, one_name
from rollout.models.spec import LatentSpec
from rollout.models.split_context import attend_split, gathered_chunks, whole_context


class AbsorbedRows(NamedTuple):
    """Tokens that attend as the rows of a decode step do, each with its own context."""

    number: int  # place of these rows among the sets of rows of the step
    page_table_BP: torch.Tensor
    context_lens_B: torch.Tensor
    max_context: int


class LatentAttention(Block):
    """Latent attention over the paged cache; writes what is kept of this step's tokens first.

    `rope` is the index of its rotary embedding in the model, `kv_index` counts the layers with KV.
    """

    def __init__(self, spec: LatentSpec, layer: int, kv_index: int, rope: int, build: Build) -> None:
        super().__init__()
        self.spec, self.layer, self.kv_index, self.rope = spec, layer, kv_index, rope
        self.in_proj = Linear(spec.inputs, build)
        self.q_norm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if spec.q_rank is not None and spec.q_b is not None:
            self.q_norm = RMSNorm(spec.q_rank, spec.eps, build)
            self.q_b_proj = Linear(spec.q_b, build)
        self.kv_norm = RMSNorm(spec.kv_rank, spec.eps, build)
        self.kv_b_proj = Linear(spec.kv_b, build.plain)
        self.gate_proj = None if spec.output_gate is None else Linear(spec.output_gate, build.plain)
        self.o_proj = Linear(spec.o, build)
        self.indexer = None if spec.indexer is None else Indexer(spec.indexer, build.plain)

    def forward(self, x_TH: torch.Tensor, context: StepContext) -> LastProduct:
        """Attention of the normalised `x_TH`."""
        batch, cache_PS1L = context.batch, context.kv.layer(self.kv_index).k_PSGD
        q_TQX, latent_TL, latent_q_TK = self._project(x_TH, context)
        write_latent(latent_TL, cache_PS1L, context.slots_T)
        choice = self._choose(x_TH, latent_q_TK, context)
        if choice is not None:
            out_TQV = self._attend_to(choice, q_TQX, cache_PS1L, batch)
        elif batch.chunks is None:
            out_TQV = self._decode(q_TQX, cache_PS1L, batch)
        elif self.spec.split == "context":
            parts, group = gathered_chunks(batch, context.kv.page_size), self.o_proj.group
            layer = context.kv.layer(self.kv_index)
            out_TQV = torch.cat(
                [
                    self._prefill(q_TQX[tokens], whole_context(layer, pages_M, group, slice(None)).k_PSGD, part)
                    for tokens, pages_M, part in parts
                ]
            )
        else:
            out_TQV = self._prefill(q_TQX, cache_PS1L, batch)
        if self.gate_proj is not None:
            out_TQV = gate_output(out_TQV, self.gate_proj(x_TH)[..., None])
        return LastProduct(self.o_proj, out_TQV.flatten(1), batch.adapters, self.layer, "o")

    def _decode(self, q_TQX: torch.Tensor, cache_PS1L: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Attention of the rows of a decode step, [T, Q, V]."""
        rows = AbsorbedRows(0, batch.page_table_BP, batch.context_lens_B, batch.max_context)
        q_TQL = self._absorbed(q_TQX)
        if self.spec.split != "context":
            return self._values(self._sums(q_TQL, None, rows, cache_PS1L, batch))
        attend = partial(self._sums, rows=rows, cache_PS1L=cache_PS1L, batch=batch)
        return self._values(attend_split(q_TQL, self.o_proj.group, attend))

    def _prefill(self, q_TQX: torch.Tensor, cache_PS1L: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Attention of spans of prompts, short and long ones, [T, Q, V]."""
        chunks = batch.chunks
        assert chunks is not None
        out_TQV = q_TQX.new_empty(*q_TQX.shape[:2], self.spec.value_dim)
        for tokens_T, rows in batch.shared("absorbed rows", lambda: absorbed_rows(batch, chunks)):
            q_TQL = self._absorbed(q_TQX[tokens_T])
            out_TQV[tokens_T] = self._values(self._sums(q_TQL, None, rows, cache_PS1L, batch))
        for row, (start, length, context_len) in enumerate(chunks):
            if length > MOST_ABSORBED:
                span, pages_P = slice(start, start + length), batch.page_table_BP[row]
                out_TQV[span] = expanded_attention(
                    q_TQX[span], cache_PS1L, pages_P, context_len, self._kv_b(), scale=self.spec.scale
                )
        return out_TQV

    def _choose(self, x_TH: torch.Tensor, latent_q_TK: torch.Tensor, context: StepContext) -> Choice | None:
        """The tokens that the step's tokens attend to; None: all tokens before them."""
        indexer, batch = self.indexer, context.batch
        if self.spec.shares_choice:
            return batch.kept(Choice)
        if indexer is None:
            return None
        cos_T1D, sin_T1D = context.cos_sin[self.rope]
        if self.spec.rope.interleaved and not indexer.spec.interleaved:  # neighbours have one angle
            cos_T1D, sin_T1D = (torch.cat((part[..., ::2], part[..., 1::2]), dim=-1) for part in (cos_T1D, sin_T1D))
        keys_PS1D = context.kv.layer(self.kv_index).v_PSGD
        queries = indexer(x_TH, latent_q_TK, (cos_T1D, sin_T1D), context.slots_T, keys_PS1D)
        choice = indexer.choose(queries, batch, keys_PS1D)
        batch.keep(Choice, choice)
        return choice

    def _attend_to(
        self, choice: Choice, q_TQX: torch.Tensor, cache_PS1L: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Attention over chosen tokens, [T, Q, V]."""
        spec = self.spec
        q_TQL = self._absorbed(q_TQX)
        return self._values(chosen_attention(q_TQL, cache_PS1L, choice, batch, rank=spec.kv_rank, scale=spec.scale))

    def _project(self, x_TH: torch.Tensor, context: StepContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, Q, X], what is kept of the tokens, [T, L], both turned; and the latents of queries, if any."""
        spec, adapters = self.spec, context.batch.adapters
        all_TN = self.in_proj(x_TH)
        if adapters is not None:
            adapters.add(self.layer, "qkv", all_TN, x_TH)
        q_TN, latent_TR, turned_TD = all_TN.split((spec.inputs.widths[0], spec.kv_rank, spec.rope_dim), dim=1)
        latent_q_TK = q_TN
        if self.q_norm is not None and self.q_b_proj is not None:
            latent_q_TK = self.q_norm(q_TN)
            q_TN = self.q_b_proj(latent_q_TK)
            if adapters is not None:
                adapters.add(self.layer, "q_b", q_TN, latent_q_TK)
        q_TQX, cos_sin = q_TN.unflatten(1, (spec.heads, -1)), context.cos_sin[self.rope]
        both = torch.cat((q_TQX[..., spec.nope_dim :], turned_TD[:, None]), dim=1)
        q_TQD, turned_T1D = apply_rope(both, *cos_sin, spec.rope.interleaved).split((spec.heads, 1), dim=1)
        q_TQX = grown(torch.cat((q_TQX[..., : spec.nope_dim], q_TQD), dim=-1), spec.growth, context.batch)
        return q_TQX, torch.cat((self.kv_norm(latent_TR), turned_T1D[:, 0]), dim=-1), latent_q_TK

    def _kv_b(self) -> torch.Tensor:
        """The weights by which each head makes keys, then values, of a latent: [Q, Y, R], a view."""
        return self.kv_b_proj.weight.unflatten(0, (self.spec.heads, -1))

    def _sums(
        self,
        q_TQL: torch.Tensor,
        log_sum_TQ: torch.Tensor | None,
        rows: AbsorbedRows,
        cache_PS1L: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Sums of latents for absorbed queries, each the last of its context, [T, Q, R]."""
        spec, heads = self.spec, q_TQL.shape[1]
        plan = batch.shared(
            ("plan of absorbed rows", rows.number, heads),
            lambda: plan_latent_decode(
                rows.page_table_BP, rows.context_lens_B, cache_PS1L, heads=heads, max_context=rows.max_context
            ),
        )
        return latent_decode_attention(
            q_TQL,
            cache_PS1L,
            rows.page_table_BP,
            rows.context_lens_B,
            rank=spec.kv_rank,
            scale=spec.scale,
            plan=plan,
            log_sum_BH=log_sum_TQ,
        )

    def _absorbed(self, q_TQX: torch.Tensor) -> torch.Tensor:
        """Queries that meet latents, [T, Q, L]."""
        nope = self.spec.nope_dim
        q_QTR = torch.bmm(q_TQX[..., :nope].transpose(0, 1), self._kv_b()[:, :nope])
        return torch.cat((q_QTR.transpose(0, 1), q_TQX[..., nope:]), dim=-1)

    def _values(self, sums_TQR: torch.Tensor) -> torch.Tensor:
        """The values of weighted sums of latents, [T, Q, V]."""
        value_QVR = self._kv_b()[:, self.spec.nope_dim :]
        return torch.bmm(sums_TQR.transpose(0, 1), value_QVR.transpose(1, 2)).transpose(0, 1)

    def scale_views(self, prefix: str) -> dict[str, torch.Tensor]:
        q_b = {} if self.q_b_proj is None else self.q_b_proj.scale_views(prefix)
        return self.in_proj.scale_views(prefix) | q_b | self.o_proj.scale_views(prefix)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        names = self.spec.names
        regions = self.in_proj.regions(prefix)
        if self.q_norm is not None and self.q_b_proj is not None:
            regions += [one_name(f"{prefix}{names.q_norm}.weight", self.q_norm.weight), *self.q_b_proj.regions(prefix)]
        regions.append(one_name(f"{prefix}{names.kv_norm}.weight", self.kv_norm.weight))
        if self.indexer is not None:
            regions += self.indexer.regions(prefix)
        if self.gate_proj is not None:
            regions += self.gate_proj.regions(prefix)
        return regions + self.kv_b_proj.regions(prefix) + self.o_proj.regions(prefix)


def absorbed_rows(batch: AttentionBatch, chunks: tuple[PromptChunk, ...]) -> list[tuple[torch.Tensor, AbsorbedRows]]:
    """The tokens of short spans, int64, and their rows."""
    blocks: list[list[int]] = []  # numbers of chunks
    tokens = ABSORBED_AT_ONCE
    for index, chunk in enumerate(chunks):
        if chunk.query_len > MOST_ABSORBED:
            continue
        if tokens + chunk.query_len > ABSORBED_AT_ONCE:
            blocks.append([])
            tokens = 0
        blocks[-1].append(index)
        tokens += chunk.query_len
    return [_rows_of(batch, chunks, number, block) for number, block in enumerate(blocks)]


def _rows_of(
    batch: AttentionBatch, chunks: tuple[PromptChunk, ...], number: int, block: list[int]
) -> tuple[torch.Tensor, AbsorbedRows]:
    spans = [(index, chunks[index].query_start, chunks[index].query_len) for index in block]
    device = batch.page_table_BP.device
    tokens_T = torch.cat([torch.arange(start, start + length, device=device) for _, start, length in spans])
    table_TP = torch.cat([batch.page_table_BP[index].expand(length, -1) for index, _, length in spans])
    most = max(chunks[index].context_len for index in block)
    return tokens_T, AbsorbedRows(number, table_TP, batch.positions_T[tokens_T] + 1, most)
