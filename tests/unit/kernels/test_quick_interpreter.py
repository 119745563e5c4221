"""The faster interpreter of the tests leaves Triton's language and functions as the original does."""

import os

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")


@triton.jit
def _doubled(x):
    return x + x


@triton.jit
def _sums_kernel(x_ptr, out_ptr, WRONG: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = _doubled(tl.load(x_ptr + at))
    total = tl.sum(x) + tl.max(_doubled(x))
    if WRONG:
        total = tl.no_such_function(total)
    tl.store(out_ptr + at, tl.cumsum(x) + total)


def test_every_launch_is_right_and_leaves_the_language_as_it_was() -> None:
    before = {name: getattr(tl, name) for name in ("load", "sum", "reduce", "range", "multiple_of")}
    members = {name: getattr(tl.tensor, name) for name in ("__add__", "to")}
    x, out = torch.arange(1, 9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    for wrong in (False, True, False):
        out.zero_()
        if wrong:
            with pytest.raises(Exception, match="no_such_function"):
                _sums_kernel[(1,)](x, out, WRONG=True, N=8)
        else:
            _sums_kernel[(1,)](x, out, WRONG=False, N=8)
            assert out.tolist() == (2 * x.cumsum(0) + 72 + 32).tolist()
        assert {name: getattr(tl, name) for name in before} == before
        assert {name: getattr(tl.tensor, name) for name in members} == members


def test_a_sum_that_overflows_wraps_round_as_on_a_gpu() -> None:
    x, out = torch.full((8,), 2**30, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    _sums_kernel[(1,)](x, out, WRONG=False, N=8)
    expected = 2 * x.long().cumsum(0) + 16 * 2**30 + 4 * 2**30
    assert out.tolist() == expected.int().tolist()
