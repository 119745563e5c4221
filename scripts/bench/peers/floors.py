"""Floors: the time to read weights and KV once per step, at the read bandwidth of the same run.

A step of a mixture of experts reads the experts that its rows choose.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scripts.bench.peers.workloads import tail_begin
from scripts.bench.shapes import StepBytes


def step_floor_s(
    need: StepBytes, rows: int, context_tokens: float, bandwidth: float, distinct: float | None = None
) -> float:
    """Seconds of a decode step whose rows hold `context_tokens` together; `bandwidth` in bytes per second.

    `distinct` is the mean number of experts per layer that they choose; None assumes even routing.
    """
    return need.of_step(rows, context_tokens, distinct) / bandwidth


@dataclass(frozen=True, slots=True)
class JobFloor:
    """Seconds of all decode steps of a job, and of the steps in which less than a tenth of its completions run."""

    total_s: float
    tail_s: float


def job_floor(need: StepBytes, prompts: Sequence[int], lengths: Sequence[int], rows: int, bandwidth: float) -> JobFloor:
    """The floor if each completion, in order, takes the first free one of `rows` rows.

    `prompts` and `lengths` are tokens. Prefill is not counted. The first token of a completion comes with its prefill,
    so a completion of n tokens takes part in n - 1 steps. Routing is taken to be even. KV of layers with windows is
    left out.
    """
    free = [0] * min(rows, len(lengths))  # the step at which each row is free
    spans = []
    for prompt, length in zip(prompts, lengths, strict=True):
        begin = heapq.heapreplace(free, free[0] + length - 1)
        spans.append((begin, begin + length - 1, prompt + 1))
    tail = int(tail_begin(sorted(end for _, end, _ in spans)))
    return JobFloor(_bytes_from(need, spans, 0) / bandwidth, _bytes_from(need, spans, tail) / bandwidth)


def _bytes_from(need: StepBytes, spans: Iterable[tuple[int, int, int]], since: int) -> float:
    """Time of the steps from `since` on. A span: a row's first step, the step after its last, its first context."""
    changes: Counter[int] = Counter()  # change of the number of busy rows, by step
    context_tokens = 0
    for begin, end, context in spans:
        steps = end - max(begin, since)
        if steps <= 0:
            continue
        changes[end - steps] += 1
        changes[end] -= 1
        context_tokens += steps * (context + end - steps - begin) + steps * (steps - 1) // 2
    need_bytes, busy = context_tokens * float(need.kv_per_token), 0
    for begin, end in pairwise(sorted(changes)):
        busy += changes[begin]
        need_bytes += (end - begin) * need.of_step(busy, 0)
    return need_bytes
