"""Which configuration of `triton_linear` a product takes: measured on an H200 by `scripts/tune_linear.py`.

One entry serves all row counts, so that the order in which a row's products are added does not depend on the batch.
A shape that is not in the table gets the entry that most measured shapes came to: tiles of 64 x 128 and enough
programs for 132 multiprocessors.
"""

from __future__ import annotations

from typing import Literal

from rollout_kernels.triton_linear import LinearConfig

Kind = Literal["parts", "whole", "silu"]

_TABLE: dict[tuple[int, int, Kind], LinearConfig] = {
    # Qwen3-8B
    (6144, 4096, "parts"): LinearConfig(64, 128, 2, 4, 4),
    (4096, 4096, "parts"): LinearConfig(64, 128, 2, 4, 5),
    (24576, 4096, "silu"): LinearConfig(32, 128, 1, 4, 3),
    (4096, 12288, "parts"): LinearConfig(64, 128, 4, 4, 3),
    (151936, 4096, "whole"): LinearConfig(64, 128, 1, 4, 3),
}
_PROGRAMS = 120
_MOST_SPLITS = 8


def linear_config(outputs: int, inputs: int, kind: Kind) -> LinearConfig | None:
    """The configuration for `w [outputs, inputs]`, or None where no tile divides the inputs.

    `parts` may split K; `whole` and `silu` may not (for `silu`, outputs counts gate and up rows).
    """
    found = _TABLE.get((outputs, inputs, kind))
    if found is not None:
        return found
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
