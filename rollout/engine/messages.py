"""Plain data that passes between the service and the engine.

The service turns messages into commands and events into messages. The engine turns commands into steps and steps into
events. Neither has a reference to the other's objects.

    service --Command--> engine.inbox          engine --Event--> service.outbox

The weight receiver, too, puts a command into the inbox: `Look`. Both queues are FIFO and thread-safe. Arrays are frozen
by convention: no code writes to an array after it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from rollout.constraints.matcher import Constraint
from trainer_bridge.wire.prompt_tops import PromptTops
from trainer_bridge.wire.sampling_rules import SamplingRules

if TYPE_CHECKING:
    from rollout.models.lora_slots import AdapterWeights

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


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The shape of a token's routing: the indices of its experts in each sparse layer, likeliest first."""

    layers: int  # sparse layers
    top_k: int  # experts for each token
    experts: int  # experts in a layer

    @property
    def dtype(self) -> np.dtype:
        """The dtype of an index."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's entry."""
        return self.layers * self.top_k * self.dtype.itemsize


FinishReason = Literal["stop", "length", "cancelled", "deadline", "stale", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingRules):
    """How a token is drawn; the same for all completions of a request. The rules are inherited."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # 63 bits; the request's seed, or the row's own seed when `Request.prior` is set


@dataclass(frozen=True, slots=True)
class StopParams:
    """Conditions that end a completion before `max_tokens`."""

    token_ids: tuple[int, ...] = ()  # eos ids included, unless ignored
    strings: tuple[str, ...] = ()
    min_tokens: int = 0  # tokens before which no stop token is drawn and no stop string counts


@dataclass(frozen=True, slots=True)
class Prior:
    """Tokens of an earlier, partial completion; generation continues after them."""

    token_ids: np.ndarray  # int32 [k]
    oldest_version: int | None = None  # weights version; None if unknown
    newest_version: int | None = None  # weights version; None if unknown


@dataclass(frozen=True, eq=False, slots=True)
class TokenIds:
    """A prompt item: a run of token ids."""

    token_ids: np.ndarray  # int32 [positions], at least one

    def content(self, start: int, end: int) -> bytes:
        """What the KV of the item's positions `start` to `end` - 1 depends on, apart from the positions before them."""
        return self.token_ids[start:end].astype("<i4", copy=False).tobytes()


@dataclass(frozen=True, eq=False, slots=True)
class Pixels:
    """An image or a video as a processor returns it: the patches that a vision tower encodes."""

    digest: bytes  # of dtype, grid and patches; equal digests are the same image
    grid: tuple[int, int, int]  # frames, and patches of their height and width
    #: [frames height width, values]: float32, float16, or uint16 with the bits of bfloat16; writable for torch's sake.
    patches: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of the patches."""
        return self.patches.nbytes


@dataclass(frozen=True, eq=False, slots=True)
class Media:
    """A prompt item: an image or a video, in the places of placeholder tokens."""

    token_ids: np.ndarray  # int32 [positions]: the placeholders
    pixels: Pixels
    #: Positions of the rotary embedding on three axes, int64 [3, positions], from the first one on.
    axes_3L: np.ndarray
    advance: int  # positions by which the text after it is further on

    def content(self, start: int, end: int) -> bytes:
        """As of `TokenIds`: the placeholders of all images are equal, so their pixels and positions are part of it."""
        mark = self.pixels.digest + np.array([start, end, self.advance], "<i8").tobytes()
        times = self.axes_3L[0, start:end].astype("<i8", copy=False).tobytes()
        return self.token_ids[start:end].astype("<i4", copy=False).tobytes() + mark + times

    def identity(self) -> np.ndarray:
        """A number below 0 for each position, int64, which another image has only by chance."""
        digest = blake2b(self.pixels.digest + self.axes_3L.astype("<i8").tobytes(), digest_size=8).digest()
        first = int.from_bytes(digest, "little") >> 2
        return -1 - (first + np.arange(len(self.token_ids), dtype=np.int64))


PromptItem = TokenIds | Media


class _Axes(NamedTuple):
    """The fields of a `Prompt` with images that follow from its items; of text alone by default."""

    media: tuple[tuple[int, Media], ...] = ()
    rope_3T: np.ndarray | None = None
    delta: int = 0
    jump: int = 0

    @classmethod
    def of(cls, items: tuple[PromptItem, ...]) -> _Axes:
        media: list[tuple[int, Media]] = []
        place, position, parts = 0, 0, list[np.ndarray]()
        for item in items:
            length = len(item.token_ids)
            if isinstance(item, Media):
                media.append((place, item))
                parts.append(item.axes_3L + position)
                position += item.advance
            else:
                parts.append(np.broadcast_to(np.arange(position, position + length), (3, length)))
                position += length
            place += length
        rope_3T = np.concatenate(parts, axis=1)
        end = int(rope_3T.max()) + 1  # the position of the first generated token, as in transformers
        return cls(tuple(media), rope_3T, end - place, end - position)


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A prompt: items in the order of their positions, at least one.

    An item covers one position or more. It has a token id for each, and says what the KV there depends on (`content`);
    prefix keys are made of that. Prompts with different salts share no KV by their keys.

    In a prompt with images a token has a place in the sequence, and positions of the rotary embedding, which differ
    from it: an image takes fewer positions than places. `rope_delta` is what is added to the place of a later token.
    """

    items: tuple[PromptItem, ...]
    token_ids: np.ndarray = field(init=False)  # int32 [prompt tokens]: those of all items
    salt: bytes = b""  # part of the content of position 0, and so of every key
    media: tuple[tuple[int, Media], ...] = field(init=False)  # (first place, item)
    rope_3T: np.ndarray | None = field(init=False)  # int64 [3, prompt tokens]; None for text alone
    rope_delta: int = field(init=False)
    #: What is different if the generated tokens were part of the prompt: a video may reach further than the text.
    rope_jump: int = field(init=False)

    def __post_init__(self) -> None:
        arrays = [item.token_ids for item in self.items]
        object.__setattr__(self, "token_ids", arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        axes = _Axes.of(self.items) if any(isinstance(item, Media) for item in self.items) else _Axes()
        object.__setattr__(self, "media", axes.media)
        object.__setattr__(self, "rope_3T", axes.rope_3T)
        object.__setattr__(self, "rope_delta", axes.delta)
        object.__setattr__(self, "rope_jump", axes.jump)

    def rope_positions(self, start: int, end: int) -> np.ndarray:
        """Positions on three axes of the places `start` to `end` - 1 of prompt and completion, int64 [3, places]."""
        length = len(self.token_ids)
        after = np.arange(max(start, length), end) + self.rope_delta
        later = np.broadcast_to(after, (3, len(after)))
        return later if self.rope_3T is None else np.concatenate([self.rope_3T[:, start:end], later], axis=1)

    def identity(self, tokens: np.ndarray) -> np.ndarray:
        """Numbers that are equal where the KV of the prompt and what follows may be equal.

        `tokens` (int32) are the ids of the prompt and of its completion. Without images they are the result.
        """
        if not self.media:
            return tokens
        identity, length = tokens.astype(np.int64), len(self.token_ids)
        for place, item in self.media:
            identity[place : place + len(item.token_ids)] = item.identity()
        identity[length:] += self.rope_jump << 32
        return identity

    @classmethod
    def of_tokens(cls, token_ids: np.ndarray) -> Prompt:
        """A prompt of token ids only, int32 [prompt tokens]."""
        return cls((TokenIds(token_ids),))

    def __len__(self) -> int:
        return len(self.token_ids)

    def content(self, start: int, end: int) -> bytes:
        """The content of the prompt's positions `start` to `end` - 1."""
        content = self._item_content(start, end)
        return self.salt + content if self.salt and start == 0 else content

    def _item_content(self, start: int, end: int) -> bytes:
        if len(self.items) == 1:  # the usual prompt, and this is called for each of its pages
            return self.items[0].content(start, end)
        parts, first = [], 0
        for item in self.items:
            length = len(item.token_ids)
            if first < end and start < first + length:
                parts.append(item.content(max(start - first, 0), min(end - first, length)))
            first += length
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, `n` completions."""

    key: RequestKey
    prompt: Prompt
    max_tokens: int  # of a completion, the tokens of `prior` included; 0: the prompt is computed, no token is drawn
    n: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    priority: int = 0
    deadline_s: float | None = None  # seconds from submission
    stream_every: int = 0  # tokens between two deltas; 0: one delta, at the end
    prior: Prior | None = None  # only with n == 1
    min_version: int = 0  # the request waits for weights of this version
    constraint: Constraint | None = None  # applies after `prior`
    min_complete: int | None = None  # once this many completions are complete, the others are cancelled
    max_version_span: int | None = None  # newest less oldest version of a completion; beyond it, it ends as stale
    session: SessionKey | None = None  # this request is the session's next turn; only with n == 1
    session_lease_s: float = 0.0  # how long the session keeps its KV after this turn
    top_logprobs: int = 0  # top tokens to return at each position, up to MAX_TOP_LOGPROBS
    prompt_logprobs: bool = False  # return log-probs of the prompt, which is then computed as a whole
    prompt_tops: int | None = None  # ranks and this number of top tokens, up to MAX_TOP_LOGPROBS; None: neither
    adapter: str | None = None  # name of the low-rank adapter that its rows use
    routing_from: int | None = None  # return routing from this position in prompt and completion on; None: no routing


# --- commands: service -> engine -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request. Answered by deltas and `RequestDone`, or by `Rejected`."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request's sequences with the tokens that they have. An unknown key is ignored: the request has ended."""

    key: RequestKey


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

    An unknown session has no KV. A running turn goes on and leaves no KV behind.
    """

    client: str
    name: str | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class PutAdapter:
    """Load an adapter, or a newer version of one. Answered by `Done(token)` or `Failed`, if there is a token.

    Without a `version` it is the last version plus 1, or 0. Running rows go on with the new version.
    """

    name: str
    weights: AdapterWeights
    version: int | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Unload an adapter that no unfinished request names. Answered by `Done(token)` or `Failed`."""

    name: str
    token: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give the device's memory back until `Wake`. Answered by `Done(token)` or `Failed`.

    Level 1 keeps the weights in host memory, level 2 drops them. Without `mode` running
    requests are kept, without `requests` new ones wait.
    """

    level: int
    token: int
    mode: Literal["keep", "abort"] | None = None  # what happens to running requests
    requests: Literal["wait", "refuse"] | None = None  # what happens to requests that arrive meanwhile


@dataclass(frozen=True, slots=True)
class Wake:
    """Take the memory back and go on. Answered by `Done(token)`; after `Failed` the worker sleeps on."""

    token: int


@dataclass(frozen=True, slots=True)
class Look:
    """No order: the gate or the receiver has changed, so a loop that waits for a command takes its next tick now."""


Command = (
    Submit | Cancel | StopAt | Pause | Resume | Shutdown | EndSession | PutAdapter | DropAdapter | Sleep | Wake | Look
)


# --- events: engine -> service ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finish:
    """How a completion ended."""

    reason: FinishReason
    stop: int | str | None = None  # the stop token's id, or the stop string
    error: str | None = None

    @property
    def complete(self) -> bool:
        """True if the completion ended by itself; any other end may be continued."""
        return self.reason in ("stop", "length")


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one completion, in order and without gaps; the last one carries `finish`."""

    key: RequestKey
    index: int
    offset: int  # position of the first new token in the completion, `prior` included
    token_ids: np.ndarray  # int32 [k]
    logprobs: np.ndarray  # float32 [k]
    raw_logprobs: np.ndarray  # float32 [k]
    drawn_logprobs: np.ndarray | None  # float32 [k], if the drawn distribution differs from the plain one
    versions: VersionRuns
    seed: int  # of this completion's row
    finish: Finish | None = None
    #: All so far: (tokens, version): KV of the prompt and so many tokens was computed again under that version.
    recomputed: tuple[tuple[int, int], ...] = ()
    version_span: int = 0  # with `finish`: newest less oldest version of the tokens that this worker generated
    #: Experts of the forwards that produced the tokens, uint8 or uint16 [entries, sparse layers, experts of a token].
    #: The positions begin after those of the last delta, or at `routing_from`, and end before the newest token.
    routing: np.ndarray | None = None
    top_ids: np.ndarray | None = None  # int32 [k, tops], likeliest first, if requested
    top_logprobs: np.ndarray | None = None  # float32 [k, tops], of the model's plain distribution
    prompt_logprobs: np.ndarray | None = None  # as in `RequestDone`; with the first delta of completion 0
    prompt_tops: PromptTops | None = None  # the same
    prompt_version: int | None = None  # the same
    #: All so far, if the request names an adapter: (token, version): from this token on the adapter had that version.
    adapter_versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestDone:
    """All completions of a request have finished."""

    key: RequestKey
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    queued_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    prompt_logprobs: np.ndarray | None = None  # float32 [prompt tokens]; NaN for the first and for missing ones
    prompt_tops: PromptTops | None = None  # of the same tokens, if asked for
    prompt_version: int | None = None  # weights version of these; None where none is known


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request was not admitted."""

    key: RequestKey
    code: Literal["too_long", "overloaded", "unavailable", "bad_request", "internal"]
    message: str
    field: str | None = None


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


Event = Delta | RequestDone | Rejected | Done | Failed


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """One adapter that requests can name."""

    name: str
    version: int
    resident: bool  # the adapter is in a slot on the device
    rows: int  # rows that use the slot


@dataclass(frozen=True, slots=True)
class SwapStatus:
    """One swap of the weights."""

    version: int
    age_s: float  # time since its end
    pause_s: float  # time that it occupied the compute stream


@dataclass(frozen=True, slots=True)
class SequenceStatus:
    """One completion that holds a row."""

    key: RequestKey
    index: int
    state: Literal["prefill", "decode", "leaving"]
    prompt_tokens: int
    tokens: int  # committed tokens, including `prior`
    max_tokens: int
    pages: int
    age_s: float  # time since its request was submitted
    version: int | None  # of its newest token; None before the first token
    priority: int


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Sessions between their turns: now, and totals since start."""

    holding: int = 0  # sessions with pages, now
    pages: int = 0  # their pages, now
    turns: int = 0
    hits: int = 0  # turns that found KV in their session
    reused_tokens: int = 0  # tokens whose KV these turns found
    evicted: int = 0  # sessions that lost their pages to rows or to other sessions


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """KV of preempted sequences on the host: now, and totals since start."""

    sequences: int = 0  # offloaded sequences, now
    pages: int = 0  # pages of host memory reserved for them, now
    pages_total: int = 0  # all pages of host memory; 0 without offloading
    parked: int = 0  # preempted sequences whose KV was offloaded
    restored: int = 0  # offloaded sequences that went on with their KV
    refused: int = 0  # preempted sequences whose KV had no room on the host
    bytes_out: int = 0  # copied to the host
    bytes_in: int = 0  # copied back


@dataclass(frozen=True, slots=True)
class SleepStatus:
    """A worker that is asleep, or about to be."""

    level: int
    requests: Literal["wait", "refuse"]  # what happens to requests that arrive meanwhile
    freed_bytes: int  # device memory given back; 0 while it falls asleep
    age_s: float  # time asleep


EngineState = Literal["serving", "paused", "draining", "asleep", "stale", "stalled"]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank of a tensor group."""

    rank: int
    pid: int
    device: str
    beat_age_s: float  # seconds since its last beat; 0 of rank 0
    sequence: int  # of the last order that it has carried out; of rank 0: that it has given
    launched: int  # steps
    done: int  # steps that are complete on its device; of rank 0: that it has committed
    swapped: int  # updates of the weights whose copy it has; of rank 0: that it has begun
    verified: int  # the last update that it has whole and checked; of rank 0: as swapped
    copies: int  # copies of adapters, KV and states that its device has done; of rank 0: 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine, replaced as a whole a few times a second; `status` is answered from it."""

    state: EngineState = "serving"
    weights_version: int = 0
    rows_running: int = 0
    rows_max: int = 0
    queue_waiting: int = 0
    queue_max: int = 0
    queue_clients: int = 0  # clients whose completions wait; without engine.fair_queue they are not told apart
    pages_free: int = 0
    pages_cached: int = 0
    pages_used: int = 0
    pages_total: int = 0
    sessions: SessionStatus = SessionStatus()
    offload: OffloadStatus = OffloadStatus()
    sleep: SleepStatus | None = None  # None: awake
    slots_in_flight: int = 0
    adapters: tuple[AdapterStatus, ...] | None = None  # None: this worker serves none
    tokens_per_s: float = 0.0
    gpu_active_pct: float = 0.0
    gpu_busy_s: float = 0.0  # since start, in which the compute stream ran a step
    reclaimed: int = 0
    preemptions: int = 0
    prefix_hits: Mapping[str, int] = field(default_factory=dict)  # rows by `PrefixHit`, since start
    uptime_s: float = 0.0
    last_tick_s: float = 0.0  # seconds since the last tick of the loop
    faults: int = 0  # faults of the engine, which was built anew after each
    restarts: int = 0  # restarts of the worker by its supervisor
    prompt_faults: int = 0  # deaths of the prompt process, which was replaced after each
    tokens: int = 0  # committed and kept since start
    tokens_by_second: tuple[int, ...] = ()  # in the last ten seconds, oldest first
    idle_pct: Mapping[str, float] = field(default_factory=dict)  # share of about the last 10 s, by cause
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last report, as `rollout top` shows them
    swaps: tuple[SwapStatus, ...] = ()  # the last swaps, newest first
    ranks: tuple[RankStatus, ...] = ()  # of a tensor group, rank 0 first
    problems: tuple[str, ...] = ()  # what has failed although generation goes on, a sentence each
    stale: str = ""  # why the weights cannot be used, and what cures that
