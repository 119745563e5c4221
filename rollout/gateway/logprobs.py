"""Log-probs in the formats of OpenAI and vLLM.

The log-prob of a sampled token, by the setting `--logprobs`:

    policy      log-softmax of logits / temperature, without truncation and penalties: what a trainer recomputes
    processed   under the distribution that the token was drawn from (vLLM's `processed_logprobs`)
    raw         log-softmax of the logits (vLLM's `raw_logprobs`)

`top_logprobs` are log-probs at temperature 1 in every mode, the sampled token among them. All numbers are finite: a
number that is unknown ends the request with an error.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollout.gateway.errors import HttpError
from rollout.gateway.json_text import Json, json_text
from rollout.gateway.settings import LogprobMode
from trainer_bridge.client.results import Completion, GenerateResult


@dataclass(frozen=True, slots=True)
class LogprobFormat:
    """How the log-probs of an answer look. `top`: likeliest tokens at each position. `name` shows a token."""

    mode: LogprobMode
    top: int
    name: Callable[[int], str]
    by_id: bool  # tokens are shown as `token_id:N`

    def sampled(self, part: Completion) -> list[float]:
        """The log-prob of each token."""
        match self.mode:
            case "raw":
                values = part.raw_logprobs
            case "processed":
                values = part.logprobs if part.drawn_logprobs is None else part.drawn_logprobs
            case "policy":
                values = part.logprobs
        found: list[float] = values.tolist()
        if not all(map(math.isfinite, found)):
            raise HttpError(500, "the worker has no log-prob for a token of this completion; send the request again")
        return found

    def content(self, part: Completion) -> dict[str, Any]:
        """Log-probs as chat and generate answers have them: an entry for each token."""
        rows = zip(part.token_ids.tolist(), self.sampled(part), self._tops(part), strict=True)
        entries = [
            f'{{{self._entry(token, value)},"top_logprobs":[{",".join(self._likeliest(top))}]}}'
            for token, value, top in rows
        ]
        return {"content": Json(f"[{','.join(entries)}]")}

    def _likeliest(self, top: dict[int, float]) -> list[str]:
        return [f"{{{self._entry(token, value)}}}" for token, value in top.items()]

    def columns(self, part: Completion, offset: int = 0) -> dict[str, Any]:
        """Log-probs as answers of `/v1/completions` have them. `offset`: characters of text before this part."""
        ids = part.token_ids.tolist()
        tokens = [self.shown(token) for token in ids]
        tops = [{self.shown(other): logprob for other, logprob in top.items()} for top in self._tops(part)]
        offsets = []
        for token in ids:
            offsets.append(offset)
            offset += len(self.name(token))
        return {"tokens": tokens, "token_logprobs": self.sampled(part), "top_logprobs": tops, "text_offset": offsets}

    def prompt_columns(self, token_ids: list[int], result: GenerateResult) -> dict[str, Any]:
        """`columns` of a prompt; the first token has none."""
        known = _prompt_tokens(token_ids, result, self.top)
        values = [None if each is None else each.logprob for each in known]
        offsets, offset = [], 0
        for token in token_ids:
            offsets.append(offset)
            offset += len(self.name(token))
        tops = [
            None if each is None else {self.shown(token): logprob for token, logprob in each.likeliest.items()}
            for each in known
        ]
        tokens = [self.shown(token) for token in token_ids]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def shown(self, token: int) -> str:
        """A token's name in the answer."""
        return f"token_id:{token}" if self.by_id else self.name(token)

    def _entry(self, token: int, logprob: float) -> str:
        """The fields of a token in JSON."""
        if self.by_id:
            return f'"token":"token_id:{token}","token_id":{token},"bytes":null,"logprob":{logprob}'
        return f'{_named(self.name(token))},"token_id":{token},"logprob":{logprob}'

    def _tops(self, part: Completion) -> list[dict[int, float]]:
        """For each position the likeliest tokens and the sampled one, likeliest first; empty without `top`."""
        if not self.top:
            return [{} for _ in range(len(part))]
        if part.top_ids is None or part.top_logprobs is None:
            raise HttpError(500, "the worker sent no likeliest tokens; send the request again")
        found = []
        rows = zip(part.token_ids.tolist(), part.raw_logprobs, part.top_ids.tolist(), part.top_logprobs, strict=True)
        for token, own, ids, values in rows:
            top = {other: float(value) for other, value in zip(ids, values, strict=True)}
            top.setdefault(token, float(own))
            found.append(top)
        return found


@lru_cache(4096)
def _named(text: str) -> str:
    return f'"token":{json_text(text)},"bytes":{list(text.encode())}'


@dataclass(frozen=True, slots=True)
class PromptToken:
    """What is known of a token of a prompt."""

    logprob: float
    rank: int | None  # None: not asked for
    likeliest: dict[int, float]  # the likeliest tokens at its position, likeliest first; then the token itself

    def entry(self, token: int, name: Callable[[int], str]) -> dict[str, Any]:
        """VLLM's form: the token itself first, then the likeliest ones; equal ranks in the worker's order."""
        ranks = {each: place for place, each in enumerate(self.likeliest, start=1)} | {token: self.rank}
        return {
            str(each): {"logprob": logprob, "rank": ranks[each], "decoded_token": name(each)}
            for each, logprob in ({token: self.logprob} | self.likeliest).items()
        }


def _prompt_tokens(token_ids: list[int], result: GenerateResult, most: int) -> list[PromptToken | None]:
    """What a result has of each token of its prompt, with at most `most` of the likeliest ones.

    None for the first token, and for tokens that were not computed because the request was ended before.
    """
    own, tops = result.prompt_logprobs, result.prompt_tops
    assert own is not None, "it was asked for"
    likeliest: list[dict[int, float]] = [{}] * len(token_ids)
    if tops is not None:
        rows = zip(tops.ids[:, :most].tolist(), tops.logprobs[:, :most].tolist(), strict=True)
        likeliest = [dict(zip(*row, strict=True)) for row in rows]
    ranks: list[int | None] = [None] * len(token_ids) if tops is None else tops.ranks.tolist()
    return [
        PromptToken(value, rank, {**top, token: value}) if math.isfinite(value) else None
        for token, value, rank, top in zip(token_ids, own.tolist(), ranks, likeliest, strict=True)
    ]


async def prompt_entries(token_ids: list[int], result: GenerateResult, most: int, name: Callable[[int], str]) -> Json:
    """Log-probs of a prompt as vLLM has them: null, or `{"id": {"logprob", "rank", "decoded_token"}, ...}`.

    Made in a thread: of a long prompt they are millions of numbers, and the event loop serves others meanwhile.
    """

    def text() -> str:
        found = zip(token_ids, _prompt_tokens(token_ids, result, most), strict=True)
        return json_text([None if known is None else known.entry(token, name) for token, known in found])

    return Json(await asyncio.to_thread(text))
