"""Saves the dashboard of rollout workers as a view in W&B, or draws it from an offline run.

    python scripts/wandb_dashboard.py --entity TEAM --project rollout            saves a view, prints its address
    python scripts/wandb_dashboard.py --png dashboard.png RUN_FOLDER             draws it; no network, no account

Saving needs the extra `dashboard` (wandb-workspaces) and a W&B key; drawing needs the extra `plot`. The layout is in
rollout/metrics/dashboard.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rollout.metrics.dashboard import LAYOUT, Panel
from rollout.metrics.dashboard_picture import write_dashboard
from rollout.metrics.wandb_file import read_offline_run
from rollout.metrics.wandb_sink import VERSION

_COLUMNS = 4
_X = {"time": "RelativeTime(Process)", "version": VERSION}


def workspace(entity: str, project: str, name: str) -> Any:
    """The view, as wandb-workspaces has it; nothing is sent. Raises ValueError if that is not installed."""
    try:
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise ValueError("saving a view needs wandb-workspaces: pip install 'rollout-engine[dashboard]'") from error
    sections = [
        ws.Section(
            name=section.name,
            panels=[_line_plot(panel) for panel in section.panels],
            is_open=True,
            layout_settings=ws.SectionLayoutSettings(columns=_COLUMNS, rows=1),
        )
        for section in LAYOUT
    ]
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections)


def _line_plot(panel: Panel) -> Any:
    """W&B draws a histogram's key in a line plot as a heat map."""
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(
        title=panel.title,
        title_y=panel.unit,
        x=_X[panel.over],
        y=list(panel.metrics),
        plot_type="stacked-area" if panel.kind == "stacked" else "line",
    )


def main(arguments: list[str]) -> int:
    """Save the view, or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", nargs="?", help="folder of an offline run (offline-run-...), for --png")
    parser.add_argument("--png", type=Path, help="file to draw into")
    parser.add_argument("--entity", help="W&B user or team that the view is saved for")
    parser.add_argument("--project", default="rollout", help="W&B project with the runs (rollout)")
    parser.add_argument("--name", default="Rollout workers", help="name of the view (Rollout workers)")
    given = parser.parse_args(arguments)
    if (given.png is None) != (given.run is None):
        parser.error("--png FILE and the folder of a run go together")
    if (given.png is None) == (given.entity is None):
        parser.error("say either --entity, to save the view, or --png FILE RUN, to draw it")
    try:
        if given.png is not None:
            run = read_offline_run(given.run)
            write_dashboard(run, given.png, f"{given.name}: {run.name or run.project}, {len(run.rows)} rows")
            print(given.png)
        else:
            print(workspace(given.entity, given.project, given.name).save().url)
    except (OSError, ValueError) as error:
        print(f"wandb_dashboard: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
