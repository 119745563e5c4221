"""Log-probs in the formats of OpenAI and vLLM.

The log-prob of a sampled token, by the setting `--logprobs`:

    policy      log-softmax of logits / temperature, without truncation and penalties: what a trainer recomputes
    processed   under the distribution that the token was drawn from (vLLM's `processed_logprobs`)
    raw         log-softmax of the logits (vLLM's `raw_logprobs`)

`top_logprobs` are log-probs at temperature 1 in every mode, the sampled token among them. A token whose probability is
0 has -9999, as in vLLM: JSON has no infinite numbers. A number that the worker does not know is null.
"""

from __future__ import annotations

import asyncio
import codecs
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from rollout.config.gateway_settings import LogprobMode
from rollout_gateway.http.json_text import Json, json_text
from trainer_bridge.client.results import Completion, GenerateResult

_Utf8 = codecs.getincrementaldecoder("utf-8")
_NEVER = -9999.0  # the log-prob of a token that cannot be drawn


def sampled(part: Completion, mode: LogprobMode) -> np.ndarray:
    """The log-prob of each token, float32 [tokens]."""
    match mode:
        case "raw":
            return part.raw_logprobs
        case "processed":
            return part.logprobs if part.drawn_logprobs is None else part.drawn_logprobs
        case "policy":
            return part.logprobs


@dataclass(frozen=True, slots=True)
class LogprobFormat:
    """The form of an answer's log-probs. `top`: likeliest tokens at each position. `token_bytes`: a token's bytes."""

    mode: LogprobMode
    top: int
    token_bytes: Callable[[int], bytes]
    by_id: bool  # tokens are shown as `token_id:N`

    def sampled(self, part: Completion) -> list[float | None]:
        """The log-prob of each token."""
        return [finite(value) for value in sampled(part, self.mode).tolist()]

    def content(self, part: Completion) -> dict[str, Any]:
        """Log-probs as chat and generate answers have them: an entry for each token."""
        rows = zip(part.token_ids.tolist(), self.sampled(part), self._tops(part), strict=True)
        entries = [
            f'{{{self._entry(token, value)},"top_logprobs":[{",".join(self._entries(top))}]}}'
            for token, value, top in rows
        ]
        return {"content": Json(f"[{','.join(entries)}]")}

    def _entries(self, top: Mapping[int, float | None]) -> list[str]:
        return [f"{{{self._entry(token, value)}}}" for token, value in top.items()]

    def columns(self, part: Completion, offsets: TextOffsets) -> dict[str, Any]:
        """Log-probs as answers of `/v1/completions` have them. `offsets` goes on with the tokens of this part."""
        ids = part.token_ids.tolist()
        tops = [self._named(top, token) for token, top in zip(ids, self._tops(part), strict=True)]
        return {
            "tokens": [self.shown(token) for token in ids],
            "token_logprobs": self.sampled(part),
            "top_logprobs": tops,
            "text_offset": offsets.of(map(self.token_bytes, ids)),
        }

    def prompt_columns(self, token_ids: list[int], result: GenerateResult) -> dict[str, Any]:
        """`columns` of a prompt; its first token has no log-prob."""
        known = _prompt_tokens(token_ids, result, self.top)
        return {
            "tokens": [self.shown(token) for token in token_ids],
            "token_logprobs": [None if each is None else finite(each.logprob) for each in known],
            "top_logprobs": [
                None if each is None else self._named(each.shown(), token)
                for token, each in zip(token_ids, known, strict=True)
            ],
            "text_offset": TextOffsets().of(map(self.token_bytes, token_ids)),
        }

    def shown(self, token: int) -> str:
        """A token's name in the columns: its text, or its bytes if they do not form whole characters."""
        return f"token_id:{token}" if self.by_id else _column_name(self.token_bytes(token))

    def _named(self, top: Mapping[int, float | None], drawn: int) -> dict[str, float | None]:
        """Log-probs by name. If several tokens have one name, the drawn one counts, otherwise the likeliest."""
        named = {self.shown(drawn): drawn} if drawn in top else {}
        for token in top:
            named.setdefault(self.shown(token), token)
        owners = {token: name for name, token in named.items()}
        return {owners.get(token, f"token_id:{token}"): logprob for token, logprob in top.items()}

    def _entry(self, token: int, logprob: float | None) -> str:
        """The fields of a token in JSON."""
        shown = "null" if logprob is None else logprob
        if self.by_id:
            return f'"token":"token_id:{token}","token_id":{token},"bytes":null,"logprob":{shown}'
        return f'{_token_fields(self.token_bytes(token))},"token_id":{token},"logprob":{shown}'

    def likeliest(self, part: Completion) -> list[dict[int, float | None]]:
        """The likeliest tokens at each position, likeliest first; empty where the worker does not know them."""
        if part.top_ids is None or part.top_logprobs is None:
            return [{} for _ in range(len(part))]
        rows = zip(part.top_ids.tolist(), part.top_logprobs.tolist(), strict=True)
        return [{token: finite(value) for token, value in zip(*row, strict=True) if token >= 0} for row in rows]

    def _tops(self, part: Completion) -> list[dict[int, float | None]]:
        """The likeliest tokens at each position, and the sampled one; empty without `top`."""
        if not self.top:
            return [{} for _ in range(len(part))]
        tops = self.likeliest(part)
        for token, own, top in zip(part.token_ids.tolist(), part.raw_logprobs.tolist(), tops, strict=True):
            top.setdefault(token, finite(own))
        return tops


@dataclass(slots=True)
class TextOffsets:
    """The position at which the text of each token begins. `count`: the characters before the next token."""

    count: int = 0
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _Utf8("replace"))

    def of(self, tokens: Iterable[bytes]) -> list[int]:
        """The positions of further tokens, given by their bytes."""
        found = []
        for token in tokens:
            found.append(self.count)
            self.count += len(self._decoder.decode(token))
        return found


def finite(value: float) -> float | None:
    """A log-prob for JSON; None if it is unknown."""
    if math.isfinite(value):
        return value
    return _NEVER if value == -math.inf else None


@lru_cache(4096)
def _column_name(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


@lru_cache(4096)
def _token_fields(token: bytes) -> str:
    return f'"token":{json_text(token.decode(errors="replace"))},"bytes":{list(token)}'


@dataclass(frozen=True, slots=True)
class PromptToken:
    """The log-probs at one token of a prompt."""

    logprob: float
    rank: int | None  # None: not asked for
    likeliest: dict[int, float]  # the likeliest tokens at its position, likeliest first; then the token itself

    def shown(self) -> dict[int, float | None]:
        """The log-probs of `likeliest` as JSON has them."""
        return {token: finite(logprob) for token, logprob in self.likeliest.items()}

    def entry(self, token: int, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
        """VLLM's form: the token itself first, then the likeliest ones; equal ranks in the worker's order."""
        ranks = {each: position for position, each in enumerate(self.likeliest, start=1)} | {token: self.rank}
        return {
            str(each): {
                "logprob": finite(logprob),
                "rank": ranks[each],
                "decoded_token": token_bytes(each).decode(errors="replace"),
            }
            for each, logprob in ({token: self.logprob} | self.likeliest).items()
        }


def _prompt_tokens(token_ids: list[int], result: GenerateResult, most: int) -> list[PromptToken | None]:
    """The log-probs at each token of a prompt, with at most `most` of the likeliest tokens.

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
        None if math.isnan(value) else PromptToken(value, rank, {**top, token: value})
        for token, value, rank, top in zip(token_ids, own.tolist(), ranks, likeliest, strict=True)
    ]


async def prompt_entries(
    token_ids: list[int], result: GenerateResult, most: int, token_bytes: Callable[[int], bytes]
) -> Json:
    """Log-probs of a prompt as vLLM has them: null, or `{"id": {"logprob", "rank", "decoded_token"}, ...}`.

    They are made in a thread: a long prompt has millions of numbers, and the event loop must not wait for them.
    """

    def text() -> str:
        found = zip(token_ids, _prompt_tokens(token_ids, result, most), strict=True)
        return json_text([None if known is None else known.entry(token, token_bytes) for token, known in found])

    return Json(await asyncio.to_thread(text))
