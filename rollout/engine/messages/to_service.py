"""Events: from the engine to the service."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

import numpy as np

from rollout.engine.messages.requests import RequestKey, VersionRuns
from trainer_bridge.wire.finish_reasons import COMPLETE, FinishReason
from trainer_bridge.wire.prompt_tops import PromptScores, PromptTops


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a completion."""

    reason: FinishReason
    stop: int | str | None = None  # the stop token's id, or the stop string
    error: str | None = None

    @property
    def complete(self) -> bool:
        """True if the completion ended by itself; any other end may be continued."""
        return self.reason in COMPLETE


class DoneFields(TypedDict, total=False):
    """The fields of a `RequestDone` that features give: the scores of its prompt."""

    prompt_logprobs: np.ndarray
    prompt_tops: PromptTops | None
    prompt_chosen_logprobs: np.ndarray | None
    prompt_entropy: np.ndarray | None
    prompt_version: int | None


class DeltaFields(DoneFields, total=False):
    """The fields of a `Delta` that features give."""

    routing: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    adapter_versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Delta(PromptScores):
    """New tokens of one completion, in order and without gaps; the last one carries `finish`."""

    key: RequestKey
    index: int
    offset: int  # position of the first new token in the completion, `prior` included
    token_ids: np.ndarray  # int32 [k]
    logprobs: np.ndarray  # float32 [k]
    raw_logprobs: np.ndarray  # float32 [k]
    drawn_logprobs: np.ndarray | None  # float32 [k], if the drawn distribution differs from the plain one
    versions: VersionRuns
    seed: int  # seed of this completion's row
    finish: Finish | None = None
    #: All entries: (tokens, version): KV of the prompt and this many tokens was computed again under that version.
    recomputed: tuple[tuple[int, int], ...] = ()
    #: All entries, with a `max_kv_age`: (tokens, version, count): KV of the next `count` positions was found when the
    #: completion had this many tokens; `version` is the oldest weights version in it.
    kv_versions: tuple[tuple[int, int, int], ...] = ()
    version_span: int = 0  # set with `finish`: newest minus oldest version of the tokens of this worker
    #: Experts of the forwards that produced the tokens, uint8 or uint16 [entries, sparse layers, experts of a token].
    #: The positions begin after the last delta's, or at `routing_from`, and end before the newest token.
    routing: np.ndarray | None = None
    top_ids: np.ndarray | None = None  # int32 [k, tops], likeliest first, if requested
    top_logprobs: np.ndarray | None = None  # float32 [k, tops], of the model's plain distribution
    #: All entries, if the request names an adapter: (token, version): the adapter had that version from this token on.
    adapter_versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestDone(PromptScores):
    """All completions of a request have finished."""

    key: RequestKey
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    queued_s: float
    prefill_s: float
    decode_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request was not admitted."""

    key: RequestKey
    code: Literal["overloaded", "unavailable", "bad_request", "internal"]
    message: str
    field: str | None = None


@dataclass(frozen=True, slots=True)
class Flushed:
    """Follows the deltas that `key` has asked for with `Flush`."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Done:
    """A control command took effect."""

    token: int
    facts: Mapping[str, int | float] = field(default_factory=dict, hash=False)  # figures for the answer


@dataclass(frozen=True, slots=True)
class Failed:
    """A control command had no effect."""

    token: int
    message: str
    field: str | None = None
    code: Literal["bad_request", "unavailable", "internal"] = "bad_request"


Event = Delta | RequestDone | Rejected | Flushed | Done | Failed
