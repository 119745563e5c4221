"""Whether the output layer is the embedding: what transformers makes of config.json and the tensors of a checkpoint."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import CheckpointError, LoadedModel, load_model
from rollout.models.checkpoint_tensors import are_equal, list_tensors
from rollout.models.cut import whole_shape
from rollout.models.loader import check_cut
from rollout.weights.parameter_map import ParameterMap, update_names
from rollout.weights.staging import check_equal
from tests.support.models import both_ways, fallback
from tests.support.models.both_ways import CPU, TOLERANCE, edit, logits, transformers_logits
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import pack

WEIGHTS = "model.safetensors"
#: A language model alone, one with a scaled embedding, one with experts, and inside a model of text and images: with
#: two spellings of names, and with flags in two places.
NAMES = ("llama", "qwen2", "Gemma3", "GptOss", "images: Gemma 3", "images: Ministral 3", "Qwen2.5-VL")


def make(name: str, folder: Path) -> None:
    """A checkpoint that does not tie its output layer, whatever its family usually does."""
    both_ways.make(name, folder)
    tensors = load_file(folder / WEIGHTS)
    embed, head = embedding(tensors), output_layer(tensors)
    if head not in tensors:
        tensors[head] = torch.randn(tensors[embed].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    flag(folder, False)


def embedding(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in tensors if name.endswith("embed_tokens.weight"))


def output_layer(tensors: dict[str, torch.Tensor]) -> str:
    """Its name beside that of the embedding, as files have it."""
    inside = embedding(tensors).startswith("language_model.")
    return "language_model.lm_head.weight" if inside else "lm_head.weight"


def flag(folder: Path, tied: bool | None) -> None:
    """Write `tie_word_embeddings`; None removes it everywhere."""

    def change(content: dict[str, Any]) -> None:
        for part in (content, content.get("text_config", {})):
            part.pop("tie_word_embeddings", None)
        if tied is not None:
            content["tie_word_embeddings"] = tied

    edit(folder, change)


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), **settings), CPU)


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of the worker."""
    ours = (record for record in caplog.records if record.name.startswith("rollout."))
    return [record for record in ours if record.levelno >= logging.WARNING]


def agrees(folder: Path) -> None:
    assert (logits(folder) - transformers_logits(folder)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_another_output_layer_in_the_files_is_not_tied_whatever_the_config_says(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(name, tmp_path)
    agrees(tmp_path)
    assert not warnings(caplog)
    flag(tmp_path, True)
    agrees(tmp_path)
    loaded = load(tmp_path)
    assert not loaded.spec.tied and warnings(caplog)
    views = loaded.trainer_views()
    head = next(name for name in views if name.endswith("lm_head.weight"))
    with pytest.raises(WeightsRejected, match="lm_head"):  # both are needed
        check_update(loaded, {name: view for name, view in first_names(loaded).items() if "lm_head" not in name})
    check_update(loaded, first_names(loaded))
    assert views[head].data_ptr() != loaded.model.embed.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_an_equal_output_layer_is_tied(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(name, tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({output_layer(tensors): tensors[embedding(tensors)].clone()}))
    flag(tmp_path, True)
    agrees(tmp_path)
    assert load(tmp_path).spec.tied and not warnings(caplog)
    flag(tmp_path, False)
    agrees(tmp_path)
    assert not load(tmp_path).spec.tied


@pytest.mark.parametrize("name", NAMES)
def test_one_tensor_of_two_that_are_tied_is_enough(name: str, tmp_path: Path) -> None:
    """Trainers save either of them."""
    make(name, tmp_path)
    flag(tmp_path, True)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for which in (embedding, output_layer):
        (tmp_path / WEIGHTS).write_bytes(whole)
        edit_tensors(tmp_path, lambda tensors, which=which: tensors.pop(which(tensors)))
        agrees(tmp_path)
        assert load(tmp_path).spec.tied


@pytest.mark.parametrize("name", NAMES)
def test_what_an_absent_flag_means_is_asked_of_transformers(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    flag(tmp_path, None)
    agrees(tmp_path)
    for where in ("text_config", None):
        edit(tmp_path, lambda content, where=where: content.get(where, content).update(tie_word_embeddings=True))
        agrees(tmp_path)


def test_an_output_layer_that_is_neither_tied_nor_there_is_an_error(tmp_path: Path) -> None:
    make("qwen2", tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load(tmp_path)


def test_an_output_layer_of_another_shape_is_an_error_not_a_tied_one(tmp_path: Path) -> None:
    make("qwen2", tmp_path)
    flag(tmp_path, True)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:-4].clone()}))
    with pytest.raises(CheckpointError, match=r"wrong shape: lm_head\.weight"):
        load(tmp_path)


def test_values_are_compared_in_the_type_of_the_model(tmp_path: Path) -> None:
    """bf16 rounds both to the same: a copy in float32 of a tensor in bf16, for example."""
    make("qwen2", tmp_path)
    flag(tmp_path, True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        embed = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"], tensors["model.embed_tokens.weight"] = embed.clone(), embed.bfloat16()

    edit_tensors(tmp_path, change)
    assert load(tmp_path, dtype="bfloat16").spec.tied
    assert not load(tmp_path, dtype="float32").spec.tied


def test_a_difference_anywhere_counts(tmp_path: Path) -> None:
    make("qwen2", tmp_path)
    flag(tmp_path, True)
    for row in (0, 51, 100):

        def change(tensors: dict[str, torch.Tensor], row: int = row) -> None:
            head = tensors["model.embed_tokens.weight"].clone()
            head[row, -1] += 1
            tensors["lm_head.weight"] = head

        edit_tensors(tmp_path, change)
        assert not load(tmp_path).spec.tied
        pair = "model.embed_tokens.weight", "lm_head.weight"
        assert not are_equal(list_tensors(tmp_path), *pair, torch.float32, at_once=100), "pieces of two rows"


def test_shards_may_have_the_two_in_different_files(tmp_path: Path) -> None:
    make("qwen2", tmp_path)
    flag(tmp_path, True)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, tmp_path / "b.safetensors", metadata={"format": "pt"})
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    (tmp_path / WEIGHTS).unlink()
    names = {name: "a.safetensors" for name in tensors} | {"lm_head.weight": "b.safetensors"}
    text = str({"metadata": {}, "weight_map": names}).replace("'", '"')
    (tmp_path / f"{WEIGHTS}.index.json").write_text(text)
    agrees(tmp_path)
    assert not load(tmp_path).spec.tied


def test_random_weights_are_tied_as_the_config_says(tmp_path: Path) -> None:
    make("qwen2", tmp_path)
    flag(tmp_path, True)
    assert load(tmp_path, load_format="random").spec.tied
    check_cut(ModelSettings(path=str(tmp_path)), tmp_path, 2)


# --- through transformers' own code -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "CohereForCausalLM"])
def test_the_same_holds_for_models_through_transformers_own_code(architecture: str, tmp_path: Path) -> None:
    fallback.make_checkpoint(architecture, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    embed = next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    flag(tmp_path, True)
    for head in (tensors[embed] + 1, tensors[embed].clone()):
        edit_tensors(tmp_path, lambda tensors, head=head: tensors.update({"lm_head.weight": head}))
        ours = logits(tmp_path, model_impl="transformers")
        assert (ours - transformers_logits(tmp_path)).abs().max() < TOLERANCE
    edit_tensors(tmp_path, lambda tensors: tensors.pop(embed))
    ours = logits(tmp_path, model_impl="transformers")
    assert (ours - transformers_logits(tmp_path)).abs().max() < TOLERANCE


# --- updates ----------------------------------------------------------------------------------------------------------


def first_names(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """The tensors of an update, by the names that files usually have."""
    return {name: view for region in loaded.model.hf_regions() for name, view in region.alternatives[0].items()}


def check_update(loaded: LoadedModel, tensors: dict[str, torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """Check a manifest as the receiver does; returns the pairs of tensors that must be equal."""
    settings = ModelSettings(path=str(loaded.folder))
    manifest = pack(1, [(name, "float32", whole_shape(tensor)) for name, tensor in tensors.items()], 1 << 20)
    return ParameterMap(loaded.trainer_views(), update_names(settings, loaded)).check(manifest).aliases


@pytest.mark.parametrize("name", NAMES)
def test_an_update_of_a_tied_model_may_have_either_name_or_both(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    flag(tmp_path, True)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(output_layer(tensors)))
    loaded = load(tmp_path)
    tensors = first_names(loaded)
    embed = embedding(tensors)
    head = output_layer(tensors)
    others = {name: tensor for name, tensor in tensors.items() if name != embed}
    assert check_update(loaded, others | {embed: tensors[embed]}) == ()
    assert check_update(loaded, others | {head: tensors[embed]}) == ()
    assert check_update(loaded, others | dict.fromkeys((embed, head), tensors[embed])) == ((embed, head),)
    with pytest.raises(WeightsRejected, match="embed_tokens"):
        check_update(loaded, others)


def test_different_tensors_for_a_tied_model_are_refused_with_the_setting_to_change() -> None:
    one = torch.ones(3, 2)
    check_equal("embed", "lm_head.weight", one, one.bfloat16(), torch.float32)
    with pytest.raises(WeightsRejected, match="lm_head.weight .* tie_word_embeddings = false"):
        check_equal("embed", "lm_head.weight", one, one + 1, torch.float32)
