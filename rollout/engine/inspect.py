"""An engine in numbers: status, gauges of the meter, sequences, and last steps.

    status, gauges                       on the loop's thread, between two ticks
    sequences, recording, last steps     any thread, also while the loop hangs

The second group does not ask the loop and does not wait. It copies lists and deques in one go; what it reads of a
sequence (lengths, versions) may be a step newer than the sequence next to it.
"""

import time
from dataclasses import replace
from typing import Any

from rollout.engine.loop import Engine
from rollout.engine.messages.statuses import EngineStatus, SequenceStatus, StatusFields, SwapStatus
from rollout.engine.schedule.plan import Plan
from rollout.engine.sequence.sequence import Sequence, SequenceState
from rollout.engine.sequence.sequence_kv import PREFIX_HITS
from rollout.metrics.recording import Recording
from rollout.metrics.samples import percent
from rollout.metrics.step_timing import StepTiming

#: The most steps that `last_steps` returns, steps in flight included.
LAST_STEPS = 50
_SWAPS_SHOWN = 8
_STATES = {SequenceState.PREFILL: "prefill", SequenceState.DECODE: "decode"}


class Inspector:
    """Reads one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # --- the loop's thread --------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """The present status."""
        engine, roster, gate, meter = self._engine, self._engine.roster, self._engine.gate, self._engine.meter
        pool, now = roster.allocator.pool, time.perf_counter()
        active_pct, tokens_per_s = meter.rates(now)
        offload, kept = roster.allocator.tier.status()
        swaps = reversed(meter.recent_swaps()[-_SWAPS_SHOWN:])
        return EngineStatus(
            state=gate.state,
            stale=gate.stale,
            weights_version=roster.version,
            rows_running=roster.running,
            rows_max=engine.scheduler.limits.max_rows,
            queue_waiting=roster.waiting,
            queue_max=engine.scheduler.limits.max_queue,
            queue_clients=roster.feed.queue.clients,
            pages_free=pool.free,
            pages_cached=pool.cached,
            pages_used=pool.used,
            pages_total=pool.total,
            sessions=replace(roster.allocator.sessions.status(), room=self._room()),
            offload=offload,
            kept=kept,
            sleep=gate.sleep_status(),
            slots_in_flight=engine.pipeline.in_flight,
            tokens_per_s=tokens_per_s,
            gpu_active_pct=active_pct,
            gpu_busy_s=meter.busy_s,
            preemptions=roster.counters.preemptions,
            prefix_hits={kind: roster.counters.prefix_hits[kind] for kind in PREFIX_HITS},
            uptime_s=now - engine.started_s,
            tokens=roster.counters.tokens,
            tokens_by_second=meter.tokens_by_second(now),
            idle_pct=meter.idle_shares(now),
            swaps=tuple(SwapStatus(swap.version, now - swap.end_s, swap.end_s - swap.start_s) for swap in swaps),
            **self.of_features(),
        )

    def set_gauges(self) -> None:
        """Set the gauges of the meter before a report."""
        roster = self._engine.roster
        offload, kept = roster.allocator.tier.status()
        pool, counters, prefixes = roster.allocator.pool, roster.counters, roster.allocator.prefixes
        self._engine.meter.set(
            {
                "rollout/rows": roster.running,
                "queue/waiting": roster.waiting,
                "kv/used_pct": percent(pool.used, pool.total),
                "kv/session_pct": percent(roster.allocator.sessions.pages, pool.total),
                "state/snapshots_used_pct": prefixes.snapshots_used_pct,
                "state/snapshot_loads": counters.snapshot_loads,
                **{f"prefix/hits_{kind}": counters.prefix_hits[kind] for kind in PREFIX_HITS},
                "kv/prefix_hit_pct": percent(counters.cached_tokens, counters.prompt_tokens),
                "kv/older_reused_tokens": counters.older_tokens,
                "prefill/tokens_computed": counters.prefilled_tokens,
                "prefill/tokens_shared": counters.cached_tokens,
                "kv/preemptions": counters.preemptions,
                "kv/host_used_pct": percent(offload.pages, offload.pages_total),
                "kv/restores": offload.restored,
                "kv/offloaded_bytes": offload.bytes_out,
                "kv/brought_back_bytes": offload.bytes_in,
                "kv/host_kept_pct": percent(kept.pages, offload.pages_total),
                "kv/kept_bytes": kept.bytes_out,
                "kv/fetched_tokens": kept.fetched_tokens,
                "kv/lost_pages": kept.lost_pages,
                "kv/disk_used_pct": percent(kept.disk_pages, kept.disk_pages_total),
                "kv/disk_read_pages": kept.disk_read,
                "kv/disk_failed_pages": kept.disk_failed,
            }
        )
        for feature in roster.features:
            self._engine.meter.set(feature.gauges())

    def _room(self) -> int | None:
        """The number of further sessions that fit in unused pages, pages of the host included.

        A session takes as much as idle sessions and rows have on average; a shared page counts once.
        """
        roster, pool = self._engine.roster, self._engine.roster.allocator.pool
        present = roster.allocator.sessions.holding + roster.running
        available = pool.available + roster.allocator.tier.room
        return available * present // pool.used if present and pool.used else None

    # --- any thread ---------------------------------------------------------------------------------------------------

    def of_features(self) -> StatusFields:
        """The fields of the status that features give."""
        fields: StatusFields = {}
        for feature in self._engine.roster.variants:
            fields.update(feature.status())
        return fields

    def sequences(self, limit: int) -> list[SequenceStatus]:
        """The `limit` oldest sequences that hold a row, oldest first."""
        running = {id(seq): seq for seq in self._running()}
        oldest = sorted(running.values(), key=lambda seq: seq.arrival)[:limit]
        now_s = self._engine.roster.clock()
        return [_sequence_status(seq, now_s) for seq in oldest]

    def recording(self, steps: int) -> dict[str, Any]:
        """The last steps and the swaps among them, as fields of a `trace` reply."""
        meter = self._engine.meter
        return Recording.of(meter.recent_steps(steps), meter.recent_swaps()).to_fields()

    def running_requests(self) -> list[dict[str, Any]]:
        """Client and id of each request whose completions hold rows, in order."""
        keys = dict.fromkeys(seq.group.key for seq in self._running())
        return [{"client": owner, "request": key.rpartition("#")[0] or key} for owner, key in keys]

    def last_steps(self) -> list[dict[str, Any]]:
        """The last steps for the log line of a fault: a map for each, oldest first, at most `LAST_STEPS`.

        After the committed steps come the steps in flight, and a step that is just being launched: usually one of
        these failed. `step` counts from 1, `input` is the number of tokens in, `kept` the number of tokens out that
        were kept, `context` the longest context, `ago_s` the time since the step began on the device, or since it was
        planned if it is not committed. Unknown times are None.
        """
        now_s, launching, meter = time.perf_counter(), self._engine.launching, self._engine.meter
        in_flight = self._engine.pipeline.steps()
        unfinished = [
            _unfinished_row(step.plan, "in flight", now_s - step.planned_at_s, step.plan_s, step.launch_s)
            for step in in_flight
        ]
        if launching is not None and all(step.plan is not launching for step in in_flight):
            unfinished.append(_unfinished_row(launching, "launching", None, None, None))
        count, records = meter.steps, meter.recent_steps(LAST_STEPS - len(unfinished))
        rows = [_done_row(record, now_s) for record in records] + unfinished
        return [{"step": count - len(records) + 1 + i} | row for i, row in enumerate(rows)]

    def _running(self) -> tuple[Sequence, ...]:
        roster = self._engine.roster
        return (*roster.prefilling, *roster.decoding, *roster.ending)


def _sequence_status(seq: Sequence, now_s: float) -> SequenceStatus:
    versions = seq.drawn.versions
    return SequenceStatus(
        key=seq.group.key,
        index=seq.index,
        state=_STATES.get(seq.state, "leaving"),  # type: ignore[arg-type]
        prompt_tokens=seq.prompt_len,
        tokens=len(seq.tokens),
        max_tokens=seq.max_tokens,
        pages=len(seq.kv.pages),
        age_s=now_s - seq.group.arrived_s,
        version=versions[-1][0] if versions else None,
        priority=seq.priority,
    )


def _done_row(record: StepTiming, now_s: float) -> dict[str, Any]:
    return {
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


def _unfinished_row(
    plan: Plan, state: str, ago_s: float | None, plan_s: float | None, launch_s: float | None
) -> dict[str, Any]:
    zombies = sum(span.seq.finalized for span in plan.spans)
    return {
        "state": state,
        "kind": plan.kind,
        "rows": plan.rows,
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
