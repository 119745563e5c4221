"""An engine in numbers, read on its own thread between two ticks: its status, and the gauges of its meter."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rollout.engine.messages import EngineState, EngineStatus, OffloadStatus, SwapStatus

if TYPE_CHECKING:
    from rollout.engine.loop import Engine

_SWAPS_SHOWN = 8


def state_of(engine: Engine) -> EngineState:
    """The state by name; any thread may ask."""
    if engine.sleeper.wanted and engine.state != "draining":
        return "asleep"
    return "stale" if engine.state == "serving" and engine.hold.stale else engine.state


def snapshot(engine: Engine) -> EngineStatus:
    """What the engine is at now."""
    scheduler, pool, meter = engine.scheduler, engine.scheduler.memory.pool, engine.meter
    adapters, now = scheduler.memory.adapters, time.perf_counter()
    active_pct, tokens_per_s = meter.rates(now)
    swaps = reversed(meter.recent_swaps()[-_SWAPS_SHOWN:])
    return EngineStatus(
        state=state_of(engine),
        stale=engine.hold.stale,
        weights_version=scheduler.version,
        rows_running=scheduler.running,
        rows_max=scheduler.limits.max_rows,
        queue_waiting=scheduler.waiting,
        queue_max=scheduler.limits.max_queue,
        pages_free=pool.free,
        pages_cached=pool.cached,
        pages_used=pool.used,
        pages_total=pool.total,
        sessions=scheduler.memory.sessions.status(),
        offload=_offload_status(engine),
        sleep=engine.sleeper.status(),
        slots_in_flight=engine.pipeline.in_flight,
        adapters=None if adapters is None else tuple(adapters.status()),
        tokens_per_s=tokens_per_s,
        gpu_active_pct=active_pct,
        preemptions=scheduler.counters.preemptions,
        uptime_s=now - engine.started_s,
        tokens=scheduler.counters.tokens,
        tokens_by_second=meter.tokens_by_second(now),
        idle_pct=meter.idle_shares(now),
        swaps=tuple(SwapStatus(swap.version, now - swap.end_s, swap.end_s - swap.start_s) for swap in swaps),
    )


def set_gauges(engine: Engine) -> None:
    """Give the meter the values of metrics that the engine keeps, before a report."""
    scheduler, pool, counters = engine.scheduler, engine.scheduler.memory.pool, engine.scheduler.counters
    offload = _offload_status(engine)
    engine.meter.set(
        {
            "rollout/rows": scheduler.running,
            "queue/waiting": scheduler.waiting,
            "kv/used_pct": _percent(pool.used, pool.total),
            "kv/session_pct": _percent(scheduler.memory.sessions.pages, pool.total),
            "kv/prefix_hit_pct": _percent(counters.cached_tokens, counters.prompt_tokens),
            "kv/preemptions": counters.preemptions,
            "kv/host_used_pct": _percent(offload.pages, offload.pages_total),
            "kv/restores": offload.restored,
            "kv/offloaded_bytes": offload.bytes_out,
            "kv/brought_back_bytes": offload.bytes_in,
        }
    )


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


def _offload_status(engine: Engine) -> OffloadStatus:
    return OffloadStatus() if engine.offload is None else engine.offload.parking.status()
