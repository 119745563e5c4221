"""The part of a checkpoint's tensor that one rank of a tensor group keeps.

A cut takes ranges of one dimension, side by side. More than one range is needed where a tensor holds several modules:

    gate_up [2 I, H] of a checkpoint    |====== gate ======|======= up =======|
    rank 1 of 2 keeps                             |=========|         |========|
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from trainer_bridge.transports.tensors import ByteRows, rows_within


class Cut(NamedTuple):
    """Ranges [begin, end) of a tensor's dimension `dim`, which has `whole` entries; each range in ascending order."""

    dim: int
    whole: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def kept(self) -> int:
        """Entries that are kept."""
        return sum(end - begin for begin, end in self.ranges)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.kept, *whole[self.dim + 1 :])

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor: a view if there is one range, else a copy."""
        parts = [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def read(self, stored: Any) -> torch.Tensor:
        """The part of a tensor in a file: `stored` is a slice of safetensors, which reads what is asked for."""
        before = (slice(None),) * self.dim
        parts = [stored[(*before, slice(begin, end))] for begin, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def rows(self, shape: tuple[int, ...], itemsize: int, lo: int, hi: int) -> Iterator[tuple[int, int, ByteRows]]:
        """Bytes `lo` to `hi` of the part of a tensor of this shape: rows of the part, and where they are in the tensor.

        Each has the first byte in the tensor, the bytes from one row to the next one there, and the rows in the part.
        """
        inner = itemsize * math.prod(shape[self.dim + 1 :])
        row, kept, offset = self.whole * inner, self.kept * inner, 0
        for begin, end in ((begin * inner, end * inner) for begin, end in self.ranges):
            for rows in rows_within(kept, offset, offset + end - begin, lo, hi):
                source = rows.start // kept * row + begin + rows.start % kept - offset
                yield source, row if rows.step else 0, rows
            offset += end - begin

    def at(self, dim: int) -> Cut:
        """The same ranges of another dimension."""
        return self._replace(dim=dim)
