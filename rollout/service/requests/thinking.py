"""The `thinking` of a `generate` message: the marks between which a budget counts tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from rollout.constraints.thoughts import ThoughtRule
from rollout.service.requests.constraint import marker_value
from rollout.service.text.codec import TextCodec
from trainer_bridge.wire.errors import BadRequest


class ThinkingFields(BaseModel):
    """The fields of `thinking`, each a text or a tuple of token ids."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)

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
