"""Hostile model folders: each gets a clear error quickly; no code in it runs, and no absurd memory is allocated."""

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import CheckpointError, LoadedModel, load_model
from rollout.text.codec import TextCodec, load_text_codec
from tests.support.models.families import FAMILIES, make_checkpoint
from tests.support.robustness.corpus import json_values
from tests.support.robustness.limits import little_memory_and_time
from tests.support.tokenizer_folder import make_tokenizer_folder
from trainer_bridge.wire.errors import RolloutError

CPU = torch.device("cpu")
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ABSURD = json_values()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family)
        make_checkpoint(family, folders[family])
        _load(folders[family])  # imports happen here, outside the limits on time and memory
    return folders


@pytest.fixture
def folder(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a good Llama checkpoint, to be spoiled."""
    return Path(shutil.copytree(checkpoints["llama"], tmp_path / "model"))


def _load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), **settings), CPU)


def refused(folder: Path, match: str = "", **settings: Any) -> str:
    """Check that the folder is refused; returns the message."""
    with little_memory_and_time(), pytest.raises(ValueError, match=match) as error:
        _load(folder, **settings)
    assert 10 < len(str(error.value)) < 4000
    return str(error.value)


def edit_config(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(content))


# --- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [family if family == "qwen3_moe" else pytest.param(family, marks=pytest.mark.nightly) for family in FAMILIES],
)
def test_an_absurd_value_of_any_key_is_refused_or_harmless(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Each key of the config with each absurd value: a ValueError, or a model that loads."""
    good = checkpoints[family]
    content = json.loads((good / CONFIG).read_text())
    places: list[tuple[str, ...]] = [(key,) for key in content]
    places += [("rope_parameters", key) for key in content["rope_parameters"]]
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    refusals = 0
    for place in places:
        for value in ABSURD:
            spoiled = json.loads(json.dumps(content))
            target = spoiled if len(place) == 1 else spoiled[place[0]]
            target[place[-1]] = value
            (tmp_path / CONFIG).write_text(json.dumps(spoiled))
            with little_memory_and_time():
                try:
                    _load(tmp_path)
                except ValueError as error:
                    assert len(str(error)) < 4000
                    refusals += 1
                except Exception as error:
                    raise AssertionError(f"{place} = {value!r:.60} gave {error!r:.300}") from error
    assert refusals > len(places) * len(ABSURD) / 3


@pytest.mark.parametrize("load_format", ["auto", "random"])
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 10**9},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 2**40},
        {"max_position_embeddings": 10**15},
        {"num_attention_heads": 10**9},
        {"head_dim": 10**9},
        {"head_dim": None, "hidden_size": 1},
        {"intermediate_size": -1},
        {"hidden_size": "4096"},
        {"num_hidden_layers": 12.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1}},
        {"rope_parameters": [1]},
        {"model_type": "bert"},
        {"model_type": None},
        {"architectures": ["x" * 10_000_000]},
    ],
)
def test_absurd_sizes_are_refused_before_memory_is_allocated(changes: dict, load_format: str, folder: Path) -> None:
    edit_config(folder, **changes)
    message = refused(folder, load_format=load_format)
    assert next(iter(changes)) in message or "architecture" in message or "rope" in message


@pytest.mark.parametrize("load_format", ["auto", "random"])
def test_large_sizes_within_bounds_allocate_nothing(load_format: str, folder: Path) -> None:
    """The product of allowed numbers is checked against the files, and against the memory of the device."""
    edit_config(folder, hidden_size=5 << 15, intermediate_size=1 << 22, num_hidden_layers=64, vocab_size=1 << 24)
    message = refused(folder, load_format=load_format)
    assert "cannot be loaded" in message if load_format == "auto" else "GiB" in message


def test_experts_of_all_layers_together_are_bounded(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints["qwen3_moe"], tmp_path / "model"))
    edit_config(folder, num_experts=4096, num_local_experts=4096, num_hidden_layers=2048, num_experts_per_tok=8)
    refused(folder, "with 2048 layers")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' is given twice"),
        ("[]", "does not contain a JSON object"),
        ("\x00" * 1000, "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ('{"architectures": ["LlamaForCausalLM"], "n": ' + "9" * 10_000 + "}", "cannot be read as JSON"),
    ],
)
def test_json_that_is_not_a_config_is_refused(text: str, match: str, folder: Path) -> None:
    (folder / CONFIG).write_text(text)
    refused(folder, match)


def test_bytes_that_are_not_text_are_refused(folder: Path) -> None:
    (folder / CONFIG).write_bytes(b"\xff\xfe\x00")
    refused(folder, "cannot be read as JSON")


@pytest.mark.parametrize("name", [CONFIG, "generation_config.json"])
def test_a_json_file_of_absurd_size_is_not_read(name: str, folder: Path) -> None:
    with open(folder / name, "wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no disk
    refused(folder, "larger than")


@pytest.mark.parametrize("eos", [-1, 2**31, 10**30, "2", [2, "x"], [True], [[1]], {"a": 1}, 1.0, [131]])
def test_eos_ids_are_token_ids(eos: Any, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    refused(folder, "eos_token_id")


# --- code -------------------------------------------------------------------------------------------------------------

EVIL = """
import pathlib
pathlib.Path({proof!r}).write_text("ran")
from transformers import LlamaConfig as EvilConfig, PreTrainedTokenizerFast as EvilTokenizer
from trainer_bridge.wire.errors import RolloutError
"""


def add_code(folder: Path, proof: Path) -> None:
    for name in ("configuration_evil.py", "modeling_evil.py", "tokenization_evil.py", "__init__.py", "setup.py"):
        (folder / name).write_text(EVIL.format(proof=str(proof)))


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_named_by_a_config_never_runs(model_type: str, folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    add_code(folder, proof)
    auto_map = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
    edit_config(folder, model_type=model_type, auto_map=auto_map, trust_remote_code=True)
    if model_type == "llama":
        _load(folder)  # as if the map were not there
    else:
        refused(folder, "model_type 'evil' does not belong to LlamaForCausalLM")
    assert not proof.exists()


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "EvilTokenizer", "LlamaTokenizer", None])
def test_code_named_by_a_tokenizer_never_runs(tokenizer_class: str | None, tmp_path: Path) -> None:
    proof, folder = tmp_path / "proof", tmp_path / "tokenizer"
    folder.mkdir()
    make_tokenizer_folder(folder)
    add_code(folder, proof)
    names = ["tokenization_evil.EvilTokenizer", "tokenization_evil.EvilTokenizer"]
    config = {"tokenizer_class": tokenizer_class, "auto_map": {"AutoTokenizer": names}, "trust_remote_code": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / CONFIG).write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.E"}}))
    with contextlib.suppress(ValueError):
        load_text_codec(folder)
    assert not proof.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch PROOF').read() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ 'x' * 10**12 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str, tmp_path: Path) -> None:
    codec = TextCodec(make_tokenizer_folder(tmp_path, template.replace("PROOF", str(tmp_path / "proof"))))
    text = ""
    with little_memory_and_time(), contextlib.suppress(RolloutError):
        text = codec.render_chat([{"role": "user", "content": "x"}])
    assert text == ""
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"5", b"\xff\xff", b'{"model": {}}', b'{"model": {"type": "BPE"}}'),
        *(b"[" * 100_000, b'{"version": "1.0", "model": {"type": "WordPiece", "vocab": {"a": -1}}}'),
        b'{"tokenizer_class": 5}',
        b'{"tokenizer_class": "../../x"}',
        b'{"chat_template": 5, "eos_token": [1]}',
        b'{"added_tokens_decoder": {"99999999999999999999": {"content": "x"}}}',
        b'{"added_tokens_decoder": [1, 2]}',
    ],
)
def test_a_broken_tokenizer_is_refused_or_harmless(name: str, content: bytes, tmp_path: Path) -> None:
    make_tokenizer_folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    with little_memory_and_time(), contextlib.suppress(ValueError):
        load_text_codec(tmp_path)


# --- paths ------------------------------------------------------------------------------------------------------------


def shard(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


PATHS = [
    "../secret.safetensors",
    "/etc/passwd",
    "sub/../../secret.safetensors",
    "./model-0.safetensors",
    "sub/model-0.safetensors",
    "..",
    ".",
    "",
    "..\\secret.safetensors",
    "C:\\secret.safetensors",
    "model-0.safetensors\0.txt",
    "file:///etc/passwd",
    "x" * 100_000,
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path[:30]))
def test_an_index_cannot_name_files_outside_the_folder(path: str, folder: Path) -> None:
    weight_map = shard(folder)
    shutil.copy(folder / "model-0.safetensors", folder.parent / "secret.safetensors")
    (folder / "sub").mkdir()
    shutil.copy(folder / "model-0.safetensors", folder / "sub" / "model-0.safetensors")
    weight_map[next(iter(weight_map))] = path
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(folder)


@pytest.mark.parametrize("value", [None, [], "x", 5, {"a": 5}, {"a": None}, {"a": ["x"]}, {}])
def test_an_index_without_a_map_of_names_is_refused(value: Any, folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": value}))
    refused(folder)


def test_an_index_with_a_duplicate_name_is_refused(folder: Path) -> None:
    shard(folder)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('{"weight_map": {', '{"weight_map": {"model.norm.weight": "x", '))
    refused(folder, "is given twice")


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, "tokenizer.json", "generation_config.json", "x.safetensors"])
def test_a_link_out_of_the_folder_is_not_followed(name: str, folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    refused(folder, f"{name} is a link that leads out")


def test_links_in_a_circle_or_to_nowhere_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / WEIGHTS)
    refused(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "nowhere")
    refused(folder)


def test_links_inside_the_folder_are_followed(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "stored.bin")
    (folder / WEIGHTS).symlink_to("stored.bin")
    _load(folder)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, "shard"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_pipes_and_devices_are_refused_without_waiting(make: Callable[[Path], None], name: str, folder: Path) -> None:
    if name == "shard":
        shard(folder)
        name = "model-0.safetensors"
    (folder / name).unlink()
    make(folder / name)
    refused(folder)


# --- safetensors ------------------------------------------------------------------------------------------------------

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def tensor_file(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


HOSTILE_FILES = {
    "empty": b"",
    "cut off in the length": b"\x08\x00",
    "length of 2^63": tensor_file({"a": ENTRY}, length=2**63),
    "length of 2^64 - 1": tensor_file({"a": ENTRY}, length=2**64 - 1),
    "length beyond the file": tensor_file({"a": ENTRY}, length=10**9),
    "length of 0": tensor_file(b"", length=0),
    "not JSON": tensor_file(b"\xff" * 40),
    "deep JSON": tensor_file(b"[" * 100_000),
    "a list": tensor_file([1, 2]),
    "absurd shape": tensor_file({"a": ENTRY | {"shape": [2**62, 2**62]}}),
    "large shape": tensor_file({"a": ENTRY | {"shape": [2**40]}}),
    "negative shape": tensor_file({"a": ENTRY | {"shape": [-2]}}),
    "shape of strings": tensor_file({"a": ENTRY | {"shape": ["2"]}}),
    "shape of floats": tensor_file({"a": ENTRY | {"shape": [2.0]}}),
    "many dimensions": tensor_file({"a": ENTRY | {"shape": [1] * 10_000}}),
    "negative offset": tensor_file({"a": ENTRY | {"data_offsets": [-8, 0]}}),
    "offset beyond the file": tensor_file({"a": ENTRY | {"data_offsets": [0, 2**60], "shape": [2**58]}}),
    "overflowing offset": tensor_file({"a": ENTRY | {"data_offsets": [2**64 - 8, 2**64]}}),
    "offsets in reverse": tensor_file({"a": ENTRY | {"data_offsets": [8, 0]}}),
    "overlap": tensor_file({"a": ENTRY, "b": ENTRY}),
    "hole": tensor_file({"a": ENTRY | {"data_offsets": [8, 16]}}, bytes(16)),
    "name twice": tensor_file(b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2)),
    "bytes behind": tensor_file({"a": ENTRY}, bytes(100)),
    "bytes missing": tensor_file({"a": ENTRY}, b""),
    "unknown type": tensor_file({"a": ENTRY | {"dtype": "PICKLE"}}),
    "zip of a pickle": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_hostile_safetensors_are_refused(name: str, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(HOSTILE_FILES[name])
    refused(folder, WEIGHTS if name != "name twice" else "")


def test_a_truncated_file_is_refused(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    for size in [*range(0, 64, 7), *range(64, len(whole), len(whole) // 40), len(whole) - 1]:
        (folder / WEIGHTS).write_bytes(whole[:size])
        refused(folder, "cannot be read")


def test_a_header_length_beyond_the_file_allocates_nothing(folder: Path) -> None:
    with open(folder / WEIGHTS, "wb") as file:
        file.write(struct.pack("<Q", 1 << 39))
        file.truncate(1 << 40)
    refused(folder, "cannot be read")


def test_many_unknown_tensors_are_refused(folder: Path) -> None:
    header = {f"t{i}": ENTRY | {"shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}
    (folder / WEIGHTS).write_bytes(tensor_file(header, b""))
    message = refused(folder, "not part of LlamaForCausalLM")
    assert "more" in message


def test_a_name_of_absurd_length_does_not_fill_the_log(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(tensor_file({"x" * 1_000_000: ENTRY}))
    refused(folder, "not part of")


def test_other_formats_are_never_opened(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.ckpt", "pytorch_model.bin.index.json"):
        (folder / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch proof'\ntR.")
    with pytest.raises(CheckpointError, match="other formats are not supported"):
        _load(folder)
