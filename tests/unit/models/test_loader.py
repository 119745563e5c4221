"""Loading: layouts of files, names, shapes and types, and the errors for wrong ones."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import CheckpointError, LoadedModel, check_names, load_model
from tests.support.models.families import FAMILIES, make_checkpoint, make_model
from tests.support.models.paged import PagedRunner

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _load(folder: Path | str, **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), **settings), CPU)


def _logits(loaded: LoadedModel) -> torch.Tensor:
    ids = [random.Random(i).randrange(loaded.spec.vocab) for i in range(20)]
    return PagedRunner(loaded.model, rows=1, max_tokens=20).prefill({0: ids})[0]


def _edit_json(file: Path, **changes: Any) -> None:
    content = {k: v for k, v in (json.loads(file.read_text()) | changes).items() if v is not None}
    file.write_text(json.dumps(content))


def _edit_weights(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def _shard(folder: Path, shards: int = 3) -> dict[str, str]:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layout_of_names_covers_every_parameter_once(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    model = _load(tmp_path).model
    for choose in (0, -1):
        for parameter in model.parameters():
            parameter.zero_()
        for region in model.hf_regions():
            for view in region.alternatives[choose].values():
                view.add_(1.0)
        assert all(bool((parameter == 1.0).all()) for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_checkpoint_gives_the_same_model(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    whole = _logits(_load(tmp_path))
    _shard(tmp_path)
    assert torch.equal(_logits(_load(tmp_path)), whole)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_stacked_and_single_experts_give_the_same_model(family: str, tmp_path: Path) -> None:
    reference = make_checkpoint(family, tmp_path)
    names = list(load_file(tmp_path / WEIGHTS))
    assert any(".experts.0." in name for name in names), "transformers saves one tensor an expert"
    single = _logits(_load(tmp_path))
    stacked = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in stacked), "and holds them stacked"
    save_file(stacked, tmp_path / WEIGHTS)
    assert torch.equal(_logits(_load(tmp_path)), single)


def test_redundant_tensors_are_accepted_and_not_read(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(10)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    before = _logits(_load(tmp_path))
    _edit_weights(tmp_path, add)
    assert torch.equal(_logits(_load(tmp_path)), before)


def test_older_rope_keys_mean_the_same(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    spec = _load(tmp_path).spec
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    _edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=rope)
    assert _load(tmp_path).spec == spec
    assert all(layer.mixer.rope.kind == "llama3" and layer.mixer.rope.theta == theta for layer in spec.layers)


def test_yarn_extends_the_longest_context(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512}
    make_checkpoint("qwen3", tmp_path, rope_parameters=rope)
    assert _load(tmp_path).spec.max_positions == 4096


def test_kv_bytes_count_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    assert _load(tmp_path).spec.kv_bytes_per_token(torch.bfloat16) == 2 * 3 * 3 * 10 * 2


def test_checkpoint_type_is_converted(tmp_path: Path) -> None:
    make_model("qwen2").to(torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in _load(tmp_path).model.parameters()} == {torch.float32}
    assert {p.dtype for p in _load(tmp_path, dtype="bfloat16").model.parameters()} == {torch.bfloat16}


def test_parameters_need_no_gradient(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path)
    assert not any(parameter.requires_grad for parameter in _load(tmp_path).model.parameters())


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    _shard(tmp_path)
    calls: list[tuple[int, int]] = []
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU, lambda done, total: calls.append((done, total)))
    values = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert calls == sorted(calls) and calls[-1] == (values, values)


# --- generation defaults ----------------------------------------------------------------------------------------------


def test_eos_comes_from_generation_config_then_from_config(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert _load(tmp_path).generation_config.eos_token_ids == (4, 9)
    generation.write_text(json.dumps({"temperature": 0.6}))
    assert _load(tmp_path).generation_config.eos_token_ids == (2,)
    generation.unlink()
    assert _load(tmp_path).generation_config.eos_token_ids == (2,)
    _edit_json(tmp_path / "config.json", eos_token_id=[])
    assert _load(tmp_path).generation_config.eos_token_ids == ()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_one_error_names_everything_that_is_wrong_with_the_tensors(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_norm.weight"]
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(3)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(80, 48, dtype=torch.int8)

    _edit_weights(tmp_path, damage)
    with pytest.raises(CheckpointError) as error:
        _load(tmp_path)
    message = str(error.value)
    for part in (
        "1 tensors missing: model.layers.1.self_attn.k_norm.weight",
        "1 tensors not part of Qwen3ForCausalLM: model.layers.0.mlp.extra.weight",
        "1 tensors of the wrong shape: model.norm.weight [3] for [48]",
        "1 tensors of an unsupported type: model.layers.2.mlp.up_proj.weight I8",
    ):
        assert part in message


def test_long_lists_of_names_are_capped(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    _edit_weights(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors)[:20]])
    with pytest.raises(CheckpointError, match="20 tensors missing: .* and 12 more"):
        _load(tmp_path)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    names = list(load_file(tmp_path / WEIGHTS))
    lost = next(name for name in names if ".experts.3." in name)
    _edit_weights(tmp_path, lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=f"1 tensors missing: {lost}$"):
        _load(tmp_path)


def test_experts_in_both_layouts_are_refused(tmp_path: Path) -> None:
    reference = make_checkpoint("qwen3_moe", tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    stacked = reference.state_dict()[name].contiguous()
    _edit_weights(tmp_path, lambda tensors: tensors.update({name: stacked}))
    with pytest.raises(CheckpointError, match=f"1 tensors given twice, in two layouts: {name}"):
        _load(tmp_path)


def test_untied_output_layer_is_needed(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    _edit_weights(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match="missing: lm_head.weight"):
        _load(tmp_path)


def test_names_are_checked_for_files_and_state_dicts_alike(tmp_path: Path) -> None:
    reference = make_checkpoint("olmoe", tmp_path)
    regions = _load(tmp_path).model.hf_regions()
    assert check_names(regions, reference.state_dict()).complete
    assert check_names(regions, load_file(tmp_path / WEIGHTS)).complete
    assert check_names(regions, []).missing[0] == "model.embed_tokens.weight"


@pytest.mark.parametrize("file", ["../model-0.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_index_cannot_point_outside_the_folder(file: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model")
    weight_map = _shard(tmp_path / "model")
    (tmp_path / "model-0.safetensors").write_bytes((tmp_path / "model" / "model-0.safetensors").read_bytes())
    weight_map["model.norm.weight"] = file
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="names files outside its folder"):
        _load(tmp_path / "model")


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    weight_map = _shard(tmp_path)
    moved = dict(weight_map, **{"model.norm.weight": "model-0.safetensors"}, ghost="model-1.safetensors")
    moved["model.embed_tokens.weight"] = next(f for f in set(weight_map.values()) if f != "model-0.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match="in the index but in no shard: ghost"):
        _load(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is missing"):
        _load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    _shard(tmp_path)
    shard = load_file(tmp_path / "model-1.safetensors")
    other = load_file(tmp_path / "model-0.safetensors")
    save_file(shard | {"model.norm.weight": torch.ones(40)} | other, tmp_path / "model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"also in model-1\.safetensors"):
        _load(tmp_path)


def test_an_architecture_that_is_not_native_lists_the_native_ones(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    _edit_json(tmp_path / "config.json", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    with pytest.raises(ValueError, match="'GPT2LMHeadModel' is not native; native: LlamaForCausalLM, "):
        _load(tmp_path, model_impl="native")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": []}, "must name one architecture"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "this quantization_config is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'dynamic'"),
        ({"num_key_value_heads": 3}, "not a multiple of the KV heads"),
    ],
)
def test_config_that_is_not_supported_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    _edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, model_impl="native")


def test_broken_files_are_named(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        _load(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        _load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        _load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        _load(tmp_path)


@pytest.mark.parametrize(("path", "message"), [("", "no model given"), ("./nowhere", "is not a folder")])
def test_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        _load(path)
