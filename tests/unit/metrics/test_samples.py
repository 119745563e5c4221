"""Quantiles, speed-ups and samples of completions."""

import random

import pytest

from rollout.metrics.meter import Meter
from rollout.metrics.samples import Quantiles
from rollout.metrics.step_timing import StepTiming
from tests.support.clock import Clock


def step(start_s: float, device_s: float, host_s: float = 0.0, rows: int = 4, zombie_rows: int = 0) -> StepTiming:
    parts = dict(plan_s=host_s, launch_s=0.0, commit_s=0.0, version=0)
    return StepTiming(
        kind="decode", rows=rows, zombie_rows=zombie_rows, tokens=rows - zombie_rows,
        start_s=start_s, end_s=start_s + device_s, planned_at_s=start_s, **parts,
    )  # fmt: skip


def test_quantiles_are_right_to_one_percent_over_nine_orders_of_magnitude():
    draw = random.Random(3)
    values = [10 ** draw.uniform(-6, 3) for _ in range(5000)]
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    values.sort()
    for share in (0.01, 0.5, 0.99, 1.0):
        assert quantiles.value(share) == pytest.approx(values[round(share * 5000) - 1], rel=0.011)


def test_quantiles_keep_their_last_value_through_a_reset():
    quantiles = Quantiles()
    assert quantiles.value(0.5) == 0.0
    quantiles.add(0.0)  # an empty completion
    quantiles.add(7.0)
    assert quantiles.value(0.5) == 7.0, "a length that all have is not a token longer"
    quantiles.reset()
    assert quantiles.value(0.5) == 7.0
    merged = Quantiles()
    quantiles.add(9.0)
    merged.merge(quantiles)
    assert merged.value(0.5) == 9.0


def test_the_blocking_loop_is_observed_at_1_and_the_pipeline_at_what_it_gains():
    for overlapped, observed in ((False, 1.0), (True, 1.25)):
        clock = Clock()
        meter = Meter(clock)
        meter.no_work(clock.now)
        at = 101.0  # a second without work does not count
        for _ in range(40):
            meter.step(step(at, 0.04, host_s=0.01))
            at += 0.04 if overlapped else 0.05
        clock.now = at
        report = meter.report()
        assert report["pipeline/predicted_speedup"] == pytest.approx(0.05 / 0.04)
        assert report["pipeline/observed_speedup"] == pytest.approx(observed, abs=0.01)
        clock.now += 5.0
        assert meter.report()["pipeline/observed_speedup"] == pytest.approx(observed, abs=0.01)  # no step, no news


def test_swaps_and_offloads_do_not_count_as_time_lost_by_the_loop():
    clock = Clock()
    meter = Meter(clock)
    meter.step(step(100.0, 0.04, host_s=0.01))
    meter.swap(100.04, 100.54, 1)
    meter.offload(100.54, 101.04)
    meter.step(step(101.04, 0.04, host_s=0.01))
    clock.now = 101.08
    assert meter.report()["pipeline/observed_speedup"] == pytest.approx(0.1 / 0.08)


def test_zombies_are_taken_off_the_prediction():
    clock = Clock()
    meter = Meter(clock)
    meter.step(step(100.0, 0.04, host_s=0.01, rows=4, zombie_rows=1))
    clock.now = 101.0
    assert meter.report()["pipeline/predicted_speedup"] == pytest.approx(1.25 * 0.75)


def test_tokens_of_one_row_a_second():
    clock = Clock()
    meter = Meter(clock)
    for i in range(10):
        meter.step(step(100.0 + i / 10, 0.1, rows=4))
    clock.now = 101.0
    report = meter.report()
    assert (report["rollout/tokens_per_s"], report["rollout/tokens_per_s_per_row"]) == (40.0, 10.0)


def test_ends_are_counted_since_start_and_spans_are_means_of_the_interval():
    meter = Meter(Clock())
    for reason, span in (("stop", 0), ("stop", 2), ("length", 4)):
        meter.completion(100, reason, span)
    meter.swap(100.0, 100.1, 3, 1 << 20)
    first = meter.report()
    meter.completion(300, "cancelled", 0)
    second = meter.report()
    assert first["off_policy/version_span"] == 2.0 and second["off_policy/version_span"] == 0.0
    assert first["completion/finish_reason/stop"] == second["completion/finish_reason/stop"] == 2
    assert second["completion/finish_reason/cancelled"] == 1 and second["completion/finish_reason/error"] == 0
    assert second["completion/length_p99"] == pytest.approx(300, rel=0.011) and second["weights/bytes"] == 1 << 20
    assert meter.totals()["off_policy/version_span"] == 1.5
