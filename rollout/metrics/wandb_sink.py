"""Reports in Weights & Biases: one run for each worker, over all its restarts; online or offline.

each report            one row: metrics and histograms, over time or over any other value of the row
each ended version     one row: `by_version/...` over `weights/version`, one point for each update of the trainer
the summary            metrics over the whole time of this process, and `total/...` over all of them; of the last report

Offline every process writes a folder of its own. All of them have the id of the run, so `wandb sync` makes one run.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.config import MetricsSettings
from rollout.metrics.definitions import TOTALS
from rollout.metrics.samples import Histogram
from rollout.metrics.sinks import Report
from rollout.metrics.wandb_mode import wandb_mode
from rollout.process.announce import write_atomically

log = logging.getLogger(__name__)

VERSION = "weights/version"
_FOLDER = "runs"  # without `WANDB_DIR`
_FLUSH_S = 1.0  # W&B writes its file every 15 s: a process that is killed would lose that much


@dataclass(frozen=True, slots=True)
class ContinuedRun:
    """A run to which several processes log, in turn. `totals` is a file: the sums of all processes until now."""

    id: str
    totals: Path

    def earlier(self) -> dict[str, float]:
        """`total/...` of the processes before this one."""
        try:
            found: dict[str, float] = json.loads(self.totals.read_text())
        except FileNotFoundError:
            return {}
        return found


class WandbSink:
    """Logs to W&B: online if a key is configured, otherwise into a folder for `wandb sync`. Never prompts.

    The run begins with the first report, so a worker that ends earlier leaves no empty run.

    Args:
        settings: the project. W&B's own variables name the run, its group and its folder.
        config: settings to show with the run.
        name: the run's name, if `WANDB_NAME` has none.
        continued: the run to go on with; None: a new one.
    """

    at_once = False

    #: Without an answer from W&B's server for so many seconds the run continues offline.
    ONLINE_TIMEOUT_S = 30.0

    def __init__(
        self,
        settings: MetricsSettings,
        config: Mapping[str, Any],
        name: str | None = None,
        continued: ContinuedRun | None = None,
    ) -> None:
        self._settings = settings
        self._config = dict(config)
        self._name = os.environ.get("WANDB_NAME") or name
        self._continued = continued
        self._earlier = {} if continued is None else continued.earlier()
        self._run: Any = None
        #: Address of an online run, folder of an offline one; None before the first report and for a disabled run.
        self.run_path: str | None = None

    def open(self) -> None:
        """Nothing: the run begins with the first report."""

    def _begin(self) -> None:
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

        folder = Path(os.environ.get("WANDB_DIR") or _FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        if mode == "online":
            quiet.init_timeout = self.ONLINE_TIMEOUT_S
        if "x_transaction_log_flush_interval" in wandb.Settings.model_fields:  # older releases write at once
            quiet.x_transaction_log_flush_interval = _FLUSH_S
        return wandb.init(
            project=self._settings.wandb_project,
            name=self._name,
            dir=str(folder),
            config=self._config,
            mode=mode,  # type: ignore[arg-type]
            id=None if self._continued is None else self._continued.id,
            resume=None if self._continued is None else "allow",
            settings=quiet,
        )

    def write(self, report: Report) -> None:
        """Log a row for each ended version, then a row for the report; the summary has the run's totals until now."""
        if self._run is None:
            self._begin()
        for row in report.versions:
            self._run.log({VERSION: row.version, **row.metrics})
        shown = {**report.metrics, **_shown(report.histograms)}
        if not report.final:
            # W&B drops reports whose step does not grow: an idle worker's, if `step` were W&B's own step.
            self._run.log({"step": report.step, **shown})
            shown = {}
        totals = {metric.name: report.totals[metric.name] for metric in TOTALS if metric.name in report.totals}
        whole = {name: value + self._earlier.get(name, 0) for name, value in totals.items()}
        self._run.summary.update({**shown, **report.totals, **whole})
        if self._continued is not None and whole:
            write_atomically(self._continued.totals, json.dumps(whole))

    def close(self) -> None:
        """Finish the run; its file is complete when this returns. Also ends W&B in this process."""
        if self._run is None:
            return
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
