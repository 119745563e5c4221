"""What a worker can do, beyond what is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rollout.service.text import TextCodec


class WeightControl(Protocol):
    """The worker's side of the weight bridge, as far as the service knows it."""

    endpoint: str

    def control(self, header: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
        """Take a `weights` message. `reply` may be called later, from any thread."""


def default_capabilities(text: TextCodec | None, receiver: WeightControl | None) -> tuple[str, ...]:
    """What `status.capabilities` lists: the ops, and what of `generate` is not a matter of course."""
    offered = ["generate", "cancel", "attach", "ack", "status", "ping", "pause", "resume", "shutdown"]
    if receiver is not None:
        offered.append("weights")
    offered += ["stream", "continue_from", "priority", "deadline_s", "detached"]
    if text is not None:
        offered += ["text", "return_text", "stop.strings"]
        if text.has_chat_template:
            offered.append("messages")
    return tuple(offered)
