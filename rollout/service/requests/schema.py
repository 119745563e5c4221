"""The schema of request headers: one strict model for each `op`.

`parse_request` is the only entrance. It turns any header into a model or a `RolloutError` that names the field; an
undeclared key is an error. Checks that depend on the model or on limits (vocabulary, `max_n`) are in `intake`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails

from rollout.engine.messages.requests import VERSION_END, RepetitionRule
from rollout.service.requests.constraint import ConstraintFields, ThinkingFields
from rollout.service.requests.continue_from import ContinueFrom
from rollout.service.requests.fields import (
    MAX_INDEX_ENTRIES,
    CharCounts,
    IndexDigits,
    LogitBias,
    Logprobs,
    Offsets,
    Seed,
    Strict,
    TokenIds,
    token_id_array,
    token_id_rows,
)
from rollout.service.requests.request_media import MediaFields
from trainer_bridge.wire.codec import MAX_ID_CHARS, PROTOCOL_VERSION
from trainer_bridge.wire.declarations import INT32_MAX, Declared
from trainer_bridge.wire.errors import BadMessage, BadRequest, RolloutError
from trainer_bridge.wire.near_names import remedy
from trainer_bridge.wire.request_fields import ENGINE_FIELDS, SCORE_FIELDS, EngineFields
from trainer_bridge.wire.sampling_rules import RULES, SamplingRules

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 256
MAX_PATTERN = 1024  # tokens: each token of a completion costs the engine that many comparisons
MAX_MEDIA = 4096
MAX_ACKS = 65_536
MAX_OWNER_CHARS = 1024
MAX_SALT_CHARS = 1024
MAX_SEQUENCES = 1024
MAX_TRACE_STEPS = 2000
MAX_PATH_CHARS = 4096


def _prompt(value: Any) -> str | np.ndarray:
    return value if isinstance(value, str) else token_id_array(value)


def _rows_of_ids(value: Any, entry: Declared) -> np.ndarray | None:
    if value is None:
        return None
    array = token_id_rows(value)
    assert entry.least is not None and entry.most is not None, "an array of token ids has bounds"
    if not entry.least <= array.shape[-1] <= entry.most or not array.size:
        raise ValueError(
            f"name {entry.least} to {entry.most} tokens, or as many in each row; the shape is {list(array.shape)}"
        )
    return array


def _routing_wanted(value: Any) -> Any:
    if type(value) is not bool and value != "all":
        raise ValueError("use true for the completion's tokens, 'all' for the prompt's too, or false")
    return value


Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]
Number = Annotated[float, Field(allow_inf_nan=False)]


#: The models by their `op`.
OPS: dict[str, type[RequestHeader]] = {}


class RequestHeader(Strict):
    """The fields of every request."""

    #: Field -> the fields without which it means nothing: one of them must be there.
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    v: Literal[1]
    op: str
    id: Id
    client: Id | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        OPS.update(dict.fromkeys(get_args(cls.model_fields["op"].annotation), cls))

    def gives(self, name: str) -> bool:
        """True if a field has another value than its default."""
        value, field = getattr(self, name), type(self).model_fields[name]
        return isinstance(value, np.ndarray) or value != field.get_default(call_default_factory=True)


def _field_of(entry: Declared, kind: Any) -> tuple[Any, Any]:
    """The type and the default of a declared field. `kind`: its type in the table."""

    def check(value: Any) -> Any:
        if entry.check is not None:
            entry.check(value)
        return value

    kinds = get_args(kind) or (kind,)
    if np.ndarray in kinds:
        return Annotated[Any, BeforeValidator(partial(_rows_of_ids, entry=entry))], entry.default
    least, most = ("min_length", "max_length") if str in kinds else ("gt" if entry.above_least else "ge", "le")
    bounds: dict[str, Any] = {least: entry.least, most: entry.most}
    if float in kinds:
        bounds["allow_inf_nan"] = False
    return Annotated[kind, BeforeValidator(check)], Field(entry.default, **bounds)


def _model_of(table: type, entries: Iterable[Declared]) -> Any:
    """A model with the fields of a table."""
    kinds = get_type_hints(table)
    fields: dict[str, Any] = {entry.name: _field_of(entry, kinds[entry.name]) for entry in entries}
    return create_model(table.__name__, __base__=Strict, **fields)


if TYPE_CHECKING:  # the tables have the types of the fields
    from trainer_bridge.wire.request_fields import EngineFields as _EngineFields
    from trainer_bridge.wire.sampling_rules import SamplingRules as _Rules
else:
    _Rules, _EngineFields = _model_of(SamplingRules, RULES), _model_of(EngineFields, ENGINE_FIELDS)


class Sampling(_Rules):
    """Sampling settings: a field for each sampling rule, and two settings that are no rules."""

    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Seed | None = None

    @property
    def rules(self) -> dict[str, Any]:
        """The value of each sampling rule."""
        return {rule.name: getattr(self, rule.name) for rule in RULES}


class Stop(Strict):
    """Stop tokens and stop strings."""

    token_ids: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    strings: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field(
        default_factory=list, max_length=MAX_STOP_STRINGS
    )
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=INT32_MAX)


class RepetitionDetection(Strict):
    """vLLM's sizes of a pattern, and how often it repeats itself; without a largest size nothing is detected."""

    max_pattern_size: int = Field(0, ge=0, le=MAX_PATTERN)
    min_pattern_size: int = Field(0, ge=0, le=MAX_PATTERN)
    min_count: int = Field(0, ge=0, le=INT32_MAX)

    @property
    def rule(self) -> RepetitionRule:
        return RepetitionRule(max(self.min_pattern_size, 1), self.max_pattern_size, max(self.min_count, 2))


class Fork(Strict):
    """Tokens that a request continues: the first `offset` of a prompt and its completion, or all of them."""

    request: Id | None = None
    session: Id | None = None
    index: int = Field(0, ge=0, le=INT32_MAX)
    offset: int | None = Field(None, ge=1, le=INT32_MAX)

    @model_validator(mode="after")
    def _one_source(self) -> Fork:
        if (self.request is None) == (self.session is None):
            raise ValueError("send exactly one of 'request' and 'session'")
        if self.session is not None and self.index:
            raise ValueError("a session has one completion; remove 'index'")
        return self


class GenerateMessage(RequestHeader, _EngineFields):
    """Completions of one prompt. `result`; with `stream` also `chunk`. [Fields](#generate)."""

    needs: ClassVar = {entry.name: entry.needs for entry in ENGINE_FIELDS if entry.needs} | {
        **dict.fromkeys(("tools", "chat_template_kwargs"), ("messages",)),
        **dict.fromkeys(("session_lease_s", "end_of_session"), ("session",)),
        "join_chunks": ("stream",),
    }

    op: Literal["generate"]
    prompt: Annotated[Any, BeforeValidator(_prompt)] | None = None  # token ids, or text
    media: list[MediaFields] | None = Field(None, min_length=1, max_length=MAX_MEDIA)  # the prompt's [images](#media)
    messages: list[dict[str, Any]] | None = None  # input of the chat template
    tools: list[dict[str, Any]] | None = None  # input of the chat template
    #: its other input, also `add_generation_prompt` (true), `continue_final_message` (false)
    chat_template_kwargs: dict[str, Any] | None = None
    n: int = Field(1, ge=1)  # completions, at most 1024
    #: most tokens, old ones included; absent: as many as fit; 0: only score the prompt
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    sampling: Sampling = Field(default_factory=Sampling)  # [sampling](#sampling)
    stop: Stop = Field(default_factory=Stop)  # [ends](#ends) of completions
    stream: Literal[False, "tokens", "completions"] = False  # `"tokens"`, or `"completions"`: one chunk each
    stream_every: int = Field(64, ge=1, le=INT32_MAX)  # least tokens of a chunk, except the last
    join_chunks: bool = False  # chunks may come in `chunks` messages; needs `stream`
    return_text: bool = False  # `text` in completions and chunks
    return_prompt_ids: bool = False  # `prompt_token_ids` in the result
    #: [experts](#experts) of the completion's tokens (`true`), or of all (`"all"`)
    return_routing: Annotated[Literal[False, True, "all"], BeforeValidator(_routing_wanted)] = False
    continue_from: ContinueFrom | None = None  # the tokens of [an earlier completion](#earlier-tokens)
    constraint: ConstraintFields | None = None  # [form](#constraints) of the text
    thinking_token_budget: int | None = Field(None, ge=-1, le=INT32_MAX)  # [thoughts](#thoughts)
    thinking: ThinkingFields | None = None  # [thoughts](#thoughts)
    repetition_detection: RepetitionDetection = RepetitionDetection()  # [ends](#ends) of completions
    #: wait until the weights have this version
    min_version: int | None = Field(None, ge=0, lt=VERSION_END)
    cache_salt: Salt | None = None  # only equal salts share KV
    session: Id | None = None  # name of a [conversation](#sessions)
    session_lease_s: Number | None = Field(None, gt=0)  # seconds that the KV stays after the turn; 300
    #: seconds (at most 3600) in which KV of this request is dropped last; needs the prefix cache; with linear
    #: attention also a session
    lease_s: Number | None = Field(None, gt=0)
    end_of_session: bool = False  # do not keep the KV of this turn
    fork: Fork | None = None  # the tokens of [an earlier request](#earlier-tokens)
    detached: bool = False  # goes on without its client; needs `client`
    metadata: dict[str, Any] | None = None  # returned in the `result`

    @property
    def limits_thoughts(self) -> bool:
        return self.thinking_token_budget is not None and self.thinking_token_budget >= 0

    @property
    def scores_prompt(self) -> bool:
        """True if the request asks for scores of its prompt."""
        return any(self.gives(name) for name in SCORE_FIELDS)

    @property
    def needs_text(self) -> bool:
        """True if the request needs a tokenizer."""
        return bool(isinstance(self.prompt, str) or self.messages is not None or self.return_text or self.stop.strings)


class MediaMessage(RequestHeader):
    """Pixels ahead of requests that name them by hash, from any client."""

    op: Literal["media"]
    media: list[MediaFields] = Field(min_length=1, max_length=MAX_MEDIA)


class EndSessionMessage(RequestHeader):
    """Free the KV of a session, after a running turn."""

    op: Literal["end_session"]
    session: Id


class PrefetchMessage(RequestHeader):
    """Bring KV of a session's last turn, or of token ids, from the host. `ok` with `tokens`, or `not_found`."""

    op: Literal["prefetch"]
    session: Id | None = None
    prompt: TokenIds | None = None
    adapter: Id | None = None
    cache_salt: Salt | None = None


class OrderMessage(RequestHeader):
    """The base of messages that are answered once the loop has carried them out."""


class LoadAdapterMessage(OrderMessage):
    """Load a PEFT folder below `engine.adapter_root`; versions grow (nil: by 1)."""

    op: Literal["load_adapter"]
    name: Id
    path: str = Field(min_length=1, max_length=MAX_PATH_CHARS)
    version: int | None = Field(None, ge=0, lt=VERSION_END)


class UnloadAdapterMessage(OrderMessage):
    """`ok`, or `bad_request` while a request uses it."""

    op: Literal["unload_adapter"]
    name: Id


class CancelMessage(RequestHeader):
    """End a request as `cancelled`; `owner` is its client in `status` (nil: this one). `ok` or `not_found`."""

    op: Literal["cancel"]
    target: Id
    owner: str | None = Field(None, min_length=1, max_length=MAX_OWNER_CHARS)


class AttachMessage(RequestHeader):
    """An earlier request's `result` or [stream](#attach)."""

    needs: ClassVar = dict.fromkeys(("offsets", "text_chars", "join_chunks"), ("stream",))

    op: Literal["attach"]
    target: Id
    stream: Literal[False, "tokens", "completions"] = False
    stream_every: int = Field(64, ge=1, le=INT32_MAX)
    join_chunks: bool = False
    offsets: Offsets = Field(default_factory=dict)
    text_chars: CharCounts = Field(default_factory=dict)


class AckMessage(RequestHeader):
    """Drop results. `ok`; if one is in flight none is dropped: `bad_request`."""

    op: Literal["ack"]
    targets: list[Id] = Field(min_length=1, max_length=MAX_ACKS)


class ReportMessage(RequestHeader):
    """Compare [log-probs](#report) with a trainer's. `ok` or `not_found`."""

    op: Literal["report"]
    target: Id
    logprobs: dict[IndexDigits, Logprobs] = Field(min_length=1, max_length=MAX_INDEX_ENTRIES)


class StatusMessage(RequestHeader):
    """The [state](#status) of the worker, with up to `sequences` of its rows. `status`."""

    op: Literal["status"]
    sequences: int = Field(0, ge=0, le=MAX_SEQUENCES)


class TraceMessage(RequestHeader):
    """The last [steps](#trace). `trace`."""

    op: Literal["trace"]
    steps: int = Field(200, ge=1, le=MAX_TRACE_STEPS)


class PingMessage(RequestHeader):
    """`ok`, or `unavailable` if the loop hangs."""

    op: Literal["ping"]


class PauseMessage(OrderMessage):
    """Launch no step until `resume`; `abort` also ends rows as `cancelled`. `ok` when no step is in flight."""

    op: Literal["pause"]
    mode: Literal["keep", "abort"] = "keep"


class ResumeMessage(OrderMessage):
    """End a pause."""

    op: Literal["resume"]


class ShutdownMessage(RequestHeader):
    """End the worker: `drain` finishes requests, `now` ends them as `cancelled`."""

    op: Literal["shutdown"]
    mode: Literal["drain", "now"] = "drain"


class SleepMessage(OrderMessage):
    """[Release](#sleep-wake) the memory of the device until `wake`. `ok` with `level`, `bytes`, `seconds`, `parked`."""

    op: Literal["sleep"]
    level: int = Field(1, ge=1, le=2)
    mode: Literal["keep", "abort"] | None = None
    requests: Literal["wait", "refuse"] | None = None


class WakeMessage(OrderMessage):
    """Take the memory again. `ok` as for `sleep`."""

    op: Literal["wake"]


class WeightsMessage(RequestHeader):
    """A step of a [weights update](#weights)."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    op: Literal["weights"]


def parse_request(header: dict[str, Any]) -> RequestHeader:
    """The model of a decoded header. Raises `RolloutError` (`bad_message` for a wrong `v`, else `bad_request`)."""
    version = header.get("v")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise BadMessage(f"set 'v' to {PROTOCOL_VERSION}, the protocol version of this worker", field="v")
    op = header.get("op")
    if not isinstance(op, str) or op not in OPS:
        raise BadRequest(f"set 'op' to one of {', '.join(OPS)}", field="op")
    try:
        request = OPS[op].model_validate(header)
    except ValidationError as error:
        raise _first_error(error, OPS[op].model_fields) from None
    for name, others in request.needs.items():
        if request.gives(name) and not any(map(request.gives, others)):
            needed = f"one of {', '.join(others)}" if len(others) > 1 else f"'{others[0]}'"
            raise BadRequest(f"'{name}' needs {needed}; add that, or remove '{name}'", field=name)
    if isinstance(request, GenerateMessage):
        _check_generate(request)
    elif isinstance(request, AttachMessage):
        _check_attach(request)
    elif isinstance(request, PrefetchMessage):
        _check_prefetch(request)
    return request


def _check_generate(request: GenerateMessage) -> None:
    if request.fork is not None:
        for name in ("messages", "media"):
            if getattr(request, name) is not None:
                raise BadRequest(
                    f"'{name}' cannot follow a 'fork'; send further tokens or text as 'prompt'", field=name
                )
    elif (request.prompt is None) == (request.messages is None):
        raise BadRequest("send exactly one of 'prompt' and 'messages'", field="prompt")
    if request.messages is not None:
        _check_messages(request.messages)
    if request.detached and request.client is None:
        raise BadRequest(
            "a detached request needs a 'client' name to fetch its result with; add the name", field="client"
        )
    if not request.return_routing and request.continue_from is not None and request.continue_from.routing is not None:
        raise BadRequest(
            "'continue_from.routing' needs 'return_routing': set it, or remove the routing", field="return_routing"
        )
    if request.min_complete is not None and request.min_complete > request.n:
        raise BadRequest(
            f"'min_complete' ({request.min_complete}) is larger than 'n' ({request.n}); lower it", field="min_complete"
        )
    if request.session is not None and request.n != 1:
        raise BadRequest(
            "a turn of a session has one completion; set 'n' to 1, or use one session a completion", field="n"
        )
    if request.limits_thoughts and request.thinking is None:
        raise BadRequest(
            "'thinking_token_budget' needs 'thinking': send the 'start' and the 'end' of a thought", field="thinking"
        )
    _check_repetition(request.repetition_detection)
    if request.continue_from is not None:
        if request.n != 1:
            raise BadRequest("'continue_from' continues one completion; set 'n' to 1", field="n")
        if request.sampling.seed not in (None, request.continue_from.seed):
            raise BadRequest(
                "'continue_from.seed' determines the random numbers; remove 'sampling.seed'", field="sampling.seed"
            )
        if request.continue_from.tops not in (0, request.logprobs):
            raise BadRequest(
                f"'continue_from' has {request.continue_from.tops} top tokens a position, 'logprobs' is "
                f"{request.logprobs}; make them equal, or remove 'top_ids' and 'top_logprobs'",
                field="logprobs",
            )
        if request.continue_from.adapter_versions and request.adapter is None:
            raise BadRequest(
                "'continue_from' has 'adapter_versions'; set 'adapter', or remove them to continue without an adapter",
                field="adapter",
            )


def _check_repetition(detection: RepetitionDetection) -> None:
    if detection.min_pattern_size > detection.max_pattern_size:
        raise BadRequest(
            f"'min_pattern_size' ({detection.min_pattern_size}) is larger than 'max_pattern_size' "
            f"({detection.max_pattern_size}); lower it",
            field="repetition_detection.min_pattern_size",
        )
    if detection.max_pattern_size and detection.min_count < 2:
        raise BadRequest(
            "a pattern repeats itself at least twice; set 'min_count' to 2 or more, or 'max_pattern_size' to 0",
            field="repetition_detection.min_count",
        )


def _check_attach(request: AttachMessage) -> None:
    for index in request.text_chars:
        if request.offsets.get(index) is None:
            raise BadRequest(
                "'text_chars' needs the completion's offset; add it to 'offsets'", field=f"offsets.{index}"
            )


def _check_prefetch(request: PrefetchMessage) -> None:
    if (request.session is None) == (request.prompt is None):
        raise BadRequest("send exactly one of 'session' and 'prompt'", field="prompt")
    if request.session is not None and request.cache_salt is not None:
        raise BadRequest("a session has its own salt; remove 'cache_salt'", field="cache_salt")


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise BadRequest("'messages' is empty; send at least one message", field="messages")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise BadRequest("each message needs a 'role', a string", field=f"messages.{i}.role")


def _first_error(error: ValidationError, known: Iterable[str]) -> RolloutError:
    first: ErrorDetails = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(f"{part!s:.80}" for part in first["loc"] if part != "[key]")
    match first["type"]:
        case "missing":
            text = f"the field '{field}' is missing; add it"
        case "extra_forbidden":
            text = f"the field '{field}' is unknown to this worker; {remedy(field, known)}"
        case "dataclass_type" | "model_type" | "model_attributes_type":
            text = f"change '{field}': it should be a map"
        case "value_error":
            text = f"change '{field}': {first['msg'].removeprefix('Value error, ')}"
        case _:
            message = first["msg"].replace("dictionary", "map")
            for noun in ("Input", "String", "List"):
                message = message.replace(f"{noun} should", "it should")
            text = f"change '{field}': {message}"
    return BadRequest(text, field=field)
