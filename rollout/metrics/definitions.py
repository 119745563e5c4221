"""Every metric of a worker, declared once.

An entry has a name, a kind, a unit, a meaning, the way in which it is read, and the places where it is shown. All else
is made from the entries: the reports (W&B, JSON lines), the page for Prometheus, the metrics line and the legend of
`rollout top`, the dashboard, and docs/reference/metrics.md.

How an entry is read:

    no `read`   the value that was given to the meter under the entry's name, 0 before the first one. A None is left out
                of reports:
                    meter.set({"kv/used_pct": 40.0})       a gauge, or a counter that another object keeps
                    meter.add("kv/evictions")              a counter
                    meter.observe("queue/seconds", 1.5)    a histogram
    `read`      computed from a `Stretch`: what the meter counts of every step, swap and completion

To add a metric, add an entry here and give the number to the meter where it arises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Generic, Literal, TypeVar

from rollout.metrics.idle import IDLE_CAUSES
from rollout.metrics.logprob_mismatch import MismatchSums
from rollout.metrics.samples import SECONDS, TOKENS, Buckets, Samples, percent
from trainer_bridge.wire.finish_reasons import FINISH_REASONS

#: "gauge": of now, or of the interval. "counter": only grows while the worker runs. "histogram": counts by size.
Kind = Literal["gauge", "counter", "histogram"]

#: The drafters, by their names in metrics.
DRAFTER_NAMES = {"suffix": "suffix matching", "ngram": "n-grams of the row", "heads": "the draft model"}
#: Ages of the sources of drafts, in weights versions, by the names in metrics; each age up to the next one.
DRAFT_AGES = {"0": 0, "1": 1, "2_to_4": 2, "5_up": 5}


@dataclass(frozen=True, slots=True)
class Stretch:
    """The meter's values of a stretch of time: the interval since the last report, or the whole run at its end."""

    wall_s: float
    samples: Samples
    idle_s: Mapping[str, float]  # seconds by cause
    active_pct: float  # share of the last 10 s; at the end, of the whole run
    idle_pct: Mapping[str, float]  # shares by cause, of the same time
    run_active_pct: float
    run_idle_pct: Mapping[str, float]
    mismatch: MismatchSums  # sums of the last interval with a report; at the end, of the whole run
    compared_tokens: int  # tokens that trainers reported on, since start
    swaps: int  # since start


@dataclass(frozen=True, slots=True)
class Served:
    """Counts since the start of the meter. The difference of two readings is the service of one weights version."""

    wall_s: float
    busy_s: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    decode_steps: int = 0
    completions: int = 0
    completion_tokens: float = 0.0
    version_spans: float = 0.0
    swap_pause_s: float = 0.0  # pause of the swap that brought the version; 0 in a reading

    def __sub__(self, other: Served) -> Served:
        return Served(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Panel:
    """The panel of the dashboard that shows a metric. Metrics of one panel are drawn together."""

    section: str
    title: str
    stacked: bool = False  # areas on top of each other instead of lines


_Source = TypeVar("_Source", contravariant=True)


@dataclass(frozen=True, slots=True)
class Metric(Generic[_Source]):
    """One metric."""

    name: str  # in W&B and JSON lines
    kind: Kind
    unit: str
    meaning: str
    panel: Panel | None = None  # None: not on the dashboard
    read: Callable[[_Source], float | None] | None = None  # None as a result: left out of this report
    top: str | None = None  # its label in `rollout top`; None: not shown there
    buckets: Buckets | None = None  # bounds of a histogram
    first: float | None = 0  # its value before anything sets it; None: left out of reports

    def __post_init__(self) -> None:
        assert (self.kind == "histogram") == (self.buckets is not None), f"{self.name}: a histogram has buckets"


# --- reports ----------------------------------------------------------------------------------------------------------

_ACTIVE = Panel("GPU", "Active")
_IDLE = Panel("GPU", "Idle by cause", stacked=True)
_SPEEDUP = Panel("GPU", "Pipeline speed-up")
_ROWS = Panel("Rollout", "Rows and queue")
_DECODE_STEP = Panel("Steps and memory", "Decode step")
_KV = Panel("Steps and memory", "KV")
_HITS = Panel("Steps and memory", "Prefix hits")
_PREFILL = Panel("Steps and memory", "Prompt tokens")
_SPECULATION = Panel("Speculation", "Drafts")
_ACCEPTED = Panel("Speculation", "Accepted")
_SAVED = Panel("Speculation", "Device time saved")
_COMPLETION_LENGTH = Panel("Completions", "Length of those that finished")
_PREEMPTED = Panel("Completions", "Taken away")
_COPIED = Panel("KV on the host", "Copied")
_DISK = Panel("KV on disk", "Pages")
_DIFFERENCE = Panel("Trainer and worker", "Log-prob difference")


def _idle_pct(cause: str) -> Callable[[Stretch], float]:
    return lambda stretch: stretch.idle_pct[cause]


def _accepted_by_drafter(name: str) -> Metric[Stretch]:
    return Metric(f"speculation/accepted_pct/by_{name}", "gauge", "%", f"the same by drafter: {DRAFTER_NAMES[name]}",
                  _ACCEPTED, top=name, first=None)  # fmt: skip


def _accepted_by_age(name: str) -> Metric[Stretch]:
    return Metric(f"speculation/accepted_pct/age_{name}", "gauge", "%",
                  f"the same by the age of a draft, in weights versions: {name}", _ACCEPTED,
                  top=f"age {name.replace('_', ' ')}", first=None)  # fmt: skip


def _run_idle_pct(cause: str) -> Callable[[Stretch], float]:
    return lambda stretch: stretch.run_idle_pct[cause]


def _speedups(stretch: Stretch) -> tuple[float, float]:
    idle_s = stretch.idle_s
    return stretch.samples.speedups(stretch.wall_s - idle_s["no_work"] - idle_s["swap"] - idle_s["offload"])


def _mismatch(read: Callable[[Stretch], float]) -> Callable[[Stretch], float | None]:
    """None until a trainer has reported: a 0 would say that trainer and worker agree."""
    return lambda stretch: read(stretch) if stretch.compared_tokens else None


def _ended(reason: str) -> Metric[Stretch]:
    meaning = f"completions that ended as {reason}"
    return Metric(f"completion/finish_reason/{reason}", "counter", "count", meaning, Panel("Completions", "Ends"))


#: The values of every report.
METRICS: tuple[Metric[Stretch], ...] = (
    Metric("gpu/active_pct", "gauge", "%", "share of the last 10 s with a step on the compute stream",
           _ACTIVE, lambda stretch: stretch.active_pct),
    Metric("gpu/run/active_pct", "gauge", "%",
           "share of the time since the start in which the compute stream ran a step", _ACTIVE,
           lambda stretch: stretch.run_active_pct),
    *(
        Metric(f"gpu/bubble_pct/{cause.metric}", "gauge", "%", f"share of the last 10 s in which {cause.meaning}",
               _IDLE, _idle_pct(name))
        for name, cause in IDLE_CAUSES.items()
    ),
    *(
        Metric(f"gpu/run/bubble_pct/{cause.metric}", "gauge", "%",
               f"share of the time since the start in which {cause.meaning}", None, _run_idle_pct(name))
        for name, cause in IDLE_CAUSES.items()
    ),
    Metric("pipeline/predicted_speedup", "gauge", "x",
           "predicted gain of the overlap: (host + device time) / the larger one, less zombie rows", _SPEEDUP,
           lambda stretch: _speedups(stretch)[0]),
    Metric("pipeline/observed_speedup", "gauge", "x",
           "observed gain: (host + device time) / time with work, without swaps and offloads", _SPEEDUP,
           lambda stretch: _speedups(stretch)[1]),
    Metric("rollout/tokens_per_s", "gauge", "tokens/s", "committed and kept tokens of all rows",
           Panel("Rollout", "Tokens"),
           lambda stretch: stretch.samples.tokens / stretch.wall_s if stretch.wall_s > 0 else 0.0),
    Metric("rollout/tokens_per_s_per_row", "gauge", "tokens/s", "mean of a row",
           Panel("Rollout", "Tokens of a row"), lambda stretch: stretch.samples.tokens_per_s_per_row(stretch.wall_s)),
    Metric("rollout/rows", "gauge", "rows", "sequences with a row", _ROWS),
    Metric("queue/waiting", "gauge", "completions", "completions without a row", _ROWS),
    Metric("rollout/zombie_rows_pct", "gauge", "%", "launched rows whose token is dropped",
           Panel("Rollout", "Zombie rows"), lambda stretch: stretch.samples.zombie_rows_pct()),
    Metric("step/decode_ms", "gauge", "ms", "time of a decode step on the compute stream, mean",
           _DECODE_STEP, lambda stretch: 1e3 * stretch.samples.decode.value(), top="decode step"),
    Metric("step/decode_ms_p50", "gauge", "ms", "time of a decode step on the compute stream, median",
           _DECODE_STEP, lambda stretch: 1e3 * stretch.samples.decode_quantiles.value(0.5)),
    Metric("step/decode_ms_p99", "gauge", "ms", "time of a decode step on the compute stream, 99th percentile",
           _DECODE_STEP, lambda stretch: 1e3 * stretch.samples.decode_quantiles.value(0.99)),
    Metric("step/prefill_ms", "gauge", "ms", "mean time of a prefill step on the compute stream",
           Panel("Steps and memory", "Prefill step"), lambda stretch: 1e3 * stretch.samples.prefill.value()),
    Metric("step/bookkeeping_ms", "gauge", "ms", "host time of a step (plan, launch, commit), mean",
           Panel("Steps and memory", "Host time of a step"), lambda stretch: 1e3 * stretch.samples.host.value(),
           top="host"),
    Metric("kv/used_pct", "gauge", "%", "KV pages of rows and sessions, without cached ones", _KV),
    Metric("kv/session_pct", "gauge", "%", "KV pages of idle sessions", _KV),
    Metric("state/snapshots_used_pct", "gauge", "%", "snapshots of linear attention in use", _KV),
    Metric("state/snapshot_loads", "counter", "rows", "rows that went on from a snapshot", _KV),
    Metric("kv/older_reused_tokens", "counter", "tokens", "admitted tokens with KV of older weights", _HITS),
    Metric("prefix/hits_group", "counter", "rows", "rows that took the KV of their group's prompt", _HITS),
    Metric("prefix/hits_pages", "counter", "rows", "rows that took pages of a known prefix", _HITS),
    Metric("prefix/hits_prompt_end", "counter", "rows", "rows that went on from the end of an equal prompt", _HITS),
    Metric("prefix/hits_turn_end", "counter", "rows", "rows that went on from the end of a turn", _HITS),
    Metric("kv/prefix_hit_pct", "gauge", "%", "prompt tokens whose KV was reused, since start", _KV, top="prefix hits"),
    Metric("prefill/tokens_computed", "counter", "tokens", "tokens that prefills computed", _PREFILL, top="prefilled"),
    Metric("prefill/tokens_shared", "counter", "tokens", "prompt tokens whose KV was reused", _PREFILL, top="shared"),
    Metric("speculation/drafted", "counter", "tokens", "drafts that decode steps verified", _SPECULATION),
    Metric("speculation/accepted", "counter", "tokens", "drafts that equalled the drawn token", _SPECULATION),
    Metric("speculation/accepted_pct", "gauge", "%", "accepted drafts since start",
           _ACCEPTED, top="accepted", first=None),
    *(_accepted_by_drafter(name) for name in DRAFTER_NAMES),
    *(_accepted_by_age(name) for name in DRAFT_AGES),
    Metric("speculation/accepted_older_pct", "gauge", "%", "the same of all drafts with an age above 0",
           _ACCEPTED, first=None),
    Metric("speculation/saved_s", "gauge", "s", "device time saved by drafts since start", _SAVED, top="saved"),
    Metric("speculation/expected_saved_s", "gauge", "s", "the same with the expected time of verify steps",
           _SAVED, top="expected"),
    Metric("speculation/tokens_a_step", "gauge", "tokens", "mean of a row since start",
           Panel("Speculation", "Tokens a step"), top="a step", first=1),
    Metric("completion/length_mean", "gauge", "tokens", "length of finished completions, mean",
           _COMPLETION_LENGTH, lambda stretch: stretch.samples.length.value()),
    Metric("completion/length_p50", "gauge", "tokens", "length of finished completions, median",
           _COMPLETION_LENGTH, lambda stretch: stretch.samples.length_quantiles.value(0.5)),
    Metric("completion/length_p99", "gauge", "tokens", "length of finished completions, 99th percentile",
           _COMPLETION_LENGTH, lambda stretch: stretch.samples.length_quantiles.value(0.99)),
    *(_ended(reason) for reason in FINISH_REASONS),
    Metric("kv/preemptions", "counter", "count", "preempted sequences", _PREEMPTED, top="preempted"),
    Metric("rollout/reclaimed_rows", "counter", "count", "completions that ended with their client", _PREEMPTED),
    Metric("kv/host_used_pct", "gauge", "%", "part of `host_kv_gib` with preempted sequences",
           Panel("KV on the host", "Host memory in use")),
    Metric("kv/restores", "counter", "count", "sequences whose KV came back", Panel("KV on the host", "Restored")),
    Metric("kv/offloaded_bytes", "counter", "bytes", "KV of preempted sequences copied to the host", _COPIED),
    Metric("kv/brought_back_bytes", "counter", "bytes", "KV of them copied back", _COPIED),
    Metric("kv/host_kept_pct", "gauge", "%", "part of `host_kv_gib` with known prefixes and idle sessions",
           Panel("KV on the host", "Host memory in use")),
    Metric("kv/kept_bytes", "counter", "bytes", "KV of known prefixes copied to the host", _COPIED),
    Metric("kv/fetched_tokens", "counter", "tokens", "tokens of known prefixes copied back",
           Panel("KV on the host", "Fetched")),
    Metric("kv/lost_pages", "counter", "pages", "known pages dropped before their copy",
           Panel("KV on the host", "Lost")),
    Metric("kv/disk_used_pct", "gauge", "%", "part of `disk_kv_gib` with known prefixes",
           Panel("KV on disk", "Disk in use")),
    Metric("kv/disk_read_pages", "counter", "pages", "pages read from disk", _DISK),
    Metric("kv/disk_failed_pages", "counter", "pages", "pages that could not be written or read", _DISK),
    Metric("images/encoded", "counter", "count", "encoded images", Panel("Images", "Encoded")),
    Metric("images/patches", "counter", "count", "patches of these images"),
    Metric("images/reused", "counter", "count", "images found in the buffer", Panel("Images", "Found")),
    Metric("images/buffer_used_pct", "gauge", "%", "buffer for embeddings of images in use",
           Panel("Images", "Buffer in use")),
    Metric("adapters/loads", "counter", "count", "adapters copied to a slot", Panel("Adapters", "Loads")),
    Metric("adapters/evictions", "counter", "count", "adapters that lost their slot", Panel("Adapters", "Evictions")),
    Metric("ranks/beat_age_s", "gauge", "s", "age of the oldest last beat of a follower",
           Panel("Tensor group", "Oldest beat")),
    Metric("ranks/steps_behind", "gauge", "steps", "steps that the slowest rank has not completed",
           Panel("Tensor group", "Steps behind")),
    Metric("weights/version", "gauge", "version", "version of new steps", Panel("Weights", "Version")),
    Metric("weights/swap_pause_ms", "gauge", "ms", "pause of the compute stream by the last swap",
           Panel("Weights", "Pause of the last swap")),
    Metric("weights/bytes", "gauge", "bytes", "bytes of the last swap", Panel("Weights", "Copied by the last swap")),
    Metric("weights/recompute_s", "counter", "s", "time of steps that recompute KV after updates",
           Panel("Weights", "Computing KV again")),
    Metric("off_policy/version_span", "gauge", "versions", "newest minus oldest version of a completion, mean",
           Panel("Weights", "Versions in a completion"), lambda stretch: stretch.samples.version_span.value()),
    Metric("mismatch/k3_kl", "gauge", "nats",
           "KL(worker || trainer): mean of exp(d) - 1 - d, d = trainer's log-prob - worker's",
           Panel("Trainer and worker", "KL, worker to trainer"), _mismatch(lambda stretch: stretch.mismatch.k3_kl)),
    Metric("mismatch/mean_abs", "gauge", "nats", "mean of |d|",
           _DIFFERENCE, _mismatch(lambda stretch: stretch.mismatch.mean_abs)),
    Metric("mismatch/max_abs", "gauge", "nats", "largest |d|",
           _DIFFERENCE, _mismatch(lambda stretch: stretch.mismatch.max_abs)),
    Metric("mismatch/tokens", "counter", "count", "tokens that trainers reported",
           Panel("Trainer and worker", "Tokens compared"), _mismatch(lambda stretch: stretch.compared_tokens)),
)  # fmt: skip

#: The histograms of every report.
HISTOGRAMS: tuple[Metric[Stretch], ...] = (
    Metric("completion/length", "histogram", "tokens", "length of finished completions",
           Panel("Completions", "Length"), buckets=TOKENS),
    Metric("queue/seconds", "histogram", "s", "time until the first completion got a row",
           Panel("Requests", "Time in the queue"), buckets=SECONDS),
    Metric("request/seconds", "histogram", "s", "time until the last completion ended",
           Panel("Requests", "Time of a request"), buckets=SECONDS),
)  # fmt: skip


# --- the end of the run -----------------------------------------------------------------------------------------------

#: Added to the report over the whole run, when the worker ends.
TOTALS: tuple[Metric[Stretch], ...] = (
    Metric("total/wall_s", "gauge", "s", "time since the start", None, lambda run: run.wall_s),
    Metric("total/tokens", "counter", "tokens", "kept tokens", None, lambda run: run.samples.tokens),
    Metric("total/decode_steps", "counter", "count", "decode steps", None, lambda run: run.samples.decode.count),
    Metric("total/prefill_steps", "counter", "count", "prefill steps", None, lambda run: run.samples.prefill.count),
    Metric("total/completions", "counter", "count", "completions", None, lambda run: run.samples.length.count),
    Metric("total/swaps", "counter", "count", "swaps of the weights", None, lambda run: run.swaps),
)


# --- weights versions -------------------------------------------------------------------------------------------------


def _by_version(title: str) -> Panel:
    return Panel("By weights version", title)


#: The row of one weights version, written once the next version serves. It goes to W&B and JSON lines only, and its
#: x-axis in W&B is `weights/version`. Values without a sample are left out.
VERSION_METRICS: tuple[Metric[Served], ...] = (
    Metric("by_version/serving_s", "gauge", "s", "time of service", None, lambda served: served.wall_s),
    Metric("by_version/tokens", "gauge", "tokens", "tokens kept", None, lambda served: served.tokens),
    Metric("by_version/tokens_per_s", "gauge", "tokens/s", "tokens kept per second",
           _by_version("Tokens"), lambda served: served.tokens / served.wall_s if served.wall_s > 0 else None),
    Metric("by_version/active_pct", "gauge", "%", "part with a step on the compute stream",
           _by_version("Active"),
           lambda served: min(100.0, max(0.0, percent(served.busy_s, served.wall_s))) if served.wall_s > 0 else None),
    Metric("by_version/decode_ms", "gauge", "ms", "time of a decode step, mean",
           None, lambda served: 1e3 * served.decode_s / served.decode_steps if served.decode_steps else None),
    Metric("by_version/completions", "gauge", "count", "completions that finished",
           None, lambda served: served.completions),
    Metric("by_version/completion_length", "gauge", "tokens", "mean length of those",
           _by_version("Length of completions"),
           lambda served: served.completion_tokens / served.completions if served.completions else None),
    Metric("by_version/version_span", "gauge", "versions", "newest minus oldest version, mean",
           _by_version("Versions in a completion"),
           lambda served: served.version_spans / served.completions if served.completions else None),
    Metric("by_version/swap_pause_ms", "gauge", "ms", "pause by the swap to this version",
           None, lambda served: 1e3 * served.swap_pause_s),
)  # fmt: skip

#: The values that `rollout top` shows, in its order; a report may lack some.
TOP_METRICS = tuple(metric for metric in METRICS if metric.top is not None)
