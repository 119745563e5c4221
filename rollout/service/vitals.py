"""A worker's report about itself: the engine's last snapshot with the present state, and its problems.

The loop calls `tick` and `refresh`. The service and `/health` read `latest` and `not_serving` from their own threads,
also while the loop hangs.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rollout.config import Settings
from rollout.engine.inspect import Inspector
from rollout.engine.loop import Engine
from rollout.engine.messages.statuses import EngineStatus, RankStatus
from rollout.engine.parts import EngineLinks
from rollout.metrics.definitions import TOP_METRICS
from rollout.metrics.sinks import MetricsThread
from rollout.service.text.process import TextProcess

log = logging.getLogger(__name__)

_STATUS_EVERY_S = 0.1


class Vitals:
    """The parts of a worker, read for its status.

    `restarts` counts the supervisor's restarts of this worker, `ranks` describes the ranks of a tensor group.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        links: EngineLinks,
        metrics: MetricsThread,
        prompts: TextProcess | None,
        restarts: int,
        ranks: Callable[[], Sequence[RankStatus]] = tuple,
    ) -> None:
        self.faults: list[float] = []  # times of engine faults, `time.perf_counter()`
        self.last_tick_s = time.perf_counter()
        self.status = EngineStatus(state="serving", rows_max=settings.engine.max_rows)
        self._engine, self._inspector, self._links = engine, Inspector(engine), links
        self._metrics, self._prompts = metrics, prompts
        self._stall_s = settings.engine.stalled_s
        self._restarts = restarts
        self._ranks = ranks
        self._next_status_s = 0.0
        self._known_problems: tuple[str, ...] = ()

    # --- the loop's thread --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Note that the loop begins a tick."""
        self.last_tick_s = time.perf_counter()

    def refresh(self, at_once: bool) -> None:
        """Take a snapshot when it is due, and log its new problems."""
        now = time.perf_counter()
        if now < self._next_status_s and not at_once:
            return
        self.status, self._next_status_s = self._inspector.status(), now + _STATUS_EVERY_S
        if (problems := self.problems()) != self._known_problems:
            for problem in problems:
                if problem not in self._known_problems:
                    log.error("%s", problem)
            self._known_problems = problems

    # --- any thread ---------------------------------------------------------------------------------------------------

    def latest(self) -> EngineStatus:
        """The last snapshot, with the state, version and adapters of now: a client that got `ok` sees the effect."""
        silent_s, gate = time.perf_counter() - self.last_tick_s, self._links.gate
        reported = self._metrics.latest
        return replace(
            self.status,
            state="stalled" if silent_s > self._stall_s else gate.state,
            sleep=gate.sleep_status(),
            stale=gate.stale,
            weights_version=self._engine.roster.version,
            **self._inspector.of_features(),
            last_tick_s=silent_s,
            faults=len(self.faults),
            restarts=self._restarts,
            prompt_faults=0 if self._prompts is None else self._prompts.deaths,
            ranks=tuple(self._ranks()),
            problems=self.problems(),
            metrics={} if reported is None else _shown(reported.metrics),
        )

    def not_serving(self) -> str:
        """The reason why the worker does not serve, for `/health`; empty if it does."""
        status = self.latest()
        return {
            "serving": "",
            "paused": "generation is paused until `resume`",
            "draining": "the worker is shutting down and takes no new requests",
            "asleep": "the worker sleeps until `wake`",
            "stale": status.stale,
            "stalled": f"the loop has hung for {status.last_tick_s:.0f} s",
        }[status.state]

    def problems(self) -> tuple[str, ...]:
        """A sentence for each failed part without which generation continues."""
        threads = {"the weight receiver": self._links.receiver.alive, "the metrics thread": self._metrics.alive}
        ended = tuple(f"{name} has ended" for name, alive in threads.items() if not alive)
        gate = self._links.gate
        stale = (gate.stale,) if gate.failed else ()
        text = () if self._prompts is None or self._prompts.problem is None else (self._prompts.problem,)
        hung = self._engine.masks.left_behind
        masks = (f"{hung} constraints have hung a thread each",) if hung else ()
        failure = self._engine.parts.tier.failure
        moved = (failure,) if failure else ()
        return (*ended, *stale, *text, *masks, *moved)


def _shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a report that `rollout top` shows."""
    return {metric.name: metrics[metric.name] for metric in TOP_METRICS if metric.name in metrics}
