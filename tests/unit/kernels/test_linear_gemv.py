"""The kernel for one to four rows against float64, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from rollout_kernels import gated
from rollout_kernels.linear.triton_gemv import GemvConfig, takes
from rollout_kernels.linear.triton_linear import gated_linear, linear, linear_parts

from tests.support.kernels.linear_cases import DEVICE, operands, relative


@pytest.mark.parametrize("config", [GemvConfig(1, 1, 2, 4), GemvConfig(2, 2, 1, 4), GemvConfig(3, 1, 1, 2)], ids=str)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 64), (4, 50), (2, 3)])
def test_partial_sums_add_up_to_the_product(rows, outputs, config):
    inputs = 256 * config.at_once * config.split * 2
    x, w, expected = operands(rows, outputs, inputs)
    parts = linear_parts(x, w, config)
    assert parts.shape == (config.split, rows, outputs) and relative(parts.double().sum(0), expected) < 1e-6
    first = inputs // config.split
    assert relative(parts[0], x[:, :first].double() @ w[:, :first].double().T) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("config", [GemvConfig(1, 1, 2, 4), GemvConfig(1, 2, 1, 2)], ids=str)
def test_gate_and_up_rows_meet_in_one_program(config, activation, dtype):
    x, w, _ = operands(3, 2 * 21, 512)
    x, w = x.to(dtype), w.to(dtype)
    got = gated_linear(x, w, config, activation)
    assert got.shape == (3, 21) and got.dtype == dtype
    assert relative(got, gated(x.double() @ w.double().T, activation)) < 5e-3


def test_a_row_has_the_same_bits_alone_and_with_others():
    x, w, _ = operands(4, 40, 512)
    config = GemvConfig(at_once=2)
    whole = linear(x, w, config, torch.float32)
    for row in range(4):
        assert torch.equal(linear(x[row : row + 1], w, config, torch.float32)[0], whole[row])


def test_it_takes_up_to_four_rows_also_strided_whose_length_divides():
    x, w, _ = operands(4, 40, 1024)
    config = GemvConfig(at_once=2)
    assert torch.equal(
        linear(x[:, 512:], w[:, :512].contiguous(), config),
        linear(x[:, 512:].contiguous(), w[:, :512].contiguous(), config),
    )
    assert takes(x, w, config)
    assert not takes(x.repeat(2, 1), w, config), "too many rows"
    assert not takes(x, w[:, :512], config) and not takes(x[:, :512], w, GemvConfig(at_once=3))
    assert not takes(x.float(), w, config)


@pytest.mark.parametrize("split", [1, 2])
def test_other_dtypes_fall_back_to_tiles_with_the_same_split(split):
    x, w, _ = operands(1, 24, 512)
    x, w = x.float() + 1e-4, w.float()
    expected = x.double() @ w.double().T
    parts = linear_parts(x, w, GemvConfig(split, at_once=1))
    assert parts.shape == (split, 1, 24) and relative(parts.double().sum(0), expected) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("outputs", "inputs", "split"), [(6144, 4096, 1), (4096, 12288, 3), (5120, 2048, 1)])
def test_products_of_real_shapes(rows, outputs, inputs, split):
    x, w, expected = operands(rows, outputs, inputs)
    config = GemvConfig(split, at_once=8)
    assert relative(linear_parts(x, w, config).double().sum(0), expected) < 1e-6
    gate, up = expected.chunk(2, dim=1)
    if split == 1:
        assert relative(gated_linear(x, w, config), torch.nn.functional.silu(gate) * up) < 5e-3


@pytest.mark.gpu
def test_a_chain_in_a_graph_waits_for_what_it_reads():
    """Each product reads the result of the one before. Weights may be prefetched, results must not."""
    x, _, _ = operands(2, 64, 2048)
    generator = torch.Generator().manual_seed(3)
    weights = [(torch.randn(2048, 2048, generator=generator) / 45).bfloat16().to(DEVICE) for _ in range(40)]

    def run() -> torch.Tensor:
        hidden = x
        for weight in weights:
            hidden = linear(hidden, weight, GemvConfig(at_once=8))
        return hidden

    expected = x
    for weight in weights:
        expected = linear(expected, weight, GemvConfig(at_once=8))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, expected)
