"""The trainer's side of a rollout service: clients, launching workers, publishing weights.

Importing this package imports nothing heavy: every name is loaded when it is first used, so that a client needs
ZeroMQ, msgpack and numpy only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "AsyncRolloutClient": "client.asynchronous",
    "Chunk": "client.results",
    "ClientCurve": "client.keys",
    "Completion": "client.results",
    "GenerateResult": "client.results",
    "Mismatch": "client.report",
    "RolloutClient": "client.blocking",
    "RolloutError": "wire.errors",
    "WeightPublisher": "publish.publisher",
    "WorkerProcess": "client.launch",
    "start_worker": "client.launch",
}

__all__ = list(_HOMES)  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
