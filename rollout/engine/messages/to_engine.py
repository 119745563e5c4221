"""Commands: from the service to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import FLAGS, Request, RequestKey

if TYPE_CHECKING:
    from rollout.models.lora_slots import AdapterWeights


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request. Answered by deltas and `RequestDone`, or by `Rejected`."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request's sequences with their present tokens. An unknown key is ignored: the request has ended."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Flush:
    """Send the present tokens of a request as early deltas. Answered by `Flushed(asker)`.

    An unknown key has no tokens: the request has ended.
    """

    key: RequestKey
    asker: RequestKey


@dataclass(frozen=True, slots=True)
class StopAt:
    """The service found a stop string: end this completion, whose text is complete after `tokens` tokens.

    The engine ends it at its present length; the service cuts it to `tokens`.
    """

    key: RequestKey
    index: int
    tokens: int
    string: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Launch nothing until `Resume`. `abort` also ends every request as cancelled. Answered by `Done(token)`."""

    mode: Literal["keep", "abort"]
    token: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Launch again. Answered by `Done(token)`."""

    token: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """`drain`: admit nothing more, finish, stop. `now`: cancel every request, stop. Answered by `Done(token)`."""

    mode: Literal["drain", "now"]
    token: int | None = None


@dataclass(frozen=True, slots=True)
class EndSession:
    """Free the KV of a session, or without a `name` of all sessions of a client. Answered by `Done(token)`, if given.

    An unknown session has no KV. A running turn goes on and keeps no KV.
    """

    client: str
    name: str | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The KV of a prompt is needed soon: bring its known beginning from the host to the device.

    The answer is `Failed`, or `Done(token)` with the number of `tokens` whose KV is in the pool or on its way.
    """

    prompt: Prompt  # images have no pixels here
    adapter: str | None
    token: int


class FeatureCommand:
    """A command of a feature of steps. Answered by `Done(token)` or `Failed`, if there is a token."""

    __slots__ = ()
    feature: ClassVar[str]  # its name
    flag: ClassVar[str]  # starts a worker with it
    token: int | None


class AdapterCommand(FeatureCommand):
    """A command about the adapter `name`."""

    __slots__ = ()
    feature: ClassVar[str] = "adapters"
    flag: ClassVar[str] = FLAGS["adapters"]


@dataclass(frozen=True, slots=True)
class PutAdapter(AdapterCommand):
    """Load an adapter, or a newer version of one. Running rows go on with the new version.

    Without a `version` it is the last version plus 1, or 0.
    """

    name: str
    weights: AdapterWeights
    version: int | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class DropAdapter(AdapterCommand):
    """Unload an adapter that no unfinished request names."""

    name: str
    token: int


@dataclass(frozen=True, slots=True)
class FeatureUpdate:
    """An update for a feature of steps instead of the model, complete and checked, not yet in use.

    It refers to no memory of the bridge.
    """

    name: str  # what it updates
    version: int
    nbytes: int
    command: FeatureCommand  # brings it into use

    def close(self, applied: bool) -> None:
        """The engine is done with this update."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give the device's memory back until `WakeUp`. Answered by `Done(token)` or `Failed`.

    Level 1 keeps the weights in host memory, level 2 drops them. Without `mode` running
    requests are kept, without `requests` new ones wait.
    """

    level: int
    token: int
    mode: Literal["keep", "abort"] | None = None  # policy for running requests
    requests: Literal["wait", "refuse"] | None = None  # policy for requests that arrive during the sleep


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Take the memory back and continue. Answered by `Done(token)`; after `Failed` the worker stays asleep."""

    token: int


@dataclass(frozen=True, slots=True)
class NextTick:
    """No order: the gate or the receiver has changed, so a loop that waits for a command takes its next tick now."""


Command = (
    Submit
    | Cancel
    | Flush
    | StopAt
    | Pause
    | Resume
    | Shutdown
    | EndSession
    | Prefetch
    | FeatureCommand
    | Sleep
    | WakeUp
    | NextTick
)
