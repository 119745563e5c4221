"""Weights kept as codes: the model equals a plain one with the decoded weights."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels.moe.formats import Format

from rollout.config import ModelSettings
from rollout.models import Decoder, load_model
from rollout.models.coded import CodedView
from rollout.models.fused import FusedDecoder
from rollout.models.fused_experts import ExpertPlans
from rollout.models.layers import SparseFeedForward
from scripts.check.weight_formats import decode_into, round_inputs
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import PagedRunner
from tests.support.models.side_by_side import MODELS, SEEDS, coarse, error, errors, save_rounded, side_by_side, tokens
from tests.support.settings import settings_of

CPU = torch.device("cpu")
#: Without experts.
DENSE: list[tuple[str, Format]] = [("qwen3", "fp8_block"), ("llama", "fp8_row"), ("qwen2", "mxfp8")]
#: A family a format: with a dense layer in between, with other names, with all heads normalised together.
CODED: list[tuple[str, Format]] = [("qwen3_moe", "mxfp8"), ("mixtral", "fp8_block"), ("olmoe", "fp8_row")]
#: Tensors of all experts with inputs before outputs; gates and values alternate, or come one after the other.
TURNED: list[tuple[str, Format]] = [("gpt_oss", "mxfp8"), ("gpt_oss", "fp8_row"), ("llama4", "fp8_block")]


def load(folder: Path, dtype: str, weights: Format = "plain", **settings: Any) -> Decoder:
    return load_model(settings_of(ModelSettings, path=str(folder), dtype=dtype, **settings), CPU, weights=weights).model


def sparse(model: Decoder) -> list[SparseFeedForward]:
    return [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, SparseFeedForward)]


def logits(model: Decoder) -> torch.Tensor:
    return PagedRunner(model, rows=1, max_tokens=12).prefill({0: tokens(11, model.spec.vocab, 3)})[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "format"), [*CODED, *TURNED, *DENSE, ("mixtral", "mxfp8"), ("mixtral", "fp8_row")])
def test_logits_are_those_of_a_plain_model_with_the_decoded_weights(family, format, dtype, tmp_path):
    stem, sizes = MODELS[family]
    make_checkpoint(stem, tmp_path, **sizes)
    plain, coded = load(tmp_path, dtype), load(tmp_path, dtype, format)
    assert all(mlp.gate_up.dtype == torch.uint8 for mlp in sparse(coded))
    before, after = logits(plain), logits(coded)
    assert torch.equal(after, logits(decode_into(plain, coded))) and not torch.allclose(after, before, atol=1e-2)


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:no measured plan")
@pytest.mark.parametrize(("family", "format"), [CODED[0], *nightly(*CODED[1:3], *TURNED)])
def test_fused_steps_are_as_close_to_float32_as_generic_ones(family, format, tmp_path):
    """Many, some and few tokens: the kernels by expert and by output read the model's own codes and scales."""
    plans, runs = ExpertPlans(coarse, joined_tokens=2), []
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        save_rounded(family, folder, seed)
        coded, wide = (
            load(folder, "bfloat16", format),
            decode_into(load(folder, "float32"), load(folder, "float32", format)),
        )
        runs.append(side_by_side(coded, wide, plans=plans))
    by_kernels, by_modules = errors(runs)
    assert by_kernels < 1.25 * by_modules + 1e-4


@pytest.mark.parametrize(("family", "format"), [*CODED, *DENSE])
def test_attention_mlps_and_experts_are_coded_and_nothing_else(family, format, tmp_path):
    make_checkpoint(family, tmp_path, **MODELS[family][1])
    coded = load(tmp_path, "bfloat16", format)
    names = {name for region in coded.hf_regions() for name in region.alternatives[0]}
    kept = {name for name in names if isinstance(coded.hf_views()[name], CodedView)}
    stay = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "block_sparse_moe.gate.weight", "bias")
    assert kept == {name for name in names if not any(part in name for part in stay)}
    scales = coded.scale_views()
    for name in kept:
        (outputs, inputs), view = coded.hf_views()[name].shape, scales[name]
        shapes = {"fp8_block": (-(-outputs // 128), -(-inputs // 128)), "fp8_row": (outputs,)}
        assert tuple(view.shape) == (shapes | {"mxfp8": (outputs, inputs // 32)})[format]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("family", "format"), CODED)
def test_weights_copied_into_the_views_become_codes(family, format, stacked, tmp_path):
    """Under the names of either layout; a step equals that of a model loaded with these weights."""
    sizes = MODELS[family][1]
    make_checkpoint(family, tmp_path / "old", **sizes)
    make_checkpoint(family, tmp_path / "new", 5, **sizes)
    model, fresh = load(tmp_path / "old", "float32", format), load(tmp_path / "new", "float32", format)
    source = load(tmp_path / "new", "float32")
    views, weights = model.hf_views(), source.hf_views()
    for region in source.hf_regions():
        for name in region.alternatives[-1 if stacked else 0]:
            views[name].copy_(weights[name].half() if stacked else weights[name])
    if stacked:
        for name, view in load(tmp_path / "new", "float16").hf_views().items():
            if "experts" not in name:
                continue
            fresh.hf_views()[name].copy_(view)
        for name, weight in weights.items():
            if "experts" not in name:
                fresh.hf_views()[name].copy_(weight.half())
    for (name, mine), theirs in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert torch.equal(logits(model), logits(fresh))


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_random_weights_are_the_plain_ones_rounded(family, tmp_path):
    make_checkpoint(family, tmp_path, **MODELS[family][1])
    coded = load(tmp_path, "bfloat16", "fp8_block", load_format="random", random_seed=3)
    plain = load(tmp_path, "bfloat16", load_format="random", random_seed=3)
    other = load(tmp_path, "bfloat16", "fp8_block", load_format="random", random_seed=4)
    for region in plain.hf_regions():
        for name, view in region.alternatives[0].items():
            other.hf_views()[name].copy_(view)
    for (name, mine), theirs in zip(coded.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_codes_are_not_taken_for_weights(tmp_path):
    make_checkpoint("mixtral", tmp_path, **MODELS["mixtral"][1])
    model = load(tmp_path, "float32", "mxfp8")
    view = model.hf_views()["model.layers.0.mlp.experts.down_proj"]
    with pytest.raises(TypeError, match="floating point"):
        view.copy_(copy.copy(model.layers[0].feed_forward.down.data))
    with pytest.raises(ValueError, match="shape"):
        view.copy_(torch.zeros(view.shape[1:]))


def test_an_impossible_format_is_refused_before_weights_are_read(tmp_path):
    make_checkpoint("mixtral", tmp_path / "odd")
    (tmp_path / "odd" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Exception, match="cannot be read"):
        load(tmp_path / "odd", "float32")
    make_checkpoint("mixtral", tmp_path / "odd")
    with pytest.raises(ValueError, match="multiples of 32, not 36"):
        load(tmp_path / "odd", "float32", "mxfp8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("begin", [20, *nightly(1, 3, 100)])
def test_activations_become_codes_from_a_number_of_tokens_on(begin, tmp_path):
    """As in transformers' model, whose products get rounded inputs; with few tokens and with many."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    reference = make_checkpoint("qwen3", tmp_path, **sizes, head_dim=64, num_hidden_layers=2)
    coded = load(tmp_path, "float32", "fp8_block")
    decoded = {name: view for name, view in coded.hf_views().items() if isinstance(view, CodedView)}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in decoded:
                parameter.copy_(decoded[name].decoded_values())

    def rounded(module, args):
        blocks = args[0].unflatten(-1, (-1, 128))
        scales = blocks.abs().amax(-1, keepdim=True) / 448
        return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)

    ids = tokens(150, coded.spec.vocab, 3)
    prompts = [ids[:2], ids[:20], ids]
    with torch.no_grad():
        whole = [reference(torch.tensor([ids])).logits[0] for ids in prompts]
        for name, module in reference.named_modules():
            if f"{name}.weight" in decoded:
                module.register_forward_pre_hook(rounded)
        by_codes = [reference(torch.tensor([ids])).logits[0] for ids in prompts]
    forward = FusedDecoder(coded, codes_from=begin)
    assert begin == 1 or begin - 1 in forward.kernel_sizes()
    modules = round_inputs(decode_into(load(tmp_path, "float32"), coded), coded)
    by_modules = PagedRunner(modules, rows=1, max_tokens=150).prefill({0: prompts[-1]})[0]
    assert error(by_modules, by_codes[-1]) < 0.3 * error(by_modules, whole[-1])
    for ids, with_codes, without in zip(prompts, by_codes, whole, strict=True):
        got = PagedRunner(coded, rows=1, max_tokens=len(ids), forward=forward).prefill({0: ids})[0]
        right, wrong = (with_codes, without) if len(ids) >= begin else (without, with_codes)
        # A value that is near the middle of two codes may be rounded to either.
        assert error(got, right) < 0.3 * error(got, wrong) and error(wrong, right) > 0.01
