"""What tests of attention share: contexts in shuffled pages, queries, and attention in float64."""

import dataclasses
import random

import torch
from rollout_kernels.attention.triton_decode_plan import DecodeConfig, plan_decode_work
from rollout_kernels.attention.triton_prefill import PrefillConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.2
SMALL = DecodeConfig(block_n=16, num_stages=2, min_tiles=1)
LENS = [17, 1, 100, 15, 16]
#: Chunks of prompts: their queries, the contexts that they end, and a configuration with many small tiles.
PIECES = [1, 13, 40, 17]
CONTEXTS = [1, 30, 70, 17]
TINY = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)


class Pool:
    """Caches whose contexts lie in shuffled pages; everything else, page 0 included, is NaN."""

    def __init__(self, lens, page_size, kv_heads, dim, dtype=torch.float32, spare=0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        width = -(-max(lens) // page_size) + spare
        pages = list(range(1, len(lens) * width + 1))
        random.Random(seed).shuffle(pages)
        table = torch.zeros(len(lens), width, dtype=torch.int32)
        shape = (len(pages) + 1, page_size, kv_heads, dim)
        self.k = torch.full(shape, float("nan")).to(dtype)
        self.v = self.k.clone()
        self.contexts = []
        for row, length in enumerate(lens):
            used = -(-length // page_size)
            table[row, :used] = torch.tensor(pages[row * width : row * width + used], dtype=torch.int32)
            k, v = (torch.randn(length, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
            position = torch.arange(length)
            page = table[row, position // page_size].long()
            self.k[page, position % page_size], self.v[page, position % page_size] = k, v
            self.contexts.append((k, v))
        self.k, self.v, self.table = self.k.to(DEVICE), self.v.to(DEVICE), table.to(DEVICE)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)

    def forget(self, row, positions):
        """Fill a row's first positions with NaN in the caches."""
        at = torch.arange(max(0, positions), device=DEVICE)
        page_size = self.k.shape[1]
        pages = self.table[row, at // page_size].long()
        self.k[pages, at % page_size] = self.v[pages, at % page_size] = float("nan")

    def without_nan(self):
        """Caches without NaN, for the torch twin, which multiplies hidden values by zero."""
        return self.k.nan_to_num(0.5), self.v.nan_to_num(0.5)


def queries(count, heads, dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count + heads)
    return torch.randn(count, heads, dim, generator=generator).to(DEVICE, dtype)


def exact(q_HD, context, position, window):
    """Attention of one token's heads in float64."""
    first = 0 if window is None else max(0, position - window + 1)
    k, v = (t[first : position + 1].double().repeat_interleave(q_HD.shape[0] // t.shape[1], 1) for t in context)
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q_HD.double().cpu(), k) * SCALE, 1)
    return torch.einsum("hn,nhd->hd", weights, v)


def exact_decode(q, pool, lens, window):
    return torch.stack([exact(q[r], pool.contexts[r], n - 1, window) for r, n in enumerate(lens)])


def relative(got, expected):
    return ((got.double().cpu() - expected).norm() / expected.norm()).item()


def plan(pool, kv_heads, window=None, config=SMALL, shares=3, max_context=None):
    """A plan with about `shares` programs a KV head."""
    config = dataclasses.replace(config, programs_per_sm=1)
    return plan_decode_work(
        pool.lens,
        kv_heads,
        group=1,
        window=window,
        config=config,
        max_context=max_context,
        multiprocessors=shares * kv_heads,
    )


def exact_prefill(q, pool, window):
    rows, at = [], 0
    for row, (length, context) in enumerate(zip(PIECES, CONTEXTS, strict=True)):
        for i in range(length):
            rows.append(exact(q[at + i], pool.contexts[row], context - length + i, window))
        at += length
    return torch.stack(rows)
