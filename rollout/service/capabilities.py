"""The engine and model of a worker as the service reaches them, and its capabilities."""

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from rollout.engine.messages.requests import RoutingShape
from rollout.engine.messages.statuses import EngineStatus, SequenceStatus
from rollout.engine.messages.to_engine import Command
from rollout.engine.messages.to_service import Event
from rollout.models.vision_spec import TowerSpec
from rollout.network.router_socket import PolledQueue
from rollout.service.adapter_loading import AdapterFolders
from rollout.text.codec import TextCodec
from trainer_bridge.wire.request_fields import ENGINE_FIELDS


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the served model."""

    name: str
    vocab_size: int
    max_context_tokens: int
    eos_ids: tuple[int, ...] = ()
    sparse: bool = False  # a mixture of experts
    routing: RoutingShape | None = None  # shape of the expert records; None: not recorded
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


#: The service thread's queue: events of the engine, and functions to call on that thread.
Outbox = PolledQueue[Event | Callable[[], None]]


@dataclass(frozen=True)
class ServedEngine:
    """The engine as the service reaches it. Without `views`, `receiver` or `adapters`, messages about them are refused.

    The engine's loop takes commands from `inbox` and hands events to `outbox.put`. `status` returns the engine's latest
    snapshot; it is called on the service thread.
    """

    inbox: SimpleQueue[Command]
    status: Callable[[], EngineStatus]
    outbox: Outbox = field(default_factory=Outbox)
    views: EngineViews | None = None
    receiver: WeightControl | None = None
    adapters: AdapterFolders | None = None


class WorkerAddress(NamedTuple):
    """The name of a worker, and where its metrics are."""

    name: str = ""
    metrics_url: str | None = None


def default_capabilities(
    engine: ServedEngine, model: ServedModel, text: TextCodec | None, grammars: bool
) -> tuple[str, ...]:
    """The ops, and the fields of `generate` that not every worker offers."""
    offered = ["generate", "cancel", "attach", "ack", "report", "status", "ping", "pause", "resume", "shutdown"]
    if engine.receiver is not None:
        offered += ["weights", "min_version"]
    if engine.views is not None:
        offered += ["trace", "sequences"]
    offered += ["stream", "join_chunks", "continue_from", "detached", "constraint.token_ids"]
    offered += ["session", "end_session", "end_of_session", "fork", "lease_s", "prefetch", "return_prompt_ids"]
    offered += ["cache_salt", "thinking_token_budget", "repetition_detection"]
    offered += [entry.name for entry in ENGINE_FIELDS if entry.flag is None]
    if grammars:
        offered.append("constraint")
    if model.routing is not None:
        offered.append("return_routing")
    if engine.adapters is not None:
        offered += ["adapter", "load_adapter", "unload_adapter"]
    if model.images is not None:
        offered.append("media")
    if model.sleep:
        offered += ["sleep", "wake"]
    if text is not None:
        offered += ["text", "return_text", "stop.strings"]
        if text.has_chat_template:
            offered.append("messages")
    return tuple(offered)
