"""Rules of states whose queries, keys, values and decays are made before: Kimi's delta rule, and Mamba-2's.

    S <- diag(exp(g)) S    g: one for a head, or one for each channel of its keys
    u  = beta (v - k S)    without beta: v
    S <- S + k u           o = q S

A prefill is made of torch's operations on every device.

Legend: T tokens, N places, H heads, K and V dimensions of a key and a value, X 1 or K.
"""

from __future__ import annotations

import torch

from rollout_kernels.delta.rule import AdvanceChunk, through_states
from rollout_kernels.delta.spans import CHUNK, DraftInputs, Spans


def state_rule(
    tokens: tuple[torch.Tensor, ...],
    state_NHKV: torch.Tensor,
    spans: Spans,
    one_chunk: AdvanceChunk,
    kept: DraftInputs | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """The outputs of all heads, float32 [T, H, V].

    Args:
        tokens: queries, keys [T, H, K], values [T, H, V], g [T, H, X] and, if the rule has it, beta [T, H]: float32.
        state_NHKV: float32 states; the states of the step's rows are changed in place.
        spans: the rows of the step.
        one_chunk: the rule for tokens of a prefill that follow each other.
        kept: in a step with drafts, receives the rule's inputs of each draft.
        chunk: tokens of a chunk, at most.
    """
    if state_NHKV.is_cuda and spans.lengths is None:
        from rollout_kernels.delta.triton_states import decode_states

        return decode_states(tokens, state_NHKV, spans, kept)
    return through_states(tokens, state_NHKV, spans, one_chunk, kept, chunk)
