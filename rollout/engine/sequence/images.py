"""Images of a step, as plain data: those that are encoded first, and the tokens of spans that are images.

An encoding has a place in the embedding buffer for each of its tokens (`kv/encodings`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.engine.messages import Pixels


@dataclass(frozen=True, eq=False, slots=True)
class Encode:
    """An image that a step encodes before its forward."""

    pixels: Pixels
    places: np.ndarray  # int64 [tokens]: where its embeddings go


@dataclass(frozen=True, eq=False, slots=True)
class ImageTokens:
    """Neighbouring tokens of a span that are one image, or a part of one."""

    first: int  # token of the span
    places: np.ndarray  # int64 [tokens]: where their embeddings are
