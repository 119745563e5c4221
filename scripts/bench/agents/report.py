"""The figures of a replay, as a map for JSON and as lines of a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.bench.agents.clients import Gauged
from scripts.bench.agents.replay import Run

_BUCKETS = 10


def figures(run: Run, workers: int) -> dict[str, Any]:
    """The figures of a replay over a number of workers.

    `again_pct` is the share of the sent prompt tokens that was computed although it had been computed before;
    `computed_over_distinct` relates all that was computed to what had to be.
    """
    assert run.before is not None and run.after is not None
    before, after, tokens = run.before, run.after, run.tokens
    computed = after.computed - before.computed
    active = None
    if before.busy_s is not None and after.busy_s is not None:
        active = 100 * (after.busy_s - before.busy_s) / (run.total_s * workers)
    return {
        "total_s": run.total_s,
        "trajectories": run.trajectories,
        "trajectories_per_h": 3600 * run.trajectories / run.total_s,
        "turns": len(run.turns),
        "forks": run.forks,
        "cuts": run.cuts,
        "drawn_tokens": tokens.drawn,
        "drawn_per_s": tokens.drawn / run.total_s,
        "sent_prompt_tokens": tokens.sent,
        "distinct_prompt_tokens": tokens.distinct,
        "computed_prompt_tokens": computed,
        "known_prompt_tokens": after.known - before.known,
        "computed_over_distinct": computed / tokens.distinct,
        "again_pct": 100 * max(0, computed - tokens.distinct) / tokens.sent,
        "active_pct": active,
        "preemptions": after.preemptions - before.preemptions,
        "turn_s": _quantiles([turn.ended_s - turn.sent_s for turn in run.turns]),
        "first_token_s": _quantiles([turn.first_s for turn in run.turns]),
        "running": timeline([(at, sample.running) for at, sample in run.samples], run.total_s),
        "waiting": timeline([(at, sample.waiting) for at, sample in run.samples], run.total_s),
        "kv_at_the_end": after.kv,
        "kv_most": most(sample for _, sample in run.samples),
        "updates": len(run.updates),
        "update_s": _quantiles([update.applied_s for update in run.updates]),
        "update_pause_s": _quantiles([update.pause_s for update in run.updates]),
        "staleness": staleness(run.staleness),
    }


def timeline(samples: Sequence[tuple[float, float]], total_s: float) -> list[float | None]:
    """The mean of samples (seconds, value) in each tenth of the time; None without a sample."""
    buckets: list[list[float]] = [[] for _ in range(_BUCKETS)]
    for at_s, value in samples:
        if at_s <= total_s:
            buckets[min(_BUCKETS - 1, int(_BUCKETS * at_s / total_s))].append(value)
    return [round(sum(bucket) / len(bucket), 2) if bucket else None for bucket in buckets]


def most(samples: Any) -> dict[str, dict[str, float]]:
    """The largest value of each figure of each tier."""
    found: dict[str, dict[str, float]] = {}
    for sample in samples:
        assert isinstance(sample, Gauged)
        for tier, values in sample.kv.items():
            for name, value in values.items():
                place = found.setdefault(tier, {})
                place[name] = max(place.get(name, value), value)
    return found


def staleness(runs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """How many versions behind the newest one tokens were when their trajectory ended: mean, most, and percent by
    versions behind; empty for an engine that does not tell. `runs` are pairs of versions behind and tokens.
    """
    total = sum(tokens for _, tokens in runs)
    if not total:
        return {}
    behind = {
        age: 100 * sum(tokens for own, tokens in runs if own == age) / total for age in sorted({a for a, _ in runs})
    }
    mean = sum(age * pct for age, pct in behind.items()) / 100
    return {"mean": mean, "most": max(behind), "pct": {str(age): round(pct, 2) for age, pct in behind.items()}}


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": float(np.quantile(values, 0.5)), "p99": float(np.quantile(values, 0.99)), "most": max(values)}


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The figures of rows as lines of a table, a column for each row."""
    lines: dict[str, dict[str, str]] = {}
    for number, row in enumerate(rows):
        for name, value in row.items():
            if name == "kv_at_the_end":
                continue
            for label, text in _cells(name, value):
                lines.setdefault(label, {})[f"{number + 1}"] = text
    columns = [f"{number + 1}" for number in range(len(rows))]
    return [{"": label, **{name: cells.get(name, "") for name in columns}} for label, cells in lines.items()]


def _cells(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [cell for key, inner in value.items() for cell in _cells(f"{name} {key}", inner)]
    if isinstance(value, list):
        return [(name, " ".join("-" if entry is None else f"{entry:.1f}" for entry in value))]
    if isinstance(value, float):
        return [(name, f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.0f}")]
    return [(name, "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value))]
