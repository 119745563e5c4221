"""The fuzz target without its fuzzer: good messages pass, hostile ones are refused, a broken reader is detected."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support.robustness.corpus import hostile_messages
from trainer_bridge.wire import codec as wire

SCRIPT = Path(__file__).parents[2] / "scripts" / "check" / "fuzz_codec.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_codec", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_good_message_is_read_from_its_input(fuzz: ModuleType) -> None:
    for header in fuzz.good_headers():
        frames = wire.encode(header)
        assert fuzz.frames_of(fuzz.input_of(frames)) == frames
        assert fuzz.check_frames(frames)


def test_random_inputs_hold_and_many_of_them_are_messages(fuzz: ModuleType) -> None:
    rng = random.Random(1)
    read = 0
    for number in range(5000):
        data = bytes([number % 3]) + rng.randbytes(rng.choice([0, 5, 40, 300]))
        read += fuzz.check_frames(fuzz.frames_of(data))
    assert read > 1000


def test_hostile_messages_hold(fuzz: ModuleType) -> None:
    for message in hostile_messages(2000, seed=31):
        fuzz.check_frames(message.frames)


def test_a_reader_that_is_broken_is_noticed(fuzz: ModuleType) -> None:
    frames = wire.encode({"v": 1, "op": "ping", "id": "x", "y": np.arange(3)})
    assert fuzz.check_frames(frames)
    with pytest.raises(AssertionError):  # a writable array
        fuzz.check_frames(frames, lambda frames: wire.decode(frames) | {"y": np.arange(3)})
    readings = iter([{"y": 1}, {"y": 1.0}])
    with pytest.raises(AssertionError, match="changes when it is sent again"):
        fuzz.check_frames(wire.encode({"y": 1}), lambda frames: next(readings))
