"""The timeline picture: where its bars lie, and what it does without steps."""

from __future__ import annotations

import struct

import pytest

from rollout.metrics.step_timing import StepTiming
from rollout.metrics.timeline import bars, idle_pct, write_timeline


def step(kind: str, start_s: float, end_s: float, **values: object) -> StepTiming:
    base: dict = dict(rows=2, zombie_rows=0, tokens=2, plan_s=0.001, launch_s=0.002, commit_s=0.003, version=0)
    return StepTiming(kind=kind, start_s=start_s, end_s=end_s, **(base | values))


STEPS = [
    step("prefill", 10.00, 10.05, h2d=(9.99, 9.995), d2h=(10.05, 10.051)),
    step("decode", 10.05, 10.06, h2d=(10.01, 10.012), d2h=(10.06, 10.061)),
    step("decode", 10.08, 10.10, planned_at_s=10.04, committed_at_s=10.2),
]


def test_bubbles_are_the_gaps_between_steps():
    drawn = bars(STEPS)
    assert drawn["bubble"] == [(10.06, pytest.approx(0.02))]
    assert idle_pct(drawn) == pytest.approx(20.0)


def test_a_wait_for_masks_is_a_bubble_amid_a_step():
    drawn = bars([step("decode", 10.0, 10.1, mask_wait=(10.02, 10.08))])
    assert drawn["decode"] == [(10.0, pytest.approx(0.02)), (10.08, pytest.approx(0.02))]
    assert drawn["bubble"] == [(10.02, pytest.approx(0.06))]


def test_each_kind_of_work_has_its_bars():
    drawn = bars(STEPS)
    assert drawn["prefill"] == [(10.0, pytest.approx(0.05))]
    assert [begin for begin, _ in drawn["decode"]] == [10.05, 10.08]
    assert [begin for begin, _ in drawn["h2d"]] == [9.99, 10.01]
    assert len(drawn["d2h"]) == 2


def test_host_phases_lie_where_they_were_measured_and_next_to_the_copies_otherwise():
    drawn = bars(STEPS)
    assert drawn["plan"][0] == (pytest.approx(9.99 - 0.003), 0.001)
    assert drawn["launch"][0] == (pytest.approx(9.99 - 0.002), 0.002)
    assert drawn["commit"][0] == (10.051, 0.003)
    assert drawn["plan"][2][0] == 10.04
    assert drawn["launch"][2][0] == pytest.approx(10.041)
    assert drawn["commit"][2][0] == 10.2


def test_png_is_written_with_its_folder(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "pictures" / "steps.png"
    write_timeline(STEPS, path, "three steps")
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert width > 800 and height > 200


def test_no_steps_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        write_timeline([], tmp_path / "x.png", "none")


def test_missing_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"rollout-engine\[plot\]"):
        write_timeline(STEPS, tmp_path / "x.png", "none")
    assert not (tmp_path / "x.png").exists()
