"""The `constraint` of a `generate` message, and the constraint for the engine."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rollout.constraints import regex_check
from rollout.constraints.compiler import ConstraintCompiler, ConstraintError, allow_list, available
from rollout.constraints.matcher import Constraint
from rollout.constraints.spec import ConstraintSpec
from rollout.service.errors import bad_request
from rollout.service.requests.fields import TokenIds
from rollout.service.text.codec import TextCodec

logger = logging.getLogger(__name__)

MAX_CHARS = 64 * 1024
MAX_REGEX_CHARS = regex_check.MAX_CHARS  # the time to compile may grow with the square of the length
MAX_CHOICES = 4096

Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]


def _schema(value: Any) -> Any:
    if not isinstance(value, (dict, str)):
        raise ValueError("send the schema as a map, or as JSON text")
    if isinstance(value, str) and not 1 <= len(value) <= MAX_CHARS:
        raise ValueError(f"send a schema of 1 to {MAX_CHARS} characters")
    return value


class ConstraintFields(BaseModel):
    """The fields of `constraint`; exactly one of them is set."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)

    json_schema: Annotated[Any, BeforeValidator(_schema)] | None = None  # a map, or text
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)] | None = None
    grammar: Text | None = None
    choices: list[Text] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    token_ids: TokenIds | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> ConstraintFields:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"send exactly one of {', '.join(type(self).model_fields)}")
        if self.token_ids is not None and len(self.token_ids) == 0:
            raise ValueError("allow at least one token")
        if self.choices is not None and sum(map(len, self.choices)) > MAX_CHARS:
            raise ValueError(f"the choices have more than {MAX_CHARS} characters in total; shorten them")
        return self

    def to_spec(self) -> ConstraintSpec:
        """The constraint as plain data. Raises `ServiceError` if the schema is not JSON."""
        if self.regex is not None:
            return ConstraintSpec("regex", self.regex)
        if self.grammar is not None:
            return ConstraintSpec("grammar", self.grammar)
        if self.choices is not None:
            return ConstraintSpec("choices", tuple(self.choices))
        if self.token_ids is not None:
            return ConstraintSpec("token_ids", tuple(self.token_ids.tolist()))
        assert self.json_schema is not None
        return ConstraintSpec("json_schema", _schema_text(self.json_schema))


class Constraints:
    """Prepares constraints; errors are `ServiceError`. Without a compiler only allow lists are offered."""

    def __init__(self, compiler: ConstraintCompiler | None, vocab: int) -> None:
        self._compiler = compiler
        self._vocab = vocab

    @property
    def grammars(self) -> bool:
        """True if other constraints than allow lists are offered."""
        return self._compiler is not None

    def prepare(self, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int]) -> Constraint:
        """A constraint for the engine. It may take seconds. Called by one thread. Raises `ServiceError`."""
        try:
            return self._prepare(spec, stop_ids, prior)
        except ConstraintError as error:
            raise bad_request(f"this constraint cannot be used: {error}", f"constraint.{spec.kind}") from error

    def _prepare(self, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int]) -> Constraint:
        if spec.kind == "token_ids":
            return allow_list(spec, prior, self._vocab)
        assert self._compiler is not None, "the request should have been refused"
        return self._compiler.compile(spec, stop_ids, prior)


def constraints_for(text: TextCodec | None, vocab: int, compile_s: float) -> Constraints:
    """The constraints for a model of `vocab` output tokens, as far as this machine and tokenizer support them."""
    if text is None or not available():
        return Constraints(None, vocab)
    try:
        return Constraints(ConstraintCompiler(text.tokenizer, vocab, compile_s), vocab)
    # The compiler does not support every tokenizer. The worker serves without it; see `capabilities`.
    except (ImportError, ValueError, RuntimeError) as error:
        logger.warning("this tokenizer supports no constraint except 'token_ids'", extra={"why": str(error)})
        return Constraints(None, vocab)


def _schema_text(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, str):
        return schema
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise bad_request(
            f"the schema cannot be written as JSON ({error}); send JSON values only", "constraint.json_schema"
        ) from error
    if len(text) > MAX_CHARS:
        raise bad_request(f"the schema has more than {MAX_CHARS} characters; shorten it", "constraint.json_schema")
    return text
