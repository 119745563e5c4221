"""The bodies of Tinker's endpoints, and the prompts and arguments of `generate` that are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.prompts.sampling import MAX_TOKEN_ID, MOST_IDS, Int32, Number, TokenId
from trainer_bridge.wire.request_fields import MAX_PROMPT_TOKENS_SCORED, MAX_TOP_LOGPROBS

_NONE = -1


class TensorBody(Body):
    """A matrix of token ids in Tinker's form, row by row; with row pointers and columns it is sparse (CSR)."""

    data: list[Annotated[int, Field(ge=_NONE, le=MAX_TOKEN_ID)]]
    dtype: Literal["int64"]
    shape: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]] = Field(min_length=2, max_length=2)
    sparse_crow_indices: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]] | None = None
    sparse_col_indices: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]] | None = None


@dataclass(frozen=True, slots=True)
class TargetTokens:
    """The cells of the matrix that name a token, and the rows that a worker scores for them.

    `shape`: of the matrix. `sparse`: its row pointers and columns, int64, None for a dense tensor. `size`: numbers in
    its data. `ids`: int32 [scored rows, K], the ids of a row first, then zeros. Cell i of `asked` (positions in the
    data) stands in row `rows[i]` and column `columns[i]` of `ids`.
    """

    shape: list[int]
    sparse: tuple[np.ndarray, np.ndarray] | None
    size: int
    ids: np.ndarray
    asked: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, fields: Any, prompt_tokens: int, within: str) -> TargetTokens:
        """The tokens in a field of a request. Raises `HttpError`."""
        body = TensorBody.take(fields, within)
        count = body.shape[0]
        if count != prompt_tokens - 1:
            message = f"send a row for each of the {prompt_tokens - 1} tokens after the first one"
            raise bad_request(message, f"{within}shape")
        data = np.array(body.data, np.int64)
        asked = np.flatnonzero(data != _NONE)
        sparse = _sparse(body, within)
        rows = _rows_of_cells(body, sparse, within)[asked]
        if not len(asked):
            raise bad_request("name at least one token", f"{within}data")
        first = int(rows[0])
        counts = np.bincount(rows - first, minlength=count - first)
        if len(counts) * int(counts.max()) > MOST_IDS:
            message = f"{len(counts)} rows of up to {counts.max()} tokens are more than {MOST_IDS} tokens; send fewer"
            raise bad_request(message, f"{within}data")
        columns = np.arange(len(asked)) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = np.zeros((len(counts), counts.max()), np.int32)
        ids[rows - first, columns] = data[asked]
        return cls(body.shape, sparse, len(data), ids, asked, rows - first, columns)

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays."""
        return [self.ids, self.asked, self.rows, self.columns, *(self.sparse or ())]

    def worker_ids(self, scored: int) -> np.ndarray:
        """The worker's ids if it scores the last `scored` tokens of the prompt, at least as many as `ids` has rows."""
        return np.pad(self.ids, ((scored - len(self.ids), 0), (0, 0)))

    def answer(self, scores: np.ndarray) -> np.ndarray:
        """The log-probs in the order of the request's data, float32; 0 where it names no token.

        `scores`: float32 [scored tokens, K], what the worker answered to `worker_ids`.
        """
        found = np.zeros(self.size, np.float32)
        found[self.asked] = scores[-len(self.ids) :][self.rows, self.columns]
        return found


def _sparse(body: TensorBody, within: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The row pointers and columns of a sparse matrix. Raises `HttpError`."""
    (count, width), size = body.shape, len(body.data)
    if body.sparse_crow_indices is None and body.sparse_col_indices is None:
        return None
    if body.sparse_crow_indices is None or body.sparse_col_indices is None:
        message = "a sparse matrix needs both 'sparse_crow_indices' and 'sparse_col_indices'"
        raise bad_request(message, within[:-1])
    starts, columns = (np.array(each, np.int64) for each in (body.sparse_crow_indices, body.sparse_col_indices))
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != size or (np.diff(starts) < 0).any():
        message = f"send {count + 1} row pointers that grow from 0 to {size}, the number of values"
        raise bad_request(message, f"{within}sparse_crow_indices")
    if len(columns) != size or (columns >= width).any():
        message = f"send a column below {width} for each of the {size} values"
        raise bad_request(message, f"{within}sparse_col_indices")
    return starts, columns


def _rows_of_cells(body: TensorBody, sparse: tuple[np.ndarray, np.ndarray] | None, within: str) -> np.ndarray:
    """The row of each number in the data. Raises `HttpError`."""
    (count, width), size = body.shape, len(body.data)
    if sparse is not None:
        return np.repeat(np.arange(count), np.diff(sparse[0]))
    if size != count * width:
        raise bad_request(f"the shape {body.shape} needs {count * width} numbers, not {size}", f"{within}data")
    return np.arange(size) // max(width, 1)


_MOST_SEQ = 2**63 - 1
_MOST_CHARS = 512
_TYPE = "the path says it"


class SessionBody(Body):
    """A body that names a session."""

    ignored: ClassVar = {"type": _TYPE}

    session_id: str = Field(min_length=1, max_length=_MOST_CHARS)


class SamplerBody(Body):
    """The body of `/api/v1/create_sampling_session`."""

    ignored: ClassVar = {"type": _TYPE}

    session_id: str = Field(min_length=1, max_length=_MOST_CHARS)
    sampling_session_seq_id: int = Field(ge=0, le=_MOST_SEQ)
    base_model: str | None = Field(None, min_length=1, max_length=_MOST_CHARS)
    model_path: str | None = Field(None, min_length=1, max_length=_MOST_CHARS)


class JoinBody(Body):
    """The body of `/api/v1/join_sampling_session`."""

    ignored: ClassVar = {"type": _TYPE}

    sampling_session_id: str = Field(min_length=1, max_length=_MOST_CHARS)


class ResultBody(Body):
    """A body that names a request."""

    ignored: ClassVar = {"allow_metadata_only": "an answer is always whole"}

    request_id: str = Field(min_length=1, max_length=_MOST_CHARS)


class TinkerChunk(Body):
    """A part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[TokenId]


class TinkerPrompt(Body):
    """Tinker's `ModelInput`."""

    chunks: list[dict[str, Any]]

    def token_ids(self) -> list[int]:
        """The token ids of all parts. Raises `HttpError`."""
        found: list[int] = []
        for position, chunk in enumerate(self.chunks):
            where = f"prompt.chunks.{position}."
            if (chunk.get("type") or "encoded_text") != "encoded_text":
                message = "this API takes token ids here; send images to /v1/chat/completions"
                raise bad_request(message, f"{where}type")
            found += TinkerChunk.take(chunk, where).tokens
        if not found:
            raise bad_request("send at least one token", "prompt.chunks")
        return found


class Params(Body):
    """Tinker's `SamplingParams`."""

    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | list[TokenId] | None = None
    temperature: Number = 1.0
    top_k: Int32 = -1
    top_p: Number = 1.0

    def worker_fields(self) -> dict[str, Any]:
        """The arguments of `generate`. An empty list of stops switches the model's own end tokens off, too."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "max_tokens": self.max_tokens,
            "seed": None if self.seed is None else self.seed % 2**63,
            "temperature": self.temperature,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "top_p": self.top_p,
            "stop": {
                "strings": [each for each in stops if isinstance(each, str)],
                "token_ids": [each for each in stops if not isinstance(each, str)],
                "ignore_eos": self.stop == [],
            },
        }


class SampleBody(Body):
    """The body of `/api/v1/asample`."""

    ignored: ClassVar = {"type": _TYPE}
    switched_off: ClassVar = {"prompt_alt_tokens_k": (None, 0), "record_stability_info": (None, False)}

    prompt: dict[str, Any]
    sampling_params: dict[str, Any]
    num_samples: int = Field(1, ge=1, le=1024)
    sampling_session_id: str | None = Field(None, min_length=1, max_length=_MOST_CHARS)
    seq_id: int | None = Field(None, ge=0, le=_MOST_SEQ)
    base_model: str | None = Field(None, min_length=1, max_length=_MOST_CHARS)
    model_path: str | None = Field(None, min_length=1, max_length=_MOST_CHARS)
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    topk_prompt_logprobs: int = Field(0, ge=0, le=MAX_PROMPT_TOKENS_SCORED)
    topk_sample_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    target_prompt_logprobs: dict[str, Any] | None = None

    @property
    def scores(self) -> bool:
        """True if log-probs of the prompt's own tokens, or of the likeliest ones, are asked for."""
        return self.prompt_logprobs or self.topk_prompt_logprobs > 0

    def last_scored(self, prompt_tokens: int) -> int:
        """The number of tokens at the end of the prompt that are scored. Raises `HttpError`."""
        last = self.prompt_logprobs_last_n
        if last is None:
            return prompt_tokens if self.scores else 0
        if not self.prompt_logprobs:
            raise bad_request("it needs 'prompt_logprobs': true", "prompt_logprobs_last_n")
        if last >= prompt_tokens:
            message = f"the prompt has {prompt_tokens} tokens, and the first one has no log-prob; send at most "
            raise bad_request(f"{message}{prompt_tokens - 1}", "prompt_logprobs_last_n")
        return last

    def targets(self, prompt_tokens: int) -> TargetTokens | None:
        """The tokens whose log-probs are asked for at positions of the prompt. Raises `HttpError`."""
        if self.target_prompt_logprobs is None:
            return None
        return TargetTokens.of(self.target_prompt_logprobs, prompt_tokens, "target_prompt_logprobs.")


#: The fields of a sample by the workers' names for them, for errors.
NAMES = {
    "prompt": "prompt",
    "n": "num_samples",
    "sampling": "sampling_params",
    "stop": "sampling_params.stop",
    "stop.strings": "sampling_params.stop",
    "stop.token_ids": "sampling_params.stop",
    "max_tokens": "sampling_params.max_tokens",
    "seed": "sampling_params.seed",
    "logprobs": "topk_sample_logprobs",
    "prompt_top_logprobs": "topk_prompt_logprobs",
    "prompt_logprobs_last": "prompt_logprobs_last_n",
    "prompt_logprob_token_ids": "target_prompt_logprobs.data",
}
