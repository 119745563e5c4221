"""Prefill attention over gathered keys and values: for which steps, and the three launches.

    gather_kv            the contexts, copied from pages
    prefill_items        blocks of queries, the longest first
    gathered_attention   tensor cores and copy engine of Hopper

The products run 1.5 to 1.7 times as fast as `triton_prefill`, but the copy is extra, and each block of queries costs as
much as a few of its tiles. So steps whose blocks see few tiles are left to `triton_prefill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from rollout_kernels.attention.triton_gather_kv import MOST_CHUNKS, TILE, gather_kv, gathered_rows
from rollout_kernels.attention.triton_gathered_items import BLOCK, block_count, prefill_items
from rollout_kernels.common.device import is_hopper, multiprocessors

#: Rows of keys and values that are gathered at most: of eight KV heads, they take 512 MiB.
MOST_GATHERED = 1 << 17
_HEAD_DIM = 128
# Microseconds of one multiprocessor, fitted to measurements on an H200.
_SAVED_TILE, _BLOCK, _GATHERED_TILE, _LAUNCHES = 1.6, 3.0, 7.0, 2000.0


def takes(
    q_THD: torch.Tensor, chunks: Sequence[tuple[int, int, int]], kv_heads: int, window: int | None, scale: float
) -> bool:
    """True if the attention of these chunks (start, queries, context) is to run over gathered keys and values."""
    return is_hopper(q_THD.device) and fits(q_THD, chunks, kv_heads, window, scale)


def fits(
    q_THD: torch.Tensor, chunks: Sequence[tuple[int, int, int]], kv_heads: int, window: int | None, scale: float
) -> bool:
    """The result of `takes` on Hopper."""
    return (
        q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.is_contiguous()
        and q_THD.shape[2] == _HEAD_DIM
        and scale > 0
        and pays(tuple(chunks), q_THD.shape[1], kv_heads, window)
    )


@lru_cache(maxsize=32)
def pays(chunks: tuple[tuple[int, int, int], ...], heads: int, kv_heads: int, window: int | None) -> bool:
    """True if gathering takes less time than it saves, and no more memory than is set aside for it."""
    if len(chunks) > MOST_CHUNKS or len(chunks) == 0:
        return False
    rows = gathered_rows([context for _, _, context in chunks])
    if rows > MOST_GATHERED:
        return False
    blocks = block_count([queries for _, queries, _ in chunks])
    tiles = sum(_tiles(queries, context, window) for _, queries, context in chunks)
    costs = _BLOCK * blocks * heads + _GATHERED_TILE * rows // TILE * kv_heads + _LAUNCHES
    return _SAVED_TILE * tiles * heads > costs


def _tiles(queries: int, context: int, window: int | None) -> int:
    """Tiles of keys that the blocks of a chunk see, together."""
    total = 0
    for position in range(context - queries, context, BLOCK):
        begin = 0 if window is None else max(0, position - window + 1) // TILE
        total += -(-min(position + BLOCK, context) // TILE) - begin
    return total


def attend_gathered(
    q_THD: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    page_table_CP: torch.Tensor,
    chunks: Sequence[tuple[int, int, int]],
    query_starts_C1: torch.Tensor,
    context_lens_C: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    scales_P2GS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of chunks that `takes` accepts; for the arguments see `paged_prefill_attention`."""
    from rollout_kernels.attention.gluon_prefill import gathered_attention

    contexts = [context for _, _, context in chunks]
    given = k_cache_PSGD, v_cache_PSGD, page_table_CP, context_lens_C
    sizes: dict[str, Any] = {"rows": gathered_rows(contexts), "most": max(contexts), "dtype": q_THD.dtype}
    k_GND, v_GND = gather_kv(*given, **sizes, scales_P2GS=scales_P2GS)
    blocks = block_count([queries for _, queries, _ in chunks])
    items_BW = prefill_items(query_starts_C1, context_lens_C, blocks, window)
    programs = multiprocessors(q_THD.device)
    return gathered_attention(q_THD, k_GND, v_GND, items_BW, scale=scale, window=window, programs=programs)
