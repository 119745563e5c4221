"""A dense family is one declaration: families declared here run as transformers runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import LoadedModel, load_model
from rollout.models.fused import FusedDecoder
from rollout.models.lora_slots import AdapterSlots
from rollout.models.peft_tensors import load_peft_folder
from rollout.models.registry import FAMILIES, Family, Key, same_window
from rollout.models.spec import AttentionNames, DenseNames, LayerNames, ModelNames
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import PagedRunner
from tests.support.peft_adapters import make_adapter, merged

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 91, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
PROMPT = [7, 30, 11, 52, 9, 4, 77, 18, 23, 60, 2, 41, 5, 16]

#: Families that transformers has and the registry has not: (declaration, stem of transformers' classes, config).
DECLARED: dict[str, tuple[Family, str, dict[str, Any]]] = {
    "MistralForCausalLM": (Family(model_type="mistral", windows=same_window), "Mistral", {"sliding_window": 6}),
    "SeedOssForCausalLM": (
        Family(
            model_type="seed_oss",
            qkv_bias=Key("attention_bias"),
            o_bias=Key("attention_out_bias"),
            mlp_bias=Key("mlp_bias"),
        ),
        "SeedOss",
        {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True},
    ),
}
#: Qwen3 under other names.
RENAMED = Family(
    model_type="qwen3",
    qk_norm="head",
    names=ModelNames(embed="tok", layer="blocks.{}.", norm="final", lm_head="head"),
    layer_names=LayerNames(mixer_norm="norm1", feed_forward_norm="norm2"),
    attention_names=AttentionNames(qkv=("attn.wq", "attn.wk", "attn.wv"), o="attn.wo", qk_norm=("attn.nq", "attn.nk")),
    dense_names=DenseNames(gate_up=("ff.w1", "ff.w3"), down="ff.w2"),
)
NAMES = {
    "model.embed_tokens": "tok", "model.layers": "blocks", "model.norm": "final", "lm_head": "head",
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn": "attn", "mlp": "ff",
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "q_norm": "nq", "k_norm": "nk",
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
}  # fmt: skip


def renamed(name: str) -> str:
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def rename_tensors(file: Path) -> None:
    save_file({renamed(name): tensor for name, tensor in load_file(file).items()}, file)


def check(loaded: LoadedModel, reference: Any, adapters: AdapterSlots | None = None) -> None:
    """A prompt in two chunks and decode steps, by the generic and the fused path."""
    with torch.no_grad():
        exact = reference(torch.tensor([PROMPT])).logits[0].float()
    for forward in (loaded.model, FusedDecoder(loaded.model)):
        runner = PagedRunner(loaded.model, rows=1, max_tokens=len(PROMPT), forward=forward)
        if adapters is not None:
            runner.adapters, runner.adapter_of = adapters, [1]
        logits = [runner.prefill({0: PROMPT[:7]})[0], runner.prefill({0: PROMPT[7:11]})[0]]
        logits += [runner.decode({0: token})[0][None] for token in PROMPT[11:]]
        assert (torch.cat(logits) - exact).abs().max() < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("architecture", DECLARED)
def test_one_declaration_adds_a_dense_family(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, stem, options = DECLARED[architecture]
    reference = make_checkpoint(stem, tmp_path, **SIZES, **options)
    with pytest.raises(ValueError, match=architecture):
        load_model(ModelSettings(path=str(tmp_path)), CPU)
    monkeypatch.setitem(FAMILIES, architecture, family)
    check(load_model(ModelSettings(path=str(tmp_path)), CPU), reference)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("tied", [False, True])
def test_a_declaration_may_give_tensors_other_names(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names hold for checkpoints, for updates and for adapters."""
    monkeypatch.setitem(FAMILIES, "RenamedForCausalLM", RENAMED)
    reference = make_checkpoint("qwen3", tmp_path, **SIZES, use_sliding_window=False, tie_word_embeddings=tied)
    adapter = make_adapter(reference, tmp_path / "adapter", 0)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["RenamedForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rename_tensors(tmp_path / "model.safetensors")
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    check(loaded, reference)
    assert set(loaded.trainer_views()) == {renamed(name) for name in reference.state_dict()}
    exact = merged(reference, adapter)
    rename_tensors(adapter / "adapter_model.safetensors")
    slots = AdapterSlots(loaded.spec, 1, 16, torch.float32, CPU)
    slots.write(1, load_peft_folder(adapter, loaded.spec, 16, torch.float32))
    check(loaded, exact, slots)
