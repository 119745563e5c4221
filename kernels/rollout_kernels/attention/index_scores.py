"""Scores of an indexer: how much each token of a context matters to a token, for sparse attention.

    score of a position = sum over heads of  weight relu(query . key), or without relu

All heads share one key a position, which lies in pages. `triton_index_scores` computes it on a GPU.

Legend: T tokens, H heads of the indexer, D their dimension, P pages (of the cache, or of a token's page table), S page
size, C positions of a context.
"""

from __future__ import annotations

import math

import torch


def index_scores(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_PS1D: torch.Tensor,
    table_TP: torch.Tensor,
    positions_T: torch.Tensor,
    relu: bool = True,
) -> torch.Tensor:
    """The scores of all positions in the pages of each token, float32 [T, C]; -inf after the token's own position.

    Args:
        q_THD: queries, in the dtype of the keys, contiguous but for T.
        weights_TH: weights of the heads, float32.
        keys_PS1D: keys, contiguous.
        table_TP: int32; of tokens of one row it may be an expanded view.
        positions_T: positions of the tokens in their contexts.
        relu: products below 0 count as 0.
    """
    if q_THD.is_cuda:
        from rollout_kernels.attention import triton_index_scores

        return triton_index_scores.index_scores(q_THD, weights_TH, keys_PS1D, table_TP, positions_T, relu)
    pages = table_TP[0] if table_TP.stride(0) == 0 else table_TP
    keys_XCD = keys_PS1D[pages.long()].flatten(-4, -2)  # keys of one row, or of each token
    products_THC = torch.matmul(q_THD.float(), keys_XCD.float().transpose(-1, -2))
    scores_TC = torch.matmul(weights_TH[:, None], products_THC.relu_() if relu else products_THC)[:, 0]
    after_TC = torch.arange(scores_TC.shape[1], device=q_THD.device) > positions_T[:, None]
    return scores_TC.masked_fill(after_TC, -math.inf)
