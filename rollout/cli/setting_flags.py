"""Flags that are made from the declarations of settings.

Their values are text here, and `rollout.settings_sources` parses them like values of the environment.
"""

import argparse
from typing import Any

from rollout.cli.parser import Parser
from rollout.config.section import SettingsSection
from rollout.settings_sources import POSITIONAL, SettingKey, setting_keys


def add_setting_flags(parser: Parser, root: type[SettingsSection]) -> None:
    """Declare `--config`, and a flag for every setting of a program, by group."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    groups: dict[tuple[str | None, str], Any] = {}
    for key in setting_keys(root):
        place = key.section, key.group
        if place not in groups:
            title = f"{key.group} ([{key.section}] in TOML)" if key.section else key.group
            groups[place] = parser.add_argument_group(title)
        _add_flag(groups[place], key)


def given_flags(args: argparse.Namespace, root: type[SettingsSection]) -> dict[str, Any]:
    """The values that the command line has, by `section.name`."""
    given = vars(args)
    return {key.path: given[key.path] for key in setting_keys(root) if key.path in given}


def _add_flag(group: Any, key: SettingKey) -> None:
    description = (key.field.description or "").replace("%", "%%")
    if key.path in POSITIONAL:
        count = "*" if key.listed else "?"
        group.add_argument(key.path, metavar=key.flag, nargs=count, default=argparse.SUPPRESS, help=description)
        return
    options: dict[str, Any] = {
        "dest": key.path,
        "default": argparse.SUPPRESS,
        "help": f"{description} [{key.default}]" if key.default or not key.listed else description,
    }
    if key.switch:
        group.add_argument(key.flag, action=argparse.BooleanOptionalAction, **options)
    elif key.listed:
        group.add_argument(key.flag, metavar="NAME", nargs="+", **options)
    else:
        values = "|".join(map(str, key.choices))
        group.add_argument(key.flag, metavar=values or key.name.rpartition("_")[2].upper(), **options)
