"""The layout of the dashboard, as data: sections of panels, each of metrics that the worker logs.

`scripts/wandb_dashboard.py` saves it to W&B, or draws it from an offline run; both show the same panels in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollout.metrics.report import BUBBLES, FINISH_REASONS

#: "line": a line for each metric; "stacked": areas on each other; "histogram": one metric, counts by size over time.
Kind = Literal["line", "stacked", "histogram"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `over` is what its x-axis is: time, or the weights version, one point for each."""

    title: str
    metrics: tuple[str, ...]
    unit: str
    kind: Kind = "line"
    over: Literal["time", "version"] = "time"


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under a heading."""

    name: str
    panels: tuple[Panel, ...]


def _version(title: str, name: str, unit: str) -> Panel:
    return Panel(title, (f"by_version/{name}",), unit, over="version")


LAYOUT = (
    Section(
        "GPU",
        (
            Panel("Active", ("gpu/active_pct", "gpu/run/active_pct"), "%"),
            Panel("Idle by cause", tuple(f"gpu/bubble_pct/{cause}" for cause in BUBBLES), "%", "stacked"),
            Panel("Pipeline speed-up", ("pipeline/predicted_speedup", "pipeline/observed_speedup"), "x"),
        ),
    ),
    Section(
        "Rollout",
        (
            Panel("Tokens", ("rollout/tokens_per_s",), "tokens/s"),
            Panel("Tokens of a row", ("rollout/tokens_per_s_per_row",), "tokens/s"),
            Panel("Rows and queue", ("rollout/rows", "queue/waiting"), "count"),
            Panel("Zombie rows", ("rollout/zombie_rows_pct",), "%"),
        ),
    ),
    Section(
        "Steps and memory",
        (
            Panel("Decode step", ("step/decode_ms", "step/decode_ms_p50", "step/decode_ms_p99"), "ms"),
            Panel("Prefill step", ("step/prefill_ms",), "ms"),
            Panel("Host time of a step", ("step/bookkeeping_ms",), "ms"),
            Panel("KV", ("kv/used_pct", "kv/session_pct", "kv/prefix_hit_pct"), "%"),
        ),
    ),
    Section(
        "Completions",
        (
            Panel("Length", ("completion/length",), "tokens", "histogram"),
            Panel(
                "Length of those that finished",
                ("completion/length_mean", "completion/length_p50", "completion/length_p99"),
                "tokens",
            ),
            Panel("Ends", tuple(f"completion/finish_reason/{reason}" for reason in FINISH_REASONS), "count"),
            Panel("Taken away", ("kv/preemptions", "rollout/reclaimed_rows"), "count"),
        ),
    ),
    Section(
        "KV on the host",
        (
            Panel("Host memory in use", ("kv/host_used_pct",), "%"),
            Panel("Restored", ("kv/restores",), "count"),
            Panel("Copied", ("kv/offloaded_bytes", "kv/brought_back_bytes"), "bytes"),
        ),
    ),
    Section(
        "Weights",
        (
            Panel("Version", ("weights/version",), "version"),
            Panel("Pause of the last swap", ("weights/swap_pause_ms",), "ms"),
            Panel("Copied by the last swap", ("weights/bytes",), "bytes"),
            Panel("Versions in a completion", ("off_policy/version_span",), "versions"),
        ),
    ),
    Section(
        "Trainer and worker",
        (
            Panel("KL, worker to trainer", ("mismatch/k3_kl",), "nats"),
            Panel("Log-prob difference", ("mismatch/mean_abs", "mismatch/max_abs"), "nats"),
            Panel("Tokens compared", ("mismatch/tokens",), "count"),
        ),
    ),
    Section(
        "By weights version",
        (
            _version("Tokens", "tokens_per_s", "tokens/s"),
            _version("Active", "active_pct", "%"),
            _version("Length of completions", "completion_length", "tokens"),
            _version("Versions in a completion", "version_span", "versions"),
        ),
    ),
)


def panels() -> Iterator[Panel]:
    """All panels, in order."""
    for section in LAYOUT:
        yield from section.panels
