"""Every family's steps without what kernels write: no index leaves its table, which on a GPU would end the process."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.engine.step.compile_ahead import zeroed_tensors
from rollout.engine.step.device_step import make_forward
from rollout.engine.step.graphs import DecodeGraphs
from rollout.engine.step.rehearsal import StepSizes, rehearse
from rollout.models import load_model
from tests.support.engine.harness import Bench
from tests.support.engine.pretended_gpu import pretended_gpu
from tests.support.kernels.grids import nightly
from tests.support.models.every_family import EVERY_FAMILY
from tests.support.models.mtp_layers import LAYOUTS, make_predicting

ROWS, CHUNK, CONTEXT = 8, 64, 200
ADAPTERS = {"adapter_slots": 2, "adapter_rank": 16}
#: With a mixture, latent attention, linear attention, windows and sinks, and a tower for images.
USUAL = ["qwen3_moe", "DeepseekV3", "Qwen3_5", "GptOss", "images: Qwen3.5"]
PREDICTING = ["MiMo", *(name for name in LAYOUTS if name != "MiMo")]


def compile_only(folder: Path, monkeypatch: pytest.MonkeyPatch, mtp: Any = "unused", **fields: Any) -> set[str]:
    """Run all steps of a start with launches left out; returns the names of the kernels that were asked for."""
    settings = ModelSettings(path=str(folder), dtype="bfloat16", device="cpu")
    model = load_model(settings, torch.device("cpu"), mtp=mtp).model
    context = min(CONTEXT, model.spec.max_positions)
    bench = Bench(model, max_rows=ROWS, page_size=16, kv_pages=120, prefill_chunk_tokens=CHUNK, **fields)
    executor, slot = bench.engine.executor, bench.engine.pipeline.acquire()
    fill_with_dirt()
    with pretended_gpu(monkeypatch) as launched, zeroed_tensors():
        executor.step.forward = make_forward(model, False)  # the one of a GPU
        rehearse(executor, slot, StepSizes(ROWS, CHUNK, context, ROWS))
        DecodeGraphs(executor.step, executor.compute, context, ROWS).warm_up(slot)
    bench.close(check=False)
    return {kernel.__name__ for kernel in launched}


def fill_with_dirt() -> None:
    """Memory that is given back, full of values that are no index."""
    dirt = [torch.full((1 << random.randint(4, 18),), 0x7F7F7F7F, dtype=torch.int32) for _ in range(64)]
    del dirt


@pytest.mark.parametrize("name", [*USUAL, *nightly(*(name for name in EVERY_FAMILY if name not in USUAL))])
@pytest.mark.parametrize("fields", [{}, *nightly(ADAPTERS, {"speculation": "auto"})])
def test_steps_without_kernels_index_nothing_that_is_not_there(
    name: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EVERY_FAMILY[name](tmp_path, 0)
    assert len(compile_only(tmp_path, monkeypatch, **fields)) >= 9


@pytest.mark.parametrize("name", [PREDICTING[0], *nightly(*PREDICTING[1:])])
def test_a_draft_model_guesses_without_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths of its rows stay 0: nothing draws."""
    make_predicting(name, tmp_path, seed=3)
    assert len(compile_only(tmp_path, monkeypatch, mtp="needed", speculation="heads")) >= 9
