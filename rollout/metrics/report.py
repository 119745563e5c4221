"""The metrics by name, and the sums that they are made of.

A metric without a sample in the interval (no prefill step, no finished completion) keeps its last value, so that every
report has every metric; before the first sample it is 0. Only what trainers report is left out until one has: a 0
there would say that they agree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a report."""

    name: str
    unit: str
    meaning: str


FINISH_REASONS = ("stop", "length", "cancelled", "deadline", "stale", "error")

#: Why the compute stream ran nothing.
BUBBLES = {
    "no_work": "there was nothing to run",
    "host": "the stream waited for the host otherwise",
    "prefill": "the stream waited for a prefill to be launched",
    "swap": "a swap of the weights held the compute stream",
    "offload": "no step could be launched before KV was moved to or from host memory",
}

METRICS = (
    Metric(
        "gpu/active_pct",
        "%",
        "share of the last 10 s in which the compute stream ran a step, whatever the device",
    ),
    *(
        Metric(f"gpu/bubble_pct/{cause}", "%", f"share of about the last 10 s in which {meaning}")
        for cause, meaning in BUBBLES.items()
    ),
    Metric("gpu/run/active_pct", "%", "share of the time since the start in which the compute stream ran a step"),
    *(
        Metric(f"gpu/run/bubble_pct/{cause}", "%", f"share of the time since the start in which {meaning}")
        for cause, meaning in BUBBLES.items()
    ),
    Metric("rollout/tokens_per_s", "tokens/s", "tokens that were committed and kept, all rows together"),
    Metric("rollout/tokens_per_s_per_row", "tokens/s", "the same for one row, mean"),
    Metric("rollout/rows", "rows", "sequences that hold a row, now"),
    Metric(
        "rollout/zombie_rows_pct",
        "%",
        "share of launched rows whose sequence had ended before their step was committed",
    ),
    Metric("rollout/reclaimed_rows", "count", "completions of vanished clients that were ended, since start"),
    Metric("queue/waiting", "requests", "requests that wait for a row, now"),
    Metric("kv/used_pct", "%", "share of the KV pages that rows and sessions hold, now; cached pages are not counted"),
    Metric("kv/session_pct", "%", "share of the KV pages that sessions hold between their turns, now"),
    Metric(
        "kv/prefix_hit_pct",
        "%",
        "share of admitted prompt tokens whose KV was there, cached or shared, since start",
    ),
    Metric(
        "kv/preemptions",
        "count",
        "sequences that lost their pages to others, since start; without `host_kv_gib` all are computed again",
    ),
    Metric("kv/restores", "count", "sequences that got their KV back from the host, since start"),
    Metric("kv/host_used_pct", "%", "share of the host memory for KV of preempted sequences that is set aside, now"),
    Metric("kv/offloaded_bytes", "bytes", "KV copied to the host, since start"),
    Metric("kv/brought_back_bytes", "bytes", "KV copied back from the host, since start"),
    Metric("step/decode_ms", "ms", "time of a decode step on the compute stream, mean"),
    Metric("step/decode_ms_p50", "ms", "the same, median"),
    Metric("step/decode_ms_p99", "ms", "the same, 99th percentile"),
    Metric("step/prefill_ms", "ms", "time of a prefill step on the compute stream, mean"),
    Metric("step/bookkeeping_ms", "ms", "host time of plan, launch and commit of a step together, mean"),
    Metric("weights/version", "version", "weights version that new steps run with"),
    Metric("weights/swap_pause_ms", "ms", "time for which the last swap held the compute stream"),
    Metric("weights/bytes", "bytes", "what the last swap copied"),
    Metric("completion/length_mean", "tokens", "length of the completions that finished, mean"),
    Metric("completion/length_p50", "tokens", "the same, median"),
    Metric("completion/length_p99", "tokens", "the same, 99th percentile"),
    *(
        Metric(f"completion/finish_reason/{reason}", "count", f"completions that ended as `{reason}`, since start")
        for reason in FINISH_REASONS
    ),
    Metric(
        "off_policy/version_span",
        "versions",
        "newest less oldest weights version in a completion, mean of those that finished",
    ),
    Metric(
        "pipeline/predicted_speedup",
        "x",
        "what overlapping should gain over waiting for each step: the sum of the times of host and device over the "
        "larger of them, less zombies",
    ),
    Metric(
        "pipeline/observed_speedup",
        "x",
        "what it gained: the sum of host and device times over the time that passed with work to do, swaps left out",
    ),
    Metric(
        "mismatch/k3_kl",
        "nats",
        "mean of exp(d) - 1 - d over the tokens that trainers reported on, d = trainer's log-prob - worker's: an "
        "estimate of the KL divergence, worker to trainer, without bias; a d above 20 counts as 20 in the exponent",
    ),
    Metric("mismatch/mean_abs", "nats", "mean size of d"),
    Metric("mismatch/max_abs", "nats", "largest size of d"),
    Metric("mismatch/tokens", "count", "tokens that trainers reported on, since start"),
)

#: Those that there are from a trainer's first report on.
REPORTED = tuple(metric.name for metric in METRICS if metric.name.startswith("mismatch/"))

HISTOGRAMS = (Metric("completion/length", "tokens", "length of the completions that finished, histogram"),)

#: A row for each version of the weights, over `weights/version`: to W&B and JSON lines, once it serves no more.
VERSION_METRICS = (
    Metric("by_version/serving_s", "s", "how long the version served"),
    Metric("by_version/tokens", "tokens", "tokens kept meanwhile"),
    Metric("by_version/tokens_per_s", "tokens/s", "the same a second"),
    Metric("by_version/active_pct", "%", "share of that time in which the compute stream ran a step"),
    Metric("by_version/decode_ms", "ms", "time of a decode step, mean"),
    Metric("by_version/completions", "count", "completions that finished meanwhile"),
    Metric("by_version/completion_length", "tokens", "their length, mean"),
    Metric("by_version/version_span", "versions", "newest less oldest version in them, mean"),
    Metric("by_version/swap_pause_ms", "ms", "time for which the swap that brought the version held the stream"),
)


@dataclass(slots=True)
class Mean:
    """A running mean; `last` survives `reset`."""

    total: float = 0.0
    count: int = 0
    last: float = 0.0

    def add(self, value: float) -> None:
        """Count one sample."""
        self.total += value
        self.count += 1

    def merge(self, other: Mean) -> None:
        """Count the samples of another one, too."""
        self.total += other.total
        self.count += other.count

    def value(self) -> float:
        """The mean of the samples since the last reset; without any, the mean before."""
        if self.count:
            self.last = self.total / self.count
        return self.last

    def reset(self) -> None:
        """Begin anew."""
        self.value()
        self.total, self.count = 0.0, 0


@dataclass(slots=True)
class Sums:
    """What happened in a stretch of time: one instance for the interval, one for the whole run."""

    tokens: int = 0
    rows: int = 0
    zombie_rows: int = 0
    steps: int = 0
    zombie_pct: float = 0.0

    def merge(self, other: Sums) -> None:
        """Count what another one has counted, too."""
        self.tokens += other.tokens
        self.rows += other.rows
        self.zombie_rows += other.zombie_rows
        self.steps += other.steps

    def zombie_rows_pct(self) -> float:
        """Zombie rows of all launched rows, percent; without any row, the value before."""
        if self.rows:
            self.zombie_pct = 100.0 * self.zombie_rows / self.rows
        return self.zombie_pct

    def reset(self) -> None:
        """Begin anew."""
        self.zombie_rows_pct()
        self.tokens = self.rows = self.zombie_rows = self.steps = 0


class Window:
    """Busy time and tokens of the last seconds, in a fixed ring of time buckets.

    Spans come in the order of their ends, as one stream runs them; where two overlap, the overlap counts once. A
    bucket stands for `[i * BUCKET_S, (i + 1) * BUCKET_S)` of the clock and is cleared when its place in the ring is
    taken by a later one.
    """

    SPAN_S = 10.0
    BUCKET_S = 0.1
    _KEPT = round(SPAN_S / BUCKET_S)
    _RING = _KEPT + 28  # a report may come a little after the newest span, or before it

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._busy_until = start_s
        self._busy_s = [0.0] * self._RING
        self._tokens = [0] * self._RING
        self._index = [-1] * self._RING
        self.total_busy_s = 0.0

    def add(self, start_s: float, end_s: float, tokens: int) -> None:
        """Count one step's span; its tokens count at its end."""
        start_s = max(start_s, self._busy_until)
        if end_s > start_s:
            self.total_busy_s += end_s - start_s
            self._busy_until = end_s
            first, last = int(max(start_s, end_s - self.SPAN_S) / self.BUCKET_S), int(end_s / self.BUCKET_S)
            if first == last:  # as nearly always, and several times faster
                place = self._place(last)
                self._busy_s[place] += end_s - start_s
                self._tokens[place] += tokens
                return
            for index in range(first, last + 1):
                low, high = index * self.BUCKET_S, (index + 1) * self.BUCKET_S
                self._busy_s[self._place(index)] += max(0.0, min(end_s, high) - max(start_s, low))
        self._tokens[self._place(int(end_s / self.BUCKET_S))] += tokens

    def _place(self, index: int) -> int:
        place = index % self._RING
        if self._index[place] < index:
            self._index[place], self._busy_s[place], self._tokens[place] = index, 0.0, 0
        return place

    def read(self, now: float) -> tuple[float, float]:
        """Active percent and tokens per second of the last `SPAN_S` seconds, or since the start if that is later."""
        newest = int(now / self.BUCKET_S)
        oldest = newest - self._KEPT + 1
        wall_s = self.wall_s(now)
        if wall_s <= 0:
            return 0.0, 0.0
        places = [place for place, index in enumerate(self._index) if oldest <= index <= newest]
        busy_s = sum(self._busy_s[place] for place in places)
        tokens = sum(self._tokens[place] for place in places)
        return min(100.0, 100.0 * busy_s / wall_s), tokens / wall_s

    def wall_s(self, now: float) -> float:
        """How long the stretch is that `read` tells of."""
        oldest = int(now / self.BUCKET_S) - self._KEPT + 1
        return now - max(oldest * self.BUCKET_S, self._start_s)

    def tokens_by_second(self, now: float) -> tuple[int, ...]:
        """Tokens in each of the last `SPAN_S` seconds, oldest first."""
        newest, by_second = int(now / self.BUCKET_S), [0] * round(self.SPAN_S)
        for place, index in enumerate(self._index):
            age = newest - index
            if 0 <= age < self._KEPT:
                by_second[-1 - int(age * self.BUCKET_S)] += self._tokens[place]
        return tuple(by_second)
