"""Measuring the parts of a step changes no token."""

from pathlib import Path

import pytest
import torch

from rollout.config import EngineSettings, ModelSettings, Settings
from rollout.engine.device.streams import CpuDevice
from rollout.engine.messages.requests import SamplingParams
from rollout.models import load_model
from scripts.bench.driver import Driver
from scripts.bench.shapes import write_checkpoint
from scripts.bench.step_parts import measure_device_parts, sleeping_steps


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_checkpoint("toy", tmp_path_factory.mktemp("toy"))
    return load_model(ModelSettings(path=str(folder), load_format="random"), torch.device("cpu")).model


def driver_of(model) -> Driver:
    return Driver(Settings(engine=EngineSettings(max_rows=4, max_context_tokens=200)), CpuDevice(), model)


def submit(driver: Driver, rows: int = 3, new: int = 100) -> None:
    for i in range(rows):
        driver.submit(f"r{i}", list(range(5 + i, 25 + 3 * i)), new, SamplingParams(seed=i))


def test_rows_draw_the_same_tokens_whether_their_step_is_measured_or_not(model):
    alone = driver_of(model)
    submit(alone)
    alone.finish()
    measured = driver_of(model)
    submit(measured)
    roster = measured.engine.roster
    measured.tick_until(lambda: len(roster.decoding) == 3 and roster.decoding[0].kv.length > 40)
    measured.pause()
    parts = measure_device_parts(measured.engine)
    measured.resume()
    measured.finish()
    assert measured.completions == alone.completions
    assert min(parts.forward_s, parts.sampling_s, parts.step_s, parts.alone_s) > 0
    alone.close(), measured.close()


def test_a_sleeping_device_takes_as_long_as_it_is_told_and_gives_the_model_back(model):
    driver = driver_of(model)
    with sleeping_steps(driver.engine, 0.004) as asleep_s:
        assert asleep_s >= 0.004
        submit(driver, new=6)
        driver.finish()
    spans = [step.end_s - step.start_s for step in driver.engine.meter.recent_steps() if step.kind == "decode"]
    assert spans and min(spans) >= 0.004
    assert not driver.engine.executor.captures
    driver.close()


def test_dropped_rows_leave_an_engine_that_is_whole(model, tmp_path: Path):
    driver = driver_of(model)
    submit(driver)
    driver.tick_until(lambda: len(driver.engine.roster.decoding) == 3)
    driver.pause()
    driver.drop_all()
    assert not driver.completions and driver.engine.roster.idle
    driver.close()


def test_a_missing_completion_is_an_error(model):
    driver = driver_of(model)
    submit(driver, new=3)
    with pytest.raises(RuntimeError, match="ended before"):
        driver.tick_until(lambda: False)
    driver.close()


def test_a_rejected_request_is_an_error(model):
    driver = driver_of(model)
    driver.submit("long", [1] * 150, 100, SamplingParams())
    with pytest.raises(ValueError, match="long"):
        driver.finish()
    driver.close()
