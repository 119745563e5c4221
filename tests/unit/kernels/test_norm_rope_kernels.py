"""The kernels between the matrix products of a decode step, against float64 and their torch twins."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from rollout_kernels import apply_rope, rms_norm, rope_cos_sin
from rollout_kernels import gated as gated_twin
from rollout_kernels.moe.triton_norm_router import norm_route, router_scratch
from rollout_kernels.norm_rope import triton_elementwise
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm, embed_rope, finish_qkv, gated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm(parts, rows, hidden, dtype):
    residual = torch.randn(rows, hidden).to(DEVICE, dtype)
    weight = torch.rand(hidden).to(DEVICE, dtype)
    partial = torch.randn(parts, rows, hidden, device=DEVICE) if parts else None
    added = residual.double() + (partial.double().sum(0) if parts else 0)
    got = add_rms_norm(residual, partial, weight, 1e-6)
    exact = 1e-6 if dtype == torch.float32 else 6e-3
    assert relative(residual, added) < exact
    expected = residual.double() * (residual.double().pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert relative(got, expected) < exact


def test_no_two_warps_of_a_norm_have_the_same_values(monkeypatch):
    launches = []
    kernel = {(1,): lambda *_, num_warps, BLOCK, **__: launches.append((BLOCK, num_warps))}  # noqa: N803
    monkeypatch.setattr(triton_elementwise, "_add_rms_norm_kernel", kernel)
    for hidden in (24, 64, 96, 1024, 2048, 8192):
        add_rms_norm(torch.zeros(1, hidden), None, torch.ones(hidden), 1e-6)
    assert [warps for _, warps in launches] == [1, 1, 1, 8, 16, 16]
    assert all(32 * warps <= max(32, block) for block, warps in launches)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    ("output_norm", "scale", "factor"), [(True, 1.0, None), (False, 0.22, None), (True, 3.5, 0.75), (False, 1.0, 2.5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_normalised_and_scaled_before_it_is_added(normed, offset, output_norm, scale, factor, dtype):
    """The residual is rounded once more than it would be in one sum; without a norm the kernel returns it."""
    residual = torch.randn(3, 96).to(DEVICE, dtype)
    weight, output_weight = (torch.randn(96).to(DEVICE, dtype) for _ in range(2))
    parts = torch.randn(2, 3, 96, device=DEVICE) * 5

    def norm(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * (of.double() + offset)

    added = norm(parts.double().sum(0), output_weight) if output_norm else parts.double().sum(0)
    expected = (residual.double() + scale * added) * (factor or 1.0)
    factor_1 = None if factor is None else torch.tensor([factor]).to(DEVICE, dtype)
    how = (1e-6, None, offset, output_weight if output_norm else None, scale, factor_1)
    got = add_rms_norm(residual, parts, weight if normed else None, *how)
    exact = 1e-6 if dtype == torch.float32 else 6e-3
    assert relative(residual, expected) < exact
    assert (got is residual) != normed
    if normed:
        assert relative(got, norm(residual.double(), weight)) < exact


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("width", [64, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(width, dtype, activation):
    gate_up = (torch.randn(3, 2 * width) * 4).to(DEVICE, dtype)
    gate_up[0, 0], gate_up[1, 0] = -100.0, 100.0
    got = gated(gate_up, activation=activation)
    assert got.dtype == dtype
    assert relative(got, gated_twin(gate_up.double(), activation)) < (1e-6 if dtype == torch.float32 else 6e-3)
    assert relative(got, gated_twin(gate_up, activation)) < (1e-6 if dtype == torch.float32 else 2e-3)


def test_a_whole_product_in_the_models_dtype_is_one_part():
    parts = torch.randn(1, 4, 96, device=DEVICE).bfloat16()
    residual, weight = torch.randn(4, 96, device=DEVICE).bfloat16(), torch.rand(96, device=DEVICE).bfloat16()
    other = residual.clone()
    assert torch.equal(add_rms_norm(residual, parts, weight, 1e-6), add_rms_norm(other, parts.float(), weight, 1e-6))
    assert torch.equal(residual, other)


@pytest.mark.parametrize(
    ("norm", "offset", "gated"), [(False, 0, False), (True, 0, False), (True, 1, True), (False, 0, True)]
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dim", "turned"), [(16, 16), (24, 12)])
def test_finish_qkv_is_norm_rope_and_a_write_to_the_cache(norm, offset, gated, bias, dim, turned):
    """With norms whose weights are stored less `offset`, and with gates of the queries."""
    rows, q_heads, kv_heads, parts = 3, 4, 2, 2
    partial = torch.randn(parts, rows, (q_heads * (1 + gated) + 2 * kv_heads) * dim, device=DEVICE)
    gates = torch.full((rows, q_heads, dim), float("nan"), device=DEVICE) if gated else None
    bias_W = torch.randn(partial.shape[2], device=DEVICE) if bias else None
    norm_2D = torch.rand(2, dim, device=DEVICE) if norm else None
    half = turned // 2
    inv_freq = (10_000.0 ** (-torch.arange(half) / half)).repeat(2).to(DEVICE)
    sign = torch.cat([-torch.ones(half), torch.ones(half)]).to(DEVICE)
    cos, sin = rope_cos_sin(torch.tensor([0, 5, 77], device=DEVICE), inv_freq, sign)
    k_cache, v_cache = (torch.full((4, 4, kv_heads, dim), float("nan"), device=DEVICE) for _ in range(2))
    slots = torch.tensor([3, 14, 8], device=DEVICE)
    caches = (k_cache, v_cache)
    got = finish_qkv(
        partial, bias_W, norm_2D, 1e-6, cos, sin, slots, *caches, q_heads, unit_offset=offset > 0, gates_MHD=gates
    )
    qkv = (partial.double().sum(0) + (bias_W.double() if bias else 0)).view(rows, -1, dim)
    if gated:
        with_gates = qkv[:, : 2 * q_heads].unflatten(1, (q_heads, 2))
        assert relative(gates, with_gates[:, :, 1]) < 1e-6
        qkv = torch.cat([with_gates[:, :, 0], qkv[:, 2 * q_heads :]], dim=1)
    qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
    if norm:
        weights = torch.cat([norm_2D[:1].expand(q_heads, -1), norm_2D[1:].expand(kv_heads, -1)]).double() + offset
        qk = qk * (qk.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weights
    (first, second), stays = qk[..., :turned].chunk(2, dim=-1), qk[..., turned:]
    angles = torch.tensor([0, 5, 77], device=DEVICE).double()[:, None] * inv_freq.double()
    qk = qk[..., :turned] * angles.cos()[:, None] + torch.cat([-second, first], -1) * angles.sin()[:, None]
    qk = torch.cat([qk, stays], dim=-1)
    assert relative(got, qk[:, :q_heads]) < 1e-5
    assert relative(k_cache.flatten(0, 1)[slots], qk[:, q_heads:]) < 1e-5
    assert relative(v_cache.flatten(0, 1)[slots], v) < 1e-6
    assert k_cache.flatten(0, 1).isnan().all(dim=(1, 2)).sum() == 16 - rows, "nothing else was written"


@pytest.mark.parametrize("value_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv", ["own", "keys", "shared"])
def test_values_are_normalised_or_the_keys_before_their_norm_or_not_written(kv, bias, value_norm):
    rows, q_heads, kv_heads, dim = 3, 5, 2, 24
    made = q_heads + {"own": 2, "keys": 1, "shared": 0}[kv] * kv_heads
    partial = torch.randn(2, rows, made * dim, device=DEVICE)
    bias_W = torch.randn(made * dim, device=DEVICE) if bias else None
    norm_2D = torch.rand(2, dim, device=DEVICE)
    cos, sin = torch.ones(rows, 1, dim, device=DEVICE), torch.zeros(rows, 1, dim, device=DEVICE)
    caches = [torch.full((4, 4, kv_heads, dim), float("nan"), device=DEVICE) for _ in range(2)]
    slots = torch.tensor([3, 14, 8], device=DEVICE)
    got = finish_qkv(
        partial, bias_W, norm_2D, 1e-6, cos, sin, slots, *caches, q_heads, kv=kv, value_norm=value_norm
    )  # fmt: skip
    heads = (partial.double().sum(0) + (bias_W.double() if bias else 0)).view(rows, made, dim)
    units = heads * (heads.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert relative(got, units[:, :q_heads] * norm_2D[0].double()) < 1e-5
    k_TGD, v_TGD = (cache.flatten(0, 1)[slots] for cache in caches)
    if kv == "shared":
        assert all(cache.isnan().all() for cache in caches)
    else:
        values = (units if value_norm else heads)[:, -kv_heads:]
        assert relative(k_TGD, units[:, q_heads : q_heads + kv_heads] * norm_2D[1].double()) < 1e-5
        assert relative(v_TGD, values) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_whose_weights_are_stored_less_one(dtype):
    residual, parts = torch.randn(3, 40).to(dtype), torch.randn(2, 3, 40)
    weight, router = torch.randn(40).to(dtype), torch.randn(8, 40).to(dtype)
    added = (residual.float() + parts.sum(0).to(dtype).float()).to(dtype)
    expected = rms_norm(added, weight, 1e-3, unit_offset=True)
    inputs = [tensor.to(DEVICE) for tensor in (parts, weight, router)]
    on_device = residual.to(DEVICE)
    scratch = router_scratch(8, on_device.device)
    routed = norm_route(on_device, *inputs[:2], 1e-3, inputs[2], 2, True, scratch, None, True)
    got = add_rms_norm(on_device, *inputs[:2], 1e-3, unit_offset=True)
    allowed = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 8e-3}
    for mine in (got, routed.x_TH):
        torch.testing.assert_close(mine.cpu(), expected, **allowed)
    assert torch.equal(on_device.cpu(), added) and torch.equal(routed.residual_TH.cpu(), added)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(3, 2), (10, 9), (16, 8)])
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_queries_and_keys_are_normalised_all_heads_together_and_clipped(q_heads, kv_heads, clip, offset, bias):
    """Heads of a program may be queries, keys and values."""
    rows, dim = 2, 12
    width = (q_heads + 2 * kv_heads) * dim
    partial = torch.randn(2, rows, width, device=DEVICE)
    bias_W = torch.randn(width, device=DEVICE) if bias else None
    norms = torch.randn(q_heads * dim, device=DEVICE), torch.randn(kv_heads * dim, device=DEVICE)
    cos, sin = torch.ones(rows, 1, dim, device=DEVICE), torch.zeros(rows, 1, dim, device=DEVICE)
    caches = [torch.full((4, 4, kv_heads, dim), float("nan"), device=DEVICE) for _ in range(2)]
    slots = torch.tensor([3, 14], device=DEVICE)
    how = {"whole_norms": norms, "clip": clip, "unit_offset": offset > 0}
    got = finish_qkv(partial, bias_W, None, 1e-6, cos, sin, slots, *caches, q_heads, **how)
    q, k, v = (partial.double().sum(0) + (bias_W.double() if bias else 0)).split(
        [q_heads * dim, kv_heads * dim, kv_heads * dim], dim=1
    )
    q, k = (
        x * (x.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * (weight.double() + offset)
        for x, weight in zip((q, k), norms, strict=True)
    )
    if clip is not None:
        q, k, v = (x.clamp(-clip, clip) for x in (q, k, v))
    found = got, *(cache.flatten(0, 1)[slots] for cache in caches)
    for mine, exact in zip(found, (q, k, v), strict=True):
        assert relative(mine.flatten(1), exact) < 1e-5


CLIPPED = """
    import torch
    from rollout_kernels.norm_rope.triton_elementwise import finish_qkv
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from rollout.engine.step.compile_ahead import compile_kernels_of
    from scripts.check.compile_kernels import OfflineDriver

    device = OfflineDriver(90)
    device.launcher_cls = lambda source, metadata: None
    driver.set_active(device)
    CompiledKernel.run = property(lambda kernel: None)
    tables, caches = torch.ones(2, 1, 16), torch.zeros(4, 4, 2, 16)
    how = torch.arange(2), caches, caches.clone(), 4
    clipped = lambda: finish_qkv(torch.zeros(1, 2, 128), None, None, 1e-6, tables, tables, *how, clip=0.7)
    compile_kernels_of(clipped, threads=1)
"""


GATED = """
    import triton
    import triton.language as tl
    from rollout_kernels.common.triton_math import clamped_glu
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def kernel(x_ptr, limit):
        tl.store(x_ptr, clamped_glu(tl.load(x_ptr), tl.load(x_ptr + 1), 1.7, limit))

    triton.compile(ASTSource(kernel, {"x_ptr": "*fp32", "limit": "fp32"}), target=GPUTarget("cuda", 90, 32))
"""


def test_bounds_let_values_through_that_are_no_numbers(tmp_path):
    """As a GPU compares them: the interpreter's bounds always do."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(CLIPPED) + textwrap.dedent(GATED))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    for kernel in ("_finish_qkv_kernel", "kernel"):
        (code,) = (path.read_text() for path in (tmp_path / "cache").glob(f"*/{kernel}.ptx"))
        bounds = [line for line in code.splitlines() if line.strip().startswith(("min.", "max."))]
        assert bounds and all(".NaN" in line for line in bounds if ".f32" in line)


@pytest.mark.parametrize(("dim", "turned"), [(16, 16), (24, 12), (16, 4)])
def test_neighbours_turn_together(dim, turned):
    rows, q_heads, kv_heads = 3, 4, 2
    partial = torch.randn(1, rows, (q_heads + 2 * kv_heads) * dim, device=DEVICE)
    inv_freq = (10_000.0 ** (-torch.arange(turned // 2) / turned)).repeat_interleave(2).to(DEVICE)
    sign = torch.tensor([-1.0, 1.0], device=DEVICE).repeat(turned // 2)
    cos, sin = rope_cos_sin(torch.tensor([0, 5, 77], device=DEVICE), inv_freq, sign)
    caches = [torch.full((4, 4, kv_heads, dim), float("nan"), device=DEVICE) for _ in range(2)]
    slots = torch.tensor([3, 14, 8], device=DEVICE)
    got = finish_qkv(partial, None, None, 1e-6, cos, sin, slots, *caches, q_heads, interleaved=True)
    qk, v = partial[0].view(rows, -1, dim).tensor_split((q_heads + kv_heads,), dim=1)
    qk = apply_rope(qk.double(), cos, sin, interleaved=True)
    for mine, exact in zip(
        (got, *(cache.flatten(0, 1)[slots] for cache in caches)), (qk[:, :q_heads], qk[:, q_heads:], v), strict=True
    ):
        assert relative(mine, exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_have_a_factor(dtype):
    table, ids = torch.randn(9, 40).to(DEVICE, dtype), torch.tensor([2, 8, 2], device=DEVICE)
    zeros = torch.zeros(4, device=DEVICE)
    positions = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    got, _ = embed_rope(ids, positions, table, zeros, zeros, None, 7.25)
    assert torch.equal(got, table[ids] * 7.25)
    part, _ = embed_rope(ids, positions, table[:5].contiguous(), zeros, zeros, 4, 7.25)
    assert torch.equal(part, torch.stack([0 * got[0], table[4] * 7.25, 0 * got[0]]))
