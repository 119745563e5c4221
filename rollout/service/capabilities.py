"""The capabilities of a worker, which `status.capabilities` lists, and facts about its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.engine.messages.requests import RoutingShape
from rollout.engine.messages.statuses import SequenceStatus
from rollout.models.vision_spec import TowerSpec
from rollout.service.text.codec import TextCodec
from trainer_bridge.wire.prompt_tops import SCORE_FIELDS, SCORED_TOKENS_FIELD


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the served model."""

    name: str
    vocab_size: int
    max_context_tokens: int
    eos_ids: tuple[int, ...] = ()
    sparse: bool = False  # a mixture of experts
    routing: RoutingShape | None = None  # shape of the expert records; None: not recorded
    adapters: bool = False  # requests may name adapters
    sleep: bool = False  # sleep and wake are offered
    min_version: int = 0  # no completion begins under an older version
    images: TowerSpec | None = None  # the vision tower; None: requests have no images
    image_patches: int = 0  # most patches of an image
    dtype: str = ""


class WeightControl(Protocol):
    """The weight receiver, as the service uses it."""

    endpoint: str

    def control(self, header: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
        """Take a `weights` message. `reply` may be called later, from any thread."""

    def summary(self) -> dict[str, Any]:
        """The way updates apply, and the last update: `status.weights` without the version."""


class EngineViews(Protocol):
    """Views of the running engine for the service thread. They never wait for the loop."""

    def sequences(self, limit: int) -> list[SequenceStatus]:
        """The `limit` oldest sequences that hold a row, oldest first."""

    def recording(self, steps: int) -> dict[str, Any]:
        """The last steps, as fields of a `trace` reply."""


def default_capabilities(
    text: TextCodec | None,
    receiver: WeightControl | None,
    views: EngineViews | None = None,
    grammars: bool = False,
    routing: bool = False,
    adapters: bool = False,
    sleep: bool = False,
    images: bool = False,
) -> tuple[str, ...]:
    """The ops, and the fields of `generate` that not every worker offers."""
    offered = ["generate", "cancel", "attach", "ack", "report", "status", "ping", "pause", "resume", "shutdown"]
    if receiver is not None:
        offered += ["weights", "min_version"]
    if views is not None:
        offered += ["trace", "sequences"]
    offered += ["stream", "join_chunks", "continue_from", "priority", "deadline_s", "detached", "constraint.token_ids"]
    offered += ["min_complete", "max_version_span", "max_kv_age", "session", "end_session", "end_of_session", "fork"]
    offered += ["lease_s", "prefetch"]
    offered += ["logprobs", *SCORE_FIELDS, SCORED_TOKENS_FIELD, "return_prompt_ids", "cache_salt"]
    offered += ["thinking_token_budget", "repetition_detection"]
    if grammars:
        offered.append("constraint")
    if routing:
        offered.append("return_routing")
    if adapters:
        offered += ["adapter", "load_adapter", "unload_adapter"]
    if images:
        offered.append("media")
    if sleep:
        offered += ["sleep", "wake"]
    if text is not None:
        offered += ["text", "return_text", "stop.strings"]
        if text.has_chat_template:
            offered.append("messages")
    return tuple(offered)
