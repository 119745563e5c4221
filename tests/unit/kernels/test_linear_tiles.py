"""Matrix products in tiles against float64, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from rollout_kernels import gated as activate
from rollout_kernels.linear.table import linear_config
from rollout_kernels.linear.triton_linear import LinearConfig, gated_linear, linear, linear_parts

from tests.support.kernels.linear_cases import DEVICE, operands, relative
from tests.support.kernels.overlap import replay_with_and_without


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 128), (3, 150), (20, 64)])
def test_partial_sums_add_up_to_the_product(rows, outputs, split):
    x, w, expected = operands(rows, outputs, 512)
    parts = linear_parts(x, w, LinearConfig(64, 64, split, 4, 3, 3))
    assert parts.shape == (split, rows, outputs) and parts.dtype == torch.float32
    assert relative(parts.double().sum(0), expected) < 1e-6
    if split > 1:
        assert relative(parts[0].double(), x[:, : 512 // split].double() @ w[:, : 512 // split].double().T) < 1e-6


def test_the_result_is_rounded_once():
    x, w, expected = operands(5, 96, 256)
    got = linear(x, w, LinearConfig(32, 64, 1, 4, 3, 2))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, linear(x, w, LinearConfig(32, 64, 1, 4, 3, 2), torch.float32).bfloat16())
    assert relative(got, expected) < 5e-3


@pytest.mark.parametrize("split", [1, 2])
def test_the_number_of_programs_and_stages_and_the_other_rows_change_no_bit(split):
    x, w, _ = operands(20, 192, 256)
    whole = linear_parts(x, w, LinearConfig(64, 64, split, 4, 3, 100))
    for programs, stages in ((1, 1), (2, 3), (4, 4)):
        assert torch.equal(linear_parts(x, w, LinearConfig(64, 64, split, 4, stages, programs)), whole)
    alone = linear_parts(x[7:8], w, LinearConfig(64, 64, split, 4, 3, 2))
    assert torch.equal(alone[:, 0], whole[:, 7])


def test_more_rows_than_a_tile_holds_are_taken_a_tile_at_a_time():
    x, w, expected = operands(300, 128, 256)
    gate, up = expected.chunk(2, dim=1)
    parts = linear_parts(x, w, linear_config(128, 256, "parts", 300, deterministic=True))
    assert parts.shape == (2, 300, 128) and relative(parts.double().sum(0), expected) < 1e-6
    assert relative(linear(x, w, linear_config(128, 256, "whole", 300, deterministic=True)), expected) < 5e-3
    gated = gated_linear(x, w, linear_config(128, 256, "silu", 300, deterministic=True))
    assert relative(gated, torch.nn.functional.silu(gate) * up) < 5e-3


@pytest.mark.gpu  # the interpreter leaves the order of a tile's sums to numpy, which takes another one for each shape
@pytest.mark.parametrize(("kind", "outputs"), [("parts", 4096), ("whole", 4096), ("silu", 2048)])
def test_many_rows_have_the_bits_of_each_alone(kind, outputs):
    """The deterministic column of the table relies on this."""
    x, w, _ = operands(300, 4096, 4096)
    few, some, many = (linear_config(4096, 4096, kind, rows, deterministic=True) for rows in (1, 100, 300))
    run = {"parts": linear_parts, "whole": linear, "silu": gated_linear}[kind]
    whole = run(x, w, many).view(-1, 300, outputs)
    assert torch.equal(run(x[:100], w, some).view(-1, 100, outputs), whole[:, :100])
    for row in (0, 127, 128, 299):
        assert torch.equal(run(x[row : row + 1], w, few).view(-1, outputs), whole[:, row])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 9])
def test_gate_and_up_are_taken_from_their_halves(rows, activation):
    x, w, product = operands(rows, 2 * 90, 256)
    got = gated_linear(x, w, LinearConfig(64, 64, 1, 4, 3, 2), activation)
    assert relative(got, activate(product, activation)) < 5e-3


def test_rows_of_x_may_be_part_of_a_wider_tensor():
    x, w, expected = operands(4, 64, 256)
    wide = torch.full((4, 300), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, :256] = x
    assert relative(linear_parts(wide[:, :256], w, LinearConfig(64, 64, 2, 4, 3, 2)).sum(0), expected) < 1e-6


def test_a_depth_that_does_not_divide_is_refused():
    x, w, _ = operands(1, 64, 320)
    with pytest.raises(AssertionError, match="no multiple"):
        linear_parts(x, w, LinearConfig(64, 128, 2, 4, 3, 2))


@pytest.mark.gpu
def test_overlapping_launches_change_no_bit(monkeypatch):
    """A chain of products and norms, captured with and without programmatic dependent launch."""
    from rollout_kernels.linear import gluon_linear, triton_linear
    from rollout_kernels.norm_rope import triton_elementwise

    weights = [torch.randn(512, 512, device="cuda").bfloat16() * 0.05 for _ in range(6)]
    norm = torch.rand(512, device="cuda").bfloat16()
    start = torch.randn(3, 512, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        residual, parts = start.clone(), None
        for _ in range(5):
            for w in weights:
                x = triton_elementwise.add_rms_norm(residual, parts, norm, 1e-6)
                parts = triton_linear.linear_parts(x, w, LinearConfig(64, 64, 2, 4, 4, 12))
        return triton_elementwise.add_rms_norm(residual, parts, norm, 1e-6)

    results = replay_with_and_without(monkeypatch, (triton_elementwise, triton_linear, gluon_linear), chain)
    assert results[0].isfinite().all() and results[0].abs().sum() > 0
    assert all(torch.equal(result, results[0]) for result in results)
