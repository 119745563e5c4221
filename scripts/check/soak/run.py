r"""One soak: supervised workers, clients and faults for a given time; afterwards all resources must be free.

    clients --- proxies, which cut --- worker 0, 1, ...  <-- supervisor
       \__________ directly __________/      ^ publishers

`python -m scripts.check.run_soak` runs it from the command line. The same seed gives the same requests, and faults at
the same times; how they interleave depends on the machine.
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scripts.check.soak.faults import LOSSES, Faults, plan_faults
from scripts.check.soak.jobs import JOBS, LONGEST, Scene
from scripts.check.soak.ledger import Asked, Ledger, Place
from scripts.check.soak.memory import MemoryLog
from scripts.check.soak.proxy import Proxy
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.launch import WorkerProcess, start_worker

ONES = Path(__file__).parents[3] / "rollout" / "demo" / "checkpoints" / "ones"
_JOB_LIMIT_S = 600.0
_IDLE_LIMIT_S = 60.0
_LONG_RUN_S = 30.0  # a shorter one has shorter completions
#: Few rows and pages, so that requests wait and are preempted; a short lease, so that the limit is reached.
_FLAGS: dict[str, Any] = {
    "wandb": False,
    "max_rows": 12,
    "max_context_tokens": 18_000,
    "kv_pages": 3000,
    "lease_s": 3.0,
    "idle_s": 30.0,  # longer than a publisher waits for a worker that is down
    "drain_s": 60.0,
    "max_restarts": 1000,
    "restart_backoff_s": 0.002,
}


@dataclass(frozen=True)
class SoakReport:
    """The results of a soak. It is clean without complaints, lost requests and growing memory."""

    seconds: float
    drain_s: float
    workers: int
    seed: int
    requests: dict[str, int]
    finished: dict[str, int]
    tokens: int
    resumes: int
    swapped_while_running: int
    faults: dict[str, int]
    excused: dict[str, int]
    restarts: int
    restart_s: list[float]
    preemptions: int
    reclaimed: int
    most_pause_s: float
    wrong: int
    lost: int
    memory: list[dict[str, Any]]
    complaints: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """True if nothing was wrong."""
        return not (self.wrong or self.lost or self.complaints)


async def soak(
    seconds: float,
    workers: int,
    seed: int,
    clients: int,
    folder: Path,
    say: Callable[[str], object],
    ranks: int = 1,
    device: str = "cpu",
) -> SoakReport:
    """Run a soak. The workers log to a file in `folder`; `say` prints the progress.

    Each worker has `ranks` ranks, which are killed and stopped, too.
    """
    say(f"starting {workers} workers ...")
    flags = {**_FLAGS, "device": device, "workers": workers, "tensor_parallel": ranks, "supervise": workers == 1}
    worker = await asyncio.to_thread(start_worker, ONES, log_file=folder / "workers.log", **flags)
    with worker, tempfile.TemporaryDirectory(prefix="soak-weights-") as weights:
        run = Soak(worker, Path(weights), seconds, seed, say)
        return await run.run(clients, ranks)


class Soak:
    """The parts of one run."""

    def __init__(
        self, worker: WorkerProcess, weights: Path, seconds: float, seed: int, say: Callable[[str], object]
    ) -> None:
        tokenizer = Tokenizer.from_file(str(ONES / "tokenizer.json"))
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
        self.ledger = Ledger(texts.__getitem__, say)
        self._worker, self._weights, self._seconds, self._seed, self._say = worker, weights, seconds, seed, say
        self._places: list[Place] = []
        self._proxies: list[Proxy] = []
        self._began_s = time.monotonic()

    async def run(self, clients: int, ranks: int = 1) -> SoakReport:
        """Run traffic and faults, then the final checks."""
        await self._open_proxies()
        faults = Faults(self.ledger, self._worker, self._places, self._proxies, self._weights)
        plan = plan_faults(self._seed, self._seconds, len(self._places), ranks)
        self._began_s = time.monotonic()
        memory = MemoryLog(self._pids, self._began_s)
        watchers = [asyncio.create_task(memory.run()), asyncio.create_task(self._tell())]
        drivers = [asyncio.create_task(self._drive(number)) for number in range(clients)]
        await faults.run(plan, self._began_s)
        await asyncio.gather(*drivers)
        drain_s = time.monotonic() - self._began_s - self._seconds
        statuses = await self._until_idle()
        await self._check_calm(faults)
        memory.sample()
        rows = memory.rows(0.2 * self._seconds)
        for watcher in watchers:
            watcher.cancel()
        for proxy in self._proxies:
            await proxy.close()
        status = await asyncio.to_thread(self._worker.stop, "drain", 60.0)
        if status != 0:
            self.ledger.complain(f"the workers ended with status {status}")
        return self._report(faults, statuses, drain_s, rows)

    async def _open_proxies(self) -> None:
        for index, endpoint in enumerate(self._worker.endpoints):
            proxy = Proxy(endpoint)
            self._proxies.append(proxy)
            self._places.append(Place(index, endpoint, await proxy.start()))

    def _pids(self) -> dict[str, int]:
        pids = self._worker.pids
        workers = {f"worker {index}": pid for index, pid in enumerate(pids) if pid is not None}
        return {**workers, "supervisor": self._worker.pid, "clients": os.getpid()}

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(10.0)
            led = self.ledger
            self._say(
                f"{time.monotonic() - self._began_s:5.0f} s  {led.requests.total()} requests  {led.tokens} tokens  "
                f"{led.faults.total()} faults  {led.resumes} resumes  wrong {led.wrong_count}  lost {led.lost_count}"
            )

    # --- traffic ------------------------------------------------------------------------------------------------------

    async def _drive(self, number: int) -> None:
        """Run one job after the other until the time is up."""
        rng = random.Random(f"{self._seed}-{number}")
        proxied = number % 2 == 0
        name = f"driver-{number}" if number % 4 < 2 else None
        endpoints = [place.proxied if proxied else place.direct for place in self._places]
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                AsyncRolloutClient(endpoints, client=name, timeout_s=_JOB_LIMIT_S, resume=True, resume_timeout_s=120.0)
            )
            longest = LONGEST if self._seconds >= _LONG_RUN_S else LONGEST // 8
            scene = Scene(rng, self.ledger, self._places, client, f"driver-{number}-{self._seed}", longest)
            jobs, weights = list(JOBS), list(JOBS.values())
            while time.monotonic() < self._began_s + self._seconds:
                await self._do(rng.choices(jobs, weights)[0], scene)

    async def _do(self, job: Callable[[Scene], Awaitable[None]], scene: Scene) -> None:
        try:
            async with asyncio.timeout(_JOB_LIMIT_S):
                await job(scene)
        except Exception as error:  # any error means that the job did not get its completions
            self.ledger.lose(f"{getattr(job, '__name__', job)} of {scene.name}: {error!r}")

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _until_idle(self) -> Sequence[Mapping[str, Any]]:
        """Wait until rows, slots, pages and queues are free; complain about the others."""
        async with AsyncRolloutClient([place.direct for place in self._places], timeout_s=30.0) as client:
            end_s = time.monotonic() + _IDLE_LIMIT_S
            while True:
                statuses = list((await client.statuses()).values())
                busy = [_left_over(status) for status in statuses]
                if not any(busy) or time.monotonic() > end_s:
                    break
                await asyncio.sleep(0.2)
        for index, (left, status) in enumerate(zip(busy, statuses, strict=True)):
            if left:
                self.ledger.complain(f"worker {index} still has {left}")
            if status["faults"] or status["problems"] or status["state"] != "serving":
                self.ledger.complain(f"worker {index}: {status['faults']} faults, {status['problems']}")
        return statuses

    async def _check_calm(self, faults: Faults) -> None:
        """Check that every worker still takes new weights and counts with them from the first token on."""
        version = await faults.swap("zmq")
        async with AsyncRolloutClient([place.direct for place in self._places], timeout_s=60.0) as client:
            for place in self._places:
                asked = Asked("last", "17:", 300, one_worker=True)
                result = await client.generate("17:", max_tokens=300, endpoint=place.direct)
                self.ledger.requests["last"] += 1
                (completion,) = result.completions
                self.ledger.check(asked, completion)
                if completion.versions != [(version, 300)]:
                    self.ledger.complain(f"worker {place.index} has {completion.versions}, not version {version}")

    def _report(
        self, faults: Faults, statuses: Sequence[Mapping[str, Any]], drain_s: float, rows: list[dict[str, Any]]
    ) -> SoakReport:
        led = self.ledger
        restarts = sum(status["restarts"] for status in statuses)
        if restarts != (lost := sum(led.faults[kind] for kind in LOSSES)):
            led.complain(f"{lost} workers were lost, but {restarts} restarts are reported")
        return SoakReport(
            seconds=self._seconds,
            drain_s=drain_s,
            workers=len(statuses),
            seed=self._seed,
            requests=dict(sorted(led.requests.items())),
            finished=dict(sorted(led.finished.items())),
            tokens=led.tokens,
            resumes=led.resumes,
            swapped_while_running=led.swapped_while_running,
            faults=dict(sorted(led.faults.items())),
            excused=dict(sorted(led.excused.items())),
            restarts=restarts,
            restart_s=faults.restart_s,
            preemptions=sum(status["preemptions"] for status in statuses),
            reclaimed=sum(status["reclaimed"] for status in statuses),
            most_pause_s=max(faults.pauses_s, default=0.0),
            wrong=led.wrong_count,
            lost=led.lost_count,
            memory=rows,
            complaints=[*led.wrong, *led.lost],
        )


def _left_over(status: dict[str, Any]) -> dict[str, int]:
    """Resources that an idle worker still holds."""
    pages = status["pages"]
    counts = {
        "rows": status["rows"]["running"],
        "waiting requests": status["queue"]["waiting"],
        "slots": status["slots"]["in_flight"],
        "used pages": pages["used"],
        "missing pages": pages["total"] - pages["free"] - pages["cached"] - pages["used"],
    }
    return {name: count for name, count in counts.items() if count}
