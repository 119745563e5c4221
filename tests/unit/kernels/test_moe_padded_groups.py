"""Experts over padded groups: sorting, copying and summing in the interpreter; the products on a Hopper GPU."""

import pytest
import torch
from rollout_kernels.moe.gluon_experts import all_rows, padded_down, padded_gate_up
from rollout_kernels.moe.triton_padded_groups import ALIGN, TILE, PaddedGroups, gather_sum, pad_groups, spread_rows

from tests.support.kernels.grids import nightly
from tests.support.kernels.moe_cases import DEVICE, Layer, assert_close, exact, layer, poison, relative

CASES = [(1, "even"), (5, "even"), (130, "skewed"), (300, "even"), (300, "one")]


def tiles_of(groups: PaddedGroups) -> list[list[int]]:
    return groups.tiles_L3[: int(groups.counts_1)].tolist()


@pytest.mark.parametrize(("tokens", "routing"), CASES)
def test_tiles_cover_each_pair_once_and_hold_one_expert(tokens, routing):
    case = layer(tokens, routing=routing)
    groups = pad_groups(case.experts_TK, 6)
    chosen, rows = case.experts_TK.flatten().tolist(), groups.rows_P.tolist()
    expert_of = {}
    for expert, first, count in tiles_of(groups):
        assert first % ALIGN == 0 and 1 <= count <= TILE and first + count <= groups.most_rows
        for row in range(first, first + count):
            assert row not in expert_of
            expert_of[row] = expert
    assert len(set(rows)) == len(rows) == len(expert_of)
    assert [expert_of[row] for row in rows] == chosen
    for expert in set(chosen):  # in the order of pairs
        mine = [row for row, its in zip(rows, chosen, strict=True) if its == expert]
        assert mine == sorted(mine)


def test_more_experts_than_a_power_of_two_are_sorted_alike():
    """257 experts, such as 256 and a shared one that every token takes: the last choice."""
    tokens, experts = 600, 257
    routed = torch.stack([torch.randperm(experts - 1)[:3] for _ in range(tokens)])
    experts_TK = torch.nn.functional.pad(routed, (0, 1), value=experts - 1).int().to(DEVICE)
    groups, chosen = pad_groups(experts_TK, experts), experts_TK.flatten().tolist()
    of_row = {row: expert for expert, first, count in tiles_of(groups) for row in range(first, first + count)}
    assert [of_row[row] for row in groups.rows_P.tolist()] == chosen and len(of_row) == len(chosen)


def by_tile(x_RH: torch.Tensor, groups: PaddedGroups, case: Layer) -> torch.Tensor:
    """What the products compute, in torch; rows without a pair stay NaN."""
    gate_up, down = case.gate_up.values_ENK.double(), case.down.values_ENK.double()
    out = poison(groups.most_rows, down.shape[1], dtype=torch.float32)
    for expert, first, count in tiles_of(groups):
        rows = slice(first, first + count)
        gate, up = (x_RH[rows].double() @ gate_up[expert].T).chunk(2, dim=1)
        out[rows] = ((torch.nn.functional.silu(gate) * up) @ down[expert].T).float()
    return out


@pytest.mark.parametrize(("tokens", "routing"), [*CASES[:3], *nightly(*CASES[3:])])
def test_rows_go_to_their_expert_and_come_back_weighted(tokens, routing):
    case = layer(tokens, routing=routing)
    groups = pad_groups(case.experts_TK, 6)
    parts = by_tile(spread_rows(case.x_TH, groups, 2), groups, case)
    ones = torch.ones(groups.most_rows, 1, device=DEVICE)
    assert relative(gather_sum(parts, ones, groups, case.weights_TK, torch.float32), exact(case)) < 1e-6
    assert relative(gather_sum(parts, ones, groups, case.weights_TK, torch.bfloat16), exact(case)) < 3e-3


def test_scales_multiply_their_columns():
    case = layer(40, hidden=256)
    groups = pad_groups(case.experts_TK, 6)
    parts = by_tile(spread_rows(case.x_TH, groups, 2), groups, case)
    scales = torch.exp2(torch.randint(-9, 9, (groups.most_rows, 2), device=DEVICE).float())
    divided = (parts.view(-1, 2, 128) / scales[..., None]).view_as(parts)
    expected = gather_sum(parts, torch.ones_like(scales), groups, case.weights_TK, torch.float32)
    assert torch.equal(gather_sum(divided, scales, groups, case.weights_TK, torch.float32), expected)


# --- the products, on a GPU ------------------------------------------------------------------------------------------


def run(case: Layer, programs: int = 132) -> torch.Tensor:
    gate_up, down = case.gate_up.values_ENK, case.down.values_ENK
    groups = pad_groups(case.experts_TK, len(down))
    x_RH = spread_rows(case.x_TH, groups, case.experts_TK.shape[1])
    h_RI = padded_gate_up(x_RH, groups, gate_up, programs=programs)
    parts, scales = padded_down(h_RI, groups, down, programs=programs)
    return gather_sum(parts, scales, groups, case.weights_TK, case.x_TH.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ["even", "skewed", "one"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 500, 3000])
def test_products_follow_float64(tokens, routing):
    case = layer(tokens, experts=16, top_k=4, hidden=512, inner=256, routing=routing)
    assert_close(run(case), exact(case))


@pytest.mark.gpu
def test_large_and_tiny_values_keep_their_precision():
    case = layer(200, hidden=512, inner=128)
    case.down.values_ENK[:, :256] *= 2.0**40
    case.down.values_ENK[:, 256:] *= 2.0**-40
    got, expected = run(case), exact(case)
    for columns, scale in ((slice(0, 256), 2.0**-40), (slice(256, 512), 2.0**40)):
        assert_close(got[:, columns] * scale, expected[:, columns] * scale)


@pytest.mark.gpu
def test_programs_and_other_tokens_change_no_bit():
    case = layer(700, experts=16, top_k=4, hidden=512, inner=256)
    whole = run(case)
    for programs in (1, 20, 500):
        assert torch.equal(run(case, programs=programs), whole)
    assert torch.equal(run(case.rows(slice(90, 400))), whole[90:400])


@pytest.mark.gpu
def test_the_gated_product_of_a_dense_layer_follows_float64():
    x = torch.randn(1000, 512, device=DEVICE).bfloat16()
    w = (torch.randn(1024, 512, device=DEVICE) / 512**0.5).bfloat16()
    gate, up = (x.double() @ w.double().T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert relative(padded_gate_up(x, all_rows(1000, x.device), w[None], at_once=2), expected) < 3e-3
