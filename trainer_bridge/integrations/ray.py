"""Workers on a Ray cluster, an actor for each one. Needs the extra `ray`.

    with (
        RayFleet("/models/qwen3-8b", workers=4, flags={"max_rows": 64}) as fleet,
        RolloutClient(fleet.endpoints, resume=True) as client,
        WeightPublisher(fleet.endpoints, keep=True) as publisher,
    ):
        for step in range(steps):
            fleet.sync(client, publisher)       # workers that joined or left since the last step
            ...

    trainer      RayFleet    a thread that watches the actors
    Ray node     actor       in a bundle of a placement group, with its GPUs; owns one worker process
                 worker      `rollout serve`; ends with its actor

A worker that dies is started again by its actor, at the same endpoint. An actor that dies, perhaps with its node, is
replaced; the new worker has another endpoint. Either way the new worker begins with the checkpoint, so it gets as
`min_version` the newest version that the fleet was seen with: it samples nothing before a publisher with `keep` has
brought it current weights. The other workers and their connections stay as they are.

    waiting --due--> starting --endpoint--> serving --remove--> leaving --ended--> (its bundle is free)
       ^                 |                     |
       +-----------------+---- it died --------+----> gone     after too many restarts, or if it never served
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Literal, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerFailed, WorkerProcess, start_worker
from trainer_bridge.process_bound import Closing
from trainer_bridge.wire.address import LOOPBACK, host_port
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.keys import ClientCurve

_TICK_S = 0.05
_WATCH_S = 0.5  # an actor answers after this time while its worker runs
_STATUS_S = 10.0
_STOP_S = 10.0
_RECENT_S = 3600.0
_MOST_BACKOFF_S = 60.0

State = Literal["starting", "serving", "waiting", "leaving", "gone"]

_log = logging.getLogger(__name__)


class FleetUser(Protocol):
    """An argument of `RayFleet.sync`: a client or a publisher."""

    @property
    def endpoints(self) -> Any:
        """Its present endpoints."""

    def add(self, endpoint: str) -> None:
        """Add a worker."""

    def remove(self, endpoint: str) -> None:
        """Remove a worker."""


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """One worker of a fleet, as `RayFleet.workers` lists it.

    `state`: `starting`, `serving`, `waiting` for its next start, `leaving`, or `gone` for good. `endpoint`, `pid` and
    `node` (its address) are None before the first start. `version` is the weights version that it was last seen with,
    `problem` why it ended last.
    """

    state: State
    endpoint: str | None
    pid: int | None
    node: str | None
    version: int
    restarts: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class _Launch:
    """The settings with which actors start their workers. `one_node`: no other host has to reach a worker."""

    model: str
    flags: dict[str, Any]
    env: dict[str, str | None]
    one_node: bool
    ready_timeout_s: float
    curve: ClientCurve | None


@dataclass(frozen=True, slots=True)
class _Started:
    """An actor's answer to `start`."""

    endpoint: str
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """An actor's answer to `watch`: the worker's exit status, or None; its version, if known; the end of its log."""

    status: int | None
    version: int | None = None
    log: str = ""


class _WorkerActor:
    """The actor: starts one worker process on its node and watches it. Its methods run one at a time."""

    def __init__(self, launch: _Launch, log_file: str | None) -> None:
        self._launch, self._log_file = launch, log_file
        self._process: WorkerProcess | None = None
        self._endpoint: str | None = None

    def start(self, min_version: int) -> _Started:
        """Start the worker, at the endpoint that it had before. Raises `WorkerFailed`."""
        if self._process is not None:
            self._process.kill()
        launch, node = self._launch, get_node_ip_address()
        any_port = f"tcp://{host_port(LOOPBACK if launch.one_node else node, 0)}"
        self._process = start_worker(
            launch.model,
            env=launch.env,
            log_file=self._log_file,
            ready_timeout_s=launch.ready_timeout_s,
            progress=False,
            curve=launch.curve,
            bind=self._endpoint or any_port,
            weights_bind=any_port,
            **{**launch.flags, "min_version": max(min_version, launch.flags.get("min_version", 0))},
        )
        self._endpoint = self._process.endpoint
        return _Started(self._endpoint, self._process.pid, node)

    def watch(self) -> _Seen:
        """Look at the worker for a moment."""
        assert self._process is not None and self._endpoint is not None
        until_s = time.monotonic() + _WATCH_S
        while self._process.returncode is None and time.monotonic() < until_s:
            time.sleep(_TICK_S)
        if self._process.returncode is not None:
            return _Seen(self._process.returncode, log=self._process.log_tail())
        try:
            with RolloutClient(self._endpoint, timeout_s=_STATUS_S, curve=self._launch.curve) as client:
                return _Seen(None, int(client.status()["weights_version"]))
        except RolloutError:
            return _Seen(None)  # the worker hangs, or has just died: the next poll tells

    def stop(self, mode: Literal["drain", "now"], timeout_s: float) -> None:
        if self._process is not None:
            self._process.stop(mode, timeout_s)


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker of the fleet: bundle, actor, and the last order to the actor."""

    group: PlacementGroup
    bundle: int
    log_file: str | None
    actor: Any = None
    answer: Any = None  # the object that the actor's answer will be
    state: State = "waiting"
    started: _Started | None = None  # None again once another endpoint has to be found
    served: bool = False  # the worker has served once
    due_s: float = 0.0  # time of the next start, on the monotonic clock
    version: int = 0
    restarts: int = 0
    recent: list[float] = field(default_factory=list)  # times of the restarts in the last hour
    problem: str | None = None


class RayFleet(Closing):
    """Workers on the Ray cluster that this process is connected to (`ray.init`).

    Returns once all workers can serve. A worker of a cluster with several nodes listens on its node's address, so it
    needs CURVE keys (in `flags`, and `curve` for the fleet), or `insecure=True` in `flags` on a closed network.

    Args:
        model: Folder or name of the model, as on the workers' nodes.
        workers: Workers to begin with. They are placed together or not at all.
        gpus: GPUs for each; Ray sets CUDA_VISIBLE_DEVICES. 0 for workers on CPUs. Default: 1.
        cpus: CPUs for each. Default: 1.
        strategy: Of the placement group. Default: `PACK`.
        flags: Settings of the workers, as `start_worker` takes them. With `min_version=1` a worker never samples from
            its checkpoint, not even the first time.
        env: Added to the workers' environment; None removes.
        log_folder: Where the workers' logs go, on their nodes: `worker-0.log` and so on. Default: a temporary folder,
            deleted with the worker.
        curve: Keys by which the fleet asks workers for their status.
        ready_timeout_s: Seconds for a worker to start. Default: 900.
        place_timeout_s: Seconds for Ray to find room. Default: 60.
        max_restarts: Restarts of one worker in an hour, after which it is given up. Default: 5.
        restart_backoff_s: Seconds before the first restart; doubles with every restart in an hour, up to 60.

    Raises `WorkerFailed` if Ray has no room, or a worker does not start.
    """

    _instead = "change the fleet in its process, and pass its endpoints"

    def __init__(
        self,
        model: str,
        workers: int,
        *,
        gpus: float = 1,
        cpus: float = 1,
        strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK",
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        log_folder: str | None = None,
        curve: ClientCurve | None = None,
        ready_timeout_s: float = 900.0,
        place_timeout_s: float = 60.0,
        max_restarts: int = 5,
        restart_backoff_s: float = 1.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; use at least 1")
        given = dict(flags or {})
        if chosen := {"bind", "weights_bind", "log_file", "workers"}.intersection(given):
            raise ValueError(f"flags has {min(chosen)!r}, which the fleet sets by itself")
        one_node = sum(node["Alive"] for node in ray.nodes()) == 1
        self._launch = _Launch(model, given, dict(env or {}), one_node, ready_timeout_s, curve)
        self._actor_class = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(_WorkerActor)
        self._resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._log_folder = log_folder
        self._place_timeout_s = place_timeout_s
        self._max_restarts, self._backoff_s = max_restarts, restart_backoff_s
        self._newest = 0  # weights version that a worker was seen with
        self._numbers = itertools.count()  # numbers of workers, for their logs
        self._leave: dict[_Worker, tuple[Literal["drain", "now"], float]] = {}  # workers to remove, and the way
        self._free: list[tuple[PlacementGroup, int]] = []  # bundles without a worker
        self._groups: list[PlacementGroup] = []
        self._changed = threading.Condition()  # guards the lists; the thread alone changes a worker in the list
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-fleet", daemon=True)
        group = self._place(workers, strategy)
        self._workers = [self._new_worker(group, bundle) for bundle in range(workers)]
        self._thread.start()
        try:
            for worker in list(self._workers):
                self._wait_served(worker)
        except BaseException:
            self.close()
            raise

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The request endpoints. A worker that restarts keeps its endpoint, and stays in the list."""
        return tuple(
            state.endpoint
            for state in self.workers()
            if state.endpoint is not None and state.state not in ("leaving", "gone")
        )

    @property
    def version(self) -> int:
        """The newest weights version that a worker was seen with."""
        return self._newest

    def workers(self) -> list[FleetWorker]:
        """All workers, even a worker that is gone for good."""
        with self._changed:
            return [_state_of(worker, worker in self._leave) for worker in self._workers]

    def sync(self, *users: FleetUser) -> None:
        """Have clients and publishers use the workers that the fleet has now; call it in the thread that owns them.

        Raises `WorkerFailed` if all workers are gone for good. While no worker has an endpoint, nothing changes.
        """
        wanted, states = self.endpoints, self.workers()
        if all(state.state == "gone" for state in states):
            last = states[-1].problem if states else "all were removed"
            raise WorkerFailed(f"no worker of the fleet is left; the last one: {last}")
        for user in users if wanted else ():
            for endpoint in wanted:
                if endpoint not in user.endpoints:
                    user.add(endpoint)
            for endpoint in tuple(user.endpoints):
                if endpoint not in wanted:
                    user.remove(endpoint)

    # --- changes ------------------------------------------------------------------------------------------------------

    def add(self) -> str:
        """Start one more worker and return its endpoint once it serves; then call `sync`. Raises `WorkerFailed`.

        It samples nothing before it has the newest version that the fleet was seen with.
        """
        with self._changed:
            free = self._free.pop() if self._free else None
        worker = self._new_worker(*(free or (self._place(1, "PACK"), 0)))
        with self._changed:
            self._workers.append(worker)
        self._wait_served(worker)
        assert worker.started is not None
        return worker.started.endpoint

    def remove(self, endpoint: str, mode: Literal["drain", "now"] = "drain", timeout_s: float = 600.0) -> None:
        """End a worker, at the latest after `timeout_s`; returns at once. Its room is kept for the next `add`.

        `drain` finishes its requests first, `now` returns them with the tokens they have. Raises ValueError.
        """
        if endpoint not in self.endpoints:
            raise ValueError(f"{endpoint!r} is no worker of this fleet; it has {', '.join(self.endpoints)}")
        with self._changed:
            for worker in self._workers:
                if worker.started is not None and worker.started.endpoint == endpoint:
                    self._leave[worker] = mode, timeout_s

    def close(self) -> None:
        """End all workers and release their resources. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        stops = [worker.actor.stop.remote("now", _STOP_S) for worker in self._workers if worker.state == "serving"]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=2 * _STOP_S)
        for worker in self._workers:
            self._end_actor(worker)
        for group in self._groups:
            remove_placement_group(group)

    def _new_worker(self, group: PlacementGroup, bundle: int) -> _Worker:
        name = f"worker-{next(self._numbers)}.log"
        return _Worker(group, bundle, None if self._log_folder is None else os.path.join(self._log_folder, name))

    def _place(self, bundles: int, strategy: str) -> PlacementGroup:
        group = placement_group([dict(self._resources) for _ in range(bundles)], strategy=strategy)
        try:
            ray.get(group.ready(), timeout=self._place_timeout_s)
        except GetTimeoutError:
            remove_placement_group(group)
            raise WorkerFailed(
                f"Ray has no room for {bundles} workers of {self._resources} after {self._place_timeout_s:g} s; free "
                f"are {ray.available_resources()}: ask for fewer workers, or raise place_timeout_s"
            ) from None
        self._groups.append(group)
        return group

    def _wait_served(self, worker: _Worker) -> None:
        """Return once a new worker serves. If it does not start, it is dropped: another try would not help."""
        with self._changed:
            self._changed.wait_for(lambda: worker.state in ("serving", "gone"))
            if worker.state == "serving":
                return
            self._workers.remove(worker)
            self._free.append((worker.group, worker.bundle))
        raise WorkerFailed(f"a worker of the fleet did not start: {worker.problem}")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.wait(_TICK_S):
                with self._changed:
                    workers = list(self._workers)
                for worker in workers:
                    self._advance(worker)
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:  # Ray is gone: a caller that waits must not wait for ever
            _log.exception("the fleet cannot be watched any more")
            with self._changed:
                for worker in self._workers:
                    worker.state, worker.problem = "gone", f"the fleet cannot be watched any more: {error!r:.300}"
                self._changed.notify_all()

    def _advance(self, worker: _Worker) -> None:
        """Take the answer of a worker's actor, if it is there, and ask the next question."""
        if worker.state == "waiting":
            if time.monotonic() >= worker.due_s:
                self._start(worker)
            return
        if worker.state == "gone" or not ray.wait([worker.answer], timeout=0)[0]:
            return
        try:
            answer = ray.get(worker.answer)
        except RayActorError as error:  # the worker may end later than its actor: a new one needs another endpoint
            worker.actor = worker.started = None
            self._lost(worker, f"its actor died: {error}")
        except RayTaskError as error:
            self._lost(worker, str(error.cause))
        else:
            self._take(worker, answer)

    def _start(self, worker: _Worker) -> None:
        if worker.actor is None:
            bundle = PlacementGroupSchedulingStrategy(worker.group, placement_group_bundle_index=worker.bundle)
            actor = self._actor_class.options(scheduling_strategy=bundle)
            worker.actor = actor.remote(self._launch, worker.log_file)
        worker.state, worker.answer = "starting", worker.actor.start.remote(self._newest)

    def _take(self, worker: _Worker, answer: _Started | _Seen | None) -> None:
        if isinstance(answer, _Started):
            _log.info("a worker serves at %s", answer.endpoint)
            worker.started, worker.state, worker.served = answer, "serving", True
        elif answer is None:
            self._left(worker)
            return
        elif answer.status == 0:
            self._gone(worker, "it was told to end")
            return
        elif answer.status is not None:
            self._lost(worker, f"it ended with status {answer.status}\n{answer.log}")
            return
        elif answer.version is not None:
            worker.version, self._newest = answer.version, max(self._newest, answer.version)
        with self._changed:
            leave = self._leave.get(worker)
        if leave is None:
            worker.answer = worker.actor.watch.remote()
        else:
            worker.state, worker.answer = "leaving", worker.actor.stop.remote(*leave)

    def _left(self, worker: _Worker) -> None:
        """Free the bundle of a removed worker that has ended."""
        self._end_actor(worker)
        with self._changed:
            self._workers.remove(worker)
            self._leave.pop(worker, None)
            self._free.append((worker.group, worker.bundle))

    def _lost(self, worker: _Worker, problem: str) -> None:
        """Restart a worker after a pause, or give it up, because it or its actor died."""
        if worker in self._leave:
            self._left(worker)
            return
        now_s = time.monotonic()
        worker.recent = [when for when in worker.recent if when > now_s - _RECENT_S]
        if not worker.served:
            self._gone(worker, problem)
        elif len(worker.recent) >= self._max_restarts:
            self._gone(worker, f"it was restarted {self._max_restarts} times within an hour; at last {problem}")
        else:
            pause_s = min(self._backoff_s * 2 ** len(worker.recent), _MOST_BACKOFF_S)
            worker.recent.append(now_s)
            worker.restarts += 1
            worker.problem, worker.state, worker.due_s = problem, "waiting", now_s + pause_s
            _log.warning("a worker is started again in %g s: %s", pause_s, problem)

    def _gone(self, worker: _Worker, problem: str) -> None:
        _log.warning("a worker is gone for good: %s", problem)
        self._end_actor(worker)
        worker.problem, worker.state = problem, "gone"

    def _end_actor(self, worker: _Worker) -> None:
        """Kill the actor; its worker sees that and ends."""
        if worker.actor is not None:
            ray.kill(worker.actor)
            worker.actor = None


def _state_of(worker: _Worker, leaving: bool) -> FleetWorker:
    endpoint, pid, node = (None, None, None) if worker.started is None else astuple(worker.started)
    return FleetWorker(
        state="leaving" if leaving else worker.state,
        endpoint=endpoint,
        pid=pid,
        node=node,
        version=worker.version,
        restarts=worker.restarts,
        problem=worker.problem,
    )
