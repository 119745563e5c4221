"""Attention to chosen blocks of a context: an indexer chooses them for each token and each KV head.

    token --one product, norms, turn--> a query for each KV head, and one key --> pages of its own
    score of a block for a KV head = the largest query . key of its tokens that the token sees
    the `top_k` blocks with the largest scores take part, and always the token's own block and the nearest before it

The choice is exact: it scores the whole context. Up to `top_k` blocks, all take part, and attention is as in other
layers. Chosen blocks are read where they lie: each token and KV head is a row with this head's pages. The work is
bounded by host integers alone, so steps can be captured.

Source: MiniMax-M3, as transformers computes it. Legend: T tokens, G KV heads, X = T G, D head dimension, C positions of
a context, S page size, N pages of chosen blocks.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rollout_kernels import apply_rope, head_rms_norm, paged_decode_attention, plan_paged_decode
from rollout_kernels.attention.index_scores import index_scores
from rollout_kernels.attention.latent import ABSORBED_AT_ONCE, write_latent

from rollout.models.batch import AttentionBatch, LayerKV
from rollout.models.indexer import AT_ONCE_BYTES, spans
from rollout.models.layers import Attention, Build, Linear, StepContext
from rollout.models.names import Region, one_name
from rollout.models.spec import AttentionSpec, BlocksSpec


class ChosenPages(NamedTuple):
    """The pages that each token's KV heads read."""

    pages_XN: torch.Tensor  # int32: as `pages_of_heads` numbers them
    lens_X: torch.Tensor  # int32: how many tokens of the pages are read, from the first on


class BlockAttention(Attention):
    """Grouped-query attention to chosen blocks; `key_index` is the place of the indexer's keys in the cache."""

    def __init__(self, spec: AttentionSpec, layer: int, kv_index: int, key_index: int, rope: int, build: Build) -> None:
        super().__init__(spec, layer, kv_index, rope, build)
        assert spec.blocks is not None
        self.blocks: BlocksSpec = spec.blocks
        self.key_index = key_index
        self.index_proj = Linear(spec.index, build.plain)
        self.index_qk_norm_weight = build.empty(2, self.blocks.dim)
        self.index_kinds: torch.Tensor  # the weight, of two, that each head takes
        kinds = torch.tensor([0] * spec.kv_heads + [1], device=build.device)
        self.register_buffer("index_kinds", kinds, persistent=False)

    def mix(self, x_TH: torch.Tensor, q_TQD: torch.Tensor, context: StepContext) -> torch.Tensor:
        batch, cache = context.batch, context.kv.layer(self.kv_index)
        chosen = self._choose(x_TH, context)
        return self.attend(q_TQD, batch, cache) if chosen is None else self._read(chosen, q_TQD, batch, cache)

    def _choose(self, x_TH: torch.Tensor, context: StepContext) -> ChosenPages | None:
        """The pages that a step's tokens read, whose keys go to the cache; None: all pages before them."""
        spec, heads, batch = self.blocks, self.spec.kv_heads, context.batch
        both_TN = self.index_proj(x_TH)
        if batch.adapters is not None:
            batch.adapters.add(self.layer, "index", both_TN, x_TH)
        both_TXD = both_TN.unflatten(1, (heads + 1, spec.dim))
        weight_XD = self.index_qk_norm_weight.index_select(0, self.index_kinds)
        both_TXD = head_rms_norm(both_TXD, weight_XD, self.spec.eps, self.spec.unit_offset)
        both_TXD = apply_rope(both_TXD, *context.cos_sin[self.rope], self.spec.rope.interleaved)
        q_TGD, k_T1D = both_TXD.split((heads, 1), dim=1)
        keys_PS1D = context.kv.layer(self.key_index).k_PSGD
        write_latent(k_T1D[:, 0], keys_PS1D, context.slots_T)
        if batch.max_context <= spec.top_k * spec.size:
            return None
        page_size, parts = keys_PS1D.shape[1], list[ChosenPages]()
        for tokens, row, count in spans(batch, heads * -(-batch.max_context // page_size) * page_size):
            positions_T, pages_YP = batch.positions_T[tokens], batch.page_table_BP[row, : -(-count // page_size)]
            positions_X = positions_T.repeat_interleave(heads)
            shared = pages_YP.dim() == 1
            table_XP = pages_YP.expand(len(positions_X), -1) if shared else pages_YP.repeat_interleave(heads, dim=0)
            q_X1D = q_TGD[tokens].flatten(0, 1)[:, None].contiguous()
            ones_X1 = q_X1D.new_ones(len(q_X1D), 1, dtype=torch.float32)
            scores_XC = index_scores(q_X1D, ones_X1, keys_PS1D, table_XP, positions_X, relu=False)
            parts.append(self._pages(scores_XC, table_XP, positions_X, page_size))
        return ChosenPages(*map(torch.cat, zip(*parts, strict=True)))

    def _pages(
        self, scores_XC: torch.Tensor, table_XP: torch.Tensor, positions_X: torch.Tensor, page_size: int
    ) -> ChosenPages:
        """The pages of the blocks with the largest scores, in the order of positions."""
        spec, heads, a_block = self.blocks, self.spec.kv_heads, self.blocks.size // page_size
        assert a_block * page_size == spec.size, "check_model"
        padded_XC = F.pad(scores_XC, (0, -scores_XC.shape[1] % spec.size), value=-math.inf)
        scores_XB = padded_XC.unflatten(1, (-1, spec.size)).amax(2)
        own_X1 = (positions_X[:, None].clamp_min(0) // spec.size).long()
        nearest_XL = own_X1 - torch.arange(spec.nearest, device=own_X1.device)
        scores_XB = scores_XB.scatter(1, nearest_XL.clamp_min_(0), math.inf)
        best_XK = scores_XB.topk(min(spec.top_k, scores_XB.shape[1]), dim=1).indices
        # Blocks after the token's own have the least scores, and go to the end.
        best_XK = best_XK.masked_fill(best_XK > own_X1, scores_XB.shape[1]).sort(dim=1).values
        best_XK = F.pad(best_XK, (0, spec.top_k - best_XK.shape[1]), value=scores_XB.shape[1])
        columns_XN = (best_XK[..., None] * a_block + torch.arange(a_block, device=own_X1.device)).flatten(1)
        pages_XN = table_XP.gather(1, columns_XN.clamp_max_(table_XP.shape[1] - 1))
        head_X1 = torch.arange(heads, device=own_X1.device).repeat(len(pages_XN) // heads)[:, None]
        full_X = own_X1[:, 0].clamp_max(spec.top_k - 1) * spec.size
        lens_X = full_X + positions_X.clamp_min(0) % spec.size + 1
        return ChosenPages((pages_XN * (page_size * heads) + head_X1).int(), lens_X.int())

    def _read(self, chosen: ChosenPages, q_TQD: torch.Tensor, batch: AttentionBatch, cache: LayerKV) -> torch.Tensor:
        """Attention of a step's queries to chosen blocks, [T, Q, D]."""
        k_PS1D, v_PS1D = pages_of_heads(cache.k_PSGD), pages_of_heads(cache.v_PSGD)
        q_XRD = q_TQD.unflatten(1, (self.spec.kv_heads, -1)).flatten(0, 1)
        most = self.blocks.top_k * self.blocks.size
        bytes_of_one = 2 * most * q_TQD.shape[2] * k_PS1D.element_size()
        rows = ABSORBED_AT_ONCE * self.spec.kv_heads if q_TQD.is_cuda else max(1, AT_ONCE_BYTES // bytes_of_one)
        out = list[torch.Tensor]()
        for q_xRD, pages_xN, lens_x in zip(q_XRD.split(rows), *(part.split(rows) for part in chosen), strict=True):
            how: dict[str, Any] = {"window": None, "max_context": most}
            make = partial(plan_paged_decode, pages_xN, lens_x, k_PS1D, heads=q_XRD.shape[1], **how)
            # On a GPU it follows from the lengths, which all layers share; on a CPU it has the chosen pages.
            how["plan"] = batch.shared(("plan of chosen blocks", len(out)), make) if q_TQD.is_cuda else make()
            out.append(paged_decode_attention(q_xRD, k_PS1D, v_PS1D, pages_xN, lens_x, scale=self.scale, **how))
        return torch.cat(out).unflatten(0, (-1, self.spec.kv_heads)).flatten(1, 2)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        names = (self.blocks.names.q_norm, self.blocks.names.k_norm)
        norms = zip(names, self.index_qk_norm_weight, strict=True)
        regions = [*super().regions(prefix), *self.index_proj.regions(prefix)]
        return regions + [one_name(f"{prefix}{name}.weight", weight) for name, weight in norms]


def pages_of_heads(cache_PSGD: torch.Tensor) -> torch.Tensor:
    """A view of the cache in which each KV head of a page is a page: head g of page p is number p S G + g."""
    pages, size, heads, dim = cache_PSGD.shape
    assert cache_PSGD.is_contiguous()
    shape = ((pages - 1) * size * heads + heads, size, 1, dim)
    return cache_PSGD.as_strided(shape, (dim, heads * dim, dim, 1))
