"""The thread that writes reports to all sinks, and the JSON-lines file.

The loop only puts reports into a bounded queue: it never waits for a file, a network or W&B. A report that finds the
queue full is dropped and counted. A sink that raises is logged once and gets no more reports; the others go on. A sink
whose `write` is an assignment (`at_once`) gets each report in `put`, however slow other sinks are.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollout.metrics.by_version import VersionRow
from rollout.metrics.definitions import TOTALS
from rollout.metrics.samples import Histogram

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """One set of metrics."""

    time_s: float  # Unix time
    step: int  # steps committed so far
    metrics: Mapping[str, float]
    final: bool = False  # over the whole run, at its end
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    versions: tuple[VersionRow, ...] = ()  # rows of the versions that ended since the last report
    totals: Mapping[str, float] = field(default_factory=dict)  # over the run so far


class Sink(Protocol):
    """Takes reports. The metrics thread calls all methods, in this order; any of them may raise or block."""

    #: True if `write` is an assignment: then the loop calls it in `put`.
    at_once: bool

    def open(self) -> None:
        """Prepare for the first report."""

    def write(self, report: Report) -> None:
        """Take one report."""

    def close(self) -> None:
        """Complete what was written."""


class JsonlSink:
    """Appends one line for each report: `time`, `step`, the metrics, `total/...`, and `final: true` in the last one.

    A histogram is a list of `[begin, bound, count]`, one for each filled bucket; without any it is left out. `versions`
    is a list of maps, one for each version that ended; without any it is left out.
    """

    at_once = False

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: Any = None

    def open(self) -> None:
        """Open the file to append to it, and make its folder if needed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, report: Report) -> None:
        """Append one line; it is in the file when this returns."""
        line: dict[str, Any] = {"time": report.time_s, "step": report.step, **report.metrics}
        line |= {metric.name: report.totals[metric.name] for metric in TOTALS if metric.name in report.totals}
        for name, histogram in report.histograms.items():
            if filled := [list(bucket) for bucket in histogram.filled()]:
                line[name] = filled
        if report.versions:
            line["versions"] = [{"version": row.version} | row.metrics for row in report.versions]
        if report.final:
            line["final"] = True
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricsThread:
    """The thread that feeds the sinks.

    Args:
        sinks: each report is written to all of them in turn.
        capacity: reports that may wait.
    """

    def __init__(self, sinks: Sequence[Sink], capacity: int = 64) -> None:
        self._sinks: list[Sink] = list(sinks)
        self._at_once = [sink for sink in sinks if sink.at_once]
        # One place more than `put` fills, so that `close` finds room for its end mark while a sink blocks.
        self._queue: queue.Queue[Report | None] = queue.Queue(capacity + 1)
        self._capacity = capacity
        self._thread = threading.Thread(target=self._main, name="metrics", daemon=True)
        self._closing = False
        #: Reports that found the queue full.
        self.dropped = 0
        #: The last report that was put; any thread may read it.
        self.latest: Report | None = None

    def start(self) -> None:
        """Start the thread, which opens the sinks."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def put(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        final: bool = False,
        histograms: Mapping[str, Histogram] | None = None,
        versions: tuple[VersionRow, ...] = (),
        totals: Mapping[str, float] | None = None,
    ) -> bool:
        """Queue a report; False if it was dropped. Never blocks. Only one thread may call this."""
        assert not self._closing, "a report after close()"
        self.latest = report = Report(time.time(), step, metrics, final, histograms or {}, versions, totals or {})
        for sink in self._at_once:
            sink.write(report)
        if self._queue.qsize() >= self._capacity:
            self.dropped += 1
            return False
        self._queue.put_nowait(report)
        return True

    def close(self, deadline_s: float) -> bool:
        """Write the queued reports and close the sinks; False if that is not done within `deadline_s`."""
        assert not self._closing, "closed twice"
        self._closing = True
        self._queue.put_nowait(None)
        self._thread.join(deadline_s)
        if self.dropped:
            log.warning("%d metric reports were dropped because a sink was too slow", self.dropped)
        if self._thread.is_alive():
            log.warning("metrics: a sink did not finish within %g s; its last reports are lost", deadline_s)
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
            if method == "write" and sink in self._at_once:
                working.append(sink)
                continue
            try:
                getattr(sink, method)(*arguments)
            except Exception:
                # Metrics are never worth a rollout: whatever a sink raises ends that sink alone.
                log.exception("metrics: %s failed to %s and gets no more reports", type(sink).__name__, method)
            else:
                working.append(sink)
        self._sinks = working
