"""Where a checkpoint lies, and its small files: config.json and generation_config.json.

A folder may come from anyone: code that it brings along is never run, its numbers are checked before anything is made
after them, and no link leads out of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoConfig

from rollout.models.errors import CheckpointError
from rollout.models.limits import check_config, check_token_ids
from rollout.models.registry import check_model_type, check_supported

if TYPE_CHECKING:
    from rollout.models.checkpoint import Progress

_SMALL_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_UNWANTED = ("*/*", "consolidated*")
_MAX_JSON_BYTES = 64 << 20
_COUNTING = Lock()


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint says about generating with it."""

    eos_token_ids: tuple[int, ...]  # ascending; generation_config.json's, else config.json's, else none
    bos_token_id: int | None
    pad_token_id: int | None


def resolve_folder(path: str, revision: str | None, weights: bool, progress: Progress | None = None) -> Path:
    """Local folder of a checkpoint; a hub id is downloaded first, with its weights only if `weights`.

    `progress` is told (bytes that are there, bytes in all) during a download, from several threads; what there is in
    all grows as files are found. huggingface_hub's own bars are not shown.

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
                path,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=list(_UNWANTED),
                tqdm_class=_counting_bars(progress),
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{path} is neither a local folder nor a hub model that can be had: {error}") from error


def _counting_bars(progress: Progress | None) -> type:
    """What huggingface_hub takes for its bars: draws nothing, and tells of the bytes that were written."""

    class Counting(huggingface_hub.utils.tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            name = str(options.get("name", ""))
            # Of two bars of bytes the other one counts what came over the network, which may be less than the files.
            self._told = progress if options.get("unit") == "B" and not name.endswith(".transfer") else None
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            with _COUNTING:
                self.n += n or 0
            if self._told is not None:
                self._told(int(self.n), int(self.total or 0))

    return Counting


def check_links(folder: Path) -> None:
    """Raise CheckpointError if a file that would be read is a link to somewhere else.

    In the hub's cache, where a snapshot is all links, they may lead to anywhere in the cached repository.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() and any(fnmatch(entry.name, pattern) for pattern in (*_SMALL_FILES, *_WEIGHT_FILES)):
            try:
                inside = entry.resolve().is_relative_to(root)
            except (OSError, RuntimeError):  # links in a circle
                inside = False
            if not inside:
                raise CheckpointError(f"{entry} is a link that leads out of its folder; put the file itself there")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, no key in it twice, or CheckpointError."""
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file" if file.exists() else f"{file} is missing")
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_JSON_BYTES >> 20} MiB, which no such file is")
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_no_key_twice)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} cannot be read as JSON: it is nested too deeply") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return content


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return content


def read_config(folder: Path) -> tuple[Any, str]:
    """The transformers config of a checkpoint and the name of its architecture.

    Raises:
        CheckpointError: config.json is missing, names no architecture, or asks for what no model has.
        ValueError: the architecture is not supported.
    """
    file = folder / "config.json"
    content = read_json(file)
    names = content.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"{file} must name one architecture in 'architectures', not {names!r:.200}")
    check_supported(names[0])
    check_model_type(names[0], content.get("model_type"))
    check_config(content, str(file))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    # It checks little and fails in many ways; whatever it raises is about this file.
    except Exception as error:
        raise CheckpointError(
            f"{file} is no config that can be read: {type(error).__name__}: {error!s:.500}"
        ) from error
    return config, names[0]


def read_generation_defaults(folder: Path, config: Any) -> GenerationDefaults:
    """generation_config.json, where a key is missing config.json."""
    file = folder / "generation_config.json"
    content = read_json(file) if file.exists() else {}

    def value(key: str) -> Any:
        given = content.get(key)
        return getattr(config, key, None) if given is None else given

    where = str(file if "eos_token_id" in content else folder / "config.json")
    eos_ids = check_token_ids(value("eos_token_id"), config.vocab_size, where, "eos_token_id")
    return GenerationDefaults(eos_ids, value("bos_token_id"), value("pad_token_id"))
