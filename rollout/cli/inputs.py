"""Arguments that a user gives as text, as a file or on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rollout.cli.parser import UsageError


class Inputs:
    """Reads the values of a command's flags. Only one of them may be `-`, which is stdin."""

    def __init__(self) -> None:
        self._stdin_flag: str | None = None

    def text(self, flag: str, value: str) -> str:
        """The value itself, or the text of stdin."""
        return self._stdin(flag) if value == "-" else value

    def file(self, flag: str, value: str, advice: str = "") -> str:
        """The text of the file with this name, or of stdin. `advice` ends the error about a file."""
        if value == "-":
            return self._stdin(flag)
        try:
            return Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"cannot read {flag} {value}: {reason}{advice}") from error

    def json(self, flag: str, value: str, example: str) -> Any:
        """The JSON value of a text that begins with a brace or a bracket, of stdin, or of a file.

        Raises `UsageError`, which shows the `example`.
        """
        is_text = value.lstrip()[:1] in ("{", "[")
        source = value if is_text else self.file(flag, value, f"; give a file, or JSON such as '{example}'")
        try:
            return json.loads(source)
        except ValueError as error:
            place = "" if is_text else f" {value}"
            raise UsageError(f"{flag}{place} is not JSON: {error}; write it as in '{example}'") from error

    def _stdin(self, flag: str) -> str:
        if self._stdin_flag is not None:
            raise UsageError(f"{self._stdin_flag} and {flag} cannot both read stdin: give one of them a file or a text")
        self._stdin_flag = flag
        return sys.stdin.read()
