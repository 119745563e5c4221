"""The packed upload of a step."""

from __future__ import annotations

import numpy as np
import torch

from rollout.engine.device.streams import CpuDevice
from rollout.engine.step.slot import Slot
from rollout.engine.step.upload import ALIGNMENT_WORDS, StepInput


def test_every_section_comes_back_and_starts_at_sixteen_bytes():
    slot = Slot(CpuDevice(), 256, 4, 40, 16)
    staging = slot.staging
    staging.begin()
    arrays = {
        "a": np.arange(3, dtype=np.int32),
        "b": np.arange(5, dtype=np.int64) << 40,
        "c": np.linspace(0, 1, 7, dtype=np.float32).reshape(7, 1),
        "d": np.arange(4, dtype=np.int64),
    }
    for name, array in arrays.items():
        staging.put(name, array)
    upload = staging.upload(rows=4, tokens=4, draws=4, features=0, max_context=8)
    slot.receive(upload.words)
    step = StepInput(upload.header, slot.input)
    for name, array in arrays.items():
        assert torch.equal(step[name], torch.from_numpy(array))
        assert step[name].data_ptr() % 16 == slot.input.data_ptr() % 16
    words = sum(array.nbytes // 4 for array in arrays.values())
    assert words < len(upload.words) <= words + ALIGNMENT_WORDS
