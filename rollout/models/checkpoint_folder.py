"""The folder of a checkpoint, and its small files: config.json and generation_config.json.

A folder is untrusted. Code in it is never run, and no link leads out of it. Values of config.json are checked before
they are used: transformers makes lists as long as `num_hidden_layers` when it reads a config, and the size of a model
follows from its config. So a number that no model has is refused first. The rules come from the family's declaration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import CONFIG_MAPPING, AutoConfig

from rollout.config import ModelImpl
from rollout.models.config_rules import NUMBER, NUMBERS, Rule
from rollout.models.registry import (
    check_model_type,
    check_supported,
    config_rules,
    family_of,
    flat_model_type,
    has_text_config,
    is_native,
    size_rules,
    tower_family,
)
from rollout.models.vision_spec import TOKEN_RULES, VISION_RULES, TowerSpec, tower_spec

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]

_SMALL_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_UNWANTED = ("*/*", "consolidated*")
_MAX_JSON_BYTES = 64 << 20
_COUNTING = Lock()

_ROPE_MAPS = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor", "llama_4_scaling_beta"),
)
#: Keys of the language model that stand beside its map `text_config`.
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
_ROPE_LISTS = ("short_factor", "long_factor")


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or used; the message names every file or tensor that is at fault."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Token ids that a checkpoint declares for generation."""

    eos_token_ids: tuple[int, ...]  # ascending; generation_config.json's, else config.json's, else none
    bos_token_id: int | None
    pad_token_id: int | None


def resolve_folder(path: str, revision: str | None, weights: bool, progress: Progress | None = None) -> Path:
    """Local folder of a checkpoint; a hub id is downloaded first, with its weights only if `weights`.

    During a download several threads call `progress` with (bytes so far, bytes in all); the total grows as files are
    found. huggingface_hub's own bars are not shown.

    Raises:
        CheckpointError: there is no such folder, or the download fails.
    """
    if not path:
        raise CheckpointError("no model given; set model.path to a local folder or a Hugging Face hub id")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise CheckpointError(f"{path} is not a folder; name a checkpoint's folder or a Hugging Face hub id")
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
    # huggingface_hub raises errors of its own, of its HTTP library and of the system.
    except Exception as error:
        raise CheckpointError(_hub_problem(path, revision, error)) from error


def _hub_problem(path: str, revision: str | None, error: Exception) -> str:
    """One sentence about a download that failed, and what to change."""
    match error:
        case HFValidationError():
            return f"{path} is neither a local folder nor a hub id; write a hub id as owner/name"
        case GatedRepoError():
            return f"{path} is a gated hub model; accept its terms on its page and set HF_TOKEN to your token"
        case RepositoryNotFoundError():
            return f"{path} is neither a local folder nor a hub model; check the name, or set HF_TOKEN if it is private"
        case RevisionNotFoundError():
            return f"{path} has no revision {revision}; change model.revision to a branch, tag or commit of it"
        case LocalEntryNotFoundError():
            return (
                f"{path} is not a local folder, and the hub does not answer; check the network and HF_HUB_OFFLINE, or "
                "give the folder of a downloaded checkpoint"
            )
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{path} cannot be downloaded from the hub; try again, or give a local folder ({reason:.300})"


def _counting_bars(progress: Progress | None) -> type:
    """A class of progress bars for huggingface_hub: draws nothing, and reports the bytes that were written."""

    class Counting(huggingface_hub.utils.tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            name = str(options.get("name", ""))
            # There is another bar of bytes: it counts network traffic, which may be less than the files.
            self._progress = progress if options.get("unit") == "B" and not name.endswith(".transfer") else None
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            with _COUNTING:
                self.n += n or 0
            if self._progress is not None:
                self._progress(int(self.n), int(self.total or 0))

    return Counting


def check_links(folder: Path) -> None:
    """Raise CheckpointError if a file that would be read is a link that leads out of the folder.

    In the hub's cache every file of a snapshot is a link; there, links may lead anywhere in the cached repository.
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
                raise CheckpointError(f"{entry} is a link that leads out of its folder; replace it by the file")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError for anything else, and for a key that is given twice."""
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file" if file.exists() else f"{file} is missing")
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_JSON_BYTES >> 20} MiB; no such file is that large")
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_no_key_twice)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} cannot be read as JSON: it is nested too deeply") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not contain a JSON object")
    return content


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} is given twice")
    return content


def read_config(folder: Path, impl: ModelImpl = "native") -> tuple[Any, str]:
    """The transformers config of a checkpoint and the name of its architecture.

    `impl` is the setting `model_impl`: a native family has rules for all keys that it reads, others for sizes.

    Raises:
        CheckpointError: config.json is missing, names no architecture, or has a value out of bounds.
        ValueError: the architecture is not supported.
    """
    file = folder / "config.json"
    content = read_json(file)
    names = content.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"{file} must name one architecture in 'architectures', not {names!r:.200}")
    rules, read_as, where = size_rules(), None, str(file)
    if is_native(names[0], impl):
        check_supported(names[0])
        check_model_type(names[0], content.get("model_type"))
        nested = has_text_config(names[0])
        if nested:
            where = f"{file}: text_config"
            content = _text_config(content, file, names[0])
        family = family_of(names[0], content.get("model_type"))
        rules, read_as = config_rules(family), family.model_type if nested else family.read_as
        if content.get("model_type") in family.other_types:
            read_as = family.model_type
    check_config(content, rules, where)
    for name, part in content.items():
        if name.endswith("_config") and isinstance(part, dict):  # of a language model, a vision tower
            check_config(part, size_rules(), f"{file}: {name}")
    try:
        if read_as is None:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        else:
            config = CONFIG_MAPPING[read_as].from_dict(content | {"model_type": read_as})
    # It validates little and fails in many ways; any exception is about this file.
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read as a config: {type(error).__name__}: {error!s:.500}") from error
    # Keys may have other names in the file than in the config, and transformers adds those that are missing.
    check_config({name: getattr(config, name, None) for name in rules}, rules, where)
    return config, names[0]


def read_tower(folder: Path, architecture: str, config: Any) -> TowerSpec:
    """The vision tower of a checkpoint; `config` and `architecture` are the result of `read_config`.

    Raises:
        CheckpointError: a value of `vision_config` is out of bounds.
        ValueError: there is no tower that is served, or it does not fit the language model.
    """
    file, family = folder / "config.json", tower_family(architecture)
    if family is None:
        raise ValueError(f"{architecture} is not served with images: set model.images = false")
    content = read_json(file)
    vision = content.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError(f"{file} has no map 'vision_config'")
    for given, rules, where in ((vision, VISION_RULES, f"{file}: vision_config"), (content, TOKEN_RULES, str(file))):
        for name, rule in rules.items():
            _check(given.get(name), rule, where, name)
    known = {name: vision[name] for name in VISION_RULES if vision.get(name) is not None}
    defaults = CONFIG_MAPPING[family.model_type](**known)
    values = {name: getattr(defaults, name) for name in VISION_RULES if hasattr(defaults, name)}
    for name, value in values.items():
        _check(value, VISION_RULES[name], f"{file}: vision_config", name)
    whole = CONFIG_MAPPING[content["model_type"]]
    ids = {name: content.get(name, getattr(whole, name, None)) for name in TOKEN_RULES}
    return tower_spec(family, values, ids, config)


def _text_config(content: dict[str, Any], file: Path, architecture: str) -> dict[str, Any]:
    """The config of the language model, with what the whole checkpoint says about it."""
    text = content.get("text_config")
    if text is None and (model_type := flat_model_type(architecture)) is not None:
        parts = ("vision_config", "architectures")
        return {name: value for name, value in content.items() if name not in parts} | {"model_type": model_type}
    if not isinstance(text, dict):
        raise CheckpointError(f"{file} has no map 'text_config'")
    return text | {name: content[name] for name in _OF_THE_WHOLE if content.get(name) is not None}


def read_generation_defaults(folder: Path, config: Any) -> GenerationDefaults:
    """Values of generation_config.json, or of config.json for keys that it lacks."""
    file = folder / "generation_config.json"
    content = read_json(file) if file.exists() else {}
    text = config.get_text_config()

    def value(key: str) -> Any:
        given = (content.get(key), getattr(config, key, None), getattr(text, key, None))
        return next((found for found in given if found is not None), None)

    where = str(file if "eos_token_id" in content else folder / "config.json")
    eos_ids = check_token_ids(value("eos_token_id"), text.vocab_size, where, "eos_token_id")
    return GenerationDefaults(eos_ids, value("bos_token_id"), value("pad_token_id"))


# --- values of config.json -------------------------------------------------------------------------------------------


def check_config(content: Mapping[str, Any], rules: Mapping[str, Rule], where: str) -> None:
    """Raise CheckpointError with the key of a value that breaks its rule. None counts as missing."""
    for name, rule in rules.items():
        _check(content.get(name), rule, where, name)
    for name in _ROPE_MAPS:
        _check_rope(content.get(name), where, name)


def check_token_ids(value: Any, vocab: int, where: str, name: str) -> tuple[int, ...]:
    """Ascending token ids from an id, a list of ids or None. Raises CheckpointError for any other value."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise _bad(where, name, token, f"token ids from 0 to {vocab - 1}")
    return tuple(sorted(set(ids)))


def _check_rope(value: Any, where: str, name: str) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise _bad(where, name, value, "a map")
    _check_rope_values(value, where, name)
    for kind, part in value.items():
        if isinstance(part, dict):  # one map for each type of layer
            _check_rope_values(part, where, f"{name}.{kind:.40}")


def _check_rope_values(value: dict[str, Any], where: str, name: str) -> None:
    for key in ("rope_type", "type"):
        if key in value and type(value[key]) is not str:
            raise _bad(where, f"{name}.{key}", value[key], "a string")
    for key in _ROPE_NUMBERS:
        _check(value.get(key), NUMBER, where, f"{name}.{key}")
    for key in _ROPE_LISTS:
        _check(value.get(key), NUMBERS, where, f"{name}.{key}")
    for key in ("mscale", "mscale_all_dim"):
        _check(value.get(key) or None, NUMBER, where, f"{name}.{key}")  # 0 means none


def _check(value: Any, rule: Rule, where: str, name: str) -> None:
    if value is not None and not rule.allows(value):
        raise _bad(where, name, value, rule.wanted)


def _bad(where: str, name: str, value: Any, wanted: str) -> CheckpointError:
    return CheckpointError(f"{where}: {name} is {value!r:.60}; it must be {wanted}")
