"""The reference page of the hooks of features, made from their base classes and the list of features."""

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import rollout.engine
from rollout.engine.features.all import KINDS
from rollout.engine.kv.tier import PageMirror
from rollout.engine.schedule.command_feature import CommandFeature
from rollout.engine.schedule.step_feature import AheadPlanner, RequestFeature, StepFeature, VariantFeature
from rollout.engine.step.device_feature import AheadFeature, DeviceFeature, LogitsFeature, OutputFeature
from scripts.tables import table

_INTRODUCTION = """\
# Hooks of features

For engineers who change a [feature of a step](../design/features.md): each hook, in the order of a step, with the class
whose docstring says when it is called, and the features that have it.
"""
_TRACE = """
## One feature in a step

Scores, in the order of the calls (modules below `rollout/engine`):
"""

_BASES: tuple[type, ...] = (
    *(StepFeature, RequestFeature, VariantFeature, AheadPlanner, CommandFeature, PageMirror),
    *(DeviceFeature, LogitsFeature, AheadFeature, OutputFeature),
)


def hooks_page() -> str:
    """The text of the page."""
    on_device = KINDS
    on_host = [get_type_hints(kind.host_part)["return"] for kind in on_device]
    rows = []
    for base in _BASES:
        kinds = on_device if issubclass(base, DeviceFeature) else on_host
        for name, hook in _hooks(base):
            having = ", ".join(
                kind.name for kind in kinds if issubclass(kind, base) and getattr(kind, name) is not hook
            )
            rows.append((f"`{name}`", f"`{base.__name__}`", having))
    lines = [_INTRODUCTION, *table(("hook", "class", "features"), rows), _TRACE]
    return "\n".join([*lines, trace_table("scores")]) + "\n"


#: The hooks on the device that are called before a step exists, and the hooks on the host before it runs.
_AT_START = ("host_part", "output_words", "output", "put_largest")
_PLANNED = ("enter", "edition", "ready", "admitted", "fit", "pack")


def trace_table(name: str) -> str:
    """The hooks of one feature in the order in which a step meets them, with their callers: the table of a page."""
    device = next(kind for kind in KINDS if kind.name == name)
    host = get_type_hints(device.host_part)["return"]
    on_device = [hook for base in _BASES if issubclass(base, DeviceFeature) for hook, _ in _hooks(base)]
    of_step, of_requests = ([hook for hook, _ in _hooks(base)] for base in (StepFeature, RequestFeature))
    committed = of_step.index("commit") + 1
    on_host = [*of_step[:committed], *of_requests, *of_step[committed:]]
    order = [(device, hook) for hook in on_device if hook in _AT_START]
    order += [(host, hook) for hook in _PLANNED]
    order += [(device, hook) for hook in on_device if hook not in _AT_START]
    order += [(host, hook) for hook in on_host if hook not in _PLANNED]
    rows = []
    for kind, hook in order:
        if hook in vars(kind):
            places = ", ".join(f"`{place}`" for place in _callers(hook))
            rows.append((places, f"`{hook}`", _first_sentence(vars(kind)[hook])))
    return "\n".join(table(("called in", "hook", "what it does"), rows))


def _callers(hook: str) -> list[str]:
    """The modules of the core that call this hook of features, below `rollout/engine`."""
    return [place for place, called in _calls_of_features().items() if hook in called]


@functools.cache
def _calls_of_features() -> dict[str, set[str]]:
    """The methods that each module of the core calls of a feature, by its path below `rollout/engine`."""
    (root,) = map(Path, rollout.engine.__path__)
    places = {module.relative_to(root): module for module in sorted(root.rglob("*.py"))}
    core = {place: module for place, module in places.items() if place.parts[0] != "features"}
    return {str(place): _called_of_features(module.read_text()) for place, module in core.items()}


def _called_of_features(source: str) -> set[str]:
    """The methods that a module calls of a variable `feature`."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    methods = (call for call in calls if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name))
    return {method.attr for method in methods if method.value.id == "feature"}  # type: ignore[attr-defined]


def _first_sentence(hook: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(hook) or "").split()).split(". ")[0].rstrip(".")


def _hooks(base: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods of a base class, in their order."""
    for name, value in vars(base).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            yield name, value
