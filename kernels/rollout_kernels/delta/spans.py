"""The state for each token of a step, and the numbers that twins and kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

#: Tokens of a row that a prefill computes at once.
CHUNK = 64
#: Added to the squared length of queries and keys before these are divided by their length.
UNIT_EPS = 1e-6


class Spans(NamedTuple):
    """The tokens of a step by row, B rows. A token at position 0 begins with an empty state.

    Decode: `lengths` is None and token b belongs to row b. Otherwise the tokens of a row follow each other. Places are
    distinct, except for padding rows: these share place 0, whose content has no meaning.
    """

    places_B: torch.Tensor  # int64: where each row's state is
    positions_T: torch.Tensor  # int32 or int64: of each token in its row
    lengths: tuple[int, ...] | None = None  # tokens of each row, in host integers
    starts_B1: torch.Tensor | None = None  # int32: first token of each row, and their total; for GPUs
    #: Tokens go through the operations one after the other, never in chunks: a token's bits do not depend on its step.
    #: Needs `lengths`, in decode steps, too.
    one_by_one: bool = False
    #: int32, of a step with drafts: how many draft rows follow each row; -1 for a draft row. See `drafts.py`.
    behind_B: torch.Tensor | None = None

    def tokens(self) -> Iterator[tuple[int, int]]:
        """(token, row) of all tokens, in order."""
        assert self.lengths is not None
        rows = (row for row, length in enumerate(self.lengths) for _ in range(length))
        return enumerate(rows)


class DraftInputs(NamedTuple):
    """The inputs of a step's drafts with which states catch up: of one layer, or of all with a dimension L before.

    D draft rows, C channels, H value heads; see `drafts.py`.
    """

    inputs_DC: torch.Tensor  # inputs of the convolution, in the model's dtype
    mixed_DC: torch.Tensor  # queries, keys and values after it
    gates_D2H: torch.Tensor  # float32: beta and decay
    first: int  # number of the first draft row; draft row r is at r - first
