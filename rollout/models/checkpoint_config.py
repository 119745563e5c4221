"""config.json and generation_config.json of a checkpoint, as transformers' models read them.

transformers decides the names of keys, their aliases, the defaults of absent keys, and which of two keys wins. All of
this is taken from its own config, here and nowhere else:

    config.json --rules--> transformers' config class --standardised--> rules again --> CheckpointConfig

A model of transformers standardises its rotary embedding once more when it is made: a key beside the map then wins over
one inside. So this is done here, too. The config is the whole checkpoint's: for a model of text and images it says
whether the output layer is tied.

Values are checked before they are used, because a folder is untrusted: transformers makes lists as long as
`num_hidden_layers` when it reads a config, and the size of a model follows from its config. So a number that no model
has is refused first. The rules come from the family's declaration.

A config is in the known form if all its keys are (`registry.known_keys`). For others the worker compares logits with
transformers' own model at the start (`rollout.models.start_check`).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from rollout.checkpoint_folder import CheckpointError, bad_value, read_json
from rollout.config import ModelImpl
from rollout.models.config_rules import NUMBER, NUMBERS, Rule
from rollout.models.registry import (
    OFF_IF_NULL,
    ROPE_KEYS,
    WITHOUT_EFFECT,
    UnsupportedVariantError,
    check_model_type,
    check_supported,
    config_rules,
    family_of,
    flat_model_type,
    has_text_config,
    is_native,
    known_keys,
    size_rules,
    tower_family,
)
from rollout.models.vision_spec import TOKEN_RULES, VISION_RULES, TowerSpec, tower_spec

_ROPE_MAPS = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor", "llama_4_scaling_beta"),
)
_ROPE_LISTS = ("short_factor", "long_factor")
#: Keys of a whole checkpoint's config about its language model.
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The content of config.json, in transformers' terms."""

    architecture: str
    whole: Any  # transformers' config
    unknown: tuple[str, ...] = ()  # keys outside the known form; none of a model that transformers' own code runs

    @property
    def text(self) -> Any:
        """The config of the language model, with the `tie_word_embeddings` of `whole`; it may be `whole` itself."""
        return self.whole.get_text_config()


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Token ids that a checkpoint declares for generation."""

    eos_token_ids: tuple[int, ...]  # ascending; generation_config.json's, else config.json's, else none
    bos_token_id: int | None
    pad_token_id: int | None


def read_config(folder: Path, impl: ModelImpl = "native") -> CheckpointConfig:
    """The config of a checkpoint.

    `impl` is the setting `model_impl`: a native family has rules for all keys that it reads, other models for sizes.

    Raises:
        CheckpointError: config.json is missing, names no architecture, or has a value out of bounds.
        UnsupportedVariantError: the native family cannot read layers of different configs.
        ValueError: the architecture is not supported.
    """
    file = folder / "config.json"
    content = read_json(file)
    names = content.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"{file} must name one architecture in 'architectures', not {names!r:.200}")
    architecture = names[0]
    if not is_native(architecture, impl):
        return CheckpointConfig(architecture, _checked(file, content, content, size_rules(), None))
    check_supported(architecture)
    check_model_type(architecture, content.get("model_type"))
    text, read_as = content, content["model_type"]
    if has_text_config(architecture):
        text = _text_map(content, file, architecture)
        family = family_of(architecture, text.get("model_type"))
    else:
        family = family_of(architecture, read_as)
        read_as = family.read_as or family.model_type
    whole = _checked(file, content, text, config_rules(family), read_as)
    unknown = _unknown_keys(text, known_keys(family), whole.get_text_config())
    if text is not content:
        of_the_whole = WITHOUT_EFFECT | {entry.name for entry in fields(whole)}
        if flat_model_type(architecture) is not None:  # files have the language model's keys there, alone or once more
            of_the_whole |= known_keys(family)
        inside = content.get("text_config") or {}  # absent: all stand side by side
        unknown = tuple(name for name in unknown if name in inside or name not in of_the_whole)
        unknown += tuple(name for name in content if name not in of_the_whole and name not in unknown)
    return CheckpointConfig(architecture, whole, unknown)


def _checked(
    file: Path, content: dict[str, Any], text: dict[str, Any], rules: Mapping[str, Rule], read_as: str | None
) -> Any:
    """The config that transformers makes of `content`; `text` is the language model's part, and has the rules."""
    where = str(file) if text is content else f"{file}: text_config"
    native = read_as is not None
    if native:  # the tower has rules and a config of its own: `read_tower`
        content = {name: value for name, value in content.items() if name != "vision_config"}
    check_config(text, rules, where)
    for name, part in content.items():
        if name.endswith("_config") and isinstance(part, dict):  # the config of a language model or a vision tower
            check_config(part, size_rules(), f"{file}: {name}")
    try:
        if read_as is not None:
            whole = CONFIG_MAPPING[read_as].from_dict(copy.deepcopy(content) | {"model_type": read_as})
        else:
            whole = AutoConfig.from_pretrained(file.parent, trust_remote_code=False, local_files_only=True)
        config = whole.get_text_config()
        if getattr(config, "rope_parameters", None):
            config.standardize_rope_params()
        for name in _OF_THE_WHOLE if native and config is not whole else ():
            setattr(config, name, getattr(whole, name, None))
        # Without it, reading a value that layers have changed raises an error.
        by_layer = config.to_dict() if getattr(config, "is_heterogeneous", False) else None
        made = {name: getattr(config, name, None) if by_layer is None else by_layer.get(name) for name in rules}
    # It validates little and fails in many ways; any exception is about this file.
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read as a config: {type(error).__name__}: {error!s:.500}") from error
    by_layers = getattr(whole, "is_heterogeneous", False) or getattr(config, "is_heterogeneous", False)
    if native and by_layers and "per_layer_config" not in rules:
        raise UnsupportedVariantError(f"{where}: per_layer_config is not supported natively")
    if not getattr(config, "is_causal", True):
        raise CheckpointError(
            f"{where}: is_causal is not true, but a model that generates must not attend to later tokens"
        )
    # Keys may have other names in the file than in the config, and transformers adds missing keys.
    check_config(made, rules, where)
    return whole


def _text_map(content: dict[str, Any], file: Path, architecture: str) -> dict[str, Any]:
    """The keys of the language model."""
    text = content.get("text_config")
    if text is None and (model_type := flat_model_type(architecture)) is not None:
        return {name: value for name, value in content.items() if name != "vision_config"} | {"model_type": model_type}
    if not isinstance(text, dict):
        raise CheckpointError(f"{file} has no map 'text_config'")
    return text


def _unknown_keys(content: Mapping[str, Any], known: frozenset[str], config: Any) -> tuple[str, ...]:
    """The keys of a language model that are not known; `config` is transformers', which has other names for some."""
    known |= {name for name in OFF_IF_NULL if content.get(name) is None}
    known |= {config.attribute_map.get(name, name) for name in known}
    names = [name for name in content if config.attribute_map.get(name, name) not in known]
    for name in _ROPE_MAPS:
        for key, value in (content.get(name) or {}).items():
            for inner in value if isinstance(value, dict) else (key,):
                if inner not in ROPE_KEYS:
                    names.append(f"{name}.{inner}")
    return tuple(names)


def read_tower(folder: Path, config: CheckpointConfig) -> TowerSpec:
    """The vision tower of a checkpoint; `config` is the result of `read_config`.

    Raises:
        CheckpointError: a value of `vision_config` is out of bounds.
        ValueError: there is no tower that is served, or it does not fit the language model.
    """
    file, family = folder / "config.json", tower_family(config.architecture)
    if family is None:
        raise ValueError(f"{config.architecture} is not served with images: set model.images = false")
    content = read_json(file)
    vision = content.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError(f"{file} has no map 'vision_config'")
    for given, rules, where in ((vision, VISION_RULES, f"{file}: vision_config"), (content, TOKEN_RULES, str(file))):
        for name, rule in rules.items():
            _check(given.get(name), rule, where, name)
    known = {name: vision[name] for name in VISION_RULES if vision.get(name) is not None}
    made = CONFIG_MAPPING[family.model_type](**known)
    values = {name: getattr(made, name) for name in VISION_RULES if hasattr(made, name)}
    for name, value in values.items():
        _check(value, VISION_RULES[name], f"{file}: vision_config", name)
    others = [name for name in vision.keys() - VISION_RULES.keys() - WITHOUT_EFFECT if hasattr(made, name)]
    if changed := sorted(name for name in others if vision[name] != getattr(made, name)):
        raise ValueError(
            f"{file}: vision_config: images need transformers' default of {', '.join(changed)}: set model.images = "
            "false to serve text only"
        )
    ids = {name: getattr(config.whole, name, None) for name in TOKEN_RULES}
    return tower_spec(family, values, ids, config.text)


def read_generation_defaults(folder: Path, config: CheckpointConfig) -> GenerationDefaults:
    """Values of generation_config.json, or of config.json for keys that it lacks."""
    file = folder / "generation_config.json"
    content = read_json(file) if file.exists() else {}

    def value(key: str) -> Any:
        given = (content.get(key), getattr(config.whole, key, None), getattr(config.text, key, None))
        return next((found for found in given if found is not None), None)

    where = str(file if "eos_token_id" in content else folder / "config.json")
    eos_ids = check_token_ids(value("eos_token_id"), config.text.vocab_size, where, "eos_token_id")
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
            raise bad_value(where, name, token, f"token ids from 0 to {vocab - 1}")
    return tuple(sorted(set(ids)))


def _check_rope(value: Any, where: str, name: str) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise bad_value(where, name, value, "a map")
    _check_rope_values(value, where, name)
    for kind, part in value.items():
        if isinstance(part, dict):  # one map for each type of layer
            _check_rope_values(part, where, f"{name}.{kind:.40}")


def _check_rope_values(value: dict[str, Any], where: str, name: str) -> None:
    for key in ("rope_type", "type"):
        if key in value and type(value[key]) is not str:
            raise bad_value(where, f"{name}.{key}", value[key], "a string")
    for key in _ROPE_NUMBERS:
        _check(value.get(key), NUMBER, where, f"{name}.{key}")
    for key in _ROPE_LISTS:
        _check(value.get(key), NUMBERS, where, f"{name}.{key}")
    for key in ("mscale", "mscale_all_dim"):
        _check(value.get(key) or None, NUMBER, where, f"{name}.{key}")  # 0 means none


def _check(value: Any, rule: Rule, where: str, name: str) -> None:
    if value is not None and not rule.allows(value):
        raise bad_value(where, name, value, rule.wanted)
