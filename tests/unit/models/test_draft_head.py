"""Draft models: their checkpoints, layouts of names, the tensors of updates, and errors that say what to change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import EngineSettings, ModelSettings
from rollout.models import CheckpointError, LoadedModel, load_model
from rollout.models.batch import AttentionBatch, KVCache, PromptChunk
from rollout.models.draft_head import PREFIX
from rollout.weights.parameter_map import ParameterMap, update_names
from tests.support.models.draft_heads import head_config, head_forward, head_logits, random_head, save_head
from tests.support.models.families import make_checkpoint
from tests.support.models.latent import make_latent
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import Manifest, pack

CPU = torch.device("cpu")


@pytest.fixture
def target(tmp_path: Path) -> Any:
    """A target of two layers below `tmp_path`; returns transformers' model."""
    return make_checkpoint("qwen3", tmp_path / "target", 0)


def load(tmp_path: Path, **settings: Any) -> LoadedModel:
    model = ModelSettings(path=str(tmp_path / "target"), **settings)
    return load_model(model, CPU, draft=tmp_path / "head")


def head_for(target: Any, tmp_path: Path, draft_vocab: int | None = None, **config: Any) -> tuple[dict, dict]:
    config = head_config(target.config, draft_vocab, **config)
    tensors = random_head(config)
    save_head(tmp_path / "head", config, tensors)
    return config, tensors


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("mapped", "fused"), [(False, False), (True, False), (True, True)])
def test_a_forward_is_that_of_the_reference(target, tmp_path, norm_first, mapped, fused) -> None:
    """By torch, and by the fused kernels in Triton's interpreter."""
    vocab = target.config.vocab_size
    config, tensors = head_for(target, tmp_path, vocab // 2 if mapped else None, norm_before_residual=norm_first)
    model = load(tmp_path, dtype="float32").model
    head, count, pages = model.draft, 21, 6
    read_TF = torch.randn(count, 3 * config["hidden_size"], generator=torch.Generator().manual_seed(1))
    following_T = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(2))
    head.fused = fused
    kv = KVCache.allocate(model.spec, pages + 1, 4, torch.float32, CPU)
    batch = AttentionBatch(
        positions_T=torch.arange(count),
        kv_slots_T=torch.arange(count) + 4,
        page_table_BP=torch.arange(1, pages + 1, dtype=torch.int32)[None],
        context_lens_B=torch.tensor([count], dtype=torch.int32),
        max_context=count,
        chunks=(PromptChunk(0, count, count),),
    )
    fused_TH = head.fuse(read_TF, model.norm)
    before_TH = fused_TH.clone()
    hidden_TH = head(following_T, model.embedding, fused_TH, batch, kv)
    assert torch.equal(fused_TH, before_TH), "its input is as before"
    expected_TH = head_forward(config, tensors, model.embed.detach()[following_T], read_TF @ tensors["fc.weight"].T)
    torch.testing.assert_close(hidden_TH, expected_TH, rtol=1e-4, atol=1e-5)
    logits_TV = head.compute_logits(hidden_TH, model.lm_head)
    torch.testing.assert_close(logits_TV, head_logits(config, tensors, expected_TH), rtol=1e-4, atol=1e-4)
    assert logits_TV.isfinite().any(0).sum() == (vocab // 2 if mapped else vocab)


def test_other_layouts_are_the_same_head(target, tmp_path) -> None:
    """`layers.0` in the place of `midlayer`, a nested config, layers counted by the ones before them, an embedding."""
    config, tensors = head_for(target, tmp_path)
    first = load(tmp_path).model
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    renamed["embed_tokens.weight"] = torch.zeros(config["vocab_size"], config["hidden_size"])
    nested = {
        key: value
        for key, value in config.items()
        if key not in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    }
    more = {name: config[name] for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    save_head(tmp_path / "head", {"transformer_layer_config": nested, **more}, renamed)
    second = load(tmp_path).model
    assert first.spec == second.spec
    assert all(torch.equal(a, second.draft.views()[name]) for name, a in first.draft.views().items())
    inner = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
    save_head(
        tmp_path / "head",
        {**nested, **inner},
        renamed | {"fc.weight": tensors["fc.weight"][:, : 2 * config["hidden_size"]]},
    )
    assert load(tmp_path).model.draft.spec.taps == (1, 2)


def test_the_output_layer_may_be_that_of_the_target(target, tmp_path) -> None:
    config, tensors = head_for(target, tmp_path)
    del tensors["lm_head.weight"]
    save_head(tmp_path / "head", config, tensors)
    model = load(tmp_path).model
    assert model.draft.lm_head is None
    hidden = torch.randn(2, config["hidden_size"])
    expected = head_logits(config, {**tensors, "lm_head.weight": model.lm_head.detach()}, hidden)
    torch.testing.assert_close(model.draft.compute_logits(hidden, model.lm_head), expected, rtol=1e-4, atol=1e-4)


def test_its_kv_is_one_more_layer_of_the_pool(target, tmp_path) -> None:
    head_for(target, tmp_path)
    without = load_model(ModelSettings(path=str(tmp_path / "target")), CPU).spec
    spec = load(tmp_path).spec
    assert spec.kv_shapes == (*without.kv_shapes, (2, 8, 8))
    assert spec.kv_bytes_per_token(torch.float32) - without.kv_bytes_per_token(torch.float32) == 2 * 2 * 8 * 4


def test_random_weights_of_the_target_are_the_same_with_it(target, tmp_path) -> None:
    head_for(target, tmp_path, target.config.vocab_size // 2)
    plain = load_model(ModelSettings(path=str(tmp_path / "target"), load_format="random"), CPU).model
    model = load(tmp_path, load_format="random").model
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert all(view.isfinite().all() and view.std() > 0 for view in (model.draft.fc.weight, model.draft.lm_head))


# --- updates ---------------------------------------------------------------------------------------------------------


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return pack(1, [(name, "float32", tuple(t.shape)) for name, t in tensors.items()], 1 << 20)


@pytest.mark.parametrize("load_format", ["auto", "random"])
def test_updates_may_carry_it_or_parts_of_it_or_nothing(target, tmp_path, load_format) -> None:
    _, tensors = head_for(target, tmp_path, target.config.vocab_size // 2)
    loaded = load(tmp_path, load_format=load_format)
    parameters = ParameterMap(loaded.trainer_views(), update_names(ModelSettings(load_format=load_format), loaded))
    whole = load_file(tmp_path / "target" / "model.safetensors")
    draft = {PREFIX + name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    both = parameters.check(manifest_of(whole | draft))
    assert {name for name in both.copied if name.startswith(PREFIX)} == draft.keys()
    for some in ({}, {f"{PREFIX}fc.weight": tensors["fc.weight"]}):
        for again in (False, True):
            fit = parameters.check(manifest_of(whole | some), whole=again)
            assert {name for name in fit.copied if name.startswith(PREFIX)} == some.keys()
    mapped = parameters.check(manifest_of(whole | {f"{PREFIX}d2t": torch.zeros(3)}))
    assert mapped.unused == (f"{PREFIX}d2t",)
    with pytest.raises(WeightsRejected, match="missing"):
        parameters.check(manifest_of(draft))
    with pytest.raises(WeightsRejected, match=r"draft\.fc\.weight"):
        parameters.check(manifest_of(whole | {f"{PREFIX}fc.weight": torch.zeros(2, 2)}))


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2}, "one layer"),
        ({"hidden_size": 32}, "must be"),
        ({"target_hidden_size": 999}, "must be"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1]}, "ascending"),
        ({"draft_vocab_size": 10}, "d2t"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"intermediate_size": 1 << 40}, "intermediate_size"),
        ({"norm_before_residual": 1}, "norm_before_residual"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(target, tmp_path, changes, said) -> None:
    config, tensors = head_for(target, tmp_path)
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.hidden_norm.weight", "norm.weight"])
def test_tensors_that_do_not_fit_are_named(target, tmp_path, name) -> None:
    config, tensors = head_for(target, tmp_path)
    file = tmp_path / "head" / "model.safetensors"
    save_file({**tensors, name: torch.zeros(3, 5)}, file)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=f"missing: {name}"):
        load(tmp_path)


@pytest.mark.parametrize("offset", [-1, 1000, "twice"])
def test_tokens_that_the_target_lacks_are_refused(target, tmp_path, offset) -> None:
    config, tensors = head_for(target, tmp_path, target.config.vocab_size // 2)
    wrong = tensors["d2t"].clone()
    wrong[0] = wrong[1] + 1 if offset == "twice" else offset
    save_head(tmp_path / "head", config, tensors | {"d2t": wrong})
    with pytest.raises(CheckpointError, match="d2t"):
        load(tmp_path)


@pytest.mark.parametrize("stored", [torch.zeros(3, dtype=torch.int64), "float"])
def test_offsets_of_a_wrong_kind_are_refused(target, tmp_path, stored) -> None:
    config, tensors = head_for(target, tmp_path, target.config.vocab_size // 2)
    save_head(tmp_path / "head", config, tensors | {"d2t": tensors["d2t"].float() if stored == "float" else stored})
    with pytest.raises(CheckpointError, match="d2t.*int64"):
        load(tmp_path)


def test_settings_that_do_not_go_together_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="speculation_model is for"):
        EngineSettings(speculation="suffix", speculation_model="x")


def test_models_that_cannot_be_drafted_for_are_refused(target, tmp_path) -> None:
    head_for(target, tmp_path)
    with pytest.raises(ValueError, match="speculation_model"):
        load(tmp_path, model_impl="transformers")
    head_for(make_latent("DeepseekV4", tmp_path / "target"), tmp_path)
    with pytest.raises(CheckpointError, match="residual streams"):
        load(tmp_path)
