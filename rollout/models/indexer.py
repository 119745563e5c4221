"""Sparse attention: an indexer chooses the tokens of the context that each token attends to.

    query latent --product--> heads of queries       token --product, norm--> one key --> cache, beside the latent
    score of a token of the context = sum over heads of  weight(token) relu(query . key)
    the `top_k` tokens with the largest scores take part in latent attention; up to so many, all take part

The choice is exact: it scores the whole context. The chosen tokens are read where they lie, as pages of one token.
Layers without an indexer use the choice of the last indexer before them. The work is bounded by host integers alone, so
steps can be captured.

Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1). Legend: T tokens, H heads of the indexer, D their dimension, C
positions of a context, K chosen tokens, Q query heads, L what the cache keeps of a token, R width of the latent.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rollout_kernels import apply_rope
from rollout_kernels.attention.index_scores import index_scores
from rollout_kernels.attention.latent import (
    ABSORBED_AT_ONCE,
    latent_decode_attention,
    plan_latent_decode,
    write_latent,
)

from rollout.models.batch import AttentionBatch
from rollout.models.layers import Block, Build, Linear
from rollout.models.names import Region, one_name
from rollout.models.spec import IndexerSpec

#: Scores, or on a CPU latents of chosen tokens, that are in memory at once, bytes; at least one token's.
AT_ONCE_BYTES = 256 << 20


class Choice(NamedTuple):
    """The tokens that each token of a step attends to."""

    slots_TK: torch.Tensor  # int32: their KV slots, as in `AttentionBatch.kv_slots_T`
    counts_T: torch.Tensor  # int32: how many of the slots are read, from the first on


class IndexQueries(NamedTuple):
    """The queries of a step."""

    q_THD: torch.Tensor
    weights_TH: torch.Tensor  # float32


class Indexer(Block):
    """Keeps a key of each token in pages, and chooses tokens by it."""

    def __init__(self, spec: IndexerSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.q_proj, self.k_proj = Linear(spec.q, build), Linear(spec.k, build)
        self.k_norm = _LayerNorm(spec.dim, spec.eps, build)
        # The weights of heads decide between nearly equal scores; transformers keeps them in float32, too.
        self.head_weights = build.empty(spec.heads, spec.hidden, dtype=torch.float32)

    def forward(
        self,
        x_TH: torch.Tensor,
        latent_TK: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        slots_T: torch.Tensor,
        keys_PS1D: torch.Tensor,
    ) -> IndexQueries:
        """The queries of a step, from the normalised `x_TH` and the latents of its queries; keys go to the cache."""
        spec = self.spec
        q_THD = self.q_proj(latent_TK).unflatten(1, (spec.heads, spec.dim))
        both_TXD = torch.cat((q_THD, self.k_norm(self.k_proj(x_TH))[:, None]), dim=1)
        q_THD, k_T1D = apply_rope(both_TXD, *cos_sin, spec.interleaved).split((spec.heads, 1), dim=1)
        write_latent(k_T1D[:, 0], keys_PS1D, slots_T)
        return IndexQueries(q_THD, F.linear(x_TH.float(), self.head_weights) * (spec.heads * spec.dim) ** -0.5)

    def choose(self, queries: IndexQueries, batch: AttentionBatch, keys_PS1D: torch.Tensor) -> Choice | None:
        """The tokens that a step's tokens attend to; None: all tokens before them."""
        if batch.max_context <= self.spec.top_k:
            return None
        page_size, top_k, slots = keys_PS1D.shape[1], self.spec.top_k, []
        for table_TP, best_TK in best_positions(queries, batch, keys_PS1D, batch.positions_T, top_k, page_size):
            slots_TK = table_TP.gather(1, best_TK // page_size) * page_size + best_TK % page_size
            slots.append(F.pad(slots_TK.int(), (0, top_k - best_TK.shape[1])))
        return Choice(torch.cat(slots), (batch.positions_T + 1).clamp(max=top_k).int())

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        names = self.spec.names
        return [
            *self.q_proj.regions(prefix),
            *self.k_proj.regions(prefix),
            one_name(f"{prefix}{names.k_norm}.weight", self.k_norm.weight),
            one_name(f"{prefix}{names.k_norm}.bias", self.k_norm.bias),
            one_name(f"{prefix}{names.weights}.weight", self.head_weights),
        ]


class _LayerNorm(Block):
    def __init__(self, width: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = build.empty(width)
        self.bias = build.empty(width)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def best_positions(
    queries: IndexQueries, batch: AttentionBatch, keys_PS1D: torch.Tensor, last_T: torch.Tensor, top_k: int, a_page: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For tokens that are scored at once, in turn: their page tables, and the places of the keys with the best scores.

    `last_T` are the places of the last keys that tokens see; later ones come last. A page has `a_page` tokens.
    """
    heads = 1 if keys_PS1D.is_cuda else queries.q_THD.shape[1]  # the kernel keeps no products by head
    for tokens, row, count in spans(batch, heads * -(-batch.max_context // a_page) * keys_PS1D.shape[1]):
        pages_XP = batch.page_table_BP[row, : -(-count // a_page)]
        table_TP = pages_XP.expand(len(last_T[tokens]), -1)
        scores_TC = index_scores(queries.q_THD[tokens], queries.weights_TH[tokens], keys_PS1D, table_TP, last_T[tokens])
        yield table_TP, scores_TC.topk(min(top_k, scores_TC.shape[1]), dim=1).indices


def spans(batch: AttentionBatch, values: int) -> Iterator[tuple[slice, slice | int, int]]:
    """Tokens that are scored at once, their row or rows, and a bound on their contexts.

    `values` is the number of float32 scores of a token, by head.
    """
    most = max(1, AT_ONCE_BYTES // (torch.float32.itemsize * values))
    if batch.chunks is None:
        for begin in range(0, len(batch.context_lens_B), most):
            some = slice(begin, min(begin + most, len(batch.context_lens_B)))
            yield some, some, batch.max_context
        return
    for row, (start, length, context) in enumerate(batch.chunks):
        for begin in range(start, start + length, most):
            yield slice(begin, min(begin + most, start + length)), row, context


def chosen_attention(
    q_TQL: torch.Tensor,
    cache_PS1L: torch.Tensor,
    choice: Choice,
    batch: AttentionBatch,
    *,
    rank: int,
    scale: float,
    log_sum_TQ: torch.Tensor | None = None,
    plan_of: Any = "chosen tokens",
) -> torch.Tensor:
    """Attention of a step's absorbed queries over chosen tokens: sums of latents, [T, Q, R].

    `log_sum_TQ` is as in `paged_decode_attention`. Layers with equal counts share plans, by `plan_of`.
    """
    tokens_N11L, count = cache_PS1L.flatten(0, 1)[:, None], choice.slots_TK.shape[1]
    bytes_of_one = count * (cache_PS1L.shape[3] * cache_PS1L.element_size() + q_TQL.shape[1] * 4)
    most = ABSORBED_AT_ONCE if q_TQL.is_cuda else max(1, AT_ONCE_BYTES // bytes_of_one)
    out: list[torch.Tensor] = []
    log_sums = [None] * len(q_TQL.split(most)) if log_sum_TQ is None else log_sum_TQ.split(most)
    for q_tQL, log_sum_tQ, slots_tK, counts_t in zip(
        q_TQL.split(most), log_sums, *(part.split(most) for part in choice), strict=True
    ):
        where = (slots_tK, counts_t)
        make = partial(plan_latent_decode, slots_tK, counts_t, tokens_N11L, heads=q_TQL.shape[1], max_context=count)
        # On a GPU it follows from the counts, which all layers share; on a CPU it has the chosen tokens.
        plan = batch.shared(("plan", plan_of, len(out), q_TQL.shape[1]), make) if q_TQL.is_cuda else make()
        how: dict[str, Any] = {"rank": rank, "scale": scale, "plan": plan, "log_sum_BH": log_sum_tQ}
        out.append(latent_decode_attention(q_tQL, tokens_N11L, *where, **how))
    return torch.cat(out)
