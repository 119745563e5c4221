"""The draft model on the device: after each step it reads what the step computed, and drafts the rows' next tokens.

    step      forward (keeps hidden states) | draw | accept | read | draft, draft, ...
                                                                      -> DraftState.next_RG
    next step                                          set_up: drafts = next_RG | forward | draw | accept | ...

Everything runs on the compute stream, so the next step verifies drafts that the host has not seen. They come to the
host with the tokens of their step, which masks of constraints wait for anyway.

    read    all tokens of the step, at their positions: hidden states of the target, and the token that follows each.
            After a refused draft that token is wrong; the step that computes the position reads it again.
    draft   from the last position of each row: the token that the row would draw from the draft model's logits, with
            its own noise at that position, temperature, truncation, penalties, biases and bans; the best one for rows
            that take the best. So it is the token that the row draws wherever both models agree well enough.

Where the KV of the draft model is missing or from other tokens, such as at the end of a shared page, drafts are worse.

Legend: B tokens of a decode step, R rows, T tokens of a prefill, G drafts of a row.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from rollout.engine.features.drafts.drafter import DeviceDrafter, DraftAfter
from rollout.engine.step.device_feature import NO_REPLAYS, Replays
from rollout.engine.step.row_state import LAST, LENGTH, RowState
from rollout.engine.step.sampler import Sampler
from rollout.engine.upload import PLAIN, RowNeeds, StepInput
from rollout.models.batch import AttentionBatch, HiddenTaps, KVCache
from rollout.models.decoder import Decoder
from rollout.models.draft_head import DraftHead
from rollout.models.fused_experts import FusedExperts, kernels_take
from rollout.models.layers import SparseFeedForward

#: Needs of a row that drafts apply, too.
_HEEDED = RowNeeds.GREEDY | RowNeeds.DRAW | RowNeeds.TRUNCATE | RowNeeds.PENALIZE | RowNeeds.BIAS | RowNeeds.MIN_TOKENS
#: Needs that captured work cannot apply. It ignores bans: the model rarely drafts a stop before `min_tokens`.
_NOT_CAPTURED = RowNeeds.TRUNCATE | RowNeeds.PENALIZE | RowNeeds.BIAS
#: Names of what is captured.
READ, DRAFT = "read", "draft"


class ModelDrafter(DeviceDrafter):
    """Runs the draft model of `model` for the rows of a row state. Decode steps have up to `step_rows` rows.

    The kernels run its experts where they can. Inputs and outputs of a decode step are in the drafter's own memory, at
    fixed addresses, so the work can be captured.
    """

    def __init__(self, model: Decoder, rows: RowState, next_RG: torch.Tensor, step_rows: int) -> None:
        assert model.draft is not None
        super().__init__(rows, next_RG)
        self._model = model
        self._head: DraftHead = model.draft
        self.reads_last_layer = model.draft.spec.taps[-1] == len(model.layers)
        self._experts = _experts_of(model.draft) if model.embed.is_cuda else None
        device, hidden = model.embed.device, model.embed.shape[1]

        def ints(count: int = step_rows) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        #: Hidden states and positions of the last decode step; its forward writes them.
        self.taps = self.prefill_taps(step_rows)
        self.positions_B = ints()
        self._rows_B, self._following_B = ints(), ints()
        self._hidden_BH = torch.zeros(step_rows, hidden, dtype=model.embed.dtype, device=device)
        self._rows_R, self._at_R = ints(), ints()
        self._prefill: tuple[AttentionBatch, torch.Tensor] | None = None
        # Drafts advance copies of rows, as draws advance rows, except the first one, which is padding.
        self._copied_rows = RowState(step_rows, 1, 0, device)
        self._draw = self._sampler(self._copied_rows)
        self._output_4R = torch.zeros(4, step_rows, dtype=torch.int32, device=device)
        self._places_R = torch.arange(step_rows, device=device)
        self._indices_R = self._places_R + 1
        self._order_G = torch.arange(self.most, device=device)

    def decode_work(self, size: int, max_context: int, kv: KVCache) -> dict[str, Callable[[], None]]:
        """See `AheadFeature.decode_work`: read a step of `size` tokens, and draft for `size` rows."""
        return {
            READ: functools.partial(self.read, size, max_context, kv),
            DRAFT: functools.partial(self.draft, size, max_context, PLAIN, kv),
        }

    def decode_taps(self, positions_B: torch.Tensor) -> HiddenTaps:
        self.positions_B[: len(positions_B)].copy_(positions_B)
        return self.taps

    def prefill_taps(self, tokens: int) -> HiddenTaps:
        spec, embed = self._head.spec, self._model.embed
        hidden_TF = torch.zeros(tokens, spec.read_width, dtype=embed.dtype, device=embed.device)
        return HiddenTaps(spec.taps, hidden_TF)

    def prefilled(self, batch: AttentionBatch, taps: HiddenTaps) -> None:
        own = replace(batch, taps=None, images=None, experts=None, adapters=None, rope_positions=None, rows_B=None)
        self._prefill = own, taps.hidden_TF

    def run(
        self,
        step: StepInput,
        output_4R: torch.Tensor,
        accepted_B: torch.Tensor,
        kv: KVCache,
        after: DraftAfter,
        replays: Replays = NO_REPLAYS,
    ) -> torch.Tensor | None:
        """Read the step, then draft if it is time to."""
        header = step.header
        if self._prefill is None:
            rows_R, at_R = self._read_decode(step, output_4R, accepted_B, kv, replays)
        else:
            (batch, hidden_TF), self._prefill = self._prefill, None
            hidden_TH = self._read(self._following(step, output_4R), hidden_TF, batch, kv)
            if not header.draws:
                return None
            rows_R, at_R = step["sampled_rows"], self._places_R[: header.draws]
            self._hidden_BH[: header.draws] = hidden_TH.index_select(0, step["sampled_at"])
        if after is not DraftAfter.DRAFT:
            return None
        count, needs = len(rows_R), RowNeeds(header.needs) & _HEEDED
        captured = {} if needs & _NOT_CAPTURED else replays.get(DRAFT, {})
        size = min((size for size in captured if size >= count), default=0)
        self._rows_R[:count], self._at_R[:count] = rows_R, at_R
        if not size:
            self.draft(count, header.max_context, needs, kv)
            return rows_R
        if size > count:
            self._rows_R[count:size].zero_()
        captured[size]()
        return rows_R

    # --- what can be captured -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def read(self, tokens: int, max_context: int, kv: KVCache) -> None:
        """Run the layer over the tokens of a decode step."""
        table_BP = self._table(self._rows_B[:tokens], max_context, kv)
        batch = _batch(self.positions_B[:tokens], table_BP, kv.page_size, max_context)
        hidden_TF = self.taps.hidden_TF[:tokens]
        self._hidden_BH[:tokens] = self._read(self._following_B[:tokens], hidden_TF, batch, kv)

    @torch.inference_mode()
    def draft(self, count: int, max_context: int, needs: RowNeeds, kv: KVCache) -> None:
        """Draft the next tokens of `count` rows, from the hidden states of the positions before their newest token."""
        output_4R, rows_R = self._output_4R, self._rows_R[:count]
        copies_R, copies = self._indices_R[:count], slice(1, count + 1)
        hidden_RH = self._hidden_BH.index_select(0, self._at_R[:count])
        copied, draw = self._copy_rows(rows_R, copies, needs)
        max_context = min(max_context + self.most, self.rows.pages.shape[1] * kv.page_size)
        table_RP = self._table(rows_R, max_context, kv)
        for index in range(self.most):
            logits_RV = self._head.compute_logits(hidden_RH, self._model.lm_head)
            draw(logits_RV, copies_R, needs, output_4R)
            tokens_R = self._agreed(copied, copies)
            self.next_RG.index_put_((rows_R, self._order_G[index]), tokens_R)
            if index + 1 < self.most:
                batch = _batch(copied.ints[copies, LENGTH] - 1, table_RP, kv.page_size, max_context)
                hidden_RH = self._forward(tokens_R, hidden_RH, batch, kv)

    # ------------------------------------------------------------------------------------------------------------------

    def _sampler(self, rows: RowState) -> Sampler:
        """The draw from the draft model's logits; with the target's output layer these may be one rank's part."""
        return Sampler(rows, self._model.vocab_shard if self._head.lm_head is None else None)

    def _agreed(self, copied: RowState, copies: slice) -> torch.Tensor:
        """The drawn tokens, equal on all ranks even if the last bits of their logits differ."""
        tokens_R = copied.ints[copies, LAST]
        if self._model.group.size > 1 and self._head.lm_head is not None:  # each rank has drawn on its own
            drawn_R = self._output_4R[0, : len(tokens_R)]
            tokens_R = self._model.group.all_gather(drawn_R)[0].long()
            copied.ints[copies, LAST] = tokens_R
        return tokens_R

    def _copy_rows(self, rows_R: torch.Tensor, copies: slice, needs: RowNeeds) -> tuple[RowState, Sampler]:
        """Copies of rows with the state that `needs` requires, and the sampler of the copies."""
        rows, copied, draw = self.rows, self._copied_rows, self._draw
        if needs & RowNeeds.PENALIZE:  # the counts take a vocabulary for each row, so they are set up only when needed
            copied = RowState(len(rows_R), 1, rows.vocab, rows.ints.device)
            draw = self._sampler(copied)
            torch.index_select(rows.counts, 0, rows_R, out=copied.counts[copies])
        pairs = [(copied.ints, rows.ints), (copied.floats, rows.floats)]
        if needs & RowNeeds.BIAS:
            pairs += [(copied.bias_ids, rows.bias_ids), (copied.bias, rows.bias)]
        if needs & RowNeeds.MIN_TOKENS:
            pairs.append((copied.banned, rows.banned))
        for target, source in pairs:
            target[copies] = source.index_select(0, rows_R)
        return copied, draw

    def _read_decode(
        self,
        step: StepInput,
        output_4R: torch.Tensor,
        accepted_B: torch.Tensor,
        kv: KVCache,
        replays: Replays,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a decode step; returns the rows that may have drafts, and the indices of their last tokens."""
        header, count = step.header, step.header.draws
        size = header.size or count
        self._rows_B[:size], self._following_B[:size] = step["rows"][:size], output_4R[0, :size]
        if size in (captured := replays.get(READ, {})):
            captured[size]()
        else:
            self.read(count, header.max_context, kv)
        if "bases" in step:
            rows_R, at_R = step["bases"].unbind(1)
            return rows_R, at_R + accepted_B[at_R]
        return self._rows_B[:count], self._places_R[:count]

    def _read(
        self, following_T: torch.Tensor, hidden_TF: torch.Tensor, batch: AttentionBatch, kv: KVCache
    ) -> torch.Tensor:
        """The draft model's hidden states at the positions of a batch; `following_T` are the next tokens."""
        return self._forward(following_T, self._head.fuse(hidden_TF, self._model.norm), batch, kv)

    def _forward(
        self, following_T: torch.Tensor, hidden_TH: torch.Tensor, batch: AttentionBatch, kv: KVCache
    ) -> torch.Tensor:
        embedding, experts = self._model.embedding, self._experts
        if experts is None:
            return self._head(following_T, embedding, hidden_TH, batch, kv)
        experts.begin_step(len(following_T))
        hidden_TH = self._head(following_T, embedding, hidden_TH, batch, kv, experts.output)
        experts.take_chosen()  # drops them: a step's record has the experts of the target alone
        return hidden_TH

    def _following(self, step: StepInput, output_4R: torch.Tensor) -> torch.Tensor:
        """The token that follows each token of a prefill: the prompt's next token, or the drawn token."""
        following_T = step["tokens"].roll(-1)
        following_T[step["query_starts"][1:].long() - 1] = step["next_tokens"]
        if step.header.draws:
            following_T[step["sampled_at"]] = output_4R[0, : step.header.draws].long()
        return following_T

    def _table(self, rows_R: torch.Tensor, max_context: int, kv: KVCache) -> torch.Tensor:
        return self.rows.pages[:, : -(-max_context // kv.page_size)].index_select(0, rows_R)


def _experts_of(head: DraftHead) -> FusedExperts | None:
    """The kernels' runner of a draft model's experts; None if the model has no experts that the kernels support."""
    block = head.feed_forward
    if not isinstance(block, SparseFeedForward) or not kernels_take(block.spec, block.router.dtype):
        return None
    return FusedExperts([block], head.spec.eps)


def _batch(positions_B: torch.Tensor, table_BP: torch.Tensor, page_size: int, max_context: int) -> AttentionBatch:
    """A token for each row, at these positions; the position of a padding row may not exist."""
    positions_B = positions_B.clamp(0, max_context - 1)
    pages_B = table_BP.gather(1, (positions_B // page_size)[:, None]).squeeze(1).long()
    return AttentionBatch(
        positions_T=positions_B,
        kv_slots_T=pages_B * page_size + positions_B % page_size,
        page_table_BP=table_BP,
        context_lens_B=(positions_B + 1).int(),
        max_context=max_context,
    )
