"""Who works when: spans of host and device from step records, their overlap, and the picture of it."""

import pytest

from rollout.metrics.overlap import device_intervals, host_intervals, merged, overlap, write_overlap
from rollout.metrics.step_timing import StepTiming
from scripts.bench.profiled_steps import active_share


def step(planned: float, start: float, end: float, committed: float) -> StepTiming:
    base: dict = dict(kind="decode", rows=2, zombie_rows=0, tokens=2, plan_s=0.01, launch_s=0.02, commit_s=0.05)
    return StepTiming(start_s=start, end_s=end, version=0, planned_at_s=planned, committed_at_s=committed, **base)


BLOCKING = [step(0.0, 0.03, 1.0, 1.1), step(1.2, 1.23, 2.2, 2.3)]
PIPELINED = [step(0.0, 0.03, 1.0, 1.1), step(0.04, 1.0, 2.0, 2.1), step(1.16, 2.0, 3.0, 3.1)]


def test_the_blocking_host_works_from_a_steps_outputs_to_the_next_launch():
    spans = [(round(begin, 6), round(end, 6)) for begin, end in host_intervals(BLOCKING)]
    assert spans == [(0.0, 0.03), (1.1, 1.23), (2.3, 2.35)]


def test_the_pipelines_host_waits_between_a_launch_and_the_next_commit():
    spans = host_intervals(PIPELINED)
    assert [round(begin, 3) for begin, _ in spans] == [0.0, 0.04, 1.1, 2.1, 3.1]
    assert [round(end, 3) for _, end in spans] == [0.03, 0.07, 1.19, 2.15, 3.15]


def test_active_share_is_that_of_the_steps_spans():
    assert active_share(PIPELINED) == pytest.approx(1.0)
    assert active_share(BLOCKING) == pytest.approx((0.97 + 0.97) / 2.17)


def test_every_moment_has_its_colour():
    device, host = [(0.0, 2.0), (5.0, 6.0)], [(1.0, 3.0)]
    assert overlap(device, host) == [
        ((0.0, 1.0), "device"),
        ((1.0, 2.0), "both"),
        ((2.0, 3.0), "host"),
        ((3.0, 5.0), "neither"),
        ((5.0, 6.0), "device"),
    ]


def test_touching_spans_are_one():
    assert merged([(1.0, 2.0), (0.0, 1.0), (3.0, 5.0), (4.0, 4.5)]) == [(0.0, 2.0), (3.0, 5.0)]


def test_the_picture_is_a_png_and_a_lane_without_steps_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    lanes = {
        name: (device_intervals(steps), host_intervals(steps)) for name, steps in (("a", BLOCKING), ("b", PIPELINED))
    }
    write_overlap(lanes, tmp_path / "x" / "overlap.png", "two lanes")
    assert (tmp_path / "x" / "overlap.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="at least one step"):
        write_overlap({"empty": ([], [])}, tmp_path / "none.png", "none")
