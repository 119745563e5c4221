"""A recording in the Chrome trace event format, for https://ui.perfetto.dev and chrome://tracing.

`TRACKS` says what each track shows; the trace carries the same words, as names of the tracks and as `legend`. Times are
microseconds after the recording's origin.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.metrics.recording import Recording
from rollout.metrics.step_timing import StepTiming

_PID = 1


@dataclass(frozen=True, slots=True)
class Track:
    """One line of the trace."""

    tid: int
    title: str
    meaning: str


TRACKS: Mapping[str, Track] = {
    "loop": Track(
        1,
        "host: loop",
        "plan: choose rows and pages; launch: enqueue the step; commit: append the tokens of a finished step; "
        "finalize: hand over its events and free its slot",
    ),
    "h2d": Track(2, "device: upload", "copy of a step's inputs to the device"),
    "compute": Track(3, "device: compute", "the step itself, decode or prefill; a gap between steps is idle time"),
    "d2h": Track(4, "device: download", "copy of a step's tokens to the host"),
    "swap": Track(5, "device: swap", "a swap of the weights, which holds the compute stream"),
}
_COUNTERS = {"rows": "rows of the step", "zombie rows": "rows of the step whose sequence had ended before"}


def chrome_trace(recording: Recording, process: str) -> dict[str, Any]:
    """The trace as an object for `json.dump`. `process` is the process's name in the viewer."""
    events = [*_names(process)]
    for number, step in enumerate(recording.steps):
        events += _step(number, step)
    for swap in recording.swaps:
        events.append(_slice("swap", "swap", swap.start_s, swap.end_s, {"version": swap.version}))
    events.sort(key=lambda event: event.get("ts", -1.0))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "origin_unix_s": recording.origin_s,
            "steps": len(recording.steps),
            "legend": {track.title: track.meaning for track in TRACKS.values()} | _COUNTERS,
        },
    }


def _names(process: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": _PID, "tid": 0, "args": {"name": process}}
    for track in TRACKS.values():
        yield {"ph": "M", "name": "thread_name", "pid": _PID, "tid": track.tid, "args": {"name": track.title}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": track.tid, "args": {"sort_index": track.tid}}


def _step(number: int, step: StepTiming) -> Iterator[dict[str, Any]]:
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
    for track, interval in (("h2d", step.h2d), ("d2h", step.d2h)):
        if interval is not None:
            yield _slice(track, track, *interval, facts)
    for begin_s, end_s in step.busy:  # two if the step waited for masks: forward and draw
        yield _slice("compute", step.kind, begin_s, end_s, facts)
    for name, value in zip(_COUNTERS, (step.rows, step.zombie_rows), strict=True):
        yield {"ph": "C", "name": name, "pid": _PID, "tid": 0, "ts": _us(step.start_s), "args": {name: value}}


def _slice(track: str, name: str, begin_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    begin, end = _us(begin_s), _us(end_s)
    return {
        "ph": "X",
        "cat": track,
        "name": name,
        "pid": _PID,
        "tid": TRACKS[track].tid,
        "ts": begin,
        "dur": round(max(0.0, end - begin), 3),
        "args": args,
    }


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
