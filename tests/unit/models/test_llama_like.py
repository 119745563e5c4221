"""Families that differ from Llama in a few facts of their declaration: they run as transformers runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.models.fused import FusedDecoder
from rollout.models.lora_slots import AdapterSlots
from rollout.models.peft_tensors import load_peft_folder
from rollout.models.registry import FAMILIES
from tests.support.engine.harness import Bench
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import PROMPT, check
from tests.support.peft_adapters import make_adapter, merged

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 91, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
ROPES_BY_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
}
#: By the stem of transformers' classes: what is not its default, and whether the fused kernels take the model.
CONFIGS: dict[str, tuple[dict[str, Any], bool]] = {
    "Mistral": ({"sliding_window": 6, "head_dim": 20}, True),
    "Phi3": ({"sliding_window": 6, "tie_word_embeddings": False}, True),
    "SmolLM3": ({"no_rope_layers": [1, 0, 1], "attention_bias": False, "use_sliding_window": False}, True),
    "SeedOss": ({"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 20}, True),
    "Granite": (
        {
            "attention_multiplier": 0.2, "residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.5,
            "attention_bias": True,
        },
        False,
    ),
    "Olmo2": ({"attention_bias": False}, False),
    "Olmo3": (
        {
            "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": ROPES_BY_TYPE,
        },
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("stem", CONFIGS)
def test_steps_and_names_are_those_of_transformers(stem: str, tmp_path: Path) -> None:
    options, fused = CONFIGS[stem]
    reference = make_checkpoint(stem, tmp_path, **(SIZES | options))
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    assert loaded.spec.plain_stream == fused
    check(loaded, reference)
    if not fused:
        with pytest.raises(ValueError, match="residual stream"):
            FusedDecoder(loaded.model)
    views, tensors = loaded.trainer_views(), reference.state_dict()
    assert set(views) == set(tensors)
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("stem", CONFIGS)
def test_an_adapter_of_all_its_modules_is_what_peft_merges(stem: str, tmp_path: Path) -> None:
    reference = make_checkpoint(stem, tmp_path, **(SIZES | CONFIGS[stem][0]))
    adapter = make_adapter(reference, tmp_path / "adapter", 0)
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    slots = AdapterSlots(loaded.spec, 1, 16, torch.float32, CPU)
    slots.write(1, load_peft_folder(adapter, loaded.spec, 16, torch.float32))
    with torch.no_grad():
        before = reference(torch.tensor([PROMPT])).logits.clone()
        exact = merged(reference, adapter)
        assert (exact(torch.tensor([PROMPT])).logits - before).abs().max() > 0.1
    check(loaded, exact, slots, atol=1e-3)  # merged weights round otherwise


@pytest.mark.parametrize("stem", CONFIGS)
def test_greedy_tokens_of_the_engine_are_those_of_transformers(stem: str, tmp_path: Path) -> None:
    reference = make_checkpoint(stem, tmp_path, **(SIZES | CONFIGS[stem][0]))
    bench = Bench(load_model(ModelSettings(path=str(tmp_path), dtype="float32"), CPU).model, max_rows=3)
    prompts = {
        f"r{i}": torch.randint(0, 91, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        for i, length in enumerate((3, 80, 17, 31))
    }
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 40)
    bench.run()
    for name, prompt in prompts.items():
        tokens = bench.tokens(name)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens and len(tokens) == 40
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        raw = torch.tensor(bench.completions[name, 0].raw_logprobs)
        assert torch.allclose(raw, logprobs, atol=1e-4, rtol=0)
    bench.close()


def test_every_config_here_has_a_declaration() -> None:
    assert {f"{stem}ForCausalLM" for stem in CONFIGS} < set(FAMILIES)
