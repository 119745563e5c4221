"""The experts of tokens (`routing` of a completion) in the formats of vLLM, prime-rl, SkyRL and SGLang.

A worker that is asked for all experts returns an entry for each token of prompt and completion but the last: an array
[tokens - 1, MoE layers, experts of a token]. Each format carries the entries from position `start` on. Every function
raises `HttpError` if the worker sent no experts.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from rollout.gateway.http.http_errors import HttpError
from trainer_bridge.client.results import Completion


def _entries(completion: Completion, start: int) -> np.ndarray:
    if completion.routing is None:
        raise HttpError(500, "the worker sent no experts for this completion; send the request again")
    return completion.routing[start:]


def npy(completion: Completion, start: int) -> str:
    """vLLM: base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, _entries(completion, start), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def described(completion: Completion, start: int) -> dict[str, Any]:
    """prime-rl: base64 with shape, start and dtype."""
    kept = np.ascontiguousarray(_entries(completion, start))
    return {
        "data": base64.b64encode(kept.tobytes()).decode(),
        "shape": list(kept.shape),
        "start": start,
        "dtype": str(kept.dtype),
    }


def nested(completion: Completion, start: int) -> list[Any]:
    """SkyRL: nested lists of integers."""
    found: list[Any] = _entries(completion, start).tolist()
    return found


def raw(completion: Completion, start: int) -> str:
    """SGLang: base64 of the entries as int32, one after the other."""
    return base64.b64encode(_entries(completion, start).astype("<i4").tobytes()).decode()
