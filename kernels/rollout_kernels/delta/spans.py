"""The state for each token of a step, and the numbers that twins and kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

#: Tokens of a row that a prefill computes at once.
CHUNK = 64
#: Added to the squared length of queries and keys before they are divided by their length.
UNIT_EPS = 1e-6


class Spans(NamedTuple):
    """The tokens of a step by row, B rows. A token at position 0 begins with an empty state.

    Decode: `lengths` is None and token b belongs to row b. Otherwise the tokens of a row follow each other. Places are
    distinct, except for padding rows, which share place 0; its content has no meaning.
    """

    places_B: torch.Tensor  # int64: where each row's state is
    positions_T: torch.Tensor  # int32 or int64: of each token in its row
    lengths: tuple[int, ...] | None = None  # tokens of each row, in host integers
    starts_B1: torch.Tensor | None = None  # int32: first token of each row, and their total; for GPUs
    #: Tokens go through the operations in turn, never in chunks: a token's bits do not depend on its step. Needs
    #: `lengths`, in decode steps, too.
    one_by_one: bool = False
    #: int32, of a step with drafts: how many draft rows follow each row; -1 for a draft row. See `drafts.py`.
    behind_B: torch.Tensor | None = None

    def tokens(self) -> Iterator[tuple[int, int]]:
        """(token, row) of all tokens, in order."""
        assert self.lengths is not None
        rows = (row for row, length in enumerate(self.lengths) for _ in range(length))
        return enumerate(rows)

    def rows_by_depth(self) -> list[torch.Tensor]:
        """Indices in the step of all rows, of rows with a draft, of rows with two drafts, and so on; no draft rows."""
        assert self.behind_B is not None, "a step with drafts says where they are"
        most = int(self.behind_B.max())
        return [torch.nonzero(self.behind_B >= depth)[:, 0] for depth in range(max(most, 0) + 1)]


#: Gated DeltaNet; with a decay for each channel of a key; or without beta: a token adds its value as it is.
Rule = Literal["gated", "channels", "plain"]


class DraftInputs(NamedTuple):
    """The inputs of a step's drafts with which states catch up: of one layer, or of all with a dimension L before.

    D draft rows, C channels; see `drafts.py`. The last dimensions hold the named parts side by side.
    """

    inputs_DC: torch.Tensor  # inputs of the convolution, in the model's dtype
    #: "gated": queries, keys and values after it. Else keys and values as `advance` takes them, float32.
    mixed_DX: torch.Tensor
    gates_DX: torch.Tensor  # float32: beta of each head, if the rule has it; decays of each head
    first: int  # number of the first draft row; draft row r is at r - first
    rule: Rule = "gated"

    def draft_rows(self, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the draft rows in the step, and in these tensors."""
        assert spans.behind_B is not None
        drafts_D = torch.nonzero(spans.behind_B < 0)[:, 0]
        return drafts_D, spans.places_B[drafts_D] - self.first

    def of_layer(self, layer: int) -> DraftInputs:
        """One layer's part."""
        return DraftInputs(self.inputs_DC[layer], self.mixed_DX[layer], self.gates_DX[layer], self.first, self.rule)
