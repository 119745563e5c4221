"""Saves the dashboard of rollout workers as a view in W&B.

    python -m scripts.dashboard.wandb_view --entity TEAM --project rollout

It prints the address of the view. It needs the extra `dashboard` (wandb-workspaces) and a W&B key. The layout is in
`scripts/dashboard/layout.py`.
"""

import argparse
import sys
from typing import Any

from rollout.extras import install
from scripts.dashboard.layout import COLUMNS, LAYOUT, Panel

_X = {"time": "RelativeTime(Process)", "version": "weights/version"}


def workspace(entity: str, project: str, name: str) -> Any:
    """The view as an object of wandb-workspaces, not yet saved. Raises ValueError if the package is missing."""
    try:
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise ValueError(f"saving a view needs wandb-workspaces: {install('dashboard')}") from error
    sections = [
        ws.Section(
            name=section.name,
            panels=[_line_plot(panel) for panel in section.panels],
            is_open=True,
            layout_settings=ws.SectionLayoutSettings(columns=COLUMNS, rows=section.rows),
        )
        for section in LAYOUT
    ]
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections)


def _line_plot(panel: Panel) -> Any:
    """A line plot; W&B draws a histogram in it as a heat map."""
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(
        title=panel.title,
        title_y=panel.unit,
        x=_X[panel.over],
        y=list(panel.metrics),
        plot_type="stacked-area" if panel.kind == "stacked" else "line",
    )


def main(arguments: list[str]) -> int:
    """Save the view."""
    parser = argparse.ArgumentParser(prog="python -m scripts.dashboard.wandb_view", description=__doc__.splitlines()[0])
    parser.add_argument("--entity", required=True, help="W&B user or team that gets the view")
    parser.add_argument("--project", default="rollout", help="W&B project that has the runs [rollout]")
    parser.add_argument("--name", default="Rollout workers", help="name of the view [Rollout workers]")
    given = parser.parse_args(arguments)
    try:
        print(workspace(given.entity, given.project, given.name).save().url)
    except (OSError, ValueError) as error:
        print(f"wandb_view: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
