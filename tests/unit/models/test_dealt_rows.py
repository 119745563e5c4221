"""Decode attention of rows that are dealt to two ranks, by the kernel: own rows are exact, other rows are zero."""

import dataclasses

import pytest
import torch
from rollout_kernels.attention.segments import make_segments
from rollout_kernels.attention.triton_decode import decode_attention
from rollout_kernels.attention.triton_decode_plan import plan_decode_work

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.dealt_rows import deal
from rollout.models.layers import StepContext
from rollout.models.spec import Shard
from tests.support.kernels.attention_cases import DEVICE, SCALE, SMALL, queries

PAGE, PAGES, KV_HEADS, HEADS = 8, 20, 2, 6
#: Rows 0 to 2 are of rank 0 and share pages; 3 and 4 are of rank 1, and so are the shared pages; the last is padding.
LENS = [70, 80, 66, 90, 75, 0]
TABLES = [
    [*range(1, 8), 9, 10],
    [*range(1, 8), 11, 12, 13],
    [*range(1, 5), 14, 15, 16, 17, 18],
    [*range(PAGES + 1, PAGES + 12), PAGES + 13],
    [*range(PAGES + 1, PAGES + 8), PAGES + 14, PAGES + 15, PAGES + 16],
    [0],
]
COMMON = [56, 32, 0, 56, 0]  # positions that a row has in common with the next


@pytest.mark.parametrize("shares", [True, False])
def test_the_ranks_parts_are_the_attention_of_all_rows(shares: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(2 * PAGES, PAGE, KV_HEADS, 64, generator=generator).to(DEVICE) for _ in range(2))
    width = max(map(len, TABLES))
    table_BP = torch.tensor([[*row, *(0,) * (width - len(row))] for row in TABLES], dtype=torch.int32, device=DEVICE)
    lens_B = torch.tensor(LENS, dtype=torch.int32, device=DEVICE)
    slots_T = torch.tensor(
        [row[(n - 1) // PAGE] * PAGE + (n - 1) % PAGE if n else 0 for row, n in zip(TABLES, LENS, strict=True)],
        device=DEVICE,
    )
    segments = make_segments(COMMON, len(LENS), 4, 16)
    assert segments is not None
    config = dataclasses.replace(SMALL, programs_per_sm=1, block_m=16)

    def attention(k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        work = plan_decode_work(
            batch.context_lens_B,
            KV_HEADS,
            group=HEADS // KV_HEADS,
            window=None,
            config=config,
            max_context=max(LENS),
            multiprocessors=12 * KV_HEADS,
            segments_SW=batch.segments_SW,
        )
        given = (q, k, v, batch.page_table_BP, batch.context_lens_B)
        return decode_attention(*given, scale=SCALE, window=None, work=work).flatten(1)

    q = queries(len(LENS), HEADS, 64)
    alone = AttentionBatch(lens_B - 1, slots_T, table_BP, lens_B, max(LENS))
    exact = attention(k, v, alone)
    batch = dataclasses.replace(alone, segments_SW=torch.from_numpy(segments).to(DEVICE) if shares else None)
    total, written = torch.zeros_like(exact), 0
    for rank in range(2):
        mine = slice(rank * PAGES, (rank + 1) * PAGES)
        kv = KVCache([k[mine].contiguous()], [v[mine].contiguous()], PAGE, dealt=Shard(rank, 2))
        own = deal(StepContext((), slots_T, batch, kv)).own
        assert own is not None and own.context.batch.page_table_BP.max() < PAGES
        out = own.give(attention(kv.k[0], kv.v[0], own.context.batch), len(LENS))
        rows = slice(0, 3) if rank == 0 else slice(3, 5)
        assert out[rows].abs().sum(1).all() and out.abs().sum() == out[rows].abs().sum()
        assert (own.context.slots_T[rows] == slots_T[rows] - rank * PAGES * PAGE).all()
        written += int((own.context.slots_T != 0).sum())
        total += out
        if (left := own.context.batch.segments_SW) is not None:  # nothing is computed for other ranks' rows
            runs = left[len(LENS) :]
            assert {int(first) // 3 for first in runs[runs[:, 1] > 0, 0]} == {rank}
    assert written == 5, "each token's KV is written by one rank"
    assert (total - exact)[:5].abs().max() < 1e-5
