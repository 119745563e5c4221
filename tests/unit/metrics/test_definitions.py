"""The declarations of the metrics: consistent in themselves, and enough to show a metric everywhere."""

import json
from pathlib import Path

from rollout.metrics.definitions import HISTOGRAMS, METRICS, TOTALS, VERSION_METRICS, Metric, Panel
from rollout.metrics.meter import Meter
from rollout.metrics.prometheus import Health, PrometheusSink, prometheus_name
from rollout.metrics.sinks import JsonlSink, MetricsThread
from tests.support.http_page import get

ROOT = Path(__file__).parents[3]
ALL_METRICS = (*METRICS, *HISTOGRAMS, *TOTALS, *VERSION_METRICS)


def test_names_are_unique_in_every_place_where_they_are_shown():
    assert len({metric.name for metric in ALL_METRICS}) == len(ALL_METRICS)
    shown = [prometheus_name(metric) for metric in (*METRICS, *HISTOGRAMS)]
    assert len(set(shown)) == len(shown)


def test_prometheus_names_have_the_prefix_and_counters_their_suffix():
    for metric in (*METRICS, *HISTOGRAMS):
        name = prometheus_name(metric)
        assert name.startswith("rollout_") and not name.startswith("rollout_rollout_")
        assert name.endswith("_total") == (metric.kind == "counter")
    names = {metric.name: prometheus_name(metric) for metric in (*METRICS, *HISTOGRAMS)}
    assert names["request/seconds"] == "rollout_request_seconds"
    assert names["queue/seconds"] == "rollout_queue_seconds"
    assert names["rollout/rows"] == "rollout_rows"
    assert names["kv/preemptions"] == "rollout_kv_preemptions_total"


def test_every_entry_has_a_unit_and_a_meaning():
    assert all(metric.unit and metric.meaning for metric in ALL_METRICS)


def test_an_entry_and_the_place_where_the_number_arises_are_enough(tmp_path: Path):
    entry = Metric("kv/evictions", "counter", "count", "pages that were evicted", Panel("New", "Evictions"))
    counted = Meter(metrics=(*METRICS, entry))
    counted.add("kv/evictions")  # the place where the number arises
    counted.add("kv/evictions", 2)
    page, path = PrometheusSink("127.0.0.1", 0, "m", Health(), (*METRICS, entry)), tmp_path / "metrics.jsonl"
    thread = MetricsThread([JsonlSink(path), page])
    thread.start()
    thread.put(1, counted.report())
    assert "rollout_kv_evictions_total 3.0" in get(page.url)[1]
    assert thread.close(deadline_s=60)
    assert json.loads(path.read_text())["kv/evictions"] == 3
