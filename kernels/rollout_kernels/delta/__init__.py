"""Gated DeltaNet: linear attention with a state for each row instead of KV.

spans    which tokens of a step go through which state
conv     `short_conv`: the convolution before it, and its torch twin
rule     `gated_delta`: the recurrence, one token or many at a time, and `gated_norm`: norm and gate of its output; both
         with their torch twins
states   `state_rule`: other rules of states, whose keys, values and decays are made before
drafts   decode steps in which rows have drafts, and how states catch up with the accepted ones
"""

from rollout_kernels.delta.conv import short_conv
from rollout_kernels.delta.drafts import catch_up
from rollout_kernels.delta.rule import gated_delta, gated_norm
from rollout_kernels.delta.spans import CHUNK, DraftInputs, Rule, Spans
from rollout_kernels.delta.states import state_rule

__all__ = [
    "CHUNK",
    "DraftInputs",
    "Rule",
    "Spans",
    "catch_up",
    "gated_delta",
    "gated_norm",
    "short_conv",
    "state_rule",
]
