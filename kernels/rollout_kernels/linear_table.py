"""Which configuration of `triton_linear` a product takes: measured on an H200 by `scripts/tune_linear.py`.

An entry lists configurations with the number of rows up to which each is the one to take; the last has none after it.
Up to 32 rows one configuration serves all, so that the order in which a row's products are added does not depend on
the batch. A shape that is not in the table gets what most measured shapes came to: tiles of 64 x 128, and enough
programs for 132 multiprocessors.
"""

from __future__ import annotations

from typing import Literal

from rollout_kernels.triton_linear import LinearConfig

Kind = Literal["parts", "whole", "silu"]
Bands = tuple[tuple[int, LinearConfig], ...]

_TABLE: dict[tuple[int, int, Kind], Bands] = {
    # Qwen3-8B
    (6144, 4096, "parts"): (
        (32, LinearConfig(64, 128, 2, 4, 4)),
        (64, LinearConfig(64, 128, 1, 4, 5)),
        (128, LinearConfig(128, 64, 2, 4, 6)),
    ),
    (4096, 4096, "parts"): ((64, LinearConfig(64, 128, 2, 4, 5)), (128, LinearConfig(64, 128, 2, 8, 4))),
    (24576, 4096, "silu"): (
        (32, LinearConfig(32, 128, 1, 4, 3)),
        (64, LinearConfig(128, 64, 1, 4, 4)),
        (128, LinearConfig(128, 64, 1, 8, 4)),
    ),
    (4096, 12288, "parts"): (
        (32, LinearConfig(64, 128, 4, 4, 3)),
        (64, LinearConfig(64, 128, 2, 4, 5)),
        (128, LinearConfig(64, 128, 2, 8, 4)),
    ),
    (151936, 4096, "whole"): (
        (32, LinearConfig(64, 128, 1, 4, 3)),
        (64, LinearConfig(128, 128, 1, 4, 4)),
        (128, LinearConfig(128, 64, 1, 4, 6)),
    ),
    # Qwen3-1.7B
    (4096, 2048, "parts"): ((128, LinearConfig(64, 128, 2, 4, 5)),),
    (2048, 2048, "parts"): ((128, LinearConfig(64, 128, 4, 4, 4)),),
    (12288, 2048, "silu"): ((128, LinearConfig(64, 128, 1, 4, 4)),),
    (2048, 6144, "parts"): ((128, LinearConfig(64, 128, 4, 4, 5)),),
    # Qwen3-0.6B
    (4096, 1024, "parts"): ((128, LinearConfig(64, 128, 2, 4, 4)),),
    (1024, 2048, "parts"): ((128, LinearConfig(64, 64, 8, 4, 4)),),
    (6144, 1024, "silu"): ((128, LinearConfig(32, 128, 1, 4, 4)),),
    (1024, 3072, "parts"): ((128, LinearConfig(64, 64, 8, 4, 6)),),
    # Qwen3-30B-A3B
    (5120, 2048, "parts"): ((128, LinearConfig(64, 64, 4, 4, 4)),),
    (2048, 4096, "parts"): ((128, LinearConfig(64, 128, 4, 4, 5)),),
    (151936, 2048, "whole"): ((128, LinearConfig(64, 128, 1, 4, 3)),),
}
_PROGRAMS = 120
_MOST_SPLITS = 8


def linear_config(outputs: int, inputs: int, kind: Kind, rows: int) -> LinearConfig | None:
    """The configuration for `w [outputs, inputs]` and a number of rows, or None where no tile divides the inputs.

    `parts` may split K; `whole` and `silu` may not (for `silu`, outputs counts gate and up rows).
    """
    bands = _TABLE.get((outputs, inputs, kind))
    if bands is not None:
        return next((config for most, config in bands if rows <= most), bands[-1][1])
    block_k = next((size for size in (128, 64, 32) if inputs % size == 0), None)
    if block_k is None:
        return None
    block_n = 32 if kind == "silu" else 64
    columns = -(-(outputs // 2 if kind == "silu" else outputs) // block_n)
    split = 1
    if kind == "parts":
        while columns * split < _PROGRAMS and split < _MOST_SPLITS and inputs % (block_k * split * 2) == 0:
            split *= 2
    return LinearConfig(block_n, block_k, split, 4, 3 if kind == "silu" else 4)
