"""Hostile adapter folders, and adapters of unsupported kinds: each gets an error that names the cause."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import CheckpointError, load_model
from rollout.models.peft_tensors import CONFIG, WEIGHTS, load_peft_folder
from rollout.models.spec import ModelSpec
from tests.support.models.families import make_checkpoint
from tests.support.peft_adapters import make_adapter
from tests.support.robustness.limits import little_memory_and_time

CPU = torch.device("cpu")
ZERO = chr(0x660)  # a digit of another script
PREFIX = "base_model.model.model.layers.0.self_attn."


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, ModelSpec, Path]:
    folder = tmp_path_factory.mktemp("good")
    reference = make_checkpoint("qwen3", folder / "base")
    make_checkpoint("mixtral", folder / "mixture")
    make_adapter(reference, folder / "adapter", 0)
    specs = [load_model(ModelSettings(path=str(folder / name)), CPU).spec for name in ("base", "mixture")]
    load_peft_folder(folder / "adapter", specs[0], 8, torch.float32)  # imports happen here
    return specs[0], specs[1], folder / "adapter"


@pytest.fixture
def folder(good, tmp_path: Path) -> Path:
    """A copy of a good adapter, to be spoiled."""
    return Path(shutil.copytree(good[2], tmp_path / "adapter"))


def refused(folder: Path, spec: ModelSpec, match: str, rank: int = 8) -> None:
    with little_memory_and_time(), pytest.raises(CheckpointError, match=match) as error:
        load_peft_folder(folder, spec, rank, torch.float32)
    assert 10 < len(str(error.value)) < 4000


def edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"), ("peft_type", None), ("use_dora", True), ("bias", "all"), ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]), ("trainable_token_indices", [1]), ("layer_replication", [[0, 1]]),
        ("init_lora_weights", "pissa"), ("init_lora_weights", 7), ("fan_in_fan_out", True), ("lora_bias", True),
        ("use_qalora", True), ("alora_invocation_tokens", [1]), ("target_parameters", ["experts"]),
        ("arrow_config", {"a": 1}), ("of_another_year", "x"), ("use_rslora", "yes"),
        *(("r", value) for value in (0, -1, 1.5, "4", True, None, 10**30)),
        *(("lora_alpha", value) for value in ("4", True, None, 1e30, float("nan"), [1])),
        *(("rank_pattern", value) for value in (3, {"(a+)+$": 4}, {"q_proj": 0}, {"q_proj": "x"})),
        *(("alpha_pattern", value) for value in ([1], {".*": 4}, {"q_proj": float("inf")})),
        ("alpha_pattern", {f"m{i}": 1 for i in range(3000)}),
    ],
)  # fmt: skip
def test_an_unsupported_field_is_named(good, folder: Path, field: str, value: Any) -> None:
    edit(folder, **{field: value})
    refused(folder, good[0], field)


def test_a_rank_beyond_the_slots_is_refused_with_the_setting(good, folder: Path) -> None:
    refused(folder, good[0], "adapter_rank", rank=3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(f"{PREFIX}q_proj.lora_B.weight"), "lora_B"),
        (lambda t: t.update({f"{PREFIX}q_proj.lora_A.weight": torch.zeros(5, 48)}), "must be"),
        (lambda t: t.update({f"{PREFIX}q_proj.lora_A.weight": torch.zeros(4, 48, 1)}), "must be"),
        (lambda t: t.update({f"{PREFIX}q_proj.lora_A.weight": torch.zeros(4, 48, dtype=torch.int64)}), "type"),
        (lambda t: t.update({f"{PREFIX.replace('0', '99')}q_proj.lora_A.weight": torch.zeros(4, 48)}), "99"),
        (lambda t: t.update({"base_model.model.model.embed_tokens.lora_A": torch.zeros(4, 97)}), "supported are"),
        (lambda t: t.update({f"{PREFIX}q_proj.lora_magnitude_vector": torch.zeros(80)}), "magnitude"),
        (lambda t: t.update({f"{PREFIX}q_proj.lora_A.default.weight": torch.zeros(4, 48)}), "same tensor"),
        (lambda t: t.update({f"{PREFIX.replace('0', '00')}q_proj.lora_A.weight": torch.zeros(4, 48)}), "00"),
        (lambda t: t.update({f"{PREFIX.replace('0', ZERO)}q_proj.lora_A.weight": torch.zeros(4, 48)}), ZERO),
        (lambda t: t.clear(), "no tensors"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(good, folder: Path, change, match: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    refused(folder, good[0], match)


@pytest.mark.parametrize(
    ("letter", "value", "dtype"),
    [("A", float("nan"), torch.float32), ("B", float("-inf"), torch.float32), ("B", 60000.0, torch.float16)],
)
def test_values_that_are_not_finite_are_refused_with_the_tensor(good, folder, letter, value, dtype) -> None:
    """The last one is finite until it is scaled, in a model of 16 bits."""
    tensors = load_file(folder / WEIGHTS)
    tensors[f"{PREFIX}q_proj.lora_{letter}.weight"][-1, -1] = value
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"q_proj.lora_{letter}.weight has NaN or infinite") as error:
        load_peft_folder(folder, good[0], 8, dtype)
    assert str(dtype) in str(error.value)


def test_adapters_of_experts_are_refused_with_the_supported_modules(good, folder: Path) -> None:
    hidden = good[1].hidden
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora"
    save_file({f"{name}_A.weight": torch.zeros(4, hidden), f"{name}_B.weight": torch.zeros(56, 4)}, folder / WEIGHTS)
    refused(folder, good[1], "feed-forward modules in dense layers only")


@pytest.mark.parametrize("where", ["header", "data", "nothing"])
def test_a_truncated_file_is_refused(good, folder: Path, where: str) -> None:
    content = (folder / WEIGHTS).read_bytes()
    kept = {"header": 40, "data": len(content) - 9, "nothing": 0}[where]
    (folder / WEIGHTS).write_bytes(content[:kept])
    refused(folder, good[0], "cannot be read")


def test_an_absurd_shape_allocates_nothing(good, folder: Path) -> None:
    header = {f"{PREFIX}q_proj.lora_A.weight": {"dtype": "F32", "shape": [2**40, 48], "data_offsets": [0, 2**47]}}
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)
    refused(folder, good[0], "cannot be read")


def test_links_out_of_the_folder_and_other_formats_are_refused(good, folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(tmp_path / "elsewhere.safetensors")
    (folder / "adapter_model.bin").write_bytes(b"\x80\x02pickled")
    refused(folder, good[0], "other formats than safetensors")
    (folder / WEIGHTS).symlink_to(tmp_path / "elsewhere.safetensors")
    refused(folder, good[0], "leads out")
    refused(tmp_path / "nowhere", good[0], "not a folder")
