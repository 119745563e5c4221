"""The meter: what each metric counts, and that it stays small and quick."""

import random
import time
import tracemalloc

import pytest

from rollout.metrics.definitions import METRICS
from rollout.metrics.logprob_mismatch import MismatchSums
from rollout.metrics.meter import Meter
from rollout.metrics.step_timing import StepTiming
from tests.support.clock import Clock
from tests.support.reported_metrics import needs_no_drafts


def record(start_s: float, end_s: float, kind: str = "decode", **values: object) -> StepTiming:
    base: dict = dict(rows=4, zombie_rows=0, tokens=4, plan_s=0.0, launch_s=0.0, commit_s=0.0, version=0)
    return StepTiming(kind=kind, start_s=start_s, end_s=end_s, **(base | values))


def test_report_has_exactly_the_documented_metrics_also_when_nothing_ran():
    clock = Clock()
    meter = Meter(clock)
    names = [metric.name for metric in METRICS]
    always = [name for name in names if not name.startswith("mismatch/") and needs_no_drafts(name)]
    assert list(meter.report()) == always
    clock.now += 5
    report = meter.report()
    assert list(report) == always
    no_work = {"gpu/bubble_pct/no_work", "gpu/run/bubble_pct/no_work"}
    assert {name for name, value in report.items() if value} == no_work | {"speculation/tokens_a_step"}
    meter.mismatch(MismatchSums())
    assert list(meter.report()) == always, "a report of a trainer that knew nothing"
    meter.mismatch(MismatchSums(1, 0.5, 1.0, 1.0))
    meter.set({name: 50.0 for name in names if not needs_no_drafts(name)})
    assert list(meter.report()) == list(meter.totals())[: len(names)] == names


def test_active_is_the_share_of_wall_time_that_the_stream_ran():
    clock = Clock()
    meter = Meter(clock)
    for i in range(40):  # 30 ms of every 50 ms
        meter.step(record(100 + i * 0.05, 100 + i * 0.05 + 0.03))
    clock.now = 102.0
    assert meter.report()["gpu/active_pct"] == pytest.approx(60.0)
    assert meter.totals()["gpu/active_pct"] == pytest.approx(60.0)


def test_the_wait_for_masks_amid_a_step_is_no_work_of_the_device():
    clock = Clock()
    meter = Meter(clock)
    began = clock.now
    meter.step(record(began, began + 0.4, mask_wait=(began + 0.1, began + 0.3)))
    clock.now = began + 0.4
    report = meter.report()
    assert report["gpu/active_pct"] == pytest.approx(50.0) == report["gpu/bubble_pct/host"]
    assert report["step/decode_ms"] == pytest.approx(200.0)


def test_overlapping_spans_count_once():
    clock = Clock()
    meter = Meter(clock)
    meter.step(record(100.0, 100.6))
    meter.step(record(100.4, 101.0))
    meter.step(record(100.5, 100.9))
    clock.now = 102.0
    assert meter.report()["gpu/active_pct"] == pytest.approx(50.0)


def test_a_span_from_before_the_meter_began_counts_from_there():
    clock = Clock()
    meter = Meter(clock)
    meter.step(record(98.0, 101.0))
    clock.now = 102.0
    assert meter.report()["gpu/active_pct"] == pytest.approx(50.0)


def test_activity_older_than_the_window_is_forgotten_but_stays_in_the_totals():
    clock = Clock()
    meter = Meter(clock)
    meter.step(record(100.0, 110.0))
    clock.now = 120.2
    assert meter.report()["gpu/active_pct"] == 0.0
    assert meter.totals()["gpu/active_pct"] == pytest.approx(100 * 10 / 20.2)


def test_a_step_longer_than_the_window_fills_it():
    clock = Clock()
    meter = Meter(clock)
    meter.step(record(100.0, 160.0))
    clock.now = 160.0
    assert meter.report()["gpu/active_pct"] == pytest.approx(100.0, abs=1.1)
    assert meter.totals()["gpu/active_pct"] == pytest.approx(100.0)


def test_window_agrees_with_the_union_of_spans_computed_afresh():
    draw = random.Random(5)
    clock = Clock()
    meter = Meter(clock)
    spans, at = [], 100.0
    while at < 190.0:
        start = at + draw.choice([0.0, draw.uniform(0, 0.02), draw.uniform(0, 3.0)])
        at = start + draw.choice([draw.uniform(0, 0.01), draw.uniform(0, 0.8)])
        spans.append((start, at))
        meter.step(record(start, at))
        clock.now = at + draw.uniform(0, 0.05)
        begin = max(100.0, (int(clock.now / 0.1) - 99) * 0.1)
        busy = sum(max(0.0, end - max(first, begin)) for first, end in spans)
        assert meter.rates()[0] == pytest.approx(100 * busy / (clock.now - begin), abs=0.2)


def test_tokens_per_s_is_of_the_interval_and_a_report_ends_it():
    clock = Clock()
    meter = Meter(clock)
    meter.step(record(100.0, 100.1, tokens=30))
    clock.now = 102.0
    assert meter.report()["rollout/tokens_per_s"] == 15.0
    clock.now = 104.0
    assert meter.report()["rollout/tokens_per_s"] == 0.0
    assert meter.totals()["rollout/tokens_per_s"] == 7.5


def test_rates_end_no_interval():
    clock = Clock()
    meter = Meter(clock)
    meter.step(record(100.0, 101.0, tokens=30))
    clock.now = 102.0
    assert meter.rates() == pytest.approx((50.0, 15.0))
    assert meter.report()["rollout/tokens_per_s"] == 15.0


def test_zombies_are_a_share_of_launched_rows():
    meter = Meter(Clock())
    meter.step(record(100.0, 100.1, rows=6, zombie_rows=0, tokens=6))
    meter.step(record(100.1, 100.2, rows=4, zombie_rows=1, tokens=3))
    assert meter.report()["rollout/zombie_rows_pct"] == 10.0


def test_step_times_are_means_by_kind_in_milliseconds():
    meter = Meter(Clock())
    meter.step(record(100.0, 100.010, plan_s=0.001, launch_s=0.002, commit_s=0.003))
    meter.step(record(100.1, 100.120, plan_s=0.001, launch_s=0.002, commit_s=0.001))
    meter.step(record(100.2, 100.300, kind="prefill"))
    report = meter.report()
    assert report["step/decode_ms"] == pytest.approx(15.0)
    assert report["step/prefill_ms"] == pytest.approx(100.0)
    assert report["step/bookkeeping_ms"] == pytest.approx(10 / 3)


def test_a_metric_without_a_sample_keeps_its_last_value():
    meter = Meter(Clock())
    meter.step(record(100.0, 100.010, rows=2, zombie_rows=1))
    meter.completion(100)
    meter.swap(100.05, 100.054, 3)
    before = meter.report()
    after = meter.report()
    for name in ("step/decode_ms", "rollout/zombie_rows_pct", "completion/length_mean", "weights/swap_pause_ms"):
        assert after[name] == before[name] != 0
    meter.step(record(100.1, 100.130))
    assert meter.report()["step/decode_ms"] == pytest.approx(30.0)


def test_swaps_completions_and_gauges_arrive_in_the_report():
    meter = Meter(Clock(), version=7)
    assert meter.report()["weights/version"] == 7
    meter.swap(100.0, 100.002, 8)
    meter.swap(101.0, 101.005, 9)
    meter.completion(10)
    meter.completion(20)
    meter.set({"rollout/rows": 3, "queue/waiting": 2, "kv/used_pct": 25.0})
    meter.set({"rollout/rows": 5})
    meter.add("kv/preemptions")
    meter.add("kv/preemptions", 3)
    report = meter.report()
    assert report["weights/version"] == 9
    assert report["weights/swap_pause_ms"] == pytest.approx(5.0)
    assert report["completion/length_mean"] == 15.0
    assert (report["rollout/rows"], report["queue/waiting"]) == (5, 2)
    assert (report["kv/used_pct"], report["kv/session_pct"], report["kv/preemptions"]) == (25.0, 0, 4)
    totals = meter.totals()
    assert (totals["total/swaps"], totals["total/completions"]) == (2, 2)
    for unknown in ("rollout/row", "step/decode_ms"):
        with pytest.raises(AssertionError, match=unknown):
            meter.set({unknown: 3})


def test_totals_cover_all_intervals():
    clock = Clock()
    meter = Meter(clock)
    for i in range(10):
        meter.step(record(clock.now, clock.now + 0.1, kind="prefill" if i == 0 else "decode"))
        clock.now += 1.0
        meter.report()
    assert meter.steps == 10
    totals = meter.totals()
    assert (totals["total/tokens"], totals["total/decode_steps"], totals["total/prefill_steps"]) == (40, 9, 1)
    assert totals["total/wall_s"] == 10.0
    assert totals["gpu/active_pct"] == pytest.approx(10.0)


def test_recent_steps_are_the_last_ones_oldest_first():
    meter = Meter(Clock(), keep_steps=3)
    for i in range(5):
        meter.step(record(100 + i, 100.5 + i))
    assert [step.start_s for step in meter.recent_steps()] == [102.0, 103.0, 104.0]


def traced_bytes() -> int:
    """What the meter and this test have allocated, and no thread of another test."""
    ours = [tracemalloc.Filter(True, f"*{folder}*") for folder in ("/rollout/metrics/", "/unit/metrics/", "<string>")]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)


def test_memory_does_not_grow_with_steps():
    meter = Meter(Clock(), keep_steps=100)

    def run(first: int, count: int) -> None:
        for i in range(first, first + count):
            meter.step(record(100 + i * 0.01, 100 + i * 0.01 + 0.008))
            meter.completion(i % 3000)

    run(0, 3000)
    tracemalloc.start()
    try:
        run(3000, 1000)
        before = traced_bytes()
        run(4000, 5000)
        grown = traced_bytes() - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000  # bytes; a number kept for each step takes 120,000


def test_a_step_costs_microseconds():
    meter = Meter(Clock())
    records = [record(100 + i * 0.01, 100 + i * 0.01 + 0.008) for i in range(2000)]
    best = float("inf")
    for first in range(0, 2000, 200):
        began = time.thread_time()  # others use the machine, too
        for one in records[first : first + 200]:
            meter.step(one)
        best = min(best, (time.thread_time() - began) / 200)
    assert best < 40e-6  # 4 us on a slow core; with what grows with the steps it would be far more
