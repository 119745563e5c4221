"""The pages that rows of a decode step share, as segments for the plan of decode attention (`triton_decode_plan`).

Rows that share pages are neighbours in the step. From the number of positions that each row has in common with the next
one follow the segments, in two levels at most: what a run of rows shares, and what neighbours among them share beyond.

    rows      0 1 2 3 | 4 5 | 6         a segment of several rows is cut into blocks of at most `most_rows` rows: the
    level 1   =======   ===             query heads of a block fill one tile. The positions after its shared segments
    level 2   ===                       are a row's own segment
    own       - - - -   - -   -
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Words of a segment: first row, rows, first position, end, segment before it + 1, or 0. Of what a row has alone (the
#: first B segments) only the first position and the segment before it count.
SEGMENT_WORDS = 5
#: Most consecutive shared segments in a row's context.
LEVELS = 2


@dataclass(frozen=True, slots=True)
class SharedTile:
    """The tile of decode attention where rows may share pages."""

    heads: int  # query heads of the rows that are computed together
    num_warps: int | None = None  # warps of a program; None: as where rows share nothing


#: The tile where rows may share pages, by whether the cache has e4m3 codes. On an H100, 32 rows of 16K +
#: 2K positions in groups of 8, of 32 query heads over 8 KV heads, take 0.27 of their time alone in tiles of 32 and 0.38
#: in tiles of 16; rows that share nothing lose 1 to 2%. With codes, tiles of 32 need more registers than there are:
#: on an H200, 80 rows with a system prompt of 1,536 positions lose 60%.
#: Groups of 8 rows with 8 query heads to a KV head would fit in `SharedTile(64, num_warps=4)`. On an H200, 32 rows of
#: 4K would take 24 us a layer in place of 29, but 128 rows of 300 that share nothing 33 in place of 28.
SHARED_TILES = {False: SharedTile(32), True: SharedTile(16)}


def rows_at_once(group: int, tile: int) -> int:
    """Rows whose query heads fit in a tile of `tile`, if a KV head has `group` query heads."""
    return max(1, tile // (1 << (group - 1).bit_length()))


def make_segments(common: Sequence[int], size: int, most_rows: int, least: int) -> np.ndarray | None:
    """The segments of a step, int32 [2 size, W] as `plan_decode_work` takes them; None if no rows share enough.

    Args:
        common: for each row but the last, how many first positions it shares with the next row. In full pages that both
            have, and before the position that the step writes.
        size: rows of the step, padding at the end included.
        most_rows: how many rows a segment may have (`rows_at_once`).
        least: positions; what rows share in a level beyond the level before counts from here on.
    """
    if most_rows < 2 or not common or max(common) < least:
        return None
    segments = no_segments(size)
    rows, used = len(common) + 1, size
    for first, end, shared in _runs(common, 0, rows, 0, least):
        for block, stop in _blocks(common, first, end, shared + least, most_rows):
            if stop - block < 2:
                continue
            used = _add(segments, used, block, stop, shared)
            for inner, inner_end, deeper in _runs(common, block, stop, shared, least):
                used = _add(segments, used, inner, inner_end, deeper)
    return segments if used > size else None


def no_segments(size: int) -> np.ndarray:
    """The segments of rows that share nothing, int32 [2 size, W]."""
    return np.zeros((2 * size, SEGMENT_WORDS), dtype=np.int32)


def _runs(common: Sequence[int], first: int, end: int, above: int, least: int) -> list[tuple[int, int, int]]:
    """Maximal runs (first row, end, positions) in which all neighbours share `least` positions more than `above`."""
    runs, begin = [], first
    for row in range(first, end):
        if row == end - 1 or common[row] < above + least:
            if row > begin:
                runs.append((begin, row + 1, min(common[begin:row])))
            begin = row + 1
    return runs


def _blocks(common: Sequence[int], first: int, end: int, deep: int, most: int) -> list[tuple[int, int]]:
    """A run cut into blocks (first row, end) of at most `most` rows, if possible where neighbours share less."""
    blocks = []
    while first < end:
        stop = min(first + most, end)
        if stop < end and common[stop - 1] >= deep:
            inner = stop - 1
            while inner > first and common[inner - 1] >= deep:
                inner -= 1
            if inner > first:  # else the inner run is longer than a block, or begins with it
                stop = inner
        blocks.append((first, stop))
        first = stop
    return blocks


def _add(segments: np.ndarray, used: int, first: int, end: int, positions: int) -> int:
    """Add a segment after the earlier segments of its rows; the rows' own segments now begin after it."""
    _, _, begin, _, before = segments[first]
    segments[used] = first, end - first, begin, positions, before
    segments[first:end, 2] = positions
    segments[first:end, 4] = used + 1
    return used + 1
