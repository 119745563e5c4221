"""The `constraint` and `thinking` of a `generate` message, and the constraint for the engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from rollout.constraints import regex_check
from rollout.constraints.compiler import ConstraintCompiler, ConstraintError, allow_list, available
from rollout.constraints.constraint_spec import ConstraintSpec
from rollout.constraints.matcher import Constraint
from rollout.constraints.thoughts import ThoughtRule
from rollout.extras import install
from rollout.service.requests.fields import Strict, TokenIds, token_id_array
from rollout.text.codec import TextCodec
from trainer_bridge.wire.errors import BadRequest

logger = logging.getLogger(__name__)

MAX_CHARS = 64 * 1024
MAX_REGEX_CHARS = regex_check.MAX_CHARS  # the time to compile may grow with the square of the length
MAX_CHOICES = 4096
MAX_MARKER = 64  # characters or token ids

Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]


def _schema(value: Any) -> Any:
    if not isinstance(value, (dict, str)):
        raise ValueError("send the schema as a map, or as JSON text")
    if isinstance(value, str) and not 1 <= len(value) <= MAX_CHARS:
        raise ValueError(f"send a schema of 1 to {MAX_CHARS} characters")
    return value


def marker_value(value: Any) -> Any:
    """A marker: a text, or token ids as a tuple. Raises ValueError."""
    if not isinstance(value, str):
        value = tuple(token_id_array(value).tolist())
    elif any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("it contains half of a surrogate pair, which is not a character; leave it out")
    if not 1 <= len(value) <= MAX_MARKER:
        raise ValueError(f"send a text of 1 to {MAX_MARKER} characters, or as many token ids")
    return value


class ConstraintFields(Strict):
    """The fields of `constraint`: exactly one source, and where it begins."""

    json_schema: Annotated[Any, BeforeValidator(_schema)] | None = None  # a map, or text
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)] | None = None
    grammar: Text | None = None
    choices: list[Text] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    token_ids: TokenIds | None = None
    after: Annotated[Any, BeforeValidator(marker_value)] | None = None  # text, or a tuple of token ids

    @model_validator(mode="after")
    def _exactly_one(self) -> ConstraintFields:
        sources = [name for name in type(self).model_fields if name != "after"]
        if sum(getattr(self, name) is not None for name in sources) != 1:
            raise ValueError(f"send exactly one of {', '.join(sources)}")
        if self.token_ids is not None and len(self.token_ids) == 0:
            raise ValueError("allow at least one token")
        if self.choices is not None and sum(map(len, self.choices)) > MAX_CHARS:
            raise ValueError(f"the choices have more than {MAX_CHARS} characters in total; shorten them")
        return self

    def to_spec(self) -> ConstraintSpec:
        """The constraint as plain data. Raises `RolloutError` if the schema is not JSON."""
        if self.regex is not None:
            return ConstraintSpec("regex", self.regex, self.after)
        if self.grammar is not None:
            return ConstraintSpec("grammar", self.grammar, self.after)
        if self.choices is not None:
            return ConstraintSpec("choices", tuple(self.choices), self.after)
        if self.token_ids is not None:
            return ConstraintSpec("token_ids", tuple(self.token_ids.tolist()), self.after)
        assert self.json_schema is not None
        return ConstraintSpec("json_schema", _schema_text(self.json_schema), self.after)


class Constraints:
    """Prepares constraints; errors are `RolloutError`.

    Without a compiler only allow lists are offered, and `missing` is the reason, with what to do about it.
    """

    def __init__(self, compiler: ConstraintCompiler | None, vocab: int, missing: str = "") -> None:
        self.missing = missing
        self._compiler = compiler
        self._vocab = vocab

    @property
    def grammars(self) -> bool:
        """True if other constraints than allow lists are offered."""
        return self._compiler is not None

    def prepare(
        self, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int], prompt: Sequence[int] = ()
    ) -> Constraint:
        """A constraint for the engine; arguments as for `ConstraintCompiler.compile`.

        It may take seconds. Called by one thread. Raises `RolloutError`.
        """
        try:
            return self._prepare(spec, stop_ids, prior, prompt)
        except ConstraintError as error:
            field = f"constraint.{error.field or spec.kind}"
            raise BadRequest(f"this constraint cannot be used: {error}", field=field) from error

    def _prepare(
        self, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int], prompt: Sequence[int]
    ) -> Constraint:
        if spec.kind == "token_ids":
            texts = None if self._compiler is None else self._compiler.texts
            return allow_list(spec, stop_ids, prior, self._vocab, prompt, texts)
        assert self._compiler is not None, "the request should have been refused"
        return self._compiler.compile(spec, stop_ids, prior, prompt)


def constraints_for(text: TextCodec | None, vocab: int, compile_s: float, eos_ids: tuple[int, ...] = ()) -> Constraints:
    """The constraints for a model of `vocab` output tokens that this machine and tokenizer support."""
    if text is None:
        return Constraints(None, vocab, "the model has no tokenizer")
    if not available():
        missing = f"xgrammar is not installed where the worker runs: {install('worker')}; then start the worker again"
        return Constraints(None, vocab, missing)
    try:
        return Constraints(ConstraintCompiler(text.tokenizer, vocab, compile_s, eos_ids), vocab)
    # The compiler does not support every tokenizer. The worker serves without it; see `capabilities`.
    except (ImportError, ValueError, RuntimeError) as error:
        logger.warning("this tokenizer supports no constraint except 'token_ids'", extra={"why": str(error)})
        return Constraints(None, vocab, f"xgrammar cannot use the model's tokenizer ({error!s:.200})")


def _schema_text(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, str):
        return schema
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRequest(
            f"the schema cannot be written as JSON ({error}); send JSON values only", field="constraint.json_schema"
        ) from error
    if len(text) > MAX_CHARS:
        raise BadRequest(f"the schema has more than {MAX_CHARS} characters; shorten it", field="constraint.json_schema")
    return text


class ThinkingFields(Strict):
    """The fields of `thinking`, each a text or a tuple of token ids."""

    start: Annotated[Any, BeforeValidator(marker_value)]
    end: Annotated[Any, BeforeValidator(marker_value)]

    def rule(self, budget: int, text: TextCodec | None) -> ThoughtRule:
        """The rule for the engine; `text`: the model's tokenizer. Raises `RolloutError`."""
        start, end = self._ids("start", text), self._ids("end", text)
        if start == end:
            raise BadRequest(
                "'thinking.end' has the same tokens as 'thinking.start'; send the tokens that end a thought",
                field="thinking.end",
            )
        return ThoughtRule(budget, start, end)

    def _ids(self, name: str, text: TextCodec | None) -> tuple[int, ...]:
        mark, field = getattr(self, name), f"thinking.{name}"
        if isinstance(mark, str):
            if text is None:
                raise BadRequest("this model has no tokenizer; send token ids", field=field)
            mark = tuple(text.encode_rendered(mark).tolist())
            if not mark:
                raise BadRequest("the tokenizer makes no tokens of this text; send token ids", field=field)
        return mark
