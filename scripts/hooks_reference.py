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

The hooks of [features of a step](../design/features.md), in the order of a step, and the features that have each. The
docstrings say more."""

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
        lines += ["", f"## {title}", "", f"{len(hooks)} hooks, {module}.", "", "| hook | called | features |"]
        lines.append("|---|---|---|")
        for name, hook in hooks.items():
            kinds = on_device if base is DeviceFeature else on_host
            having = ", ".join(kind.name for kind in kinds if getattr(kind, name) is not hook)
            lines.append(f"| `{name}` | {_when(hook)} | {having} |")
    return "\n".join(lines) + "\n"


def _hooks(base: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods of a base class, in their order."""
    for name, value in vars(base).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            yield name, value


def _when(hook: Callable[..., Any]) -> str:
    """The first sentence of a docstring up to its colon, without `Called`."""
    text = " ".join((inspect.getdoc(hook) or "").split())
    first = text.split(". ")[0].rstrip(".")
    return first.split(": ")[0].removeprefix("Called ")
