"""Reports in Weights & Biases: one run for each worker, online or offline.

each report            one row: metrics and histograms, over time or over any other value of the row
each ended version     one row: `by_version/...` over `weights/version`, one point for each update of the trainer
the final report       the summary of the run
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
    """Logs to W&B: online if a key is configured, otherwise into a folder for `wandb sync`. Never prompts.

    Args:
        settings: project, group, name and folder of the run.
        config: settings to show with the run.
    """

    at_once = False

    #: Without an answer from W&B's server for so many seconds the run continues offline.
    ONLINE_TIMEOUT_S = 30.0

    def __init__(self, settings: MetricsSettings, config: Mapping[str, Any]) -> None:
        self._settings = settings
        self._config = dict(config)
        self._run: Any = None
        #: Address of an online run, folder of an offline one; None before `open` and for a disabled run.
        self.run_path: str | None = None

    def open(self) -> None:
        """Start the run; without an answer from the server, offline."""
        import wandb

        mode = wandb_mode(os.environ)
        try:
            self._run = self._start(mode)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            log.warning("W&B does not answer; the run is logged offline: %s", error)
            self._run = self._start("offline")
        self._run.define_metric(VERSION)
        self._run.define_metric("by_version/*", step_metric=VERSION)
        # `dir` is the run's subfolder for files. A disabled run has neither address nor folder.
        if not self._run.disabled:
            self.run_path = str(Path(self._run.dir).parent) if self._run.offline else self._run.url

    def _start(self, mode: str) -> Any:
        import wandb

        folder = Path(self._settings.wandb_dir)
        folder.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        if mode == "online":
            quiet.init_timeout = self.ONLINE_TIMEOUT_S
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
        """Log a row for each ended version, then one for the report; the final report becomes the summary."""
        for row in report.versions:
            self._run.log({VERSION: row.version, **row.metrics})
        shown = {**report.metrics, **_shown(report.histograms)}
        if report.final:
            self._run.summary.update(shown)
        else:
            # As W&B's own step, `step` would lose the reports of an idle worker, whose step does not grow.
            self._run.log({"step": report.step, **shown})

    def close(self) -> None:
        """Finish the run; its file is complete when this returns. Also ends W&B in this process."""
        import wandb

        self._run.finish()
        wandb.teardown()  # `finish` returns before W&B's process has written the file


def _shown(histograms: Mapping[str, Histogram]) -> dict[str, Any]:
    """The histograms that are not empty, in W&B's form."""
    import wandb

    shown = {}
    for name, histogram in histograms.items():
        counts, edges = histogram.edges()
        if counts:
            shown[name] = wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
    return shown
