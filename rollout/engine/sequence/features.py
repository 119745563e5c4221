"""What a row needs beyond a plain forward and draw, as bits. A step does the union of what its rows need."""

from __future__ import annotations

from enum import IntFlag, auto

from rollout.engine.messages.requests import Request
from trainer_bridge.wire.sampling_rules import RULES, Part


class Feature(IntFlag):
    """One bit for each part of a step that is left out when no row needs it."""

    NONE = 0
    GREEDY = auto()
    DRAW = auto()
    TRUNCATE = auto()
    PENALIZE = auto()
    BIAS = auto()
    MIN_TOKENS = auto()
    CONSTRAIN = auto()
    TOP = auto()
    ADAPTER = auto()

    @property
    def reshapes(self) -> bool:
        """True if the drawn distribution is not the plain one."""
        return bool(self & ~(Feature.GREEDY | Feature.DRAW | Feature.TOP | Feature.ADAPTER))


#: What a worker can lack: a `StepFeature` serves it.
OPTIONAL = Feature.ADAPTER
#: Sampling that is inside a captured step.
PLAIN = Feature.GREEDY | Feature.DRAW
#: The feature that a sampling rule needs, by its part of the draw. Every draw has a temperature.
FEATURES: dict[Part, Feature] = {
    "temperature": Feature.NONE,
    "truncation": Feature.TRUNCATE,
    "penalty": Feature.PENALIZE,
}


def features_of(request: Request) -> Feature:
    """What the rows of a request need."""
    sampling = request.sampling
    features = Feature.GREEDY if sampling.temperature == 0 else Feature.DRAW
    for rule in RULES:
        if rule.changes(sampling):
            features |= FEATURES[rule.part]
    if sampling.logit_bias:
        features |= Feature.BIAS
    if request.stop.min_tokens > 0 and request.stop.token_ids:
        features |= Feature.MIN_TOKENS
    if request.constraint is not None:
        features |= Feature.CONSTRAIN
    if request.top_logprobs:
        features |= Feature.TOP
    if request.adapter is not None:
        features |= Feature.ADAPTER
    return features
