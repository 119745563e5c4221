"""The packed upload of a step."""

import dataclasses

import numpy as np
import pytest
import torch

from rollout.engine.device.streams import CpuDevice
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import Cancel
from rollout.engine.step.slot import Slot
from rollout.engine.upload import ALIGNMENT_WORDS
from tests.support.engine.harness import Bench


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
    upload = staging.upload(rows=4, tokens=4, draws=4, needs=0, max_context=8)
    step = slot.input_for(upload)
    step.receive(upload.words)
    for name, array in arrays.items():
        assert torch.equal(step[name], torch.from_numpy(array))
        assert step[name].data_ptr() % 16 == slot.input.data_ptr() % 16
    words = sum(array.nbytes // 4 for array in arrays.values())
    assert words < len(upload.words) <= words + ALIGNMENT_WORDS


@pytest.mark.parametrize("rows", [1, 8])
def test_the_longest_upload_fits_the_staging_buffer(model, prompt_of, rows):
    """A continued completion of nearly the whole context, with every list that a row can have, in large chunks."""
    model.spec = dataclasses.replace(model.spec, max_positions=1 << 14)
    bench = Bench(model, max_rows=rows, kv_pages=600, page_size=16, prefill_chunk_tokens=4096, max_context_tokens=8192)
    bench.submit(
        "a",
        prompt_of(2),
        8190,
        sampling={"repetition_penalty": 1.1, "logit_bias": tuple((i, 0.1) for i in range(97))},
        stop={"token_ids": (1,), "min_tokens": 8188},
        prior=Prior(np.array(prompt_of(8185), dtype=np.int32)),
    )
    bench.engine.tick()
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.run()
