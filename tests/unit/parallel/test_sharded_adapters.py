"""Adapters of a shard: the parts of A and B that belong to what the shard keeps."""

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
from tests.support.models.hybrids import HYBRIDS, make_hybrid
from tests.support.models.latent import LATENT, make_latent
from tests.support.models.paged import PROMPT, PagedRunner
from tests.support.models.variants import CONFIGS, SIZES
from tests.support.parallel.logits import join_logits
from tests.support.parallel.ranks import Ranks
from tests.support.peft_adapters import ALL, make_adapter, merged

CPU = torch.device("cpu")
#: The corrected modules, where these are not those of Llama.
TARGETS = {
    "Qwen3Next": ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "Qwen3_5": (*ALL, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "DeepseekV3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "DeepseekV2": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
}


def _adapted(group: TensorGroup, folder: Path, adapter: Path, kernels: bool) -> torch.Tensor:
    loaded = load_model(ModelSettings(path=str(folder)), CPU, group=group)
    slots = AdapterSlots(loaded.spec, 1, 16, torch.float32, CPU)
    slots.write(1, load_peft_folder(adapter, loaded.spec, 16, torch.float32))
    forward: Any = FusedDecoder(loaded.model) if kernels else loaded.model
    runner = PagedRunner(loaded.model, rows=2, max_tokens=len(PROMPT), forward=forward)
    runner.adapters, runner.adapter_of = slots, [1, 1]
    found = [runner.prefill(dict.fromkeys(range(2), PROMPT[:11]))[1]]
    found += [runner.decode(dict.fromkeys((1, 0), token))[1][None] for token in PROMPT[11:]]
    return join_logits(loaded.model, torch.cat(found))


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["Qwen3", "Phi3", *TARGETS])
def test_an_adapter_of_all_modules_is_what_peft_merges(
    name: str, kernels: bool, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    if kernels and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines without a GPU")
    if name in HYBRIDS:
        reference = make_hybrid(name, tmp_path, **({"num_experts": 8} if "Moe" in name or "Next" in name else {}))
    elif name in LATENT:
        reference = make_latent(name, tmp_path)
    else:
        reference = make_checkpoint(name, tmp_path, **(SIZES | CONFIGS.get(name, {})))
    adapter = make_adapter(reference, tmp_path / "adapter", 0, TARGETS.get(name, ALL))
    with torch.no_grad():
        exact = merged(reference, adapter)(torch.tensor([PROMPT])).logits[0]
    for found in start_ranks(2).run(_adapted, tmp_path, adapter, kernels):
        assert (found - exact).abs().max() < 1e-3  # merged weights round otherwise
