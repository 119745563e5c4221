"""The table of configurations: every entry fits its shape, and one order of reduction for all numbers of rows."""

from __future__ import annotations

import pytest
from rollout_kernels.linear_table import _TABLE, linear_config
from rollout_kernels.triton_linear import LinearConfig


@pytest.mark.parametrize("shape", _TABLE, ids=str)
def test_every_entry_divides_its_inputs_and_never_changes_the_split(shape):
    outputs, inputs, kind = shape
    configs = [config for rows in range(1, 129) if (config := linear_config(*shape, rows)) is not None]
    assert configs and len({config.split for config in configs}) == 1
    for config in configs:
        assert inputs % (config.block_k * config.split) == 0 and outputs % 64 == 0
        assert kind == "parts" or config.split == 1


def test_a_shape_that_was_not_measured_is_split_until_there_is_an_item_for_half_of_the_chip():
    assert linear_config(1024, 4096, "parts", 1) == LinearConfig(64, 128, 8, 4, 6, 132)
    assert linear_config(8192, 4096, "parts", 1) == LinearConfig(64, 128, 1, 4, 6, 132)
    assert linear_config(1024, 192, "parts", 1) == LinearConfig(64, 64, 1, 4, 6, 132)
    assert linear_config(1024, 4096, "silu", 100) == LinearConfig(64, 64, 1, 4, 8, 132)


def test_what_no_tile_divides_and_the_output_layer_of_many_rows_are_left_to_cublas():
    assert linear_config(1024, 100, "parts", 1) is None
    assert linear_config(151936, 4096, "whole", 64) is not None
    assert linear_config(151936, 4096, "whole", 65) is None
    assert linear_config(32000, 4096, "whole", 128) is None


def test_the_deterministic_column_never_gives_way_to_cublas():
    for shape in _TABLE:
        configs = [linear_config(*shape, rows, deterministic=True) for rows in (1, 64, 128, 129, 8192)]
        assert None not in configs and len({config.split for config in configs}) == 1
    assert linear_config(1024, 100, "parts", 1, deterministic=True) is None
