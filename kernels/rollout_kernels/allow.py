"""The ban on tokens that a row's constraint does not allow.

Legend: S rows that sample, V vocabulary, C constrained rows, W words of a mask.
"""

from __future__ import annotations

import torch

_WORD_BITS = 32


def allow_only(logits_SV: torch.Tensor, at_C: torch.Tensor, masks_CW: torch.Tensor) -> None:
    """Set the logits of tokens that may not come to -inf, in place.

    Args:
        logits_SV: float32.
        at_C: int64, the constrained rows of `logits_SV`, each once.
        masks_CW: int32; bit v % 32 of word v // 32 is set where token v may come.
    """
    if logits_SV.is_cuda:
        from rollout_kernels.triton_allow import allow_only as on_gpu

        on_gpu(logits_SV, at_C, masks_CW)
        return
    token_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    words_CV = masks_CW.index_select(1, token_V // _WORD_BITS)
    allowed_CV = (words_CV >> (token_V % _WORD_BITS).int()) & 1
    banned_CV = logits_SV.index_select(0, at_C).masked_fill_(allowed_CV == 0, -torch.inf)
    logits_SV.index_copy_(0, at_C, banned_CV)
