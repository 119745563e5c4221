"""What the engine did last, for the log line with which it fails: the plans of the last steps, in order.

Committed steps come from the meter, which keeps them anyway; behind them stand the steps that are in flight, and one
that was just being launched: mostly it is one of these that failed. Reading takes what is there in one go and asks
neither the loop nor the device, so it may be called from any thread, also while the loop hangs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rollout.engine.schedule.plan import Plan

if TYPE_CHECKING:
    from rollout.engine.loop import Engine

#: Steps that are told of, those in flight included.
SHOWN = 50


def last_steps(engine: Engine) -> list[dict[str, Any]]:
    """A map a step, oldest first, at most `SHOWN`.

    `step` counts from 1; `input` is the tokens that went in, `kept` those that came out and were kept, `context` the
    longest context; `ago_s` is for how long it has begun on the device, or been planned if it has not been committed.
    Times that are not known yet are None.
    """
    now_s, launching = time.perf_counter(), engine.launching
    in_flight = engine.pipeline.steps()
    unfinished = [
        _row(step.plan, "in flight", now_s - step.planned_at_s, step.plan_s, step.launch_s) for step in in_flight
    ]
    if launching is not None and all(step.plan is not launching for step in in_flight):
        unfinished.append(_row(launching, "launching", None, None, None))
    count, records = engine.meter.steps, engine.meter.recent_steps(SHOWN - len(unfinished))
    done = [
        {
            "state": "done",
            "kind": record.kind,
            "rows": record.rows,
            "zombies": record.zombie_rows,
            "input": record.input_tokens,
            "kept": record.tokens,
            "context": record.max_context,
            "version": record.version,
            "plan_ms": _ms(record.plan_s),
            "launch_ms": _ms(record.launch_s),
            "device_ms": _ms(record.end_s - record.start_s),
            "commit_ms": _ms(record.commit_s),
            "ago_s": round(now_s - record.start_s, 3),
        }
        for record in records
    ]
    first = count - len(done) + 1
    return [{"step": first + i} | row for i, row in enumerate([*done, *unfinished])]


def running_requests(engine: Engine) -> list[dict[str, Any]]:
    """Whose completions hold rows: client and id of each request, in order."""
    scheduler = engine.scheduler
    running = [seq.group.key for seq in (*scheduler.prefilling, *scheduler.decoding, *scheduler.leaving)]
    return [{"client": owner, "request": key.rpartition("#")[0] or key} for owner, key in dict.fromkeys(running)]


def _row(plan: Plan, state: str, ago_s: float | None, plan_s: float | None, launch_s: float | None) -> dict[str, Any]:
    zombies = sum(seq.finalized for seq in plan.seqs)
    return {
        "state": state,
        "kind": plan.kind,
        "rows": len(plan.seqs),
        "zombies": zombies,
        "input": plan.tokens,
        "kept": None,
        "context": plan.max_context,
        "version": plan.version,
        "plan_ms": _ms(plan_s),
        "launch_ms": _ms(launch_s),
        "device_ms": None,
        "commit_ms": None,
        "ago_s": None if ago_s is None else round(ago_s, 3),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
