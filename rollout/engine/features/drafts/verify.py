"""Verify steps on the device: a draft is a row. Everything here runs on the compute stream.

    row r                     last token at position p                      drawn: x0
    its draft row s1          a copy of r, draft d1 at p + 1                drawn: x1
    its draft row s2          a copy of r, draft d2 at p + 2                drawn: x2

    set_up      before the forward: the draft rows, from the rows and their paths
    refuse      before the draw, if a constraint could not be followed along some drafts
    accept      after the draw: of r's drafts, those before the first that differs: d1 = x0, d2 = x1

On a GPU each is one launch (`rollout_kernels.step.triton_verify`), and some more for penalties, bans and biases.

The decode step in between knows nothing of drafts: each draft row writes the KV of its draft before any row attends,
and draws with the numbers of its own position, with the token counts that it would have. So x0, and the token after
each accepted draft, are the tokens that steps of one token would draw. Then r goes on after the last of them. Refused
drafts have written beyond the row's length; the next step writes there again.

Legend: R rows of the row state, G drafts that the device makes for a row, M rows with drafts, K most drafts of one,
N drafts of all, W tokens of a path, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.engine.features.drafts.row_drafts import IN_ROW_STATE
from rollout.engine.step.row_state import LAST, LENGTH, RowState
from rollout.engine.upload import RowNeeds, StepInput

_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class DraftState:
    """The part of the row state that belongs to drafts, at fixed addresses."""

    drafts_R: torch.Tensor  # int64: of a draft row: its draft
    next_RG: torch.Tensor  # int64: the next drafts of a row as the device made them; G is 0 if it makes none

    @classmethod
    def allocate(cls, rows: RowState, made: int) -> DraftState:
        """State next to `rows`; the device makes `made` drafts for a row, 0 if none."""
        count, device = len(rows.ints), rows.ints.device
        drafts_R = torch.zeros(count, dtype=torch.int64, device=device)
        return cls(drafts_R, torch.zeros(count, made, dtype=torch.int64, device=device))


def write_draft_pages(rows: RowState, pages_N3: torch.Tensor) -> None:
    """Put pages into the page tables of rows: row, column, page."""
    row_N, column_N, page_N = pages_N3.long().unbind(1)
    rows.pages.index_put_((row_N, column_N), page_N.int())


def set_up(rows: RowState, drafts: DraftState, step: StepInput) -> None:
    draft_N, owner_N, nth_N, which_N = step["drafts"].unbind(1)
    needs = step.header.needs
    if rows.ints.is_cuda:
        from rollout_kernels.step.triton_verify import set_up_drafts

        column = next(iter(rows.columns.values()), None)
        set_up_drafts(
            step["drafts"],
            step["verified"],
            step["paths"],
            rows.ints,
            rows.floats,
            rows.pages,
            drafts.drafts_R,
            column,
            drafts.next_RG,
            last=LAST,
            length=LENGTH,
        )
    else:
        copy_rows(rows, drafts, step)
    for state, need in (
        (rows.banned, needs & RowNeeds.MIN_TOKENS),
        (rows.bias_ids, needs & RowNeeds.BIAS),
        (rows.bias, needs & RowNeeds.BIAS),
    ):
        if need:
            state.index_copy_(0, draft_N, state.index_select(0, owner_N))
    if needs & RowNeeds.PENALIZE:
        token_N = drafts.drafts_R.index_select(0, draft_N)
        before_NN = (which_N[:, None] == which_N) & (nth_N[:, None] >= nth_N)  # a row's own draft included
        counts_NV = rows.counts.index_select(0, owner_N)
        index_NN = torch.arange(len(draft_N), device=draft_N.device)[:, None].expand_as(before_NN)
        counts_NV.index_put_((index_NN, token_N.expand_as(before_NN)), before_NN.int(), accumulate=True)
        rows.counts.index_copy_(0, draft_N, counts_NV)


def copy_rows(rows: RowState, drafts: DraftState, step: StepInput) -> None:
    """Make each draft row a copy of its row, some tokens ahead; the twin of `set_up_drafts`."""
    draft_N, owner_N, nth_N, which_N = step["drafts"].unbind(1)
    paths_MW, begin_M = step["paths"], step["verified"][:, 3]
    ints_NI = rows.ints.index_select(0, owner_N)
    position_N = ints_NI[:, LENGTH] + nth_N
    at_N = (position_N - begin_M[which_N]).clamp_(0, paths_MW.shape[1] - 1)
    token_N = paths_MW[which_N, at_N]
    if drafts.next_RG.shape[1]:
        token_N = torch.where(begin_M[which_N] == IN_ROW_STATE, drafts.next_RG[owner_N, nth_N - 1], token_N)
    ints_NI[:, LENGTH], ints_NI[:, LAST] = position_N, token_N
    rows.ints.index_copy_(0, draft_N, ints_NI)
    drafts.drafts_R.index_copy_(0, draft_N, token_N)
    for state in (rows.floats, rows.pages, *rows.columns.values()):
        state.index_copy_(0, draft_N, state.index_select(0, owner_N))


def refuse(drafts: DraftState, step: StepInput, draws_N: torch.Tensor) -> None:
    """Let no draft at these indices of a step equal a token."""
    drafts.drafts_R.index_fill_(0, step["rows"].index_select(0, draws_N), _NO_TOKEN)


def accept(
    rows: RowState, drafts: DraftState, step: StepInput, output_4R: torch.Tensor, accepted_R: torch.Tensor
) -> None:
    """Compare the drafts with the tokens drawn; the rows go on after the last accepted one.

    `accepted_R` (int32) gets the number of accepted drafts at the index of each row with drafts.
    """
    if rows.ints.is_cuda:
        from rollout_kernels.step.triton_verify import accept_drafts

        verified, step_rows = step["verified"], step["rows"]
        accept_drafts(
            verified, step_rows, output_4R[0], drafts.drafts_R, rows.ints, accepted_R, last=LAST, length=LENGTH
        )
    else:
        continue_rows(rows, drafts, step, output_4R, accepted_R)
    if step.header.needs & RowNeeds.PENALIZE:  # the draw has counted the first token
        row_M, index_M, _, _ = step["verified"].unbind(1)
        nth_K = torch.arange(step.header.most_ahead, device=row_M.device)
        taken_MK = nth_K < accepted_R[index_M][:, None]
        index_MK = (index_M[:, None] + 1 + nth_K).clamp_(max=len(step["rows"]) - 1)
        row_MK = row_M[:, None].expand_as(taken_MK)
        rows.counts.index_put_((row_MK, output_4R[0].long()[index_MK]), taken_MK.int(), accumulate=True)


def continue_rows(
    rows: RowState, drafts: DraftState, step: StepInput, output_4R: torch.Tensor, accepted_R: torch.Tensor
) -> None:
    """Compare drafts with tokens and let rows go on after the accepted ones; the twin of `accept_drafts`."""
    row_M, index_M, count_M, _ = step["verified"].unbind(1)
    drawn_R, step_rows = output_4R[0].long(), step["rows"]
    nth_K = torch.arange(step.header.most_ahead, device=row_M.device)
    index_MK = (index_M[:, None] + 1 + nth_K).clamp_(max=len(step_rows) - 1)  # indices of the drafts
    equal_MK = drawn_R[index_MK - 1] == drafts.drafts_R[step_rows[index_MK]]
    accepted_M = (equal_MK & (nth_K < count_M[:, None])).int().cumprod(1).sum(1)
    rows.ints[row_M, LAST] = drawn_R[index_M + accepted_M]
    rows.ints[row_M, LENGTH] += accepted_M
    accepted_R[index_M] = accepted_M.int()
