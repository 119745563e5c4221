"""The reference page of the hooks of features, made from their base classes and the list of features."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

from rollout.engine.features.all import FEATURES
from rollout.engine.kv.page_mirror import PageMirror
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.step.device_feature import DeviceFeature

_INTRODUCTION = """\
# Hooks of features

For engineers who change a [feature of a step](../design/features.md): each hook, in the order of a step, with the
features that have it. Its docstring says when it is called."""

_SECTIONS: tuple[tuple[str, type], ...] = (
    ("On the host", StepFeature),
    ("On the host, for KV that moves", PageMirror),
    ("On the device", DeviceFeature),
)


def hooks_page() -> str:
    """The text of the page."""
    on_device = [make.__self__ for make in FEATURES]  # type: ignore[attr-defined]
    on_host = [get_type_hints(kind.host_part)["return"] for kind in on_device]
    lines = [_INTRODUCTION]
    for title, base in _SECTIONS:
        hooks = dict(_hooks(base))
        module = f"`{base.__module__.replace('.', '/')}.py`"
        lines += ["", f"## {title}", "", f"{len(hooks)} hooks, {module}:", ""]
        for name, hook in hooks.items():
            kinds = on_device if base is DeviceFeature else on_host
            having = ", ".join(kind.name for kind in kinds if getattr(kind, name) is not hook)
            lines.append(f"- `{name}`: {having}")
    return "\n".join(lines) + "\n"


def _hooks(base: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods of a base class, in their order."""
    for name, value in vars(base).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            yield name, value
