"""Writes the pages of docs/reference from the declarations in the code.

    python -m scripts.reference_docs            checks that the pages are current (exit status 1 if one is not)
    python -m scripts.reference_docs --write    writes them

A page is one function in `PAGES`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rollout.metrics.definitions import HISTOGRAMS, METRICS, TOTALS, VERSION_METRICS, Metric
from rollout.metrics.prometheus import prometheus_name

_METRICS_INTRODUCTION = """\
# Metrics

A worker makes a report every `metrics.interval_s` seconds, and one over the whole run when it ends. The first column is
the name in W&B and JSON lines, the second one the name on the page for Prometheus.

- A **gauge** is a value of now or of the interval. A mean, median or percentile without a sample in the interval keeps
  its last value. In the report over the whole run it is that of the whole run.
- A **counter** only grows while the worker runs.
- A **histogram** counts values by size. W&B and JSON lines get the counts of the interval, JSON lines as a list of
  `[begin, bound, count]` without the empty buckets. The page for Prometheus has the counts since the start.
- `mismatch/...` begins with the first `report` of a trainer.

The page for Prometheus also has `rollout_worker_info` (its label `model` names the model), `rollout_report_time_s`
(Unix time of the report) and `rollout_report_step` (steps committed by then). In JSON lines the last two are `time` and
`step`."""

_BY_VERSION = """
## By weights version

One row for each weights version, written once the next version serves: in W&B a row with `weights/version` as its
x-axis, in JSON lines an entry of `versions` in the next report. A value without a sample is left out. The page for
Prometheus does not have these metrics.
"""

_AT_THE_END = """
## At the end

Only in the report over the whole run: the summary of the run in W&B, the line with `final: true` in JSON lines, and
`totals` in the last line that the worker prints.
"""

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"


def metrics_page() -> str:
    """Every metric, by the section of the dashboard that shows its group."""
    groups: dict[str, list[Metric]] = {}
    for metric in (*METRICS, *HISTOGRAMS):
        groups.setdefault(_section(metric), []).append(metric)
    lines = [_METRICS_INTRODUCTION]
    for section, metrics in groups.items():
        rows = [(f"`{m.name}`", f"`{prometheus_name(m)}`", m.kind, m.unit, m.meaning) for m in metrics]
        lines += ["", f"## {section}", "", *_table(("name", "Prometheus", "kind", "unit", "meaning"), rows)]
    heads = ("name", "unit", "meaning")
    lines += [_BY_VERSION, *_table(heads, [(f"`{m.name}`", m.unit, m.meaning) for m in VERSION_METRICS])]
    lines += [_AT_THE_END, *_table(heads, [(f"`{m.name}`", m.unit, m.meaning) for m in TOTALS])]
    return "\n".join(lines) + "\n"


def _section(metric: Metric) -> str:
    """The metric's section of the dashboard. Without a panel: the section of a metric with the same first word."""
    if metric.panel is not None:
        return metric.panel.section
    word = metric.name.partition("/")[0]
    return next(other.panel.section for other in METRICS if other.panel and other.name.startswith(f"{word}/"))


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)]


#: File name: the function that makes its text.
PAGES: Mapping[str, Callable[[], str]] = {"metrics.md": metrics_page}


def main(arguments: list[str]) -> int:
    """Check the pages, or write them."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reference_docs", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the pages")
    what.add_argument("--check", action="store_true", help="check that the pages are current (the default)")
    given = parser.parse_args(arguments)
    stale = []
    for name, page in PAGES.items():
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == page():
            continue
        if given.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page(), encoding="utf-8")
        else:
            stale.append(name)
    if stale:
        names = ", ".join(f"docs/reference/{name}" for name in stale)
        print(f"out of date: {names}; run: python -m scripts.reference_docs --write", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
