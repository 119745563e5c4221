"""The begin of a decode step: from the state of its rows to the input of the model.

begin         `begin_step`: the op and its torch twin
triton_begin  the same on a GPU
triton_verify on a GPU: draft rows before a verify step, accepted drafts after it
ngrams        `draft_by_ngrams`, after a step: the op and its torch twin
triton_ngrams the same on a GPU
"""

from rollout_kernels.step.begin import DecodeInput, begin_step
from rollout_kernels.step.ngrams import draft_by_ngrams

__all__ = ["DecodeInput", "begin_step", "draft_by_ngrams"]
