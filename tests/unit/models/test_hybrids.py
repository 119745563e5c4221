"""Families with linear attention: their steps are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels.linear.table import linear_config
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import CheckpointError, load_model
from rollout.models.deterministic import kernel_product
from rollout.models.fused import FusedDecoder
from rollout.models.lora_slots import AdapterSlots
from rollout.models.peft_tensors import load_peft_folder
from tests.support.kernels.grids import nightly
from tests.support.models.adapted_rows import exact_logits, logits_of
from tests.support.models.hybrids import HYBRIDS, make_hybrid
from tests.support.models.paged import PagedRunner, assert_logits_in_chunks_and_steps, check
from tests.support.models.side_by_side import error
from tests.support.peft_adapters import ALL, ATTENTION, make_adapter, merged

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[*(stem for stem in HYBRIDS if stem != "Qwen3_5Moe"), *nightly("Qwen3_5Moe")])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The model as it is served, and transformers' own."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_hybrid(request.param, folder)
    return load_model(ModelSettings(path=str(folder)), CPU).model, reference


def tokens(count: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_chunked_prefill_and_100_decode_steps_give_the_logits_of_transformers(pair: tuple[Any, Any]) -> None:
    model, reference = pair
    vocab = model.spec.vocab
    prompts, steps = [150, 1, 9], 100
    ids = [tokens(prompt + steps, vocab, seed) for seed, prompt in enumerate(prompts, 1)]
    # Pieces shorter than the convolution, longer than a chunk of the recurrence, and of several rows at once.
    chunks = ({0: (0, 2), 2: (0, 4)}, {0: (2, 3)}, {2: (4, 9), 1: (0, 1), 0: (3, 90)}, {0: (90, 150)})
    assert_logits_in_chunks_and_steps(model, reference, ids, prompts, chunks, steps)


def test_names_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    model, reference = pair
    views = model.hf_views()
    for name, tensor in reference.state_dict().items():
        assert views[name].shape == tensor.shape, name
        assert torch.equal(views[name], tensor), name


#: Widths that the kernels of products take.
EVEN: dict[str, Any] = {
    "hidden_size": 64,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize(
    ("stem", "sizes"), [("Qwen3_5", {}), ("Qwen3_5Moe", {}), ("Qwen3_5", EVEN), ("OlmoHybrid", {})]
)
def test_the_fused_kernels_run_linear_attention_and_what_is_between(
    stem: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """With even widths its products run by our kernels, too. OLMo-Hybrid has norms before and after its blocks."""
    reference = make_hybrid(stem, tmp_path, **sizes)
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    product = kernel_product(loaded.spec.layers[0].mixer.inputs, "whole")  # type: ignore[union-attr]
    assert (linear_config(*product, 2) is not None) == bool(sizes)
    check(loaded, reference)


#: Modules of linear attention as PEFT names them, by the stem of transformers' classes.
LINEAR = {
    "Qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "Qwen3Next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
    "OlmoHybrid": ("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj", "g_proj", "b_proj", "a_proj"),
    "KimiLinear": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    "BailingHybrid": ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj"),
    "GraniteMoeHybrid dense": ("in_proj", "out_proj", "input_linear", "output_linear"),
}


@pytest.mark.parametrize(
    "stem",
    ["Qwen3_5", *nightly("Qwen3Next", "OlmoHybrid", "KimiLinear", "BailingHybrid", "GraniteMoeHybrid dense")],
)
def test_each_row_of_a_batch_equals_the_model_that_peft_merges(stem: str, tmp_path: Path) -> None:
    """Adapters of linear attention, of a part of it, and of all mixers and dense blocks; by both paths."""
    reference = make_hybrid(stem, tmp_path / "base")
    loaded = load_model(ModelSettings(path=str(tmp_path / "base")), CPU)
    slots = AdapterSlots(loaded.spec, 3, 16, torch.float32, CPU)
    exact = [exact_logits(reference)]
    others = ALL if stem in ("Qwen3_5", "OlmoHybrid") else ATTENTION
    for i, targets in enumerate((LINEAR[stem], LINEAR[stem][1:3], (*others, *LINEAR[stem]))):
        folder = make_adapter(reference, tmp_path / str(i), i, targets, r=3 + i)
        slots.write(i + 1, load_peft_folder(folder, loaded.spec, 16, torch.float32))
        exact.append(exact_logits(merged(reference, folder)))
    assert min((a - b).abs().max() for a in exact for b in exact if a is not b) > 0.05, "they differ"
    adapter_of = [2, 0, 1, 3]
    forwards = [loaded.model, *([FusedDecoder(loaded.model)] if stem in ("Qwen3_5", "OlmoHybrid") else [])]
    for forward in forwards:
        for slot, got in zip(adapter_of, logits_of(loaded.model, forward, slots, adapter_of), strict=True):
            assert error(got, exact[slot]) < 5e-4  # merged weights round otherwise


def _logits(folder: Path) -> torch.Tensor:
    model = load_model(ModelSettings(path=str(folder)), CPU).model
    return PagedRunner(model, rows=1, max_tokens=20).prefill({0: tokens(20, model.spec.vocab, 1)})[0]


def _rename(folder: Path, rename: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_a_checkpoint_with_a_vision_tower_serves_its_language_model(tmp_path: Path) -> None:
    make_hybrid("Qwen3_5Moe", tmp_path)
    alone = _logits(tmp_path)
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    file.write_text(json.dumps(whole))
    _rename(tmp_path, lambda name: name.replace("model.", "model.language_model.", 1))
    tensors = load_file(tmp_path / "model.safetensors")
    unused = {"model.visual.patch_embed.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}
    save_file(tensors | unused, tmp_path / "model.safetensors")
    assert torch.equal(_logits(tmp_path), alone)
    file.write_text(json.dumps(whole | {"text_config": text | {"linear_num_value_heads": -1}}))
    with pytest.raises(CheckpointError, match="text_config: linear_num_value_heads"):
        _logits(tmp_path)
    file.write_text(json.dumps(whole | {"text_config": None}))
    with pytest.raises(CheckpointError, match="text_config"):
        _logits(tmp_path)


def test_tensors_may_be_named_as_in_published_checkpoints(tmp_path: Path) -> None:
    make_hybrid("OlmoHybrid", tmp_path)
    alone = _logits(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "conv1d" in name]:
        parts = tensors.pop(name).split((40, 40, 48))
        for kind, part in zip("qkv", parts, strict=True):
            tensors[name.replace("conv1d", f"{kind}_conv1d")] = part.contiguous()
        layer = name.partition("linear_attn")[0]
        tensors[f"{layer}attention_layer_norm.weight"] = tensors.pop(f"{layer}input_layernorm.weight")
        tensors[f"{layer}feedforward_layer_norm.weight"] = tensors.pop(f"{layer}post_attention_layernorm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(_logits(tmp_path), alone)


@pytest.mark.parametrize("stem", ["KimiLinear", "BailingHybrid"])
def test_tensors_may_be_named_as_transformers_saves_them(stem: str, tmp_path: Path) -> None:
    reference = make_hybrid(stem, tmp_path)
    alone = _logits(tmp_path)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not {name for name in tensors if "A_log" in name} & set(reference.state_dict())
    if stem == "BailingHybrid":  # published files have a layer for the prediction of several tokens
        save_file(tensors | {"model.layers.4.enorm.weight": torch.ones(48)}, tmp_path / "model.safetensors")
    assert torch.equal(_logits(tmp_path), alone)


def test_published_configs_of_ling_are_read(tmp_path: Path) -> None:
    """They have another architecture, the rotary share of a whole head, and limits of activations."""
    make_hybrid("BailingHybrid", tmp_path)
    alone = _logits(tmp_path)
    file = tmp_path / "config.json"
    saved = {key: value for key, value in json.loads(file.read_text()).items() if not key.startswith("linear_")}
    rope = {"rope_type": "default", "rope_theta": 6e6, "partial_rotary_factor": 0.8}
    published = {"architectures": ["BailingMoeV3ForCausalLM"], "head_dim": 10, "rope_parameters": rope}
    limits = "share_expert_swiglu_limit_list"
    file.write_text(json.dumps(saved | published | {limits: None, "expert_swiglu_limit_list": [0, 0, 0, 0]}))
    assert torch.equal(_logits(tmp_path), alone)
    file.write_text(json.dumps(saved | published | {limits: [0, 0, 0, 0.1]}))
    assert not torch.allclose(_logits(tmp_path), alone, atol=1e-3)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["BailingHybridForCausalLM"]}))
    with pytest.raises(ValueError, match=f"transformers' code: it leaves out {limits}"):
        load_model(ModelSettings(path=str(tmp_path), model_impl="transformers"), CPU)
    file.write_text(json.dumps(saved | published | {limits: [0, 0, 0, -1]}))
    with pytest.raises(ValueError, match=limits):
        _logits(tmp_path)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"layer_types": ["linear_attention"] * 4}, "full attention"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(wrong: dict[str, Any], says: str, tmp_path: Path) -> None:
    make_hybrid("Qwen3_5", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(ValueError, match=says):
        load_model(ModelSettings(path=str(tmp_path)), CPU)


@pytest.mark.parametrize("stem", ["Qwen3_5", "OlmoHybrid", "KimiLinear", "BailingHybrid"])
def test_random_weights_give_finite_logits(stem: str, tmp_path: Path) -> None:
    make_hybrid(stem, tmp_path)
    model = load_model(ModelSettings(path=str(tmp_path), load_format="random"), CPU).model
    logits = PagedRunner(model, rows=1, max_tokens=20).prefill({0: tokens(20, model.spec.vocab, 1)})[0]
    assert 0.5 < logits.std() < 20
