"""Facts about a prompt's tokens besides their log-probs: their ranks, and the likeliest tokens at each position.

Rows belong to all tokens of a prompt, or to the last ones that a request asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        """The present rows; later ones are not seen in them."""
        return PromptTops(self.ranks.copy(), self.ids.copy(), self.logprobs.copy())

    def fields(self) -> dict[str, np.ndarray]:
        return {"prompt_ranks": self.ranks, "prompt_top_ids": self.ids, "prompt_top_logprobs": self.logprobs}


def reply_bytes(tokens: int, k: int) -> int:
    """Bytes of a prompt's fields in a reply."""
    return tokens * (4 + 8 * k)


#: The fields of a reply that tell of a prompt's tokens.
PROMPT_FIELDS = (
    *("prompt_logprobs", "prompt_version", "prompt_ranks", "prompt_top_ids", "prompt_top_logprobs"),
    *("prompt_chosen_logprobs", "prompt_entropy"),
)
#: The fields of a request that ask for scores of its prompt, and the one that selects tokens.
SCORE_FIELDS = ("prompt_logprobs", "prompt_top_logprobs", "prompt_logprob_token_ids", "prompt_entropy")
SCORED_TOKENS_FIELD = "prompt_logprobs_last"
