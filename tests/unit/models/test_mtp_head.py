"""Layers for multi-token prediction as draft models: their forward, tensors, updates, and errors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_layers

from rollout.config import EngineSettings, ModelSettings
from rollout.models import CheckpointError, LoadedModel, load_model
from rollout.models.batch import AttentionBatch, KVCache, PromptChunk
from rollout.models.fused_experts import FusedExperts
from rollout.weights.parameter_map import ParameterMap, update_names
from tests.support.models.every_family import EVERY_FAMILY
from tests.support.models.hybrids import make_hybrid
from tests.support.models.mtp_layers import LAYOUTS, Predicting, add_tensors, make_predicting
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import Manifest, pack

CPU = torch.device("cpu")


def load(folder: Path, mtp: str = "needed", **settings) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), **settings), CPU, mtp=mtp)


def random_input(found: Predicting, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of a target before its last norm, [T, H], and the tokens that follow."""
    config = found.model.config
    hidden_TH = 3 * torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(1))
    return hidden_TH, torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("parts", [(21,), (13, 8)], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_forward_is_that_of_the_reference(tmp_path, name, parts) -> None:
    found, count, pages = make_predicting(name, tmp_path), sum(parts), 6
    model = load(tmp_path, dtype="float32").model
    head, kv = model.draft, KVCache.allocate(model.spec, pages + 1, 4, torch.float32, CPU)
    hidden_TH, following_T = random_input(found, count)
    outputs, begin = [], 0
    for length in parts:
        end = begin + length
        batch = AttentionBatch(
            positions_T=torch.arange(begin, end),
            kv_slots_T=torch.arange(begin, end) + 4,
            page_table_BP=torch.arange(1, pages + 1, dtype=torch.int32)[None],
            context_lens_B=torch.tensor([end], dtype=torch.int32),
            max_context=end,
            chunks=(PromptChunk(0, length, end),),
        )
        read_TH = head.fuse(hidden_TH[begin:end], model.norm)
        outputs.append(head(following_T[begin:end], model.embedding, read_TH, batch, kv))
        begin = end
    embeds_TH = found.model.get_input_embeddings()(following_T)
    expected_TH = found.forward(embeds_TH, found.model.model.norm(hidden_TH))
    torch.testing.assert_close(torch.cat(outputs), expected_TH, rtol=1e-4, atol=1e-4)
    logits_TV = head.compute_logits(torch.cat(outputs), model.lm_head)
    torch.testing.assert_close(logits_TV, found.model.lm_head(expected_TH), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpLayer"), reason="this release of transformers has no such layer")
@pytest.mark.parametrize("name", ["MiMo", "Glm4Moe"])
def test_the_reference_is_that_of_transformers(tmp_path, name) -> None:
    """Newer releases have the layer as a class of its own."""
    found = make_predicting(name, tmp_path)
    config, block = found.model.config, found.block
    config.mtp_hidden_states_first = found.layout.hidden_first
    layer = modeling_layers.MtpLayer(config, type(block), type(block.input_layernorm), config.num_hidden_layers - 1)
    layer.mtp_block = block
    names = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "fc", "post_norm": "norm"}
    for theirs, ours in names.items():
        getattr(layer, theirs).weight.data = found.part(getattr(found.layout, ours))
    hidden_TH, following_T = random_input(found, 9)
    embeds_TH, positions_1T = found.model.get_input_embeddings()(following_T), torch.arange(9)[None]
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    turned = found.model.model.rotary_emb(embeds_TH[None], positions_1T)
    with torch.inference_mode():
        theirs_1TH = layer(embeds_TH[None], hidden_TH[None], turned, mask, positions_1T, None)
    torch.testing.assert_close(found.forward(embeds_TH, hidden_TH), theirs_1TH[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["MiMo", "Glm4Moe", "Qwen3_5"])
def test_a_forward_by_kernels_is_that_of_torch(tmp_path, name) -> None:
    """In Triton's interpreter; experts of 16 bits, as their kernels take no others."""
    found = make_predicting(name, tmp_path)
    sparse = name == "Glm4Moe"
    dtype = torch.bfloat16 if sparse else torch.float32
    model = load(tmp_path, dtype="bfloat16" if sparse else "float32").model
    head, count = model.draft, 16
    hidden_TH, following_T = random_input(found, count)
    outputs = []
    for fused in (False, True):
        kv = KVCache.allocate(model.spec, count + 1, 4, dtype, CPU)
        batch = AttentionBatch(
            positions_T=torch.zeros(count, dtype=torch.int64),
            kv_slots_T=torch.arange(1, count + 1) * 4,
            page_table_BP=torch.arange(1, count + 1, dtype=torch.int32)[:, None],
            context_lens_B=torch.ones(count, dtype=torch.int32),
            max_context=1,
        )
        head.fused, run_experts = fused, None
        if fused and sparse:
            experts = FusedExperts([head.feed_forward], head.spec.eps)
            experts.begin_step(count)
            run_experts = experts.output
        read_TH = head.fuse(hidden_TH.to(dtype), model.norm)
        before_TH = read_TH.clone()
        outputs.append(head(following_T, model.embedding, read_TH, batch, kv, run_experts))
        assert torch.equal(read_TH, before_TH), "its input is as before"
        keys = kv.k[-1]
        outputs.append(keys[1 : count + 1, 0])
    tolerance = 0.1 if sparse else 1e-4
    for by_torch, by_kernels in zip(outputs[:2], outputs[2:], strict=True):
        assert by_torch.abs().max() > 1
        difference = (by_torch - by_kernels).abs().float()
        # A router's choice may differ by rounding: few tokens do.
        assert (difference.amax(-1).flatten() < tolerance).float().mean() >= (0.75 if sparse else 1.0)


def test_its_kv_is_one_more_layer_and_the_model_is_the_same(tmp_path) -> None:
    make_predicting("Glm4Moe", tmp_path)
    plain, loaded = load(tmp_path, "unused"), load(tmp_path)
    assert plain.model.draft is None and not plain.draft_names()
    assert loaded.spec.kv_shapes == (*plain.spec.kv_shapes, plain.spec.kv_shapes[-1])
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, loaded.model.get_parameter(name)), name


@pytest.mark.parametrize(("name", "experts"), [("MiMo", "plain"), ("Glm4Moe", "plain"), ("Glm4Moe", "fp8_row")])
def test_random_weights_of_the_model_are_the_same_with_it(tmp_path, name, experts) -> None:
    make_predicting(name, tmp_path)
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    settings = ModelSettings(path=str(tmp_path), load_format="random")
    plain, model = (load_model(settings, CPU, weights=experts, mtp=mtp).model for mtp in ("unused", "needed"))
    for key, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(key)), key
    assert all(view.float().isfinite().all() for view in model.draft.parameters()) and model.draft.fc.weight.std() > 0


# --- updates ---------------------------------------------------------------------------------------------------------


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return pack(1, [(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()], 1 << 20)


def with_stacked_experts(found: Predicting) -> dict[str, torch.Tensor]:
    """The layer's tensors as trainers have them: all experts together."""
    kept = {name: tensor for name, tensor in found.tensors.items() if ".experts." not in name}
    stacked = {name: tensor for name, tensor in found.block.state_dict().items() if ".experts." in name}
    return kept | {found.prefix + found.layout.layer + name: tensor for name, tensor in stacked.items()}


@pytest.mark.parametrize("load_format", ["auto", "random"])
@pytest.mark.parametrize("name", ["MiMo", "Glm4Moe", "Qwen3_5Moe"])
def test_updates_may_carry_it_or_parts_of_it_or_nothing(tmp_path, name, load_format) -> None:
    found = make_predicting(name, tmp_path)
    loaded = load(tmp_path, load_format=load_format)
    parameters = ParameterMap(loaded.trainer_views(), update_names(ModelSettings(load_format=load_format), loaded))
    whole = {key: t for key, t in load_file(tmp_path / "model.safetensors").items() if key not in found.tensors}
    layer = {key: t for key, t in whole.items() if key.startswith(found.prefix)}  # copies of the model's tensors
    model = {key: t for key, t in whole.items() if key not in layer}
    stacked = with_stacked_experts(found)
    some = {f"{found.prefix}{found.layout.fc}.weight": found.part(found.layout.fc)}
    for sent in (found.tensors, stacked, some, {}):
        for again in (False, True):
            fit = parameters.check(manifest_of(model | layer | sent), whole=again)
            assert {key for key in fit.copied if key.startswith(found.prefix)} == sent.keys()
            assert set(fit.unused) == layer.keys()
    with pytest.raises(WeightsRejected, match="missing"):
        parameters.check(manifest_of(found.tensors))
    with pytest.raises(WeightsRejected, match=found.layout.fc):
        parameters.check(manifest_of(model | {f"{found.prefix}{found.layout.fc}.weight": torch.zeros(2, 2)}))
    loaded.trainer_views()[f"{found.prefix}{found.layout.norm}.weight"].fill_(7.0)
    assert (loaded.model.draft.norm.weight == 7.0).all()


def test_an_engine_without_drafts_drops_it(tmp_path) -> None:
    found = make_predicting("MiMo", tmp_path)
    loaded = load(tmp_path, "unused")
    fit = ParameterMap(loaded.trainer_views(), update_names(ModelSettings(), loaded)).check(
        manifest_of(load_file(tmp_path / "model.safetensors"))
    )
    assert set(fit.unused) == found.tensors.keys()


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MiMo", "Glm4Moe"])
def test_a_checkpoint_without_the_layer_is_refused_where_it_is_needed(tmp_path, name) -> None:
    EVERY_FAMILY[name](tmp_path, 0)
    with pytest.raises(ValueError, match=r"without its layers for multi-token prediction .*speculation_model"):
        load(tmp_path)
    assert load(tmp_path, "if_there").model.draft is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: EVERY_FAMILY["qwen3"](folder, 0), "no layers for multi-token prediction.*speculation_model"),
        (lambda folder: make_hybrid("Qwen3Next", folder), "without its layers for multi-token prediction"),
    ],
)
def test_models_without_such_layers_are_refused_where_they_are_needed(tmp_path, make, said) -> None:
    make(tmp_path)
    with pytest.raises(ValueError, match=said):
        load(tmp_path)
    assert load(tmp_path, "if_there").model.draft is None


def test_a_config_without_the_layer_has_none(tmp_path) -> None:
    make_predicting("Glm4Moe", tmp_path)
    file = tmp_path / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if "mtp" not in key}
    file.write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match="not part of"):
        load(tmp_path, "unused")


@pytest.mark.parametrize("part", ["fc", "hidden_norm", "norm"])
def test_tensors_that_do_not_fit_are_named(tmp_path, part) -> None:
    found = make_predicting("MiMo", tmp_path)
    name = f"{found.prefix}{getattr(found.layout, part)}.weight"
    add_tensors(tmp_path, {name: torch.zeros(3, 5)})
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


@pytest.mark.parametrize("mtp", ["if_there", "needed"])
def test_a_layer_that_lacks_tensors_is_refused(tmp_path, mtp) -> None:
    EVERY_FAMILY["MiMo"](tmp_path, 0)
    add_tensors(tmp_path, {"model.mtp_layers.0.final_layernorm.weight": torch.zeros(48)})
    said = r"missing: model\.mtp_layers\.0\.input_proj\.weight.*speculation"
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, mtp)
    assert load(tmp_path, "unused").model.draft is None


def test_copies_of_the_models_tensors_alone_are_no_layer(tmp_path) -> None:
    found = make_predicting("Glm4Moe", tmp_path / "whole")
    EVERY_FAMILY["Glm4Moe"](tmp_path / "copies", 0)
    add_tensors(tmp_path / "copies", {found.prefix + key: torch.zeros(3) for key in found.layout.copies})
    assert load(tmp_path / "copies", "if_there").model.draft is None
    with pytest.raises(ValueError, match="speculation_model"):
        load(tmp_path / "copies")


@pytest.mark.parametrize("name", ["MiMo", "Glm4Moe"])
def test_a_checkpoint_with_two_layers_drafts_with_the_first(tmp_path, name) -> None:
    found = make_predicting(name, tmp_path)
    file, layers = tmp_path / "config.json", found.model.config.num_hidden_layers
    second = "model.mtp_layers.1." if name == "MiMo" else f"model.layers.{layers + 1}."
    add_tensors(tmp_path, {second + key.removeprefix(found.prefix): t + 1 for key, t in found.tensors.items()})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 2}))
    loaded = load(tmp_path)
    assert torch.equal(loaded.model.draft.fc.weight, found.part(found.layout.fc))
    parameters = ParameterMap(loaded.trainer_views(), update_names(ModelSettings(), loaded))
    fit = parameters.check(manifest_of(load_file(tmp_path / "model.safetensors")))
    assert {key for key in fit.unused if key.startswith(second)} == {
        second + key.removeprefix(found.prefix) for key in found.tensors
    }
    assert found.tensors.keys() <= set(fit.copied)


def test_it_drafts_for_a_model_whose_output_layer_is_its_embedding(tmp_path) -> None:
    found = make_predicting("MiMo", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    model = load(tmp_path, dtype="float32").model
    hidden_TH, _ = random_input(found, 4)
    logits_TV = model.draft.compute_logits(hidden_TH, model.lm_head)
    torch.testing.assert_close(logits_TV, hidden_TH @ tensors["model.embed_tokens.weight"].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["MiMo", "Glm4Moe"])
def test_the_checkpoint_itself_as_speculation_model_is_refused_with_advice(tmp_path, name) -> None:
    make_predicting(name, tmp_path)
    with pytest.raises(ValueError, match=r"config\.json.*leave speculation_model out"):
        load_model(ModelSettings(path=str(tmp_path)), CPU, draft=tmp_path)


def test_an_update_for_another_kind_of_draft_model_is_refused_with_advice(tmp_path) -> None:
    make_predicting("MiMo", tmp_path)
    loaded = load(tmp_path)
    parameters = ParameterMap(loaded.trainer_views(), update_names(ModelSettings(), loaded))
    tensors = load_file(tmp_path / "model.safetensors") | {"draft.fc.weight": torch.zeros(3)}
    with pytest.raises(WeightsRejected, match=r"draft\.fc\.weight.*speculation_model"):
        parameters.check(manifest_of(tensors))


@pytest.mark.parametrize(
    ("settings", "mtp"),
    [
        ({"speculation": "heads"}, "needed"),
        ({"speculation": "heads", "speculation_model": "x"}, "unused"),
        ({"speculation": "auto"}, "if_there"),
        ({"speculation": "auto", "speculation_model": "x"}, "unused"),
        ({"speculation": "suffix"}, "unused"),
        ({}, "unused"),
    ],
)
def test_settings_say_whether_it_drafts(settings, mtp) -> None:
    assert EngineSettings(**settings).mtp == mtp
