"""Where reports go: a JSON-lines file and Weights & Biases, both written by one thread.

The loop only puts reports into a bounded queue: it never waits for a file, a network or W&B. A report that finds the
queue full is dropped and counted. A sink that raises is logged once and left out from then on; the others go on.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollout.config import MetricsSettings
from rollout.metrics.wandb_mode import wandb_mode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """One set of metrics."""

    time_s: float  # Unix time
    step: int  # steps committed so far
    metrics: Mapping[str, float]
    final: bool = False  # over the whole run, at its end


class Sink(Protocol):
    """Takes reports; all methods are called by the metrics thread, in this order. Any of them may raise or block."""

    def open(self) -> None:
        """Get ready."""

    def write(self, report: Report) -> None:
        """Take one report."""

    def close(self) -> None:
        """Finish what was written."""


class JsonlSink:
    """Appends a line a report: `time`, `step`, the metrics, and `final: true` in the last one."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: Any = None

    def open(self) -> None:
        """Open the file to append, making its folder if needed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, report: Report) -> None:
        """Append one line; it is in the file when this returns."""
        line: dict[str, Any] = {"time": report.time_s, "step": report.step, **report.metrics}
        if report.final:
            line["final"] = True
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
        #: The run's address when it is online, its folder when it is offline; None before `open` has returned.
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
        # `dir` is the run's subfolder for files. A run that is disabled has neither address nor folder.
        online = not self._run.offline and not self._run.disabled
        self.run_path = self._run.url if online else str(Path(self._run.dir).parent)

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
        """Log the report as one history row; the final one as the run's summary."""
        if report.final:
            self._run.summary.update(dict(report.metrics))
        else:
            # `step` is a value like the others: as W&B's own step it would lose the reports of an idle worker, which
            # has committed nothing since the last one.
            self._run.log({"step": report.step, **report.metrics})

    def close(self) -> None:
        """Finish the run; its file is whole when this returns. Ends W&B in this process, which has no other run."""
        import wandb

        self._run.finish()
        wandb.teardown()  # `finish` returns before W&B's own process has written the file


class MetricsThread:
    """The thread that feeds the sinks.

    Args:
        sinks: written to in turn.
        capacity: reports that may wait.
    """

    def __init__(self, sinks: Sequence[Sink], capacity: int = 64) -> None:
        self._sinks: list[Sink] = list(sinks)
        # One place more than `put` fills, so that `close` finds room for its end mark while a sink blocks.
        self._queue: queue.Queue[Report | None] = queue.Queue(capacity + 1)
        self._capacity = capacity
        self._thread = threading.Thread(target=self._main, name="metrics", daemon=True)
        self._closing = False
        #: Reports that found the queue full.
        self.dropped = 0

    def start(self) -> None:
        """Start the thread, which opens the sinks."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def put(self, step: int, metrics: Mapping[str, float], *, final: bool = False) -> bool:
        """Hand a report over; False if it was dropped. Never blocks. To be called by one thread."""
        assert not self._closing, "a report after close()"
        if self._queue.qsize() >= self._capacity:
            self.dropped += 1
            return False
        self._queue.put_nowait(Report(time.time(), step, metrics, final))
        return True

    def close(self, deadline_s: float) -> bool:
        """Write what waits and close the sinks; False if that took longer than `deadline_s` and was left behind."""
        assert not self._closing, "closed twice"
        self._closing = True
        self._queue.put_nowait(None)
        self._thread.join(deadline_s)
        if self.dropped:
            log.warning("%d metric reports were dropped because a sink was too slow", self.dropped)
        if self._thread.is_alive():
            log.warning("metrics: a sink did not finish within %g s, its last reports are lost", deadline_s)
            return False
        return True

    def _main(self) -> None:
        self._each("open")
        while (report := self._queue.get()) is not None:
            self._each("write", report)
        self._each("close")

    def _each(self, method: str, *arguments: Report) -> None:
        working = []
        for sink in self._sinks:
            try:
                getattr(sink, method)(*arguments)
            except Exception:
                # Metrics are never worth a rollout: whatever a sink raises ends that sink alone.
                log.exception("metrics: %s failed to %s and is left out from now on", type(sink).__name__, method)
            else:
                working.append(sink)
        self._sinks = working
