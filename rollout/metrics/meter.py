"""Counts what the loop did, at a cost of microseconds a step and in constant memory.

Only the loop thread calls the meter, except for `recent_steps` and `recent_swaps`; nothing locks. Times are seconds of
the meter's clock (`time.perf_counter`); the caller has converted times of a CUDA device to it. A step counts
when it is committed, so a report lags by the step in flight.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rollout.metrics.by_version import ByVersion, VersionRow
from rollout.metrics.definitions import HISTOGRAMS, METRICS, TOTALS, Metric, Served, Stretch
from rollout.metrics.idle import IDLE_CAUSES, IdleCauses, IdleWindow
from rollout.metrics.logprob_mismatch import MismatchSums
from rollout.metrics.samples import Histogram, HistogramCounts, Samples, percent
from rollout.metrics.step_timing import StepTiming, SwapTiming

#: Swaps that `recent_swaps` returns at most.
KEEP_SWAPS = 64


class Meter:
    """Collects steps, swaps, completions and values by name; makes reports of them.

    Args:
        clock: monotonic seconds.
        version: weights version before the first swap.
        keep_steps: steps that `recent_steps` returns at most.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        version: int = 0,
        keep_steps: int = 2000,
        metrics: Sequence[Metric] = METRICS,
    ) -> None:
        self._clock, self._metrics = clock, metrics
        self._started_s = self._reported_s = clock()
        self._window = BusyWindow(self._started_s)
        self._idle = IdleCauses(self._started_s)
        self._idle_reported = dict.fromkeys(IDLE_CAUSES, 0.0)  # seconds by cause up to the last report
        self._idle_window = IdleWindow(self._started_s)
        self._recent: deque[StepTiming] = deque(maxlen=keep_steps)
        self._finalized: deque[tuple[StepTiming, float, bool]] = deque(maxlen=keep_steps)
        self._recent_swaps: deque[SwapTiming] = deque(maxlen=KEEP_SWAPS)
        self._fresh = Samples()  # not yet merged into the two others
        self._interval, self._run = Samples(), Samples()
        self._swaps = 0
        self._values: dict[str, float | None] = {metric.name: metric.first for metric in metrics if metric.read is None}
        self._values["weights/version"] = version
        self._counts = {
            metric.name: HistogramCounts(metric.buckets) for metric in HISTOGRAMS if metric.buckets is not None
        }
        self._by_version = ByVersion(version, Served(self._started_s))
        self._mismatch, self._mismatch_run = (
            MismatchSums(),
            MismatchSums(),
        )  # sums of the last interval with a report, and of the run
        self._mismatch_is_new = False

    @property
    def steps(self) -> int:
        """Steps committed since start."""
        return self._run.steps + self._fresh.steps

    # --- what the loop reports ----------------------------------------------------------------------------------------

    def set(self, values: Mapping[str, float | None]) -> None:
        """Set metrics by name: gauges, and counters that another object keeps. None: left out of reports."""
        unknown = values.keys() - self._values.keys()
        assert not unknown, f"no entry without `read` in METRICS has the name {', '.join(sorted(unknown))}"
        self._values.update(values)

    def add(self, name: str, amount: float = 1) -> None:
        assert name in self._values, f"no entry without `read` in METRICS has the name {name}"
        self._values[name] = (self._values[name] or 0) + amount

    def observe(self, name: str, value: float) -> None:
        self._counts[name].add(value)

    def step(self, record: StepTiming) -> None:
        """Count one committed step. Steps come in the order in which the compute stream ran them."""
        wait = record.mask_wait
        host_s = record.plan_s + record.launch_s + record.commit_s
        self._fresh.step(record.kind, record.ran_s, host_s, record.rows, record.zombie_rows, record.tokens)
        planned_s = record.start_s if record.planned_at_s is None else record.planned_at_s
        if wait is None:
            self._idle.step(record.kind, planned_s, record.start_s, record.end_s)
            self._window.add(record.start_s, record.end_s, record.tokens)
        else:
            self._idle.step(record.kind, planned_s, record.start_s, wait[0])
            self._idle.step("decode", planned_s, wait[1], record.end_s)  # the host was late
            self._window.add(record.start_s, wait[0], 0)
            self._window.add(wait[1], record.end_s, record.tokens)
        self._recent.append(record)

    def finalized(self, now_s: float, idle: bool) -> None:
        """The last step's commit is handed over; `idle` if there is nothing to launch now.

        Called at most once after each `step`.
        """
        self._finalized.append((self._recent[-1], now_s, idle))

    def no_work(self, since_s: float) -> None:
        """There is nothing to launch since `since_s`. Repeated calls are ignored until a step runs."""
        self._idle.no_work(since_s)

    def swap(self, start_s: float, end_s: float, version: int, nbytes: int = 0) -> None:
        """Count one swap of the weights: when it held the compute stream, the new version, its bytes."""
        self._idle.stream_held("swap", start_s, end_s)
        self._by_version.swapped(version, self._served(end_s), end_s - start_s)
        self._swaps += 1
        self._recent_swaps.append(SwapTiming(version, start_s, end_s))
        pause_ms = 1e3 * (end_s - start_s)
        self.set({"weights/version": version, "weights/swap_pause_ms": pause_ms, "weights/bytes": nbytes})

    def offload(self, start_s: float, end_s: float) -> None:
        """Count one move of KV to or from host memory that held the compute stream.

        The newest move may be reported again with a later end.
        """
        self._idle.stream_held("offload", start_s, end_s)

    def mismatch(self, found: MismatchSums) -> None:
        """Count what trainers have reported; an empty mismatch changes nothing."""
        if found.tokens:
            self._mismatch = self._mismatch + found if self._mismatch_is_new else found
            self._mismatch_run += found
            self._mismatch_is_new = True

    def completion(self, length: int, reason: str = "length", version_span: int = 0) -> None:
        """Count one finished completion: tokens, finish reason, and newest minus oldest version."""
        self.add(f"completion/finish_reason/{reason}")
        self.observe("completion/length", length)
        self._fresh.completion(length, version_span)

    # --- readings -----------------------------------------------------------------------------------------------------

    @property
    def busy_s(self) -> float:
        """Seconds since the start in which the compute stream ran a step."""
        return self._window.total_busy_s

    def rates(self, now: float | None = None) -> tuple[float, float]:
        """Active percent and tokens per second of the last 10 s, for status replies; ends no interval."""
        return self._window.read(self._clock() if now is None else now)

    def idle_shares(self, now: float | None = None) -> dict[str, float]:
        """Percent of about the last 10 s by cause of idleness, for status replies; ends no interval."""
        now = self._clock() if now is None else now
        return self._recent_shares(now, self._window.read(now)[0], self.idle_seconds(now))

    def tokens_by_second(self, now: float | None = None) -> tuple[int, ...]:
        """Tokens kept in each of the last ten seconds, oldest first."""
        return self._window.tokens_by_second(self._clock() if now is None else now)

    def report(self, now: float | None = None) -> dict[str, float]:
        """`METRICS` of the interval since the last report, which ends with this call."""
        self._count_fresh()
        now = self._clock() if now is None else now
        active_pct, _ = self._window.read(now)
        idle_s, before_s = self.idle_seconds(now), self._idle_reported
        stretch = Stretch(
            wall_s=now - self._reported_s,
            samples=self._interval,
            idle_s={cause: idle_s[cause] - before_s[cause] for cause in IDLE_CAUSES},
            active_pct=active_pct,
            idle_pct=self._recent_shares(now, active_pct, idle_s),
            run_active_pct=self._run_active_pct(now),
            run_idle_pct=self._run_shares(now, idle_s),
            mismatch=self._mismatch,
            compared_tokens=self._mismatch_run.tokens,
            swaps=self._swaps,
        )
        result = self._read(self._metrics, stretch)
        self._reported_s, self._idle_reported, self._mismatch_is_new = now, idle_s, False
        self._interval.reset()
        return result

    def totals(self, now: float | None = None) -> dict[str, float]:
        """`METRICS` over the whole run, and `TOTALS`."""
        self._count_fresh()
        now = self._clock() if now is None else now
        idle_s = self.idle_seconds(now)
        active_pct, idle_pct = self._run_active_pct(now), self._run_shares(now, idle_s)
        run = Stretch(
            wall_s=now - self._started_s,
            samples=self._run,
            idle_s=idle_s,
            active_pct=active_pct,
            idle_pct=idle_pct,
            run_active_pct=active_pct,
            run_idle_pct=idle_pct,
            mismatch=self._mismatch_run,
            compared_tokens=self._mismatch_run.tokens,
            swaps=self._swaps,
        )
        return self._read((*self._metrics, *TOTALS), run)

    def histograms(self) -> dict[str, Histogram]:
        """`HISTOGRAMS` of the interval since the last call, which ends with this call."""
        return {name: counts.read() for name, counts in self._counts.items()}

    def ended_versions(self, *, and_this: bool = False) -> tuple[VersionRow, ...]:
        """A row for each weights version that a swap has ended since the last call.

        With `and_this` also one for the version that serves, at the end of the run.
        """
        return self._by_version.take(self._served(self._clock()) if and_this else None)

    def recent_steps(self, count: int | None = None) -> list[StepTiming]:
        """The last steps, or the last `count` of them, oldest first. The newest may lack `finalized_at_s`.

        Any thread may call this and `recent_swaps`: each deque is copied in one go, and its items never change.
        """
        steps, finalized = list(self._recent), list(self._finalized)
        if count is not None:  # the two are one step apart at most
            steps, finalized = steps[-count:], finalized[-count - 1 :]
        ends = {id(step): (moment_s, idle) for step, moment_s, idle in finalized}
        known = ((step, *ends.get(id(step), (None, False))) for step in steps)
        return [replace(step, finalized_at_s=moment_s, idle_after=idle) for step, moment_s, idle in known]

    def recent_swaps(self) -> list[SwapTiming]:
        """The last swaps of the weights, oldest first."""
        return list(self._recent_swaps)

    def idle_seconds(self, now: float | None = None) -> dict[str, float]:
        """Seconds since the start in which the compute stream ran nothing, by cause."""
        self._idle.count_until(self._clock() if now is None else now)
        return dict(self._idle.seconds)

    # --- parts of readings --------------------------------------------------------------------------------------------

    def _read(self, metrics: Sequence[Metric[Stretch]], stretch: Stretch) -> dict[str, float]:
        values = self._values
        read = ((m.name, values[m.name] if m.read is None else m.read(stretch)) for m in metrics)
        return {name: value for name, value in read if value is not None}

    def _count_fresh(self) -> None:
        self._interval.merge(self._fresh)
        self._run.merge(self._fresh)
        self._fresh.reset()

    def _recent_shares(self, now: float, active_pct: float, idle_s: dict[str, float]) -> dict[str, float]:
        """The share that `active_pct` leaves, split by cause.

        Time that a step in flight has taken so far belongs to none: it is counted when the step is committed.
        """
        unknown_s = now - self._started_s - self.busy_s - sum(idle_s.values())
        unknown_pct = max(0.0, percent(unknown_s, self._window.wall_s(now)))
        shares = self._idle_window.shares(now, idle_s)
        found_pct, left_pct = sum(shares.values()), max(0.0, 100.0 - active_pct - unknown_pct)
        return {cause: share * left_pct / found_pct if found_pct else 0.0 for cause, share in shares.items()}

    def _run_active_pct(self, now: float) -> float:
        return min(100.0, percent(self.busy_s, now - self._started_s))

    def _run_shares(self, now: float, idle_s: dict[str, float]) -> dict[str, float]:
        wall_s = now - self._started_s
        return {cause: min(100.0, max(0.0, percent(seconds, wall_s))) for cause, seconds in idle_s.items()}

    def _served(self, now: float) -> Served:
        self._count_fresh()
        run = self._run
        return Served(
            wall_s=now,
            busy_s=self.busy_s,
            tokens=run.tokens,
            decode_s=run.decode.total,
            decode_steps=run.decode.count,
            completions=run.length.count,
            completion_tokens=run.length.total,
            version_spans=run.version_span.total,
        )


class BusyWindow:
    """A fixed ring of time buckets.

    Spans come in the order of their ends, as one stream runs them. Where two overlap, the overlap counts once. Bucket
    `i` stands for `[i * BUCKET_S, (i + 1) * BUCKET_S)` of the clock; it is cleared when a later bucket takes its place.
    """

    SPAN_S = 10.0
    BUCKET_S = 0.1
    _KEPT = round(SPAN_S / BUCKET_S)
    _RING = _KEPT + 28  # a report may come a little after the newest interval, or before it

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._busy_until = start_s
        self._busy_s = [0.0] * self._RING
        self._tokens = [0] * self._RING
        self._index = [-1] * self._RING
        #: Busy seconds since the start.
        self.total_busy_s = 0.0

    def add(self, start_s: float, end_s: float, tokens: int) -> None:
        """Count one busy interval; its tokens count at its end."""
        start_s = max(start_s, self._busy_until)
        if end_s > start_s:
            self.total_busy_s += end_s - start_s
            self._busy_until = end_s
            first, last = int(max(start_s, end_s - self.SPAN_S) / self.BUCKET_S), int(end_s / self.BUCKET_S)
            if first == last:  # nearly always true, and several times faster
                cell = self._cell(last)
                self._busy_s[cell] += end_s - start_s
                self._tokens[cell] += tokens
                return
            for index in range(first, last + 1):
                low, high = index * self.BUCKET_S, (index + 1) * self.BUCKET_S
                self._busy_s[self._cell(index)] += max(0.0, min(end_s, high) - max(start_s, low))
        self._tokens[self._cell(int(end_s / self.BUCKET_S))] += tokens

    def _cell(self, index: int) -> int:
        cell = index % self._RING
        if self._index[cell] < index:
            self._index[cell], self._busy_s[cell], self._tokens[cell] = index, 0.0, 0
        return cell

    def read(self, now: float) -> tuple[float, float]:
        """Active percent and tokens per second of the last `SPAN_S` seconds, or since the start if that is later."""
        newest = int(now / self.BUCKET_S)
        oldest = newest - self._KEPT + 1
        wall_s = self.wall_s(now)
        if wall_s <= 0:
            return 0.0, 0.0
        cells = [cell for cell, index in enumerate(self._index) if oldest <= index <= newest]
        busy_s = sum(self._busy_s[cell] for cell in cells)
        tokens = sum(self._tokens[cell] for cell in cells)
        return min(100.0, 100.0 * busy_s / wall_s), tokens / wall_s

    def wall_s(self, now: float) -> float:
        """Length of the stretch that `read` covers."""
        oldest = int(now / self.BUCKET_S) - self._KEPT + 1
        return now - max(oldest * self.BUCKET_S, self._start_s)

    def tokens_by_second(self, now: float) -> tuple[int, ...]:
        """Tokens in each of the last `SPAN_S` seconds, oldest first."""
        newest, by_second = int(now / self.BUCKET_S), [0] * round(self.SPAN_S)
        for cell, index in enumerate(self._index):
            age = newest - index
            if 0 <= age < self._KEPT:
                by_second[-1 - int(age * self.BUCKET_S)] += self._tokens[cell]
        return tuple(by_second)
