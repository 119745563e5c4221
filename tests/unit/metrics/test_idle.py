"""The causes of idle time: each stretch between two steps goes to the one that held the stream."""

from __future__ import annotations

import random
import time

import pytest
import torch

from rollout.config import EngineSettings, ModelSettings, Settings
from rollout.engine.device.streams import CpuDevice
from rollout.engine.messages.requests import SamplingParams
from rollout.metrics.idle import IDLE_CAUSES, IdleCauses, IdleWindow
from rollout.metrics.meter import Meter
from rollout.metrics.step_timing import StepTiming
from rollout.models import load_model
from scripts.bench.driver import Driver
from scripts.bench.shapes import write_checkpoint
from tests.support.clock import Clock


def causes(idle: IdleCauses) -> dict[str, float]:
    return {name: pytest.approx(value) for name, value in idle.seconds.items() if value > 1e-12}


def running() -> IdleCauses:
    """Steps have run without a gap until second 10."""
    idle = IdleCauses(9.0)
    idle.step("decode", 9.0, 9.0, 10.0)
    return idle


def test_a_decode_step_that_comes_late_leaves_a_bubble():
    idle = running()
    idle.step("decode", 10.1, 10.4, 11.0)
    assert causes(idle) == {"bubble": 0.4}


def test_preparing_a_prefill_is_counted_apart():
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
    assert idle.seconds["no_work"] == pytest.approx(4.9), "there is work again"


def test_a_step_that_was_planned_before_does_not_end_a_pause():
    idle = running()
    idle.no_work(10.5)
    idle.step("decode", 9.9, 10.0, 11.0)
    idle.step("decode", 14.0, 14.0, 15.0)
    assert causes(idle) == {"no_work": 3.0}


def test_a_swap_counts_whether_reported_before_the_next_step_or_after_it():
    for late in (False, True):
        idle = running()
        if not late:
            idle.stream_held("swap", 10.1, 10.5)
        idle.step("decode", 9.9, 10.6, 11.0)
        if late:
            idle.stream_held("swap", 10.1, 10.5)
        assert causes(idle) == {"swap": 0.4, "bubble": 0.2}


def test_a_swap_while_there_is_no_work_counts_once():
    idle = running()
    idle.no_work(10.0)
    idle.stream_held("swap", 11.0, 12.0)
    idle.step("prefill", 14.0, 14.0, 15.0)
    assert causes(idle) == {"no_work": 3.0, "swap": 1.0}


def test_idle_time_is_reported_while_it_lasts():
    idle = running()
    idle.no_work(10.0)
    idle.count_until(13.0)
    assert causes(idle) == {"no_work": 3.0}
    idle.count_until(13.0)
    idle.step("decode", 14.0, 14.5, 15.0)
    assert causes(idle) == {"no_work": 4.0, "bubble": 0.5}


@pytest.mark.parametrize("told_at", [12.0, 12.5])
def test_a_swap_of_an_idle_worker_counts_once_however_often_it_is_read(told_at):
    idle = running()
    idle.no_work(10.0)
    for moment in (10.5, 11.5, 12.0, 12.5, 13.0):
        if moment == told_at:
            idle.stream_held("swap", 11.0, 12.0)
        idle.count_until(moment)
    assert causes(idle) == {"no_work": 2.0, "swap": 1.0}
    idle.step("decode", 14.0, 14.0, 15.0)
    assert causes(idle) == {"no_work": 3.0, "swap": 1.0}


def test_the_time_until_it_was_clear_that_there_is_no_work_is_the_hosts():
    """What the host did with the last step, or a fault that was recovered from."""
    idle = running()
    idle.no_work(10.75)
    idle.count_until(13.0)
    assert causes(idle) == {"no_work": 2.25, "bubble": 0.75}


def test_busy_and_idle_time_add_up_to_the_wall_time():
    draw = random.Random(3)
    idle, now, busy = IdleCauses(0.0), 0.0, 0.0
    for _ in range(400):
        gap, length = draw.choice([0.0, draw.random()]), draw.random()
        if gap and draw.random() < 0.3:
            idle.no_work(now + gap * draw.random() * 0.5)
        if gap and draw.random() < 0.2:
            idle.stream_held("swap", now + 0.2 * gap, now + 0.7 * gap)
        if gap and draw.random() < 0.2:
            idle.stream_held("offload", now + 0.8 * gap, now + 0.9 * gap)
        planned = now + gap * draw.random()
        idle.step(draw.choice(["decode", "prefill"]), planned, now + gap, now + gap + length)
        now, busy = now + gap + length, busy + length
    assert sum(idle.seconds.values()) + busy == pytest.approx(now)
    assert all(seconds > 0 for seconds in idle.seconds.values())


def test_an_offload_takes_its_part_beside_a_swap():
    for late in (False, True):
        idle = running()
        idle.no_work(10.0)
        if not late:
            idle.stream_held("offload", 11.0, 11.5)
        idle.stream_held("swap", 12.0, 13.0)
        idle.step("prefill", 14.0, 14.25, 15.0)
        assert causes(idle) == {"no_work": 3.0 if late else 2.5, "swap": 1.0, "prefill": 0.25} | (
            {} if late else {"offload": 0.5}
        )
    idle = running()
    idle.step("decode", 10.0, 10.6, 11.0)
    idle.stream_held("offload", 10.1, 10.4)
    assert causes(idle) == {"offload": 0.3, "bubble": 0.3}


@pytest.mark.parametrize(
    ("offload", "expected"),
    [((11.0, 12.5), 1.0), ((12.5, 13.5), 0.5), ((12.0, 13.0), 0.0), ((11.5, 13.5), 1.0), ((12.2, 12.4), 0.0)],
)
@pytest.mark.parametrize("resting", [False, True])
def test_time_held_by_a_swap_and_an_offload_counts_once(offload, expected, resting):
    idle = running()
    if resting:
        idle.no_work(10.0)
    idle.stream_held("offload", *offload)
    idle.stream_held("swap", 12.0, 13.0)
    idle.step("decode", 14.0, 14.0, 15.0)
    rest = {"no_work" if resting else "bubble": pytest.approx(3.0 - expected)}
    assert causes(idle) == rest | {"swap": 1.0} | ({"offload": expected} if expected else {})


BASE: dict = dict(rows=1, zombie_rows=0, tokens=1, plan_s=0.0, launch_s=0.0, commit_s=0.0, version=0)


def test_a_report_has_the_causes_of_the_last_ten_seconds_and_since_the_start():
    clock = Clock()
    meter = Meter(clock)
    meter.step(StepTiming(kind="prefill", start_s=100.0, end_s=101.0, planned_at_s=100.0, **BASE))
    meter.step(StepTiming(kind="decode", start_s=101.5, end_s=102.0, planned_at_s=101.0, **BASE))
    clock.now = 102.0
    report = meter.report()
    assert report["gpu/bubble_pct/host"] == report["gpu/run/bubble_pct/host"] == pytest.approx(25.0)
    assert report["gpu/active_pct"] == report["gpu/run/active_pct"] == pytest.approx(75.0)
    assert meter.rates(104.0)[0] == pytest.approx(37.5)
    assert sum(meter.idle_shares(104.0).values()) == pytest.approx(12.5), "the step in flight is not counted yet"
    meter.no_work(102.0)
    for now in range(103, 123):
        clock.now = now
        report = meter.report()
        for prefix in ("gpu/", "gpu/run/"):
            parts = report[f"{prefix}active_pct"] + sum(
                value for name, value in report.items() if name.startswith(f"{prefix}bubble_pct/")
            )
            assert parts == pytest.approx(100.0), (now, prefix)
    assert report["gpu/bubble_pct/no_work"] == pytest.approx(100.0) and report["gpu/bubble_pct/host"] == 0.0
    assert report["gpu/run/bubble_pct/host"] == pytest.approx(100 * 0.5 / 22)
    assert report["gpu/run/bubble_pct/no_work"] == pytest.approx(100 * 20 / 22)
    totals = meter.totals()
    assert totals["gpu/bubble_pct/host"] == totals["gpu/run/bubble_pct/host"] == pytest.approx(100 * 0.5 / 22)


def test_the_window_begins_ten_seconds_ago_also_between_two_readings():
    window, none = IdleWindow(0.0), dict.fromkeys(IDLE_CAUSES, 0.0)
    for now in (3.0, 7.0, 11.0, 12.5):
        shares = window.shares(now, none | {"swap": now / 2})
        assert shares["swap"] == pytest.approx(50.0) and shares["bubble"] == 0.0


def test_offloads_show_in_the_report():
    clock = Clock()
    meter = Meter(clock)
    meter.step(StepTiming(kind="decode", start_s=100.0, end_s=101.0, planned_at_s=100.0, **BASE))
    meter.offload(101.0, 101.5)
    meter.step(StepTiming(kind="decode", start_s=101.5, end_s=102.0, planned_at_s=101.0, **BASE))
    clock.now = 102.0
    assert meter.report()["gpu/bubble_pct/offload"] == pytest.approx(25.0)


# --- in a running engine ----------------------------------------------------------------------------------------------


class OneSwap:
    """A receiver with one update, whose copy takes a while."""

    version = 1
    nbytes = 4096
    names = ()

    def __init__(self) -> None:
        self.left = [self]
        self.pause_s = 0.0

    def take_ready(self) -> OneSwap | None:
        return self.left.pop() if self.left else None

    def copy_into(self) -> None:
        time.sleep(0.2)  # on the compute stream

    def applied(self, update: object, pause_s: float) -> None:
        self.pause_s = pause_s


def make_driver(tmp_path, receiver: OneSwap | None = None) -> Driver:
    folder = write_checkpoint("toy", tmp_path)
    model = load_model(ModelSettings(path=str(folder), load_format="random"), torch.device("cpu")).model
    settings = Settings(engine=EngineSettings(max_rows=2, max_context_tokens=64))
    return Driver(settings, CpuDevice(), model, receiver)


@pytest.fixture
def driver(tmp_path):
    driver = make_driver(tmp_path)
    yield driver
    driver.close()


def test_an_engine_without_requests_says_so(driver):
    driver.submit("a", [1, 2, 3], 4, SamplingParams())
    driver.finish()
    before_s, ended_s = driver.engine.meter.idle_seconds(), time.perf_counter()
    time.sleep(0.01)
    driver.submit("b", [1, 2, 3], 4, SamplingParams())
    waited_s = time.perf_counter() - ended_s
    driver.finish()
    after_s = driver.engine.meter.idle_seconds()
    assert waited_s <= after_s["no_work"] - before_s["no_work"] + 1e-3
    assert after_s["swap"] == 0


def test_an_engine_that_swaps_weights_says_so(tmp_path):
    receiver = OneSwap()
    driver = make_driver(tmp_path, receiver)
    driver.submit("a", [1, 2, 3], 20, SamplingParams())
    driver.finish()
    driver.engine.tick()
    totals = driver.engine.meter.totals()
    swapped_s = totals["gpu/bubble_pct/swap"] / 100 * totals["total/wall_s"]
    assert receiver.pause_s > 0.15 and swapped_s == pytest.approx(receiver.pause_s, rel=0.25)  # or it waited for a core
    driver.close()
