"""An argument parser whose errors are one line and correct misspelled flags."""

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn

from trainer_bridge.wire.near_names import near_name


class UsageError(ValueError):
    """The command line is wrong. The message is one line."""


class CommandError(Exception):
    """A command failed for a reason that its user can act on. The message is one line."""


class Parser(argparse.ArgumentParser):
    """`argparse`, without abbreviated flags; raises `UsageError` instead of printing usage and exiting.

    `synonyms` maps flags of other programs to a sentence that names ours. `stray` is the sentence for a
    further argument without a flag.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.synonyms: Mapping[str, str] = {}
        self.stray = ""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like `argparse`, but an unknown argument is an error that suggests a flag of this command."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unknown argument {rest[0]}{self._suggestion(rest[0])}")
        return parsed, rest

    def _suggestion(self, argument: str) -> str:
        flag = argument.split("=")[0]
        if flag in self.synonyms:
            return f"; {self.synonyms[flag]}"
        if not flag.startswith("-"):
            return f"; {self.stray}" if self.stray else ""
        # Without the dashes, which would make any two flags similar.
        known = {known.lstrip("-"): known for known in self._option_string_actions}
        near = near_name(flag.lstrip("-"), known)
        return f"; did you mean {known[near]}?" if near else ""
