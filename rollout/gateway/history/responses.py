"""Responses that are kept for `previous_response_id`, and to be read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent.

    `messages`: the conversation up to its answer as chat messages, without instructions. `trajectory`: where its tokens
    are kept. `size`: bytes of memory, with all messages, although it shares those of the response before: that may be
    forgotten first.
    """

    shown: dict[str, Any]
    messages: list[dict[str, Any]]
    trajectory: str
    size: int
