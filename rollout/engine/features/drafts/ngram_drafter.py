"""Drafts by n-grams on the device: what followed the last tokens of a row earlier in the same row.

    step      forward (stores token ids in the KV pages) | draw | accept | search
                                                                       -> DraftState.next_RG
    next step                             set_up: drafts = next_RG | forward | draw | accept | ...

Everything runs on the compute stream, so the search starts from the newest token, before the host has seen it. The
suffix drafter on the host (`suffix_drafter.py`) knows more texts, but starts from the last committed token:
after a refused draft, its next path is wrong as well.

Token ids are stored by page, like KV. So a prompt from the prefix cache brings its ids along, as pages from host memory
do. All ranks of a tensor group hold equal ids, so their drafts are equal.
"""

import torch
from rollout_kernels.step import draft_by_ngrams

from rollout.engine.features.drafts.drafter import DeviceDrafter, DraftAfter
from rollout.engine.step.device_feature import NO_REPLAYS, Replays
from rollout.engine.step.row_state import LAST, LENGTH
from rollout.engine.upload import StepInput
from rollout.models.batch import KVCache


class NgramDrafter(DeviceDrafter):
    """Searches the texts of rows after a step."""

    def run(
        self,
        step: StepInput,
        output_4R: torch.Tensor,
        accepted_B: torch.Tensor,
        kv: KVCache,
        after: DraftAfter,
        replays: Replays = NO_REPLAYS,
    ) -> torch.Tensor | None:
        """See `DeviceDrafter`. Reads only the row state and the pages of `kv`."""
        header = step.header
        if after is not DraftAfter.DRAFT or not header.draws:
            return None
        assert kv.tokens is not None
        if header.layout:
            rows_R = step["sampled_rows"]
        elif "bases" in step:
            rows_R = step["bases"][:, 0]
        else:
            rows_R = step["rows"][: header.draws]
        rows = self.rows
        draft_by_ngrams(rows_R, rows.ints, rows.pages, kv.tokens, self.next_RG, last=LAST, length=LENGTH)
        return rows_R
