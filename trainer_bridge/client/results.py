"""The typed results of a client: completions, chunks of a stream, the result of a request.

Arrays are numpy, one entry a token, and writable: `torch.from_numpy` takes them. `to_dict` gives plain values that
`json.dumps` takes; `repr` is short, with the number of tokens in their place. A reply whose arrays differ in length, or
whose version runs do not add up, raises `ProtocolError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from trainer_bridge.wire.columns import COLUMNS, MARKS, TOKEN_COLUMNS, TOP_COLUMNS
from trainer_bridge.wire.errors import ProtocolError
from trainer_bridge.wire.finish_reasons import FINISH_REASONS, FinishReason
from trainer_bridge.wire.prompt_tops import PROMPT_FIELDS, PromptScores, PromptTops
from trainer_bridge.wire.short_repr import short_fields

_MAIN = ("model", "state", "weights_version", "rows", "queue", "problems")  # fields of a status
_SHOWN = 3  # completions, or spans of versions, in a repr


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Completion:
    """One completion, or in a stream its tokens until now (`finish_reason` is then None).

    The protocol's fields, with numpy arrays and lists of pairs. A field that was not asked for is None.
    """

    index: int  # 0 to `n` - 1
    token_ids: np.ndarray  # int32 [tokens]
    #: float32 [tokens]: log-softmax of logits / temperature (at 0: of logits), before truncation, penalties and bias,
    #: as a trainer recomputes it
    logprobs: np.ndarray
    raw_logprobs: np.ndarray  # float32 [tokens]: the same at temperature 1
    versions: list[tuple[int, int]]  # list of `[weights version, tokens]` that adds up to all tokens
    #: float32 [tokens]: of the distribution that was drawn from, if a rule or a constraint changed it
    drawn_logprobs: np.ndarray | None = None
    #: `stop`, `length`, `repetition`, `cancelled`, `deadline`, `stale`, `error`; in the last chunk
    finish_reason: FinishReason | None = None
    stop: int | str | None = None  # the token id or string that ended it, part of `token_ids`
    #: without special tokens, up to the stop string; without an end that more tokens could change
    text: str | None = None
    seed: int | None = None  # needed by `continue_from`
    routing: np.ndarray | None = None  # uint8 or uint16 [entries, MoE layers, k]
    error: str | None = None  # why it ended as `error`; with `cancelled`: the worker ended
    top_ids: np.ndarray | None = None  # int32 [tokens, k], likeliest first
    top_logprobs: np.ndarray | None = None  # float32 [tokens, k], at temperature 1
    #: list of `[position, weights version]`: before this token was drawn, all KV before it was computed again under
    #: this version (two entries: in two parts); other KV has the version of the token after it
    recomputed: list[tuple[int, int]] = field(default_factory=list)
    #: list of `[position, weights version, tokens]`, with `engine.max_kv_age`: at this position the KV of the first
    #: `tokens` tokens was reused; the version is the oldest in it
    kv_versions: list[tuple[int, int, int]] = field(default_factory=list)
    #: list of `[position, version]`: the adapter's version from this token on
    adapter_versions: list[tuple[int, int]] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)  # positions that `thinking_token_budget` forced

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Completion({self._facts()})"

    def _facts(self) -> str:
        apart = ("index", "token_ids", "logprobs", "raw_logprobs", "versions")
        spans = {"versions": self.versions if len(self.versions) <= _SHOWN else f"{len(self.versions)} spans"}
        return short_fields(self, apart, index=self.index, tokens=len(self), **spans)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values: lists for arrays, None for NaN."""
        return _plain_fields(self)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Chunk(PromptScores):
    """New tokens of one completion, from position `offset` on.

    `part` is a `Completion` of the new tokens; the last chunk has its `finish_reason`. The first chunk of completion 0
    has the scores of the prompt.
    """

    offset: int
    part: Completion

    @property
    def index(self) -> int:
        """Index of the completion, 0 to `n` - 1."""
        return self.part.index

    @property
    def token_ids(self) -> np.ndarray:
        """The new tokens, int32."""
        return self.part.token_ids

    @property
    def text(self) -> str | None:
        """The text of the new tokens, with `return_text=True`; it may be empty where a character is not complete."""
        return self.part.text

    def __repr__(self) -> str:
        return f"Chunk(offset={self.offset}, {self.part._facts()})"

    @property
    def finish_reason(self) -> FinishReason | None:
        """The end of the completion, or None while it continues."""
        return self.part.finish_reason

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values: lists for arrays, None for NaN."""
        return _plain_fields(self)


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a request, in seconds."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GenerateResult(PromptScores):
    """The answer to one `generate`: the fields of the protocol's `result`.

    `prompt_tops` has `ranks` [scored tokens], `ids` and `logprobs` [scored tokens, k]. `resumes` counts continuations
    after a lost worker. `extra` has fields of newer workers.
    """

    id: str
    completions: list[Completion]
    prompt_tokens: int
    cached_tokens: int
    timing: Timing
    preemptions: int
    worker: str | None = None
    metadata: Any = None
    endpoint: str | None = None
    resumes: int = 0  # how often a completion went on after the loss of its worker (`RolloutClient(resume=True)`)
    extra: dict[str, Any] = field(default_factory=dict)  # fields of the reply that this client does not know
    media: list[str] = field(default_factory=list)  # hashes of the prompt's images
    prompt_token_ids: np.ndarray | None = None  # int32 [prompt tokens], with `return_prompt_ids`

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.completions[:_SHOWN]))
        more = len(self.completions) - _SHOWN
        completions = f"[{shown}, and {more} more]" if more > 0 else f"[{shown}]"
        facts = short_fields(self, ("id", "completions", "timing"), id=self.id)
        return f"GenerateResult({facts}, total_s={self.timing.total_s:.3g}, completions={completions})"

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values: lists for arrays, None for NaN."""
        return _plain_fields(self)


class Status(dict[str, Any]):
    """A worker's answer to `status`: a map with the fields of the protocol. Its repr shows the main fields."""

    def __repr__(self) -> str:
        main = {name: self[name] for name in _MAIN if name in self}
        shown = ", ".join(f"{name}={value!r}" for name, value in main.items())
        return f"Status({shown}, and {len(self) - len(main)} more)"


def _plain_fields(value: Any) -> dict[str, Any]:
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}


def _plain(value: Any) -> Any:
    """A value for `json.dumps`; bytes become hexadecimal text."""
    if isinstance(value, (Completion, PromptTops, Timing)):
        return _plain_fields(value)
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return None if isinstance(value, float) and math.isnan(value) else value


_RESULT_FIELDS = {
    *("v", "id", "op", "completions", "prompt_tokens", "cached_tokens", "timing", "preemptions", "worker", "metadata"),
    *("media", "prompt_token_ids", *PROMPT_FIELDS),
}


def read_result(header: Mapping[str, Any], endpoint: str | None = None) -> GenerateResult:
    """The result in a `result` reply. Raises `ProtocolError`."""
    completions = _required(header, "completions", list)
    timing = header.get("timing") or {}
    if not isinstance(timing, dict):
        raise ProtocolError("the field 'timing' of a reply is not a map")
    return GenerateResult(
        id=_required(header, "id", str),
        completions=sorted((read_completion(item) for item in completions), key=lambda completion: completion.index),
        prompt_tokens=_required(header, "prompt_tokens", int),
        cached_tokens=_required(header, "cached_tokens", int),
        timing=Timing(**{name: _seconds(timing, name) for name in Timing.__dataclass_fields__}),
        preemptions=_required(header, "preemptions", int),
        worker=header.get("worker"),
        metadata=header.get("metadata"),
        media=[str(each) for each in header.get("media") or ()],
        prompt_token_ids=_optional(header, "prompt_token_ids", np.int32),
        **_prompt_scores(header).scores(),
        endpoint=endpoint,
        extra={name: value for name, value in header.items() if name not in _RESULT_FIELDS},
    )


def _seconds(timing: Mapping[str, Any], name: str) -> float:
    value = timing.get(name, 0.0)
    if type(value) not in (int, float):
        raise ProtocolError(f"the field 'timing.{name}' of a reply is {value!r:.40}, not a number")
    return float(value)


def read_chunk(header: Mapping[str, Any]) -> Chunk:
    """The new tokens in a `chunk` reply. Raises `ProtocolError`."""
    offset = _required(header, "offset", int)
    return Chunk(offset, read_completion(header), **_prompt_scores(header).scores())


def split_chunks(reply: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The `chunk` replies that a `chunks` reply joins. Raises `ProtocolError`."""
    start, columns = 0, {name: _array(reply, name, dtype) for name, dtype in TOKEN_COLUMNS.items()}
    for head in _required(reply, "chunks", list):
        if not isinstance(head, dict) or not isinstance(head.get("id"), str):
            raise ProtocolError("a chunk in a reply is not a map with an 'id'")
        end = start + _required(head, "tokens", int)
        if not start <= end <= len(columns["token_ids"]):
            raise ProtocolError("the 'tokens' of a reply's chunks do not match the length of its arrays")
        arrays = {name: each[start:end] for name, each in columns.items()}
        yield {**head, **arrays, "v": reply.get("v"), "op": "chunk"}
        start = end
    if any(len(each) != start for each in columns.values()):
        raise ProtocolError("the 'tokens' of a reply's chunks do not match the length of its arrays")


def _prompt_scores(header: Mapping[str, Any]) -> PromptScores:
    version = header.get("prompt_version")
    if version is not None and type(version) is not int:
        raise ProtocolError(f"the field 'prompt_version' of a reply is {version!r:.40}, not an integer")
    logprobs = _optional(header, "prompt_logprobs", np.float32)
    chosen = _optional(header, "prompt_chosen_logprobs", np.float32, 2)
    entropy = _optional(header, "prompt_entropy", np.float32)
    for name, rows in (("prompt_chosen_logprobs", chosen), ("prompt_entropy", entropy)):
        if rows is not None and (logprobs is None or len(rows) != len(logprobs)):
            raise ProtocolError(f"the field {name!r} of a reply does not have as many rows as prompt_logprobs")
    return PromptScores(
        prompt_logprobs=logprobs,
        prompt_tops=_prompt_tops(header),
        prompt_version=version,
        prompt_chosen_logprobs=chosen,
        prompt_entropy=entropy,
    )


def _prompt_tops(header: Mapping[str, Any]) -> PromptTops | None:
    if header.get("prompt_ranks") is None:
        return None
    ranks = _array(header, "prompt_ranks", np.int32)
    ids, logprobs = (
        _array(header, "prompt_top_ids", np.int32, 2),
        _array(header, "prompt_top_logprobs", np.float32, 2),
    )
    if not (ids.shape == logprobs.shape and len(ids) == len(ranks)):
        raise ProtocolError(
            f"a reply has {len(ranks)} prompt_ranks, prompt_top_ids of shape {ids.shape} and prompt_top_logprobs of "
            f"shape {logprobs.shape}"
        )
    return PromptTops(ranks, ids, logprobs)


def read_completion(fields: Any) -> Completion:
    """The per-completion fields of a reply. Raises `ProtocolError`."""
    if not isinstance(fields, Mapping):
        raise ProtocolError("a completion in a reply is not a map")
    columns: dict[str, Any] = {name: _array(fields, name, dtype) for name, dtype in TOKEN_COLUMNS.items()}
    tokens = len(columns["token_ids"])
    reason = fields.get("finish_reason")
    if reason is not None and reason not in FINISH_REASONS:
        raise ProtocolError(f"a reply has the unknown finish_reason {reason!r:.40}")
    columns["drawn_logprobs"] = _optional(fields, "drawn_logprobs", np.float32)
    columns |= zip(TOP_COLUMNS, _tops(fields), strict=True)
    columns |= {name: _marks(fields, name) for name in MARKS}
    completion = Completion(
        index=_required(fields, "index", int),
        **columns,
        versions=_versions(fields, tokens),
        finish_reason=reason,
        stop=fields.get("stop"),
        text=fields.get("text"),
        seed=fields.get("seed"),
        routing=_routing(fields, tokens),
        error=fields.get("error"),
        forced=_positions(fields, "forced"),
    )
    for name in COLUMNS:
        values = getattr(completion, name)
        if values is not None and len(values) != tokens:
            raise ProtocolError(f"a reply has {tokens} token_ids but {len(values)} {name}")
    return completion


def _required(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProtocolError(f"the field {name!r} of a reply is {value!r:.40}, not of type {kind.__name__}")
    return value


def _tops(fields: Mapping[str, Any]) -> tuple[np.ndarray | None, np.ndarray | None]:
    if fields.get("top_ids") is None and fields.get("top_logprobs") is None:
        return None, None
    ids, logprobs = _array(fields, "top_ids", np.int32, 2), _array(fields, "top_logprobs", np.float32, 2)
    if ids.shape != logprobs.shape:
        raise ProtocolError(f"a reply has top_ids of shape {ids.shape} but top_logprobs of shape {logprobs.shape}")
    return ids, logprobs


def _routing(fields: Mapping[str, Any], tokens: int) -> np.ndarray | None:
    routing = fields.get("routing")
    if routing is None:
        return None
    if not isinstance(routing, np.ndarray) or routing.ndim != 3 or routing.dtype not in (np.uint8, np.uint16):
        raise ProtocolError("the field 'routing' of a reply is not a three-dimensional array of |u1 or <u2")
    if len(routing) < tokens - 1:
        raise ProtocolError(f"a reply has {tokens} token_ids but {len(routing)} entries of routing")
    return routing.copy()


def _optional(fields: Mapping[str, Any], name: str, dtype: type, dims: int = 1) -> np.ndarray | None:
    return None if fields.get(name) is None else _array(fields, name, dtype, dims)


def _array(fields: Mapping[str, Any], name: str, dtype: type, dims: int = 1) -> np.ndarray:
    value = fields.get(name)
    if type(value) is np.ndarray and value.dtype == dtype and value.ndim == dims:
        return value.copy()  # the reply's own memory is read-only
    if not isinstance(value, (np.ndarray, list)):
        raise ProtocolError(f"the field {name!r} of a reply is not an array")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ProtocolError(f"the field {name!r} of a reply is not an array of numbers") from error
    kinds = "iu" if np.issubdtype(dtype, np.integer) else "iuf"
    if array.ndim != dims or (array.size and array.dtype.kind not in kinds):
        raise ProtocolError(f"the field {name!r} of a reply is {array.dtype} of shape {array.shape}")
    return array.astype(dtype)


def _marks(fields: Mapping[str, Any], name: str) -> list[tuple[int, ...]]:
    marks, names = fields.get(name) or [], MARKS[name]
    for mark in marks if isinstance(marks, list) else [marks]:
        if not isinstance(mark, list) or [type(number) for number in mark] != [int] * len(names):
            raise ProtocolError(f"the entry {mark!r:.40} of {name!r} in a reply is not [{', '.join(names)}]")
    return [tuple(mark) for mark in marks]


def _positions(fields: Mapping[str, Any], name: str) -> list[int]:
    positions = fields.get(name) or []
    if not isinstance(positions, list) or any(type(position) is not int for position in positions):
        raise ProtocolError(f"the field {name!r} of a reply is {positions!r:.40}, not a list of positions")
    return positions


def _versions(fields: Mapping[str, Any], tokens: int) -> list[tuple[int, int]]:
    runs = _required(fields, "versions", list)
    for run in runs:
        if not isinstance(run, list) or [type(number) for number in run] != [int, int]:
            raise ProtocolError(f"the version run {run!r:.40} of a reply is not [version, tokens]")
    if sum(count for _, count in runs) != tokens:
        raise ProtocolError(f"the versions {runs!r:.80} of a reply do not add up to its {tokens} tokens")
    return [(version, count) for version, count in runs]
