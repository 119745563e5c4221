"""A restarted worker gets the other workers' weights and adapters, and a pause or sleep that lasts.

    worker is started again --> older weights, no adapters, not paused
                                   |  folder of the last update, load_adapter, pause or sleep
                                   v
                                as the others

The gateway remembers the orders that it was given. Weights from a folder are read again, if the folder has not changed.
Weights that came another way are not kept; then `/health` and the log say what an operator can do.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_gateway.http.http_errors import HttpError
from rollout_gateway.orders.folder_updates import FolderUpdates
from rollout_gateway.workers.worker_watch import PublishedWeights
from rollout_gateway.workers.workers import STATUS_S, Workers
from trainer_bridge.wire.errors import UNANSWERED, RolloutError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_STALE_S = 5.0
_MOST_REFUSALS = 3  # one refusal may come from a worker that was lost again
_AGAIN = "publish weights again, as a newer version"


@dataclass(slots=True)
class _Late:
    """A worker that does not take the weights: how often it refused them, and when to try again (the loop's time)."""

    process: str
    update: PublishedWeights
    tries: int = 0
    refusals: int = 0
    due_s: float = 0.0


class CatchUp:
    """Brings workers up to date, as long as `run` runs."""

    def __init__(self, workers: Workers, updates: FolderUpdates) -> None:
        self._workers = workers
        self._watch = workers.watch
        self._updates = updates
        self._late: dict[str, _Late] = {}
        self._processes: dict[str, str] = {}  # the workers' names, by endpoint, once they have all orders
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Look at the workers again and again."""
        await asyncio.gather(self._again(self._look_at_orders), self._again(self._look_at_weights))

    async def _again(self, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await look()
            # The gateway serves on, and the next look may find the workers in order.
            except Exception:
                log.exception("a worker could not be brought up to date")
            await asyncio.sleep(_LOOK_EVERY_S)

    # --- orders ------------------------------------------------------------------------------------------------------

    async def _look_at_orders(self) -> None:
        states = self._watch.states()
        for state in states:
            if state.status is not None and self._processes.get(state.endpoint) != state.status["worker"]:
                await self._repeat_orders(
                    state.endpoint, state.status, [s.status for s in states if s.status and s is not state]
                )

    async def _repeat_orders(self, endpoint: str, status: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        """Give a new worker the orders that the other workers have had."""
        orders: list[tuple[str, dict[str, Any]]] = []
        lasting = self._workers.lasting_order
        if lasting and status["state"] == "serving" and all(each["state"] in ("paused", "asleep") for each in others):
            orders.append(lasting)
        loaded = {adapter["name"] for adapter in status.get("adapters") or ()}
        missed = [(name, path) for name, path in self._workers.adapters.items() if name not in loaded]
        orders += [("load_adapter", {"name": name, "path": path} | _version_of(name, others)) for name, path in missed]
        for op, fields in orders:
            order, facts = " ".join([op, *filter(None, [fields.get("name")])]), {"endpoint": endpoint}
            try:
                await self._workers.pool.control(op, endpoint=endpoint, **fields)
            except UNANSWERED:
                return  # it is lost again
            except RolloutError as error:
                log.warning("a worker refuses an order that it had missed, %s: %s", order, error, extra=facts)
            else:
                log.info("sent a worker an order that it had missed: %s", order, extra=facts)
        self._processes[endpoint] = status["worker"]

    # --- weights -----------------------------------------------------------------------------------------------------

    async def _look_at_weights(self) -> None:
        update, late = self._watch.published, []
        for state in self._watch.states():
            if state.status is None or state.status["state"] in ("asleep", "draining"):
                continue
            if _is_late(state.status, update):
                if self._is_due(state.endpoint, state.status, update):
                    late.append(state.endpoint)
            else:
                self._late.pop(state.endpoint, None)
                self._watch.outlook.pop(state.endpoint, None)
        if late:
            await self._bring_weights(late)

    def _is_due(self, endpoint: str, status: dict[str, Any], update: PublishedWeights) -> bool:
        known = self._late.get(endpoint)
        if known is None or known.process != status["worker"] or known.update is not update:
            # The trainer of a worker whose weights were dropped is likely to send new weights.
            wait_s = _STALE_S if status["state"] == "stale" else 0.0
            known = self._late[endpoint] = _Late(status["worker"], update, due_s=self._loop.time() + wait_s)
        if update.folder is None:
            self._give_up([endpoint], f"version {update.version} {update.why_not_kept}: {_AGAIN}")
        return known.due_s <= self._loop.time()

    async def _bring_weights(self, endpoints: list[str]) -> None:
        """Send the last update to workers with older weights."""
        async with self._workers.publishing:
            await self._watch.refresh(STATUS_S)
            update = self._watch.published
            states = self._watch.states()
            late = {state.endpoint for state in states if state.status is not None and _is_late(state.status, update)}
            endpoints = [endpoint for endpoint in endpoints if endpoint in late and endpoint in self._late]
            if update.folder is None or not endpoints:
                return
            if problem := await asyncio.to_thread(update.folder.problem):
                self._give_up(endpoints, f"version {update.version} cannot be sent to it, {problem}: {_AGAIN}")
                return
            for endpoint in endpoints:
                self._watch.outlook[endpoint] = f"version {update.version} is sent to it"
            began_s = time.monotonic()
            work = self._updates.publish(endpoints, update.folder, update.version)
            try:
                errors = (await self._workers.unless_lost(work, endpoints)).errors
            except HttpError as error:
                self._give_up(endpoints, f"version {update.version} cannot be sent to it, {error}: {_AGAIN}")
                return
            except RolloutError as error:
                errors = dict.fromkeys(endpoints, error)
            await self._watch.refresh(STATUS_S)
            for endpoint in endpoints:
                if endpoint in errors:
                    self._failed(endpoint, update, errors[endpoint])
                else:
                    seconds = time.monotonic() - began_s
                    facts = {"endpoint": endpoint, "version": update.version, "folder": str(update.folder.path)}
                    log.info("a worker with older weights was brought up to date", extra=facts | {"seconds": seconds})

    def _failed(self, endpoint: str, update: PublishedWeights, error: RolloutError) -> None:
        late = self._late[endpoint]
        late.tries += 1
        late.refusals += not isinstance(error, UNANSWERED)
        if late.refusals >= _MOST_REFUSALS:
            self._give_up([endpoint], f"it refuses version {update.version}: {error}; {_AGAIN}")
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (late.tries - 1))
        late.due_s = self._loop.time() + pause_s
        self._watch.outlook[endpoint] = f"version {update.version} did not reach it, and is sent again: {error}"
        if late.tries == 1:
            log.warning("cannot update a worker that has older weights: %s", error, extra={"endpoint": endpoint})

    def _give_up(self, endpoints: Sequence[str], what: str) -> None:
        for endpoint in endpoints:
            if self._watch.outlook.get(endpoint) != what:
                log.warning("a worker keeps older weights: %s", what, extra={"endpoint": endpoint})
            self._watch.outlook[endpoint] = what
            self._late[endpoint].due_s = float("inf")


def _is_late(status: dict[str, Any], update: PublishedWeights) -> bool:
    """Whether a worker lacks an update: it has an older version, or has lost its weights."""
    version: int = status["weights_version"]
    return version < update.version or (
        status["state"] == "stale" and version == update.version and update.folder is not None
    )


def _version_of(name: str, statuses: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The version that an adapter has at other workers, as a field of the order to load it."""
    known = [each["version"] for status in statuses for each in status.get("adapters") or () if each["name"] == name]
    return {"version": max(known)} if known else {}
