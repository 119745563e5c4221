"""Checkpoints in fp8 as DeepSeek and Qwen publish them: codes, and a scale for each block of 128 x 128."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout.checkpoint_folder import CheckpointError
from rollout.config import ModelSettings
from rollout.models import Decoder, load_model
from rollout.models.coded import SCALES, CodedView, decoded
from rollout.models.loader import check_cut
from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import make_hybrid
from tests.support.models.latent import make_latent
from tests.support.models.mtp_layers import make_predicting
from tests.support.models.paged import PagedRunner
from tests.support.models.side_by_side import tokens
from trainer_bridge import quantize_fp8_block

CPU = torch.device("cpu")
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
#: Widths that end within blocks, and one that does not.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 160, "intermediate_size": 288, "num_hidden_layers": 2, "head_dim": 64},
    "qwen3_moe": {"hidden_size": 160, "moe_intermediate_size": 96, "num_hidden_layers": 2, "attention_bias": False},
    "DeepseekV3": {},
}
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "e_score_correction_bias", "shared_expert_gate")
EVEN = {"hidden_size": 64, "moe_intermediate_size": 32}


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a tensor for each projection of an expert, as published checkpoints have them."""
    found = {}
    for name, tensor in tensors.items():
        stem, stacked = name.rpartition("experts.")[0], name.rpartition("experts.")[2]
        if stacked not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = (
                {"down_proj": weight}
                if stacked == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            )
            found |= {f"{stem}experts.{expert}.{part}.weight": value.contiguous() for part, value in parts.items()}
    return found


def publish(family: str, folder: Path, scale_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Make a checkpoint in fp8; returns its tensors."""
    if family == "DeepseekV3":
        make_latent(family, folder, **EVEN)
    else:
        make_checkpoint(family, folder, **SIZES[family])
    return in_codes(folder, scale_dtype)


def in_codes(folder: Path, scale_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Quantise a checkpoint in place as published ones are; returns its tensors."""
    file, made = folder / "model.safetensors", {}
    for name, tensor in one_by_one(load_file(file)).items():
        if tensor.dim() == 2 and not any(part in name for part in KEPT):
            codes, scales = quantize_fp8_block(tensor)
            made[name], made[name + SCALES] = codes, scales.to(scale_dtype)
        else:
            made[name] = tensor
    save_file(made, file, {"format": "pt"})
    edit(folder, quantization_config=QUANTIZED)
    return made


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_are_decoded_where_no_kernel_reads_their_codes(family: str, tmp_path: Path) -> None:
    """On a GPU in float32; a model on the meta device is the outline of one there."""
    publish(family, tmp_path)
    formats = {}
    for dtype in ("float32", "bfloat16"):
        model = load_model(ModelSettings(path=str(tmp_path), dtype=dtype), torch.device("meta")).model
        formats[dtype] = model.format
        assert any(isinstance(view, CodedView) for view in model.hf_views().values()) == (dtype == "bfloat16")
    assert formats == {"float32": "plain", "bfloat16": "fp8_block"}


def edit(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


def load(folder: Path, weights: str = "auto", dtype: str = "float32", mtp: str = "unused") -> Decoder:
    model = load_model(ModelSettings(path=str(folder), dtype=dtype), CPU, weights=weights, mtp=mtp).model
    assert isinstance(model, Decoder)
    return model


def logits(model: Decoder) -> torch.Tensor:
    return PagedRunner(model, rows=1, max_tokens=12).prefill({0: tokens(11, model.spec.vocab, 3)})[0]


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SIZES)
def test_codes_and_scales_are_kept_as_they_are(family, scale_dtype, tmp_path):
    made = publish(family, tmp_path, scale_dtype)
    model = load(tmp_path)
    assert model.format == "fp8_block"
    views, scales, kept = model.hf_views(), model.scale_views(), 0
    for name, tensor in made.items():
        view = views.get(name)
        if isinstance(view, CodedView):
            assert torch.equal(torch.as_tensor(view).view(view.shape), tensor.view(torch.uint8)), name
            assert torch.equal(scales[name], made[name + SCALES].float()), name
            kept += 1
        elif tensor.dtype == torch.float8_e4m3fn:  # a product that is never coded
            assert view is not None and torch.equal(view, decoded(tensor, made[name + SCALES])), name
    assert kept == len(scales) > 8


@pytest.mark.parametrize("weights", ["auto", "plain", "fp8_row"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_logits_are_those_of_transformers_with_the_decoded_weights(family, weights, tmp_path):
    made = publish(family, tmp_path)
    model = load(tmp_path, weights)
    wide = {
        name: decoded(tensor, made[name + SCALES]) if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in made.items()
        if not name.endswith(SCALES)
    }
    save_file(wide, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path, quantization_config=None)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([tokens(11, model.spec.vocab, 3)])).logits[0]
    error = (logits(model) - expected).abs().max()
    assert (error < 1e-3) == (weights != "fp8_row"), "rows of codes are other codes"
    again = load(tmp_path, "fp8_block")  # weights that were decoded from codes become these codes, up to a scale's bit
    assert (logits(again) - expected).abs().max() < 1e-2


def test_sixteen_bits_are_never_quantised_by_auto(tmp_path):
    make_checkpoint("qwen3", tmp_path)
    assert load(tmp_path).format == "plain"


@pytest.mark.parametrize(
    "changed", [{"quant_method": "gptq"}, {"weight_block_size": [64, 64]}, {"weight_block_size": None}, {"fmt": "e5m2"}]
)
def test_other_quantisation_is_refused(changed, tmp_path):
    publish("qwen3", tmp_path)
    edit(tmp_path, quantization_config=QUANTIZED | changed)
    with pytest.raises(ValueError, match="quantization_config is not supported"):
        load(tmp_path)


@pytest.mark.parametrize("fault", ["no scales", "scales of another shape", "scales alone", "codes of a vector"])
def test_codes_and_scales_that_do_not_fit_are_named(fault, tmp_path):
    made = publish("qwen3", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "no scales":
        del made[name + SCALES]
    elif fault == "scales of another shape":
        made[name + SCALES] = made[name + SCALES][:1].contiguous()
    elif fault == "scales alone":
        made[name] = made[name].float()
    else:
        name = "model.norm.weight"
        made[name], made[name + SCALES] = made[name].to(torch.float8_e4m3fn), torch.ones(2)
    save_file(made, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(tmp_path)


@pytest.mark.parametrize("weights", ["auto", "plain"])
@pytest.mark.parametrize("scale", [-0.5, float("nan"), float("inf")])
def test_scales_that_are_negative_or_not_finite_are_refused_by_name(scale, weights, tmp_path):
    made = publish("qwen3", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight" + SCALES
    made[name][-1, -1] = scale
    save_file(made, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(tmp_path, weights)


@pytest.mark.parametrize("weights", ["auto", "plain"])
def test_a_scale_of_zero_makes_a_block_of_zeros(weights, tmp_path):
    made = publish("qwen3", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    made[name + SCALES][0, 0] = 0
    save_file(made, tmp_path / "model.safetensors", {"format": "pt"})
    view = load(tmp_path, weights).hf_views()[name]
    values = view.decoded_values() if isinstance(view, CodedView) else view
    assert torch.equal(values, decoded(made[name], made[name + SCALES]))
    assert not values[:128, :128].any() and values[128:].any()


@pytest.mark.parametrize("name", ["DeepseekV3", "Qwen3_5Moe"])
def test_a_layer_for_multi_token_prediction_is_read_from_codes(name, tmp_path):
    """Its experts are kept as codes; its other products are decoded."""
    if name == "DeepseekV3":
        make_predicting(name, tmp_path, make=lambda folder, seed: make_latent(name, folder, seed, **EVEN))
    else:
        kinds = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
        make_predicting(name, tmp_path, make=lambda folder, seed: make_hybrid(name, folder, seed, **EVEN, **kinds))
    made = in_codes(tmp_path)
    head = load(tmp_path, mtp="needed").draft
    views = {name: view for region in head.update_regions() for name, view in region.alternatives[0].items()}
    scales, kept = head.scale_views(), 0
    for name, view in views.items():
        if isinstance(view, CodedView):
            assert torch.equal(torch.as_tensor(view).view(view.shape), made[name].view(torch.uint8)), name
            assert torch.equal(scales[name], made[name + SCALES]), name
            kept += 1
        elif name + SCALES in made:
            assert torch.equal(view, decoded(made[name], made[name + SCALES])), name
    assert kept > 8


def test_a_cut_within_a_block_is_refused_at_the_start(tmp_path):
    make_checkpoint("qwen3", tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_size=128)
    settings = ModelSettings(path=str(tmp_path))
    check_cut(settings, tmp_path, 2)
    with pytest.raises(ValueError, match="2 ranks would cut self_attn.k_proj .*: use fewer ranks"):
        check_cut(settings, tmp_path, 2, "fp8_block")
    with pytest.raises(ValueError, match="fp8_row has a scale for a row of weights, and 2 ranks cut these rows"):
        check_cut(settings, tmp_path, 2, "fp8_row")
