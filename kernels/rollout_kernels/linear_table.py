"""Which configuration of `triton_linear` a product takes: measured on an H200 by `scripts/tune_linear.py`.

An entry lists configurations with the number of rows up to which each is the one to take; above the last, the product
is left to cuBLAS. All configurations of a shape cut K into the same parts, so the order in which a row's products are
added does not depend on the batch, as far as the entry goes. A shape that is not in the table gets what most measured
shapes came to.
"""

from __future__ import annotations

from typing import Literal

from rollout_kernels.triton_linear import LinearConfig

Kind = Literal["parts", "whole", "silu"]
Bands = tuple[tuple[int, LinearConfig], ...]

#: Rows above which all products are cuBLAS's.
MOST_ROWS = 128
_PROGRAMS = 132
_MOST_SPLITS = 8


def _bands(split: int, block_n: int = 64, block_k: int = 128) -> Bands:
    """One program a multiprocessor; with more rows narrower tiles, since those of x take their share of the memory."""
    few = LinearConfig(block_n, block_k, split, 4, 6, _PROGRAMS)
    many = LinearConfig(block_n, min(block_k, 64), split, 4, 8, _PROGRAMS)
    return (32, few), (MOST_ROWS, many)


_HEAD: Bands = ((64, LinearConfig(128, 128, 1, 4, 4, _PROGRAMS)),)  # above, cuBLAS is faster
_TABLE: dict[tuple[int, int, Kind], Bands] = {
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


def linear_config(outputs: int, inputs: int, kind: Kind, rows: int, deterministic: bool = False) -> LinearConfig | None:
    """The configuration for `w [outputs, inputs]` and a number of rows; None where cuBLAS is to be taken.

    That is where more rows than the entry has are asked for, and where no tile divides the inputs. `deterministic`
    never gives way to cuBLAS for many rows: the products of a row are added in one order whatever the batch, in
    prefill too.

    `parts` may split K; `whole` and `silu` may not (for `silu`, outputs counts gate and up rows).
    """
    bands = _TABLE.get((outputs, inputs, kind)) or _fallback(outputs, inputs, kind)
    if bands is None:
        return None
    return next((config for most, config in bands if rows <= most), bands[-1][1] if deterministic else None)


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
