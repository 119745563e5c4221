"""The states of all workers, as the gateway knows them. Endpoints that only ask for state never wait for a worker.

    WorkerWatch --status, again and again--> every worker
      |---> states: what is known now
      +---> the log: a line when a worker is lost, hangs, is started again, has older weights, is in order again

A lost connection is known at once, from ZeroMQ. A worker that is connected and has not answered for some seconds hangs.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout_gateway.workers.weights_folder import WeightsFolder
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.wire.errors import AccessRefused, RolloutError

log = logging.getLogger(__name__)

_ASK_EVERY_S, _LOOK_EVERY_S = 0.5, 0.25
#: The longest wait for the states of now. There is no wait for a worker with a question unanswered for this time.
_PROMPT_S = 0.05
_UNREACHED_S = 5.0  # time until the log names a worker that never came
_LAG_S = 0.5  # a later process has not read the answers: its workers are not silent
#: States in which a worker is in order. Orders end a pause or a sleep.
_WELL = ("serving", "paused", "asleep")
#: The lines of the log, by the word for a worker's state.
_LINES = {
    "lost": "a worker is lost: %s",
    "missing": "a worker does not come: %s",
    "silent": "a worker hangs: %s",
    "behind": "a worker has older weights: %s",
}


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """A worker's last `status` reply, or None if it does not answer.

    `word` and `problem` say why it is not in order; both are empty if it is.
    """

    endpoint: str
    status: dict[str, Any] | None
    word: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Weights that this gateway has brought to the workers. `folder`: their source; None: they cannot be sent again."""

    version: int
    folder: WeightsFolder | None = None
    why_not_kept: str = "is the --min-version of this gateway"


@dataclass(slots=True, eq=False)
class _Watched:
    """One worker. Times are the loop's."""

    endpoint: str
    since_s: float  # time of the last change of `connected`
    connected: bool = False
    looked_s: float = -math.inf  # time of the last look-up of `connected`
    newcomer: bool = False  # it was lost, and has not had the newest weights since
    status: dict[str, Any] | None = None  # the last status over this connection
    known: dict[str, Any] | None = None  # the last status over any connection
    asked_s: float = -math.inf  # time of the last status question
    answered_s: float = 0.0  # time of the question that `status` answers
    questions: dict[int, float] = field(default_factory=dict)  # number of each unanswered question -> its time
    error: RolloutError | None = None  # the error of the last question
    process: str | None = None  # the worker's own name: host and process id
    logged: str | None = None  # the word of the last line in the log

    def is_prompt(self, now: float) -> bool:
        """Whether it is likely to answer at once."""
        return self.connected and all(now - since_s < _PROMPT_S for since_s in self.questions.values())


class WorkerWatch:
    """The states of all workers, and the weights that they should have.

    `silent_s`: seconds after which a worker that does not answer hangs.
    """

    def __init__(self, pool: AsyncRolloutClient, min_version: int, silent_s: float) -> None:
        self.published = PublishedWeights(min_version)
        #: Weights that did not reach all workers. They count as published once a worker uses them.
        self.attempt: PublishedWeights | None = None
        #: Endpoints of workers with older weights, with the gateway's cure, or a cure for an operator.
        self.outlook: dict[str, str] = {}
        self._pool = pool
        self._silent_s = silent_s
        self._loop = asyncio.get_running_loop()
        self._workers = [_Watched(endpoint, self._loop.time()) for endpoint in pool.endpoints]
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked_s = self._loop.time()  # time of the last look in `run`

    # --- reading -----------------------------------------------------------------------------------------------------

    def states(self) -> list[WatchedWorker]:
        """The last known state of every worker."""
        states = list(map(self._answering, self._workers))
        floor = self.floor(states)
        versions = [state.status["weights_version"] for state in states if state.status is not None]
        for index, (worker, state) in enumerate(zip(self._workers, states, strict=True)):
            if state.status is None:
                continue
            version, newest = state.status["weights_version"], max(versions)
            worker.newcomer = worker.newcomer and version < newest
            word = problem = ""
            if state.status["state"] not in _WELL:
                word, problem = state.status["state"], f"the worker is {state.status['state']}"
            elif version < floor or worker.newcomer:
                fleet = f"the fleet {floor}" if version < floor else f"the others {newest}, and it gets no requests"
                word, problem = "behind", f"it has weights version {version}, {fleet}"
            if problem and (outlook := self.outlook.get(worker.endpoint)):
                problem += f"; {outlook}"
            states[index] = replace(state, word=word, problem=problem)
        return states

    def floor(self, states: Sequence[WatchedWorker]) -> int:
        """The version that a worker in order has at least.

        It is the newest of `--min-version`, what this gateway has published, and the workers' own `min_version`.
        """
        own = [((state.status or {}).get("weights") or {}).get("min_version", 0) for state in states]
        return max(self.published.version, *own)

    def last_known(self) -> list[dict[str, Any]]:
        """The last status of every worker that has ever answered, also of lost workers."""
        return [worker.known for worker in self._workers if worker.known is not None]

    def is_connected(self, endpoint: str) -> bool:
        """Whether a worker is connected, or was within `_PROMPT_S`: each request asks this."""
        recent_s = self._loop.time() - _PROMPT_S
        return any(
            (worker.connected and worker.looked_s > recent_s) or self._look_at(worker)
            for worker in self._workers
            if worker.endpoint == endpoint
        )

    def _answering(self, worker: _Watched) -> WatchedWorker:
        """The worker's status, or why it does not answer."""
        now = self._loop.time()
        word = problem = ""
        if not self._look_at(worker):
            if isinstance(worker.error, AccessRefused):
                word, problem = "refused", str(worker.error)
            elif worker.known is None:
                word, problem = "missing", f"not reached for {now - worker.since_s:.0f} s; does a worker run there?"
            else:
                word, problem = "lost", _lost_for(now - worker.since_s)
        else:
            silent_s = now - self._lag_s(now) - (worker.since_s if worker.status is None else worker.answered_s)
            if worker.status is None or silent_s > self._silent_s:
                word, problem = "silent", f"no answer for {silent_s:.1f} s"
        return WatchedWorker(worker.endpoint, None if word else worker.status, word, problem)

    def _look_at(self, worker: _Watched) -> bool:
        """Whether it is connected now. A change of the connection clears the status."""
        connected, worker.looked_s = self._pool.is_connected(worker.endpoint), self._loop.time()
        if connected != worker.connected:
            worker.connected, worker.since_s, worker.status = connected, self._loop.time(), None
            worker.newcomer |= not connected and len(self._workers) > 1
        return connected

    def _lag_s(self, now: float) -> float:
        """Seconds for which this process has not read answers; 0 for a short time."""
        lag_s = now - self._looked_s - _LOOK_EVERY_S
        return lag_s if lag_s > _LAG_S else 0.0

    def _forgive_lag(self) -> None:
        now = self._loop.time()
        lag_s, self._looked_s = self._lag_s(now), now
        for worker in self._workers:
            worker.answered_s += lag_s
            worker.since_s += lag_s

    # --- what is published -------------------------------------------------------------------------------------------

    def has_published(self, update: PublishedWeights) -> None:
        """A worker uses these weights."""
        self.attempt = None
        if update.version >= self.published.version:
            self.published = update
            self.outlook.clear()

    # --- asking ------------------------------------------------------------------------------------------------------

    async def refresh(self, within_s: float = _PROMPT_S) -> None:
        """Ask for the states of now. A worker that does not answer `within_s` keeps its last state."""
        now = self._loop.time()
        there = [worker for worker in self._workers if self._look_at(worker)]
        asked = [self._ask(worker) for worker in there if within_s > _PROMPT_S or worker.is_prompt(now)]
        if asked:
            await asyncio.wait(asked, timeout=within_s)

    async def run(self) -> None:
        """Ask every worker again and again, and log what happens to them."""
        try:
            while True:
                due_s = self._loop.time() - _ASK_EVERY_S
                for worker in self._workers:
                    if not worker.questions and worker.asked_s <= due_s:
                        self._ask(worker)
                await asyncio.sleep(_LOOK_EVERY_S)
                self._forgive_lag()
                self._log_changes()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ask(self, worker: _Watched) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._question(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _question(self, worker: _Watched) -> None:
        self._asked += 1
        number, asked_s = self._asked, self._loop.time()
        worker.questions[number] = worker.asked_s = asked_s
        try:
            (status,) = await self._pool.control("status", endpoint=worker.endpoint)
        except RolloutError as error:
            worker.error = error
            return
        finally:
            del worker.questions[number]
        if self._look_at(worker) and (worker.status is None or asked_s >= worker.answered_s):
            worker.status = worker.known = status
            worker.answered_s, worker.error = max(asked_s, worker.since_s), None
            if self.attempt is not None and status["weights_version"] == self.attempt.version:
                self.has_published(self.attempt)

    # --- the log -----------------------------------------------------------------------------------------------------

    def _log_changes(self) -> None:
        for worker, state in zip(self._workers, self.states(), strict=True):
            facts: dict[str, Any] = {"endpoint": worker.endpoint}
            started_again = False
            if state.status is not None:
                process = state.status["worker"]
                facts |= {"worker": process, "version": state.status["weights_version"]}
                started_again = worker.process not in (None, process)
                worker.process = process
            if started_again:
                log.info("a worker was started again", extra=facts)
            waited_s = self._loop.time() - worker.since_s
            patience_s = {"missing": _UNREACHED_S, "silent": self._silent_s}.get(state.word, 0.0)
            if state.word == worker.logged or waited_s < patience_s:
                continue
            if state.word:
                log.warning(_LINES.get(state.word, "a worker is not in order: %s"), state.problem, extra=facts)
            elif not started_again:
                log.info("a worker is in order%s", "" if worker.logged in (None, "missing") else " again", extra=facts)
            worker.logged = state.word


def _lost_for(seconds: float) -> str:
    return "the connection has ended" + (f", {seconds:.0f} s ago" if seconds >= 1 else "")
