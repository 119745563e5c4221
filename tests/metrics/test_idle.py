"""The causes of idle time: each stretch between two steps goes to the one that held the stream."""

from __future__ import annotations

import random
import time

import pytest
import torch

from rollout.bench.driver import Driver
from rollout.bench.shapes import write_checkpoint
from rollout.config import EngineSettings, ModelSettings, Settings
from rollout.engine.device import CpuDevice
from rollout.engine.types import SamplingParams
from rollout.metrics import Meter, StepRecord
from rollout.metrics.idle import CAUSES, IdleCauses
from rollout.models import load_model


def causes(idle: IdleCauses) -> dict[str, float]:
    return {name: pytest.approx(value) for name in CAUSES if (value := getattr(idle.times, name)) > 1e-12}


def running() -> IdleCauses:
    """Steps have run without a gap until second 10."""
    idle = IdleCauses(9.0)
    idle.step("decode", 9.0, 9.0, 10.0)
    return idle


def test_a_decode_step_that_comes_late_leaves_a_bubble():
    idle = running()
    idle.step("decode", 10.1, 10.4, 11.0)
    assert causes(idle) == {"bubble": 0.4}


def test_preparing_a_prefill_is_told_apart():
    idle = running()
    idle.step("prefill", 10.1, 10.3, 11.0)
    assert causes(idle) == {"prefill": 0.3}


def test_time_without_requests_ends_when_planning_begins():
    idle = running()
    idle.no_work(10.1)
    idle.no_work(12.0)
    idle.step("prefill", 15.0, 15.2, 16.0)
    assert causes(idle) == {"no_work": 4.9, "prefill": 0.3}
    idle.step("decode", 16.0, 16.1, 17.0)
    assert idle.times.no_work == pytest.approx(4.9), "there is work again"


def test_a_step_that_was_planned_before_does_not_end_a_pause():
    idle = running()
    idle.no_work(10.5)
    idle.step("decode", 9.9, 10.0, 11.0)
    idle.step("decode", 14.0, 14.0, 15.0)
    assert causes(idle) == {"no_work": 3.0}


def test_a_swap_takes_its_part_whether_told_of_before_the_next_step_or_after_it():
    for late in (False, True):
        idle = running()
        if not late:
            idle.swap(10.1, 10.5)
        idle.step("decode", 9.9, 10.6, 11.0)
        if late:
            idle.swap(10.1, 10.5)
        assert causes(idle) == {"swap": 0.4, "bubble": 0.2}


def test_a_swap_while_there_is_no_work_counts_once():
    idle = running()
    idle.no_work(10.0)
    idle.swap(11.0, 12.0)
    idle.step("prefill", 14.0, 14.0, 15.0)
    assert causes(idle) == {"no_work": 3.0, "swap": 1.0}


def test_a_stretch_without_work_is_told_while_it_lasts():
    idle = running()
    idle.no_work(10.0)
    idle.settle(13.0)
    assert causes(idle) == {"no_work": 3.0}
    idle.settle(13.0)
    idle.step("decode", 14.0, 14.5, 15.0)
    assert causes(idle) == {"no_work": 4.0, "bubble": 0.5}


def test_busy_and_idle_time_add_up_to_the_wall_time():
    draw = random.Random(3)
    idle, now, busy = IdleCauses(0.0), 0.0, 0.0
    for _ in range(400):
        gap, length = draw.choice([0.0, draw.random()]), draw.random()
        if gap and draw.random() < 0.3:
            idle.no_work(now + gap * draw.random() * 0.5)
        if gap and draw.random() < 0.2:
            idle.swap(now + 0.2 * gap, now + 0.7 * gap)
        planned = now + gap * draw.random()
        idle.step(draw.choice(["decode", "prefill"]), planned, now + gap, now + gap + length)
        now, busy = now + gap + length, busy + length
    assert sum(getattr(idle.times, cause) for cause in CAUSES) + busy == pytest.approx(now)
    assert all(getattr(idle.times, cause) > 0 for cause in CAUSES)


def test_a_report_gives_the_shares_of_its_interval():
    class Clock:
        now = 100.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    meter = Meter(clock)
    base: dict = dict(rows=1, zombie_rows=0, tokens=1, plan_s=0.0, launch_s=0.0, commit_s=0.0, version=0)
    meter.step(StepRecord(kind="prefill", start_s=100.0, end_s=101.0, planned_at_s=100.0, **base))
    meter.step(StepRecord(kind="decode", start_s=101.5, end_s=102.0, planned_at_s=101.0, **base))
    clock.now = 102.0
    report = meter.report()
    assert report["gpu/idle_bubble_pct"] == pytest.approx(25.0)
    assert report["gpu/active_pct"] + report["gpu/idle_bubble_pct"] == pytest.approx(100.0)
    meter.no_work(102.0)
    clock.now = 104.0
    assert meter.report()["gpu/idle_no_work_pct"] == pytest.approx(100.0)
    assert meter.report(105.0)["gpu/idle_bubble_pct"] == 0.0
    assert meter.totals(105.0)["gpu/idle_bubble_pct"] == pytest.approx(10.0)


# --- in a running engine ----------------------------------------------------------------------------------------------


class OneSwap:
    """A receiver with one update, whose copy takes a while."""

    version = 1
    nbytes = 4096

    def __init__(self) -> None:
        self.left = [self]
        self.pause_s = 0.0

    def take_ready(self) -> OneSwap | None:
        return self.left.pop() if self.left else None

    def copy_into(self) -> None:
        time.sleep(0.02)  # on the compute stream

    def applied(self, update: object, pause_s: float) -> None:
        self.pause_s = pause_s


@pytest.fixture
def driver(tmp_path):
    folder = write_checkpoint("toy", tmp_path)
    model = load_model(ModelSettings(path=str(folder), load_format="random"), torch.device("cpu")).model
    driver = Driver(Settings(engine=EngineSettings(max_rows=2, max_context_tokens=64)), CpuDevice(), model)
    yield driver
    driver.close()


def test_an_engine_without_requests_says_so(driver):
    driver.submit("a", [1, 2, 3], 4, SamplingParams())
    driver.finish()
    ended_s = time.perf_counter()
    driver.engine.meter.report()
    driver.submit("b", [1, 2, 3], 4, SamplingParams())
    waited_s = time.perf_counter() - ended_s
    driver.finish()
    began_s = time.perf_counter()
    report = driver.engine.meter.report(began_s)
    wall_s = began_s - ended_s
    assert waited_s <= report["gpu/idle_no_work_pct"] / 100 * wall_s + 1e-3
    assert report["gpu/idle_no_work_pct"] > 0 and report["gpu/idle_swap_pct"] == 0


def test_an_engine_that_swaps_weights_says_so(driver):
    receiver = OneSwap()
    driver.engine._receiver = receiver
    driver.submit("a", [1, 2, 3], 20, SamplingParams())
    driver.finish()
    driver.engine.tick()
    swapped_s = driver.engine.meter.totals()["gpu/idle_swap_pct"] / 100 * driver.engine.meter.totals()["total/wall_s"]
    assert receiver.pause_s > 0.015 and swapped_s == pytest.approx(receiver.pause_s, rel=0.05)
