"""A trainer's parameters through a real publisher into native families: trainers leave tensors out and add others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import LoadedModel, load_model
from rollout.weights.parameter_map import update_names
from tests.support.bridge.harness import Worker
from tests.support.kernels.grids import nightly
from tests.support.models.every_family import EVERY_FAMILY
from trainer_bridge.publish.publisher import WeightPublisher

#: Tensors of the prediction of several tokens at once, and of images; of GLM-4.5 the former are a layer after the last.
_EXTRA = {"mtp.fc.weight": torch.ones(7, 3), "visual.patch_embed.proj.weight": torch.ones(3, 2)}
#: In every run: experts with inputs before outputs and biases; correction biases; convolutions of three names; a shared
#: expert that is stored as two of the others; factors of layers.
_ALWAYS = ("GptOss", "Glm4Moe", "OlmoHybrid", "Qwen2Moe", "Gemma4")
_OTHERS = (
    *("DeepseekV3 moonlight", "DeepseekV2 groups"),
    *("MiniMaxM2", "Afmoe", "Qwen3_5Moe", "Qwen3Next", "DeepseekV3", "Gemma3", "Phi3", "mixtral"),
)


def load(folder: Path) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), dtype="bfloat16"), torch.device("cpu"))


def sent(trainer: Any, name: str) -> dict[str, torch.Tensor]:
    """`named_parameters()` in 16 bits, without buffers, and tensors that the worker has no use for."""
    extra = {"model.layers.3.eh_proj.weight": torch.ones(5)} if name == "Glm4Moe" else {}
    return {key: value.detach().bfloat16() for key, value in trainer.named_parameters()} | _EXTRA | extra


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("name", [*_ALWAYS, *nightly(*_OTHERS)])
def test_an_update_of_16_bits_makes_the_model_of_the_trainer(name: str, apply: str, tmp_path: Path) -> None:
    make = EVERY_FAMILY[name]
    make(tmp_path / "old", 0)
    trainer = make(tmp_path / "new", 1)
    served, before, wanted = load(tmp_path / "old"), load(tmp_path / "old"), load(tmp_path / "new")
    names, tensors = update_names(ModelSettings(path=str(tmp_path / "old")), served), sent(trainer, name)
    model: Any = SimpleNamespace(views=served.trainer_views())
    with (
        Worker(model=model, names=names, apply=apply) as worker,
        WeightPublisher(worker.endpoint, bucket_bytes=1 << 12) as publisher,
    ):
        publisher.publish(tensors, 1).applied(60)
    old, new, kept = before.trainer_views(), wanted.trainer_views(), []
    written = {model.views[key].data_ptr() for key in tensors if key in model.views}
    for key, view in model.views.items():
        if key in names.kept_if_absent and view.data_ptr() not in written:
            kept.append(key)
            assert torch.equal(view, old[key]), key
        else:  # some are float32 in the worker, whatever they came in
            assert torch.equal(view, new[key].bfloat16().to(view.dtype)), key
    assert bool(kept) == any(buffer.endswith(("_bias", "layer_scalar")) for buffer, _ in trainer.named_buffers())
