"""Drafts the next tokens of a row by n-grams: it finds an earlier place in the row's text that looks like its end.

    text      the token ids in the row's KV pages, then its last token, whose KV is not written yet
    match     of a place: the number of equal tokens before the place and at the end of the text, at most `MOST_EQUAL`
    drafts    the tokens from the place with the longest match on; of several such places, the newest one. When the
              drafts reach the end of the text, they start at that place again: the text is expected to be periodic

Without any match, each draft is the last token.
"""

from __future__ import annotations

import torch

#: The longest match, and the number of tokens at the end of a text that are searched.
MOST_EQUAL, REACH = 8, 32_768


def draft_by_ngrams(
    rows_R: torch.Tensor,
    ints_NI: torch.Tensor,
    pages_NP: torch.Tensor,
    tokens_PS: torch.Tensor,
    drafts_NG: torch.Tensor,
    *,
    last: int,
    length: int,
    reach: int = REACH,
) -> None:
    """Draft the next tokens of rows. On a GPU it does not wait for the device.

    Args:
        rows_R: int64 rows to draft for.
        ints_NI: int64 row state.
        pages_NP: int32 page tables.
        tokens_PS: int32 token ids of all pages; a row's tokens are written up to its length.
        drafts_NG: int64; receives the drafts of these rows.
        last: column of `ints_NI` with the last token.
        length: column of `ints_NI` with the number of tokens in the pages.
        reach: tokens at the end of a text that are searched.
    """
    if ints_NI.is_cuda:
        from rollout_kernels.step import triton_ngrams

        limits = {"most_equal": MOST_EQUAL, "reach": reach}
        triton_ngrams.draft_by_ngrams(
            rows_R, ints_NI, pages_NP, tokens_PS, drafts_NG, last=last, length=length, **limits
        )
        return
    page_size = tokens_PS.shape[1]
    for row in rows_R.tolist():
        written = int(ints_NI[row, length])
        pages = pages_NP[row, : -(-written // page_size)].long()
        text_T = torch.cat([tokens_PS[pages].flatten()[:written].long(), ints_NI[row, last : last + 1]])
        drafts_NG[row] = _follow(text_T, drafts_NG.shape[1], reach)


def _follow(text_T: torch.Tensor, count: int, reach: int) -> torch.Tensor:
    """The `count` drafts after a text, int64."""
    total = len(text_T)
    begins_N = torch.arange(max(1, total - reach), total)
    alive_N, equal_N = torch.ones_like(begins_N, dtype=torch.bool), torch.zeros_like(begins_N)
    for j in range(min(MOST_EQUAL, total - 1)):
        at_N = begins_N - 1 - j
        alive_N &= (at_N >= 0) & (text_T[at_N.clamp(min=0)] == text_T[total - 1 - j])
        equal_N += alive_N
    if not equal_N.any():
        return text_T[-1:].expand(count)
    begin = int(begins_N[(equal_N * (total + 1) + begins_N).argmax()])
    return text_T[begin + torch.arange(count) % (total - begin)]
