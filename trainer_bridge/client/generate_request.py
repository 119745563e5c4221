"""Turns the arguments of `generate` into the header of a request and the choice of its worker.

Both clients use it. The worker checks values against its model and its limits; this file refuses only fields that are
misspelt or cannot be put into a message.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, TypedDict

import numpy as np

from trainer_bridge.client.media import MediaPrompt
from trainer_bridge.client.results import Completion
from trainer_bridge.wire.columns import COLUMNS, MARKS
from trainer_bridge.wire.near_names import near_name
from trainer_bridge.wire.request_fields import EngineArguments
from trainer_bridge.wire.sampling_rules import RULES, SamplingFields

Prompt = str | Sequence[int] | np.ndarray | MediaPrompt
StreamKind = Literal["tokens", "completions"]

_INT32 = np.iinfo(np.int32)
_HALF = "\ufffd"  # end of a text with an incomplete last character; the next token completes it


class GenerateFields(EngineArguments, SamplingFields, total=False):
    """The keyword arguments of `generate`: the protocol's fields, and more choices.

    - sampling rules, `seed` and `logit_bias` also outside of `sampling`;
    - `stop` also as a string, a token id, or a list; `continue_from` as a `Completion`;
    - `endpoint` (absent: the least loaded one), `request_id`, `timeout_s` (seconds until `RolloutTimeout`).
    """

    # alternatives to a prompt
    messages: Sequence[Mapping[str, Any]] | None  # role and content; rendered with the model's chat template
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    # length and end
    n: int  # completions, 1 when absent
    max_tokens: int | None  # tokens of each completion; 0 computes the prompt, and scores it with `prompt_logprobs`
    stop: (
        str | Sequence[str] | Sequence[int] | Mapping[str, Any] | None
    )  # keys of a map: token_ids, strings, ignore_eos, min_tokens
    thinking_token_budget: int | None  # tokens of a thought, after which its end is forced: `forced`; needs `thinking`
    thinking: Mapping[str, Any] | None  # `start` and `end` of a thought, token ids or text
    repetition_detection: Mapping[str, int] | None  # max_pattern_size, min_count, min_pattern_size: ends a loop
    # how a token is drawn: a map, or its keys one by one: the sampling rules (inherited), `seed`, `logit_bias`
    sampling: Mapping[str, Any] | None
    seed: int | None
    logit_bias: Mapping[int, float] | Mapping[str, float]
    # returned fields and streaming
    stream_every: int  # tokens between two chunks of a completion
    join_chunks: bool  # chunks of several streams may travel together: cheaper for clients with many streams
    return_text: bool
    return_prompt_ids: bool  # the token ids of the prompt, also of a text or messages: `prompt_token_ids`
    metadata: Mapping[str, Any] | None  # echoed as it is
    continue_from: Completion | Mapping[str, Any] | None  # an earlier partial completion; needs n = 1
    # fields for workers whose `status.capabilities` list them
    return_routing: bool | Literal["all"]  # experts of each forward: `routing`; "all": the prompt's, too
    constraint: Mapping[str, Any] | None  # json_schema, regex, grammar, choices or token_ids; `after` a marker
    cache_salt: str | None  # KV of prompts is reused only among requests with the same salt
    min_version: int | None
    detached: bool
    session: str | None  # the conversation whose next turn this is; all turns go to one endpoint. Needs n = 1
    session_lease_s: float | None  # how long its KV waits for the next turn; absent: as the worker is set
    end_of_session: bool  # the last turn: no KV is kept after it
    lease_s: float | None  # seconds after the request in which its KV is evicted after KV without a lease
    fork: Mapping[str, Any] | None  # continue a request or session: `request`, `index` or `session`; `offset`
    # settings of this client, not sent
    endpoint: str | None  # the endpoint to use; absent: the least loaded one
    request_id: str | None  # 1 to 128 characters; absent: made up
    timeout_s: float | None  # seconds until `RolloutTimeout`; absent: the client's


_SAMPLING = (*(rule.name for rule in RULES), "logit_bias", "seed")
_LOCAL = ("endpoint", "request_id", "timeout_s")
_FIELDS = frozenset(GenerateFields.__annotations__)
_TOKENIZED = "pass its 'input_ids' as the prompt (apply_chat_template returns them alone with return_dict=False)"
#: Fields that are read here before the worker checks them: the types that can be read, and how to say so.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "sampling": (Mapping, "a map, such as {'temperature': 0.7}"),
    "logit_bias": (Mapping, "a map of token ids to numbers"),
    "stop": ((str, Integral, Iterable), "a string, a token id, a list of these, or a map"),
    "continue_from": ((Completion, Mapping), "a Completion, or a map with 'token_ids' and 'seed'"),
    "fork": (Mapping, "a map with 'request' or 'session', and optionally 'index' and 'offset'"),
    "request_id": (str, "a string"),
    "timeout_s": (Real, "a number of seconds"),
}


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request that can be sent: its header without `v`, `op`, `id` and `client`, and how to send it."""

    fields: dict[str, Any]
    n: int
    prior: Completion | None = None  # the completion in `continue_from`
    session: str | None = None
    endpoint: str | None = None
    request_id: str | None = None
    timeout_s: float | None = None
    stream: StreamKind | None = None


def plan_request(
    prompt: Prompt | None, fields: Mapping[str, Any], stream: StreamKind | Literal[False] = False
) -> RequestPlan:
    """Build a request. Raises TypeError for an unknown field, ValueError for a wrong value."""
    unknown = sorted(fields.keys() - _FIELDS)
    if "input_ids" in unknown:
        raise TypeError(f"the output of a tokenizer is not a request; {_TOKENIZED}")
    if unknown:
        raise TypeError(
            f"generate takes no field {unknown[0]!r}{_did_you_mean(unknown[0], _FIELDS)}; "
            f"it takes prompt, stream, {', '.join(sorted(_FIELDS))}"
        )
    for name, (kinds, words) in _KINDS.items():
        if not (fields.get(name) is None or isinstance(fields[name], kinds)):
            raise ValueError(f"{name} must be {words}, not {type(fields[name]).__name__}")
    if stream not in (False, "tokens", "completions"):
        raise ValueError(f"stream is {stream!r}; use False, 'tokens' or 'completions'")
    sent = {
        name: value
        for name, value in fields.items()
        if value is not None and name not in _SAMPLING and name not in _LOCAL
    }
    _add_prompt(sent, prompt)
    sampling = _sampling(fields)
    if sampling:
        sent["sampling"] = sampling
    if "stop" in sent:
        sent["stop"] = _stop(sent["stop"])
    if isinstance(sent.get("logprobs"), bool):  # the log-prob of each token comes without asking
        del sent["logprobs"]
    if "prompt_logprob_token_ids" in sent:
        sent["prompt_logprob_token_ids"] = _id_rows(sent["prompt_logprob_token_ids"], "prompt_logprob_token_ids")
    if any(sent.get(name) not in (None, False) for name in ("prompt_top_logprobs", "prompt_entropy")) or (
        "prompt_logprob_token_ids" in sent
    ):
        sent["prompt_logprobs"] = True
    prior = _add_prior(sent) if "continue_from" in sent else None
    if stream:
        sent["stream"] = stream
    n = sent.get("n", 1)
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n is {n!r}; use an integer of at least 1")
    local = {name: fields[name] for name in _LOCAL if name in fields}
    return RequestPlan(fields=sent, n=n, prior=prior, session=fields.get("session"), stream=stream or None, **local)


def token_array(values: Any, name: str) -> np.ndarray:
    """Token ids as int32 [n]. Raises ValueError when they are not whole numbers that fit."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be one row of integers, not {array.dtype} of shape {array.shape}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > _INT32.max):
        raise ValueError(f"{name} has a number that is not a token id: negative, or more than 32 bits")
    return array.astype(np.int32)


def _id_rows(values: Any, name: str) -> np.ndarray:
    """Token ids as int32 [k] or [n, k]. Raises ValueError as `token_array`."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} must be one row of integers, or rows of equal length") from error
    if array.ndim != 2:
        return token_array(array, name)
    return token_array(array.reshape(-1), name).reshape(array.shape)


def _add_prompt(sent: dict[str, Any], prompt: Prompt | None) -> None:
    if "fork" in sent:
        sent["fork"] = {name: value for name, value in sent["fork"].items() if value is not None}
    elif (prompt is None) == ("messages" not in sent):
        raise ValueError("give either a prompt (text or token ids) or messages")
    if isinstance(prompt, str):
        sent["prompt"] = prompt
    elif isinstance(prompt, MediaPrompt):
        sent["prompt"] = token_array(prompt.token_ids, "prompt")
        if prompt.media:
            sent["media"] = [item.fields() for item in prompt.media]
    elif isinstance(prompt, Mapping):
        raise ValueError(f"prompt must be text or token ids, not a map; {_TOKENIZED}")
    elif prompt is not None:
        if isinstance(prompt, (list, tuple)) and any(
            isinstance(part, (str, list, tuple, np.ndarray)) for part in prompt
        ):
            raise ValueError("generate takes one prompt, not a list of prompts; use generate_many(prompts, ...)")
        sent["prompt"] = token_array(prompt, "prompt")
    if "messages" in sent:
        messages = sent["messages"]
        if isinstance(messages, (str, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError("messages must be a list of maps, such as [{'role': 'user', 'content': 'Hello'}]")
        sent["messages"] = [dict(message) for message in messages]


def _stop(given: Any) -> dict[str, Any]:
    """`stop` as the protocol has it: a string or a list stands for its `strings` or `token_ids`."""
    if isinstance(given, str):
        return {"strings": [given]}
    if isinstance(given, Mapping):
        if "token_ids" in given:
            given = {**given, "token_ids": [int(token) for token in given["token_ids"]]}
        return dict(given)
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        return {"token_ids": [int(given)]}
    items = list(given)
    strings = [item for item in items if isinstance(item, str)]
    token_ids = [int(item) for item in items if not isinstance(item, str)]
    return ({"strings": strings} if strings else {}) | ({"token_ids": token_ids} if token_ids else {})


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = near_name(name, known)
    return f" (did you mean {near!r}?)" if near else ""


def _add_prior(sent: dict[str, Any]) -> Completion:
    """The completion in `continue_from`, which is put into the protocol's form."""
    given = sent["continue_from"]
    if not isinstance(given, Completion):
        given = {name: value for name, value in given.items() if value is not None}
        prior = _prior(given)
        sent["continue_from"] = {**given, "token_ids": prior.token_ids}
        return prior
    if given.seed is None:
        raise ValueError("continue_from is a completion without a seed, so its random numbers cannot go on")
    text = given.text and given.text.rstrip(_HALF)
    prior = replace(given, finish_reason=None, stop=None, error=None, text=text)
    if not sent.get("return_routing"):
        prior = replace(prior, routing=None)  # it is not wanted back
    if not sent.get("logprobs"):
        prior = replace(prior, top_ids=None, top_logprobs=None)
    sent["continue_from"] = prior_fields(prior)
    return prior


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(fields.get("sampling") or {})
    loose = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    twice = sorted(given.keys() & loose.keys())
    if twice:
        raise ValueError(f"{twice[0]!r} is given twice, in sampling and outside; give it once")
    given |= loose
    unknown = sorted(given.keys() - set(_SAMPLING))
    if unknown:
        hint = _did_you_mean(unknown[0], _SAMPLING)
        raise ValueError(f"sampling has no {unknown[0]!r}{hint}; it takes {', '.join(_SAMPLING)}")
    if given.get("top_k") == -1:  # -1 disables it in other engines
        given["top_k"] = 0
    if "logit_bias" in given:  # keys of a message's maps are strings
        given["logit_bias"] = {str(token): bias for token, bias in given["logit_bias"].items()}
    return given


def _prior(partial: Mapping[str, Any]) -> Completion:
    """An earlier partial completion. Missing log-probs become NaN, missing versions -1."""
    token_ids = token_array(partial.get("token_ids", ()), "continue_from.token_ids")
    unknown = np.full(len(token_ids), np.nan, np.float32)
    runs, drawn = partial.get("versions", [(-1, len(token_ids))]), partial.get("drawn_logprobs")
    marks: dict[str, Any] = {name: [tuple(mark) for mark in partial.get(name, ())] for name in MARKS}
    return Completion(
        index=0,
        token_ids=token_ids,
        logprobs=np.asarray(partial.get("logprobs", unknown), np.float32),
        raw_logprobs=np.asarray(partial.get("raw_logprobs", unknown), np.float32),
        versions=[(version, count) for version, count in runs],
        **marks,
        forced=list(partial.get("forced", ())),
        drawn_logprobs=None if drawn is None else np.asarray(drawn, np.float32),
        routing=None if partial.get("routing") is None else np.asarray(partial["routing"]),
        top_ids=_given_rows(partial, "top_ids", np.int32),
        top_logprobs=_given_rows(partial, "top_logprobs", np.float32),
        seed=partial.get("seed"),
    )


def _given_rows(partial: Mapping[str, Any], name: str, dtype: type) -> np.ndarray | None:
    given = partial.get(name)
    rows: np.ndarray = np.asarray(() if given is None else given, dtype)
    return rows if rows.size else None


def prior_fields(prior: Completion) -> dict[str, Any]:
    """`continue_from` for a completion that has a seed."""
    fields = given(seed=prior.seed, **{name: getattr(prior, name) for name in (*COLUMNS, "routing")})
    fields["versions"] = [list(run) for run in prior.versions]
    fields |= {name: [list(mark) for mark in marks] for name in MARKS if (marks := getattr(prior, name))}
    if prior.forced:
        fields["forced"] = prior.forced
    if prior.text is not None:
        fields["text_chars"] = len(prior.text)
    return fields


class AttachFields(TypedDict, total=False):
    """The keyword arguments of `attach`; `partials` is what an earlier stream of the request delivered."""

    stream_every: int | None  # tokens of a chunk, at the least
    n: int  # completions that the request has; 1
    partials: Iterable[Completion]  # completions of an earlier stream: this stream continues after them
    endpoint: str | None  # the worker that has the request; absent: the only one
    timeout_s: float | None  # seconds until `RolloutTimeout`; absent: the client's


def attach_fields(
    target: str, stream: Literal[False] | StreamKind, given: AttachFields
) -> tuple[dict[str, Any], list[Completion]]:
    """The fields of an `attach` message, and the partial completions after which its stream continues."""
    if unknown := sorted(given.keys() - AttachFields.__annotations__.keys()):
        raise TypeError(f"attach takes no {unknown[0]!r}; it takes {', '.join(AttachFields.__annotations__)}")
    fields: dict[str, Any] = {"target": target}
    partials = list(given.get("partials", ()))
    if partials and not stream:
        raise ValueError("partials are for streams; leave them out, or set stream")
    if stream:
        going_on = [part for part in partials if part.finish_reason is None]
        offsets = dict.fromkeys((str(part.index) for part in partials), None)
        offsets |= {str(part.index): len(part) for part in going_on}
        chars = {str(part.index): len(part.text) for part in going_on if part.text is not None}
        fields |= {"stream": stream, "offsets": offsets, "text_chars": chars}
        if given.get("stream_every") is not None:
            fields["stream_every"] = given["stream_every"]
    return fields, partials


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None; the worker's settings decide the others."""
    return {name: value for name, value in fields.items() if value is not None}
