"""Which tokens end a completion: those that the checkpoint declares, and the one of its tokenizer."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.text.codec import load_text_codec
from rollout.worker_parts import eos_ids
from tests.support.models.both_ways import edit
from tests.support.models.families import make_checkpoint
from tests.support.tokenizer_folder import make_tokenizer_folder

_END = "<|im_end|>"


def folder_of(folder: Path, config: Any, generation: Any, vocab: int = 400, **tokenizer: Any) -> Path:
    """A checkpoint with these eos tokens, None for no key; `tokenizer` changes tokenizer_config.json."""
    make_checkpoint("llama", folder, vocab_size=vocab, eos_token_id=None, bos_token_id=None)
    edit(folder, lambda content: content.update(eos_token_id=config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    make_tokenizer_folder(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | tokenizer))
    return folder


def ends_of(folder: Path) -> tuple[int, ...]:
    """The tokens that end a completion of a worker that serves the folder."""
    loaded = load_model(ModelSettings(path=str(folder)), torch.device("cpu"))
    return eos_ids(loaded.generation_config.eos_token_ids, load_text_codec(folder), loaded.spec.vocab)


def token_of(folder: Path, text: str = _END) -> int:
    codec = load_text_codec(folder)
    assert codec is not None
    return codec.tokenizer.convert_tokens_to_ids(text)


@pytest.mark.parametrize("written", [_END, {"__type": "AddedToken", "content": _END, "special": True}])
@pytest.mark.parametrize(("config", "generation"), [(None, None), (7, None), (None, [7, 9]), ([7, 8], [9])])
def test_the_tokenizers_eos_ends_completions_too(written: Any, config: Any, generation: Any, tmp_path: Path) -> None:
    """Chat models end their turns with it; older files declare the end of documents alone."""
    folder = folder_of(tmp_path, config, generation, eos_token=written)
    declared = generation if generation is not None else config
    listed = [] if declared is None else declared if isinstance(declared, list) else [declared]
    assert ends_of(folder) == tuple(sorted([*listed, token_of(folder)]))


def test_a_token_that_all_declare_counts_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, None, None)
    token = token_of(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [token, 3]}))
    assert ends_of(folder) == (3, token)


@pytest.mark.parametrize("tokenizer", ["none", "without eos", "with another vocabulary"])
def test_a_checkpoint_without_an_end_is_warned_of(
    tokenizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path, None, None, 100 if tokenizer == "with another vocabulary" else 400)
    if tokenizer == "none":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    if tokenizer == "without eos":
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({key: v for key, v in json.loads(file.read_text()).items() if key != "eos_token"}))
    assert ends_of(folder) == ()
    warned = [record for record in caplog.records if record.name == "rollout.worker_parts"]
    assert {record.levelno for record in warned} == {logging.WARNING}
    assert "generation_config.json" in warned[-1].getMessage() and "stop.token_ids" in warned[-1].getMessage()
