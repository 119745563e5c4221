"""The scores of a prompt's tokens: log-probs, ranks, the likeliest tokens at each position.

Rows belong to all tokens of a prompt, or to the last ones that a request asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer_bridge.wire.short_repr import short_fields


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PromptTops:
    """Row i belongs to scored token i. The rows of the prompt's first token and of a cut prompt are unknown.

    A rank is 1 plus the number of likelier tokens; 0 if unknown. The k likeliest tokens come likeliest first, with
    their log-probs at temperature 1; -1 and NaN if unknown.
    """

    ranks: np.ndarray  # int32 [scored tokens]
    ids: np.ndarray  # int32 [scored tokens, k]
    logprobs: np.ndarray  # float32 [scored tokens, k]

    def __repr__(self) -> str:
        return f"PromptTops({short_fields(self)})"

    @classmethod
    def unknown(cls, tokens: int, k: int) -> PromptTops:
        """Rows for a number of tokens, all unknown."""
        return cls(
            np.zeros(tokens, np.int32), np.full((tokens, k), -1, np.int32), np.full((tokens, k), np.nan, np.float32)
        )

    def forget(self) -> None:
        """Make all rows unknown."""
        self.ranks[:] = 0
        self.ids[:] = -1
        self.logprobs[:] = np.nan

    def copy(self) -> PromptTops:
        """The present rows, without later rows."""
        return PromptTops(self.ranks.copy(), self.ids.copy(), self.logprobs.copy())

    def fields(self) -> dict[str, np.ndarray]:
        return {"prompt_ranks": self.ranks, "prompt_top_ids": self.ids, "prompt_top_logprobs": self.logprobs}


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class PromptScores:
    """Base of events, chunks and results with the scores of a prompt: those that were asked for, else None.

    A stream has them in the first chunk of completion 0.
    """

    #: float32 [scored tokens]: log-prob of each token, at temperature 1; NaN for the first one, and if unknown
    prompt_logprobs: np.ndarray | None = None
    #: Ranks of the same tokens, and the k likeliest tokens at each position; with `prompt_top_logprobs=k`
    prompt_tops: PromptTops | None = None
    prompt_version: int | None = None  # weights version of all scores; None if no version is known
    #: float32 [scored tokens, k]: log-probs of `prompt_logprob_token_ids` at each position; -inf: impossible
    prompt_chosen_logprobs: np.ndarray | None = None
    prompt_entropy: np.ndarray | None = None  # float32 [scored tokens], nats: entropy at each position

    def scores(self) -> dict[str, Any]:
        """The scores by the names above."""
        return {name: getattr(self, name) for name in PromptScores.__slots__}

    def score_fields(self) -> dict[str, Any]:
        """The fields of a reply for the scores that are there."""
        fields = {name: value for name, value in self.scores().items() if value is not None}
        tops = fields.pop("prompt_tops", None)
        return fields if tops is None else fields | tops.fields()

    @property
    def all_known(self) -> bool:
        """True if all log-probs are known, except for the prompt's first token, which has none."""
        known = self.prompt_logprobs
        if known is None or np.isnan(known[1:]).any():
            return False
        return len(known) > 1 or self.prompt_version is not None


def reply_bytes(tokens: int, k: int) -> int:
    """Bytes of a prompt's fields in a reply."""
    return tokens * (4 + 8 * k)


#: The fields of a reply that tell of a prompt's tokens.
PROMPT_FIELDS = (
    *("prompt_logprobs", "prompt_version", "prompt_ranks", "prompt_top_ids", "prompt_top_logprobs"),
    *("prompt_chosen_logprobs", "prompt_entropy"),
)
