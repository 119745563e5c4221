"""The scores of one prompt, as they arrive chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_service import PromptScoreFields
from trainer_bridge.wire.prompt_tops import PromptTops


@dataclass(slots=True)
class PromptScoreRows:
    """The known scores of a prompt. N: scored tokens.

    Row i belongs to token `scored_from` + i; unknown rows are NaN.
    """

    logprobs: np.ndarray  # float32 [N]
    tops: PromptTops | None  # top tokens of the same tokens
    chosen: np.ndarray  # float32 [N, K]: log-probs of the tokens that the request names
    entropy: np.ndarray | None  # float32 [N], nats
    version: int | None = None  # weights version of these scores; None if no version is known

    @classmethod
    def unknown(cls, request: Request, version: int | None = None) -> PromptScoreRows:
        """Rows for the scores that a request asks for, all unknown."""
        rows = len(request.prompt) - request.scored_from
        return cls(
            np.full(rows, np.nan, np.float32),
            None if request.prompt_tops is None else PromptTops.unknown(rows, request.prompt_tops),
            np.full((rows, request.prompt_chosen.shape[-1]), np.nan, np.float32),
            np.full(rows, np.nan, np.float32) if request.prompt_entropy else None,
            version,
        )

    def event_fields(self) -> PromptScoreFields:
        """The fields of an event, with copies of the present values: later chunks still write to these."""
        return {
            "prompt_logprobs": self.logprobs.copy(),
            "prompt_tops": None if self.tops is None else self.tops.copy(),
            "prompt_chosen_logprobs": self.chosen.copy() if self.chosen.shape[1] else None,
            "prompt_entropy": None if self.entropy is None else self.entropy.copy(),
            "prompt_version": self.version,
        }
