"""One request in flight, as the service keeps it."""

from dataclasses import dataclass, field

from rollout.engine.messages.requests import Request, RequestKey
from rollout.service.delivery.completion import CompletionDelivery
from rollout.service.delivery.waiters import Waiter
from rollout.service.requests.schema import GenerateMessage


@dataclass(slots=True, eq=False)
class InFlight:
    """One request, from its message to its last event."""

    key: RequestKey
    name: tuple[str, str]  # (client, id)
    message: GenerateMessage
    content: bytes
    arrived_s: float
    waiters: list[Waiter]
    size: int  # rough size, bytes: the message and a constant for each completion
    frames: list[bytes]  # frames of its message; kept until the prompt is prepared
    request: Request | None = None  # None while its prompt is prepared
    cancelled: bool = False
    reclaimed: bool = False  # the client is gone
    flushed: RequestKey | None = None  # the source in flight that was asked for its tokens
    completions: list[CompletionDelivery] = field(default_factory=list)
