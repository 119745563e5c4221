"""Counts what the loop did, at a cost of microseconds a step and in constant memory.

The loop thread calls everything here; nothing locks. Times are seconds of the meter's clock (`time.perf_counter`),
also the spans on a CUDA device, which the caller has moved to that clock. A step is recorded when it is committed, so
a report lags by the step in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from rollout.metrics.idle import CAUSES, IdleCauses, IdleWindow
from rollout.metrics.report import FINISH_REASONS, Window
from rollout.metrics.samples import Samples


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step. Times are seconds: durations for the host phases, moments of the clock for spans."""

    kind: str  # "decode" or "prefill"
    rows: int  # rows of the step, zombies included
    zombie_rows: int
    tokens: int  # tokens kept
    plan_s: float
    launch_s: float
    commit_s: float
    start_s: float  # of the step's work on the compute stream
    end_s: float
    version: int
    h2d: tuple[float, float] | None = None
    d2h: tuple[float, float] | None = None
    planned_at_s: float | None = None  # moments at which plan and commit began, for the timeline
    committed_at_s: float | None = None
    finalized_at_s: float | None = None  # when everything that its commit brought was handed over
    idle_after: bool = False  # there was nothing to launch then


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """One swap of the weights: from when to when it held the compute stream, and what served then."""

    version: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Gauges:
    """Values that the engine reads off at report time."""

    rows: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prompt_tokens: int = 0  # since start
    cached_tokens: int = 0  # since start, those of prompt_tokens that the prefix cache had
    preemptions: int = 0  # since start
    reclaimed: int = 0  # since start


#: Swaps that `recent_swaps` gives back.
KEEP_SWAPS = 64
_GAUGE_NAMES = frozenset(field.name for field in fields(Gauges))


class Meter:
    """Collects steps, swaps, completions and gauges; makes reports of them.

    Args:
        clock: monotonic seconds.
        version: weights version before the first swap.
        keep_steps: steps that `recent_steps` gives back.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, version: int = 0, keep_steps: int = 2000
    ) -> None:
        self._clock = clock
        self._started_s = self._reported_s = clock()
        self._window = Window(self._started_s)
        self._idle = IdleCauses(self._started_s)
        self._idle_reported = dict.fromkeys(CAUSES, 0.0)  # seconds by cause up to the last report
        self._idle_window = IdleWindow(self._started_s)
        self._recent: deque[StepRecord] = deque(maxlen=keep_steps)
        self._finalized: deque[tuple[StepRecord, float, bool]] = deque(maxlen=keep_steps)
        self._swap_records: deque[SwapRecord] = deque(maxlen=KEEP_SWAPS)
        self._interval, self._run = Samples(), Samples()
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._pause_s, self._swaps, self._version, self._swap_bytes = 0.0, 0, version, 0
        self._gauges = Gauges()

    @property
    def steps(self) -> int:
        """Steps committed since start."""
        return self._run.sums.steps

    def step(self, record: StepRecord) -> None:
        """Count one committed step. Steps come in the order in which the compute stream ran them."""
        span_s = record.end_s - record.start_s
        host_s = record.plan_s + record.launch_s + record.commit_s
        for samples in (self._interval, self._run):
            samples.step(record.kind, span_s, host_s, record.rows, record.zombie_rows, record.tokens)
        self._window.add(record.start_s, record.end_s, record.tokens)
        planned_s = record.start_s if record.planned_at_s is None else record.planned_at_s
        self._idle.step(record.kind, planned_s, record.start_s, record.end_s)
        self._recent.append(record)

    def finalized(self, now_s: float, idle: bool) -> None:
        """What the last step's commit brought has been handed over, and whether there is nothing to launch now.

        Told once after `step`, if at all.
        """
        self._finalized.append((self._recent[-1], now_s, idle))

    def no_work(self, since_s: float) -> None:
        """There is nothing to launch since `since_s`; may be told again and again until there is."""
        self._idle.no_work(since_s)

    def swap(self, start_s: float, end_s: float, version: int, nbytes: int = 0) -> None:
        """Count one swap of the weights: from when to when it held the compute stream, what serves now, its bytes."""
        self._swap_bytes = nbytes
        self._pause_s = end_s - start_s
        self._idle.swap(start_s, end_s)
        self._swaps += 1
        self._version = version
        self._swap_records.append(SwapRecord(version, start_s, end_s))

    def completion(self, length: int, reason: str = "length", version_span: int = 0) -> None:
        """Count one finished completion: its tokens, how it ended, newest less oldest version of its tokens."""
        self._finished[reason] += 1
        for samples in (self._interval, self._run):
            samples.completion(length, version_span)

    def gauges(self, **values: int) -> None:
        """Set gauges by name (see `Gauges`); those not given keep their value."""
        assert values.keys() <= _GAUGE_NAMES, f"no such gauge: {sorted(values.keys() - _GAUGE_NAMES)}"
        kept = {name: getattr(self._gauges, name) for name in _GAUGE_NAMES}
        self._gauges = Gauges(**(kept | values))

    def rates(self, now: float | None = None) -> tuple[float, float]:
        """Active percent and tokens per second of the last 10 s; ends no interval, for status messages."""
        return self._window.read(self._clock() if now is None else now)

    def idle_shares(self, now: float | None = None) -> dict[str, float]:
        """Percent of about the last 10 s by cause of idleness; ends no interval, for status messages."""
        now = self._clock() if now is None else now
        return self._idle_window.shares(now, self._idle_seconds(now))

    def tokens_by_second(self, now: float | None = None) -> tuple[int, ...]:
        """Tokens kept in each of the last ten seconds, oldest first."""
        return self._window.tokens_by_second(self._clock() if now is None else now)

    def report(self, now: float | None = None) -> dict[str, float]:
        """The metrics of the interval since the last report, which ends with this call."""
        now = self._clock() if now is None else now
        wall_s = now - self._reported_s
        active_pct, _ = self._window.read(now)
        idle_s, before_s = self._idle_seconds(now), self._idle_reported
        self._idle_reported = idle_s
        of_interval_s = {cause: idle_s[cause] - before_s[cause] for cause in CAUSES}
        result = self._metrics(active_pct, of_interval_s, self._interval, wall_s)
        self._reported_s = now
        self._interval.reset()
        return result

    def totals(self, now: float | None = None) -> dict[str, float]:
        """The same metrics over the whole run, and counts under `total/`."""
        now = self._clock() if now is None else now
        wall_s = now - self._started_s
        active_pct = min(100.0, 100.0 * self._window.total_busy_s / wall_s) if wall_s > 0 else 0.0
        run = self._run
        return self._metrics(active_pct, self._idle_seconds(now), run, wall_s) | {
            "total/wall_s": wall_s,
            "total/tokens": run.sums.tokens,
            "total/decode_steps": run.decode.count,
            "total/prefill_steps": run.prefill.count,
            "total/completions": run.length.count,
            "total/swaps": self._swaps,
        }

    def recent_steps(self, count: int | None = None) -> list[StepRecord]:
        """The last steps, or the last `count` of them, oldest first.

        May be called from any thread, as `recent_swaps`: each deque is copied in one go, and what is in it never
        changes. The last steps may lack `finalized_at_s`.
        """
        steps, finalized = list(self._recent), list(self._finalized)
        if count is not None:  # the two are a step apart at the most
            steps, finalized = steps[-count:], finalized[-count - 1 :]
        ends = {id(step): (moment_s, idle) for step, moment_s, idle in finalized}
        known = ((step, *ends.get(id(step), (None, False))) for step in steps)
        return [replace(step, finalized_at_s=moment_s, idle_after=idle) for step, moment_s, idle in known]

    def recent_swaps(self) -> list[SwapRecord]:
        """The last swaps of the weights, oldest first."""
        return list(self._swap_records)

    def _idle_seconds(self, now: float) -> dict[str, float]:
        self._idle.settle(now)
        return {cause: getattr(self._idle.times, cause) for cause in CAUSES}

    def _metrics(
        self, active_pct: float, idle_s: dict[str, float], samples: Samples, wall_s: float
    ) -> dict[str, float]:
        gauges, sums = self._gauges, samples.sums
        decode_s, length = samples.decode_quantiles, samples.length_quantiles
        predicted, observed = samples.speedups(wall_s - idle_s["no_work"] - idle_s["swap"])
        return {
            "gpu/active_pct": active_pct,
            **{f"gpu/idle_{cause}_pct": min(100.0, max(0.0, _percent(idle_s[cause], wall_s))) for cause in CAUSES},
            "rollout/tokens_per_s": sums.tokens / wall_s if wall_s > 0 else 0.0,
            "rollout/tokens_per_s_per_row": samples.tokens_per_s_per_row(wall_s),
            "rollout/rows": gauges.rows,
            "rollout/zombie_rows_pct": sums.zombie_rows_pct(),
            "rollout/reclaimed_rows": gauges.reclaimed,
            "queue/waiting": gauges.waiting,
            "kv/used_pct": _percent(gauges.pages_used, gauges.pages_total),
            "kv/prefix_hit_pct": _percent(gauges.cached_tokens, gauges.prompt_tokens),
            "kv/preemptions": gauges.preemptions,
            "step/decode_ms": 1e3 * samples.decode.value(),
            "step/decode_ms_p50": 1e3 * decode_s.value(0.5),
            "step/decode_ms_p99": 1e3 * decode_s.value(0.99),
            "step/prefill_ms": 1e3 * samples.prefill.value(),
            "step/bookkeeping_ms": 1e3 * samples.host.value(),
            "weights/version": self._version,
            "weights/swap_pause_ms": 1e3 * self._pause_s,
            "weights/bytes": self._swap_bytes,
            "completion/length": samples.length.value(),
            "completion/length_p50": length.value(0.5),
            "completion/length_p99": length.value(0.99),
            **{f"completion/finish_reason/{reason}": count for reason, count in self._finished.items()},
            "off_policy/version_span": samples.version_span.value(),
            "pipeline/predicted_speedup": predicted,
            "pipeline/observed_speedup": observed,
        }


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0
