"""The Triton attention kernels against float64 and the torch twins, in Triton's interpreter where there is no GPU."""

import dataclasses
import itertools

import pytest
import torch
from rollout_kernels.attention import paged_decode_attention, paged_prefill_attention, plan_decode
from rollout_kernels.attention.triton_decode import decode_attention, default_decode_config
from rollout_kernels.attention.triton_decode_plan import DecodeConfig, DecodeWork, plan_decode_work
from rollout_kernels.attention.triton_prefill import prefill_attention

from tests.support.kernels.attention_cases import (
    CONTEXTS,
    DEVICE,
    LENS,
    PIECES,
    SCALE,
    SMALL,
    TINY,
    Pool,
    exact,
    exact_decode,
    exact_prefill,
    plan,
    queries,
    relative,
)
from tests.support.kernels.grids import nightly


def attend(q, pool, work):
    return decode_attention(q, pool.k, pool.v, pool.table, pool.lens, scale=SCALE, window=work.window, work=work)


def items_of(work: DecodeWork):
    """The plan's items, and the items of each share."""
    first = work.first.tolist()
    items = work.items[: first[-1], :6].tolist()
    return items, [range(a, b) for a, b in itertools.pairwise(first)]


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("shares", [1, 2, 7, 40])
@pytest.mark.parametrize("lens", [[100], [0, 64, 1, 64, 0], [16] * 8, [700, 3, 90, 1, 33]])
def test_plan_covers_each_visible_tile_once_and_shares_are_even(lens, shares, window):
    lens_B = torch.tensor(lens, device=DEVICE)
    config = dataclasses.replace(SMALL, programs_per_sm=1)
    work = plan_decode_work(lens_B, 2, group=1, window=window, config=config, multiprocessors=2 * shares)
    items, by_share = items_of(work)
    assert len(items) <= work.items.shape[0]
    expected = []
    for row, length in enumerate(lens):
        begin = 0 if window is None else max(0, length - window) // 16
        expected += [(row, tile) for tile in range(begin, max(1, -(-length // 16)))]
    assert [(item[0], tile) for item in items for tile in range(item[1], item[2])] == expected
    for i, (row, _, _, first_item, count, length) in enumerate(items):
        mine = [j for j, item in enumerate(items) if item[0] == row]
        assert (first_item, count, length) == (mine[0], len(mine), lens[row]) and i in mine
    assert [i for share in by_share for i in share] == list(range(len(items)))
    sizes = [sum(items[i][2] - items[i][1] for i in share) for share in by_share]
    assert max(sizes) == -(-len(expected) // shares)
    assert not bool(work.arrivals_BG.any())


def test_share_is_never_smaller_than_asked_for():
    pool = Pool([100], 16, 1, 64)
    work = plan(pool, 1, config=dataclasses.replace(SMALL, min_tiles=3), shares=20)
    assert [item[2] - item[1] for item in items_of(work)[0]] == [3, 3, 1]


@pytest.mark.parametrize(
    ("lens", "group", "tiles"),
    [
        ([384], 1, 1),
        ([384], 4, 2),
        ([384], 8, 2),
        ([4096], 8, 7),
        ([4096], 4, 5),
        ([16384], 8, 14),
        ([4096, 0], 8, 7),
    ],
)
def test_parts_balance_their_own_time_and_that_of_combining_them(lens, group, tiles):
    """With enough programs, a part has sqrt(1.5 * query heads * positions) positions, in tiles of 32."""
    config = DecodeConfig(block_n=32, programs_per_sm=1)
    lens_B = torch.tensor(lens, device=DEVICE)
    work = plan_decode_work(lens_B, 1, group=group, window=None, config=config, multiprocessors=1000)
    sizes = [item[2] - item[1] for item in items_of(work)[0] if item[0] == 0]
    assert set(sizes[:-1]) == {tiles} and sizes[-1] <= tiles and sum(sizes) == -(-lens[0] // 32)


@pytest.mark.parametrize("group", [1, 8])
def test_parts_are_shorter_where_a_program_combines_one_head(group):
    config = DecodeConfig(block_n=32, programs_per_sm=1, fused=False)
    how = {"group": group, "window": None, "config": config}
    for rows, heads in ((1, 1), (32, 1), (33, group)):
        work = plan_decode_work(torch.full([rows], 4096, device=DEVICE), 1, **how, multiprocessors=rows * 1000)
        (first, *_), _ = items_of(work)
        assert first[2] - first[1] == round((1.5 * heads * 4096) ** 0.5 / 32)


def test_few_rows_with_several_heads_to_a_kv_head_are_combined_by_a_second_kernel():
    for coded in (False, True):
        fused = {
            (rows, group): default_decode_config(128, torch.bfloat16, rows, coded, group=group).fused
            for rows in (1, 32, 33)
            for group in (2, 4)
        }
        assert fused == {(1, 2): True, (1, 4): False, (32, 2): True, (32, 4): False, (33, 2): True, (33, 4): True}


@pytest.mark.parametrize("window", [None, 40])
def test_a_chunked_plan_cuts_a_row_independently_of_other_rows(window):
    config = dataclasses.replace(SMALL, chunk=32)
    alone = plan(Pool([100], 16, 1, 64), 1, window, config, max_context=128)
    among = plan(Pool([1, 100, 77], 16, 1, 64), 1, window, config, max_context=128)
    cuts = [(item[1], item[2]) for item in items_of(alone)[0]]
    assert cuts == [(item[1], item[2]) for item in items_of(among)[0] if item[0] == 1]
    assert cuts == ([(0, 2), (2, 4), (4, 6), (6, 7)] if window is None else [(3, 4), (4, 6), (6, 7)])
    assert all(len(share) <= 1 for share in items_of(among)[1])


# --- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shares", "fused"), [(1, True), (4, False), (30, True), *nightly((2, True), (4, True))])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (3, 1), *nightly((2, 2), (8, 1))])
def test_decode_for_head_groups_and_splits(heads, kv_heads, shares, fused):
    pool, q = Pool(LENS, 16, kv_heads, 64), queries(len(LENS), heads, 64)
    work = plan(pool, kv_heads, config=dataclasses.replace(SMALL, fused=fused), shares=shares)
    assert relative(attend(q, pool, work), exact_decode(q, pool, LENS, None)) < 1e-5


@pytest.mark.parametrize("fused", [True, False])
def test_decode_combines_more_parts_than_fit_in_registers_at_once(fused):
    pool, q = Pool([30, 330], 16, 1, 64), queries(2, 8, 64)
    q[1] *= 3  # makes the parts differ in weight
    work = plan(pool, 1, config=dataclasses.replace(SMALL, fused=fused), shares=40)
    assert max(item[4] for item in items_of(work)[0]) == 21
    assert relative(attend(q, pool, work), exact_decode(q, pool, [30, 330], None)) < 1e-5


def test_a_second_kernel_combines_the_parts_of_many_rows_too():
    lens = [1 + row * 7 % 45 for row in range(34)]
    pool, q = Pool(lens, 16, 2, 64), queries(34, 8, 64)
    work = plan(pool, 2, config=dataclasses.replace(SMALL, fused=False), shares=60)
    assert max(item[4] for item in items_of(work)[0]) > 1
    assert relative(attend(q, pool, work), exact_decode(q, pool, lens, None)) < 1e-5


def test_only_the_last_part_to_arrive_writes_the_output(poisoned_memory):
    pool, q = Pool([100, 16], 16, 1, 64), queries(2, 4, 64)
    work = plan(pool, 1, shares=4)
    assert [item[0] for item in items_of(work)[0]] == [0, 0, 0, 0, 1]
    unfinished = dataclasses.replace(work, first=work.first[:-1])
    assert bool(attend(q, pool, unfinished)[0].isnan().all())
    assert work.arrivals_BG.tolist() == [[3], [0]]


@pytest.mark.parametrize("window", [1, 16, 33, *nightly(7, 150)])
@pytest.mark.parametrize(("page_size", "block_n"), [(16, 16), (6, 32), *nightly((32, 16))])
def test_decode_sees_its_window_and_nothing_else(page_size, block_n, window):
    pool, q = Pool(LENS, page_size, 2, 64, spare=2), queries(len(LENS), 4, 64)
    for row, length in enumerate(LENS):
        pool.forget(row, length - window)
    work = plan(pool, 2, window, dataclasses.replace(SMALL, block_n=block_n))
    out = attend(q, pool, work)
    assert relative(out, exact_decode(q, pool, LENS, window)) < 1e-5
    keys, values = pool.without_nan()
    twin_plan = plan_decode(pool.table, pool.lens, page_size, window, 100, torch.float32)
    twin = paged_decode_attention(
        q, keys, values, pool.table, pool.lens, scale=SCALE, window=window, max_context=100, plan=twin_plan
    )
    torch.testing.assert_close(out, twin, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("dim", [80, 128, *nightly(64, 96, 256)])
def test_decode_for_dtypes_and_head_dimensions(dim, dtype, bound):
    pool, q = Pool([70, 33], 16, 1, dim, dtype), queries(2, 4, dim, dtype)
    out = attend(q, pool, plan(pool, 1))
    assert out.dtype == dtype
    assert relative(out, exact_decode(q, pool, [70, 33], None)) < bound


def test_decode_without_a_plan_makes_its_own(monkeypatch):
    pool, q = Pool(LENS, 16, 2, 64), queries(len(LENS), 4, 64)
    if DEVICE == "cpu":

        class Properties:
            multi_processor_count = 4

        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    out = decode_attention(q, pool.k, pool.v, pool.table, pool.lens, scale=SCALE, window=None)
    assert relative(out, exact_decode(q, pool, LENS, None)) < 1e-5


def test_row_without_context_gives_zeros_and_changes_no_other():
    pool, q = Pool([40, 0, 33], 16, 1, 64), queries(3, 4, 64)
    for shares, window in itertools.product((1, 2, 6), (None, 16)):
        out = attend(q, pool, plan(pool, 1, window, shares=shares))
        assert bool((out[1] == 0).all())
        rows = [0, 2]
        expected = torch.stack([exact(q[r], pool.contexts[r], [40, 0, 33][r] - 1, window) for r in rows])
        assert relative(out[rows], expected) < 1e-5


def test_every_output_is_written_and_nothing_stale_is_read(poisoned_memory):
    # Outputs and parts start as NaN. Cache slots outside the contexts are NaN anyway.
    pool, q = Pool(LENS, 32, 2, 80), queries(len(LENS), 6, 80)
    for fused in (True, False):
        out = attend(q, pool, plan(pool, 2, config=dataclasses.replace(SMALL, fused=fused), shares=5))
        assert relative(out, exact_decode(q, pool, LENS, None)) < 1e-5


def test_a_plan_serves_all_layers_and_repeats_bit_for_bit():
    pools = [Pool(LENS, 16, 2, 64, seed=seed) for seed in (1, 1, 2)]
    q = queries(len(LENS), 4, 64)
    work = plan(pools[0], 2, shares=4)
    outs = [attend(q, layer, work) for layer in pools]
    assert not bool(work.arrivals_BG.any())
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert relative(outs[2], exact_decode(q, pools[2], LENS, None)) < 1e-5


def test_chunked_result_does_not_depend_on_the_other_rows():
    pool, q = Pool(LENS, 16, 1, 64), queries(len(LENS), 4, 64)
    config = dataclasses.replace(SMALL, chunk=32)
    together = attend(q, pool, plan(pool, 1, config=config, max_context=112))
    for row in range(len(LENS)):
        lens = pool.lens[row : row + 1].contiguous()
        work = plan_decode_work(lens, 1, group=1, window=None, config=config, max_context=112, multiprocessors=4)
        alone = decode_attention(
            q[row : row + 1], pool.k, pool.v, pool.table[row : row + 1], lens, scale=SCALE, window=None, work=work
        )
        assert torch.equal(alone[0], together[row])
    assert relative(together, exact_decode(q, pool, LENS, None)) < 1e-5


def test_decode_takes_strided_queries_tables_and_int64_lengths():
    pool = Pool(LENS, 16, 2, 64)
    qkv = queries(len(LENS), 12, 64)
    q = qkv[:, :8]
    wide = torch.full((len(LENS), 20), -7, dtype=torch.int32, device=DEVICE)
    wide[:, : pool.table.shape[1]] = pool.table
    pool.table, pool.lens = wide[:, : pool.table.shape[1]], pool.lens.long()
    assert relative(attend(q, pool, plan(pool, 2)), exact_decode(q, pool, LENS, None)) < 1e-5


# --- prefill ---------------------------------------------------------------------------------------------------------


def prefill(q, pool, window, config=TINY, max_query=40, dtype=torch.int32):
    starts = torch.tensor([0, *itertools.accumulate(PIECES)], dtype=dtype, device=DEVICE)
    return prefill_attention(
        q,
        pool.k,
        pool.v,
        pool.table,
        starts,
        pool.lens.to(dtype),
        max_query=max_query,
        scale=SCALE,
        window=window,
        config=config,
    )


@pytest.mark.parametrize(("page_size", "block_n"), [(16, 16), (6, 32), *nightly((32, 16))])
@pytest.mark.parametrize("window", [None, 1, 33, *nightly(7, 150)])
def test_prefill_chunks_see_their_past_and_not_their_future(window, page_size, block_n):
    pool, q = Pool(CONTEXTS, page_size, 1, 64), queries(sum(PIECES), 2, 64)
    out = prefill(q, pool, window, dataclasses.replace(TINY, block_n=block_n))
    assert relative(out, exact_prefill(q, pool, window)) < 1e-5
    keys, values = pool.without_nan()
    starts = itertools.accumulate(PIECES[:-1], initial=0)
    chunks = list(zip(starts, PIECES, CONTEXTS, strict=True))
    twin = paged_prefill_attention(
        q.cpu(), keys.cpu(), values.cpu(), pool.table.cpu(), chunks, scale=SCALE, window=window
    )
    torch.testing.assert_close(out.cpu(), twin, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("block_m", [16, 64])
def test_prefill_for_head_groups_and_blocks(block_m, heads, kv_heads):
    pool, q = Pool(CONTEXTS, 16, kv_heads, 64), queries(sum(PIECES), heads, 64)
    config = dataclasses.replace(TINY, block_m=block_m, block_n=32)
    assert relative(prefill(q, pool, None, config), exact_prefill(q, pool, None)) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)])
def test_prefill_for_dtypes(dtype, bound, dim=80):
    pool, q = Pool(CONTEXTS, 16, 1, dim, dtype), queries(sum(PIECES), 2, dim, dtype)
    out = prefill(q, pool, None, config=None)
    assert out.dtype == dtype
    assert relative(out, exact_prefill(q, pool, None)) < bound


def test_prefill_reads_nothing_before_the_window():
    pool, q = Pool(CONTEXTS, 16, 1, 64), queries(sum(PIECES), 2, 64)
    for row, (length, context) in enumerate(zip(PIECES, CONTEXTS, strict=True)):
        pool.forget(row, context - length - 5 + 1)
    assert relative(prefill(q, pool, 5), exact_prefill(q, pool, 5)) < 1e-5


def test_prefill_takes_a_loose_bound_int64_lengths_and_strided_queries():
    pool, qkv = Pool(CONTEXTS, 16, 1, 64), queries(sum(PIECES), 6, 64)
    q = qkv[:, :4]
    out = prefill(q, pool, 20, max_query=200, dtype=torch.int64)
    assert relative(out, exact_prefill(q, pool, 20)) < 1e-5
