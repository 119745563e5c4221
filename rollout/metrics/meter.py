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

from rollout.metrics.by_version import ByVersion, Reading, VersionRow
from rollout.metrics.histogram import Counts, Histogram
from rollout.metrics.idle import CAUSES, IdleCauses, IdleWindow
from rollout.metrics.mismatch import Mismatch
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
    input_tokens: int = 0  # that went in
    max_context: int = 0  # longest context of a row, tokens
    held: tuple[float, float] | None = None  # the wait for masks between forward and draw

    @property
    def busy(self) -> tuple[tuple[float, float], ...]:
        """From when to when the compute stream had its work."""
        if self.held is None:
            return ((self.start_s, self.end_s),)
        return (self.start_s, self.held[0]), (self.held[1], self.end_s)


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
    session_pages: int = 0
    prompt_tokens: int = 0  # since start
    cached_tokens: int = 0  # since start, those of prompt_tokens that the prefix cache had
    preemptions: int = 0  # since start
    host_pages_used: int = 0
    host_pages_total: int = 0
    restores: int = 0  # since start
    offload_bytes_out: int = 0  # since start
    offload_bytes_in: int = 0  # since start
    reclaimed: int = 0  # since start


#: Swaps that `recent_swaps` gives back.
KEEP_SWAPS = 64
_GAUGE_NAMES = frozenset(field.name for field in fields(Gauges))
#: Names of the causes of idleness in reports.
_CAUSES_SHOWN = {"no_work": "no_work", "bubble": "host", "prefill": "prefill", "swap": "swap", "offload": "offload"}


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
        self._fresh = Samples()  # what is not counted in the two others yet
        self._interval, self._run = Samples(), Samples()
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._pause_s, self._swaps, self._version, self._swap_bytes = 0.0, 0, version, 0
        self._gauges = Gauges()
        self._lengths = Counts()
        self._by_version = ByVersion(version, Reading(self._started_s))
        self._mismatch, self._mismatch_run = Mismatch(), Mismatch()  # of the last interval that had one, of the run
        self._mismatch_is_new = False

    @property
    def steps(self) -> int:
        """Steps committed since start."""
        return self._run.sums.steps + self._fresh.sums.steps

    def step(self, record: StepRecord) -> None:
        """Count one committed step. Steps come in the order in which the compute stream ran them."""
        held = record.held
        span_s = record.end_s - record.start_s - (0.0 if held is None else held[1] - held[0])
        host_s = record.plan_s + record.launch_s + record.commit_s
        self._fresh.step(record.kind, span_s, host_s, record.rows, record.zombie_rows, record.tokens)
        planned_s = record.start_s if record.planned_at_s is None else record.planned_at_s
        if held is None:
            self._idle.step(record.kind, planned_s, record.start_s, record.end_s)
            self._window.add(record.start_s, record.end_s, record.tokens)
        else:
            self._idle.step(record.kind, planned_s, record.start_s, held[0])
            self._idle.step("decode", planned_s, held[1], record.end_s)  # the host was late
            self._window.add(record.start_s, held[0], 0)
            self._window.add(held[1], record.end_s, record.tokens)
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
        self._idle.hold("swap", start_s, end_s)
        self._by_version.swapped(version, self._reading(end_s), end_s - start_s)
        self._swaps += 1
        self._version = version
        self._swap_records.append(SwapRecord(version, start_s, end_s))

    def offload(self, start_s: float, end_s: float) -> None:
        """Count one move of KV to or from host memory that held the compute stream; the newest one may be told again,
        with a later end.
        """
        self._idle.hold("offload", start_s, end_s)

    def mismatch(self, found: Mismatch) -> None:
        """Count what trainers have reported; nothing of it changes nothing."""
        if found.tokens:
            self._mismatch = self._mismatch + found if self._mismatch_is_new else found
            self._mismatch_run += found
            self._mismatch_is_new = True

    def completion(self, length: int, reason: str = "length", version_span: int = 0) -> None:
        """Count one finished completion: its tokens, how it ended, newest less oldest version of its tokens."""
        self._finished[reason] += 1
        self._lengths.add(length)
        self._fresh.completion(length, version_span)

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
        return self._recent_shares(now, self._window.read(now)[0], self.idle_seconds(now))

    def tokens_by_second(self, now: float | None = None) -> tuple[int, ...]:
        """Tokens kept in each of the last ten seconds, oldest first."""
        return self._window.tokens_by_second(self._clock() if now is None else now)

    def report(self, now: float | None = None) -> dict[str, float]:
        """The metrics of the interval since the last report, which ends with this call."""
        self._count_fresh()
        now = self._clock() if now is None else now
        wall_s = now - self._reported_s
        active_pct, _ = self._window.read(now)
        idle_s, before_s = self.idle_seconds(now), self._idle_reported
        self._idle_reported = idle_s
        of_interval_s = {cause: idle_s[cause] - before_s[cause] for cause in CAUSES}
        shares = self._recent_shares(now, active_pct, idle_s)
        result = self._metrics(now, active_pct, shares, of_interval_s, self._interval, wall_s, self._mismatch)
        self._reported_s, self._mismatch_is_new = now, False
        self._interval.reset()
        return result

    def histograms(self) -> dict[str, Histogram]:
        """The histograms of the interval since they were read last, which ends with this call."""
        return {"completion/length": self._lengths.read()}

    def ended_versions(self, *, and_this: bool = False) -> tuple[VersionRow, ...]:
        """A row for each weights version that a swap has ended since the last call; at the end for the last one too."""
        return self._by_version.take(self._reading(self._clock()) if and_this else None)

    def totals(self, now: float | None = None) -> dict[str, float]:
        """The same metrics over the whole run, and counts under `total/`."""
        self._count_fresh()
        now = self._clock() if now is None else now
        wall_s = now - self._started_s
        run, idle_s = self._run, self.idle_seconds(now)
        active_pct, shares = self._run_active_pct(now), self._shares(idle_s, wall_s)
        return self._metrics(now, active_pct, shares, idle_s, run, wall_s, self._mismatch_run) | {
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

    def _count_fresh(self) -> None:
        self._interval.merge(self._fresh)
        self._run.merge(self._fresh)
        self._fresh.reset()

    def idle_seconds(self, now: float | None = None) -> dict[str, float]:
        """Seconds since the start in which the compute stream ran nothing, by cause."""
        self._idle.settle(self._clock() if now is None else now)
        return {cause: getattr(self._idle.times, cause) for cause in CAUSES}

    def _recent_shares(self, now: float, active_pct: float, idle_s: dict[str, float]) -> dict[str, float]:
        """By cause, what `active_pct` leaves of the same seconds, less what a step in flight has of them so far."""
        unknown_s = now - self._started_s - self._window.total_busy_s - sum(idle_s.values())
        unknown_pct = max(0.0, _percent(unknown_s, self._window.wall_s(now)))
        shares = self._idle_window.shares(now, idle_s)
        found_pct, left_pct = sum(shares.values()), max(0.0, 100.0 - active_pct - unknown_pct)
        return {cause: share * left_pct / found_pct if found_pct else 0.0 for cause, share in shares.items()}

    def _run_active_pct(self, now: float) -> float:
        return min(100.0, _percent(self._window.total_busy_s, now - self._started_s))

    def _shares(self, idle_s: dict[str, float], wall_s: float) -> dict[str, float]:
        return {cause: min(100.0, max(0.0, _percent(seconds, wall_s))) for cause, seconds in idle_s.items()}

    def _reading(self, now: float) -> Reading:
        self._count_fresh()
        run = self._run
        return Reading(
            at_s=now,
            busy_s=self._window.total_busy_s,
            tokens=run.sums.tokens,
            decode_s=run.decode.total,
            decode_steps=run.decode.count,
            completions=run.length.count,
            completion_tokens=run.length.total,
            version_spans=run.version_span.total,
        )

    def _metrics(
        self,
        now: float,
        active_pct: float,
        shares: dict[str, float],
        idle_s: dict[str, float],
        samples: Samples,
        wall_s: float,
        mismatch: Mismatch,
    ) -> dict[str, float]:
        """`active_pct` and `shares` are shown as they are; `idle_s`, `samples` and `wall_s` are of one stretch."""
        gauges, sums = self._gauges, samples.sums
        decode_s, length = samples.decode_quantiles, samples.length_quantiles
        predicted, observed = samples.speedups(wall_s - idle_s["no_work"] - idle_s["swap"] - idle_s["offload"])
        run_shares = self._shares(self.idle_seconds(now), now - self._started_s)
        return {
            "gpu/active_pct": active_pct,
            **_by_cause("gpu/bubble_pct", shares),
            "gpu/run/active_pct": self._run_active_pct(now),
            **_by_cause("gpu/run/bubble_pct", run_shares),
            "rollout/tokens_per_s": sums.tokens / wall_s if wall_s > 0 else 0.0,
            "rollout/tokens_per_s_per_row": samples.tokens_per_s_per_row(wall_s),
            "rollout/rows": gauges.rows,
            "rollout/zombie_rows_pct": sums.zombie_rows_pct(),
            "rollout/reclaimed_rows": gauges.reclaimed,
            "queue/waiting": gauges.waiting,
            "kv/used_pct": _percent(gauges.pages_used, gauges.pages_total),
            "kv/session_pct": _percent(gauges.session_pages, gauges.pages_total),
            "kv/prefix_hit_pct": _percent(gauges.cached_tokens, gauges.prompt_tokens),
            "kv/preemptions": gauges.preemptions,
            "kv/restores": gauges.restores,
            "kv/host_used_pct": _percent(gauges.host_pages_used, gauges.host_pages_total),
            "kv/offloaded_bytes": gauges.offload_bytes_out,
            "kv/brought_back_bytes": gauges.offload_bytes_in,
            "step/decode_ms": 1e3 * samples.decode.value(),
            "step/decode_ms_p50": 1e3 * decode_s.value(0.5),
            "step/decode_ms_p99": 1e3 * decode_s.value(0.99),
            "step/prefill_ms": 1e3 * samples.prefill.value(),
            "step/bookkeeping_ms": 1e3 * samples.host.value(),
            "weights/version": self._version,
            "weights/swap_pause_ms": 1e3 * self._pause_s,
            "weights/bytes": self._swap_bytes,
            "completion/length_mean": samples.length.value(),
            "completion/length_p50": length.value(0.5),
            "completion/length_p99": length.value(0.99),
            **{f"completion/finish_reason/{reason}": count for reason, count in self._finished.items()},
            "off_policy/version_span": samples.version_span.value(),
            "pipeline/predicted_speedup": predicted,
            "pipeline/observed_speedup": observed,
            **(self._mismatch_metrics(mismatch) if self._mismatch_run.tokens else {}),
        }

    def _mismatch_metrics(self, mismatch: Mismatch) -> dict[str, float]:
        return {
            "mismatch/k3_kl": mismatch.k3_kl,
            "mismatch/mean_abs": mismatch.mean_abs,
            "mismatch/max_abs": mismatch.max_abs,
            "mismatch/tokens": self._mismatch_run.tokens,
        }


def _by_cause(name: str, shares: dict[str, float]) -> dict[str, float]:
    return {f"{name}/{shown}": shares[cause] for cause, shown in _CAUSES_SHOWN.items()}


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0
