"""The last report as a page for Prometheus, over plain HTTP.

Threads of its own serve the page from the last report: a scrape never touches the loop, however slow or frequent, and a
sink that is stuck (W&B, a file) does not keep the page back. Names are those of the report, with `_` for `/`;
histograms count since the start. There is nothing but `worker_info` before the first report.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from rollout.metrics.histogram import BOUNDS, Histogram
from rollout.metrics.report import HISTOGRAMS, METRICS
from rollout.metrics.sinks import Report


def prometheus_name(metric: str) -> str:
    """The name of a metric on the page."""
    return metric.replace("/", "_")


class PrometheusSink:
    """Serves `http://HOST:PORT/metrics` from its construction until `close`.

    Args:
        host: address to listen at.
        port: 0 picks a free one.
        model: what is served, a label of `worker_info`.

    Raises:
        ValueError: the address cannot be bound.
    """

    #: `write` is an assignment: the loop does it.
    at_once = True

    def __init__(self, host: str, port: int, model: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._latest: Report | None = None
        self._model = model
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ValueError(
                f"cannot serve metrics at {host}:{port}: {error.strerror or error}; choose another metrics_port "
                "(0 picks a free one) or metrics_host"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        #: Where the page is.
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def open(self) -> None:
        """Nothing is left to do."""

    def write(self, report: Report) -> None:
        """Show this report from now on."""
        self._latest = report

    def close(self) -> None:
        """Serve no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """What `prometheus_client` asks for at each scrape, on the scrape's own thread."""
        from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("worker", "what this worker serves", {"model": self._model})
        report = self._latest
        if report is None:
            return
        yield GaugeMetricFamily("report_time_s", "Unix time of the report on this page, seconds", report.time_s)
        yield GaugeMetricFamily("report_step", "steps committed when that report was made", report.step)
        about = {metric.name: f"{metric.meaning}; {metric.unit}" for metric in METRICS}
        for name, value in report.metrics.items():
            yield GaugeMetricFamily(prometheus_name(name), about.get(name, name), value)
        about = {metric.name: f"{metric.meaning}, since the start; {metric.unit}" for metric in HISTOGRAMS}
        for name, histogram in report.histograms.items():
            buckets = _cumulative(histogram)
            yield HistogramMetricFamily(prometheus_name(name), about[name], buckets, sum_value=histogram.run_sum)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """What Prometheus has for buckets: how many are at most so large, with one for all. Every second bound, from 1."""
    sums = list(accumulate(histogram.run_counts))
    octaves = [
        (str(float(bound)), float(below))
        for bound, below in zip(BOUNDS[:-1], sums[:-1], strict=True)
        if _is_octave(bound)
    ]
    return [*octaves, ("+Inf", float(sums[-1]))]


def _is_octave(bound: int) -> bool:
    return bound > 0 and bound & (bound - 1) == 0
