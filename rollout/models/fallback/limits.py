"""The limits that a config names, such as windows, and a small model in which the tokens of a check pass them.

A check's few tokens show nothing of a window of 4,096 tokens, or of an indexer that chooses 2,048 positions. So such a
model is checked once more with small limits: a module of the same class with the first layers, at least one of each
kind, a part of the vocabulary and narrow feed-forward blocks. Its weights are parts of the model's own, in float32 on
the CPU. In float32 no rounding changes an indexer's choice, so any difference is a fault.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rollout.models.fallback.build_module import make_module
from rollout.process.host_memory import available_bytes

#: Limits in the small model: the tokens of a check pass them, also where they count blocks of as many tokens.
SMALL = 4
_LIMIT_KEYS = re.compile("window|chunk|block|top_?k|budget|local|compress|stride|span")
#: Keys that would make a small model large, and their values there.
_VOCAB_KEYS, _VOCAB = re.compile("vocab_size"), 256
_WIDTH_KEYS, _WIDTH = re.compile("intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff"), 32
_CPU = torch.device("cpu")
#: Host memory that must be there, relative to the parameters in float32.
_ROOM = 1.25


class NoRoomError(Exception):
    """Host memory has no room for the small model."""


def has_limits(config: Any) -> bool:
    """Whether a config names limits above `SMALL`."""
    return bool(_changed(config.get_text_config(), _small))


def with_small_limits(module: Any) -> Any | None:
    """The small model of a module; None if what the config names are sizes of weights, not limits.

    Raises NoRoomError.
    """
    config = copy.deepcopy(module.config)
    text = config.get_text_config()
    _cut_layers(text, module)
    for name, value in _changed(text, _cut).items():
        _try(module, config, name, value)
    shapes = _shapes(module, config)
    if not [name for name, value in _changed(text, _small).items() if _try(module, config, name, value, shapes)]:
        return None
    needed = _ROOM * torch.float32.itemsize * sum(shape.numel() for shape in shapes.values())
    if needed > (available := available_bytes()):
        raise NoRoomError(
            f"it takes {needed / 2**30:.1f} GiB of host memory, and {available / 2**30:.1f} GiB are available"
        )
    small = make_module(type(module), config, torch.float32, _CPU)
    weights = module.state_dict()
    with torch.no_grad():
        for name, tensor in small.state_dict().items():
            tensor.copy_(weights[name][tuple(map(slice, tensor.shape))])
    return small


def _cut_layers(text: Any, module: Any) -> None:
    """Leave the first layers, at least one of each kind, in the config of a language model."""
    count = text.num_hidden_layers
    lists = (child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child) == count)
    if (layers := next(lists, None)) is None:
        return
    by_layer = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == count}
    first: dict[Any, int] = {}
    for index, layer in enumerate(layers):
        classes = tuple((path, type(part).__name__) for path, part in layer.named_modules())
        shapes = tuple(parameter.shape for parameter in layer.parameters())
        first.setdefault((classes, shapes, str([value[index] for value in by_layer.values()])), index)
    kept = max(first.values()) + 1
    text.num_hidden_layers = kept
    for name, value in by_layer.items():
        setattr(text, name, value[:kept])


def _changed(text: Any, change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The values of a config that a function changes, changed."""
    values = {name: (value, change(name, value)) for name, value in vars(text).items()}
    return {name: new for name, (value, new) in values.items() if new != value}


def _cut(name: str, value: Any) -> Any:
    if type(value) is not int:
        return value
    if name.endswith("token_id"):
        return value if value < _VOCAB else 0
    sizes = [size for pattern, size in ((_VOCAB_KEYS, _VOCAB), (_WIDTH_KEYS, _WIDTH)) if pattern.search(name)]
    return min([value, *sizes])


def _small(name: str, value: Any) -> Any:
    return _smaller(value) if _LIMIT_KEYS.search(name) else value


def _smaller(value: Any) -> Any:
    if type(value) is int:
        return min(value, SMALL)
    if isinstance(value, dict):
        return {key: _smaller(inner) for key, inner in value.items()}
    return [_smaller(inner) for inner in value] if isinstance(value, list) else value


def _try(module: Any, config: Any, name: str, value: Any, shapes: dict[str, torch.Size] | None = None) -> bool:
    """Set a value of a config, unless no module can be made with it, or its tensors have other shapes."""
    text = config.get_text_config()
    before = vars(text)[name]
    setattr(text, name, value)
    try:
        made = _shapes(module, config)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):  # transformers' code
        made = None
    if made is None or (shapes is not None and made != shapes):
        setattr(text, name, before)
        return False
    return True


def _shapes(module: Any, config: Any) -> dict[str, torch.Size]:
    outline = make_module(type(module), config, torch.float32, torch.device("meta"))
    return {name: tensor.shape for name, tensor in outline.state_dict().items()}
