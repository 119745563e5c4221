"""A trainer's own log-probs of a result, sent back for the worker's mismatch metrics, and the worker's answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer_bridge.client.core import ClientCore
from trainer_bridge.client.results import GenerateResult
from trainer_bridge.wire.errors import ProtocolError

_MOST_ROWS = 128  # most rows in one message; a worker takes 256 blobs
_MOST_BYTES = 16 << 20  # most bytes in one message; a worker takes 64 MiB


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The distance of the trainer's log-probs from the worker's, in nats.

    `k3_kl` estimates KL(worker || trainer). `versions` has a `Mismatch` for each weights version.
    """

    tokens: int = 0
    k3_kl: float = 0.0
    mean_abs: float = 0.0
    max_abs: float = 0.0
    versions: Mapping[int, Mismatch] = field(default_factory=dict)

    def __add__(self, other: Mismatch) -> Mismatch:
        tokens = self.tokens + other.tokens
        mine = self.tokens / tokens if tokens else 0.0
        versions = sorted(self.versions.keys() | other.versions.keys())
        nothing = Mismatch()
        return Mismatch(
            tokens,
            mine * self.k3_kl + (1 - mine) * other.k3_kl,
            mine * self.mean_abs + (1 - mine) * other.mean_abs,
            max(self.max_abs, other.max_abs),
            {
                version: self.versions.get(version, nothing) + other.versions.get(version, nothing)
                for version in versions
            },
        )


#: Log-probs of each completion: in the order of the result's completions (None: not known), or by index.
TrainerLogprobs = Mapping[int, Any] | Sequence[Any]


def report_messages(
    core: ClientCore, target: GenerateResult | str, logprobs: TrainerLogprobs, endpoint: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The endpoint and the fields of each message of a report. Raises ValueError for values that cannot be sent."""
    if core.acknowledges:
        raise ValueError(
            "this client acknowledges every result at once, and workers then drop it: make the client with "
            "acknowledge=False, report, then call ack"
        )
    request_id = target if isinstance(target, str) else target.id
    if endpoint is None and isinstance(target, GenerateResult) and target.endpoint in core.endpoints:
        endpoint = target.endpoint
    endpoint = core.only_endpoint(endpoint)
    for rows in _batches(_arrays(logprobs)):
        yield endpoint, {"target": request_id, "logprobs": rows}


def read_mismatch(reply: Mapping[str, Any]) -> Mismatch:
    """The answer to one message. Raises `ProtocolError`."""
    try:
        versions = {entry["version"]: _read(entry) for entry in reply["versions"]}
        return _read(reply, versions)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the answer to a report cannot be read: {error!r:.200}") from error


def _read(fields: Mapping[str, Any], versions: Mapping[int, Mismatch] | None = None) -> Mismatch:
    k3_kl, mean_abs, max_abs = (float(fields[name]) for name in ("k3_kl", "mean_abs", "max_abs"))
    return Mismatch(int(fields["tokens"]), k3_kl, mean_abs, max_abs, versions or {})


def _arrays(logprobs: TrainerLogprobs) -> dict[str, np.ndarray]:
    entries = logprobs.items() if isinstance(logprobs, Mapping) else enumerate(logprobs)
    arrays = {}
    for index, row in entries:
        if row is None:
            continue
        try:
            array = np.asarray(row, dtype=np.float32)
        except (TypeError, ValueError, RuntimeError) as error:  # a torch tensor with a gradient raises
            raise ValueError(f"the log-probs of completion {index} are not an array of numbers: {error}") from error
        if array.ndim != 1:
            raise ValueError(f"the log-probs of completion {index} have shape {array.shape}; send one for each token")
        arrays[str(index)] = array
    if not arrays:
        raise ValueError("there are no log-probs to report; give a row for at least one completion")
    return arrays


def _batches(arrays: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    batch: dict[str, np.ndarray] = {}
    size = 0
    for index, row in arrays.items():
        if batch and (len(batch) >= _MOST_ROWS or size + row.nbytes > _MOST_BYTES):
            yield batch
            batch, size = {}, 0
        batch[index] = row
        size += row.nbytes
    yield batch
