"""Turns a `generate` message into the request of the engine, and its completions as they begin.

The checks of a request, in order: its shape in `schema`; what model and limits rule out, in `check` without the
prompt's token ids and in `build` with them; the engine's capacity in `rollout/engine/schedule/admission.py`. `check`
and `build` raise `RolloutError` that names the field.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from rollout.config import ServiceSettings
from rollout.constraints.matcher import ANYTHING, Constraint
from rollout.constraints.thoughts import BudgetedConstraint, ThoughtRule
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import (
    MAX_STOP_IDS,
    NOTHING_BEFORE,
    Prior,
    Request,
    RequestKey,
    SamplingParams,
    StopParams,
)
from rollout.models.vision_spec import TowerSpec
from rollout.service.capabilities import ServedModel
from rollout.service.delivery.completion import NO_MARKS, CompletionDelivery, ForcedTokens, Marks, TokenColumns
from rollout.service.delivery.expert_records import RoutingColumn, check_wanted, first_position
from rollout.service.requests.constraint import ConstraintFields, Constraints
from rollout.service.requests.continue_from import ContinueFrom
from rollout.service.requests.request_media import MediaLimits, check_media, check_pieces, check_placeholders
from rollout.service.requests.schema import GenerateMessage, MediaMessage, PrefetchMessage, Sampling
from rollout.service.text.stop_strings import StopText
from rollout.text.codec import TextCodec, check_chars
from trainer_bridge.wire.columns import COLUMNS, TOP_COLUMNS
from trainer_bridge.wire.errors import BadRequest, TooLong
from trainer_bridge.wire.prompt_tops import reply_bytes
from trainer_bridge.wire.request_fields import ENGINE_FIELDS

#: Tokens between two searches for stop strings. A completion may run that much beyond one; each search costs the
#: service a delta.
STOP_CHECK_EVERY = 4
_MIN_DEADLINE_S = 1e-3
_ROUTING_EVERY = 256  # tokens; expert records are large, and the loop should not copy all of them at once


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The outcome of preparing a request."""

    prompt: Prompt
    constraint: Constraint = ANYTHING

    @classmethod
    def of_message(cls, message: GenerateMessage) -> PreparedPrompt:
        """The prompt of a message with token ids, without images and without a constraint."""
        assert isinstance(message.prompt, np.ndarray)
        return cls(Prompt.of_tokens(message.prompt))


class Intake:
    """Checks `generate` messages and turns them into engine requests."""

    def __init__(
        self, settings: ServiceSettings, model: ServedModel, text: TextCodec | None, constraints: Constraints
    ) -> None:
        self._limits = settings.constants
        self._lease_s = self._limits.session_lease_s
        self._model = model
        self._text = text
        self._constraints = constraints
        self._media_limits = MediaLimits(self._limits.max_media, self._limits.max_media_patches, model.image_patches)

    @property
    def tower(self) -> TowerSpec | None:
        """The vision tower of the served model; None if it is served for text alone."""
        return self._model.images

    def check(self, message: GenerateMessage) -> None:
        """All checks that need no token ids of the prompt. Raises `RolloutError`."""
        if message.n > self._limits.max_n:
            raise BadRequest(f"set 'n' to at most {self._limits.max_n}, or send several requests", field="n")
        if isinstance(message.prompt, np.ndarray):
            self._check_prompt(message.prompt, "prompt", least=0 if message.fork is not None else 1)
        elif isinstance(message.prompt, str):
            check_chars(message.prompt, self._limits.max_prompt_chars, "prompt")
        if message.needs_text:
            self._check_text(message)
        if message.media is not None:
            check_media(message.media, message.prompt, self._model.images, self._media_limits)
        self._check_vocabulary(message)
        if message.return_routing:
            check_wanted(message, self._model.routing, self._model.sparse)
        if message.constraint is not None:
            self._check_constraint(message.constraint)
        rule = self._thought_rule(message)
        if rule is not None:
            self._check_ids(np.array(rule.start), "thinking.start")
            self._check_ids(np.array(rule.end), "thinking.end")
        for name in ("session_lease_s", "lease_s"):
            if (getattr(message, name) or 0) > self._limits.max_session_lease_s:
                raise BadRequest(f"ask for at most {self._limits.max_session_lease_s:g} seconds", field=name)
        known = len(message.continue_from.token_ids) if message.continue_from else 0
        if message.max_tokens is not None:
            if message.max_tokens < known:
                raise BadRequest(
                    f"'max_tokens' includes the {known} tokens of 'continue_from'; set it to at least that",
                    field="max_tokens",
                )
            if message.stop.min_tokens > message.max_tokens:
                raise BadRequest("'stop.min_tokens' is more than 'max_tokens'; lower it", field="stop.min_tokens")

    def check_media(self, message: MediaMessage) -> None:
        """All checks of images that come ahead of a request. Raises `RolloutError`."""
        check_pieces(message.media, self._model.images, self._media_limits)

    def check_prefetch(self, message: PrefetchMessage) -> None:
        """All checks of a prefetch that need no session. Raises `RolloutError`."""
        if message.prompt is not None:
            self._check_prompt(message.prompt, "prompt")

    def prefetch_prompt(self, message: PrefetchMessage) -> Prompt:
        """The prompt of a prefetch with token ids."""
        assert message.prompt is not None
        prompt = Prompt.of_tokens(message.prompt)
        return prompt if message.cache_salt is None else replace(prompt, salt=_salt(message.cache_salt))

    def stop_ids(self, message: GenerateMessage) -> tuple[int, ...]:
        """Tokens that end a completion, with the eos ids unless they are ignored."""
        eos = () if message.stop.ignore_eos else self._model.eos_ids
        return tuple(dict.fromkeys((*eos, *message.stop.token_ids)))

    def build(self, key: RequestKey, message: GenerateMessage, prepared: PreparedPrompt, elapsed_s: float) -> Request:
        """The engine's request. `elapsed_s`: seconds since the message arrived."""
        prompt = prepared.prompt
        if self._model.images is not None:
            check_placeholders(prompt, self._model.images)
        self._check_prompt(prompt.token_ids, "messages" if message.messages is not None else "prompt")
        known = len(message.continue_from.token_ids) if message.continue_from else 0
        max_tokens = self._max_tokens(message, len(prompt), known)
        scored = _scored_tokens(message, len(prompt))
        self._check_reply(message, len(prompt), scored, max_tokens)
        as_sent: dict[str, Any] = {entry.name: getattr(message, entry.name) for entry in ENGINE_FIELDS}
        if message.deadline_s is not None:
            as_sent["deadline_s"] = max(message.deadline_s - elapsed_s, _MIN_DEADLINE_S)
        return Request(
            **as_sent | {"prompt_logprobs": message.scores_prompt},
            key=key,
            prompt=prompt if message.cache_salt is None else replace(prompt, salt=_salt(message.cache_salt)),
            max_tokens=max_tokens,
            n=message.n,
            sampling=_sampling(message.sampling, message.continue_from),
            stop=self._stop(message),
            stream_every=self._delta_every(message),
            prior=_prior(message.continue_from),
            min_version=max(message.min_version or 0, self._model.min_version),
            constraint=self._constraint(message, prepared),
            session=None if message.session is None else (key[0], message.session),
            session_lease_s=message.session_lease_s or self._lease_s,
            lease_s=message.lease_s or 0.0,
            routing_from=(
                first_position(wanted, message.continue_from, len(prompt))
                if (wanted := message.return_routing)
                else None
            ),
        )

    def completion(self, message: GenerateMessage, request: Request, index: int) -> CompletionDelivery:
        """Completion `index` at its start: empty, or with the tokens of `continue_from`."""
        text, known = None, message.continue_from
        prior, taken = (known.token_ids.tolist(), known.text_chars) if known else ((), None)
        if self._text is not None and (message.return_text or request.stop.strings):
            text = StopText(self._text.decode, request.stop.strings, request.stop.min_tokens, prior, taken)
        shown_from = None
        if text is not None and message.return_text:
            shown_from = len(text.text) if taken is None else taken
        marks = Marks(*(tuple(getattr(known, name) or ()) for name in Marks._fields)) if known else NO_MARKS
        columns = _prior_columns(known, message.logprobs)
        routing, forced = self._routing_column(message), _forced_tokens(request, known)
        return CompletionDelivery(index, columns, text, shown_from, routing, marks, forced)

    def _thought_rule(self, message: GenerateMessage) -> ThoughtRule | None:
        """The budget of thoughts, if the request has one."""
        budget, thinking = message.thinking_token_budget, message.thinking
        if not message.limits_thoughts or budget is None or thinking is None:
            return None
        return thinking.rule(budget, self._text)

    def _constraint(self, message: GenerateMessage, prepared: PreparedPrompt) -> Constraint:
        """The constraint of the request, with its budget of thoughts."""
        rule = self._thought_rule(message)
        if rule is None:
            return prepared.constraint
        prior = [] if message.continue_from is None else message.continue_from.token_ids.tolist()
        begin = rule.after(prepared.prompt.token_ids, self._model.eos_ids, prior)
        return BudgetedConstraint(prepared.constraint, begin)

    def _routing_column(self, message: GenerateMessage) -> RoutingColumn | None:
        """The column of expert records, if the request wants them."""
        if not message.return_routing or self._model.routing is None:
            return None
        prior = message.continue_from
        return RoutingColumn(self._model.routing, None if prior is None else prior.routing)

    def _check_prompt(self, prompt: np.ndarray, field: str, least: int = 1) -> None:
        if len(prompt) < least:
            raise BadRequest("the prompt is empty; send at least one token", field=field)
        if len(prompt) > self._limits.max_prompt_tokens:
            raise TooLong(
                f"the prompt has {len(prompt)} tokens; send at most {self._limits.max_prompt_tokens}", field=field
            )
        self._check_ids(prompt, field)

    def _check_vocabulary(self, message: GenerateMessage) -> None:
        if message.continue_from is not None:
            self._check_ids(message.continue_from.token_ids, "continue_from.token_ids")
            if message.continue_from.top_ids is not None and message.continue_from.tops:
                self._check_ids(message.continue_from.top_ids, "continue_from.top_ids")
        if message.prompt_logprob_token_ids is not None:
            self._check_ids(message.prompt_logprob_token_ids, "prompt_logprob_token_ids")
        self._check_ids(np.array(message.stop.token_ids, np.int64), "stop.token_ids")
        self._check_ids(np.array(list(message.sampling.logit_bias), np.int64), "sampling.logit_bias")
        for name in ("logprobs", "prompt_top_logprobs"):
            if (getattr(message, name) or 0) > self._model.vocab_size:
                raise BadRequest(f"the vocabulary has {self._model.vocab_size} tokens; lower '{name}'", field=name)
        if message.sampling.top_k > self._model.vocab_size:
            raise BadRequest(
                f"the vocabulary has {self._model.vocab_size} tokens; set 'top_k' to at most that, or 0",
                field="sampling.top_k",
            )

    def _check_constraint(self, constraint: ConstraintFields) -> None:
        if constraint.token_ids is not None:
            self._check_ids(constraint.token_ids, "constraint.token_ids")
        elif not self._constraints.grammars:
            raise BadRequest(
                f"this worker offers the constraint 'token_ids' only: {self._constraints.missing}", field="constraint"
            )
        if isinstance(constraint.after, tuple):
            self._check_ids(np.array(constraint.after), "constraint.after")
        elif constraint.after is not None and not self._constraints.grammars:
            raise BadRequest(
                f"this worker takes the marker as token ids only: {self._constraints.missing}", field="constraint.after"
            )

    def _check_ids(self, token_ids: np.ndarray, field: str) -> None:
        if len(token_ids) and int(token_ids.max()) >= self._model.vocab_size:
            raise BadRequest(
                f"token {int(token_ids.max())} is not in the model's vocabulary of {self._model.vocab_size}; "
                "use ids of this model's tokenizer",
                field=field,
            )

    def _check_text(self, message: GenerateMessage) -> None:
        if self._text is None:
            fields = {
                "prompt": isinstance(message.prompt, str),
                "messages": message.messages is not None,
                "return_text": message.return_text,
                "stop.strings": bool(message.stop.strings),
            }
            field = next(name for name, used in fields.items() if used)
            raise BadRequest("this model has no tokenizer; use token ids instead of text", field=field)
        if message.messages is not None and not self._text.has_chat_template:
            raise BadRequest("this model has no chat template; send a 'prompt' instead", field="messages")
        self._text.check_stop_strings(message.stop.strings)

    def _max_tokens(self, message: GenerateMessage, prompt_tokens: int, known: int) -> int:
        left = self._model.max_context_tokens - prompt_tokens
        if left < known or (left == known and message.max_tokens is None):
            only = "" if left < known else ", or set 'max_tokens' to " + (f"{known}" if known else "0 to score it")
            raise TooLong(
                f"the context of {self._model.max_context_tokens} tokens has no room after {prompt_tokens + known} "
                f"tokens; send a shorter prompt{only}",
                field="messages" if message.messages is not None else "prompt",
            )
        if message.max_tokens is None:
            if message.stop.min_tokens > left:
                raise BadRequest(
                    f"the context has room for {left} tokens; lower 'stop.min_tokens'", field="stop.min_tokens"
                )
            return left
        if message.max_tokens > left:
            raise TooLong(
                f"the prompt's {prompt_tokens} tokens leave room for {left} in the context of "
                f"{self._model.max_context_tokens}; set 'max_tokens' to at most that",
                field="max_tokens",
            )
        return message.max_tokens

    def _check_reply(self, message: GenerateMessage, prompt_tokens: int, scored: int, max_tokens: int) -> None:
        """Refuse a request whose reply could exceed `max_reply_bytes`."""
        shape = self._model.routing if message.return_routing else None
        consumed = max_tokens + (prompt_tokens if message.return_routing == "all" else 0)
        prompt_tops, chosen = message.prompt_top_logprobs, message.prompt_logprob_token_ids
        sizes = {
            "return_prompt_ids": 4 * prompt_tokens if message.return_prompt_ids else 0,
            "logprobs": message.n * max_tokens * message.logprobs * 8,
            "prompt_top_logprobs": 0 if prompt_tops is None else reply_bytes(scored, prompt_tops),
            "prompt_logprob_token_ids": 0 if chosen is None else 4 * scored * chosen.shape[-1],
            "return_routing": 0 if shape is None else message.n * consumed * shape.bytes_per_token,
        }
        most = self._limits.max_reply_bytes
        if sum(sizes.values()) > most:
            raise BadRequest(
                f"the reply's {' and '.join(name for name in sizes if sizes[name])} could take {sum(sizes.values())} "
                f"bytes, but a reply may take {most}; ask for fewer completions or tokens",
                field=max(sizes, key=sizes.__getitem__),
            )

    def _stop(self, message: GenerateMessage) -> StopParams:
        token_ids = self.stop_ids(message)
        if message.stop.min_tokens > 0 and len(token_ids) > MAX_STOP_IDS:
            raise BadRequest(
                f"with 'min_tokens' there may be at most {MAX_STOP_IDS} stop tokens with the eos ids; there are "
                f"{len(token_ids)}",
                field="stop.token_ids",
            )
        return StopParams(
            token_ids=token_ids,
            strings=tuple(dict.fromkeys(message.stop.strings)),
            min_tokens=message.stop.min_tokens,
            repetition=message.repetition_detection.rule,
        )

    def _delta_every(self, message: GenerateMessage) -> int:
        """Tokens between two deltas of the engine; 0: one delta at the end."""
        wanted = [message.stream_every] if message.stream == "tokens" else []
        if message.stop.strings:
            wanted.append(STOP_CHECK_EVERY)
        if message.return_routing:
            wanted.append(_ROUTING_EVERY)
        return min(wanted, default=0)


def _forced_tokens(request: Request, prior: ContinueFrom | None) -> ForcedTokens:
    """The forced tokens of a completion at its start."""
    known = [] if prior is None else prior.forced or []
    budgeted = request.constraint if isinstance(request.constraint, BudgetedConstraint) else None
    return ForcedTokens(known, None if budgeted is None else budgeted.begin.copy())


def _scored_tokens(message: GenerateMessage, prompt_tokens: int) -> int:
    """The number of tokens at the end of a prompt that are scored. Raises BadRequest."""
    scored, ids = message.prompt_logprobs_last or prompt_tokens, message.prompt_logprob_token_ids
    if scored > prompt_tokens:
        raise BadRequest(
            f"the prompt has {prompt_tokens} tokens; lower 'prompt_logprobs_last' to that, or remove it",
            field="prompt_logprobs_last",
        )
    if ids is not None and ids.ndim == 2 and len(ids) != scored:
        raise BadRequest(
            f"'prompt_logprob_token_ids' has {len(ids)} rows, and {scored} tokens are scored; send a row for each "
            "token, or one row of ids for all",
            field="prompt_logprob_token_ids",
        )
    return scored


def _prior_columns(prior: ContinueFrom | None, tops: int = 0) -> TokenColumns:
    """Columns that begin with the tokens of `continue_from`; NaN, id -1 and version -1 for what is absent."""
    columns = TokenColumns(tops)
    if prior is not None and len(prior.token_ids):
        unknown = np.full(len(prior.token_ids), np.nan, np.float32)
        known = {name: column for name in COLUMNS if (column := getattr(prior, name)) is not None}
        if not prior.tops:  # rows of no tokens
            known = {name: column for name, column in known.items() if name not in TOP_COLUMNS}
        runs = [(-1, len(prior.token_ids))] if prior.versions is None else prior.versions
        columns.extend({"logprobs": unknown, "raw_logprobs": unknown} | known, runs)
        if prior.drawn_logprobs is None:
            columns.mark_drawn_unknown()
    return columns


def _prior(prior: ContinueFrom | None) -> Prior:
    if prior is None:
        return NOTHING_BEFORE
    known = [version for version, _ in prior.versions or () if version >= 0]
    return Prior(prior.token_ids, min(known), max(known)) if known else Prior(prior.token_ids)


def _salt(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _sampling(sampling: Sampling, prior: ContinueFrom | None) -> SamplingParams:
    if prior is not None:
        seed = prior.seed
    else:
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
    return SamplingParams(**sampling.rules, logit_bias=tuple(sorted(sampling.logit_bias.items())), seed=seed)
