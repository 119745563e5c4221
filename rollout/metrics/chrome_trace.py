"""A recording in the Chrome trace event format, for https://ui.perfetto.dev and chrome://tracing.

    loop       plan, launch, commit, finalize of every step, on the host
    h2d        upload of its inputs         on the device, a track for each stream
    compute    the step itself
    d2h        download of its tokens
    swap       swaps of the weights; they hold the compute stream
    rows, zombie rows                       counters, as of each step

Times are microseconds after the recording's origin. `finalize` lasts from the end of a commit until what it brought
(events, slots, a swap that was due) has been handed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollout.metrics.meter import StepRecord
from rollout.metrics.recording import Recording

_PID = 1
TRACKS = {"loop": 1, "h2d": 2, "compute": 3, "d2h": 4, "swap": 5}
_SHOWN = {"loop": "CPU: loop", "h2d": "GPU: h2d", "compute": "GPU: compute", "d2h": "GPU: d2h", "swap": "GPU: swap"}


def chrome_trace(recording: Recording, process: str) -> dict[str, Any]:
    """The trace as an object for `json.dump`. `process` is shown as the process's name."""
    events = [*_names(process)]
    for number, step in enumerate(recording.steps):
        events += _step(number, step)
    for swap in recording.swaps:
        events.append(_slice("swap", "swap", swap.start_s, swap.end_s, {"version": swap.version}))
    events.sort(key=lambda event: event.get("ts", -1.0))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"origin_unix_s": recording.origin_s, "steps": len(recording.steps)},
    }


def _names(process: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": _PID, "tid": 0, "args": {"name": process}}
    for track, tid in TRACKS.items():
        yield {"ph": "M", "name": "thread_name", "pid": _PID, "tid": tid, "args": {"name": _SHOWN[track]}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": tid, "args": {"sort_index": tid}}


def _step(number: int, step: StepRecord) -> Iterator[dict[str, Any]]:
    facts = {
        "step": number,
        "kind": step.kind,
        "rows": step.rows,
        "zombie_rows": step.zombie_rows,
        "tokens": step.tokens,
        "version": step.version,
    }
    planned, committed = step.planned_at_s, step.committed_at_s
    if planned is not None:
        launching = planned + step.plan_s
        yield _slice("loop", "plan", planned, launching, facts)
        yield _slice("loop", "launch", launching, launching + step.launch_s, facts)
    if committed is not None:
        done = committed + step.commit_s
        yield _slice("loop", "commit", committed, done, facts)
        if step.finalized_at_s is not None:
            yield _slice("loop", "finalize", done, step.finalized_at_s, facts)
    for track, span in (("h2d", step.h2d), ("d2h", step.d2h)):
        if span is not None:
            yield _slice(track, track, *span, facts)
    for begin_s, end_s in step.busy:  # two of a step that waited for masks: forward, and draw
        yield _slice("compute", step.kind, begin_s, end_s, facts)
    for name, value in (("rows", step.rows), ("zombie rows", step.zombie_rows)):
        yield {"ph": "C", "name": name, "pid": _PID, "tid": 0, "ts": _us(step.start_s), "args": {name: value}}


def _slice(track: str, name: str, begin_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    begin, end = _us(begin_s), _us(end_s)
    return {
        "ph": "X",
        "cat": track,
        "name": name,
        "pid": _PID,
        "tid": TRACKS[track],
        "ts": begin,
        "dur": round(max(0.0, end - begin), 3),
        "args": args,
    }


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
