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
from rollout.metrics.report import Mean, Sums, Window


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
        self._interval, self._run = Sums(), Sums()
        self._decode, self._prefill, self._host, self._length = Mean(), Mean(), Mean(), Mean()
        self._run_decode, self._run_prefill, self._run_host, self._run_length = Mean(), Mean(), Mean(), Mean()
        self._pause_s, self._swaps, self._version = 0.0, 0, version
        self._gauges = Gauges()

    @property
    def steps(self) -> int:
        """Steps committed since start."""
        return self._run.steps

    def step(self, record: StepRecord) -> None:
        """Count one committed step. Steps come in the order in which the compute stream ran them."""
        span_s = record.end_s - record.start_s
        host_s = record.plan_s + record.launch_s + record.commit_s
        of_kind = (self._decode, self._run_decode) if record.kind == "decode" else (self._prefill, self._run_prefill)
        for mean in of_kind:
            mean.add(span_s)
        self._host.add(host_s)
        self._run_host.add(host_s)
        for sums in (self._interval, self._run):
            sums.steps += 1
            sums.tokens += record.tokens
            sums.rows += record.rows
            sums.zombie_rows += record.zombie_rows
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

    def swap(self, start_s: float, end_s: float, version: int) -> None:
        """Count one swap of the weights: from when to when the compute stream was held, and what serves now."""
        self._pause_s = end_s - start_s
        self._idle.swap(start_s, end_s)
        self._swaps += 1
        self._version = version
        self._swap_records.append(SwapRecord(version, start_s, end_s))

    def completion(self, length: int) -> None:
        """Count one finished completion of `length` tokens."""
        self._length.add(length)
        self._run_length.add(length)

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
        means = (self._decode, self._prefill, self._host, self._length)
        active_pct, _ = self._window.read(now)
        idle_s, before_s = self._idle_seconds(now), self._idle_reported
        self._idle_reported = idle_s
        of_interval_s = {cause: idle_s[cause] - before_s[cause] for cause in CAUSES}
        result = self._metrics(active_pct, of_interval_s, self._interval, wall_s, means)
        self._reported_s = now
        self._interval.reset()
        for mean in means:
            mean.reset()
        return result

    def totals(self, now: float | None = None) -> dict[str, float]:
        """The same metrics over the whole run, and counts under `total/`."""
        now = self._clock() if now is None else now
        wall_s = now - self._started_s
        active_pct = min(100.0, 100.0 * self._window.total_busy_s / wall_s) if wall_s > 0 else 0.0
        means = (self._run_decode, self._run_prefill, self._run_host, self._run_length)
        return self._metrics(active_pct, self._idle_seconds(now), self._run, wall_s, means) | {
            "total/wall_s": wall_s,
            "total/tokens": self._run.tokens,
            "total/decode_steps": self._run_decode.count,
            "total/prefill_steps": self._run_prefill.count,
            "total/completions": self._run_length.count,
            "total/swaps": self._swaps,
        }

    def recent_steps(self) -> list[StepRecord]:
        """The last steps, oldest first.

        May be called from any thread, as `recent_swaps`: each deque is copied in one go, and what is in it never
        changes. The last steps may lack `finalized_at_s`.
        """
        steps, finalized = list(self._recent), list(self._finalized)
        ends = {id(step): {"finalized_at_s": moment_s, "idle_after": idle} for step, moment_s, idle in finalized}
        return [replace(step, **ends.get(id(step), {})) for step in steps]

    def recent_swaps(self) -> list[SwapRecord]:
        """The last swaps of the weights, oldest first."""
        return list(self._swap_records)

    def _idle_seconds(self, now: float) -> dict[str, float]:
        self._idle.settle(now)
        return {cause: getattr(self._idle.times, cause) for cause in CAUSES}

    def _metrics(
        self,
        active_pct: float,
        idle_s: dict[str, float],
        sums: Sums,
        wall_s: float,
        means: tuple[Mean, Mean, Mean, Mean],
    ) -> dict[str, float]:
        decode, prefill, host, length = means
        gauges = self._gauges
        return {
            "gpu/active_pct": active_pct,
            **{f"gpu/idle_{cause}_pct": min(100.0, max(0.0, _percent(idle_s[cause], wall_s))) for cause in CAUSES},
            "rollout/tokens_per_s": sums.tokens / wall_s if wall_s > 0 else 0.0,
            "rollout/rows": gauges.rows,
            "rollout/zombie_rows_pct": sums.zombie_rows_pct(),
            "queue/waiting": gauges.waiting,
            "kv/used_pct": _percent(gauges.pages_used, gauges.pages_total),
            "kv/prefix_hit_pct": _percent(gauges.cached_tokens, gauges.prompt_tokens),
            "kv/preemptions": gauges.preemptions,
            "step/decode_ms": 1e3 * decode.value(),
            "step/prefill_ms": 1e3 * prefill.value(),
            "step/bookkeeping_ms": 1e3 * host.value(),
            "weights/version": self._version,
            "weights/swap_pause_ms": 1e3 * self._pause_s,
            "completion/length": length.value(),
        }


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0
