"""The draft model on the device: after each step it reads what the step computed, and guesses the rows' next tokens.

    step      forward (keeps hidden states) | draw | accept | read | guess, guess, ...
                                                                      -> row state: guesses
    next step                                      set_up: drafts = guesses | forward | draw | accept | ...

Everything runs on the compute stream, so the next step verifies guesses that the host has never seen.

    read    all tokens of the step, at their positions: hidden states of the target, and the token that follows each.
            After a refused draft that token is a wrong one; the position is read again by the step that computes it.
    guess   from the last position of each row: the token that the draft model would draw with the row's own noise at
            that position, temperature and truncation; the best one for rows that take the best. So it is the token
            that the row draws wherever both models agree well enough. Penalties, biases and bans are left out.

Where the KV of the draft model is missing or from other tokens, such as at the end of a shared page, guesses are worse.

Legend: B places of a decode step, R rows, T tokens of a prefill, G guesses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from rollout.engine.sequence.features import Feature
from rollout.engine.step.row_state import LAST, LENGTH, RowState
from rollout.engine.step.sampler import Sampler
from rollout.engine.step.upload import StepInput
from rollout.models.batch import AttentionBatch, HiddenTaps, KVCache
from rollout.models.decoder import Decoder
from rollout.models.draft_head import DraftHead

#: What guesses heed of the draw.
_HEEDED = Feature.GREEDY | Feature.DRAW | Feature.TRUNCATE


class HeadDrafts:
    """Runs the draft model of `model` for the rows of a row state. Decode steps have up to `step_rows` rows."""

    def __init__(self, model: Decoder, rows: RowState, step_rows: int) -> None:
        assert model.draft is not None
        self._model = model
        self._head: DraftHead = model.draft
        self._rows = rows
        device, dtype = model.embed.device, model.embed.dtype
        #: Hidden states and positions of the last decode step; captured steps write to this memory.
        self.taps = self.make_taps(step_rows)
        self.positions_B = torch.zeros(step_rows, dtype=torch.int64, device=device)
        self._prefill: tuple[AttentionBatch, torch.Tensor] | None = None
        # Guesses advance copies of rows, as draws advance rows.
        self._ahead = RowState(step_rows, 1, 0, device)
        self._draw = Sampler(self._ahead)
        self._output_4R = torch.zeros(4, step_rows, dtype=torch.int32, device=device)
        self._places_R = torch.arange(step_rows, device=device)
        assert dtype == self._head.norm.weight.dtype

    @property
    def reads_last_layer(self) -> bool:
        """True if it reads hidden states after the last layer."""
        return self._head.spec.taps[-1] == len(self._model.layers)

    @staticmethod
    def nbytes(model: Decoder, step_rows: int, chunk_tokens: int) -> int:
        """Device memory of hidden states, bytes: of a decode step, and of a prefill while that runs."""
        assert model.spec.draft is not None
        return (step_rows + chunk_tokens) * model.spec.draft.fc.inputs * model.embed.dtype.itemsize

    def make_taps(self, tokens: int) -> HiddenTaps:
        """Memory for the hidden states of so many tokens."""
        spec, embed = self._head.spec, self._model.embed
        hidden_TF = torch.zeros(tokens, spec.fc.inputs, dtype=embed.dtype, device=embed.device)
        return HiddenTaps(spec.taps, hidden_TF)

    def prefilled(self, batch: AttentionBatch, taps: HiddenTaps) -> None:
        """A prefill has run; `run` reads it after its draw."""
        own = {"taps": None, "images": None, "experts": None, "adapters": None, "rope_positions": None, "rows_B": None}
        self._prefill = replace(batch, **own), taps.hidden_TF

    @torch.inference_mode()
    def run(self, step: StepInput, output_4R: torch.Tensor, accepted_B: torch.Tensor, kv: KVCache) -> None:
        """Read a step whose tokens are drawn, and guess.

        `accepted_B` (int32) are accepted drafts by place, 0 for all places without; read in steps with drafts.
        """
        if self._prefill is not None:
            (batch, hidden_TF), self._prefill = self._prefill, None
            hidden_TH = self._read(self._following(step, output_4R), hidden_TF, batch, kv)
            if not step.header.draws:
                return
            rows_R, at_R = step["sampled_rows"], step["sampled_at"]
        else:
            count = step.header.draws
            tokens_B, batch = output_4R[0, :count].long(), self._decode_batch(step, kv)
            hidden_TH = self._read(tokens_B, self.taps.hidden_TF[:count], batch, kv)
            if "bases" in step:
                rows_R, at_R = step["bases"].unbind(1)
                at_R = at_R + accepted_B[at_R]
            else:
                rows_R, at_R = step["rows"][:count], self._places_R[:count]
        if step.header.guesses > 0:
            self._guess(rows_R, hidden_TH.index_select(0, at_R), step, kv)

    def _read(
        self, following_T: torch.Tensor, hidden_TF: torch.Tensor, batch: AttentionBatch, kv: KVCache
    ) -> torch.Tensor:
        """Its hidden states at the positions of a batch; `following_T` are the tokens after these."""
        return self._head(self._embed(following_T), self._head.fuse(hidden_TF), batch, kv)

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens_T, self._model.embed)

    def _following(self, step: StepInput, output_4R: torch.Tensor) -> torch.Tensor:
        """The token that follows each token of a prefill: the next one of the prompt, or the one that was drawn."""
        following_T = step["tokens"].roll(-1)
        following_T[step["query_starts"][1:].long() - 1] = step["next_tokens"]
        if step.header.draws:
            following_T[step["sampled_at"]] = output_4R[0, : step.header.draws].long()
        return following_T

    def _decode_batch(self, step: StepInput, kv: KVCache) -> AttentionBatch:
        """The places of a decode step, drafts included, as they were when its forward ran."""
        count, page_size = step.header.draws, kv.page_size
        columns = -(-step.header.max_context // page_size)
        positions_B = self.positions_B[:count]
        if self._rows.step_pages is None:
            table_BP = self._rows.pages[:, :columns].index_select(0, step["rows"][:count])
        else:
            table_BP = self._rows.step_pages[:count, :columns]
        return _batch(positions_B, table_BP, page_size, step.header.max_context)

    def _guess(self, rows_R: torch.Tensor, hidden_RH: torch.Tensor, step: StepInput, kv: KVCache) -> None:
        """Guess the next tokens of rows, whose newest token is `LAST`; `hidden_RH` is of the position before it."""
        rows, ahead, header = self._rows, self._ahead, step.header
        assert rows.guesses is not None
        count, page_size = len(rows_R), kv.page_size
        places_R, output_4R = self._places_R[:count], self._output_4R
        ahead.ints[:count] = rows.ints.index_select(0, rows_R)
        ahead.floats[:count] = rows.floats.index_select(0, rows_R)
        end = rows.pages.shape[1] * page_size
        max_context = min(header.max_context + header.guesses, end)
        table_RP = rows.pages[:, : -(-max_context // page_size)].index_select(0, rows_R)
        features = Feature(header.features) & _HEEDED
        for index in range(header.guesses):
            logits_RV = self._head.compute_logits(hidden_RH, self._model.lm_head)
            self._draw(logits_RV, places_R, features, output_4R)
            tokens_R = ahead.ints[:count, LAST]
            rows.guesses[rows_R, index] = tokens_R
            if index + 1 < header.guesses:
                positions_R = (ahead.ints[:count, LENGTH] - 1).clamp_(max=max_context - 1)
                batch = _batch(positions_R, table_RP, page_size, max_context)
                hidden_RH = self._head(self._embed(tokens_R), hidden_RH, batch, kv)


def _batch(positions_B: torch.Tensor, table_BP: torch.Tensor, page_size: int, max_context: int) -> AttentionBatch:
    """A token for each row, at these positions."""
    pages_B = table_BP.gather(1, (positions_B // page_size)[:, None]).squeeze(1).long()
    return AttentionBatch(
        positions_T=positions_B,
        kv_slots_T=pages_B * page_size + positions_B % page_size,
        page_table_BP=table_BP,
        context_lens_B=(positions_B + 1).int(),
        max_context=max_context,
    )
