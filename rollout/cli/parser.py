"""An argument parser whose errors are one line and suggest a flag for a misspelled one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class UsageError(ValueError):
    """The command line is wrong. The message is one line."""


class CommandError(Exception):
    """A command failed for a reason that its user can act on. The message is one line."""


class Parser(argparse.ArgumentParser):
    """`argparse`, without abbreviated flags; raises `UsageError` instead of printing usage and exiting.

    `synonyms` maps flags of other programs to a sentence that names ours.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.synonyms: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `argparse`, but an unknown argument is an error that suggests a flag of this command."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unknown argument {rest[0]}{self._suggestion(rest[0])}")
        return parsed, rest

    def _suggestion(self, argument: str) -> str:
        known: Sequence[str] = list(self._option_string_actions)
        flag = argument.split("=")[0]
        if flag in self.synonyms:
            return f"; {self.synonyms[flag]}"
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
        return f"; did you mean {near[0]}?" if near else ""
