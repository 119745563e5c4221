"""Corrections of low-rank adapters, by the kernels and by their torch twin, against float64."""

from functools import partial

import pytest
import torch
from rollout_kernels.linear import gluon_linear, triton_gemv, triton_linear
from rollout_kernels.linear.table import linear_config
from rollout_kernels.linear.triton_linear import linear, linear_parts
from rollout_kernels.lora import LoraBuffers, lora_add, padded_rank, triton_lora
from rollout_kernels.lora.triton_lora import adds_later, shrink_beside
from rollout_kernels.lora.triton_lora import lora_add as by_triton
from rollout_kernels.norm_rope import triton_elementwise
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm, finish_qkv, gated

from tests.support.kernels.grids import nightly
from tests.support.kernels.overlap import replay_with_and_without

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def buffers_of(slots: int, rank: int, inputs: int, widths: tuple[int, ...], dtype=torch.float32) -> LoraBuffers:
    a = torch.randn(slots, len(widths) * rank, inputs) / inputs**0.5
    b = torch.randn(slots, sum(widths), rank)
    ends = tuple(torch.tensor(widths).cumsum(0).tolist())
    return LoraBuffers(a.to(DEVICE, dtype), b.to(DEVICE, dtype), ends)


def exact(y, x, buffers: LoraBuffers, slots) -> torch.Tensor:
    y, rank = y.double().clone(), buffers.rank
    for m, slot in enumerate(slots.tolist()):
        if slot:
            a, b = buffers.a_SAK[slot - 1].double(), buffers.b_SNR[slot - 1].double()
            low, start = a @ x[m].double(), 0
            for j, end in enumerate(buffers.ends):
                y[m, start:end] += b[start:end] @ low[j * rank : (j + 1) * rank]
                start = end
    return y


def relative(got, expected) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("add", [lora_add, by_triton])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("widths", [(40,), (96, 48, 48), (72, 40, 3, 3)])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 16), (5, 32), (70, 16)])
def test_each_token_gets_the_correction_of_its_own_slot(add, segmented, widths, tokens, rank):
    torch.manual_seed(0)
    buffers = buffers_of(3, rank, 200, widths)
    x, y = torch.randn(tokens, 200, device=DEVICE), torch.randn(tokens, sum(widths), device=DEVICE)
    slots = torch.randint(0, 4, (tokens,), dtype=torch.int32, device=DEVICE)
    slots[0] = 2
    expected, before = exact(y, x, buffers, slots), y.clone()
    add(y, x, buffers, slots, segmented)
    assert relative(y, expected) < 1e-6
    assert torch.equal(y[slots == 0], before[slots == 0]), "a row without an adapter does not change"


@pytest.mark.parametrize("add", [lora_add, by_triton])
@pytest.mark.parametrize("y_dtype", [torch.float32, torch.bfloat16])
def test_sixteen_bits_and_split_inputs_stay_within_their_rounding(add, y_dtype):
    torch.manual_seed(1)
    buffers = buffers_of(8, 16, 1100, (64,), torch.bfloat16)
    x, y = torch.randn(9, 1100).to(DEVICE, torch.bfloat16), torch.randn(9, 64).to(DEVICE, y_dtype)
    slots = torch.arange(9, dtype=torch.int32, device=DEVICE)
    expected = exact(y, x, buffers, slots)
    add(y, x, buffers, slots, False)
    assert relative(y, expected) < 6e-3


@pytest.mark.parametrize("add", [lora_add, by_triton])
def test_other_slots_are_not_read(add):
    buffers = buffers_of(2, 16, 64, (32,))
    buffers.a_SAK[1] = buffers.b_SNR[1] = float("nan")
    x, y = torch.randn(4, 64, device=DEVICE), torch.zeros(4, 32, device=DEVICE)
    add(y, x, buffers, torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=DEVICE), False)
    assert y.isfinite().all() and y[0].any() and not y[1].any()


@pytest.mark.parametrize("add", [lora_add, by_triton])
@pytest.mark.parametrize("segmented", [False, True])
def test_a_slot_of_nan_affects_only_its_own_tokens(add, segmented):
    buffers = buffers_of(3, 16, 64, (32,))
    buffers.a_SAK[1] = buffers.b_SNR[1] = float("nan")
    slots = torch.tensor([1, 2, 0, 3, 2], dtype=torch.int32, device=DEVICE)
    x, y = torch.randn(5, 64, device=DEVICE), torch.zeros(5, 32, device=DEVICE)
    x[4] = float("nan")
    add(y, x, buffers, slots, segmented)
    assert y.isfinite().all(1).tolist() == [True, False, True, True, False]


def test_ranks_are_padded_to_what_a_tensor_core_multiplies():
    assert [padded_rank(rank) for rank in (1, 8, 16, 17, 33, 64, 256)] == [16, 16, 16, 32, 64, 64, 256]


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("hidden", [96, 1500])
def test_the_norm_adds_the_correction(rank, hidden):
    torch.manual_seed(2)
    buffers, slots = buffers_of(3, rank, 1100, (hidden,)), torch.tensor([2, 0, 3, 2], dtype=torch.int32, device=DEVICE)
    x, parts = torch.randn(4, 1100, device=DEVICE), torch.randn(2, 4, hidden, device=DEVICE)
    weight, residual = torch.rand(hidden, device=DEVICE), torch.randn(4, hidden, device=DEVICE)
    expected, before = exact(residual + parts.sum(0), x, buffers, slots), residual.clone()
    plain = add_rms_norm(before, parts, weight, 1e-6)
    got = add_rms_norm(residual, parts, weight, 1e-6, shrink_beside(x, buffers, slots))
    assert relative(residual, expected) < 1e-6
    assert relative(got, expected * (expected.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * weight) < 1e-6
    assert torch.equal(residual[1], before[1]) and relative(got[1], plain[1].double()) < 1e-6


@pytest.mark.parametrize("width", [72, 1100])
@pytest.mark.parametrize("rank", [16, 32])
def test_silu_adds_the_corrections_of_gate_and_up(width, rank):
    torch.manual_seed(3)
    buffers, slots = buffers_of(2, rank, 600, (width, width)), torch.tensor([1, 0, 2], dtype=torch.int32)
    x, gate_up = torch.randn(3, 600, device=DEVICE), torch.randn(3, 2 * width, device=DEVICE)
    slots = slots.to(DEVICE)
    gate, up = exact(gate_up, x, buffers, slots).chunk(2, dim=1)
    got = gated(gate_up, shrink_beside(x, buffers, slots))
    assert relative(got, torch.nn.functional.silu(gate) * up) < 1e-6
    assert torch.equal(got[1], gated(gate_up)[1])


@pytest.mark.parametrize(("dim", "rank"), [(24, 32), (288, 16), *nightly((16, 16), (24, 16))])
def test_queries_keys_and_values_get_the_corrections_of_their_own_modules(dim, rank):
    torch.manual_seed(4)
    q_heads, kv_heads, rows = 7, 2, 3
    widths = (q_heads * dim, kv_heads * dim, kv_heads * dim)
    buffers, slots = buffers_of(2, rank, 1100, widths), torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    x, parts = torch.randn(rows, 1100, device=DEVICE), torch.randn(2, rows, sum(widths), device=DEVICE)
    angles = torch.randn(rows, 1, dim, device=DEVICE)
    norm, places = torch.rand(2, dim, device=DEVICE), torch.tensor([3, 17, 5], device=DEVICE)

    def finished(parts, correction):
        k, v = (torch.zeros(2, 16, kv_heads, dim, device=DEVICE) for _ in range(2))
        how = (None, norm, 1e-6, angles.cos(), angles.sin(), places, k, v, q_heads)
        return finish_qkv(parts, *how, correction=correction), k, v

    whole = exact(parts.sum(0), x, buffers, slots).float()[None]
    later = finished(parts, shrink_beside(x, buffers, slots))
    for got, expected in zip(later, finished(whole, None), strict=True):
        assert relative(got, expected.double()) < 2e-6
    nobody = finished(parts, shrink_beside(x, buffers, torch.zeros_like(slots)))
    assert torch.equal(later[0][1], nobody[0][1]), "corrections of other rows do not change a row without an adapter"
    # One rounding differs between the two kernels: only one of them may compile to a fused multiply-add.
    assert relative(nobody[0], finished(parts, None)[0].double()) < 1e-6


def test_a_slot_of_nan_affects_only_its_own_rows_if_the_consumer_adds():
    buffers = buffers_of(3, 16, 64, (32,))
    buffers.a_SAK[1] = buffers.b_SNR[1] = float("nan")
    slots = torch.tensor([1, 2, 0, 3, 0], dtype=torch.int32, device=DEVICE)
    x, residual = torch.randn(5, 64, device=DEVICE), torch.zeros(5, 32, device=DEVICE)
    x[4] = float("nan")
    correction = shrink_beside(x, buffers, slots)
    got = add_rms_norm(residual, torch.ones(1, 5, 32, device=DEVICE), torch.ones(32, device=DEVICE), 1e-6, correction)
    assert got.isfinite().all(1).tolist() == [True, False, True, True, True]


def test_the_consumer_adds_corrections_only_if_rows_read_little_of_b():
    buffers = buffers_of(1, 16, 8, (8192,), torch.bfloat16)
    assert adds_later(64, buffers, False) and not adds_later(65, buffers, False) and not adds_later(1, buffers, True)
    narrow = buffers_of(1, 16, 8, (8,), torch.bfloat16)
    assert adds_later(128, narrow, False) and not adds_later(129, narrow, False), "cuBLAS computes larger products"


def feed_forward(start, layers, slots, norm, beside: bool) -> torch.Tensor:
    """A chain of feed-forward blocks, as in a decode step. With `beside`, the consumers add the corrections."""
    residual, parts, correction = start.clone(), None, None
    for gate_up, down, gate_up_slots, down_slots in layers:
        rows, configs = len(start), []
        for weight, kind in ((gate_up, "silu"), (down, "parts")):
            configs.append(linear_config(*weight.shape, kind, rows))
        x = add_rms_norm(residual, parts, norm, 1e-6, correction)
        product = linear(x, gate_up, configs[0], beside=beside)
        if beside:
            activated = gated(product, shrink_beside(x, gate_up_slots, slots))
        else:
            by_triton(product, x, gate_up_slots, slots, False)
            activated = gated(product)
        parts = linear_parts(activated, down, configs[1], beside)
        if beside:
            correction = shrink_beside(activated, down_slots, slots)
        else:
            by_triton(parts[0], activated, down_slots, slots, False)
    return add_rms_norm(residual, parts, norm, 1e-6, correction)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_overlapping_launches_change_no_bit(rows, monkeypatch):
    """Captured with and without programmatic dependent launch; layers reuse each other's memory."""
    torch.manual_seed(6)
    hidden, inner = 4096, 12288

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    layers = [
        (
            weight(2 * inner, hidden),
            weight(hidden, inner),
            buffers_of(3, 16, hidden, (inner, inner), torch.bfloat16),
            buffers_of(3, 16, inner, (hidden,), torch.bfloat16),
        )
        for _ in range(3)
    ]
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda") % 4
    start, norm = torch.randn(rows, hidden, device="cuda").bfloat16(), torch.rand(hidden, device="cuda").bfloat16()
    given = (start, [*layers, *layers], slots, norm)
    assert adds_later(rows, layers[0][2], False)
    modules = (triton_elementwise, gluon_linear, triton_gemv, triton_linear, triton_lora)
    results = replay_with_and_without(monkeypatch, modules, partial(feed_forward, *given, True))
    assert all(torch.equal(result, results[0]) for result in results)
    assert relative(results[0], feed_forward(*given, False).double()) < 5e-2
