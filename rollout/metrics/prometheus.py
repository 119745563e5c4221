"""The metrics port: the last report as a page for Prometheus, and whether the worker serves, over plain HTTP.

    GET /metrics   the last report; before the first one only `rollout_worker_info`
    GET /health    200 while the worker serves, otherwise 503 and the reason

Threads of their own answer from the last report. A scrape never touches the loop, however slow or frequent it is, and a
sink that blocks (W&B, a file) does not delay the page. Histograms count since the start.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from http.server import ThreadingHTTPServer
from itertools import accumulate
from threading import Thread
from typing import Any

from rollout.metrics.definitions import HISTOGRAMS, METRICS, Metric
from rollout.metrics.samples import Histogram
from rollout.metrics.sinks import Report
from trainer_bridge.wire.address import bare, host_port, resolve


class Health:
    """Whether the worker serves; it answers from the moment the port is open, which is before the model is loaded.

    The threads of the metrics port call `reason`; the worker calls `watch` once it takes requests.
    """

    def __init__(self) -> None:
        self._ask: Callable[[], str] = _starting

    def watch(self, ask: Callable[[], str]) -> None:
        """Set `ask`, which returns why the worker does not serve, or an empty string if it does."""
        self._ask = ask

    def reason(self) -> str:
        """Why the worker does not serve; empty if it does. Any thread may call this."""
        return self._ask()


def _starting() -> str:
    return "the worker is starting"


_PREFIX = "rollout_"


def prometheus_name(metric: Metric) -> str:
    """The name of a metric on the page: with the prefix `rollout_`, `_` for `/`, and `_total` after a counter."""
    name = _PREFIX + metric.name.replace("/", "_").removeprefix(_PREFIX)
    return f"{name}_total" if metric.kind == "counter" else name


class PrometheusSink:
    """Serves the metrics port from its construction until `close`.

    Args:
        host: address to listen at.
        port: 0 picks a free one.
        model: name of the model, a label of `rollout_worker_info`.
        health: answers `/health`.
        metrics: what the page shows beside histograms.

    Raises:
        ValueError: the address cannot be bound.
    """

    #: `write` is an assignment: the loop does it.
    at_once = True

    def __init__(self, host: str, port: int, model: str, health: Health, metrics: Sequence[Metric] = METRICS) -> None:
        self._latest: Report | None = None
        self._model, self._metrics = model, metrics
        host = bare(host)
        try:
            self._server = _server(host, port, self, health)
        except OSError as error:
            raise ValueError(
                f"cannot serve metrics at {host_port(host, port)}: {error.strerror or error}; choose another "
                "metrics_port (0 picks a free one) or metrics_host"
            ) from error
        self._thread = Thread(target=self._server.serve_forever, name="metrics-port", daemon=True)
        self._thread.start()
        #: Address of the page.
        self.url = f"http://{host_port(host, self._server.server_port)}/metrics"

    def open(self) -> None:
        """No-op: the port is open."""

    def write(self, report: Report) -> None:
        """Show this report from now on."""
        self._latest = report

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """The families of the page; `prometheus_client` calls this at each scrape, on the scrape's thread."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        yield InfoMetricFamily(f"{_PREFIX}worker", "model that this worker serves", {"model": self._model})
        report = self._latest
        if report is None:
            return
        yield GaugeMetricFamily(f"{_PREFIX}report_time_s", "Unix time of the report on this page; s", report.time_s)
        yield GaugeMetricFamily(f"{_PREFIX}report_step", "steps committed at the time of the report", report.step)
        for metric in self._metrics:
            if metric.name in report.metrics:
                family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                yield family(prometheus_name(metric), _about(metric), report.metrics[metric.name])
        for metric in HISTOGRAMS:
            if (histogram := report.histograms.get(metric.name)) is not None:
                buckets = _cumulative(histogram)
                name = prometheus_name(metric)
                yield HistogramMetricFamily(name, _about(metric), buckets, sum_value=histogram.run_sum)


def _about(metric: Metric) -> str:
    return f"{metric.meaning}; {metric.unit}"


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus' buckets: (bound, number of values up to it). Of whole numbers only the octaves, from 1."""
    bounds, whole = histogram.buckets.bounds, histogram.buckets.whole
    sums = list(accumulate(histogram.run_counts))
    shown = [
        (str(float(bound)), float(below))
        for bound, below in zip(bounds[:-1], sums[:-1], strict=True)
        if not whole or _is_octave(int(bound))
    ]
    return [*shown, ("+Inf", float(sums[-1]))]


def _is_octave(bound: int) -> bool:
    return bound > 0 and bound & (bound - 1) == 0


def _server(host: str, port: int, collector: PrometheusSink, health: Health) -> ThreadingHTTPServer:
    """The bound server; the caller runs it."""
    from prometheus_client import CollectorRegistry, MetricsHandler

    page = CollectorRegistry(auto_describe=False)
    page.register(collector)  # type: ignore[arg-type]

    class Handler(MetricsHandler):
        registry = page

        def do_GET(self) -> None:  # noqa: N802
            path = self.path.partition("?")[0]
            if path == "/metrics":
                super().do_GET()
            elif path == "/health":
                reason = health.reason()
                self._answer(503 if reason else 200, reason or "serving")
            else:
                self._answer(404, "this port has /metrics and /health")

        def _answer(self, status: int, text: str) -> None:
            body = f"{text}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class MetricsHttpServer(ThreadingHTTPServer):
        address_family = resolve(host, port, socket.SOCK_STREAM)[0][0]

    return MetricsHttpServer((host, port), Handler)
