"""Adapters of a shard: the parts of A and B that belong to what the shard keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels.parallel import TensorGroup

from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.models.fused import FusedDecoder
from rollout.models.lora_slots import AdapterSlots
from rollout.models.peft_tensors import load_peft_folder
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import PROMPT, PagedRunner
from tests.support.models.variants import CONFIGS, SIZES
from tests.support.parallel.ranks import Ranks
from tests.support.peft_adapters import ALL, make_adapter, merged

CPU = torch.device("cpu")


def _adapted(group: TensorGroup, folder: Path, adapter: Path, kernels: bool) -> torch.Tensor:
    loaded = load_model(ModelSettings(path=str(folder)), CPU, group=group)
    slots = AdapterSlots(loaded.spec, 1, 16, torch.float32, CPU)
    slots.write(1, load_peft_folder(adapter, loaded.spec, 16, torch.float32))
    forward: Any = FusedDecoder(loaded.model) if kernels else loaded.model
    runner = PagedRunner(loaded.model, rows=2, max_tokens=len(PROMPT), forward=forward)
    runner.adapters, runner.adapter_of = slots, [1, 1]
    found = [runner.prefill(dict.fromkeys(range(2), PROMPT[:11]))[1]]
    found += [runner.decode(dict.fromkeys((1, 0), token))[1][None] for token in PROMPT[11:]]
    return loaded.model.join_logits(torch.cat(found))


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["Qwen3", "Phi3"])
def test_an_adapter_of_all_modules_is_what_peft_merges(
    name: str, kernels: bool, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    if kernels and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines without a GPU")
    reference = make_checkpoint(name, tmp_path, **SIZES, **CONFIGS.get(name, ({},))[0])
    adapter = make_adapter(reference, tmp_path / "adapter", 0, ALL)
    with torch.no_grad():
        exact = merged(reference, adapter)(torch.tensor([PROMPT])).logits[0]
    for found in start_ranks(2).run(_adapted, tmp_path, adapter, kernels):
        assert (found - exact).abs().max() < 1e-3  # merged weights round otherwise
