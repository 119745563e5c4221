"""Reports in Weights & Biases: one run a worker, online or offline.

every report         a row: the metrics and histograms, over time and, as W&B allows for any panel, over whatever
                     else is in the row, `weights/version` for one
every version that   a row of its own: `by_version/...` with `weights/version`, which is their x-axis by definition:
serves no more       one point for each of the trainer's updates
the final report     the run's summary
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollout.config import MetricsSettings
from rollout.metrics.histogram import Histogram
from rollout.metrics.sinks import Report
from rollout.metrics.wandb_mode import wandb_mode

log = logging.getLogger(__name__)

VERSION = "weights/version"


class WandbSink:
    """Logs to W&B: online when a key is configured, otherwise to a folder that `wandb sync` takes. Never asks.

    Args:
        settings: project, group, name and folder of the run.
        config: settings to show with the run.
    """

    #: Seconds that W&B's server may take to answer before the run goes on offline.
    ONLINE_TIMEOUT_S = 30.0

    def __init__(self, settings: MetricsSettings, config: Mapping[str, Any]) -> None:
        self._settings = settings
        self._config = dict(config)
        self._run: Any = None
        #: The run's address when it is online, its folder when it is offline; None before `open` has returned,
        #: and for a run that is disabled.
        self.run_path: str | None = None

    def open(self) -> None:
        """Start the run; one that should be online but gets no answer is started offline."""
        import wandb

        mode = wandb_mode(os.environ)
        try:
            self._run = self._start(mode)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            log.warning("W&B does not answer, the run is logged offline: %s", error)
            self._run = self._start("offline")
        self._run.define_metric(VERSION)
        self._run.define_metric("by_version/*", step_metric=VERSION)
        # `dir` is the run's subfolder for files. A run that is disabled has neither address nor folder.
        if not self._run.disabled:
            self.run_path = str(Path(self._run.dir).parent) if self._run.offline else self._run.url

    def _start(self, mode: str) -> Any:
        import wandb

        folder = Path(self._settings.wandb_dir)
        folder.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, init_timeout=self.ONLINE_TIMEOUT_S
        )
        return wandb.init(
            project=self._settings.wandb_project,
            group=self._settings.wandb_group,
            name=self._settings.wandb_name,
            dir=str(folder),
            config=self._config,
            mode=mode,  # type: ignore[arg-type]
            settings=quiet,
        )

    def write(self, report: Report) -> None:
        """Log the report as one history row, after one for each version in it; the final one as the run's summary."""
        for row in report.versions:
            self._run.log({VERSION: row.version, **row.metrics})
        shown = {**report.metrics, **_shown(report.histograms)}
        if report.final:
            self._run.summary.update(shown)
        else:
            # `step` is a value like the others: as W&B's own step it would lose the reports of an idle worker, which
            # has committed nothing since the last one.
            self._run.log({"step": report.step, **shown})

    def close(self) -> None:
        """Finish the run; its file is whole when this returns. Ends W&B in this process, which has no other run."""
        import wandb

        self._run.finish()
        wandb.teardown()  # `finish` returns before W&B's own process has written the file


def _shown(histograms: Mapping[str, Histogram]) -> dict[str, Any]:
    """Those that have something in them, as W&B draws them."""
    import wandb

    shown = {}
    for name, histogram in histograms.items():
        counts, edges = histogram.edges()
        if counts:
            shown[name] = wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
    return shown
