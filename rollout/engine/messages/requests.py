"""A request in the engine, and the bounds of its fields."""

from dataclasses import dataclass, field

import numpy as np

from rollout.constraints.matcher import ANYTHING, Constraint
from rollout.engine.messages.prompts import Prompt
from trainer_bridge.wire.declarations import declared, entries_of
from trainer_bridge.wire.request_fields import EngineFields, RequestField
from trainer_bridge.wire.sampling_rules import SamplingRules

#: (client, request id): identifies a request, to cancel it, to find its result, to detect a duplicate.
RequestKey = tuple[str, str]
#: (client, name of the session)
SessionKey = tuple[str, str]
#: Weights versions, of the model and of adapters, are smaller than this.
VERSION_END = 2**63
#: Runs of (weights version, number of tokens); the numbers add up to all tokens.
VersionRuns = list[tuple[int, int]]
#: The most entries of a request's logit bias, and the most stop token ids (eos ids included) of a request with
#: `min_tokens`: each row has room for them on the device. Without `min_tokens` only the host compares stop token ids.
MAX_LOGIT_BIAS = 512
MAX_STOP_IDS = 64


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The shape of a token's routing: the indices of its experts in each sparse layer, likeliest first."""

    layers: int  # sparse layers
    top_k: int  # experts for each token
    experts: int  # experts in a layer

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's entry."""
        return self.layers * self.top_k * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingRules):
    """The parameters of the draw, equal for all completions of a request. The rules are inherited."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # 63 bits; the request's seed, or the row's own seed when `Request.prior` is set


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """A completion ends once a pattern of `least` to `most` tokens stands there `count` times in a row."""

    least: int = 1
    most: int = 0  # 0: repetition ends no completion
    count: int = 2  # repetitions, at least 2


@dataclass(frozen=True, slots=True)
class StopParams:
    """Conditions that end a completion before `max_tokens`."""

    token_ids: tuple[int, ...] = ()  # eos ids included, unless ignored
    strings: tuple[str, ...] = ()
    min_tokens: int = 0  # tokens before which no stop token is drawn, and no stop string or repetition counts
    repetition: RepetitionRule = RepetitionRule()


@dataclass(frozen=True, slots=True)
class Prior:
    """Tokens of an earlier, partial completion; generation continues after them."""

    token_ids: np.ndarray  # int32 [k]
    oldest_version: int = VERSION_END  # weights version; if unknown, this and the next field keep their defaults
    newest_version: int = -1


#: The `prior` of a completion that begins here, and gets its own seed.
NOTHING_BEFORE = Prior(np.zeros(0, np.int32))
#: The `chosen` of a request that names no tokens.
NO_CHOSEN = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Request(EngineFields):
    """One prompt, `n` completions. Fields as the client sent them are inherited.

    `prompt_logprobs` is set with any score of the prompt.
    """

    key: RequestKey
    prompt: Prompt
    max_tokens: int  # tokens of a completion, `prior` included; 0 computes the prompt and draws no token
    n: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    stream_every: int = 0  # tokens between two deltas; 0: one delta, at the end
    prior: Prior = NOTHING_BEFORE  # set only with n == 1
    min_version: int = 0  # the request waits for weights of this version
    constraint: Constraint = ANYTHING  # applies after `prior`
    session: SessionKey | None = None  # this request is the session's next turn; only with n == 1
    session_lease_s: float = 0.0  # how long the session keeps its KV after this turn
    lease_s: float = 0.0  # time after the request in which its KV is evicted after KV without a lease
    routing_from: int | None = declared(
        None,
        "return routing from this position in prompt and completion on",
        feature="routing",
        flag="--routing (engine.routing)",
    )

    @property
    def scored_from(self) -> int:
        """The first token of the prompt whose log-prob is wanted, if any is."""
        return 0 if self.prompt_logprobs_last is None else len(self.prompt) - self.prompt_logprobs_last

    @property
    def chosen(self) -> np.ndarray:
        """Tokens whose log-probs are wanted at each scored position, int32 [K] or [scored tokens, K]."""
        return NO_CHOSEN if self.prompt_logprob_token_ids is None else self.prompt_logprob_token_ids


#: The fields of requests that ask for optional features of steps.
OF_FEATURES = tuple(entry for entry in entries_of(Request, RequestField) if entry.feature is not None)
#: Flags that start a worker with a feature, by its name.
FLAGS = {entry.feature: entry.flag for entry in OF_FEATURES if entry.flag is not None}
