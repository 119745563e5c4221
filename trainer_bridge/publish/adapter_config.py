"""PEFT's configuration of an adapter as a plain map that can be sent; PEFT itself is not needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def config_map(config: Any) -> dict[str, Any]:
    """The fields of adapter_config.json, from a map or from an object with `to_dict`, as PEFT's are.

    Raises ValueError for what has no such fields.
    """
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise ValueError(f"adapter_config is a {type(config).__name__}; pass PEFT's LoraConfig, or its fields as a map")
    try:
        return json.loads(json.dumps(dict(fields), default=_plain))
    except (TypeError, ValueError) as error:
        raise ValueError(f"adapter_config cannot be sent: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} in it is no plain value")
