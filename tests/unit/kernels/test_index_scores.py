"""Scores of an indexer by the kernel, against float64; and sparse attention over the tokens that they choose."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from rollout_kernels.attention import index_scores as twin
from rollout_kernels.attention.latent import latent_decode_attention, plan_latent_decode
from rollout_kernels.attention.triton_index_scores import index_scores
from rollout_kernels.attention.triton_latent_decode import decode_latents, plan_latent_work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Triton's compiler needs no GPU, but for what loads the code.
SPANS = """
    import torch
    from rollout_kernels.attention.triton_index_scores import index_scores
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from rollout.engine.step.compile_ahead import compile_kernels_of
    from scripts.check.compile_kernels import OfflineDriver

    compiled, device = [], OfflineDriver(90)
    knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"]) and None
    device.launcher_cls = lambda source, metadata: None
    driver.set_active(device)
    CompiledKernel.run = property(lambda kernel: None)
    q, weights, positions = torch.zeros(9, 4, 17), torch.zeros(9, 3), torch.arange(9)
    keys, table = torch.zeros(8, 4, 1, 17), torch.zeros(3, 5, dtype=torch.int32)

    def spans():
        for row, (begin, end) in enumerate(((0, 1), (1, 4), (4, 9))):
            some = slice(begin, end)
            pages = table[row, :3].expand(end - begin, -1)
            index_scores(q[some, :3], weights[some], keys, pages, positions[some])

    compile_kernels_of(spans, threads=1)
    assert len(compiled) == 1, compiled
"""


def exact(q_THD, weights_TH, keys_PS1D, table_TP, positions_T, relu):
    """Token by token and position by position."""
    size = keys_PS1D.shape[1]
    out = torch.full((len(q_THD), table_TP.shape[1] * size), -torch.inf, dtype=torch.float64)
    for t, position in enumerate(positions_T.tolist()):
        for n in range(position + 1):
            key = keys_PS1D[table_TP[t, n // size], n % size, 0].double().cpu()
            products = q_THD[t].double().cpu() @ key
            out[t, n] = ((products.relu() if relu else products) * weights_TH[t].double().cpu()).sum()
    return out


@pytest.mark.parametrize(("shared", "relu"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize(("heads", "dim", "page_size", "pages"), [(4, 12, 7, 30), (20, 32, 16, 9), (70, 16, 16, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_float64(heads, dim, page_size, pages, shared, relu, dtype):
    """Rows of their own, or tokens of one row; the queries lie apart, and what no token sees is not a number."""
    torch.manual_seed(heads)
    tokens, width = 3, pages * page_size
    q_TXD = torch.randn(tokens, heads + 1, dim).to(DEVICE, dtype)
    q_THD, weights_TH = q_TXD[:, :heads], torch.randn(tokens, heads, device=DEVICE)
    keys_PS1D = torch.randn(tokens * pages + 1, page_size, 1, dim).to(DEVICE, dtype)
    positions_T = torch.tensor([0, width // 2, width - 2], device=DEVICE)
    table_TP = torch.randperm(tokens * pages, dtype=torch.int32).view(tokens, pages).to(DEVICE)
    if shared:
        table_TP = table_TP[:1].expand(tokens, -1)
    keys_PS1D[table_TP[-1, -1], -1] = torch.nan
    expected = exact(q_THD, weights_TH, keys_PS1D, table_TP, positions_T, relu)
    seen = torch.arange(width) <= positions_T.cpu()[:, None]
    for op in (index_scores, twin.index_scores):
        got = op(q_THD, weights_TH, keys_PS1D, table_TP, positions_T, relu).cpu()
        assert got.dtype == torch.float32 and torch.equal(got > -torch.inf, seen)
        torch.testing.assert_close(got[seen].double(), expected[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_tokens_are_pages_of_one_token(dtype):
    """Attention over places of the cache in any order, of which only the first ones count."""
    torch.manual_seed(1)
    rows, heads, rank, width, most = 3, 20, 32, 40, 23
    cache = torch.randn(5, 16, 1, width).to(DEVICE, dtype)
    slots = torch.stack([torch.randperm(80)[:most] for _ in range(rows)]).int().to(DEVICE)
    counts = torch.tensor([23, 1, 9], dtype=torch.int32, device=DEVICE)
    q = torch.randn(rows, heads, width).to(DEVICE, dtype)
    flat = cache.flatten(0, 1)[:, None]
    work = plan_latent_work(counts, heads, dtype, multiprocessors=3)
    got = decode_latents(q, flat, slots, counts, rank=rank, scale=0.2, work=work)
    plan = plan_latent_decode(slots, counts, flat, heads=heads, max_context=most)
    other = latent_decode_attention(q, flat, slots, counts, rank=rank, scale=0.2, plan=plan)
    for row in range(rows):
        latents = cache.flatten(0, 2)[slots[row, : counts[row]].long()].double()
        weights = (q[row].double() @ latents.T * 0.2).softmax(-1)
        bound = 1e-4 if dtype == torch.float32 else 2e-2
        for mine in (got, other):
            torch.testing.assert_close(mine[row].double(), weights @ latents[:, :rank], rtol=bound, atol=bound)


def test_spans_that_begin_anywhere_take_one_kernel(tmp_path):
    """Nothing is compiled while serving, whatever the first token and the row of a span."""
    script = tmp_path / "spans.py"
    script.write_text(textwrap.dedent(SPANS))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
