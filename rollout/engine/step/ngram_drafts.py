"""N-grams on the device: after each step, what followed the last tokens of a row before, in the row itself.

    step      forward (keeps token ids in the pages of the KV) | draw | accept | search
                                                                            -> row state: guesses
    next step                                  set_up: drafts = guesses | forward | draw | accept | ...

Everything runs on the compute stream, so the search begins at the newest token, which the host has not seen. A drafter
on the host (`speculation/suffix_drafter.py`) knows more texts, but begins some tokens earlier: after a refused draft
its path is wrong once more. Here it is not.

The token ids are where the KV is. So a row has those of a prompt that came from the prefix cache, too, and keeps them
when its pages are copied to the host and back. Also a model whose layers all have a window keeps the pages of the whole
text. All ranks of a tensor group have equal ids, so their guesses are equal.
"""

from __future__ import annotations

import torch
from rollout_kernels.step import guess_by_ngrams

from rollout.engine.step.head_drafts import HeadGraphs
from rollout.engine.step.row_state import LAST, LENGTH, RowState
from rollout.engine.step.upload import StepInput
from rollout.models.batch import KVCache


class NgramDrafts:
    """Guesses for the rows of a row state, as many as it has places for."""

    def __init__(self, rows: RowState) -> None:
        assert rows.guesses is not None
        self.rows = rows
        self._guesses_RG = rows.guesses
        #: Guesses of a row, where it guesses at all.
        self.most = rows.guesses.shape[1]

    def run(
        self,
        step: StepInput,
        output_4R: torch.Tensor,
        accepted_B: torch.Tensor,
        kv: KVCache,
        graphs: HeadGraphs | None = None,
    ) -> torch.Tensor | None:
        """Guess after a step, as `HeadDrafts.run`; the row state and the pages of `kv` are all that it reads."""
        header = step.header
        if header.guesses == 0 or not header.draws:
            return None
        assert header.guesses == self.most and kv.tokens is not None
        if header.layout:
            rows_R = step["sampled_rows"]
        elif "bases" in step:
            rows_R = step["bases"][:, 0]
        else:
            rows_R = step["rows"][: header.draws]
        rows = self.rows
        guess_by_ngrams(rows_R, rows.ints, rows.pages, kv.tokens, self._guesses_RG, last=LAST, length=LENGTH)
        return rows_R
