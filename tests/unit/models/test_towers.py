"""Vision towers: configs, files and updates. Their outputs are held against transformers in `engine/test_images`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import CheckpointError, LoadedModel, load_model
from rollout.models.shard import shard_spec
from rollout.weights.parameter_map import ParameterMap, UpdateNames
from tests.support.models.families import make_checkpoint
from tests.support.models.images import MODELS, make_model
from tests.support.models.multimodal import make_multimodal
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import pack

CPU = torch.device("cpu")


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), **{"images": True, **settings}), CPU)


def change(folder: Path, part: str | None, **values: Any) -> None:
    """Change values of config.json, or of a map in it; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    target = config if part is None else config[part]
    target.update(values)
    for name in [name for name, value in values.items() if value is None]:
        del target[name]
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("name", MODELS)
def test_an_update_may_have_the_tower_or_leave_it_out(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path / "old")
    trainer = make_model(name, tmp_path / "new", 1)
    served, fresh = load(tmp_path / "old"), load(tmp_path / "new")
    views, kept = served.trainer_views(), served.kept_if_absent()
    parameters = ParameterMap(views, UpdateNames(kept, served.spec.unused))
    whole = {key: value.detach() for key, value in trainer.named_parameters()}
    text = {key: value for key, value in whole.items() if ".visual." not in key}
    assert len(text) < len(whole) and all("visual" in key for key in kept)
    for tensors in (whole, trainer.state_dict(), text):
        rows = [(key, "float32", list(tensor.shape)) for key, tensor in tensors.items()]
        fit = parameters.check(pack(1, rows, 1 << 20))
        assert fit.unused == () and bool(fit.kept) == (tensors is text)
        for key in fit.copied:
            views[key].copy_(tensors[key])
        for key, view in fresh.trainer_views().items():
            assert torch.equal(views[key], view)
    with pytest.raises(WeightsRejected, match="missing"):
        parameters.check(pack(1, [(key, "float32", list(text[key].shape)) for key in list(text)[1:]], 1 << 20))


def test_a_text_worker_does_not_load_the_tower(tmp_path: Path) -> None:
    make_model("Qwen3-VL", tmp_path)
    loaded = load(tmp_path, images=False)
    assert loaded.spec.tower is None and not any("visual" in key for key in loaded.trainer_views())


def test_files_of_experts_may_have_either_layout(tmp_path: Path) -> None:
    make_model("Qwen3-VL-MoE", tmp_path)
    before = load(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    turned = {key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(turned) == 8
    save_file({key: value.mT.contiguous() if key in turned else value for key, value in tensors.items()}, file)
    after = load(tmp_path).trainer_views()
    assert all(torch.equal(view, after[key]) for key, view in before.trainer_views().items())


def test_a_flat_config_is_read(tmp_path: Path) -> None:
    """As the files of Qwen2.5-VL on the hub are."""
    make_model("Qwen2.5-VL", tmp_path)
    nested = load(tmp_path).spec
    config = json.loads((tmp_path / "config.json").read_text())
    text = {key: value for key, value in config.pop("text_config").items() if key not in ("model_type", "dtype")}
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    assert load(tmp_path).spec == nested


@pytest.mark.parametrize(
    ("part", "values", "says"),
    [
        ("vision_config", {"out_hidden_size": 32}, "out_hidden_size is 32"),
        ("vision_config", {"depth": 1 << 40}, "vision_config: depth"),
        ("vision_config", {"hidden_size": "x"}, "vision_config: hidden_size"),
        ("vision_config", {"hidden_size": 36}, "multiple of 4 num_heads"),
        ("vision_config", {"deepstack_visual_indexes": [0, 0]}, "names a layer twice"),
        ("vision_config", {"deepstack_visual_indexes": [7]}, "more layers than there are"),
        ("vision_config", {"deepstack_visual_indexes": [-1]}, "deepstack_visual_indexes"),
        ("vision_config", {"patch_size": [4, 4]}, "vision_config: patch_size"),
        (None, {"image_token_id": 1 << 20}, "image_token_id"),
        (None, {"image_token_id": "x"}, "image_token_id"),
        (None, {"vision_config": None}, "vision_config"),
    ],
)
def test_a_wrong_config_of_the_tower_is_refused(
    part: str | None, values: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make_model("Qwen3-VL", tmp_path)
    change(tmp_path, part, **values)
    with pytest.raises((CheckpointError, ValueError), match=says):
        load(tmp_path)


def test_keys_that_are_not_known_do_not_reach_transformers(tmp_path: Path) -> None:
    make_model("Qwen3-VL", tmp_path)
    change(tmp_path, "vision_config", model_type="gemma3_text", num_hidden_layers=1 << 60, _attn_implementation="x")
    with pytest.raises(CheckpointError, match="vision_config: num_hidden_layers"):
        load(tmp_path, model_impl="transformers", images=False)
    with pytest.raises(ValueError, match="transformers' default of num_hidden_layers"):
        load(tmp_path)  # transformers' other name of `depth`
    change(tmp_path, "vision_config", num_hidden_layers=None, _attn_implementation="x", in_chans=7)
    assert load(tmp_path).spec.tower is not None


def test_models_without_a_tower_that_is_served_are_refused(tmp_path: Path) -> None:
    make_multimodal("Gemma 3", tmp_path / "gemma")
    with pytest.raises(ValueError, match=r"images = false"):
        load(tmp_path / "gemma")
    make_checkpoint("qwen3", tmp_path / "text")
    for impl in ("native", "transformers"):
        with pytest.raises(ValueError, match="images = false"):
            load(tmp_path / "text", model_impl=impl)


def test_every_shard_has_the_whole_tower(tmp_path: Path) -> None:
    make_model("Qwen3-VL", tmp_path)
    spec = load(tmp_path).spec
    assert [shard_spec(spec, rank, 2).tower for rank in range(2)] == [spec.tower] * 2


@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen2.5-VL"])
def test_random_weights_make_embeddings_of_the_size_of_tokens(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path)
    model = load(tmp_path, load_format="random").model
    patches = torch.randn(4 * 6 + 2 * 2, model.spec.tower.patch_values, generator=torch.Generator().manual_seed(0))
    embeddings = model.tower.embeddings(patches, [(1, 4, 6), (1, 2, 2)])
    assert embeddings.shape == (7, model.spec.tower.width)
    assert 0.05 < embeddings[:, : model.spec.hidden].std() < 20
    assert hash(model.spec.tower) == hash(load(tmp_path).spec.tower)
