"""What the bytes of a piece of work cost at the read bandwidth of the same run: weights and KV once a step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rollout.bench.shapes import StepBytes


def step_floor_s(need: StepBytes, context_tokens: float, bandwidth: float) -> float:
    """Seconds of a decode step whose rows hold `context_tokens` together; `bandwidth` in bytes per second."""
    return (need.weights + need.kv_per_token * context_tokens) / bandwidth


def job_floor_s(need: StepBytes, prompts: Sequence[int], lengths: Sequence[int], rows: int, bandwidth: float) -> float:
    """Seconds of all decode steps when completions take the first free of `rows` rows in their order.

    `prompts` and `lengths` are tokens. Prefill is not counted. The first token of a completion comes with its prefill,
    so a completion of n tokens takes part in n - 1 steps.
    """
    free = [0] * min(rows, len(lengths))  # the step at which each row is free
    context_tokens = 0
    for prompt, length in zip(prompts, lengths, strict=True):
        steps = length - 1
        heapq.heapreplace(free, free[0] + steps)
        context_tokens += steps * (prompt + 1) + steps * (steps - 1) // 2
    return (max(free) * need.weights + context_tokens * need.kv_per_token) / bandwidth
