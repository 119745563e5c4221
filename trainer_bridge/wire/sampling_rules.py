"""The sampling rules: numbers in a request that change how its tokens are drawn. Each rule is declared once, here.

A field of `SamplingRules` is the declaration of a rule. These are made from it:

    argument of the client, and its spelling check          `SamplingFields` below, `client/generate_request.py`
    flag of `rollout generate`                               `rollout/cli/generate.py`
    field of the message, its default and its range          `rollout/service/requests/schema.py`
    field of the engine's `SamplingParams`                   `rollout/engine/messages/requests.py`
    part of the step that a row with this rule needs         `RowNeeds` in `rollout/engine/upload.py`
    column of the row state, and what a row writes there     `rollout/engine/step/row_state.py`, `pack.py`
    field `<name>_S` of `rollout_kernels.SamplingRows`       `rollout/engine/step/sampler.py`

The torch twin and the Triton kernels read that field: only they apply a rule. `top_k` alone has a special case outside
them: the client takes -1 for off, the service bounds it by the vocabulary, and the sampler asks its column whether any
row of a step truncates.

`seed` and `logit_bias` are no rules. A seed belongs to a completion and has no value that means off. A logit bias is a
list with its own limits and its own tensors in the row state. `stop.min_tokens` and its list of stop tokens belong to
`stop`, and the token counts of the penalties are state, not settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from trainer_bridge.wire.declarations import INT32_MAX, Declared, declared, entries_of

MIN_TEMPERATURE = 1e-3

#: The part of the draw that a rule belongs to. A step leaves a part out when no row needs it.
Part = Literal["temperature", "truncation", "penalty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRule(Declared):
    """The declaration of one rule. Its values are integers or floats, as its default is, which changes nothing."""

    part: Part
    least: float
    most: float
    off: float | None = None  # value in the row state in place of the default; None: the default

    @property
    def kind(self) -> type[int] | type[float]:
        """`int` or `float`."""
        return int if isinstance(self.default, int) else float

    def changes(self, sampling: SamplingRules) -> bool:
        """True if this rule changes the draw. Truncation never drops the best token, which a greedy row takes."""
        if self.part == "truncation" and sampling.temperature == 0:
            return False
        return bool(getattr(sampling, self.name) != self.default)

    def row_value(self, sampling: SamplingRules) -> float:
        if self.changes(sampling):
            value: float = getattr(sampling, self.name)
            return value
        return self.default if self.off is None else self.off


def rule(default: float, part: Part, meaning: str, *, least: float, most: float, **more: Any) -> Any:
    """A field of `SamplingRules`. The arguments are fields of `SamplingRule`."""
    return declared(default, meaning, part=part, least=least, most=most, **more)


def _check_temperature(value: Any) -> None:
    if type(value) in (int, float) and 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"use 0 for greedy, or at least {MIN_TEMPERATURE}")


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """The table: a field for each rule. New rules go to the end."""

    temperature: float = rule(
        1.0,
        "temperature",
        f"divide the logits by this; 0 is greedy, else at least {MIN_TEMPERATURE}",
        least=0,
        most=100,
        check=_check_temperature,
    )
    # Cumulative sums round: with top-p off the bound is infinite, so that no tail is cut.
    top_p: float = rule(
        1.0,
        "truncation",
        "keep the likeliest tokens whose probabilities add up to this",
        least=0,
        above_least=True,
        most=1,
        off=float("inf"),
    )
    top_k: int = rule(
        0, "truncation", "keep this many of the likeliest tokens; 0 keeps all", least=0, most=INT32_MAX, off=INT32_MAX
    )
    min_p: float = rule(
        0.0, "truncation", "keep tokens with at least this share of the probability of the likeliest", least=0, most=1
    )
    repetition_penalty: float = rule(
        1.0,
        "penalty",
        "divide the positive logits of tokens in prompt and completion by this, multiply the negative ones",
        least=0.01,
        most=100,
    )
    presence_penalty: float = rule(
        0.0, "penalty", "subtract this from the logits of tokens in the completion", least=-100, most=100
    )
    frequency_penalty: float = rule(
        0.0,
        "penalty",
        "subtract this from a token's logit for each occurrence in the completion",
        least=-100,
        most=100,
    )


class SamplingFields(TypedDict, total=False):
    """The rules as arguments of the client's `generate`, for type checkers: the same names as in `SamplingRules`."""

    temperature: float
    top_p: float
    top_k: int  # 0 or -1: off
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


RULES = entries_of(SamplingRules, SamplingRule)
