"""Contexts split over ranks: parts of rows by the decode kernel, and prefills that gather their contexts in parts."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rollout_kernels.attention.segments import make_segments
from rollout_kernels.attention.triton_decode import decode_attention
from rollout_kernels.parallel import TensorGroup

from rollout.config import ModelSettings
from rollout.models import Decoder, load_model, split_context
from rollout.models.batch import AttentionBatch, KVCache, PromptChunk
from rollout.models.spec import Shard
from tests.support.kernels.attention_cases import DEVICE, SCALE, SMALL, exact_decode, queries, relative
from tests.support.models.families import make_checkpoint
from tests.support.models.latent import make_latent
from tests.support.models.paged import PagedRunner
from tests.support.parallel.logits import join_logits
from tests.support.parallel.ranks import Ranks
from tests.unit.kernels.test_attention_groups import COMMON, LENS, PAGE, shared_pool, work_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_parts_are_the_attention_of_the_whole_context(ranks: int, shares: bool) -> None:
    lens, common = [*LENS[:-1], 3], [*COMMON[:-1], 0]  # of the last row some ranks have nothing
    pool, q = shared_pool(lens, common), queries(len(lens), 8, 64)
    config = dataclasses.replace(SMALL, block_m=16)
    made = make_segments(common, len(lens), config.rows_at_once(4), 16) if shares else None
    last = [n - 1 for n in lens]
    slots_T = torch.tensor([int(pool.table[row, p // PAGE]) * PAGE + p % PAGE for row, p in enumerate(last)])
    batch = AttentionBatch(
        torch.tensor(last, device=DEVICE),
        slots_T.to(DEVICE),
        pool.table,
        pool.lens,
        max(lens),
        segments_SW=None if made is None else torch.from_numpy(made).to(DEVICE),
    )
    outs, sums, written, part = [], [], 0, PAGE // ranks
    for rank in range(ranks):
        k, v = (x[:, rank * part : (rank + 1) * part].contiguous() for x in (pool.k, pool.v))
        own = split_context.own_positions(batch, KVCache([k], [v], PAGE, split=Shard(rank, ranks)))
        segments = None if own.segments_SW is None else own.segments_SW.cpu().numpy()
        seen = copy.copy(pool)
        seen.lens = own.context_lens_B
        work = work_of(seen, segments, 8, config=config, shares=5)
        log_sum = torch.empty(len(lens), 8, device=DEVICE)
        given = (q, k, v, own.page_table_BP, own.context_lens_B)
        outs.append(decode_attention(*given, scale=SCALE, window=None, work=work, log_sum_BH=log_sum))
        sums.append(log_sum)
        written += int((own.kv_slots_T != 0).sum())
        assert int(own.context_lens_B.max()) <= own.max_context
    weights = torch.softmax(torch.stack(sums).double() * 0.6931471805599453, 0)[..., None]
    merged = (weights * torch.stack(outs).double()).sum(0)
    assert relative(merged, exact_decode(q, pool, lens, None)) < 1e-5
    assert written == len(lens), "each token's KV is written by one rank"


def test_a_prefill_is_gathered_in_parts_of_bounded_size() -> None:
    chunks, at = [], 0
    for length, context in ((5, 9), (3, 40000), (4, 30000), (2, 70000), (1, 1)):
        chunks.append(PromptChunk(at, length, context))
        at += length
    width = -(-70000 // 16)
    batch = AttentionBatch(
        positions_T=torch.arange(at),
        kv_slots_T=torch.arange(at),
        page_table_BP=torch.arange(5 * width, dtype=torch.int32).view(5, width),
        context_lens_B=torch.tensor([chunk.context_len for chunk in chunks], dtype=torch.int32),
        max_context=70000,
        chunks=tuple(chunks),
        query_starts_C1=torch.tensor([0, 5, 8, 12, 14, 15], dtype=torch.int32),
    )
    parts = split_context.gathered_chunks(batch, 16)
    assert [(part.tokens.start, part.tokens.stop) for part in parts] == [(0, 8), (8, 12), (12, 14), (14, 15)]
    assert parts is split_context.gathered_chunks(batch, 16)
    for part in parts:
        assert part.batch.chunks is not None and part.batch.query_starts_C1 is not None
        starts = [chunk.query_start for chunk in part.batch.chunks]
        assert part.batch.query_starts_C1.tolist() == [*starts, len(part.batch.positions_T)]
        rows = range(len(part.batch.chunks))
        for row in rows:
            context = int(part.batch.context_lens_B[row])
            pages = part.pages_M[part.batch.page_table_BP[row, : -(-context // 16)].long()]
            index = next(i for i, c in enumerate(chunks) if c.context_len == context)
            assert pages.tolist() == batch.page_table_BP[index, : len(pages)].tolist()


def _steps(model: Decoder, kv_dtype: torch.dtype) -> torch.Tensor:
    """Logits of prompts of three rows in chunks, and of decode steps."""
    runner = PagedRunner(model, rows=3, max_tokens=90, page_size=8, kv_dtype=kv_dtype)
    ids = [[(7 * i + 3 * row) % 80 for i in range(80)] for row in range(3)]
    found = []
    for pieces in ({0: (0, 35), 1: (0, 3)}, {2: (0, 40), 1: (3, 20)}, {0: (35, 36), 1: (20, 60), 2: (40, 42)}):
        logits = runner.prefill({row: ids[row][a:b] for row, (a, b) in pieces.items()})
        found += [logits[row] for row in pieces]
    for step in range(5):
        logits = runner.decode({row: ids[row][60 + step] for row in (2, 0, 1)}, padding=1)
        found += [logits[row][None] for row in (2, 0, 1)]
    return join_logits(model, torch.cat(found))


def _of_a_rank(group: TensorGroup, folder: Path, kv_dtype: torch.dtype) -> torch.Tensor:
    split_context.GATHERED_TOKENS = 48  # ranks are processes that later tests use, too
    try:
        settings = ModelSettings(path=str(folder), dtype="float32")
        return _steps(load_model(settings, CPU, group=group, split="context").model, kv_dtype)
    finally:
        split_context.GATHERED_TOKENS = 1 << 16


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn, torch.int8, None])
def test_contexts_are_gathered_in_several_parts_and_as_codes(
    kv_dtype: torch.dtype | None, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    """With None, latents."""
    if kv_dtype is None:
        make_latent("DeepseekV3", tmp_path, 0, moe_intermediate_size=20)
    else:
        make_checkpoint("llama", tmp_path, 0, num_attention_heads=4, num_key_value_heads=1)
    dtype = kv_dtype or torch.float32
    model = load_model(ModelSettings(path=str(tmp_path), dtype="float32"), CPU).model
    exact = _steps(model, dtype)
    one, two = start_ranks(2).run(_of_a_rank, tmp_path, dtype)
    assert torch.equal(one, two)
    # A value between two codes may become either, by the last bit of a sum: at most twice as far off as codes are.
    codes = 0.0 if dtype == torch.float32 else 2 * (_steps(model, torch.float32) - exact).abs().max()
    assert (one - exact).abs().max() < 1e-4 + codes
