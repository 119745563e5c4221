"""Tensors in a packed stream: the dtypes that may be sent, as torch has them, views of a stream's bytes, and rows."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from trainer_bridge.wire.manifest import TensorEntry

#: torch's types by the names that manifests use.
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def typed_view(stream: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """The bytes of one tensor in a packed stream (uint8, one dimension) as a tensor of its dtype and shape."""
    return stream[entry.offset : entry.end].view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


class ByteRows(NamedTuple):
    """`times` rows of `width` bytes; the first begins at byte `start`, and each next one `step` bytes on."""

    start: int
    step: int
    width: int
    times: int

    @property
    def end(self) -> int:
        return self.start + (self.times - 1) * self.step + self.width


_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


def rows_within(row: int, begin: int, end: int, lo: int, hi: int) -> Iterator[ByteRows]:
    """Columns `begin` to `end` of a matrix with rows of `row` bytes: the part in its bytes `lo` to `hi`.

    A part of a row has a step of 0.
    """
    if lo >= hi or begin >= end:
        return
    first, last = -(-lo // row), hi // row  # complete rows
    parts = [(lo // row, lo % row, lo % row + hi - lo)] if first > last else []  # all in one row
    if first <= last:
        parts += [(first - 1, lo % row, row)] if lo % row else []
        parts += [(last, 0, hi % row)] if hi % row else []
        if last > first:
            yield ByteRows(first * row + begin, row, end - begin, last - first)
    for index, at, until in parts:
        at, until = max(at, begin), min(until, end)
        if at < until:
            yield ByteRows(index * row + at, 0, until - at, 1)


def copy_rows(rows: ByteRows, source: torch.Tensor, source_step: int, target: torch.Tensor) -> None:
    """Copy rows that begin with `source`, each `source_step` bytes on, to their places; `target` begins at byte 0."""
    to = target[rows.start :]
    if rows.times == 1:
        to[: rows.width].copy_(source[: rows.width], non_blocking=True)
        return
    numbers = (source_step, rows.step, rows.width, source.data_ptr(), to.data_ptr())
    words = _WORDS if to.is_cuda else ()  # a GPU copies word by word; a CPU copies rows of bytes as fast as memcpy
    size, dtype = next((word for word in words if not any(n % word[0] for n in numbers)), (1, torch.uint8))
    taken, put = ((rows.times - 1) * step + rows.width for step in (source_step, rows.step))
    shape = (rows.times, rows.width // size)
    a = source[:taken].view(dtype).as_strided(shape, (source_step // size, 1))
    b = to[:put].view(dtype).as_strided(shape, (rows.step // size, 1))
    b.copy_(a, non_blocking=True)
