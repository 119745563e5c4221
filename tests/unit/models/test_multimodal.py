"""Models of text and images: their language model runs as transformers' whole model runs text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import CheckpointError, load_model
from rollout.models.lora_slots import AdapterSlots
from rollout.models.peft_tensors import load_peft_folder
from rollout.weights.parameter_map import ParameterMap, UpdateNames
from tests.support.models.multimodal import MODELS, make_multimodal
from tests.support.models.paged import check
from tests.support.peft_adapters import ALL, make_adapter, merged
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import pack

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_the_whole_model(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = make_multimodal(name, tmp_path)
    with caplog.at_level("INFO"):
        loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    check(loaded, reference, fused=False)
    assert loaded.spec.architecture == type(reference).__name__
    assert sum("not used: " in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("name", MODELS)
def test_an_update_may_have_the_names_of_the_module_of_files_or_of_the_language_model(
    name: str, tmp_path: Path
) -> None:
    """The tensors of images that come with it are named and not copied."""
    make_multimodal(name, tmp_path / "old")
    trainer = make_multimodal(name, tmp_path / "new", 1)
    served, fresh = (load_model(ModelSettings(path=str(tmp_path / which)), CPU) for which in ("old", "new"))
    views = served.trainer_views()
    parameters = ParameterMap(views, UpdateNames(served.kept_if_absent(), served.spec.unused))
    module = dict(trainer.named_parameters())
    text = {
        key.replace("language_model.", ""): value
        for key, value in module.items()
        if key.startswith(("model.language", "lm_head"))
    }
    for tensors in (module, trainer.state_dict(), load_file(tmp_path / "new" / "model.safetensors"), text):
        rows = [(key, "float32", list(tensor.shape)) for key, tensor in tensors.items()]
        fit = parameters.check(pack(1, rows, 1 << 20))
        assert all(
            any(part in key for part in ("visual", "vision", "multi_modal", "mm_proj", "patch_merge"))
            for key in fit.unused
        )
        assert bool(fit.unused) == (tensors is not text)
        for view in views.values():
            view.zero_()
        for key in fit.copied:
            views[key].copy_(tensors[key].detach())
        for key in fit.kept:  # buffers, which trainers may leave out
            views[key].copy_(fresh.trainer_views()[key])
        assert all(torch.equal(views[key], view) for key, view in fresh.trainer_views().items())
    with pytest.raises(WeightsRejected, match="missing"):
        parameters.check(pack(1, [(key, "float32", list(view.shape)) for key, view in list(text.items())[1:]], 1 << 20))


def test_an_adapter_of_the_whole_model_changes_its_language_model(tmp_path: Path) -> None:
    reference = make_multimodal("Gemma 3", tmp_path)
    adapter = make_adapter(reference, tmp_path / "adapter", 0, ALL, exclude_modules=".*vision_tower.*")
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    slots = AdapterSlots(loaded.spec, 1, 16, torch.float32, CPU)
    slots.write(1, load_peft_folder(adapter, loaded.spec, 16, torch.float32))
    check(loaded, merged(reference, adapter), slots, atol=1e-3)  # merged weights round otherwise


def test_files_may_have_the_names_of_the_module(tmp_path: Path) -> None:
    reference = make_multimodal("Magistral", tmp_path)
    save_file({key: value.clone() for key, value in reference.state_dict().items()}, tmp_path / "model.safetensors")
    check(load_model(ModelSettings(path=str(tmp_path)), CPU), reference, fused=False)


def test_the_config_of_the_whole_names_end_tokens_of_the_language_model(tmp_path: Path) -> None:
    make_multimodal("Gemma 3", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [4, 9]}))
    assert load_model(ModelSettings(path=str(tmp_path)), CPU).generation_config.eos_token_ids == (4, 9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma3_text"}, "model_type 'gemma3_text' .*'mistral' or 'ministral3'"),
        ({"num_hidden_layers": 10**9}, "text_config: num_hidden_layers"),
    ],
)
def test_a_language_model_that_cannot_be_served_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    make_multimodal("Magistral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        load_model(ModelSettings(path=str(tmp_path)), CPU)


def test_the_config_of_the_vision_tower_is_not_read(tmp_path: Path) -> None:
    """It may name any class of transformers, and some make a list as long as their number of layers."""
    reference = make_multimodal("Gemma 3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] = {"model_type": "gemma3_text", "num_hidden_layers": 1 << 60}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(load_model(ModelSettings(path=str(tmp_path)), CPU), reference, fused=False)


def test_a_checkpoint_without_the_config_of_its_language_model_is_refused(tmp_path: Path) -> None:
    make_multimodal("Magistral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": None}))
    with pytest.raises(CheckpointError, match="text_config"):
        load_model(ModelSettings(path=str(tmp_path)), CPU)


def test_through_transformers_code_a_model_of_text_and_images_runs_or_is_refused(tmp_path: Path) -> None:
    reference = make_multimodal("Gemma 3", tmp_path / "gemma")
    check(load_model(ModelSettings(path=str(tmp_path / "gemma"), model_impl="transformers"), CPU), reference)
    make_multimodal("Magistral", tmp_path / "magistral")
    settings = ModelSettings(path=str(tmp_path / "magistral"), model_impl="transformers")
    with pytest.raises(ValueError, match="Mistral3ForConditionalGeneration"):
        load_model(settings, CPU)
    file = tmp_path / "magistral" / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"] |= {"num_hidden_layers": 1 << 60}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="vision_config: num_hidden_layers"):
        load_model(settings, CPU)
