"""Orders of trainers, in every dialect: pauses, sleep, adapters, weights. Every order goes to all workers.

The admin endpoints of all dialects (`requests/admin.py`, `dialects/weights`) are names for these orders.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from rollout_gateway.http.http_errors import HttpError, bad_request
from rollout_gateway.orders.folder_updates import FolderUpdates
from rollout_gateway.workers.weights_folder import WeightsFolder
from rollout_gateway.workers.worker_watch import PublishedWeights
from rollout_gateway.workers.workers import STATUS_S, Workers
from trainer_bridge.wire.errors import UNANSWERED, RolloutError

PauseMode = Literal["abort", "wait", "keep"]
MemoryTag = Literal["weights", "kv_cache"]
#: Brings weights to the workers at these endpoints, as this version.
Publish = Callable[[int, Sequence[str]], Awaitable[None]]
_VERSION_END = 2**62


class WorkerOrders:
    """Orders to all workers. Every method raises `HttpError` and `RolloutError`.

    `names`: the names of the model, which no adapter may have. `updates`: publishes folders of weights.
    """

    def __init__(self, workers: Workers, names: Sequence[str], updates: FolderUpdates) -> None:
        self._workers = workers
        self._names = names
        self._updates = updates

    # --- pauses and sleep --------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`.

        `keep`: running requests stop where they are and go on later. `abort`: they end with their tokens. `wait`: they
        end first; requests that come meanwhile wait in the gateway, later requests at the workers.
        """
        if mode == "wait":
            try:
                await self._workers.drain()
                await self._order_lasting("pause", mode="keep")
            finally:
                self._workers.admit()
        else:
            await self._order_lasting("pause", mode=mode)

    async def resume(self) -> None:
        self._workers.admit()
        self._workers.lasting_order = None
        await self._order("resume")

    async def is_paused(self) -> bool:
        return any(status["state"] == "paused" for status in await self._workers.known(fresh=True))

    async def sleep(self, level: int, tags: Sequence[MemoryTag] | None = None) -> None:
        """Give the device's memory back: weights and KV together."""
        if tags is not None and set(tags) != {"weights", "kv_cache"}:
            raise bad_request("a worker releases weights and KV together: name both tags, or none", "tags")
        await self._order_lasting("sleep", level=level)

    async def wake(self) -> None:
        """Take all memory again; awake workers stay as they are."""
        self._workers.lasting_order = None
        await self._order("wake")

    async def is_sleeping(self) -> bool:
        return any(status["state"] == "asleep" for status in await self._workers.known(fresh=True))

    async def abort(self, request_id: str | None) -> int:
        """End a request of this gateway, or all, with the tokens that they have; returns their number."""
        return await self._workers.abort(request_id)

    # --- adapters ----------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """Load the adapter in a folder below the workers' `adapter_root`, or with `in_place` a newer one."""
        if name in self._names:
            raise bad_request(f"{name!r:.200} is the model's own name; choose another one", "lora_name")
        await self._workers.ask()
        _, lack = self._having(name)
        if not in_place and not lack:
            raise bad_request(
                f"the adapter {name!r:.200} is loaded already; set 'load_inplace' to replace it", "lora_name"
            )
        try:
            await self._order("load_adapter", self._workers.pool.endpoints if in_place else lack, name=name, path=path)
        finally:
            if self._having(name)[0]:
                self._workers.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no unfinished request names."""
        await self._workers.ask()
        have, _ = self._having(name)
        if not have:
            raise HttpError(404, f"the adapter {name!r:.200} is not loaded", "lora_name")
        self._workers.adapters.pop(name, None)
        await self._order("unload_adapter", have, name=name)

    def _having(self, name: str) -> tuple[list[str], list[str]]:
        """The endpoints of the workers with an adapter, and of the workers without it."""
        have: list[str] = []
        lack: list[str] = []
        for state in self._workers.watch.states():
            loaded = (state.status or {}).get("adapters") or ()
            (have if any(adapter["name"] == name for adapter in loaded) else lack).append(state.endpoint)
        return have, lack

    # --- weights -----------------------------------------------------------------------------------------------------

    async def version(self) -> int:
        """The weights version that all workers have at least."""
        return min(status["weights_version"] for status in await self._workers.known(fresh=True))

    async def update_from_folder(self, path: str, version: Any, field: str) -> int:
        """Publish a folder's weights to all workers; returns their version, `version` or the next version.

        The requests that run go on, with the new weights from some token on.
        """
        updates = self._updates
        folder = await updates.find(path, field)

        async def publish(number: int, endpoints: Sequence[str]) -> None:
            handle = await self._workers.unless_lost(updates.publish(endpoints, folder, number, field), endpoints)
            if handle.error is not None:
                raise handle.error

        return await self.publish_as(version, publish, folder)

    async def pull(self, local: str, source: str, version: int) -> None:
        """Bring a checkpoint on this host to a version that a trainer has published in the folder `source`."""
        await self._updates.pull(local, source, version, self._workers.model_path)

    async def publish_as(
        self, version: Any, publish: Publish, folder: WeightsFolder | None = None, why_not_kept: str = ""
    ) -> int:
        """Let `publish` bring weights to all workers as `version` or the next one; returns that version.

        Workers that have this version already do not get it again. Without a `folder` the weights cannot be sent again
        to a worker that is restarted.
        """
        workers, watch = self._workers, self._workers.watch
        async with workers.publishing:
            newest = max(status["weights_version"] for status in await workers.ask())
            wanted = max(newest, watch.published.version) + 1 if version is None else _version(version)
            update = PublishedWeights(wanted, folder, why_not_kept)
            if endpoints := self._without(update):
                try:
                    await publish(wanted, endpoints)
                except RolloutError as error:
                    watch.attempt = update
                    await watch.refresh(STATUS_S)  # some workers may use it
                    if not isinstance(error, UNANSWERED):
                        watch.attempt = None
                    raise
                await watch.refresh(STATUS_S)  # the watch compares no old status with the new version
                watch.has_published(update)
            return wanted

    def _without(self, update: PublishedWeights) -> tuple[str, ...]:
        """The endpoints of all workers; if some have this version already, of the workers that lack it.

        Raises `HttpError` if the version is in use from another folder.
        """
        watch, endpoints = self._workers.watch, self._workers.pool.endpoints
        versions = {state.endpoint: (state.status or {}).get("weights_version", -1) for state in watch.states()}
        if max(versions.values()) != update.version:
            return endpoints
        kept = watch.published.folder if watch.published.version == update.version else None
        if kept is not None and update.folder not in (None, kept):
            known = f"version {update.version} is in use already, from {kept.path}"
            if update.folder is not None and update.folder.path == kept.path:
                raise HttpError(409, f"{known}, which was changed since: send it as a newer version", "weight_version")
            raise HttpError(409, f"{known}: send that folder again, or a newer version", "weight_version")
        late = tuple(endpoint for endpoint in endpoints if versions[endpoint] < update.version)
        return late if late or (kept is not None and kept == update.folder) else endpoints

    async def _order_lasting(self, op: str, **fields: Any) -> None:
        """An order that lasts: a worker that is started again gets it, too."""
        try:
            await self._order(op, **fields)
        except UNANSWERED:
            self._workers.lasting_order = op, fields  # the workers that answer have carried it out
            raise
        self._workers.lasting_order = op, fields

    async def _order(self, op: str, endpoints: Sequence[str] | None = None, **fields: Any) -> None:
        """Give an order to all workers, or to some. Raises the first error, once all have answered."""
        asked = self._workers.pool.endpoints if endpoints is None else endpoints
        orders = (self._workers.pool.control(op, endpoint=endpoint, **fields) for endpoint in asked)
        outcomes = await asyncio.gather(*orders, return_exceptions=True)
        await self._workers.watch.refresh(STATUS_S)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


def _version(given: Any) -> int:
    """A weights version that a client names: an integer, or its digits."""
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 19:
        given = int(given)
    if type(given) is not int or not 0 <= given < _VERSION_END:
        raise bad_request("a weights version must be an integer that grows with each update", "weight_version")
    return given
