"""The torch twins of attention against attention written out row by row."""

import random

import pytest
import torch
from rollout_kernels import paged_decode_attention, paged_prefill_attention, plan_decode, write_kv

DIM = 6
SCALE = 0.3


class Pool:
    """A cache with random contents in shuffled pages, and the contexts that lie in it."""

    def __init__(self, lens: list[int], page_size: int, kv_heads: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        width = -(-max(lens) // page_size)
        pages = list(range(1, len(lens) * width + 1))
        random.Random(seed).shuffle(pages)
        shape = (len(pages) + 1, page_size, kv_heads, DIM)
        self.k = torch.randn(shape, generator=generator) * 30  # large, so that a read outside a context has an effect
        self.v = torch.randn(shape, generator=generator) * 30
        used = [-(-n // page_size) for n in lens]
        tables = [pages[r * width : r * width + n] + [0] * (width - n) for r, n in enumerate(used)]
        self.table = torch.tensor(tables, dtype=torch.int32)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.contexts = [(torch.randn(n, kv_heads, DIM), torch.randn(n, kv_heads, DIM)) for n in lens]
        for row, (k, v) in enumerate(self.contexts):
            slots = [int(self.table[row, p // page_size]) * page_size + p % page_size for p in range(lens[row])]
            write_kv(k, v, self.k, self.v, torch.tensor(slots, dtype=torch.int64))


def _expected(q_HD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, window: int | None) -> torch.Tensor:
    first = 0 if window is None else max(0, position - window + 1)
    group = q_HD.shape[0] // k.shape[1]
    out = []
    for head, q in enumerate(q_HD.double()):
        keys = k[first : position + 1, head // group].double()
        weights = torch.softmax(keys @ q * SCALE, 0)
        out.append(weights @ v[first : position + 1, head // group].double())
    return torch.stack(out).float()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 64, 1000])
def test_decode_sees_its_context_and_nothing_else(window: int | None, page_size: int, kv_heads: int) -> None:
    lens = [1, 2, 16, 17, 31, 64, 65, 90]
    pool = Pool(lens, page_size, kv_heads)
    q = torch.randn(len(lens), 4, DIM)
    for bound in (90, 97):
        out = paged_decode_attention(
            q, pool.k, pool.v, pool.table, pool.lens, scale=SCALE, window=window, max_context=bound
        )
        for row, (k, v) in enumerate(pool.contexts):
            torch.testing.assert_close(out[row], _expected(q[row], k, v, lens[row] - 1, window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 16])
def test_row_without_context_is_finite_and_changes_no_other(window: int | None) -> None:
    pool = Pool([40, 33], page_size=8, kv_heads=1)
    q = torch.randn(3, 2, DIM)

    def attend(table: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        rows = len(lens)
        return paged_decode_attention(q[:rows], pool.k, pool.v, table, lens, scale=SCALE, window=window, max_context=40)

    alone = attend(pool.table, pool.lens)
    padded = attend(torch.cat((pool.table, torch.zeros_like(pool.table[:1]))), torch.tensor([40, 33, 0]).int())
    assert bool(padded.isfinite().all())
    torch.testing.assert_close(padded[:2], alone)


def test_window_gathers_only_the_pages_that_it_can_touch() -> None:
    table, lens = torch.zeros(3, 1000, dtype=torch.int32), torch.full((3,), 16_000, dtype=torch.int32)
    plan = plan_decode(table, lens, 16, window=33, max_context=16_000, dtype=torch.float32)
    assert plan.pages_N.shape == (3 * 3,)
    assert plan.bias_B11C.shape == (3, 1, 1, 3 * 16)


@pytest.mark.parametrize("window", [None, 20])
def test_attention_never_reads_a_tensor_on_the_host(window: int | None) -> None:
    # Meta tensors have no values: reading one raises.
    cache = torch.empty(50, 8, 1, DIM, device="meta")
    q = torch.empty(4, 2, DIM, device="meta")
    table = torch.empty(4, 12, dtype=torch.int32, device="meta")
    lens = torch.empty(4, dtype=torch.int32, device="meta")
    write_kv(q[:, :1], q[:, :1], cache, cache, torch.empty(4, dtype=torch.int64, device="meta"))
    out = paged_decode_attention(q, cache, cache, table, lens, scale=1.0, window=window, max_context=90)
    assert out.shape == q.shape
    chunks = [(0, 3, 40), (3, 1, 1)]
    assert paged_prefill_attention(q, cache, cache, table, chunks, scale=1.0, window=window).shape == q.shape


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 9, 300])
def test_prefill_chunks_see_their_past_and_not_their_future(window: int | None, kv_heads: int) -> None:
    lens = [1, 40, 530, 17]
    pool = Pool(lens, page_size=6, kv_heads=kv_heads)
    pieces = [1, 13, 520, 17]
    starts = [0, 1, 14, 534]
    q = torch.randn(sum(pieces), 4, DIM)
    chunks = list(zip(starts, pieces, lens, strict=True))
    out = paged_prefill_attention(q, pool.k, pool.v, pool.table, chunks, scale=SCALE, window=window)
    for row, (start, length, context) in enumerate(chunks):
        for i in range(0, length, 1 if length < 100 else 37):
            expected = _expected(q[start + i], *pool.contexts[row], context - length + i, window)
            torch.testing.assert_close(out[start + i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_caches_are_close_to_float32(dtype: torch.dtype) -> None:
    pool = Pool([50, 7], page_size=8, kv_heads=2)
    q = torch.randn(2, 4, DIM)
    wide = paged_decode_attention(q, pool.k, pool.v, pool.table, pool.lens, scale=SCALE, window=20, max_context=50)
    k, v = pool.k.to(dtype), pool.v.to(dtype)
    narrow = paged_decode_attention(q.to(dtype), k, v, pool.table, pool.lens, scale=SCALE, window=20, max_context=50)
    assert narrow.dtype == dtype
    torch.testing.assert_close(narrow.float(), wide, rtol=0.05, atol=0.05)


def test_written_keys_and_values_lie_in_their_slots_only() -> None:
    k_cache, v_cache = torch.zeros(4, 3, 2, DIM), torch.zeros(4, 3, 2, DIM)
    k, v = torch.randn(2, 2, DIM), torch.randn(2, 2, DIM)
    write_kv(k, v, k_cache, v_cache, torch.tensor([10, 3]))
    assert torch.equal(k_cache[3, 1], k[0]) and torch.equal(v_cache[1, 0], v[1])
    assert int((k_cache != 0).any(-1).any(-1).sum()) == 2
