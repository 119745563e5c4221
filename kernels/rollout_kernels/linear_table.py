"""Which kernel and configuration a few-row product takes: measured on an H200 by `scripts/tune_linear.py`.

An entry lists configurations with the number of rows up to which each is the one to take; above the last, the product
is left to cuBLAS. There are two columns. The fast one takes for each band of rows what whole decode steps were fastest
with: a single row by output (`triton_gemv`), tiles otherwise, most of them streamed (`gluon_linear`); a few rows that
follow a norm go better pipelined (`triton_linear`) in one shape. In the deterministic one all
configurations of an entry cut K into the same parts, so that the order in which a row's products are added does not
depend on the batch. A shape that is not in the table gets what most measured shapes came to.
"""

from __future__ import annotations

from typing import Literal

from rollout_kernels.triton_gemv import GemvConfig
from rollout_kernels.triton_linear import LinearConfig

Kind = Literal["parts", "whole", "silu"]
Config = LinearConfig | GemvConfig
Bands = tuple[tuple[int, Config], ...]

#: Rows above which all products are cuBLAS's.
MOST_ROWS = 128
_PROGRAMS = 132
_MOST_SPLITS = 8


def _bands(split: int, block_n: int = 64, block_k: int = 128) -> Bands:
    """One program a multiprocessor; with more rows narrower tiles, since those of x take their share of the memory."""
    few = LinearConfig(block_n, block_k, split, 4, 6, _PROGRAMS)
    many = LinearConfig(block_n, min(block_k, 64), split, 4, 8, _PROGRAMS)
    return (32, few), (MOST_ROWS, many)


def _streamed(split: int, *bands: tuple[int, int, int, int, int]) -> Bands:
    """Rows, BLOCK_N, BLOCK_K, stages and programs of each band."""
    return tuple((rows, LinearConfig(n, k, split, 4, stages, programs, True)) for rows, n, k, stages, programs in bands)


_HEAD: Bands = ((64, LinearConfig(128, 128, 1, 4, 4, _PROGRAMS)),)  # above, cuBLAS is faster
_FAST: dict[tuple[int, int, Kind], Bands] = {
    # Qwen3-8B
    (6144, 4096, "parts"): (
        (1, GemvConfig(1, neurons=2, at_once=4, num_warps=8)),
        *_streamed(4, (8, 192, 64, 8, 128), (32, 64, 128, 8, 132)),
        *_streamed(2, (MOST_ROWS, 128, 64, 6, 96)),
    ),
    (4096, 4096, "parts"): (
        (1, GemvConfig(1, neurons=1, at_once=16, num_warps=4)),
        *_streamed(2, (8, 64, 128, 11, 132), (32, 64, 128, 8, 128), (MOST_ROWS, 64, 64, 8, 132)),
    ),
    (24576, 4096, "silu"): (
        (1, GemvConfig(1, neurons=1, at_once=8, num_warps=4)),
        *_streamed(1, (8, 192, 128, 4, 132), (32, 192, 64, 7, 132), (MOST_ROWS, 192, 64, 5, 128)),
    ),
    (4096, 12288, "parts"): (
        (1, GemvConfig(3, neurons=2, at_once=4, num_warps=8)),
        *_streamed(2, (8, 64, 128, 11, 132), (32, 64, 128, 8, 128), (MOST_ROWS, 64, 64, 8, 132)),
    ),
    (151936, 4096, "whole"): (
        (2, GemvConfig(1, neurons=1, at_once=16, num_warps=4)),
        *_streamed(1, (8, 192, 128, 4, 132), (64, 128, 128, 5, 132)),
    ),
    # Qwen3-30B-A3B
    (5120, 2048, "parts"): (
        (1, GemvConfig(1, neurons=2, at_once=4, num_warps=8)),
        (4, LinearConfig(64, 128, 1, 4, 6, _PROGRAMS)),
        *_streamed(4, (8, 128, 128, 6, 96)),
        *_streamed(2, (32, 64, 128, 8, 128)),
        (MOST_ROWS, LinearConfig(128, 64, 2, 8, 6, 132, True)),
    ),
    (2048, 4096, "parts"): (
        (1, GemvConfig(1, neurons=1, at_once=16, num_warps=8)),
        *_streamed(4, (8, 64, 128, 5, 132), (32, 64, 128, 6, 132), (MOST_ROWS, 64, 64, 6, 128)),
    ),
    (128, 2048, "parts"): ((MOST_ROWS, LinearConfig(64, 128, 16, 4, 2, _PROGRAMS)),),  # the router
    (151936, 2048, "whole"): (
        (2, GemvConfig(1, neurons=2, at_once=4, num_warps=8)),
        *_streamed(1, (8, 192, 128, 4, 132), (32, 64, 128, 4, 264), (64, 128, 128, 5, 132)),
    ),
}
_DETERMINISTIC: dict[tuple[int, int, Kind], Bands] = {
    # Qwen3-8B
    (6144, 4096, "parts"): _bands(1),
    (4096, 4096, "parts"): _bands(2),
    (24576, 4096, "silu"): (
        (64, LinearConfig(64, 128, 1, 4, 6, 132)),
        (MOST_ROWS, LinearConfig(128, 64, 1, 4, 4, 192)),
    ),
    (4096, 12288, "parts"): _bands(2),
    (151936, 4096, "whole"): _HEAD,
    # Qwen3-1.7B
    (12288, 2048, "silu"): (
        (32, LinearConfig(128, 64, 1, 4, 6, _PROGRAMS)),
        (MOST_ROWS, LinearConfig(64, 64, 1, 4, 4, 192)),
    ),
    # Qwen3-30B-A3B
    (151936, 2048, "whole"): _HEAD,
}


def linear_config(outputs: int, inputs: int, kind: Kind, rows: int, deterministic: bool = False) -> Config | None:
    """The configuration for `w [outputs, inputs]` and a number of rows; None where cuBLAS is to be taken.

    That is where more rows than the entry has are asked for, and where no tile divides the inputs. `deterministic`
    never gives way to cuBLAS for many rows: the products of a row are added in one order whatever the batch, in
    prefill too.

    `parts` may split K; `whole` and `silu` may not (for `silu`, outputs counts gate and up rows).
    """
    shape = (outputs, inputs, kind)
    bands = None if deterministic else _FAST.get(shape)
    bands = bands or _DETERMINISTIC.get(shape) or _fallback(*shape)
    if bands is None:
        return None
    return next((config for most, config in bands if rows <= most), bands[-1][1] if deterministic else None)


def last_rows() -> list[int]:
    """Numbers of rows up to which every product is one kernel, ascending; above the last nothing changes.

    Bands end at powers of two, and so do the tiles that rows are padded to.
    """
    return [1 << bit for bit in range(MOST_ROWS.bit_length())]


def _fallback(outputs: int, inputs: int, kind: Kind) -> Bands | None:
    block_k = next((size for size in (128, 64, 32) if inputs % size == 0), None)
    if block_k is None:
        return None
    if kind == "whole":
        return ((64, LinearConfig(128, block_k, 1, 4, 4, _PROGRAMS)),)
    tiles, split = -(-outputs // 64), 1
    if kind == "parts":
        while tiles * split < _PROGRAMS // 2 and split < _MOST_SPLITS and inputs % (block_k * split * 2) == 0:
            split *= 2
    return _bands(split, block_k=block_k)
