"""Weight updates from a Hugging Face folder: the gateway is the publisher.

The tensors in the folder's safetensors files are published over the weight bridge, as a trainer would publish them. So
updates are staged and swapped between two steps, and no request is aborted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.extras import install
from rollout_gateway.http.http_errors import HttpError, bad_request
from rollout_gateway.orders.pulled_checkpoint import pull
from rollout_gateway.workers.weights_folder import WeightsFolder, find_folder, path_below
from trainer_bridge.wire.errors import RolloutError

if TYPE_CHECKING:
    from trainer_bridge.publish.handle import PublishHandle
    from trainer_bridge.publish.publisher import WeightPublisher
    from trainer_bridge.wire.keys import ClientCurve


class FolderUpdates:
    """Publishes folders below `root`, in turn."""

    def __init__(self, root: str | None, update_s: float, curve: ClientCurve | None = None) -> None:
        self._root = None if root is None else Path(root).expanduser().resolve()
        self._update_s = update_s
        self._curve = curve
        self._one_at_a_time = asyncio.Lock()
        self._last: _Publication | None = None  # it goes on if its caller is cancelled

    async def find(self, folder: str, field: str) -> WeightsFolder:
        """A folder of weights, by its path or by its path below the root. Raises `HttpError`."""
        return await asyncio.to_thread(find_folder, self._root_of(field), folder, field)

    async def pull(self, local: str, source: str, version: int, model: str) -> None:
        """Bring the checkpoint in `local` to a version that a trainer has published in `source`. Raises `HttpError`.

        `model`: the workers' own checkpoint, version 0.
        """
        root = self._root_of("source_dir")
        into = path_below(root, local, "local_checkpoint_dir")
        if into == root:
            raise bad_request("name a folder below --weights-root", "local_checkpoint_dir")
        base = Path(model) if Path(model).is_dir() else None
        async with self._one_at_a_time:
            await asyncio.to_thread(pull, into, path_below(root, source, "source_dir"), version, base)

    def _root_of(self, field: str) -> Path:
        if self._root is None:
            raise HttpError(
                403, "this gateway reads no folders; start it with --weights-root FOLDER, above the folder", field
            )
        return self._root

    async def publish(
        self, endpoints: Sequence[str], folder: WeightsFolder, version: int, field: str | None = None
    ) -> PublishHandle:
        """Publish a folder's weights as `version`; returns the finished update, with the error of each worker.

        If its caller is cancelled it goes on, until it ends or another update begins. Raises `HttpError` for a folder
        that cannot be read.
        """
        async with self._one_at_a_time:
            await self.close()
            publication = self._last = _Publication()
            work = asyncio.to_thread(self._publish, publication, endpoints, folder, version, field)
            return await asyncio.shield(publication.run(work))

    async def close(self) -> None:
        """End an update that still goes on; workers keep the weights that they use."""
        if self._last is not None:
            await self._last.end()

    def _publish(
        self,
        publication: _Publication,
        endpoints: Sequence[str],
        folder: WeightsFolder,
        version: int,
        field: str | None,
    ) -> PublishHandle:
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            from trainer_bridge.publish.publisher import WeightPublisher
        except ModuleNotFoundError as error:
            raise HttpError(501, f"updates from folders need {error.name}: {install('http', 'publish')}") from error
        tensors: dict[str, Any] = {}
        try:
            for name, _, _ in folder.files:
                tensors |= load_file(folder.path / name)
        except (OSError, SafetensorError) as error:
            raise bad_request(f"{name} cannot be read: {error!s:.200}", field) from error
        if problem := folder.problem():
            raise HttpError(409, f"these weights cannot be published: {problem}", field)
        with WeightPublisher(endpoints, curve=self._curve, apply_s=self._update_s) as publisher:
            publication.begin(publisher)
            try:
                handle = publisher.publish(tensors, version)
            except ValueError as error:  # a dtype that no worker takes
                raise bad_request(f"these weights cannot be published: {error}", field) from error
            try:
                handle.applied(self._update_s)
            except RolloutError as error:
                if handle.error is None:  # it goes on, after its time
                    raise error
        return handle


class _Publication:
    """One update, in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: asyncio.Future[PublishHandle] | None = None
        self._publisher: WeightPublisher | None = None
        self._over = False

    def run(self, work: Coroutine[Any, Any, PublishHandle]) -> asyncio.Future[PublishHandle]:
        """The future result of `work`, which runs whether or not its caller waits."""
        self._work = asyncio.ensure_future(work)
        self._work.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._work

    def begin(self, publisher: WeightPublisher) -> None:
        """The weights are read. Raises `RolloutError` if the update is over already."""
        with self._lock:
            self._publisher = publisher
            if self._over:
                raise RolloutError("the update was cancelled", code="closed")

    async def end(self) -> None:
        """End it where it is."""
        if self._work is None or self._work.done():
            return
        with self._lock:
            self._over = True
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)
        await asyncio.wait([self._work])
