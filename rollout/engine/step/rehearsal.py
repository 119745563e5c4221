"""The largest steps that an engine can have, run once before it serves, on padding and a KV cache of two pages.

They load every kernel of prefill and of sampling, so nothing is compiled while serving. They take as much memory as
such steps will take. On a GPU they first run without kernels, and threads compile the kernels meanwhile. All rows are
row 0 and all pages page 0; both are as before afterwards.
"""

import functools
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from rollout_kernels.attention.gathered import MOST_CHUNKS, MOST_GATHERED
from rollout_kernels.attention.triton_prefill import SHORT_CHUNK

from rollout.engine.step.compile_ahead import compile_kernels_of
from rollout.engine.step.execute import Executor
from rollout.engine.step.graphs import DecodeGraphs, make_graphs
from rollout.engine.step.slot import Slot
from rollout.engine.upload import PLAIN, RowNeeds, Upload, put_prefill
from rollout.models.decoder import Decoder
from rollout.models.fused import FusedDecoder

log = logging.getLogger(__name__)

_NO_TOKENS = np.zeros(0, np.int64)
#: All sampling needs at once.
ALL_FEATURES = functools.reduce(lambda a, b: a | b, RowNeeds)
#: Lengths of the longest span of a prefill step at which its attention changes kernels.
_SPAN_LENGTHS = (1, 32, 64, 128, SHORT_CHUNK + 1)
#: Tokens of a span that ends a long context: enough for every kernel of attention.
_LONG_SPAN = 4096
#: Sizes whose graphs are captured to learn what one more costs.
_MORE_SIZES = 3
#: Steps of many sizes make the allocator hold up to 1.7 times what the largest alone took.
_FRAGMENTATION = 2
#: Bytes that steps, and one captured size, may take outside torch's allocator: code of kernels, graphs, libraries.
_MOST_BESIDE, _MOST_BESIDE_A_SIZE = 2 << 30, 64 << 20
#: Threads that compile kernels at the start, at most one a core: each runs a compiler, which takes a core and memory.
COMPILE_THREADS = 16


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """Device memory that steps take in addition to weights, row state and KV, bytes."""

    activations: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.graphs


class StepSizes(NamedTuple):
    """The largest steps of an engine."""

    rows: int  # rows of a decode
    tokens: int  # tokens of a prefill
    context: int  # tokens of a sequence
    graph_rows: int  # rows up to which decode steps are captured; 0 if none are


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One step to rehearse: a prefill of prompts of these lengths, or a decode of this number of rows."""

    needs: RowNeeds
    prompts: tuple[int, ...] = ()
    earlier: int = 0  # tokens of each prompt that earlier steps have run
    rows: int = 0


def largest_prompts(max_rows: int, chunk_tokens: int, max_context: int) -> list[int]:
    """Lengths of the spans of the prefill step with the most tokens and, of those, the most that sample."""
    count = min(max_rows, chunk_tokens)
    return [min(chunk_tokens // count + (i < chunk_tokens % count), max_context) for i in range(count)]


def longest_contexts(max_rows: int, chunk_tokens: int, max_context: int) -> list[list[int]]:
    """Lengths of spans that end the longest contexts: of one such span, and of as many as attention gathers at once.

    A longer span would take no other kernel and no more memory than the largest prefill step does.
    """
    one = min(chunk_tokens, max_context, _LONG_SPAN)
    count = max(1, min(max_rows, MOST_CHUNKS, MOST_GATHERED // max_context, chunk_tokens))
    several = [min(one, chunk_tokens // count)] * count
    return [[one], several] if count > 1 else [[one]]


def _more_than_gathered(max_rows: int, chunk_tokens: int, max_context: int) -> list[int]:
    """Spans, a long one first, that end contexts of more tokens than attention gathers, if any can."""
    earlier = max_context - SHORT_CHUNK - 1
    count = MOST_GATHERED // max(earlier, 1) + 1
    spans = [SHORT_CHUNK + 1] + [1] * (count - 1)
    return spans if earlier > 0 and count <= max_rows and sum(spans) <= chunk_tokens else []


def steps_to_rehearse(executor: Executor, sizes: StepSizes) -> list[Rehearsed]:
    """The largest prefill and decode steps, with and without changed logits, and steps of every kernel."""
    max_rows, chunk_tokens, max_context, graph_rows = sizes
    forward = executor.step.forward
    largest = largest_prompts(max_rows, chunk_tokens, max_context)
    one = min(chunk_tokens, max_context)
    kernel_sizes = [] if isinstance(forward, Decoder) else forward.kernel_sizes()
    # The largest step runs without an adapter, too: some kernels of many tokens do not take adapters.
    prefills = [size for size in sorted({*kernel_sizes, sum(largest)}) if one < size <= sum(largest)]
    lengths = sorted({*_SPAN_LENGTHS, *kernel_sizes})
    prompts = [(largest, ALL_FEATURES), ([one], PLAIN), *(([length], PLAIN) for length in lengths)]
    prompts += [(_spans(size, one), PLAIN) for size in prefills]
    kinds = executor.step.kinds
    steps = [
        Rehearsed(_possible(executor, features | also), prompts=tuple(lengths))
        for lengths, features in prompts
        if max(lengths) <= one and len(lengths) <= max_rows
        for also in kinds
    ]
    # Attention may gather contexts, which takes memory for all their tokens.
    gathered = min(max_context, MOST_GATHERED)
    for spans in longest_contexts(max_rows, chunk_tokens, gathered):
        if gathered > spans[0]:
            steps.append(Rehearsed(_possible(executor, PLAIN), prompts=tuple(spans), earlier=gathered - spans[0]))
    if more := _more_than_gathered(max_rows, chunk_tokens, max_context):
        steps.append(Rehearsed(_possible(executor, PLAIN), prompts=tuple(more), earlier=max_context - more[0]))
    captured_all = graph_rows >= max_rows
    decodes = {*_powers_of_two(max_rows), *(size for size in kernel_sizes if size < max_rows)}
    steps += [Rehearsed(PLAIN | also, rows=size) for size in sorted(decodes) if not captured_all for also in kinds]
    return [*steps, Rehearsed(_possible(executor, ALL_FEATURES), rows=max_rows)]


def rehearse(executor: Executor, slot: Slot, sizes: StepSizes) -> None:
    """Run the steps of `steps_to_rehearse`, in turn."""
    for step in steps_to_rehearse(executor, sizes):
        pack = _pack_prefill if step.prompts else _pack_decode
        _run(executor, slot, pack(executor, slot, step, sizes.context))


def measure_steps(
    executor: Executor, slots: list[Slot], sizes: StepSizes, compile_threads: int = COMPILE_THREADS
) -> StepNeeds:
    """Rehearse on a GPU; returns what the steps took. Other processes may use the GPU meanwhile.

    If steps are captured, the largest are captured here, too, and the share of the smaller ones is estimated. None of
    the memory is kept. Before, `compile_threads` threads compile the kernels; 0: none do.
    """
    executor.device.synchronize()
    torch.cuda.empty_cache()
    before = _memory()
    graphs = make_graphs(executor.step, executor.compute, sizes.context, sizes.graph_rows)
    model = executor.step.model
    if compile_threads and isinstance(model, Decoder):  # a fallback model's code may compute with what kernels return

        def run() -> None:
            forward = executor.step.forward
            with forward.one_layer_of_each_kind() if isinstance(forward, FusedDecoder) else nullcontext():
                rehearse(executor, slots[0], sizes)
                graphs.warm_up(slots[0])

        compile_kernels_of(run, compile_threads)
        torch.cuda.empty_cache()
        # Wait for all ranks before the first sum, which has a short time limit.
        model.group.all_gather(torch.zeros(1, device=model.embed.device))
        executor.device.synchronize()
    rehearse(executor, slots[0], sizes)
    after = _memory()
    activations = taken_between(before, after) + (_FRAGMENTATION - 1) * max(after.held - before.held, 0)
    of_graphs = _measure_graphs(graphs, slots) if sizes.graph_rows else 0
    torch.cuda.empty_cache()
    return StepNeeds(activations, of_graphs)


def _measure_graphs(graphs: DecodeGraphs, slots: list[Slot]) -> int:
    before = _memory()
    *smaller, largest = graphs.sizes.whole
    graphs.capture(slots, sizes=[largest])
    between = _memory()
    first = taken_between(before, between)
    if not smaller:
        return first
    measured = smaller[-_MORE_SIZES:]
    graphs.capture(slots, sizes=measured)
    more = taken_between(between, _memory(), _MOST_BESIDE_A_SIZE * len(measured))
    return first + more * len(smaller) // len(measured) + graphs.kept_bytes


def _pack_decode(executor: Executor, slot: Slot, step: Rehearsed, max_context: int) -> Upload:
    rows, staging = step.rows, slot.staging
    staging.begin()
    executor.step.put_rows(staging, [], rows)
    for feature in executor.step.features:
        feature.put_largest(staging, rows, _NO_TOKENS, step.needs)
    return staging.upload(rows, rows, rows, step.needs.value, max_context)


def _pack_prefill(executor: Executor, slot: Slot, step: Rehearsed, max_context: int) -> Upload:
    """Ends of prompts, each with a page to copy."""
    rows, total, staging = len(step.prompts), sum(step.prompts), slot.staging
    staging.begin()
    staging.put("copies", np.zeros((rows, 2), dtype=np.int32))
    tokens = np.arange(total, dtype=np.int64) % executor.step.rows.vocab
    layout = put_prefill(staging, [(0, step.earlier, length, 1) for length in step.prompts], tokens)
    for feature in executor.step.features:
        feature.put_largest(staging, rows, tokens, step.needs)
    return staging.upload(rows, total, rows, step.needs.value, max_context, layout=layout)


def _run(executor: Executor, slot: Slot, upload: Upload) -> None:
    """Run a step on the compute stream alone, to its end: the next step overwrites the upload."""
    header, step = upload.header, slot.input_for(upload)
    slot.masks.set_rows(range(header.draws))
    executor.compute.run(functools.partial(step.receive, upload.words))
    executor.compute.run(slot.masks.copy)
    executor.compute.run(functools.partial(executor.run, step, slot))
    executor.compute.run(functools.partial(executor.run_draw, header, slot))  # the draw waits for masks here
    executor.compute.run(executor.step.rows.clear_padding)
    done = executor.device.event()
    executor.compute.record(done)
    done.synchronize()
    executor.check()


def _possible(executor: Executor, needs: RowNeeds) -> RowNeeds:
    return needs & ~RowNeeds.VARIANT | executor.step.changes & needs


def _spans(tokens: int, longest: int) -> list[int]:
    """Lengths of the fewest spans that `tokens` tokens come in."""
    return [min(longest, tokens - begin) for begin in range(0, tokens, longest)]


class MemoryUse(NamedTuple):
    """Memory of a GPU at one moment, bytes."""

    free: int  # free memory that the driver reports
    held: int  # memory of this process that torch's allocator holds


def taken_between(before: MemoryUse, after: MemoryUse, most_beside: int = _MOST_BESIDE) -> int:
    """Bytes that this process took in between.

    The driver counts memory of all processes. So of the memory outside torch's allocator, at most `most_beside` bytes
    count as this process's. Others took the rest, such as a trainer that starts at the same time. Others may also have
    given some back.
    """
    held = after.held - before.held
    beside = before.free - after.free - held
    if beside > most_beside:
        log.info("other processes took memory of the GPU while steps were measured", extra={"bytes": beside})
    return max(held + min(max(beside, 0), most_beside), 0)


def _memory() -> MemoryUse:
    return MemoryUse(torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved())


def _powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]
