"""The layout of the dashboard, made from the declarations of the metrics: sections, panels and their metrics.

`scripts.dashboard.wandb_view` saves it to W&B and `scripts.dashboard.picture` draws it from an offline run; both show
the same panels in the same order. `rollout/metrics/definitions.py` declares a panel with its metrics.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rollout.metrics import definitions
from rollout.metrics.definitions import HISTOGRAMS, METRICS, VERSION_METRICS, Metric

#: "line": a line for each metric. "stacked": areas on top of each other. "histogram": counts by size over time.
Kind = Literal["line", "stacked", "histogram"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. Its x-axis is time, or the weights version with one point for each."""

    title: str
    metrics: tuple[str, ...]
    unit: str
    kind: Kind = "line"
    over: Literal["time", "version"] = "time"


#: Panels in a row.
COLUMNS = 4


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under a heading."""

    name: str
    panels: tuple[Panel, ...]

    @property
    def rows(self) -> int:
        """The panels in rows."""
        return -(-len(self.panels) // COLUMNS)


def _layout() -> tuple[Section, ...]:
    """Sections, panels and metrics in the order in which they are declared first."""
    sections: dict[str, dict[definitions.Panel, list[Metric]]] = {}
    every: tuple[Metric[Any], ...] = (*METRICS, *HISTOGRAMS, *VERSION_METRICS)
    for metric in every:
        if metric.panel is not None:
            sections.setdefault(metric.panel.section, {}).setdefault(metric.panel, []).append(metric)
    return tuple(
        Section(name, tuple(_panel(declared, metrics) for declared, metrics in panels.items()))
        for name, panels in sections.items()
    )


def _panel(declared: definitions.Panel, metrics: list[Metric]) -> Panel:
    kind: Kind = "histogram" if metrics[0].kind == "histogram" else "stacked" if declared.stacked else "line"
    return Panel(
        declared.title,
        tuple(metric.name for metric in metrics),
        ", ".join(dict.fromkeys(metric.unit for metric in metrics)),
        kind,
        "version" if metrics[0] in VERSION_METRICS else "time",
    )


LAYOUT = _layout()


def panels() -> Iterator[Panel]:
    """All panels, in order."""
    for section in LAYOUT:
        yield from section.panels
