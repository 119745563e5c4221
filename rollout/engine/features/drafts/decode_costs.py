"""The times of decode steps on this device, measured before an engine serves.

A verify step runs first: it compiles and loads the kernels that only verify steps launch. The rows hold different
tokens in pages of their own, so in a mixture each row chooses its own experts. A row's context is one token. Steps
write the row state, the KV of the rows' pages, states of linear attention, and the slot. The row state is restored
afterwards, and no row reads KV or a state that it has not written. Where the model has states, rows without a place for
a state are drafts.
"""

import functools
import logging

import numpy as np
import torch

from rollout.engine.features.drafts.drafter import NAME, DraftAfter
from rollout.engine.features.drafts.step_costs import StepCosts
from rollout.engine.step.execute import Executor
from rollout.engine.step.row_state import LAST, RowState
from rollout.engine.step.slot import Slot
from rollout.engine.upload import PLAIN, StepInput, put_behind

#: Runs of each size; the first ones warm up, and the fastest of the others counts.
_WARM, _TIMED = 1, 3
_STRIDE = 7919  # difference between the tokens of neighbouring rows

log = logging.getLogger(__name__)


def measure_decode_costs(executor: Executor, slot: Slot, max_rows: int, on_device: bool) -> StepCosts:
    """The cost table for steps of up to `max_rows` rows: of each captured size, otherwise of powers of two.

    With `on_device` it also has the times of the drafter on the device.
    """
    _verify_once(executor, slot, max_rows)
    graphs = executor.graphs
    captured = [size for size in graphs.sizes.whole if size <= max_rows]
    larger = [1 << i for i in range(max_rows.bit_length()) if 1 << i > (captured[-1] if captured else 0)]
    sizes = sorted({*captured, *larger, max_rows})
    measured = {rows: _seconds(executor, slot, rows) for rows in sizes}
    drafting = {}
    if on_device:
        drafting = {rows: _seconds(executor, slot, rows, drafts=True) for rows in sizes}
        rounded = {rows: round(seconds, 6) for rows, seconds in drafting.items()}
        log.info("the device drafts next tokens", extra={"seconds_by_rows": rounded})
    return StepCosts(measured, bool(captured), executor.step.shares_pages, drafting)


def _verify_once(executor: Executor, slot: Slot, draft_row: int) -> None:
    """A verify step of row 1 with one draft."""
    size = executor.graphs.sizes.size_for(2)
    padded, staging = size or 2, slot.staging
    staging.begin()
    executor.step.put_rows(staging, [1, draft_row], padded)
    if executor.step.kv.states.go_ahead:
        put_behind(staging, [1], padded)
    staging.put("pages", np.array([(1, 0, 0)], dtype=np.int32))
    staging.put("verified", np.array([(1, 0, 1, 0)]))
    staging.put("paths", np.zeros((1, 2), dtype=np.int64))
    staging.put("drafts", np.array([(draft_row, 1, 1, 0)]))
    upload = staging.upload(2, 2, 2, PLAIN.value, executor.step.kv.page_size, size=size, most_ahead=1)
    step = slot.input_for(upload)
    executor.compute.run(functools.partial(step.receive, upload.words))
    executor.compute.run(functools.partial(executor.run, step, slot))
    executor.compute.run(functools.partial(_as_before, executor.step.rows))
    executor.finish()


def _seconds(executor: Executor, slot: Slot, rows: int, drafts: bool = False) -> float:
    """The time of a plain step; with `drafts` only the time of the drafter on the device after it."""
    size = executor.graphs.sizes.size_for(rows)
    padded = size or rows
    slot.staging.begin()
    numbers, behind = _rows_and_drafts(executor, rows)
    executor.step.put_rows(slot.staging, numbers, padded)
    if behind:
        put_behind(slot.staging, behind, padded)
    context = executor.step.kv.page_size
    upload = slot.staging.upload(rows, rows, rows, PLAIN.value, context, size=size)
    step, state, compute = slot.input_for(upload), executor.step.rows, executor.compute
    start, end, times_s = executor.device.event(), executor.device.event(), []
    for _ in range(_WARM + _TIMED):
        compute.run(functools.partial(step.receive, upload.words))
        compute.run(functools.partial(_different_tokens, state, rows, executor.step.kv.pages))
        if drafts:
            compute.run(functools.partial(executor.run, step, slot))
            compute.record(start)
            drafted = StepInput(step.header._replace(facts={NAME: [str(DraftAfter.DRAFT)]}), step.words)
            compute.run(functools.partial(executor.end_step, drafted, slot))
        else:
            compute.record(start)
            compute.run(functools.partial(executor.run, step, slot))
        compute.record(end)
        compute.run(functools.partial(_as_before, state))
        end.synchronize()
        times_s.append(end.time_s - start.time_s)
    executor.finish()
    return min(times_s[_WARM:])


def _rows_and_drafts(executor: Executor, rows: int) -> tuple[list[int], list[int]]:
    """The rows of a step, and the number of drafts after each, if there are any."""
    drafts_of_states = executor.step.kv.states.drafts
    if drafts_of_states is None or rows < drafts_of_states.first:
        return list(range(1, rows + 1)), []
    own = drafts_of_states.first - 1
    drafts = [(rows - own) // own + (i < (rows - own) % own) for i in range(own)]
    numbers, draft_rows = [], iter(range(own + 1, rows + 1))
    for row, count in enumerate(drafts, start=1):
        numbers += [row, *(next(draft_rows) for _ in range(count))]
    return numbers, drafts


def _different_tokens(state: RowState, rows: int, pages: int) -> None:
    """Give each row different tokens: rows with equal KV would soon choose the same experts."""
    number = torch.arange(rows, device=state.ints.device)
    state.ints[1 : rows + 1, LAST] = _STRIDE * number % state.vocab
    state.pages[1 : rows + 1, 0] = 1 + number % (pages - 1)


def _as_before(state: RowState) -> None:
    for tensor in (state.ints, state.counts, state.pages):
        tensor.zero_()
