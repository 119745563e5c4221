"""The largest steps that an engine can have, run once before it serves, on padding and a KV cache of two pages.

They compile and load every kernel of prefill and of sampling, so that nothing is compiled while serving, and they take
the memory that such steps will take. Row 0 is all rows and page 0 all pages; both are as before afterwards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from rollout.engine.schedule.sequence import Feature
from rollout.engine.step.graphs import PLAIN, DecodeGraphs
from rollout.engine.step.runner import Runner
from rollout.engine.step.slot import Slot
from rollout.models.fused import FusedDecoder

#: All that can be asked of sampling at once.
ALL_FEATURES = functools.reduce(lambda a, b: a | b, Feature)
#: Lengths of the longest chunk of a prefill step at which its attention changes kernels.
_CHUNK_LENGTHS = (1, 32, 64, 128)
#: Sizes whose graphs are captured to learn what one more costs.
_MORE_SIZES = 3
#: What steps of many sizes make the allocator hold, over what the largest alone took: up to 1.7 was seen.
_FRAGMENTATION = 2


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """Device memory that steps take beside weights, row state and KV, bytes."""

    activations: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.graphs


def largest_chunks(max_rows: int, chunk_tokens: int, max_context: int) -> list[int]:
    """Lengths of the chunks of the prefill step with the most tokens and, of those, the most that sample."""
    count = min(max_rows, chunk_tokens)
    return [min(chunk_tokens // count + (i < chunk_tokens % count), max_context) for i in range(count)]


def rehearse(
    runner: Runner, slot: Slot, max_rows: int, chunk_tokens: int, max_context: int, graph_rows: int | None
) -> None:
    """Run the largest prefill and decode steps, with and without changed logits, and steps of every kernel.

    `graph_rows` are the rows up to which decode steps will be captured, None if none will be.
    """
    largest = largest_chunks(max_rows, chunk_tokens, max_context)
    one = min(chunk_tokens, max_context)
    kernel_sizes = runner.forward.kernel_sizes() if isinstance(runner.forward, FusedDecoder) else []
    prefills = [size for size in kernel_sizes if one < size < sum(largest)]
    chunk_lengths = sorted({*_CHUNK_LENGTHS, *kernel_sizes})
    steps = [(largest, ALL_FEATURES), ([one], PLAIN), *(([length], PLAIN) for length in chunk_lengths)]
    steps += [(_chunks(size, one), PLAIN) for size in prefills]
    kinds = [Feature.NONE] if runner.adapters is None else [Feature.NONE, Feature.ADAPTER]
    for lengths, features in steps:
        if max(lengths) <= one and len(lengths) <= max_rows:
            for also in kinds:
                runner.rehearse_prefill(slot, lengths, features | also, max_context)
    captured_all = graph_rows is not None and graph_rows >= max_rows
    decodes = {*_powers_of_two(max_rows), *(size for size in kernel_sizes if size < max_rows)}
    for size in [] if captured_all else sorted(decodes):
        for also in kinds:
            runner.rehearse_decode(slot, size, PLAIN | also, max_context)
    runner.rehearse_decode(slot, max_rows, ALL_FEATURES, max_context)


def measure_steps(
    runner: Runner, slots: list[Slot], max_rows: int, chunk_tokens: int, max_context: int, graph_rows: int | None
) -> StepNeeds:
    """Rehearse on a GPU; returns what the steps took, by what the driver says is free before and after.

    With `graph_rows` the largest decode steps are captured as well, and the share of the smaller ones is estimated.
    None of the memory is kept.
    """
    runner.device.synchronize()
    torch.cuda.empty_cache()
    before = _free_bytes()
    rehearse(runner, slots[0], max_rows, chunk_tokens, max_context, graph_rows)
    activations = before - _free_bytes()
    graphs = 0 if graph_rows is None else _measure_graphs(runner, slots, max_context, graph_rows)
    torch.cuda.empty_cache()
    return StepNeeds(_FRAGMENTATION * max(activations, 0), max(graphs, 0))


def _measure_graphs(runner: Runner, slots: list[Slot], max_context: int, graph_rows: int) -> int:
    before = _free_bytes()
    graphs = DecodeGraphs(runner, max_context, graph_rows)
    *smaller, largest = graphs.sizes
    graphs.capture(slots, sizes=[largest])
    first = before - _free_bytes()
    if not smaller:
        return first
    measured = smaller[-_MORE_SIZES:]
    graphs.capture(slots, sizes=measured)
    more = before - _free_bytes() - first
    return first + more * len(smaller) // len(measured) + graphs.kept_bytes


def _chunks(tokens: int, longest: int) -> list[int]:
    """Lengths of the fewest chunks that `tokens` tokens come in."""
    return [min(longest, tokens - begin) for begin in range(0, tokens, longest)]


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def _powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]
