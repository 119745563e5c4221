"""The kernel and configuration of products with few rows: a table measured by `scripts/tune/linear.py`.

Qwen3 was measured on an H200, Qwen3.5 on an H100.

An entry is a list of bands: a number of rows, and the configuration for products with up to that many rows. Above the
last band cuBLAS computes the product. There are four columns:

    fast           for each band the configuration with which whole decode steps were fastest: `triton_gemv` for one
                   row, otherwise tiles, mostly streamed (`gluon_linear`)
    coded          as fast, for weights that are codes
    both coded     as fast, where activations are codes, too
    deterministic  all configurations of an entry split K in the same way, so the order in which the products of a row
                   are added does not depend on the batch

A shape that is not in a column gets the configuration that was best for most measured shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from rollout_kernels.linear.triton_gemv import GemvConfig
from rollout_kernels.linear.triton_linear import LinearConfig
from rollout_kernels.moe.formats import Format

Kind = Literal["parts", "whole", "silu"]
Config = LinearConfig | GemvConfig
Bands = tuple[tuple[int, Config], ...]

#: Above this many rows cuBLAS computes every product.
MOST_ROWS = 128
_PROGRAMS = 132
_MOST_SPLITS = 8
#: Above 64 rows, tiles of 64 outputs were best for the measured shapes up to this size, and taller ones above it.
_MOST_SHORT_OUTPUTS = 4096
#: Loads of a warp of `triton_gemv`. They are unrolled, and more of them take long to compile.
_MOST_LOADS = 64


def _pipelined(split: int, block_n: int = 64, block_k: int = 128) -> Bands:
    """One program a multiprocessor. With more rows, tiles have fewer inputs, since x needs shared memory too."""
    few = LinearConfig(block_n, block_k, split, 4, 6, _PROGRAMS)
    many = LinearConfig(block_n, min(block_k, 64), split, 4, 8, _PROGRAMS)
    return (32, few), (MOST_ROWS, many)


def _streamed(split: int, *bands: tuple[int, int, int, int, int], stagger: bool = False) -> Bands:
    """Streamed bands; each is given as rows, BLOCK_N, BLOCK_K, stages, programs."""
    return tuple(
        (rows, LinearConfig(n, k, split, 4, stages, programs, True, stagger)) for rows, n, k, stages, programs in bands
    )


def _streamed_codes(*bands: tuple[int, int, int, int, int, int], stagger: bool = False, both: bool = False) -> Bands:
    """Streamed bands of codes: rows, BLOCK_N, split, warps, stages, programs."""
    return tuple(
        (rows, LinearConfig(n, 128, split, warps, stages, programs, True, stagger, both))
        for rows, n, split, warps, stages, programs in bands
    )


_HEAD: Bands = ((64, LinearConfig(128, 128, 1, 4, 4, _PROGRAMS)),)  # above, cuBLAS is faster
#: The columns: bands by outputs, inputs and kind.
FAST: dict[tuple[int, int, Kind], Bands] = {
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
        *_streamed(1, (8, 64, 256, 5, 132), (32, 64, 128, 8, 132), stagger=True),
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
    # Qwen3-0.6B: measured up to 8 rows. Above as in no entry.
    (1024, 3072, "parts"): (
        (1, GemvConfig(3, neurons=2, at_once=4, num_warps=4)),
        *_streamed(6, (8, 64, 64, 8, 132)),
        *_streamed(8, (32, 64, 128, 8, 132), (64, 64, 128, 6, 132), (MOST_ROWS, 64, 64, 8, 132)),
    ),
    # Qwen3.5-27B: measured above 64 rows, where cuBLAS is faster for outputs of attention. Below as in no entry.
    (16480, 5120, "whole"): (
        (1, GemvConfig(1, neurons=2, at_once=4, num_warps=4)),
        *_streamed(1, (32, 64, 128, 8, 132), (64, 64, 64, 8, 132), (MOST_ROWS, 128, 64, 6, 132)),
    ),
    (5120, 6144, "parts"): (
        (1, GemvConfig(1, neurons=1, at_once=8, num_warps=4)),
        *_streamed(1, (32, 64, 128, 8, 132), (64, 64, 64, 8, 132)),
    ),
    (34816, 5120, "silu"): (
        (1, GemvConfig(1, neurons=1, at_once=4, num_warps=4)),
        *_streamed(1, (32, 64, 128, 8, 132), (64, 64, 64, 8, 132), stagger=True),
        *_streamed(1, (MOST_ROWS, 128, 64, 6, 96)),
    ),
    (5120, 17408, "parts"): (
        *_streamed(1, (32, 64, 128, 8, 132), (64, 64, 64, 8, 132)),
        *_streamed(2, (MOST_ROWS, 128, 64, 6, 132)),
    ),
}
#: `fp8_block` alone, measured on an H200.
CODED: dict[tuple[int, int, Kind], Bands] = {
    # Qwen3-8B
    (6144, 4096, "parts"): (
        (1, GemvConfig(1, neurons=2, at_once=4, num_warps=4)),
        *_streamed_codes((8, 128, 8, 4, 3, 396), (16, 64, 4, 4, 5, 396), (32, 64, 4, 4, 3, 528)),
        *_streamed_codes((64, 128, 4, 4, 3, 264), (MOST_ROWS, 128, 2, 8, 4, 132)),
    ),
    (4096, 4096, "parts"): (
        (1, GemvConfig(1, neurons=2, at_once=4, num_warps=4)),
        *_streamed_codes((8, 128, 8, 4, 5, 264), (16, 64, 8, 4, 4, 528), (32, 64, 4, 4, 6, 264)),
        *_streamed_codes((64, 64, 4, 4, 4, 264), (MOST_ROWS, 64, 2, 4, 5, 132)),
    ),
    (24576, 4096, "silu"): (
        (1, GemvConfig(1, neurons=1, at_once=4, num_warps=4)),
        *_streamed_codes((8, 64, 1, 4, 7, 396), (16, 64, 1, 4, 5, 396), (32, 128, 1, 4, 4, 264), stagger=True),
        *_streamed_codes((64, 128, 1, 4, 3, 264), (MOST_ROWS, 64, 1, 4, 5, 132), stagger=True),
    ),
    (4096, 12288, "parts"): (
        (1, GemvConfig(3, neurons=2, at_once=4, num_warps=4)),
        *_streamed_codes((8, 64, 8, 4, 5, 528), (16, 64, 6, 4, 5, 396), (32, 64, 4, 4, 6, 264)),
        *_streamed_codes((64, 128, 8, 4, 3, 264), (MOST_ROWS, 128, 4, 8, 4, 132)),
    ),
}
#: `fp8_block`, and activations as codes, measured on an H200.
BOTH_CODED: dict[tuple[int, int, Kind], Bands] = {
    # Qwen3-8B
    (6144, 4096, "parts"): _streamed_codes((64, 64, 4, 4, 4, 396), (MOST_ROWS, 64, 2, 4, 4, 264), both=True),
    (4096, 4096, "parts"): _streamed_codes((64, 64, 4, 4, 6, 264), (MOST_ROWS, 64, 4, 4, 4, 264), both=True),
    (24576, 4096, "silu"): _streamed_codes(
        (64, 64, 1, 4, 4, 396), (MOST_ROWS, 192, 1, 8, 5, 132), stagger=True, both=True
    ),
    (4096, 12288, "parts"): _streamed_codes((64, 64, 6, 4, 4, 396), (MOST_ROWS, 64, 4, 4, 4, 264), both=True),
}
DETERMINISTIC: dict[tuple[int, int, Kind], Bands] = {
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


def linear_config(
    outputs: int,
    inputs: int,
    kind: Kind,
    rows: int,
    deterministic: bool = False,
    format: Format = "plain",
    codes: bool = False,
) -> Config | None:
    """The configuration for a product with weights [outputs, inputs] and `rows` rows, or None to use cuBLAS.

    cuBLAS is used above the last band, and if no tile size divides the inputs. With `deterministic`, the last band has
    no upper end: the products of a row are added in one order for every number of rows, in prefill too.

    Args:
        outputs: rows of the weights; for `silu`, gate rows plus up rows.
        inputs: columns of the weights.
        kind: `parts` may split K (`linear_parts`); `whole` (`linear`) and `silu` (`gated_linear`) may not.
        rows: tokens of the product.
        deterministic: use the deterministic column.
        format: of the weights. Sums of `fp8_block` depend on the inputs of a tile, too.
        codes: activations are codes, too; weights are then in `fp8_block`.
    """
    shape = (outputs, inputs, kind)
    if codes:
        bands = BOTH_CODED.get(shape) or _other_both_coded(*shape)
        return next((config for most, config in bands if rows <= most), None)
    if format != "plain" and not deterministic:
        measured = CODED.get(shape) if format == "fp8_block" else None
        bands = measured or _other_coded(*shape, streamed=format != "mxfp8")
        return next((config for most, config in bands if rows <= most), None)
    column, unmeasured = (DETERMINISTIC, _other_order) if deterministic else (FAST, _other)
    bands = column.get(shape) or unmeasured(*shape)
    found = next((config for most, config in bands if rows <= most), bands[-1][1] if deterministic and bands else None)
    if format == "plain" or found is None:
        return found
    narrowest = min(config.block_k for _, config in bands if isinstance(config, LinearConfig))
    return replace(found, block_k=narrowest) if isinstance(found, LinearConfig) else found


def _other_coded(outputs: int, inputs: int, kind: Kind, streamed: bool) -> Bands:
    """The bands of codes for a shape that is not in the table. A tile has columns of one scale."""
    cut = _cut(outputs, inputs, kind)
    if cut is None:
        return ()
    split, block_k = cut
    if streamed and block_k == 128:
        full = _fullest_split(outputs, inputs, kind)
        sizes = (16, 64, full, 4, 5, 396), (32, 64, full, 4, 4, 396), (64, 64, full, 4, 4, 264)
        bands = _streamed_codes(*sizes, (MOST_ROWS, 64, split, 4, 5, _PROGRAMS), stagger=kind == "silu")
        return *_alone_coded(inputs, kind), *bands
    few = ((32, LinearConfig(64, block_k, split, 4, 6, _PROGRAMS)),)
    many = ((MOST_ROWS, LinearConfig(128, block_k, split, 8, 4, _PROGRAMS)),)
    return *_alone_coded(inputs, kind), *few, *many


def _other_both_coded(outputs: int, inputs: int, kind: Kind) -> Bands:
    """Like `_other_coded`, for activations that are codes, too."""
    few, many = (_fullest_split(outputs, inputs, kind, places) for places in (3, 2))
    sizes = (64, 64, few, 4, 4, 3 * _PROGRAMS), (MOST_ROWS, 64, many, 4, 4, 2 * _PROGRAMS)
    return _streamed_codes(*sizes, stagger=kind == "silu", both=True)


def _fullest_split(outputs: int, inputs: int, kind: Kind, places: int = 3) -> int:
    """The least split of K that leaves the fewest places on a multiprocessor without an item."""
    tiles, programs = -(-outputs // 64), places * _PROGRAMS

    def filled(split: int) -> float:
        items = tiles * split
        return items / (-(-items // programs) * programs)

    splits = range(1, _MOST_SPLITS + 1) if kind == "parts" else (1,)
    return max((split for split in splits if inputs % (128 * split) == 0), key=filled)


def _alone_coded(inputs: int, kind: Kind) -> Bands:
    for at_once in (8, 4, 2):
        reads = at_once * (2 if kind == "silu" else 1)
        for split in range(1, _MOST_SPLITS + 1) if kind == "parts" else (1,):
            if reads <= 8 and inputs % (512 * at_once * split) == 0 and inputs // (512 * split) <= 16:
                return ((1, GemvConfig(split, 1, at_once)),)
    return ()


def last_rows() -> list[int]:
    """The numbers of rows after which a product may change its kernel, ascending; start-up compiles for these sizes.

    They are the powers of two up to `MOST_ROWS`: bands end there, and rows are padded to such tiles.
    """
    return [1 << bit for bit in range(MOST_ROWS.bit_length())]


def _cut(outputs: int, inputs: int, kind: Kind) -> tuple[int, int] | None:
    """Split of K and inputs of a tile for a shape that is not in the table; None if no tile size divides the inputs.

    Tiles are narrower where only so a split of K gives enough programs something to do.
    """
    tiles, cuts = -(-outputs // 64), []
    for block_k in (size for size in (128, 64, 32) if inputs % size == 0):
        split = 1
        while tiles * split < _PROGRAMS // 2 and split < _MOST_SPLITS and inputs % (block_k * split * 2) == 0:
            split *= 2
        if kind != "parts" or tiles * split >= _PROGRAMS // 2:
            return (split if kind == "parts" else 1), block_k
        cuts.append((split, block_k))
    return cuts[0] if cuts else None


def _other_order(outputs: int, inputs: int, kind: Kind) -> Bands:
    """The deterministic bands of a shape that is not in the table."""
    cut = _cut(outputs, inputs, kind)
    if cut is None:
        return ()
    if kind == "whole":
        return ((64, LinearConfig(128, cut[1], 1, 4, 4, _PROGRAMS)),)
    return _pipelined(cut[0], block_k=cut[1])


def _other(outputs: int, inputs: int, kind: Kind) -> Bands:
    """The fast bands of a shape that is not in the table: one row by output, more rows streamed."""
    cut = _cut(outputs, inputs, kind)
    if cut is None or cut[1] < 64:  # tiles that are too narrow for the copy engine
        return _other_order(outputs, inputs, kind)
    split, block_k = cut
    few = _streamed(split, (32, 64, block_k, 8, _PROGRAMS), stagger=kind == "silu")
    many = () if kind == "whole" else _many(outputs, inputs, kind, split)
    return *_alone(inputs, kind), *few, *_some(outputs, kind, split, block_k), *many


def _some(outputs: int, kind: Kind, split: int, block_k: int) -> Bands:
    """The band above 32 rows."""
    if kind == "parts":
        return _streamed(split, (64, 64, block_k, 6, _PROGRAMS))
    if kind == "whole":
        return _streamed(split, (64, 128, block_k, 4, _PROGRAMS))
    if outputs // 256 >= _PROGRAMS * 3 // 4:
        return _streamed(split, (64, 256, 64, 5, _PROGRAMS))
    return _streamed(split, (64, 64, 64, 8, _PROGRAMS), stagger=True)


def _many(outputs: int, inputs: int, kind: Kind, split: int) -> Bands:
    """The band above 64 rows. Every tile reads all rows again, so tiles are taller where that leaves enough of them."""
    tiles = -(-outputs // 128)
    if outputs <= _MOST_SHORT_OUTPUTS:
        return _streamed(split, (MOST_ROWS, 64, 64, 8, _PROGRAMS), stagger=kind == "silu")
    if kind == "silu" and tiles < _PROGRAMS // 2:
        return _streamed(split, (MOST_ROWS, 64, 64, 6, _PROGRAMS))
    split = 1
    if kind == "parts":
        while tiles * split * 2 <= _PROGRAMS and inputs % (64 * split * 2) == 0:
            split *= 2
    return _streamed(split, (MOST_ROWS, 128, 64, 6, _PROGRAMS))


def _alone(inputs: int, kind: Kind) -> Bands:
    """The band of one row by output, if whole loads divide the inputs and a warp does not need too many; else none."""
    for at_once in (8, 4) if kind == "silu" else (16, 8, 4):
        neurons = 2 if at_once == 4 and kind != "silu" else 1
        rows = 2 if kind == "silu" else neurons
        for split in range(1, _MOST_SPLITS + 1) if kind == "parts" else (1,):
            if inputs % (256 * at_once * split) == 0 and inputs // (256 * split) * rows <= _MOST_LOADS:
                return ((1, GemvConfig(split, neurons, at_once)),)
    return ()
