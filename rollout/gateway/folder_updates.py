"""Weight updates from a Hugging Face folder: the gateway is the publisher.

The tensors in the folder's safetensors files are published over the weight bridge, as a trainer would publish them. So
updates are staged and swapped between two steps, and no request is aborted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.extras import install
from rollout.gateway.errors import HttpError, bad_request

if TYPE_CHECKING:
    from trainer_bridge.publish.handle import WorkerReport
    from trainer_bridge.wire.keys import ClientCurve

_INDEX = "model.safetensors.index.json"


class FolderUpdates:
    """Publishes folders below `root`, one after the other."""

    def __init__(self, root: str | None, update_s: float, curve: ClientCurve | None = None) -> None:
        self._root = None if root is None else Path(root).expanduser().resolve()
        self._update_s = update_s
        self._curve = curve
        self._one_at_a_time = asyncio.Lock()

    async def publish(self, endpoints: Sequence[str], folder: str, version: int, field: str) -> list[WorkerReport]:
        """Publish a folder's weights as `version`; returns when the workers at these endpoints use them.

        Raises `HttpError` for a folder that cannot be read, and `RolloutError` for an update that a worker refuses.
        """
        files = self._files(folder, field)
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._publish, endpoints, files, version, field)

    def _files(self, folder: str, field: str) -> list[Path]:
        if self._root is None:
            raise HttpError(
                403, "this gateway reads no folders; start it with --weights-root FOLDER, above the folder", field
            )
        try:
            path = Path(folder).expanduser().resolve()
            path.exists()  # raises for a name that is too long, which `resolve` lets pass
        except (OSError, ValueError, RuntimeError) as error:
            raise bad_request(f"{folder!r:.200} is no path: {error}", field) from error
        if not path.is_relative_to(self._root):
            raise HttpError(403, f"{folder!r:.200} is not below --weights-root", field)
        files = sorted(path.glob("*.safetensors"))
        index = path / _INDEX
        if index.is_file():  # a folder may hold other files, too
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise bad_request(f"{_INDEX} of {folder!r:.200} cannot be read: {error!r:.200}", field) from error
            files = [path / name for name in sorted(names) if isinstance(name, str)]
        if not files or any(not file.is_file() or file.resolve().parent != path for file in files):
            raise bad_request(f"{folder!r:.200} has no complete set of safetensors files", field)
        return files

    def _publish(self, endpoints: Sequence[str], files: list[Path], version: int, field: str) -> list[WorkerReport]:
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            from trainer_bridge.publish.publisher import WeightPublisher
        except ModuleNotFoundError as error:
            raise HttpError(501, f"updates from folders need {error.name}: {install('http', 'publish')}") from error
        tensors: dict[str, Any] = {}
        try:
            for file in files:
                tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise bad_request(f"{file.name} cannot be read: {error!s:.200}", field) from error
        with WeightPublisher(endpoints, curve=self._curve, apply_s=self._update_s) as publisher:
            try:
                handle = publisher.publish(tensors, version)
            except ValueError as error:  # a dtype that no worker takes
                raise bad_request(f"these weights cannot be published: {error}", field) from error
            return handle.applied(self._update_s)
