"""Tokens that a request names at positions of its prompt, to have their log-probs: vLLM's and SGLang's forms."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rollout.gateway.http.http_errors import bad_request
from trainer_bridge.client.results import GenerateResult

_NONE = -1  # fills rows up
#: Ids of all rows, filled up: a short body may ask for any number, and a worker cuts off what sends it twice its
#: default limit of 64 MiB.
MOST_IDS = 1 << 24


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens for the last tokens of a prompt: int32 [K] for each of `rows` tokens, or [rows, K]; -1: no token."""

    rows: int
    ids: np.ndarray

    @classmethod
    def of_vllm(cls, ids: list[int] | list[list[int]], start: int, prompt_tokens: int, place: str) -> ChosenTokens:
        """Rows of `prompt_logprob_token_ids`, one for each token after token `start`. Raises `HttpError`."""
        count, field = prompt_tokens - 1 - start, f"{place}prompt_logprob_token_ids"
        if count < 1:
            raise bad_request(
                f"the prompt has {prompt_tokens} tokens, and none is scored after token {start}; lower it",
                f"{place}prompt_logprob_start",
            )
        rows = [row for row in ids if isinstance(row, list)]
        if ids and not rows:
            return cls(count, np.array(ids, np.int32))
        most = max(map(len, rows), default=0)
        if len(rows) != count or not most:
            raise bad_request(
                f"send a row of tokens for each of the {count} tokens after token {start}, or one list for all", field
            )
        if count * most > MOST_IDS:
            raise bad_request(
                f"{count} rows of up to {most} tokens are more than {MOST_IDS} tokens; send shorter rows", field
            )
        filled = np.full((count, most), _NONE, np.int32)
        for row, given in zip(filled, rows, strict=True):
            row[: len(given)] = given
        return cls(count, filled)

    def worker_ids(self, scored: int) -> np.ndarray:
        """The worker's ids if it scores the last `scored` tokens of the prompt, at least `rows`."""
        ids = np.where(self.ids == _NONE, 0, self.ids)
        return ids if ids.ndim == 1 else np.pad(ids, ((scored - self.rows, 0), (0, 0)))

    def npy(self, result: GenerateResult) -> str | None:
        """Base64 of a .npy file, as vLLM answers: float32 [rows, K], -inf for no token. None if it was cut short."""
        scores = result.prompt_chosen_logprobs
        assert scores is not None, "they were asked for"
        scores = np.where(self.ids == _NONE, np.float32(-np.inf), scores[-self.rows :])
        if np.isnan(scores).any():
            return None
        file = io.BytesIO()
        np.save(file, scores.astype(np.float32), allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


def positions_of_sglang(start: int, prompt: list[int], field: str) -> int:
    """The number of prompt tokens that SGLang's `logprob_start_len` selects. Raises `HttpError`."""
    if start >= len(prompt):
        raise bad_request(f"the prompt has {len(prompt)} tokens; name a token from 0 to {len(prompt) - 1}", field)
    return len(prompt) - start


def rows_of_sglang(
    ids: list[int], scores: np.ndarray, shown: Callable[[float], float | None]
) -> list[list[list[float | None]] | None]:
    """`[log-prob, token, null]` of each named token, by position; null where nothing is known."""
    known = (~np.isnan(scores).any(axis=1)).tolist()
    return [
        [[shown(value), token, None] for value, token in zip(row, ids, strict=True)] if each else None
        for row, each in zip(scores.tolist(), known, strict=True)
    ]
