"""The begin of a decode step: from the state of its rows to the input of the model.

begin         `begin_step`: the op and its torch twin
triton_begin  the same on a GPU
triton_drafts on a GPU: draft rows before a verify step, accepted drafts after it
"""

from rollout_kernels.step.begin import DecodeInput, begin_step

__all__ = ["DecodeInput", "begin_step"]
