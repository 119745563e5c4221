"""The last steps of a worker on their way to `rollout trace`: to columns of numpy arrays, and back.

Times are seconds after `origin_s`, which is Unix time; an unknown moment is NaN. A received recording is checked: all
columns have one length, and every value is one that a step can have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollout.metrics.step_timing import StepTiming, SwapTiming

MAX_STEPS = 2000
_KINDS = ("decode", "prefill")
_COUNTS = ("rows", "zombie_rows", "tokens", "version", "idle_after")
_DURATIONS = ("plan_s", "launch_s", "commit_s")
_MOMENTS = ("start_s", "end_s", "planned_at_s", "committed_at_s")
_INTERVALS = {"h2d": "h2d", "d2h": "d2h", "mask_wait": "held"}  # name in `StepTiming`: name in the reply
_OPTIONAL = (*(f"{interval}_{end}_s" for interval in _INTERVALS.values() for end in ("start", "end")), "finalized_at_s")


@dataclass(frozen=True, slots=True)
class Recording:
    """Steps and swaps, times in seconds after `origin_s`; every step has `planned_at_s` and `committed_at_s`."""

    steps: tuple[StepTiming, ...]
    swaps: tuple[SwapTiming, ...]
    origin_s: float  # Unix time

    @staticmethod
    def of(steps: Sequence[StepTiming], swaps: Sequence[SwapTiming]) -> Recording:
        """A recording of the meter's steps, with the swaps since the first of them."""
        unix_s, clock_s = time.time(), time.perf_counter()
        if not steps:
            return Recording((), (), unix_s)
        origin_s = min(step.start_s if step.planned_at_s is None else step.planned_at_s for step in steps)
        shown = [
            SwapTiming(swap.version, swap.start_s - origin_s, swap.end_s - origin_s)
            for swap in swaps
            if swap.end_s >= origin_s
        ]
        return Recording(tuple(_shifted(step, origin_s) for step in steps), tuple(shown), unix_s - clock_s + origin_s)

    def to_fields(self) -> dict[str, Any]:
        """The fields of a `trace` reply: int32 (versions int64), uint8 `kind` and `idle_after`, float64 for times."""
        steps: dict[str, np.ndarray] = {"kind": np.array([_KINDS.index(s.kind) for s in self.steps], np.uint8)}
        for name in _COUNTS:
            dtype = np.int64 if name == "version" else np.uint8 if name == "idle_after" else np.int32
            steps[name] = np.array([getattr(step, name) for step in self.steps], dtype)
        for name in (*_DURATIONS, *_MOMENTS, "finalized_at_s"):
            steps[name] = _seconds([getattr(step, name) for step in self.steps])
        for attribute, name in _INTERVALS.items():
            intervals = [getattr(step, attribute) or (None, None) for step in self.steps]
            steps[f"{name}_start_s"] = _seconds([begin for begin, _ in intervals])
            steps[f"{name}_end_s"] = _seconds([end for _, end in intervals])
        swaps = {
            "version": np.array([swap.version for swap in self.swaps], np.int64),
            "start_s": _seconds([swap.start_s for swap in self.swaps]),
            "end_s": _seconds([swap.end_s for swap in self.swaps]),
        }
        return {"origin_s": self.origin_s, "steps": steps, "swaps": swaps}

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Recording:
        """A recording from the fields of a reply. Raises ValueError if no worker could have sent them."""
        origin_s = fields.get("origin_s")
        if not isinstance(origin_s, float) or not math.isfinite(origin_s):
            raise ValueError("the recording has no 'origin_s'")
        names = ("kind", *_COUNTS, *_DURATIONS, *_MOMENTS, *_OPTIONAL)
        steps = _columns(fields, "steps", names, _OPTIONAL)
        swaps = _columns(fields, "swaps", ("version", "start_s", "end_s"), ())
        if any(kind not in (0, 1) for kind in steps["kind"]):
            raise ValueError("the recording has steps of an unknown kind")
        return Recording(
            tuple(_step({name: steps[name][i] for name in names}) for i in range(len(steps["kind"]))),
            tuple(SwapTiming(*row) for row in zip(swaps["version"], swaps["start_s"], swaps["end_s"], strict=True)),
            origin_s,
        )


def _shifted(step: StepTiming, by_s: float) -> StepTiming:
    def moved(moment: float | None) -> float | None:
        return None if moment is None else moment - by_s

    def interval(pair: tuple[float, float] | None) -> tuple[float, float] | None:
        return None if pair is None else (pair[0] - by_s, pair[1] - by_s)

    return replace(
        step,
        start_s=step.start_s - by_s,
        end_s=step.end_s - by_s,
        h2d=interval(step.h2d),
        d2h=interval(step.d2h),
        mask_wait=interval(step.mask_wait),
        planned_at_s=moved(step.planned_at_s),
        committed_at_s=moved(step.committed_at_s),
        finalized_at_s=moved(step.finalized_at_s),
    )


def _seconds(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _columns(
    fields: Mapping[str, Any], name: str, wanted: Sequence[str], optional: Sequence[str]
) -> dict[str, list[Any]]:
    table = fields.get(name)
    given = table if isinstance(table, Mapping) else {}
    columns = {column: given[column] for column in wanted if isinstance(given.get(column), np.ndarray)}
    shapes = {array.shape for array in columns.values()}
    if len(columns) != len(wanted) or len(shapes) != 1 or len(*shapes) != 1 or columns[wanted[0]].size > MAX_STEPS:
        raise ValueError(f"the recording's '{name}' must have columns of one length: {', '.join(wanted)}")
    for column, array in columns.items():
        finite = np.isfinite(array) if column not in optional else ~np.isinf(array)
        if array.dtype.kind not in "iuf" or not finite.all():
            raise ValueError(f"the recording's '{name}.{column}' must be numbers")
    return {column: array.tolist() for column, array in columns.items()}


def _step(row: Mapping[str, Any]) -> StepTiming:
    def interval(name: str) -> tuple[float, float] | None:
        begin, end = row[f"{name}_start_s"], row[f"{name}_end_s"]
        return None if math.isnan(begin) or math.isnan(end) else (begin, end)

    kept = {name: row[name] for name in (*_COUNTS, *_DURATIONS, *_MOMENTS)}
    kept["idle_after"] = bool(kept["idle_after"])
    finalized = row["finalized_at_s"]
    return StepTiming(
        kind=_KINDS[row["kind"]],
        h2d=interval("h2d"),
        d2h=interval("d2h"),
        mask_wait=interval("held"),
        finalized_at_s=None if math.isnan(finalized) else finalized,
        **kept,
    )
