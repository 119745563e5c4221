"""Checkpoints of gpt-oss with experts in MXFP4: the model keeps them as codes that have the same values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels.moe.formats import ExpertWeights
from safetensors.torch import load_file, save_file

from rollout.checkpoint_folder import CheckpointError
from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.models.coded import CodedView
from rollout.models.loader import AskedFormat, LoadedModel
from rollout.models.mxfp4 import decode_into
from tests.support.models.mxfp4 import make_mxfp4
from tests.support.models.paged import check
from tests.support.settings import settings_of

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 32}


def load(folder: Path, weights: AskedFormat = "auto", **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), **settings), CPU, weights=weights)


def values(view: torch.Tensor) -> torch.Tensor:
    return view.decoded_values() if isinstance(view, CodedView) else view


@pytest.mark.parametrize("weights", ["auto", "plain"])
def test_logits_and_values_are_those_of_transformers(weights: AskedFormat, tmp_path: Path) -> None:
    reference = make_mxfp4(tmp_path, **SIZES)
    loaded = load(tmp_path, weights)
    check(loaded, reference, fused=False)
    views = loaded.trainer_views()
    assert all(torch.equal(values(views[name]), tensor) for name, tensor in reference.state_dict().items())
    coded = {name for name, view in views.items() if isinstance(view, CodedView)}
    experts = {name for name in views if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert coded == (experts if weights == "auto" else set())


def test_every_number_with_every_scale_has_its_value() -> None:
    """Up to a scale with which 6 is above the largest float32."""
    scales = torch.arange(253, dtype=torch.uint8)[None, :, None]  # [1, outputs, groups]
    blocks = torch.tensor([2 * i + 16 * (2 * i + 1) for i in range(8)] * 2, dtype=torch.uint8).expand(1, 253, 1, 16)
    codes, powers = torch.zeros(1, 253, 32, dtype=torch.uint8), torch.zeros(1, 253, 1, dtype=torch.uint8)
    view = CodedView.of(ExpertWeights(codes, powers, "mxfp8"), (1, 253, 32), turned=True)
    decode_into(view, blocks, scales)
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    expected = torch.cat([half, -half]).repeat(2) * torch.exp2(scales.double() - 127)
    assert torch.equal(ExpertWeights(codes, powers, "mxfp8").dequantized(), expected)
    assert torch.equal(view.decoded_values().mT, expected.float())


def test_bfloat16_tensors_copied_into_the_views_make_what_a_fresh_start_has(tmp_path: Path) -> None:
    make_mxfp4(tmp_path / "old", **SIZES)
    reference = make_mxfp4(tmp_path / "new", 1, **SIZES)
    ours, fresh = (load(tmp_path / name, dtype="bfloat16").model for name in ("old", "new"))
    views = ours.hf_views()
    assert not torch.equal(ours.layers[0].feed_forward.down, fresh.layers[0].feed_forward.down)
    for name, tensor in reference.state_dict().items():
        views[name].copy_(tensor.bfloat16())
    for (name, mine), theirs in zip(ours.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_experts_in_16_bits_are_not_quantised_whatever_the_config_says(tmp_path: Path) -> None:
    reference = make_mxfp4(tmp_path, **SIZES)
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in reference.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load(tmp_path, dtype="bfloat16").model
    assert model.format == "plain" and all(parameter.dtype != torch.uint8 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "device", "format"),
    [
        ("float16", "cpu", "plain"),
        ("float16", "cuda", "plain"),
        ("float32", "cpu", "mxfp8"),
        ("float32", "auto", "plain"),
        ("bfloat16", "cuda", "mxfp8"),
    ],
)
def test_experts_are_decoded_where_no_kernel_reads_their_codes(
    dtype: str, device: str, format: str, tmp_path: Path
) -> None:
    """Experts that stay codes are read on a GPU in bfloat16, and on a CPU in what it computes in."""
    make_mxfp4(tmp_path, **SIZES)
    settings = settings_of(ModelSettings, path=str(tmp_path), dtype=dtype, device=device)
    assert load_model(settings, CPU if device == "cpu" else torch.device("meta")).model.format == format


def test_random_weights_are_in_the_format_of_the_checkpoint(tmp_path: Path) -> None:
    make_mxfp4(tmp_path, **SIZES)
    (tmp_path / "model.safetensors").unlink()
    random, plain = (load(tmp_path, weights, load_format="random").model for weights in ("auto", "plain"))
    views = plain.hf_views()
    for name, view in random.hf_views().items():
        error = (values(view) - views[name]).abs().max()
        assert (0 < error < 0.1) if isinstance(view, CodedView) else error == 0, name


def test_a_format_in_which_gates_and_values_would_share_scales_is_refused(tmp_path: Path) -> None:
    make_mxfp4(tmp_path, **SIZES)
    with pytest.raises(ValueError, match="weight_dtype = mxfp8"):
        load(tmp_path, "fp8_block")


def test_scales_that_are_nan_are_refused_by_name(tmp_path: Path) -> None:
    make_mxfp4(tmp_path, **SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    tensors[name][-1, -1, -1] = 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)
