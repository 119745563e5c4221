"""Where a checkpoint lies, and its small files: config.json and generation_config.json.

Code that a checkpoint brings along is never run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoConfig

from rollout.models.errors import CheckpointError
from rollout.models.registry import check_supported

_SMALL_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_UNWANTED = ("*/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint says about generating with it."""

    eos_token_ids: tuple[int, ...]  # ascending; generation_config.json's, else config.json's, else none
    bos_token_id: int | None
    pad_token_id: int | None


def resolve_folder(path: str, revision: str | None, weights: bool) -> Path:
    """Local folder of a checkpoint; a hub id is downloaded first, with its weights only if `weights`.

    Raises:
        CheckpointError: there is no such folder, or the hub does not give it.
    """
    if not path:
        raise CheckpointError("no model given; set model.path to a local folder or a Hugging Face hub id")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise CheckpointError(f"{path} is not a folder")
    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                path, revision=revision, allow_patterns=patterns, ignore_patterns=list(_UNWANTED)
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{path} is neither a local folder nor a hub model that can be had: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or CheckpointError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return content


def read_config(folder: Path) -> tuple[Any, str]:
    """The transformers config of a checkpoint and the name of its architecture.

    Raises:
        CheckpointError: config.json is missing or names no architecture.
        ValueError: the architecture is not supported.
    """
    names = read_json(folder / "config.json").get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"{folder / 'config.json'} must name one architecture in 'architectures', not {names!r}")
    check_supported(names[0])
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True), names[0]


def read_generation_defaults(folder: Path, config: Any) -> GenerationDefaults:
    """generation_config.json, where a key is missing config.json."""
    file = folder / "generation_config.json"
    content = read_json(file) if file.exists() else {}

    def value(key: str) -> Any:
        given = content.get(key)
        return getattr(config, key, None) if given is None else given

    eos = value("eos_token_id")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return GenerationDefaults(tuple(sorted(set(eos_ids))), value("bos_token_id"), value("pad_token_id"))
