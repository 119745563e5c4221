"""Families that differ from Llama in a few facts of their declaration: they run as transformers runs them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.models.checkpoint_config import read_config
from rollout.models.config_spec import spec_from_config
from rollout.models.cut import kept_values
from rollout.models.families import FAMILIES
from rollout.models.lora_slots import AdapterSlots
from rollout.models.peft_tensors import load_peft_folder
from rollout.weights.parameter_map import ParameterMap, UpdateNames
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import PROMPT, check
from tests.support.models.variants import CONFIGS, SIZES, make_variant
from tests.support.peft_adapters import ALL, ATTENTION, make_adapter, merged
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import pack

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
CPU = torch.device("cpu")
#: One for each mechanism that the fused kernels meet here: rotary embeddings of each kind, windows by layer, layers
#: without positions, queries that grow, modules in one tensor, norms of queries and keys, biases, sinks, routers; norms
#: after blocks, factors, bounds, gates of the output.
STEPS_BY_KERNELS = {"Phi3 long", "Ministral", "Ministral3", "SmolLM3", "Glm4Moe", "MiniMaxM2", "MiniMaxM3VL", "GptOss"}
STEPS_BY_KERNELS |= {"Glm4", "Gemma2", "Gemma3", "Gemma4", "Granite", "Olmo2", "Olmo3", "Afmoe"}
#: `test_lora_models.py` has separate modules.
ADAPTERS_BY_KERNELS = {"Phi3 long", "Gemma3", "Olmo2"}


def with_kernels(quick: set[str]) -> list[Any]:
    """Every config by the torch modules; these by the fused kernels too, and all others at night."""
    slow = [(stem, True) for stem in CONFIGS if stem not in quick]
    return [*((stem, stem in quick) for stem in CONFIGS), *nightly(*slow)]


@pytest.mark.parametrize(("stem", "kernels"), with_kernels(STEPS_BY_KERNELS))
def test_steps_and_names_are_those_of_transformers(stem: str, kernels: bool, tmp_path: Path) -> None:
    reference = make_variant(stem, tmp_path)
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    check(loaded, reference, fused=kernels)
    views, tensors = loaded.trainer_views(), reference.state_dict()
    assert set(views) >= set(tensors)  # a mixture may have names for single experts, too
    assert set(views) == set(tensors) or loaded.spec.moe is not None
    assert all(torch.equal(kept_values(views[name]), tensor) for name, tensor in tensors.items())
    buffers = {name for name in tensors if name not in dict(reference.named_parameters())}
    assert buffers - {"lm_head.weight"} <= loaded.kept_if_absent()


@pytest.mark.parametrize(
    ("stem", "kernels"),
    [
        *((stem, stem in ADAPTERS_BY_KERNELS) for stem in sorted(STEPS_BY_KERNELS)),
        *nightly(*((stem, False) for stem in CONFIGS if stem not in STEPS_BY_KERNELS)),
        *nightly(*((stem, True) for stem in CONFIGS if stem not in ADAPTERS_BY_KERNELS)),
    ],
)
def test_an_adapter_of_all_its_modules_is_what_peft_merges(stem: str, kernels: bool, tmp_path: Path) -> None:
    reference = make_variant(stem, tmp_path)
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    adapter = make_adapter(reference, tmp_path / "adapter", 0, ALL if loaded.spec.moe is None else ATTENTION)
    slots = AdapterSlots(loaded.spec, 1, 16, torch.float32, CPU)
    slots.write(1, load_peft_folder(adapter, loaded.spec, 16, torch.float32))
    with torch.no_grad():
        before = reference(torch.tensor([PROMPT])).logits.clone()
        exact = merged(reference, adapter)
        assert (exact(torch.tensor([PROMPT])).logits - before).abs().max() > 0.1
    check(loaded, exact, slots, atol=1e-3, fused=kernels)  # merged weights round otherwise


@pytest.mark.parametrize("stem", ["Glm4Moe", "MiniMaxM2", "MiniMaxM3VL", "Afmoe", "GptOss"])
def test_a_trainers_parameters_are_a_whole_update(stem: str, tmp_path: Path) -> None:
    """`named_parameters()` has no buffers; tensors of layers for further tokens may come with them."""
    reference = make_variant(stem, tmp_path)
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    parameters = ParameterMap(loaded.trainer_views(), UpdateNames(loaded.kept_if_absent(), loaded.spec.unused))
    rows = [(name, "float32", list(tensor.shape)) for name, tensor in reference.named_parameters()]
    fit = parameters.check(pack(1, rows, 1 << 20))
    buffers = {name for name, _ in reference.named_buffers() if name.endswith("_bias")}
    assert len(fit.copied) == len(rows) and not fit.unused
    assert {name.rpartition(".")[2] for name in fit.kept} == {name.rpartition(".")[2] for name in buffers}
    assert len(fit.kept) == len(buffers)
    if stem == "Glm4Moe":
        extra = [(f"model.layers.{index}.eh_proj.weight", "float32", [3, 5]) for index in (3, 4)]
        assert parameters.check(pack(1, rows + extra, 1 << 20)).unused == tuple(name for name, *_ in extra)
        with pytest.raises(WeightsRejected, match=r"model\.layers\.5"):
            parameters.check(pack(1, [*rows, ("model.layers.5.eh_proj.weight", "float32", [3, 5])], 1 << 20))


def test_mimo_is_read_as_qwen2_without_its_prediction_of_further_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers has no MiMo: the config is Qwen2's under another name, and there are tensors of another layer."""
    reference = make_checkpoint("Qwen2", tmp_path, **SIZES, use_sliding_window=False)
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "auto_map": {"AutoConfig": "x--y.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"model.mtp_layers.0.{name}.weight": torch.randn(48, 48) for name in ("input_proj", "self_attn.q_proj")}
    save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})
    with caplog.at_level("INFO"):
        loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    assert sum("model.mtp_layers.0.input_proj.weight" in record.getMessage() for record in caplog.records) == 1
    check(loaded, reference, fused=False)
    assert set(loaded.trainer_views()) == set(reference.state_dict())


def test_rotary_embeddings_follow_the_config_whichever_release_of_transformers_reads_it(tmp_path: Path) -> None:
    """Earlier ones leave `rotary_dim` of MiniMax-M2 as it is, and keep one map of rotary embeddings for OLMo 3."""
    make_variant("MiniMaxM2", tmp_path / "minimax")
    read = read_config(tmp_path / "minimax", "auto")
    config = read.text
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    attention = spec_from_config(config, read.architecture).layers[0].mixer
    assert attention.rope.width(attention.head_dim) == config.rotary_dim == attention.head_dim // 2
    make_variant("Olmo3", tmp_path / "olmo")
    read = read_config(tmp_path / "olmo", "auto")
    read.text.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    mixers = [layer.mixer for layer in spec_from_config(read.text, read.architecture).layers]
    kinds = [(mixer.window, mixer.rope.kind, mixer.rope.theta) for mixer in mixers]
    assert kinds == [(6, "default", 1e4), (None, "linear", 1e4), (6, "default", 1e4)]


def test_every_config_here_has_a_declaration() -> None:
    assert {f"{stem.split()[0]}ForCausalLM" for stem in CONFIGS} < set(FAMILIES)
