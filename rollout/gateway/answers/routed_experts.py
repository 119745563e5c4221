"""The experts of tokens (`routing` of a completion) in the formats of vLLM, prime-rl, SkyRL and SGLang.

A worker that is asked for all experts returns an entry for each token of prompt and completion but the last: an array
[tokens - 1, MoE layers, experts of a token], which each of these formats carries.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from rollout.gateway.http.http_errors import HttpError
from trainer_bridge.client.results import Completion


def expert_array(completion: Completion) -> np.ndarray:
    """The experts of a completion that was asked for with them. Raises `HttpError` if they are missing."""
    if completion.routing is None:
        raise HttpError(500, "the worker sent no experts for this completion; send the request again")
    return completion.routing


def npy(experts: np.ndarray) -> str:
    """vLLM: base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def described(experts: np.ndarray, start: int) -> dict[str, Any]:
    """prime-rl: base64 of the entries from position `start` on, with shape and dtype."""
    kept = np.ascontiguousarray(experts[start:])
    return {
        "data": base64.b64encode(kept.tobytes()).decode(),
        "shape": list(kept.shape),
        "start": start,
        "dtype": str(kept.dtype),
    }


def raw(experts: np.ndarray) -> str:
    """SGLang: base64 of the entries as int32, one after the other."""
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()
