"""The sources of settings: a TOML file, then `ROLLOUT_*` environment variables, then flags; the later one wins.

A worker reads the tables of `rollout.config.Settings`, a gateway the table `[gateway]`. Both programs may share a file
and an environment: each passes over the names of the other.

Invariants:

- A name that is not declared in `rollout.config` is an error in every source. For a name that was a setting once, the
  error says what holds now.
- Every error names its source and what is allowed.
- Values of a TOML file keep their TOML type: `"64"` is not a number there. Values of the environment and of the command
  line are text; `none` leaves an optional setting out, and commas separate the items of a list.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rollout.config import Settings
from rollout.config.gateway_settings import GatewayFile
from rollout.config.retired import RETIRED
from rollout.config.section import SettingsSection
from trainer_bridge.wire.near_names import near_name

ENV_PREFIX = "ROLLOUT_"
#: The settings that a command line takes as positional arguments, and their names there.
POSITIONAL = {"model.path": "MODEL", "gateway.endpoints": "ENDPOINT"}
#: The declarations of the two programs.
ROOTS: tuple[type[SettingsSection], ...] = (Settings, GatewayFile)
Root = TypeVar("Root", bound=SettingsSection)
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
#: A word that may be the name of a setting, with or without its section; and whether a value is given to it.
_NAME = re.compile(r"(?<![\w./-])([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)?)(?![\w/-])( = )?")


class SettingsError(ValueError):
    """A setting that is unknown, of the wrong type or out of range. The message is one line and names the source."""


class SettingsConflictError(SettingsError):
    """Settings that do not go together; they may come from different sources."""


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One setting: its declaration, and its name in each source."""

    section: str | None  # None: outside of the sections
    group: str  # the title of its group of settings
    name: str
    flag: str  # "--max-rows", or "MODEL" for the positional argument
    field: FieldInfo

    @property
    def path(self) -> str:
        """`section.name`, as in TOML."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return ENV_PREFIX + (f"{self.section}__{self.name}" if self.section else self.name).upper()

    @property
    def optional(self) -> bool:
        """True if the setting may be absent."""
        return type(None) in get_args(self.field.annotation)

    @property
    def switch(self) -> bool:
        """True if the setting is true or false."""
        return self.field.annotation is bool or bool in get_args(self.field.annotation)

    @property
    def listed(self) -> bool:
        """True if the setting is a list of texts."""
        return get_origin(self.field.annotation) is tuple

    @property
    def choices(self) -> tuple[object, ...]:
        """The allowed values, if they are a fixed list."""
        return get_args(self.field.annotation) if get_origin(self.field.annotation) is Literal else ()

    @property
    def default(self) -> str:
        """The default as text; empty for an empty text or list."""
        value = self.field.default
        return "none" if value is None else "" if value == () else str(value).lower()


@cache
def setting_keys(root: type[SettingsSection] = Settings) -> tuple[SettingKey, ...]:
    """All settings of a program, by group. A flag is the name, with the section in front if the name is taken."""
    keys: list[SettingKey] = []
    taken = {"--config", "--help", "--version"}
    for section, group, name, field in _declared(root):
        flag = "--" + name.replace("_", "-")
        if f"{section}.{name}" in POSITIONAL:
            flag = POSITIONAL[f"{section}.{name}"]
        elif flag in taken:
            flag = f"--{section}-{name}".replace("_", "-")
        assert flag not in taken, f"two settings share the flag {flag}"
        taken.add(flag)
        keys.append(SettingKey(section, group, name, flag, field))
    return tuple(keys)


def _declared(root: type[SettingsSection]) -> Iterable[tuple[str | None, str, str, FieldInfo]]:
    """Section, group, name and declaration of every setting. The groups of a section are its bases."""
    for name, field in root.model_fields.items():
        section = field.annotation
        if not _is_section(section):
            yield None, "The worker's process", name, field
            continue
        groups = [
            base for base in section.__bases__ if issubclass(base, SettingsSection) and base is not SettingsSection
        ] or [section]
        for group in groups:
            title = (group.__doc__ or "").partition("\n")[0].rstrip(".")
            yield from ((name, title, *each) for each in group.model_fields.items())


def _is_section(annotation: Any) -> TypeGuard[type[SettingsSection]]:
    return isinstance(annotation, type) and issubclass(annotation, SettingsSection)


def sections(root: type[SettingsSection] = Settings) -> tuple[str, ...]:
    """Names of the sections of a program, in the order of declaration."""
    return tuple(dict.fromkeys(key.section for key in setting_keys(root) if key.section))


def hint(name: str, allowed: Iterable[str]) -> str:
    """The end of an error message: `; did you mean X?` if an allowed name is similar, then all allowed names."""
    names = list(allowed)
    near = near_name(name, names)
    return (f"; did you mean {near}?" if near else ";") + f" allowed: {', '.join(names)}"


def flags_hint(text: str, given: Mapping[str, object] = MappingProxyType({})) -> str:
    """The end of an error message: the flags of the settings that it names; empty if it names none, or has the flags.

    A setting is named by its section and name (`service.bind`), by a name with `_` in it, or by a name with ` = ` after
    it. Those that the command line gave (`given`: values by `section.name`) are also named by their name alone, and by
    a value that is a path or an address.
    """
    by_path = {key.path: key for key in setting_keys() if key.path not in POSITIONAL}
    names = [key.name for key in by_path.values()]
    by_name = {key.name: key for key in by_path.values() if names.count(key.name) == 1}
    flags: dict[str, None] = {}
    for word, is_set in _NAME.findall(text):
        key = by_path.get(word)
        if key is None and (named := by_name.get(word)) and ("_" in word or is_set or named.path in given):
            key = named
        if key is not None:
            flags[key.flag] = None
    values = {path: value for path, value in given.items() if path in by_path and isinstance(value, str)}
    flags |= {by_path[path].flag: None for path, value in values.items() if "/" in value and value in text}
    unnamed = [flag for flag in flags if flag not in _FLAG.findall(text)]
    return f" ({'flag' if len(unnamed) == 1 else 'flags'}: {', '.join(unnamed)})" if unnamed else ""


def load_settings(config_file: str | Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> Settings:
    """Settings of one worker from all their sources.

    Args:
        config_file: TOML file, or None.
        environ: the environment; only names that begin with `ROLLOUT_` are read.
        flags: values by `section.key`, or `key` outside of sections: text, or a value of the setting's type.

    Raises:
        SettingsError: the file cannot be read, a name is unknown, or a value has the wrong type or is out of range,
            even if a later source replaces it.
    """
    return load_program(Settings, config_file, environ, flags)


def load_program(
    root: type[Root], config_file: str | Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> Root:
    """Like `load_settings`, for the program that `root` declares."""
    values: dict[str, Any] = {}
    if config_file is not None:
        values |= _from_file(root, Path(config_file))
    values |= _from_environ(root, environ)
    values |= _from_flags(root, flags)
    nested: dict[str, Any] = {section: {} for section in sections(root)}
    for key in setting_keys(root):
        if key.path in values:
            (nested[key.section] if key.section else nested)[key.name] = values[key.path]
    try:
        return root.model_validate(nested)
    except ValidationError as error:  # a rule about several settings
        raise SettingsConflictError(f"settings: {_reason(error)}") from error


def retired(name: str) -> str | None:
    """The error about a name that was a setting once, or None. `name` is written as in TOML."""
    fact = RETIRED.get(name)
    return None if fact is None else f"{name} is not a setting any more: {fact}; remove it"


def retired_flags() -> dict[str, str]:
    """Flag -> the error about a setting that it set once."""
    return {f"--{name.partition('.')[2].replace('_', '-')}": str(retired(name)) for name in RETIRED}


def _others(root: type[SettingsSection]) -> list[SettingKey]:
    return [key for other in ROOTS if other is not root for key in setting_keys(other)]


def _from_file(root: type[SettingsSection], path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error
    by_path = {key.path: key for key in setting_keys(root)}
    outer = [*sections(root), *(key.name for key in by_path.values() if key.section is None)]
    passed = {key.section or key.name for key in _others(root)} - set(outer)
    found: dict[str, Any] = {}
    for name, value in document.items():
        if name in passed:
            continue
        if name not in outer:
            raise SettingsError(f"{path}: unknown section or setting {name}{hint(name, outer)}")
        if name not in sections(root):
            found[name] = _typed(by_path[name], value, str(path))
            continue
        if not isinstance(value, dict):
            raise SettingsError(f"{path}: {name} is a section; write its settings under [{name}]")
        allowed = [key.name for key in by_path.values() if key.section == name]
        for inner, inner_value in value.items():
            if inner not in allowed:
                if gone := retired(f"{name}.{inner}"):
                    raise SettingsError(f"{path}: {gone}")
                raise SettingsError(f"{path}: unknown setting {name}.{inner}{hint(inner, allowed)}")
            found[f"{name}.{inner}"] = _typed(by_path[f"{name}.{inner}"], inner_value, str(path))
    return found


def _from_environ(root: type[SettingsSection], environ: Mapping[str, str]) -> dict[str, Any]:
    by_env = {key.env: key for key in setting_keys(root)}
    passed = {key.env for key in _others(root)}
    found: dict[str, Any] = {}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in passed:
            continue
        source = f"environment variable {name}"
        if name not in by_env:
            if gone := retired(name.removeprefix(ENV_PREFIX).lower().replace("__", ".")):
                raise SettingsError(f"{source}: {gone}")
            raise SettingsError(f"{source}: unknown setting{hint(name, by_env)}")
        found[by_env[name].path] = _from_text(by_env[name], environ[name], source)
    return found


def _from_flags(root: type[SettingsSection], flags: Mapping[str, object]) -> dict[str, Any]:
    by_path = {key.path: key for key in setting_keys(root)}
    found: dict[str, Any] = {}
    for path, value in flags.items():
        if path not in by_path:
            if gone := retired(path):
                raise SettingsError(f"flags: {gone}")
            raise SettingsError(f"flags: unknown setting {path}{hint(path, by_path)}")
        key = by_path[path]
        found[path] = (_from_text if isinstance(value, str) else _typed)(key, value, f"flag {key.flag}")
    return found


def _from_text(key: SettingKey, text: Any, source: str) -> Any:
    if key.optional and text.lower() == "none":
        return None
    if key.listed:
        return _typed(key, [part.strip() for part in text.split(",") if part.strip()], source)
    if key.choices:
        return _typed(key, {str(choice): choice for choice in key.choices}.get(text, text), source)
    try:
        value = _adapter(key).validate_strings(text)
    except ValidationError as error:
        raise _bad_value(key, text, source, _reason(error)) from error
    return _finite(key, value, source)


def _typed(key: SettingKey, value: Any, source: str) -> Any:
    if key.listed and isinstance(value, list):
        value = tuple(value)
    if key.choices and not any(type(value) is type(choice) and value == choice for choice in key.choices):
        raise _bad_value(key, value, source, "must be one of " + ", ".join(map(str, key.choices)))
    try:
        return _finite(key, _adapter(key).validate_python(value, strict=True), source)
    except ValidationError as error:
        raise _bad_value(key, value, source, _reason(error)) from error


def _finite(key: SettingKey, value: Any, source: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise _bad_value(key, value, source, "must be a finite number")
    return value


def _adapter(key: SettingKey) -> TypeAdapter[Any]:
    constrained: Any = Annotated[key.field.annotation, key.field]
    return TypeAdapter(constrained)


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].replace("Input should", "should")
    if first["type"] == "value_error":  # a rule about several settings of a section
        place, reason = f"{place}:" if place else "", reason.removeprefix("Value error, ")
    return f"{place} {reason}" if place else reason


def _bad_value(key: SettingKey, value: object, source: str, reason: str) -> SettingsError:
    return SettingsError(f"{source}: {key.path} = {value!r}: {reason} ({key.field.description})")
