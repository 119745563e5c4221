"""The table of configurations: every entry fits its shape, and deterministic entries have one order of reduction."""

import pytest
import torch
from rollout_kernels.linear.table import DETERMINISTIC, FAST, linear_config
from rollout_kernels.linear.triton_gemv import MOST_ROWS as MOST_GEMV_ROWS
from rollout_kernels.linear.triton_gemv import GemvConfig
from rollout_kernels.linear.triton_linear import LinearConfig, gated_linear, linear, linear_parts

from tests.support.kernels.linear_cases import operands, relative

SHAPES = sorted({*DETERMINISTIC, *FAST})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_entry_divides_its_inputs(shape):
    outputs, inputs, kind = shape
    for rows in range(1, 129):
        for config in (linear_config(*shape, rows), linear_config(*shape, rows, deterministic=True)):
            if isinstance(config, GemvConfig):
                assert rows <= MOST_GEMV_ROWS and inputs % (256 * config.at_once * config.split) == 0
            elif config is not None:
                assert inputs % (config.block_k * config.split) == 0 and outputs % 16 == 0
            assert config is None or kind == "parts" or config.split == 1


def test_an_unmeasured_shape_is_split_until_its_items_fill_half_of_the_chip():
    for deterministic, last in ((True, (4, 6, 132)), (False, (4, 8, 132, True))):
        assert linear_config(1024, 4096, "parts", 2, deterministic) == LinearConfig(64, 128, 8, *last)
        assert linear_config(8192, 4096, "parts", 2, deterministic) == LinearConfig(64, 128, 1, *last)
        assert linear_config(1024, 192, "parts", 2, deterministic) == LinearConfig(64, 64, 1, *last)
    assert linear_config(1024, 4096, "silu", 100) == LinearConfig(64, 64, 1, 4, 8, 132, True, True)
    assert linear_config(1024, 4096, "silu", 100, deterministic=True) == LinearConfig(64, 64, 1, 4, 8, 132)


@pytest.mark.parametrize(
    ("outputs", "inputs", "kind", "split"),
    [
        (5120, 8192, "parts", 2),
        (8192, 14336, "parts", 2),
        (14336, 5120, "parts", 1),
        (8192, 64, "parts", 1),  # not enough inputs for two parts
        (28672, 8192, "silu", 1),
    ],
)
def test_above_64_rows_an_unmeasured_shape_of_many_outputs_gets_taller_tiles(outputs, inputs, kind, split):
    for rows in (65, 128):
        assert linear_config(outputs, inputs, kind, rows) == LinearConfig(128, 64, split, 4, 6, 132, True)
        assert linear_config(4096, inputs, kind, rows).block_n == 64


@pytest.mark.parametrize(
    ("outputs", "inputs", "kind", "config"),
    [
        (5120, 8192, "parts", LinearConfig(64, 128, 1, 4, 6, 132, True)),
        (1024, 4096, "parts", LinearConfig(64, 128, 8, 4, 6, 132, True)),
        (28672, 8192, "silu", LinearConfig(256, 64, 1, 4, 5, 132, True)),
        (25600, 5120, "silu", LinearConfig(256, 64, 1, 4, 5, 132, True)),  # 100 tiles
        (14336, 8192, "silu", LinearConfig(64, 64, 1, 4, 8, 132, True, True)),  # 56 would be too few
        (64128, 8192, "whole", LinearConfig(128, 128, 1, 4, 4, 132, True)),
        (1024, 192, "parts", LinearConfig(64, 64, 1, 4, 6, 132, True)),
    ],
)
def test_from_33_to_64_rows_an_unmeasured_shape_gets_the_tiles_of_its_kind(outputs, inputs, kind, config):
    for rows in (33, 64):
        assert linear_config(outputs, inputs, kind, rows) == config


def test_one_row_of_an_unmeasured_shape_uses_gemv_if_whole_loads_divide_it():
    assert linear_config(1024, 4096, "parts", 1) == GemvConfig(at_once=16)
    assert linear_config(1024, 14336, "parts", 1) == GemvConfig(at_once=8)
    assert linear_config(1024, 28672, "parts", 1) == GemvConfig(split=7, at_once=16)
    assert linear_config(1024, 25600, "parts", 1) == GemvConfig(split=5, neurons=2, at_once=4)
    assert linear_config(32000, 8192, "whole", 1) == GemvConfig(at_once=16)
    assert linear_config(1024, 32768, "whole", 1) == LinearConfig(64, 128, 1, 4, 8, 132, True), "too many loads"
    assert linear_config(1024, 5120, "silu", 1) == GemvConfig(at_once=4)
    assert linear_config(1024, 192, "parts", 1) == LinearConfig(64, 64, 1, 4, 8, 132, True)


def test_tiles_that_are_too_narrow_for_the_copy_engine_are_not_streamed():
    assert linear_config(1024, 96, "parts", 1) == LinearConfig(64, 32, 1, 4, 6, 132)


def test_cublas_computes_indivisible_shapes_and_the_output_layer_of_many_rows():
    assert linear_config(1024, 100, "parts", 1) is None
    assert linear_config(151936, 4096, "whole", 64) is not None
    assert linear_config(151936, 4096, "whole", 65) is None
    assert linear_config(32000, 4096, "whole", 128) is None


def test_the_deterministic_column_never_uses_cublas_for_many_rows():
    for shape in SHAPES:
        configs = [linear_config(*shape, rows, deterministic=True) for rows in (1, 64, 128, 129, 8192)]
        assert None not in configs and len({config.split for config in configs}) == 1
        assert all(isinstance(config, LinearConfig) and not config.streamed for config in configs)
    assert linear_config(1024, 100, "parts", 1, deterministic=True) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_configuration_of_the_table_gives_the_product(shape):
    """At the ends of all bands, including partial tiles and odd numbers of rows."""
    outputs, inputs, kind = shape
    run = {"parts": linear_parts, "whole": linear, "silu": gated_linear}[kind]
    bands = {most for column in (FAST, DETERMINISTIC) for most, _ in column.get(shape, ())}
    x_all, w, exact = operands(max(bands), outputs, inputs)
    for rows in sorted({rows for most in bands for rows in (most, most - 1, most // 2 + 1) if rows > 0}):
        expected = exact[:rows]
        if kind == "silu":
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        for deterministic in (True, False):
            config = linear_config(*shape, rows, deterministic)
            if config is not None and kind == "silu":  # as adapters take it: before SiLU
                assert relative(linear(x_all[:rows], w, config), exact[:rows]) < 5e-3, (rows, config)
            if config is not None:
                got = run(x_all[:rows], w, config)
                whole = got.double().sum(0) if kind == "parts" else got
                # Tensor cores cut off bits at each sum: on an H200 17,408 of them in a row come to 2e-5.
                of_parts = max(1e-5, 2e-9 * inputs / config.split)
                assert relative(whole, expected) < (of_parts if kind == "parts" else 5e-3), (rows, config)


def test_codes_of_an_unmeasured_shape_are_streamed_and_split_until_three_programs_fit_a_multiprocessor():
    for format in ("fp8_block", "fp8_row"):
        assert linear_config(6144, 4096, "silu", 8, format=format) is not None
        assert linear_config(5120, 5120, "parts", 8, format=format) == LinearConfig(64, 128, 4, 4, 5, 396, True)
        assert linear_config(1024, 96, "parts", 8, format=format) == LinearConfig(64, 32, 1, 4, 6, 132), (
            "no whole block"
        )
    assert linear_config(5120, 5120, "parts", 8, format="mxfp8") == LinearConfig(64, 128, 1, 4, 6, 132)


def test_tiles_of_a_gated_product_are_short_where_tall_ones_would_leave_half_of_the_chip_idle():
    heights = {outputs: linear_config(outputs, 1024, "silu", 128).block_n for outputs in (6144, 12288, 24576)}
    assert heights == {6144: 64, 12288: 128, 24576: 128}
