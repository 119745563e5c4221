"""The trainer's side of a rollout service: clients, launching workers, publishing weights.

    from trainer_bridge import RolloutClient, WeightPublisher, start_worker

Importing this package imports nothing heavy. Each name below is loaded when it is first used, so a client needs ZeroMQ,
msgpack and numpy only; a `WeightPublisher` also needs torch and xxhash (the extra `publish`).
"""

from importlib import import_module, metadata
from typing import Any

#: The public names by module.
_NAMES = {
    "client.asynchronous": ("AsyncRolloutClient", "AsyncSession", "AsyncStream"),
    "client.batch": ("Settled",),
    "client.blocking": ("RolloutClient", "Session", "Stream"),
    "client.generate_request": ("AttachFields", "GenerateFields"),
    "client.launch": ("WorkerFailed", "WorkerProcess", "start_worker"),
    "client.media": ("MediaItem", "MediaPrompt", "chat_prompt", "processor_prompt", "processor_prompts"),
    "client.mismatch": ("Mismatch",),
    "client.results": ("Chunk", "Completion", "GenerateResult"),
    "integrations.background": ("BackgroundClient",),
    "publish.handle": ("PublishHandle", "WorkerReport"),
    "publish.publisher": ("WeightPublisher",),
    "quantize": ("quantize_fp8_block", "quantize_fp8_row"),
    "wire.errors": (
        *("AccessRefused", "BadMessage", "BadRequest", "ConnectionLost", "Duplicate", "InternalError"),
        *("JournalFailed", "MediaNeeded", "NotFound", "Overloaded", "ProtocolError", "ResumeFailed", "RolloutError"),
        *("RolloutTimeout", "TooLong", "Unavailable", "WeightsRejected", "WeightsReplaced"),
    ),
    "wire.keys": ("ClientCurve",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("rollout-engine")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
