"""What trainers order, apart from their dialect: pauses, sleep, adapters, weights. Every order goes to all workers.

The endpoints of `admin.py` (vLLM, prime-rl, SkyRL, AReaL) and of `sglang.py` are names for these.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, NoReturn, TypeVar

from rollout.gateway.errors import HttpError, bad_request
from rollout.gateway.gateway import Gateway
from trainer_bridge.wire.errors import Unavailable

PauseMode = Literal["abort", "wait", "keep"]
_VERSION_END = 2**62
_LOOK_S = 1.0

_T = TypeVar("_T")


class Control:
    """Orders to all workers. Every method raises `HttpError` and `RolloutError`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._workers = gateway.workers

    # --- pauses and sleep --------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`.

        `keep`: running requests stop where they are and go on later. `abort`: they end with their tokens. `wait`: they
        end first; requests that come meanwhile wait in the gateway, later ones at the workers.
        """
        if mode == "wait":
            try:
                await self._workers.drain()
                await self._order("pause", mode="keep")
            finally:
                self._workers.admit()
        else:
            await self._order("pause", mode=mode)

    async def resume(self) -> None:
        """End a pause."""
        self._workers.admit()
        await self._order("resume")

    async def is_paused(self) -> bool:
        """True if a worker is paused."""
        return any(status["state"] == "paused" for status in await self._workers.known(fresh=True))

    async def sleep(self, level: int, tags: list[str] | None = None) -> None:
        """Give the device's memory back: weights and KV together."""
        _check_tags(tags)
        if tags is not None and set(tags) != {"weights", "kv_cache"}:
            raise bad_request("a worker gives back weights and KV together: name both tags, or none", "tags")
        await self._order("sleep", level=level)

    async def wake(self, tags: list[str] | None = None) -> None:
        """Take all memory again, whichever tag is named first; awake workers stay as they are."""
        _check_tags(tags)
        await self._order("wake")

    async def is_sleeping(self) -> bool:
        """True if a worker sleeps."""
        return any(status["state"] == "asleep" for status in await self._workers.known(fresh=True))

    async def abort(self, request_id: str | None) -> int:
        """End a request of this gateway, or all, with their tokens so far; how many there were."""
        return await self._workers.abort(request_id)

    # --- adapters ----------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """Load the adapter in a folder below the workers' `adapter_root`, or with `in_place` a newer one."""
        if name in self._gateway.names:
            raise bad_request(f"{name!r:.200} is the model's own name; choose another one", "lora_name")
        if not in_place and await self._has_adapter(name):
            raise bad_request(
                f"the adapter {name!r:.200} is loaded already; set 'load_inplace' to replace it", "lora_name"
            )
        await self._order("load_adapter", name=name, path=path)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no unfinished request names."""
        if not await self._has_adapter(name):
            raise HttpError(404, f"the adapter {name!r:.200} is not loaded", "lora_name")
        await self._order("unload_adapter", name=name)

    async def _has_adapter(self, name: str) -> bool:
        statuses = await self._workers.known(fresh=True)
        return any(adapter["name"] == name for status in statuses for adapter in status.get("adapters") or ())

    # --- weights -----------------------------------------------------------------------------------------------------

    async def version(self) -> int:
        """The weights version that all workers have at least."""
        return min(status["weights_version"] for status in await self._workers.known(fresh=True))

    async def update_from_folder(self, folder: str, version: Any, field: str) -> int:
        """Publish a folder's weights to all workers; returns their version, `version` or the next one.

        The requests that run go on, with the new weights from some token on.
        """
        updates, endpoints = self._gateway.updates, self._workers.pool.endpoints

        def publish(number: int) -> Awaitable[object]:
            return self._unless_lost(updates.publish(endpoints, folder, number, field))

        return await self.publish_as(version, publish)

    async def _unless_lost(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`; raises `ConnectionLost` once a worker is lost meanwhile.

        The publisher has longer limits of its own, after which it ends by itself.
        """
        publishing, watch = asyncio.ensure_future(work), asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((publishing, watch), return_when=asyncio.FIRST_COMPLETED)
            if not publishing.done():
                watch.result()  # raises
            return await publishing
        finally:
            publishing.cancel()
            watch.cancel()

    async def _watch(self) -> NoReturn:
        """Raise `ConnectionLost` once a worker is lost."""
        while True:
            with contextlib.suppress(Unavailable):  # it is there, and busy
                await self._workers.pool.control("ping")
            await asyncio.sleep(_LOOK_S)

    async def publish_as(self, version: Any, publish: Callable[[int], Awaitable[object]]) -> int:
        """Let `publish` bring weights to all workers as `version` or the next one; returns that version."""
        newest = max(status["weights_version"] for status in await self._workers.known(fresh=True))
        wanted = max(newest, self._workers.published) + 1 if version is None else _version(version)
        await publish(wanted)
        self._workers.published = max(self._workers.published, wanted)
        await self._workers.states(fresh=True)  # `/health` would compare an old status with the new version
        return wanted

    async def _order(self, op: str, **fields: Any) -> None:
        await self._workers.pool.control(op, **fields)
        await self._workers.states(fresh=True)


def no_group(name: str) -> HttpError:
    """The answer to endpoints that send weights through a process group."""
    return HttpError(
        501,
        f"{name}: this gateway takes no weights through a process group; update from a folder, or with WeightPublisher",
    )


def _check_tags(tags: list[str] | None) -> None:
    unknown = sorted(set(tags or ()) - {"weights", "kv_cache"})
    if unknown:
        raise bad_request(f"the tag {unknown[0]!r:.80} is unknown; use weights or kv_cache", "tags")


def _version(given: Any) -> int:
    """A weights version that a client names: an integer, or its digits."""
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 19:
        given = int(given)
    if type(given) is not int or not 0 <= given < _VERSION_END:
        raise bad_request("a weights version is an integer that grows with each update", "weight_version")
    return given
