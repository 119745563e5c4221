"""Products of decode steps, and candidate configurations for the tuning."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout_kernels.linear.table import Config, Kind
from rollout_kernels.linear.triton_gemv import MOST_ROWS, GemvConfig
from rollout_kernels.linear.triton_linear import LinearConfig

# name: (outputs, inputs, kind); gate_up outputs count both halves.
SHAPES: dict[str, dict[str, tuple[int, int, Kind]]] = {
    "8b": {
        "qkv": (6144, 4096, "parts"),
        "o": (4096, 4096, "parts"),
        "gate_up": (24576, 4096, "silu"),
        "down": (4096, 12288, "parts"),
        "head": (151936, 4096, "whole"),
    },
    "30b-a3b": {"qkv": (5120, 2048, "parts"), "o": (2048, 4096, "parts"), "head": (151936, 2048, "whole")},
    "qwen3.5-27b": {
        "in": (16480, 5120, "whole"),
        "qkv": (14336, 5120, "parts"),
        "o": (5120, 6144, "parts"),
        "gate_up": (34816, 5120, "silu"),
        "down": (5120, 17408, "parts"),
        "head": (248320, 5120, "whole"),
    },
    "qwen3.5-35b-a3b": {
        "in": (12352, 2048, "whole"),
        "qkv": (9216, 2048, "parts"),
        "o": (2048, 4096, "parts"),
        "head": (248320, 2048, "whole"),
    },
    # On each of two GPUs.
    "8b-tp2": {
        "qkv": (3072, 4096, "parts"),
        "o": (4096, 2048, "parts"),
        "gate_up": (12288, 4096, "silu"),
        "down": (4096, 6144, "parts"),
        "head": (75968, 4096, "whole"),
    },
    "30b-a3b-tp2": {"qkv": (2560, 2048, "parts"), "o": (2048, 2048, "parts"), "head": (75968, 2048, "whole")},
    "32b-tp2": {
        "qkv": (5120, 5120, "parts"),
        "o": (5120, 4096, "parts"),
        "gate_up": (25600, 5120, "silu"),
        "down": (5120, 12800, "parts"),
        "head": (75968, 5120, "whole"),
    },
    "70b-tp2": {
        "qkv": (5120, 8192, "parts"),
        "o": (8192, 4096, "parts"),
        "gate_up": (28672, 8192, "silu"),
        "down": (8192, 14336, "parts"),
        "head": (64128, 8192, "whole"),
    },
    # On each of four GPUs.
    "70b-tp4": {
        "qkv": (2560, 8192, "parts"),
        "o": (8192, 2048, "parts"),
        "gate_up": (14336, 8192, "silu"),
        "down": (8192, 7168, "parts"),
        "head": (32064, 8192, "whole"),
    },
    "235b-a22b-tp4": {"qkv": (2304, 4096, "parts"), "o": (4096, 2048, "parts"), "head": (37984, 4096, "whole")},
    "1.7b": {
        "qkv": (4096, 2048, "parts"),
        "o": (2048, 2048, "parts"),
        "gate_up": (12288, 2048, "silu"),
        "down": (2048, 6144, "parts"),
    },
    "0.6b": {
        "qkv": (4096, 1024, "parts"),
        "o": (1024, 2048, "parts"),
        "gate_up": (6144, 1024, "silu"),
        "down": (1024, 3072, "parts"),
    },
}


def candidates(outputs: int, inputs: int, rows: int, kind: Kind, ways: list[str]) -> list[Config]:
    """Candidate configurations of the kernels named in `ways`."""
    return [config for way in ways for config in (WAYS | CODED_WAYS)[way](outputs, inputs, rows, kind)]


def _pipelined(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """Enough items for the chip, tiles that fit in shared memory."""
    found = []
    for block_n, block_k, split, stages, programs in itertools.product(
        (64, 128), (64, 128), (1, 2, 4, 8), (4, 6, 8), (132, 192)
    ):
        outputs_a_tile = block_n // 2 if kind == "silu" else block_n
        items = (outputs // 2 if kind == "silu" else outputs) // outputs_a_tile * split
        tile_bytes = 2 * block_k * (block_n + max(16, rows))
        if inputs % (block_k * split) or (kind != "parts" and split > 1) or inputs // (block_k * split) < 3:
            continue
        if items < 64 or items < programs - 60 or tile_bytes * stages * (1 if programs == 132 else 2) > 220_000:
            continue
        found.append(LinearConfig(block_n, block_k, split, 4, stages, programs))
    return found


def _streamed(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """One or two rings of tiles per multiprocessor, of sizes that leave room for other kernels or not."""
    found = []
    for (block_n, warps), block_k, split, programs, ring in itertools.product(
        ((64, 4), (128, 4), (192, 4), (128, 8), (256, 4), (256, 8)),
        (64, 128, 256),
        (1, 2, 4, 8),
        (96, 128, 132, 264),
        (100_000, 160_000, 210_000),
    ):
        items = -(-outputs // block_n) * split
        tile_bytes = 2 * block_k * (block_n + max(8, rows))
        ring_bytes = ring // (2 if programs > 132 else 1)
        if inputs % (block_k * split) or (kind != "parts" and split > 1) or items < 64 or ring_bytes < 3 * tile_bytes:
            continue
        if items < programs and programs != 132:
            continue
        # Every tile reads all rows again, so tall tiles pay for many rows; wide sums do not pay for few rows.
        if (rows < 64 and (warps == 8 or split == 8)) or block_n * rows > 6144 * warps:
            continue
        found.append(LinearConfig(block_n, block_k, split, warps, ring_bytes // tile_bytes, programs, True))
    # If the tiles of x are small, items may go through K from different places.
    return found + ([replace(config, stagger=True) for config in found] if rows <= 32 else [])


def _gemv(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """Whole rows by many small programs, for the fewest rows."""
    found = []
    for split, neurons, at_once, warps in itertools.product((1, 2, 3), (1, 2), (4, 8, 16), (4, 8)):
        reads = at_once * neurons * (2 if kind == "silu" else 1)
        if (
            rows > MOST_ROWS
            or inputs % (256 * at_once * split)
            or not 8 <= reads <= 16
            or (kind != "parts" and split > 1)
        ):
            continue
        found.append(GemvConfig(split, neurons, at_once, warps))
    return found


def _coded(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """Tiles of codes by Triton's own pipeline, with columns of one scale."""
    found = []
    for (block_n, warps), split in itertools.product(((64, 4), (128, 8)), (1, 2, 4)):
        items, tile_bytes = -(-outputs // block_n) * split, 128 * (block_n + 2 * max(8, rows))
        if inputs % (128 * split) or (kind != "parts" and split > 1) or not 64 <= items <= 8 * 132:
            continue
        if block_n * rows <= 2048 * warps and 200_000 >= 3 * tile_bytes:
            found.append(LinearConfig(block_n, 128, split, warps, min(6, 200_000 // tile_bytes), 132))
    return found


def _coded_streamed(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """Streamed tiles of codes, by one to four programs on a multiprocessor."""
    found = []
    for (block_n, warps), split, on_one in itertools.product(
        ((64, 4), (128, 4), (128, 8), (256, 8)), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4)
    ):
        items, programs = -(-outputs // block_n) * split, 132 * on_one
        tile_bytes, sums = 128 * (block_n + 2 * max(8, rows)), block_n * max(8, rows) // (32 * warps)
        if inputs % (128 * split) or (kind != "parts" and split > 1) or on_one * warps > 16:
            continue
        # Each thread keeps two sums and its part of the tile. With few rows a place without an item costs most.
        least = 0.85 if rows < 32 else 0.7
        if sums > 64 or 220_000 // on_one < 3 * tile_bytes or items < least * programs * -(-items // programs):
            continue
        stages = min(16, 220_000 // on_one // tile_bytes)
        found.append(LinearConfig(block_n, 128, split, warps, stages, programs, True, kind == "silu"))
    return found


def _codes(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """Both operands as codes."""
    found = []
    block_m = 64 if rows <= 64 else 128
    for (block_n, warps), split, on_one in itertools.product(
        ((64, 4), (128, 4), (192, 4), (64, 8), (128, 8), (192, 8)), (1, 2, 3, 4, 6, 8), (1, 2, 3)
    ):
        items, programs, tile_bytes = -(-outputs // block_n) * split, 132 * on_one, 128 * (block_n + block_m)
        if inputs % (128 * split) or (kind != "parts" and split > 1) or 16 * warps > block_m:
            continue
        # Two sums, and some registers beside them.
        registers = 2 * block_n * block_m // (32 * warps) + 56
        if registers > 250 or registers * 32 * warps * on_one > 65536 or 220_000 // on_one < 3 * tile_bytes:
            continue
        if items >= 0.7 * programs * -(-items // programs):
            stages = min(12, 220_000 // on_one // tile_bytes)
            found.append(LinearConfig(block_n, 128, split, warps, stages, programs, True, kind == "silu", True))
    return found


def _coded_gemv(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """Whole rows of codes by many small programs."""
    found = []
    for split, neurons, at_once, warps in itertools.product((1, 2, 3), (1, 2), (2, 4, 8), (4, 8)):
        reads = at_once * neurons * (2 if kind == "silu" else 1)
        fits = rows <= MOST_ROWS and inputs % (512 * at_once * split) == 0 and reads == 8
        if fits and (kind == "parts" or split == 1):
            found.append(GemvConfig(split, neurons, at_once, warps))
    return found


WAYS: dict[str, Callable[[int, int, int, Kind], Sequence[Config]]] = {
    "pipelined": _pipelined,
    "streamed": _streamed,
    "gemv": _gemv,
}
#: The same for weights as codes.
CODED_WAYS: dict[str, Callable[[int, int, int, Kind], Sequence[Config]]] = {
    "coded": _coded,
    "coded_streamed": _coded_streamed,
    "coded_gemv": _coded_gemv,
    "codes": _codes,
}
