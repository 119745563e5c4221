"""The packed upload of a step."""

from __future__ import annotations

import numpy as np
import torch

from rollout.engine.device.streams import CpuDevice
from rollout.engine.step.slot import ALIGNMENT_WORDS, Slot


def test_every_section_comes_back_and_starts_at_sixteen_bytes():
    slot = Slot(CpuDevice(), 256, 4, 40, 16)
    slot.begin()
    arrays = {
        "a": np.arange(3, dtype=np.int32),
        "b": np.arange(5, dtype=np.int64) << 40,
        "c": np.linspace(0, 1, 7, dtype=np.float32).reshape(7, 1),
        "d": np.arange(4, dtype=np.int64),
    }
    for name, array in arrays.items():
        slot.put(name, array)
    upload = slot.upload()
    upload.copy()
    for name, array in arrays.items():
        assert torch.equal(upload[name], torch.from_numpy(array))
        assert upload[name].data_ptr() % 16 == slot.input.data_ptr() % 16
    words = sum(array.nbytes // 4 for array in arrays.values())
    assert words < len(upload.device) <= words + ALIGNMENT_WORDS
