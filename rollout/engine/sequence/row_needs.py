"""The needs of a row beyond a plain forward and draw, as bits. A step serves the union of its rows' needs."""

from enum import IntFlag, auto

from rollout.constraints.matcher import ANYTHING
from rollout.engine.messages.requests import Request
from trainer_bridge.wire.sampling_rules import RULES, Part


class RowNeeds(IntFlag):
    """One bit for each part of a step that is left out when no row needs it."""

    NONE = 0
    GREEDY = auto()
    DRAW = auto()
    TRUNCATE = auto()
    PENALIZE = auto()
    BIAS = auto()
    MIN_TOKENS = auto()
    CONSTRAIN = auto()
    LOGITS = auto()  # a feature reads the logits
    VARIANT = auto()  # the forward runs with a variant of the weights

    @property
    def reshapes(self) -> bool:
        """True if the drawn distribution is not the plain one."""
        return bool(self & ~(RowNeeds.GREEDY | RowNeeds.DRAW | RowNeeds.LOGITS | RowNeeds.VARIANT))


#: Sampling that is inside a captured step.
PLAIN = RowNeeds.GREEDY | RowNeeds.DRAW
#: The need of a sampling rule, by its part of the draw. Every draw has a temperature.
NEEDS: dict[Part, RowNeeds] = {
    "temperature": RowNeeds.NONE,
    "truncation": RowNeeds.TRUNCATE,
    "penalty": RowNeeds.PENALIZE,
}


def needs_of(request: Request) -> RowNeeds:
    """The needs of a request's rows; features add theirs (`RequestFeature.enter`)."""
    sampling = request.sampling
    needs = RowNeeds.GREEDY if sampling.temperature == 0 else RowNeeds.DRAW
    for rule in RULES:
        if rule.changes(sampling):
            needs |= NEEDS[rule.part]
    if sampling.logit_bias:
        needs |= RowNeeds.BIAS
    if request.stop.min_tokens > 0 and request.stop.token_ids:
        needs |= RowNeeds.MIN_TOKENS
    if request.constraint is not ANYTHING:
        needs |= RowNeeds.CONSTRAIN
    return needs
