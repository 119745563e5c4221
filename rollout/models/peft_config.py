"""adapter_config.json as PEFT writes it: the supported fields, and an error with the field for everything else.

The file is untrusted. A field that may change the results of the adapter and is not known here must be empty. So an
adapter is either served as PEFT runs it or not at all.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.checkpoint_folder import bad_value

#: Fields that do not change the results once the tensors are there.
_IGNORED = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "eva_config", "qalora_group_size", "loftq_config", "ensure_weight_tying"),
    )
)
_USED = frozenset(
    ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights")
)
#: Initialisations that leave the base model as it is.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_MOST_PATTERNS = 1 << 11  # each is compared with each module
_MOST_NUMBER = 1e6
_PATTERN = re.compile(r"[A-Za-z0-9_.]{1,300}")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Rank and scaling of an adapter's modules."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]  # ranks by the end of a module's name
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank of a module, `model.layers.0.self_attn.q_proj` for instance."""
        return int(_for_module(self.ranks, module, self.rank))

    def scaling(self, module: str) -> float:
        """The factor of the module's correction."""
        rank, alpha = self.rank_of(module), _for_module(self.alphas, module, self.alpha)
        return alpha / (rank**0.5 if self.rslora else rank)


def read_peft_config(content: Mapping[str, Any], where: str) -> PeftConfig:
    """The config from its JSON. Raises CheckpointError with the field that is not supported or of the wrong type."""
    if content.get("peft_type") != "LORA":
        raise bad_value(where, "peft_type", content.get("peft_type"), "LORA: other adapters are not supported")
    if content.get("bias", "none") != "none":
        raise bad_value(where, "bias", content["bias"], "none: biases of adapters are not supported")
    init = content.get("init_lora_weights")
    if not any(init is plain or (type(plain) is str and init == plain) for plain in _PLAIN_INITS):
        wanted = "true, false, gaussian, eva or orthogonal: others change the base model; convert it with PEFT first"
        raise bad_value(where, "init_lora_weights", init, wanted)
    for name, value in content.items():
        if name not in _IGNORED | _USED and value not in (None, False, [], {}, ""):
            raise bad_value(where, f"{name!s:.100}", value, "left out: it is not supported")
    rslora = content.get("use_rslora", False)
    if type(rslora) is not bool:
        raise bad_value(where, "use_rslora", rslora, "true or false")
    return PeftConfig(
        _rank(content.get("r"), where, "r"),
        _alpha(content.get("lora_alpha"), where, "lora_alpha"),
        rslora,
        {key: _rank(value, where, f"rank_pattern.{key}") for key, value in _patterns(content, where, "rank_pattern")},
        {
            key: _alpha(value, where, f"alpha_pattern.{key}")
            for key, value in _patterns(content, where, "alpha_pattern")
        },
    )


def _patterns(content: Mapping[str, Any], where: str, name: str) -> list[tuple[str, Any]]:
    value = content.get(name) or {}
    if not isinstance(value, dict) or len(value) > _MOST_PATTERNS:
        raise bad_value(where, name, value, f"a map of at most {_MOST_PATTERNS} module names")
    for key in value:
        # PEFT takes regular expressions here; an untrusted one can run for ever.
        if type(key) is not str or _PATTERN.fullmatch(key) is None:
            raise bad_value(where, name, key, "names of modules; regular expressions are not supported")
    return list(value.items())


def _for_module(values: Mapping[str, float], module: str, otherwise: float) -> float:
    return next((value for key, value in values.items() if _matches(key, module)), otherwise)


def _matches(key: str, module: str) -> bool:
    """True if a module's name ends with `key`, by whole words; a dot is any character, as in PEFT's expressions."""
    start = len(module) - len(key)
    whole = start == 0 or (start > 0 and module[start - 1] == ".")
    return whole and all(wanted in (".", got) for wanted, got in zip(key, module[start:], strict=True))


def _rank(value: Any, where: str, name: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_NUMBER:
        raise bad_value(where, name, value, "an integer of at least 1")
    return value


def _alpha(value: Any, where: str, name: str) -> float:
    if type(value) not in (int, float) or not -_MOST_NUMBER <= value <= _MOST_NUMBER:  # false for NaN, too
        raise bad_value(where, name, value, f"a number of at most {_MOST_NUMBER:g}")
    return float(value)
