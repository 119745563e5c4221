"""Tinker's `target_prompt_logprobs`: tokens that are scored at positions of a prompt, as a dense or sparse matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from rollout.gateway.http.bodies import Body
from rollout.gateway.http.http_errors import bad_request
from rollout.gateway.prompts.chosen_tokens import MOST_IDS
from rollout.gateway.prompts.sampling import MAX_TOKEN_ID

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

    `shape`: of the matrix. `sparse`: its row pointers and columns, int64, None for a dense one. `size`: numbers in its
    data. `ids`: int32 [scored rows, K], the ids of a row first, then zeros. Cell i of `asked` (places in the data)
    stands in row `rows[i]` and column `columns[i]` of `ids`.
    """

    shape: list[int]
    sparse: tuple[np.ndarray, np.ndarray] | None
    size: int
    ids: np.ndarray
    asked: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, fields: Any, prompt_tokens: int, place: str) -> TargetTokens:
        """The tokens in a field of a request. Raises `HttpError`."""
        body = TensorBody.take(fields, place)
        count = body.shape[0]
        if count != prompt_tokens - 1:
            message = f"send a row for each of the {prompt_tokens - 1} tokens after the first one"
            raise bad_request(message, f"{place}shape")
        data = np.array(body.data, np.int64)
        asked = np.flatnonzero(data != _NONE)
        sparse = _sparse(body, place)
        rows = _rows_of_cells(body, sparse, place)[asked]
        if not len(asked):
            raise bad_request("name at least one token", f"{place}data")
        first = int(rows[0])
        counts = np.bincount(rows - first, minlength=count - first)
        if len(counts) * int(counts.max()) > MOST_IDS:
            message = f"{len(counts)} rows of up to {counts.max()} tokens are more than {MOST_IDS} tokens; send fewer"
            raise bad_request(message, f"{place}data")
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
        """The log-probs in the place of the request's data, float32; 0 where it names no token.

        `scores`: float32 [scored tokens, K], what the worker answered to `worker_ids`.
        """
        found = np.zeros(self.size, np.float32)
        found[self.asked] = scores[-len(self.ids) :][self.rows, self.columns]
        return found


def _sparse(body: TensorBody, place: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The row pointers and columns of a sparse matrix. Raises `HttpError`."""
    (count, width), size = body.shape, len(body.data)
    if body.sparse_crow_indices is None and body.sparse_col_indices is None:
        return None
    if body.sparse_crow_indices is None or body.sparse_col_indices is None:
        message = "a sparse matrix needs both 'sparse_crow_indices' and 'sparse_col_indices'"
        raise bad_request(message, place[:-1])
    starts, columns = (np.array(each, np.int64) for each in (body.sparse_crow_indices, body.sparse_col_indices))
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != size or (np.diff(starts) < 0).any():
        message = f"send {count + 1} row pointers that grow from 0 to {size}, the number of values"
        raise bad_request(message, f"{place}sparse_crow_indices")
    if len(columns) != size or (columns >= width).any():
        message = f"send a column below {width} for each of the {size} values"
        raise bad_request(message, f"{place}sparse_col_indices")
    return starts, columns


def _rows_of_cells(body: TensorBody, sparse: tuple[np.ndarray, np.ndarray] | None, place: str) -> np.ndarray:
    """The row of each number in the data. Raises `HttpError`."""
    (count, width), size = body.shape, len(body.data)
    if sparse is not None:
        return np.repeat(np.arange(count), np.diff(sparse[0]))
    if size != count * width:
        raise bad_request(f"the shape {body.shape} needs {count * width} numbers, not {size}", f"{place}data")
    return np.arange(size) // max(width, 1)
