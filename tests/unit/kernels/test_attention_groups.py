"""Decode attention that reads shared pages once: the plan, and results against float64 and rows on their own."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from rollout_kernels.attention.segments import SHARED_TILES, SharedTile, make_segments
from rollout_kernels.attention.triton_decode import decode_attention, default_decode_config
from rollout_kernels.attention.triton_decode_plan import DecodeConfig, plan_decode_work
from rollout_kernels.common.fp8 import quantize_heads

from tests.support.kernels.attention_cases import DEVICE, SCALE, SMALL, Pool, exact_decode, queries, relative
from tests.support.kernels.grids import nightly

PAGE = 8


def shared_pool(lens, common, kv_heads=2, dim=64, dtype=torch.float32):
    """A pool in which each row has its first `common[row]` positions in the pages of the row before."""
    pool = Pool(lens, PAGE, kv_heads, dim, dtype)
    for row, positions in enumerate(common, start=1):
        pages = positions // PAGE
        assert positions % PAGE == 0 and positions < min(lens[row - 1], lens[row])
        pool.table[row, :pages] = pool.table[row - 1, :pages]
        for mine, other in zip(pool.contexts[row], pool.contexts[row - 1], strict=True):
            mine[:positions] = other[:positions]
    return pool


def work_of(pool, segments, heads, window=None, config=SMALL, shares=3):
    kv_heads = pool.k.shape[2]
    return plan_decode_work(
        pool.lens,
        kv_heads,
        group=heads // kv_heads,
        window=window,
        config=dataclasses.replace(config, programs_per_sm=1),
        max_context=max(pool.lens.tolist()),
        multiprocessors=shares * kv_heads,
        segments_SW=None if segments is None else torch.from_numpy(segments).to(DEVICE),
    )


def attend(q, pool, work, scales=None, caches=None):
    k, v = caches or (pool.k, pool.v)
    return decode_attention(
        q, k, v, pool.table, pool.lens, scale=SCALE, window=work.window, scales_P2GS=scales, work=work
    )


# --- segments --------------------------------------------------------------------------------------------------------


def shared_of(segments, size):
    return [tuple(segment) for segment in segments[size:].tolist() if segment[1]]


def test_a_group_is_cut_into_blocks_and_its_rows_begin_after_it():
    segments = make_segments([96, 96, 96, 96, 0], 8, 4, 32)
    assert shared_of(segments, 8) == [(0, 4, 0, 96, 0)]  # a block of one row shares nothing
    assert segments[:8, 2].tolist() == [96, 96, 96, 96, 0, 0, 0, 0]
    assert segments[:8, 4].tolist() == [9, 9, 9, 9, 0, 0, 0, 0]


def test_groups_below_a_common_prefix_are_a_second_level():
    segments = make_segments([160, 64, 160, 160], 5, 8, 32)
    assert shared_of(segments, 5) == [(0, 5, 0, 64, 0), (0, 2, 64, 160, 6), (2, 3, 64, 160, 6)]
    assert segments[:5, 2].tolist() == [160] * 5 and segments[:5, 4].tolist() == [7, 7, 8, 8, 8]


def test_blocks_end_where_groups_do():
    assert shared_of(make_segments([160, 160, 64, 160, 160], 6, 4, 32), 6) == [
        (0, 3, 0, 64, 0), (0, 3, 64, 160, 7), (3, 3, 0, 64, 0), (3, 3, 64, 160, 9),
    ]  # fmt: skip


@pytest.mark.parametrize("common", [[], [0, 0], [24, 24]])
def test_rows_that_share_little_have_no_segments(common):
    assert make_segments(common, 4, 4, 32) is None
    assert make_segments([96] * 3, 4, 1, 32) is None  # the heads of one row fill a tile


@pytest.mark.parametrize("seed", range(30))
def test_segments_of_any_rows_cover_each_row_once_and_say_the_truth(seed):
    rng = random.Random(seed)
    rows, at_once = rng.randint(2, 40), rng.choice([2, 3, 4, 8])
    common = [rng.choice([0, 16, 64, 64, 128, 512, 520]) for _ in range(rows - 1)]
    size = rows + rng.randint(0, 4)
    segments = make_segments(common, size, at_once, 32)
    if segments is None:
        return
    for row in range(size):
        path, position, at = [], segments[row, 2], segments[row, 4]
        while at:
            first, count, begin, end, before = segments[at - 1].tolist()
            assert first <= row < first + count <= rows and 2 <= count <= at_once and begin < end == position
            assert all(common[i] >= end for i in range(first, first + count - 1))
            path.append(at)
            position, at = begin, before
        assert position == 0 and len(path) <= 2


# --- attention -------------------------------------------------------------------------------------------------------

LENS = [100, 83, 81, 90, 17, 130, 101]
COMMON = [80, 80, 80, 0, 16, 96]


@pytest.mark.parametrize("window", [None, 30, *nightly(75)])
@pytest.mark.parametrize(
    ("heads", "block_m", "shares", "fused"),
    [
        (4, 16, 5, True),
        (8, 32, 1, True),
        (8, 32, 40, False),
        *nightly(
            *(
                (*tile, *split)
                for tile in ((4, 16), (8, 32), (6, 16), (2, 16))
                for split in ((1, True), (5, True), (40, False), (40, True), (3, False))
            )
        ),
    ],
)
def test_shared_pages_give_what_they_give_alone(heads, block_m, shares, fused, window):
    pool, q = shared_pool(LENS, COMMON), queries(len(LENS), heads, 64)
    config = dataclasses.replace(SMALL, block_m=block_m, block_own=16, fused=fused)
    segments = make_segments(COMMON, len(LENS), config.rows_at_once(heads // 2), 16)
    assert segments is not None
    work = work_of(pool, segments, heads, window, config, shares)
    assert relative(attend(q, pool, work), exact_decode(q, pool, LENS, window)) < 1e-5
    assert not bool(work.arrivals_BG.any())


@pytest.mark.parametrize("shares", [2, 13, *nightly(1, 3, 5, 7, 30)])
@pytest.mark.parametrize("fused", [True, False])
def test_rows_with_drafts_behind_them(shares, fused):
    """Each row is followed by three drafts of it, which share all of its positions but those that the step writes."""
    lens, common = [], []
    for first in (150, 97, 33, 241, 64):
        lens += range(first + 1, first + 5)
        common += [*[first // PAGE * PAGE] * 3, 0]
    pool = shared_pool(lens, common[:-1])
    segments = make_segments(common[:-1], len(lens), 4, 16)
    assert len(shared_of(segments, len(lens))) == 5
    config = dataclasses.replace(SMALL, block_m=16, fused=fused)
    q = queries(len(lens), 8, 64)
    work = work_of(pool, segments, 8, config=config, shares=shares)
    assert relative(attend(q, pool, work), exact_decode(q, pool, lens, None)) < 1e-5
    # No share has many more items than it has tiles, also counted with what an item costs beside.
    first, items = work.first.tolist(), work.items.tolist()
    assert first[0] == 0 and first == sorted(first)
    took = [sum(2 * (sharing == 1) + end - begin for _, begin, end, *_, sharing, _ in items[a:b])
            for a, b in zip(first, first[1:], strict=False)]  # fmt: skip
    assert max(took) <= max(3, -(-sum(took) // shares) + 3)


def test_a_tile_of_64_heads_reads_the_prefix_of_eight_rows_once(monkeypatch):
    lens, common = [100, 83, 81, 90, 87, 130, 101, 96], [80] * 7
    monkeypatch.setitem(SHARED_TILES, False, SharedTile(64, num_warps=4))
    config = default_decode_config(64, torch.float32, len(lens), shared=True)
    assert config.num_warps == 4 and config.rows_at_once(8) == 8
    pool, q = shared_pool(lens, common), queries(len(lens), 16, 64)
    segments = make_segments(common, len(lens), config.rows_at_once(8), 16)
    assert shared_of(segments, len(lens)) == [(0, 8, 0, 80, 0)]
    work = work_of(pool, segments, 16, config=dataclasses.replace(config, block_n=16, min_tiles=1))
    assert relative(attend(q, pool, work), exact_decode(q, pool, lens, None)) < 1e-5


@pytest.mark.parametrize("shares", [1, 6])
def test_two_levels_and_padding(shares):
    lens, common = [200, 190, 185, 199, 170, 0, 0], [160, 160, 64, 160, 0, 0]
    pool, q = shared_pool([*lens[:5], 1, 1], common), queries(len(lens), 4, 64)
    pool.lens[5:] = 0
    segments = make_segments(common, len(lens), 8, 16)
    assert len(shared_of(segments, len(lens))) == 3
    work = work_of(pool, segments, 4, shares=shares, config=dataclasses.replace(SMALL, block_m=16))
    out = attend(q, pool, work)
    assert relative(out[:5], exact_decode(q[:5], pool, lens[:5], None)) < 1e-5
    assert bool((out[5:] == 0).all())


@pytest.mark.parametrize("window", [60, *nightly(None)])
def test_codes_are_shared_too(window):
    pool, q = shared_pool(LENS, COMMON, dim=64), queries(len(LENS), 8, 64)
    (k, k_scales), (v, v_scales) = quantize_heads(pool.k.nan_to_num(0.0)), quantize_heads(pool.v.nan_to_num(0.0))
    scales = torch.stack((k_scales, v_scales), 1).transpose(2, 3).contiguous()
    config = dataclasses.replace(SMALL, block_m=16)
    results = [
        attend(q, pool, work_of(pool, segments, 8, window, config), scales, (k, v))
        for segments in (None, make_segments(COMMON, len(LENS), config.rows_at_once(4), 16))
    ]
    assert relative(results[1], results[0].double().cpu()) < 1e-5


@pytest.fixture
def rounded_dots(monkeypatch):
    """Products of tiles by the interpreter, added in float64: on some CPUs a row's last bit depends on its place."""
    matmul = np.matmul

    def rounded(a, b, dtype):
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", rounded)


@pytest.mark.usefixtures("rounded_dots")
@pytest.mark.parametrize("window", [50, *nightly(None)])
def test_in_chunks_the_bits_of_a_row_do_not_depend_on_who_shares_with_it(window):
    config = DecodeConfig(block_n=16, num_warps=4, num_stages=2, chunk=32)
    pool, q = shared_pool(LENS, COMMON), queries(len(LENS), 4, 64)
    alone = attend(q, pool, work_of(pool, None, 4, window, config))
    for common in (COMMON, [80, 0, 80, 0, 0, 96], [16, 16, 16, 0, 16, 16]):
        segments = make_segments(common, len(LENS), config.rows_at_once(2), 16)
        assert torch.equal(attend(q, pool, work_of(pool, segments, 4, window, config)), alone)
