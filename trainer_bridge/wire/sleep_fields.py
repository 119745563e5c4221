"""The fields of a `sleep` message."""

from __future__ import annotations

from typing import Literal


def sleep_fields(
    level: Literal[1, 2], mode: Literal["keep", "abort"] | None, requests: Literal["wait", "refuse"] | None
) -> dict[str, int | str]:
    """Those that are given; what is not, the worker's settings say."""
    fields = {"level": level, "mode": mode, "requests": requests}
    return {name: value for name, value in fields.items() if value is not None}
