"""The kernel and configuration of products with few rows: `table.json`, measured by `scripts/tune/linear.py`.

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

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any, Literal

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


def _pipelined(split: int, block_k: int) -> Bands:
    """One program a multiprocessor. With more rows, tiles have fewer inputs, since x needs shared memory too."""
    few = LinearConfig(64, block_k, split, 4, 6, _PROGRAMS)
    many = LinearConfig(64, min(block_k, 64), split, 4, 8, _PROGRAMS)
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


def _column(entries: list[dict[str, Any]]) -> dict[tuple[int, int, Kind], Bands]:
    """A column of the table that comes with the package: bands by outputs, inputs and kind."""
    bands_of = {}
    for entry in entries:
        outputs, inputs, kind = entry["shape"]
        bands_of[outputs, inputs, kind] = tuple((band["rows"], _config(band)) for band in entry["bands"])
    return bands_of


def _config(band: dict[str, Any]) -> Config:
    return GemvConfig(**band["by_output"]) if "by_output" in band else LinearConfig(**band["tiles"])


_TABLE = json.loads(files("rollout_kernels.linear").joinpath("table.json").read_text(encoding="utf-8"))["columns"]
FAST, CODED, BOTH_CODED, DETERMINISTIC = (
    _column(_TABLE[name]) for name in ("fast", "coded", "both_coded", "deterministic")
)


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
    few, many = (_fullest_split(outputs, inputs, kind, programs_each) for programs_each in (3, 2))
    sizes = (64, 64, few, 4, 4, 3 * _PROGRAMS), (MOST_ROWS, 64, many, 4, 4, 2 * _PROGRAMS)
    return _streamed_codes(*sizes, stagger=kind == "silu", both=True)


def _fullest_split(outputs: int, inputs: int, kind: Kind, programs_each: int = 3) -> int:
    """The least split of K that leaves the fewest programs of a multiprocessor without an item."""
    tiles, programs = -(-outputs // 64), programs_each * _PROGRAMS

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
    return _pipelined(*cut)


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
