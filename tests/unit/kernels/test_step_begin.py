"""The kernels at the begin of a decode step equal their torch twins."""

import pytest
import torch
import torch.nn.functional as F
from rollout_kernels import rope_cos_sin, step
from rollout_kernels.norm_rope.triton_elementwise import embed_rope
from rollout_kernels.step import DecodeInput
from rollout_kernels.step.triton_begin import begin_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STALE = 77


def state(lengths: list[int], page_size: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row state for row 0 (padding) and a row for each length; pages count up from 1000 times the row."""
    ints = torch.zeros(len(lengths) + 1, 6, dtype=torch.int64)
    pages = torch.zeros(len(lengths) + 1, columns, dtype=torch.int32)
    for row, length in enumerate(lengths, 1):
        ints[row, 0], ints[row, 1] = 2**31 + row, length
        used = -(-length // page_size)
        pages[row, :used] = 1000 * row + torch.arange(used, dtype=torch.int32)
    return ints, pages


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [[0], [3, 4, 5], [16, 31, 32, 0, 1], [2100, 2048 * 16 - 1, 16_384, 17]])
def test_begin_step_is_its_twin_bit_for_bit(page_size, lengths):
    lengths = [length // 16 * page_size + length % page_size for length in lengths]
    most = max(lengths) // page_size + 3
    ints, pages = state(lengths, page_size, most)
    order = torch.randperm(len(lengths)) + 1
    rows = torch.cat([order, torch.zeros(3, dtype=torch.int64)])  # padding comes last
    new_pages = torch.zeros(len(rows), dtype=torch.int32)
    for i, row in enumerate(order.tolist()):
        if lengths[row - 1] % page_size == 0:
            new_pages[i] = 500_000 + i
    columns = most - 1
    options = {"last": 0, "length": 1, "page_size": page_size, "columns": columns}
    twin_pages = pages.clone()
    expected = step.begin_step(rows, new_pages, ints, twin_pages, **options)
    gpu_pages = pages.to(DEVICE)
    table = torch.full((len(rows) + 2, most), STALE, dtype=torch.int32, device=DEVICE)
    got = DecodeInput(*begin_step(rows.to(DEVICE), new_pages.to(DEVICE), ints.to(DEVICE), gpu_pages, table, **options))
    for name in ("token_ids_B", "positions_B", "kv_slots_B", "context_lens_B"):
        mine, theirs = getattr(got, name).cpu(), getattr(expected, name)
        assert mine.dtype == theirs.dtype == torch.int64 and torch.equal(mine, theirs), name
        assert getattr(got, name).is_contiguous()
        assert getattr(got, name).data_ptr() % 16 == 0, "at another address Triton compiles its readers once more"
    assert torch.equal(gpu_pages.cpu(), twin_pages), "the rows' tables gain the opened pages and nothing else"
    needed = torch.arange(columns) <= (expected.positions_B // page_size)[:, None]
    mine, theirs = got.page_table_BC.cpu(), expected.page_table_BC
    assert mine.shape == theirs.shape and torch.equal(mine[needed], theirs[needed])
    untouched = (mine[~needed], table[len(rows) :], table[:, columns:])
    assert all((part == STALE).all() for part in untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "hidden", "dim"), [(1, 64, 16), (5, 1100, 24), (3, 2048, 128)])
def test_embed_rope_is_embedding_and_rope(rows, hidden, dim, dtype):
    generator = torch.Generator().manual_seed(rows)
    embed = torch.randn(50, hidden, generator=generator).to(DEVICE, dtype)
    token_ids = torch.randint(0, 50, (rows,), generator=generator).to(DEVICE)
    positions = torch.tensor([0, 40_959, 1_000_003, 7, 131_071])[-rows:].to(DEVICE)
    half = dim // 2
    inv_freq = (10_000.0 ** (-torch.arange(half) / half)).repeat(2).to(DEVICE)
    factor = torch.full((half,), 1.25)
    sign = torch.cat([-factor, factor]).to(DEVICE)
    residual, (cos, sin) = embed_rope(token_ids, positions, embed, inv_freq, sign)
    assert torch.equal(residual, F.embedding(token_ids, embed)) and residual.dtype == dtype
    expected_cos, expected_sin = rope_cos_sin(positions, inv_freq, sign)
    assert cos.shape == expected_cos.shape and cos.is_contiguous() and sin.is_contiguous()
    # Cosines of different libraries differ in the last bit.
    assert torch.allclose(cos, expected_cos, rtol=0, atol=3e-7) and torch.allclose(sin, expected_sin, rtol=0, atol=3e-7)


@pytest.mark.gpu
def test_cosines_are_torchs_bit_for_bit():
    positions = torch.cat([torch.arange(4096), torch.randint(0, 1 << 20, (4096,))]).cuda()
    inv_freq = (1e6 ** (-torch.arange(64) / 64)).repeat(2).cuda()
    sign = torch.cat([-torch.ones(64), torch.ones(64)]).cuda()
    embed = torch.zeros(1, 64, device="cuda")
    _, (cos, sin) = embed_rope(torch.zeros_like(positions), positions, embed, inv_freq, sign)
    expected_cos, expected_sin = rope_cos_sin(positions, inv_freq, sign)
    same = ((cos == expected_cos).double().mean() + (sin == expected_sin).double().mean()).item() / 2
    assert same > 0.999, same
    assert (cos - expected_cos).abs().max() < 1.5e-7 and (sin - expected_sin).abs().max() < 1.5e-7
