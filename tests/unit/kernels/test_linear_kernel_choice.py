"""Start-up compiles every kernel that a product can need: each number of rows uses a kernel of a start-up size."""

from typing import Any

import pytest
import torch
from rollout_kernels.linear import gluon_linear, triton_code_rows, triton_gemv, triton_half_rows, triton_linear
from rollout_kernels.linear.coded import CodedMatrix, Weights, scales_shape
from rollout_kernels.linear.table import DETERMINISTIC, FAST, MOST_ROWS, last_rows, linear_config

#: The shapes of the table, and some that are not in it.
SHAPES = [*{**FAST, **DETERMINISTIC}, (1024, 4096, "parts"), (4096, 11008, "silu"), (32000, 4096, "whole")]


class Launches:
    """Stands in for a kernel: records the constants that it would be compiled for, and launches nothing."""

    def __init__(self, name: str, into: list[Any]) -> None:
        self.name, self.into = name, into

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            blocks = [tuple(arg.block_shape) for arg in args if hasattr(arg, "block_shape")]
            self.into.append((self.name, blocks, sorted(constants.items(), key=str)))

        return launch


@pytest.fixture
def launched(monkeypatch) -> list[Any]:
    made: list[Any] = []
    for module, name in (
        (triton_linear, "_linear_kernel"),
        (gluon_linear, "_stream_kernel"),
        (gluon_linear, "_coded_kernel"),
        (gluon_linear, "_block_kernel"),
        (triton_code_rows, "_code_rows_kernel"),
        (triton_half_rows, "_half_rows_kernel"),
        (triton_gemv, "_gemv_kernel"),
    ):
        monkeypatch.setattr(module, name, Launches(name, made))
    monkeypatch.setattr(gluon_linear, "takes", lambda x, w, silu: True)
    return made


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_up_to_a_size_take_the_kernel_of_that_size(shape, adapted, deterministic, launched):
    """With adapters, the product of gate and up uses its configuration without SiLU."""
    outputs, inputs, kind = shape
    silu = kind == "silu" and not adapted
    w = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    check_sizes(shape, w, silu, deterministic, launched)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] != "whole"], ids=str)
def test_so_do_products_of_codes(shape, both, launched):
    """Where activations are codes, too, a product whose inputs are no whole blocks has no kernel."""
    outputs, inputs, kind = shape
    scales = torch.empty(scales_shape((outputs,), inputs, "fp8_block"), device="meta")
    codes = CodedMatrix(torch.empty(outputs, inputs, dtype=torch.uint8, device="meta"), scales, "fp8_block", (outputs,))
    if not both or codes.takes_codes:
        check_sizes(shape, codes, kind == "silu", False, launched, both)


def check_sizes(
    shape: tuple[int, int, Any],
    w: Weights,
    silu: bool,
    deterministic: bool,
    launched: list[Any],
    both: bool = False,
) -> None:
    outputs, inputs, kind = shape
    format = w.format if isinstance(w, CodedMatrix) else "plain"

    def kernel(rows: int) -> Any:
        config = linear_config(*shape, rows, deterministic, format, both)
        if config is None:
            return None
        x, whole = (torch.empty(rows, width, dtype=torch.bfloat16, device="meta") for width in (inputs, outputs))
        out = whole if kind != "parts" else torch.empty(config.split, rows, outputs, device="meta")
        launched.clear()
        triton_linear.multiply_into(x, w, out, outputs // 2 if silu else outputs, config, "silu" if silu else None)
        return launched.copy()

    sizes = last_rows()
    assert sizes == sorted(set(sizes)) and sizes[-1] == MOST_ROWS
    for rows in range(1, MOST_ROWS + 1):
        assert kernel(rows) == kernel(next(size for size in sizes if size >= rows)), rows
    assert kernel(MOST_ROWS + 1) == (kernel(MOST_ROWS) if deterministic else None)
