"""Histograms of lengths and rows by version: what they count, and how each sink shows them."""

import json
import random
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout.metrics.definitions import VERSION_METRICS
from rollout.metrics.meter import Meter
from rollout.metrics.prometheus import Health, PrometheusSink
from rollout.metrics.samples import SECONDS, TOKENS, HistogramCounts
from rollout.metrics.sinks import JsonlSink, MetricsThread, Report
from rollout.metrics.step_timing import StepTiming
from tests.support.clock import Clock

BASE: dict = dict(kind="decode", rows=2, zombie_rows=0, tokens=2, plan_s=0.0, launch_s=0.0, commit_s=0.0, version=0)


def test_every_length_is_in_the_bucket_that_holds_it():
    largest = TOKENS.bounds[-1]
    draw = random.Random(4)
    lengths = [0, 1, 2, 3, 5, 4096, 4097, 16_384, largest, largest + 5] + [draw.randrange(1 << 20) for _ in range(500)]
    counts = HistogramCounts(TOKENS)
    for length in lengths:
        counts.add(length)
    reading = counts.read()
    assert reading.run_sum == sum(lengths)
    for low, high, count in reading.filled():
        top = high if high < largest else largest + 5
        assert count == sum(low <= length <= top for length in lengths)
    assert sum(count for _, _, count in reading.filled()) == len(lengths)
    shown, edges = reading.edges()
    assert len(edges) == len(shown) + 1 and sum(shown) == len(lengths) and edges[0] == -0.5
    assert all(a < b for a, b in zip(edges, edges[1:], strict=False))


def test_a_reading_ends_the_interval_and_the_run_goes_on():
    counts = HistogramCounts(TOKENS)
    counts.add(5)
    assert list(counts.read().filled()) == [(5, 6, 1)]
    counts.add(100)
    second = counts.read()
    assert list(second.filled()) == [(97, 128, 1)] and second.edges() == ([1], [96.5, 128.5])
    assert list(second.whole_run().filled()) == [(5, 6, 1), (97, 128, 1)]
    assert counts.read().edges() == ([], [])


def test_seconds_are_counted_by_decade_up_to_their_bound():
    counts = HistogramCounts(SECONDS)
    for seconds in (0.0, 0.001, 0.0011, 3.0, 5.0, 1e9):
        counts.add(seconds)
    reading = counts.read()
    assert list(reading.filled()) == [(0, 0.001, 2), (0.001, 0.0025, 1), (2.5, 5.0, 2), (25_000.0, 50_000.0, 1)]
    shown, edges = reading.edges()
    assert len(edges) == len(shown) + 1 and edges[:2] == [0.0, 0.001] and edges[-1] == 50_000.0


def reported(meter: Meter) -> Report:
    return Report(0.0, meter.steps, meter.report(), False, meter.histograms(), meter.ended_versions())


def test_jsonl_has_buckets_with_something_in_them_and_versions_that_ended(tmp_path):
    clock = Clock()
    meter, path = Meter(clock, version=3), tmp_path / "metrics.jsonl"
    thread = MetricsThread([JsonlSink(path)])
    thread.start()
    for lengths, swap in (((10, 11, 900), False), ((), True)):
        for length in lengths:
            meter.completion(length)
        clock.now += 5.0
        if swap:
            meter.swap(clock.now - 0.01, clock.now, 4)
        thread.put(1, meter.report(), histograms=meter.histograms(), versions=meter.ended_versions())
    assert thread.close(deadline_s=60)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["completion/length"] == [[9, 12, 2], [769, 1024, 1]] and "versions" not in first
    assert "completion/length" not in second
    (row,) = second["versions"]
    assert row["version"] == 3 and row["by_version/serving_s"] == pytest.approx(10.0)


def test_prometheus_has_a_histogram_since_the_start():
    meter = Meter(Clock())
    sink = PrometheusSink("127.0.0.1", 0, "m", Health())
    try:
        for lengths in ((3, 3, 900), (20_000_000,)):
            for length in lengths:
                meter.completion(length)
            meter.observe("request/seconds", 3.0)
            sink.write(reported(meter))
        text = urllib.request.urlopen(sink.url, timeout=60).read().decode()
    finally:
        sink.close()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    histogram = families["rollout_completion_length"]
    assert histogram.type == "histogram" and families["rollout_completion_length_mean"].type == "gauge"
    values = {
        (sample.name.removeprefix("rollout_completion_length"), sample.labels.get("le")): sample.value
        for sample in histogram.samples
    }
    buckets = {le: value for (name, le), value in values.items() if name == "_bucket"}
    assert (buckets["2.0"], buckets["4.0"], buckets["512.0"], buckets["1024.0"]) == (0, 2, 2, 3)
    assert buckets["8388608.0"] == 3 and buckets["+Inf"] == values["_count", None] == 4
    assert values["_sum", None] == 20_000_906 and len(buckets) == 25
    assert list(buckets.values()) == sorted(buckets.values())
    seconds = {
        sample.labels["le"]: sample.value for sample in families["rollout_request_seconds"].samples if sample.labels
    }
    assert (seconds["2.5"], seconds["5.0"], seconds["+Inf"]) == (0, 2, 2)


def test_each_version_has_a_row():
    clock = Clock()
    meter = Meter(clock, version=7)
    assert meter.ended_versions() == ()
    for i in range(10):
        meter.step(StepTiming(start_s=100 + i, end_s=100.5 + i, **BASE))
    meter.completion(50, "stop", 1)
    meter.completion(70, "stop", 0)
    clock.now = 110.0
    meter.swap(109.75, 110.0, 8)
    meter.step(StepTiming(start_s=110.0, end_s=111.0, **BASE))
    clock.now = 112.0
    meter.swap(111.5, 112.0, 9)
    first, second = meter.ended_versions()
    assert meter.ended_versions() == ()
    assert (first.version, second.version) == (7, 8)
    names = [metric.name for metric in VERSION_METRICS]
    assert sorted(first.metrics) == sorted(names)
    assert first.metrics == pytest.approx(
        {
            "by_version/serving_s": 10.0,
            "by_version/tokens": 20,
            "by_version/tokens_per_s": 2.0,
            "by_version/active_pct": 50.0,
            "by_version/decode_ms": 500.0,
            "by_version/completions": 2,
            "by_version/completion_length": 60.0,
            "by_version/version_span": 0.5,
            "by_version/swap_pause_ms": 0.0,
        }
    )
    assert second.metrics["by_version/swap_pause_ms"] == pytest.approx(250.0)
    assert "by_version/completion_length" not in second.metrics, "nothing finished"
    clock.now = 113.0
    (last,) = meter.ended_versions(and_this=True)
    assert (last.version, last.metrics["by_version/tokens"], last.metrics["by_version/serving_s"]) == (9, 0, 1.0)


def test_rows_that_are_not_taken_are_bounded():
    meter = Meter(Clock())
    for version in range(1, 1000):
        meter.swap(100.0, 100.0, version)
    rows = meter.ended_versions()
    assert len(rows) == 256 and rows[-1].version == 998
