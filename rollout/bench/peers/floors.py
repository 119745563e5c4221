"""What the bytes of a piece of work cost at the read bandwidth of the same run: weights and KV once a step.

Of a mixture of experts a step reads those that its rows choose.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from rollout.bench.shapes import StepBytes


def step_floor_s(
    need: StepBytes, rows: int, context_tokens: float, bandwidth: float, distinct: float | None = None
) -> float:
    """Seconds of a decode step whose rows hold `context_tokens` together; `bandwidth` in bytes per second.

    `distinct` are the experts that they choose in a layer, on average over the layers; None takes even routing.
    """
    return need.of_step(rows, context_tokens, distinct) / bandwidth


def job_floor_s(need: StepBytes, prompts: Sequence[int], lengths: Sequence[int], rows: int, bandwidth: float) -> float:
    """Seconds of all decode steps when completions take the first free of `rows` rows in their order.

    `prompts` and `lengths` are tokens. Prefill is not counted. The first token of a completion comes with its prefill,
    so a completion of n tokens takes part in n - 1 steps. Routing is taken to be even.
    """
    free = [0] * min(rows, len(lengths))  # the step at which each row is free
    changes: Counter[int] = Counter()  # of the number of rows at work, by step
    context_tokens = 0
    for prompt, length in zip(prompts, lengths, strict=True):
        steps = length - 1
        begin = heapq.heapreplace(free, free[0] + steps)
        changes[begin] += 1
        changes[begin + steps] -= 1
        context_tokens += steps * (prompt + 1) + steps * (steps - 1) // 2
    need_bytes, busy = context_tokens * float(need.kv_per_token), 0
    for begin, end in pairwise(sorted(changes)):
        busy += changes[begin]
        need_bytes += (end - begin) * need.of_step(busy, 0)
    return need_bytes / bandwidth
