"""Kernels that begin before the one before them has ended: steps of real layer sizes come out the same without that.

What one kernel reads too early shows at sizes at which it takes long enough for the one before it to be late.
"""

import json
import sys

import pytest
import torch
from rollout_kernels.common import triton_math

from rollout.config import ModelSettings
from rollout.engine.device.streams import make_device
from rollout.models import load_model
from scripts.bench.shapes import model_config
from tests.support.engine.cuda_harness import TokensAndLogprobs, tokens_and_logprobs
from tests.support.engine.harness import Bench

pytestmark = pytest.mark.gpu


def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> int:
    """From now on each kernel begins once the one before has ended; returns how many modules launch some."""
    usual, modules = triton_math.follow_options, [*sys.modules.values()]
    launching = [module for module in modules if getattr(module, "follow_options", None) is usual]
    for module in launching:
        monkeypatch.setattr(module, "follow_options", lambda device: {})
    return len(launching)


@pytest.mark.timeout(600)  # each run captures its sizes anew, the last with kernels that nothing compiled before
@pytest.mark.parametrize(
    ("shape", "experts", "batches"),
    [
        ("qwen3-8b", "auto", (1, 3, 8, 20, 100)),
        ("qwen3-1.7b", "auto", (1, 8)),  # whose programs leave room for those of other kernels
        ("qwen3-30b-a3b", "auto", (1, 3, 8, 20, 100)),  # by output, grouped, and with a router of its own
        ("qwen3-30b-a3b", "fp8_block", (1, 8)),
    ],
)
def test_a_step_is_the_same_bit_for_bit_without_overlap(shape, experts, batches, tmp_path, prompt_of, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(model_config(shape) | {"num_hidden_layers": 3}))
    settings = ModelSettings(path=str(tmp_path), load_format="random", dtype="bfloat16")
    format = "plain" if experts == "auto" else experts
    model = load_model(settings, torch.device("cuda"), weights=format).model
    runs: list[TokensAndLogprobs] = []
    for overlap in (True, True, False):
        if not overlap:
            assert one_after_the_other(monkeypatch) > 10
        bench = Bench(
            model, make_device("cuda"), max_rows=max(batches), kv_pages=2048, page_size=16, prefill_chunk_tokens=2048,
            weight_dtype=experts,
        )  # fmt: skip
        for rows in batches:
            for i in range(rows):
                bench.submit(f"{rows}/{i}", prompt_of(150, i), 48, sampling={"temperature": 1.0, "seed": i})
            bench.run()
        runs.append(tokens_and_logprobs(bench))
        bench.close()
    assert runs[0] == runs[1], "the same twice"
    assert runs[0] == runs[2]
