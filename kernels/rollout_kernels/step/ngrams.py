"""What followed the last tokens of a row before, in its own text, as the pages of its KV have it.

    text      the tokens in the pages | the last token, whose KV is not written yet
    place     where a token follows; equal are the tokens before a place and those at the end of the text, so many
    guesses   from the place with most equal tokens on; of several it is the newest. At the end of the text they go on
              from that place again: a text that repeats itself is expected to do so again

Where nothing is equal, each guess is the last token.
"""

from __future__ import annotations

import torch

#: Tokens that are compared at most, and tokens at the end of a text in which places are.
MOST_EQUAL, REACH = 8, 32_768


def guess_by_ngrams(
    rows_R: torch.Tensor,
    ints_NI: torch.Tensor,
    pages_NP: torch.Tensor,
    tokens_PS: torch.Tensor,
    guesses_NG: torch.Tensor,
    *,
    last: int,
    length: int,
) -> None:
    """Guess the next tokens of rows; without a wait.

    Args:
        rows_R: int64 rows that guess.
        ints_NI: int64 row state.
        pages_NP: int32 page tables.
        tokens_PS: int32 token ids of all pages; those of a row are written up to its length.
        guesses_NG: int64, gets the guesses of these rows.
        last: column of `ints_NI` with the last token.
        length: column of `ints_NI` with the number of tokens in the pages.
    """
    if ints_NI.is_cuda:
        from rollout_kernels.step import triton_ngrams

        triton_ngrams.guess_by_ngrams(
            rows_R,
            ints_NI,
            pages_NP,
            tokens_PS,
            guesses_NG,
            last=last,
            length=length,
            most_equal=MOST_EQUAL,
            reach=REACH,
        )
        return
    page_size = tokens_PS.shape[1]
    for row in rows_R.tolist():
        written = int(ints_NI[row, length])
        pages = pages_NP[row, : -(-written // page_size)].long()
        text_T = torch.cat([tokens_PS[pages].flatten()[:written].long(), ints_NI[row, last : last + 1]])
        guesses_NG[row] = _follow(text_T, guesses_NG.shape[1])


def _follow(text_T: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` tokens expected after a text, int64."""
    total = len(text_T)
    places_N = torch.arange(max(1, total - REACH), total)
    alive_N, equal_N = torch.ones_like(places_N, dtype=torch.bool), torch.zeros_like(places_N)
    for j in range(min(MOST_EQUAL, total - 1)):
        at_N = places_N - 1 - j
        alive_N &= (at_N >= 0) & (text_T[at_N.clamp(min=0)] == text_T[total - 1 - j])
        equal_N += alive_N
    if not equal_N.any():
        return text_T[-1:].expand(count)
    place = int(places_N[(equal_N * (total + 1) + places_N).argmax()])
    return text_T[place + torch.arange(count) % (total - place)]
