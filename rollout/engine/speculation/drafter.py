"""The joint for drafters: what the scheduler asks them, and how each is made from the settings.

A drafter is asked for a path: the tokens that it expects after the committed tokens of a completion. A verify step
takes its drafts from the path, at the position where the row is when the step runs. A wrong path costs time and changes
no token.

What guesses on the device is asked for nothing: the host learns its guesses with the tokens of their step
(`step/head_drafts.py`, `step/ngram_drafts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Literal, Protocol

import numpy as np

from rollout.config import EngineSettings
from rollout.engine.speculation.suffix_drafter import SuffixDrafter
from rollout.models.decoder import Decoder
from rollout.models.language_model import LanguageModel


class Drafter(Protocol):
    """Guesses tokens. `key` is one completion; only the loop calls it."""

    def path(self, key: Hashable, prompt: np.ndarray, tokens: Seq[int], want: int, version: int = 0) -> list[int]:
        """At most `want` token ids expected after prompt (int32) and committed tokens; they may be any of the model's.

        From call to call with one key, `tokens` only grow. `version` is the weights version of the newest token.
        """

    def source(self, key: Hashable) -> int | None:
        """The version of the weights that the last path of this completion comes from; None if from no weights."""

    def ended(self, key: Hashable) -> None:
        """Nothing is added to this completion any more; its key may be unknown."""


#: What guesses on the device: a draft model, or n-grams of the row.
Guesser = Literal["heads", "ngram"]

#: By name: makes a drafter that keeps at most this number of tokens of completions.
DRAFTERS: dict[str, Callable[[int], Drafter]] = {"suffix": SuffixDrafter}


def guesser_of(settings: EngineSettings, model: LanguageModel) -> Guesser | None:
    """What guesses on the device for an engine, if anything does."""
    if settings.speculation in ("heads", "auto") and isinstance(model, Decoder) and model.draft is not None:
        return "heads"
    return "ngram" if settings.speculation in ("ngram", "auto") else None
