"""Fields of a request that the engine gets as the client gives them. Each field is declared once, here.

A field of `EngineFields` is the declaration. These are made from it:

    argument of the client, and its spelling check      `EngineArguments` below, `client/generate_request.py`
    field of the message, its default and its range     `rollout/service/requests/schema.py`
    row of the protocol's page                          `scripts/protocol_reference.py`
    field of the engine's `Request`                     `rollout/engine/messages/requests.py`
    refusal by a worker that lacks its feature          `rollout/engine/schedule/admission.py`
    entry in `capabilities` of a status                 `rollout/service/capabilities.py`

The feature alone reads it. Fields that the service keeps, or turns into something else, are declared in `schema.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from trainer_bridge.wire.codec import MAX_ID_CHARS
from trainer_bridge.wire.declarations import INT32_MAX, Declared, declared, entries_of

#: The most likeliest tokens of a drawn token: the slots' buffers have this size.
MAX_TOP_LOGPROBS = 20
#: The same for a position of the prompt: likeliest tokens, and tokens that the request names.
MAX_PROMPT_TOKENS_SCORED = 256
#: The fields that ask for scores of the prompt.
SCORE_FIELDS = ("prompt_logprobs", "prompt_top_logprobs", "prompt_logprob_token_ids", "prompt_entropy")
_SCORES = "[scores](#scores) of the prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField(Declared):
    """The declaration of one field."""

    feature: str | None = None  # name of the feature of steps that it asks for
    flag: str | None = None  # starts a worker with that feature; None: each worker has it
    needs: tuple[str, ...] = ()  # fields without which it has no meaning: at least one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFields:
    """The table."""

    logprobs: int = declared(0, "likeliest tokens to return", least=0, most=MAX_TOP_LOGPROBS, feature="scores")
    prompt_logprobs: bool = declared(False, _SCORES, feature="scores")
    prompt_top_logprobs: int | None = declared(None, _SCORES, least=0, most=MAX_PROMPT_TOKENS_SCORED)
    prompt_logprob_token_ids: np.ndarray | None = declared(None, _SCORES, least=1, most=MAX_PROMPT_TOKENS_SCORED)
    prompt_entropy: bool = declared(False, _SCORES)
    prompt_logprobs_last: int | None = declared(None, _SCORES, least=1, most=INT32_MAX, needs=SCORE_FIELDS)
    min_complete: int | None = declared(
        None, "once this number ended by themselves, the others end as `cancelled`", least=1
    )
    max_version_span: int | None = declared(
        None, "difference of weights versions beyond which a completion ends as `stale`", least=0
    )
    max_kv_age: int | None = declared(None, "a smaller `engine.max_kv_age` for this request", least=0)
    priority: int = declared(
        0, "higher goes first; then clients get equal numbers of tokens", least=-INT32_MAX, most=INT32_MAX
    )
    deadline_s: float | None = declared(
        None, "seconds after which completions end as `deadline`", least=0, above_least=True
    )
    adapter: str | None = declared(
        None,
        "name of a loaded [adapter](#adapters)",
        least=1,
        most=MAX_ID_CHARS,
        feature="adapters",
        flag="--adapter-slots N (engine.adapter_slots)",
    )


class EngineArguments(TypedDict, total=False):
    """The fields as arguments of the client's `generate`, for type checkers: the names of `EngineFields`."""

    logprobs: int  # `top_ids`, `top_logprobs` of completions
    prompt_logprobs: bool
    prompt_top_logprobs: int  # `prompt_tops` of the result, with ranks
    #: a row for all scored tokens, or one for each: `prompt_chosen_logprobs` of the result
    prompt_logprob_token_ids: Sequence[int] | Sequence[Sequence[int]] | np.ndarray
    prompt_entropy: bool
    prompt_logprobs_last: int
    min_complete: int | None
    max_version_span: int | None
    max_kv_age: int | None
    priority: int
    deadline_s: float | None
    adapter: str | None


ENGINE_FIELDS = entries_of(EngineFields, RequestField)
