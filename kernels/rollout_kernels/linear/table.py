"""Which kernel and configuration a few-row product takes: measured on an H200 by `scripts/tune/linear.py`.

An entry lists configurations with the number of rows up to which each is the one to take; above the last, the product
is left to cuBLAS. There are two columns. The fast one takes for each band of rows what whole decode steps were fastest
with: a single row by output (`triton_gemv`), tiles otherwise, most of them streamed (`gluon_linear`). In the
deterministic one all configurations of an entry cut K into the same parts, so that the order in which a row's products
are added does not depend on the batch. A shape that is not in a column gets what most measured shapes came to.
"""

from __future__ import annotations

from typing import Literal

from rollout_kernels.linear.triton_gemv import GemvConfig
from rollout_kernels.linear.triton_linear import LinearConfig

Kind = Literal["parts", "whole", "silu"]
Config = LinearConfig | GemvConfig
Bands = tuple[tuple[int, Config], ...]

#: Rows above which all products are cuBLAS's.
MOST_ROWS = 128
_PROGRAMS = 132
_MOST_SPLITS = 8
#: Of a warp of `triton_gemv`, which writes them out one after the other: more take long to compile.
_MOST_LOADS = 64


def _pipelined(split: int, block_n: int = 64, block_k: int = 128) -> Bands:
    """One program a multiprocessor; with more rows narrower tiles, since those of x take their share of the memory."""
    few = LinearConfig(block_n, block_k, split, 4, 6, _PROGRAMS)
    many = LinearConfig(block_n, min(block_k, 64), split, 4, 8, _PROGRAMS)
    return (32, few), (MOST_ROWS, many)


def _streamed(split: int, *bands: tuple[int, int, int, int, int], turn: bool = False) -> Bands:
    """Rows, BLOCK_N, BLOCK_K, stages and programs of each band."""
    return tuple(
        (rows, LinearConfig(n, k, split, 4, stages, programs, True, turn)) for rows, n, k, stages, programs in bands
    )


_HEAD: Bands = ((64, LinearConfig(128, 128, 1, 4, 4, _PROGRAMS)),)  # above, cuBLAS is faster
_FAST: dict[tuple[int, int, Kind], Bands] = {
    # Qwen3-8B
    (6144, 4096, "parts"): (
        (1, GemvConfig(1, neurons=2, at_once=4, num_warps=8)),
        *_streamed(1, (8, 64, 128, 11, 132), (32, 64, 128, 8, 132)),
        *_streamed(2, (MOST_ROWS, 128, 64, 6, 96)),
    ),
    (4096, 4096, "parts"): (
        (1, GemvConfig(1, neurons=1, at_once=16, num_warps=4)),
        *_streamed(2, (8, 64, 128, 11, 132), (32, 64, 128, 8, 128), (MOST_ROWS, 64, 64, 8, 132)),
    ),
    (24576, 4096, "silu"): (
        (1, GemvConfig(1, neurons=1, at_once=8, num_warps=4)),
        *_streamed(1, (8, 64, 256, 5, 132), (32, 64, 128, 8, 132), turn=True),
        *_streamed(1, (MOST_ROWS, 192, 64, 5, 132)),
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
        *_streamed(2, (1, 64, 128, 11, 132)),
        *_streamed(4, (32, 64, 128, 8, 132), (MOST_ROWS, 64, 64, 6, 128)),
    ),
    (128, 2048, "parts"): ((MOST_ROWS, LinearConfig(64, 128, 16, 4, 2, _PROGRAMS)),),  # the router
    (151936, 2048, "whole"): (
        (2, GemvConfig(1, neurons=2, at_once=4, num_warps=8)),
        *_streamed(1, (8, 192, 128, 4, 132), (32, 64, 128, 4, 264), (64, 128, 128, 5, 132)),
    ),
}
_DETERMINISTIC: dict[tuple[int, int, Kind], Bands] = {
    # Qwen3-8B
    (6144, 4096, "parts"): _pipelined(1),
    (4096, 4096, "parts"): _pipelined(2),
    (24576, 4096, "silu"): (
        (64, LinearConfig(64, 128, 1, 4, 6, 132)),
        (MOST_ROWS, LinearConfig(128, 64, 1, 4, 4, 192)),
    ),
    (4096, 12288, "parts"): _pipelined(2),
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
    column, unmeasured = (_DETERMINISTIC, _other_order) if deterministic else (_FAST, _other)
    bands = column.get(shape) or unmeasured(*shape)
    return next((config for most, config in bands if rows <= most), bands[-1][1] if deterministic and bands else None)


def last_rows() -> list[int]:
    """Numbers of rows up to which every product is one kernel, ascending; above the last nothing changes.

    Bands end at powers of two, and so do the tiles that rows are padded to.
    """
    return [1 << bit for bit in range(MOST_ROWS.bit_length())]


def _cut(outputs: int, inputs: int, kind: Kind) -> tuple[int, int] | None:
    """Split of K and inputs of a tile for a shape that is not in the table; None where no tile divides the inputs."""
    block_k = next((size for size in (128, 64, 32) if inputs % size == 0), None)
    if block_k is None:
        return None
    tiles, split = -(-outputs // 64), 1
    if kind == "parts":
        while tiles * split < _PROGRAMS // 2 and split < _MOST_SPLITS and inputs % (block_k * split * 2) == 0:
            split *= 2
    return split, block_k


def _other_order(outputs: int, inputs: int, kind: Kind) -> Bands:
    """What the deterministic column has for a shape that is not in it."""
    cut = _cut(outputs, inputs, kind)
    if cut is None:
        return ()
    if kind == "whole":
        return ((64, LinearConfig(128, cut[1], 1, 4, 4, _PROGRAMS)),)
    return _pipelined(cut[0], block_k=cut[1])


def _other(outputs: int, inputs: int, kind: Kind) -> Bands:
    """What the fast column has for a shape that is not in it: a row by output, more of them streamed."""
    cut = _cut(outputs, inputs, kind)
    if cut is None or cut[1] < 64:  # tiles that are too narrow for the copy engine
        return _other_order(outputs, inputs, kind)
    split, block_k = cut
    streamed = ((32, 64, block_k, 8, _PROGRAMS), (64 if kind == "whole" else MOST_ROWS, 64, 64, 8, _PROGRAMS))
    return *_alone(inputs, kind), *_streamed(split, *streamed, turn=kind == "silu")


def _alone(inputs: int, kind: Kind) -> Bands:
    """By output, where whole loads divide the inputs, and not too many of them."""
    for at_once in (8, 4) if kind == "silu" else (16, 8, 4):
        neurons = 2 if at_once == 4 and kind != "silu" else 1
        rows = 2 if kind == "silu" else neurons
        for split in range(1, _MOST_SPLITS + 1) if kind == "parts" else (1,):
            if inputs % (256 * at_once * split) == 0 and inputs // (256 * split) * rows <= _MOST_LOADS:
                return ((1, GemvConfig(split, neurons, at_once)),)
    return ()
