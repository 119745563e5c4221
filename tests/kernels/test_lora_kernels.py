"""Corrections of low-rank adapters, by the kernels and by their torch twin, against float64."""

from __future__ import annotations

import pytest
import torch
from rollout_kernels.lora import LoraBuffers, lora_add, padded_rank
from rollout_kernels.triton_lora import lora_add as by_triton

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
@pytest.mark.parametrize("widths", [(40,), (72, 72), (96, 48, 48)])
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
    assert torch.equal(y[slots == 0], before[slots == 0]), "a row without an adapter is as it was"


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
def test_what_lies_in_other_slots_is_not_read(add):
    buffers = buffers_of(2, 16, 64, (32,))
    buffers.a_SAK[1] = buffers.b_SNR[1] = float("nan")
    x, y = torch.randn(4, 64, device=DEVICE), torch.zeros(4, 32, device=DEVICE)
    add(y, x, buffers, torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=DEVICE), False)
    assert y.isfinite().all() and y[0].any() and not y[1].any()


@pytest.mark.parametrize("add", [lora_add, by_triton])
@pytest.mark.parametrize("segmented", [False, True])
def test_a_slot_without_numbers_spoils_its_own_tokens_alone(add, segmented):
    buffers = buffers_of(3, 16, 64, (32,))
    buffers.a_SAK[1] = buffers.b_SNR[1] = float("nan")
    slots = torch.tensor([1, 2, 0, 3, 2], dtype=torch.int32, device=DEVICE)
    x, y = torch.randn(5, 64, device=DEVICE), torch.zeros(5, 32, device=DEVICE)
    x[4] = float("nan")
    add(y, x, buffers, slots, segmented)
    assert y.isfinite().all(1).tolist() == [True, False, True, True, False]


def test_ranks_are_padded_to_what_a_tensor_core_multiplies():
    assert [padded_rank(rank) for rank in (1, 8, 16, 17, 33, 64, 256)] == [16, 16, 16, 32, 64, 64, 256]
