"""A request in the engine, and the bounds of its fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from rollout.constraints.matcher import ANYTHING, Constraint
from rollout.engine.messages.prompts import Prompt
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
#: The most top tokens that a request can ask for at each position: the slots' buffers have this size.
MAX_TOP_LOGPROBS = 20
#: The same for a position of the prompt: likeliest tokens, and tokens that the request names.
MAX_PROMPT_TOKENS_SCORED = 256


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
#: The `prompt_chosen` of a request that names no tokens.
NO_CHOSEN = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, `n` completions."""

    key: RequestKey
    prompt: Prompt
    max_tokens: int  # tokens of a completion, `prior` included; 0 computes the prompt and draws no token
    n: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    priority: int = 0
    deadline_s: float | None = None  # seconds from submission
    stream_every: int = 0  # tokens between two deltas; 0: one delta, at the end
    prior: Prior = NOTHING_BEFORE  # set only with n == 1
    min_version: int = 0  # the request waits for weights of this version
    constraint: Constraint = ANYTHING  # applies after `prior`
    min_complete: int | None = None  # the other completions are cancelled after this number is complete
    max_version_span: int | None = None  # newest less oldest version of a completion; beyond it, it ends as stale
    max_kv_age: int | None = None  # largest age of reused KV, in weights versions; None: the engine's setting
    session: SessionKey | None = None  # this request is the session's next turn; only with n == 1
    session_lease_s: float = 0.0  # how long the session keeps its KV after this turn
    lease_s: float = 0.0  # time after the request in which its KV is evicted after KV without a lease
    top_logprobs: int = 0  # top tokens to return at each position, up to MAX_TOP_LOGPROBS
    prompt_logprobs: bool = False  # return log-probs of the prompt; the next four fields select tokens and scores
    prompt_last: int | None = None  # score only this number of tokens at the end of the prompt; None: all
    prompt_tops: int | None = None  # ranks and this number of top tokens, up to MAX_PROMPT_TOKENS_SCORED; None: neither
    #: int32 [K] or [scored tokens, K]: return log-probs of these tokens.
    prompt_chosen: np.ndarray = field(default_factory=lambda: NO_CHOSEN)
    prompt_entropy: bool = False  # return the entropy at each scored position
    adapter: str | None = None  # name of the low-rank adapter that its rows use
    routing_from: int | None = None  # return routing from this position in prompt and completion on; None: no routing

    @property
    def scored_from(self) -> int:
        """The first token of the prompt whose log-prob is wanted, if any is."""
        return 0 if self.prompt_last is None else len(self.prompt) - self.prompt_last


#: The fields of requests that ask for optional features of steps, and their values where nothing is asked for.
OF_FEATURES: Mapping[str, object] = MappingProxyType(
    {"adapter": None, "routing_from": None, "top_logprobs": 0, "prompt_logprobs": False}
)
#: The flags of a worker for the fields that not every worker takes.
FLAGS: Mapping[str, str] = MappingProxyType(
    {"adapter": "--adapter-slots N (engine.adapter_slots)", "routing_from": "--routing (engine.routing)"}
)
