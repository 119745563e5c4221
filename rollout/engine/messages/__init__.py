# ruff: noqa: F401
"""Plain data that passes between the service and the engine.

The service turns messages into commands and events into messages. The engine turns commands into steps and steps into
events. Neither has a reference to the other's objects.

    service --Command--> engine.inbox          engine --Event--> service.outbox

The weight receiver, too, puts a command into the inbox: `Look`. Both queues are FIFO and thread-safe. Arrays are frozen
by convention: no code writes to an array after it was sent.
"""

from rollout.engine.messages.prompts import Media, Pixels, Prompt, PromptItem, TokenIds
from rollout.engine.messages.requests import (
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_TOP_LOGPROBS,
    VERSION_END,
    Prior,
    Request,
    RequestKey,
    RoutingShape,
    SamplingParams,
    SessionKey,
    StopParams,
    VersionRuns,
)
from rollout.engine.messages.statuses import (
    AdapterStatus,
    EngineState,
    EngineStatus,
    OffloadStatus,
    RankStatus,
    SequenceStatus,
    SessionStatus,
    SleepStatus,
    SwapStatus,
)
from rollout.engine.messages.to_engine import (
    Cancel,
    Command,
    DropAdapter,
    EndSession,
    Look,
    Pause,
    PutAdapter,
    Resume,
    Shutdown,
    Sleep,
    StopAt,
    Submit,
    Wake,
)
from rollout.engine.messages.to_service import Delta, Done, Event, Failed, Finish, FinishReason, Rejected, RequestDone
