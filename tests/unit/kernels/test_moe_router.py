"""The router and the sorting of pairs by expert, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from rollout_kernels import route
from rollout_kernels.moe import triton_router
from rollout_kernels.moe.formats import Shared
from rollout_kernels.moe.triton_group_pairs import group_pairs, most_tiles
from rollout_kernels.moe.triton_norm_router import RouterScratch, norm_route, router_scratch
from rollout_kernels.moe.triton_router import Record, moe_choose, moe_route, router_logits, sum_of_parts
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm

from tests.support.kernels.grids import nightly
from tests.support.kernels.moe_cases import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def scratch_for(experts: int) -> RouterScratch:
    scratch = router_scratch(experts, torch.device(DEVICE))
    scratch.logits_TE.fill_(float("nan"))
    return scratch


@pytest.fixture(params=[False, True], ids=["one", "many"])
def many_tokens(request: pytest.FixtureRequest) -> int:
    """A program chooses the experts of one token, or of several, as in prefills."""
    return 1 if request.param else triton_router.MANY_TOKENS


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden"), [(1, 8, 2, 64), (3, 60, 4, 256), (11, 40, 8, 36), (2, 200, 6, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_router_is_its_twin(many_tokens, tokens, experts, top_k, hidden, renormalize, dtype):
    x, router = normal(tokens, hidden, dtype=dtype), normal(experts, hidden, dtype=dtype)
    got = moe_route(x, router, top_k, renormalize, many_tokens=many_tokens)
    logits = router_logits(x, router).float().sum(0).to(dtype)
    exact = x.double() @ router.double().T
    assert torch.allclose(logits.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    weights, chosen = route(logits, top_k, renormalize)
    assert got.experts_TK.tolist() == chosen.tolist()
    assert torch.allclose(got.weights_TK, weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("experts", [70, 128, 129, 300])
def test_experts_are_chosen_from_logits_of_any_dtype(many_tokens, renormalize, experts):
    for dtype in (torch.float32, torch.bfloat16):
        logits = normal(5, experts, dtype=dtype)
        got = moe_choose(logits[None], dtype, 6, renormalize, many_tokens=many_tokens)
        weights, chosen = route(logits, 6, renormalize)
        assert got.experts_TK.tolist() == chosen.tolist()
        assert torch.allclose(got.weights_TK, weights, rtol=1e-5, atol=1e-7)


def test_parts_of_logits_are_added_up_and_rounded_once(many_tokens):
    parts = normal(3, 4, 40, dtype=torch.float32)
    got = moe_choose(parts, torch.bfloat16, 5, True, many_tokens=many_tokens)
    weights, chosen = route(parts.sum(0).bfloat16(), 5, True)
    assert got.experts_TK.tolist() == chosen.tolist()
    assert torch.allclose(got.weights_TK, weights, rtol=1e-5, atol=1e-7)


def test_of_equal_logits_the_lower_index_comes_first(many_tokens):
    logits = torch.tensor([[[0.0, 1.0, -0.0, 1.0, 0.0], [-0.0, 0.0, -0.0, 0.0, -1.0]]], device=DEVICE)
    assert moe_choose(logits, torch.float32, 3, True, many_tokens=many_tokens).experts_TK.tolist() == [
        [1, 3, 0],
        [0, 1, 2],
    ]


def test_nan_logits_give_valid_experts(many_tokens):
    logits = normal(3, 40, dtype=torch.float32)
    logits[0] = float("nan")
    logits[1, ::2] = float("nan")
    got = moe_choose(logits[None], torch.float32, 4, True, many_tokens=many_tokens)
    assert ((got.experts_TK >= 0) & (got.experts_TK < 40)).all()
    assert all(len(set(row)) == 4 for row in got.experts_TK.tolist())
    assert (got.experts_TK[1] % 2 == 1).all()
    assert got.weights_TK[0].isnan().all() and got.weights_TK[2].isfinite().all()
    for renormalize in (True, False):
        weights = moe_choose(logits[None], torch.float32, 4, renormalize, many_tokens=many_tokens).weights_TK
        assert weights[:2].isnan().all() and weights[2].isfinite().all(), "a NaN counts even if it was not chosen"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_experts_are_recorded_for_replay_where_a_slot_is_given(many_tokens, dtype):
    x, router = normal(4, 32), normal(16, 32)
    kept = torch.full((6, 3, 2), 99, dtype=torch.int32).to(DEVICE, dtype)
    slots = torch.tensor([5, -1, 0, 2], device=DEVICE)
    got = moe_route(x, router, 2, True, Record(kept[:, 1], slots), many_tokens=many_tokens)
    kept = kept.cpu()  # a GPU picks no elements of uint16
    assert kept[[5, 0, 2], 1].tolist() == got.experts_TK[[0, 2, 3]].tolist()
    assert kept[:, [0, 2]].tolist() == [[[99, 99]] * 2] * 6
    assert kept[[1, 3, 4], 1].tolist() == [[99, 99]] * 3


@pytest.mark.nightly
def test_many_tokens_choose_the_experts_of_few_and_deterministically_the_same_weights():
    logits = normal(1, 1100, 60, dtype=torch.float32)
    few = [moe_choose(logits[:, i : i + 100].contiguous(), torch.bfloat16, 4, True) for i in range(0, 1100, 100)]
    many = moe_choose(logits, torch.bfloat16, 4, True)
    same = moe_choose(logits, torch.bfloat16, 4, True, deterministic=True)
    assert torch.equal(many.experts_TK, torch.cat([each.experts_TK for each in few]))
    assert torch.allclose(many.weights_TK, same.weights_TK, rtol=1e-5, atol=1e-7)
    assert torch.equal(same.weights_TK, torch.cat([each.weights_TK for each in few]))


def test_a_token_is_routed_as_if_it_were_alone():
    x, router = normal(10, 64), normal(16, 64)
    together = moe_route(x, router, 3, False)
    for row in range(10):
        alone = moe_route(x[row : row + 1], router, 3, False)
        assert torch.equal(alone.experts_TK[0], together.experts_TK[row])
        assert torch.equal(alone.weights_TK[0], together.weights_TK[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(1, 64, 16), (5, 96, 10)])
def test_norm_and_router_in_one_launch_equal_two_launches(tokens, hidden, experts, dtype):
    residual, norm = normal(tokens, hidden, dtype=dtype), normal(hidden, dtype=dtype).abs()
    parts, router = normal(3, tokens, hidden, dtype=torch.float32), normal(experts, hidden, dtype=dtype)
    scratch, before = scratch_for(experts), residual.clone()
    got = norm_route(residual, parts, norm, 1e-6, router, 4, True, scratch)
    assert torch.equal(residual, before), "other programs may still have to read it"
    assert not scratch.arrived_T.any()
    x = add_rms_norm(before, parts, norm, 1e-6)
    assert torch.equal(got.residual_TH, before)
    assert torch.allclose(got.x_TH, x, rtol=2 * torch.finfo(dtype).eps)
    exact = got.x_TH.double() @ router.double().T
    logits = scratch.logits_TE[:tokens].to(dtype)
    assert torch.equal(logits.float(), scratch.logits_TE[:tokens]), "rounded like the twin's logits"
    assert torch.allclose(logits.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    weights, chosen = route(logits, 4, True)
    assert got.routing.experts_TK.tolist() == chosen.tolist()
    assert torch.allclose(got.routing.weights_TK, weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tile_rows", [2, 16])
@pytest.mark.parametrize("routing", ["even", "one", "first", "last"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(7, 5, 3), (80, 3, 2)])
def test_pairs_are_sorted_by_expert_and_cut_into_tiles(tokens, experts, top_k, routing, tile_rows, poisoned_memory):
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    if routing != "even":
        chosen[:] = {"one": chosen[:1], "first": torch.arange(top_k), "last": experts - 1 - torch.arange(top_k)}[
            routing
        ]
    chosen = chosen.int().to(DEVICE)
    groups = group_pairs(chosen, experts, tile_rows)
    flat = chosen.flatten().tolist()
    order = groups.pairs_P.tolist()
    assert order == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    tiles = groups.tiles_L3.tolist()
    assert len(tiles) == most_tiles(len(flat), experts, tile_rows)
    place = 0
    used = [tile for tile in tiles if tile[2]]
    assert tiles[: len(used)] == used, "tiles without rows come last"
    for expert, start, count in used:
        assert start == place and 1 <= count <= tile_rows
        assert {flat[pair] for pair in order[start : start + count]} == {expert}
        place += count
    assert place == len(flat)
    assert len(used) == sum(-(-flat.count(expert) // tile_rows) for expert in range(experts))


def test_the_bound_on_tiles_is_reached():
    chosen = torch.tensor([[0, 1]] + [[0, 2]] * 4, dtype=torch.int32, device=DEVICE)  # 5, 1 and 4 pairs
    assert (group_pairs(chosen, 3, 4).tiles_L3[:, 2] > 0).sum() == 4
    assert most_tiles(10, 3, 4) == 5 and most_tiles(3, 8, 4) == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_every_router_records_the_experts_of_its_twin_in_strided_rows(dtype):
    """As in a step: after other words, layer by layer, with more rows than tokens."""
    tokens, experts, top_k = 5, 40, 3
    residual, norm, router = normal(tokens, 64), normal(64).abs(), normal(experts, 64)
    parts, slots = normal(1, tokens, 64, dtype=torch.float32), torch.arange(tokens, device=DEVICE)
    words = torch.zeros(8, 11, dtype=torch.int32, device=DEVICE)
    packed = words[:, 1:].view(dtype)
    layers = [packed[:tokens, layer * top_k : (layer + 1) * top_k] for layer in range(3)]
    scratch = scratch_for(experts)
    found = norm_route(residual, parts, norm, 1e-6, router, top_k, True, scratch, Record(layers[0], slots))
    twins = [route(scratch.logits_TE[:tokens].to(residual.dtype), top_k, True)[1]]
    moe_route(found.x_TH, router, top_k, True, Record(layers[1], slots))
    twins.append(route((found.x_TH.double() @ router.double().T).to(residual.dtype), top_k, True)[1])
    logits = normal(tokens, experts)
    moe_choose(logits[None], logits.dtype, top_k, False, Record(layers[2], slots))
    twins.append(route(logits, top_k, False)[1])
    assert [kept.tolist() for kept in layers] == [twin.tolist() for twin in twins]
    assert not words[:, 0].any() and not words[tokens:].any() and not packed[:, 9:].cpu().any()


@pytest.mark.parametrize("hidden", [64, 40])
@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_in_float32_are_rounded_nowhere(hidden, deterministic):
    """By our own product, and at a width that it does not take."""
    generator = torch.Generator().manual_seed(hidden)
    x, router = (torch.randn(n, hidden, generator=generator).to(DEVICE, torch.bfloat16) for n in (5, 8))
    exact = x.double() @ router.double().T
    logits = sum_of_parts(router_logits(x, router, deterministic, torch.float32), torch.float32)
    assert logits.dtype == torch.float32 and (logits - exact).abs().max() < 1e-4
    rounded = sum_of_parts(router_logits(x, router, deterministic), torch.bfloat16)
    assert (rounded - exact).abs().max() > 1e-3


@pytest.mark.parametrize("shared", [Shared(1), Shared(1, True), Shared(3, True)], ids=["plain", "gated", "three"])
@pytest.mark.parametrize(("experts", "renormalize"), [(16, True), (40, False), *nightly((128, True))])
def test_shared_experts_are_the_last_choices_of_every_token(shared, experts, renormalize):
    """By one launch or two, and of prefills; the record is without them, and their logit is not one of a choice."""
    tokens, hidden, top_k = 5, 96, 4
    residual, norm = normal(tokens, hidden), normal(hidden).abs()
    parts, router = normal(3, tokens, hidden, dtype=torch.float32), normal(experts + shared.gated, hidden)
    kept = torch.zeros(tokens, top_k, dtype=torch.uint8, device=DEVICE)
    record = Record(kept, torch.arange(tokens, device=DEVICE))
    scratch = scratch_for(len(router))
    found = norm_route(residual, parts, norm, 1e-6, router, top_k, renormalize, scratch, record, shared=shared)
    logits = scratch.logits_TE[:tokens].bfloat16()
    weights, chosen = route(logits[:, :experts], top_k, renormalize)
    gate = logits[:, experts:].float().sigmoid() if shared.gated else torch.ones(tokens, 1, device=DEVICE)
    for got in (found.routing, moe_choose(logits[None], torch.bfloat16, top_k, renormalize, shared=shared)):
        assert got.experts_TK[:, :top_k].tolist() == chosen.tolist() == kept.tolist()
        assert torch.allclose(got.weights_TK[:, :top_k], weights, rtol=1e-5, atol=1e-7)
        assert got.experts_TK[:, top_k:].tolist() == [list(range(experts, experts + shared.experts))] * tokens
        assert torch.allclose(got.weights_TK[:, top_k:], gate.expand(-1, shared.experts), rtol=1e-5)
    many = moe_choose(logits[None], torch.bfloat16, top_k, renormalize, record, shared=shared, many_tokens=1)
    assert many.experts_TK.tolist() == found.routing.experts_TK.tolist() and kept.tolist() == chosen.tolist()
    assert torch.allclose(many.weights_TK, found.routing.weights_TK, rtol=1e-5, atol=1e-7)
    alone = moe_route(found.x_TH, router, top_k, renormalize, shared=shared)
    assert alone.experts_TK.tolist() == found.routing.experts_TK.tolist()
    assert torch.allclose(alone.weights_TK, found.routing.weights_TK, rtol=0.05)
