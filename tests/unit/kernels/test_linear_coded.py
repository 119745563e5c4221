"""Products of few tokens with weights as e4m3 codes, against float64 with the values that the codes stand for."""

import pytest
import torch
from rollout_kernels.linear.coded import CodedMatrix, scales_shape
from rollout_kernels.linear.products import dense
from rollout_kernels.linear.triton_decode_codes import decode_codes
from rollout_kernels.linear.triton_gemv import GemvConfig
from rollout_kernels.linear.triton_half_rows import half_rows
from rollout_kernels.linear.triton_linear import LinearConfig, gated_linear, linear, linear_parts
from rollout_kernels.moe.formats import Format, scale_dtype
from rollout_kernels.moe.quantize import quantize

from tests.support.kernels.grids import squared
from tests.support.kernels.linear_cases import DEVICE, operands, relative

FORMATS: tuple[Format, ...] = ("fp8_block", "fp8_row", "mxfp8")
TILED = LinearConfig(64, 128, 1, 4, 4, 3)
SPLIT = LinearConfig(64, 64, 4, 4, 4, 132)
BY_OUTPUT = GemvConfig(1, 1, 1, 4)
#: block_n, block_k, split, warps, stages, programs of streamed tiles.
STREAMED = [(64, 128, 1, 4, 8, 132), (128, 128, 2, 8, 6, 40), (64, 128, 4, 4, 4, 396), (256, 128, 1, 8, 4, 7)]


def coded(w: torch.Tensor, format: Format, widths: tuple[int, ...]) -> CodedMatrix:
    scales = torch.empty(scales_shape(widths, w.shape[1], format), dtype=scale_dtype(format), device=w.device)
    made = CodedMatrix(torch.empty(w.shape, dtype=torch.uint8, device=w.device), scales, format, widths)
    made.quantize(w)
    return made


def case(rows: int, widths: tuple[int, ...], inputs: int, format: Format):
    """Activations, coded weights whose blocks have different scales, and the exact product."""
    x, w, _ = operands(rows, sum(widths), inputs)
    growth = torch.arange(w.shape[0], device=DEVICE)[:, None] // 64 + torch.arange(inputs, device=DEVICE) // 96
    weights = coded(w * (1 + growth % 7), format, widths)
    return x, weights, x.double() @ weights.dequantized().T


@pytest.mark.parametrize(
    ("format", "config", "size"),
    squared(FORMATS, [TILED, SPLIT, BY_OUTPUT], [(1, (128, 200)), (3, (64,)), (4, (256, 128, 128))]),
)
def test_products_are_those_of_float64(format, config, size):
    rows, widths = size
    x, weights, expected = case(rows, widths, 512, format)
    parts = linear_parts(x, weights, config)
    assert parts.shape == (config.split, *expected.shape)
    assert relative(parts.double().sum(0), expected) < 1e-5
    if config.split == 1:
        assert relative(linear(x, weights, config), expected) < 5e-3


@pytest.mark.parametrize(("format", "config", "rows"), squared(FORMATS, [TILED, BY_OUTPUT], [1, 4]))
def test_gated_products_are_those_of_float64(format, config, rows):
    x, weights, expected = case(rows, (128, 128), 512, format)
    gate, up = expected.chunk(2, dim=1)
    assert relative(gated_linear(x, weights, config), torch.nn.functional.silu(gate) * up) < 5e-3


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("widths", "inputs"), [((100, 60), 160), ((128, 24), 544), ((300,), 96)])
def test_decoded_weights_are_those_of_torch_bit_for_bit(format, widths, inputs):
    """Also where a module ends within a block, and where rows end within one."""
    _, w, _ = operands(1, sum(widths), inputs)
    weights = coded(w, format, widths)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(decode_codes(weights, dtype), weights.dequantized(dtype))
        assert torch.equal(dense(weights, dtype), weights.dequantized(dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_each_module_is_quantised_alone(format):
    """Its codes and scales are those of a checkpoint that has it as a tensor of its own."""
    _, w, _ = operands(1, 100 + 60 + 128, 192)
    weights = coded(w, format, (100, 60, 128))
    assert weights.in_step == (format != "fp8_block")
    for part, alone in zip(weights.parts(), w.split((100, 60, 128)), strict=True):
        expected = quantize(alone[None], format)
        assert torch.equal(part.values_ENK, expected.values_ENK) and torch.equal(part.scales, expected.scales)


def test_a_weight_that_is_not_finite_makes_its_outputs_not_finite():
    x, w, _ = operands(2, 128, 512)
    w[5, 7], w[70, 300] = float("nan"), float("inf")
    for config in (TILED, BY_OUTPUT):
        got = linear(x, coded(w, "fp8_block", (128,)), config)
        assert not got[:, [5, 70]].isfinite().any()


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS[:2])
@pytest.mark.parametrize("shape", STREAMED)
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize(("rows", "widths"), [(1, (4096,)), (8, (128, 150)), (33, (1024, 256)), (128, (512,))])
def test_streamed_products_are_those_of_float64(format, shape, stagger, rows, widths):
    config = LinearConfig(*shape, streamed=True, stagger=stagger)
    for _ in range(3):  # a race would move the error
        x, weights, expected = case(rows, widths, 2048, format)
        parts = linear_parts(x, weights, config)
        assert relative(parts.double().sum(0), expected) < 1e-5
    if config.split == 1:
        x, weights, expected = case(rows, (256, 256), 2048, format)
        gate, up = expected.chunk(2, dim=1)
        assert relative(gated_linear(x, weights, config), torch.nn.functional.silu(gate) * up) < 5e-3


@pytest.mark.gpu
def test_a_chain_of_streamed_products_in_a_graph_waits_for_what_it_reads():
    x, _, _ = operands(8, 64, 2048)
    generator = torch.Generator().manual_seed(3)
    made = [(torch.randn(2048, 2048, generator=generator) / 45).bfloat16().to(DEVICE) for _ in range(20)]
    weights = [coded(w, "fp8_block", (2048,)) for w in made]

    def run(streamed: bool) -> torch.Tensor:
        hidden = x
        for each in weights:
            hidden = linear(hidden, each, LinearConfig(64, 128, 1, 4, 6, 132, streamed))
        return hidden

    expected = run(streamed=False)
    run(streamed=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(streamed=True)
    for _ in range(30):
        got.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert relative(got, expected.double()) < 0.05


def test_rows_become_f16_without_loss_in_other_places():
    """Whatever their size, with infinities and NaN; a value far below the largest of its row is almost kept."""
    x, _, _ = operands(6, 8, 512)
    scaled = x.double() * torch.tensor([1.0, 2.0**-90, 2.0**100, 2.0**-114, 1.0, 1.0], device=DEVICE)[:, None]
    x = scaled.to(torch.bfloat16)
    x[4, 5], x[4, 300], x[5] = float("inf"), float("nan"), 0
    x[0, 7] = 2.0**-60
    half, scales = half_rows(x)
    assert half.dtype == torch.float16
    p = torch.arange(512)
    columns = p // 128 * 128 + 32 * (p // 2 % 4) + 4 * (p // 16 % 8) + 2 * (p // 8 % 2) + p % 2
    back = torch.empty_like(x, dtype=torch.float64)
    back[:, columns.to(DEVICE)] = half.double() * scales.double()[:, None]
    small = x.double().abs() < scales.double()[:, None] * 2.0**-14
    assert torch.equal(back[~small].nan_to_num(1.5), x.double()[~small].nan_to_num(1.5))
    assert ((back - x.double()).abs() <= scales.double()[:, None] * 2.0**-25)[small].all()
    largest = half[:4].abs().double().amax(dim=1)
    assert (largest[:3] >= 2**14).all() and (largest < 2**15).all()
