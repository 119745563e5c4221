"""The faults of a soak: a plan made from the seed, and their execution.

    kill            SIGKILL of a worker; its supervisor starts it again, with version 0
    lose            of workers with several ranks, instead: SIGKILL or SIGSTOP of a follower, or SIGKILL of rank 0
    cut             all connections through a worker's proxy break
    vanish          a client disconnects with many requests in flight; a raw connection sends half a greeting or garbage
    bad messages    a batch of bad messages; each must get one answer
    swap            new weights for all workers, over zmq or disk
    half a publish  a publisher is killed in the middle of an update

All workers but the last are killed again and again. The last one is killed only at the beginning, so that its memory
can be observed.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from safetensors.torch import load_file

from scripts.check.soak.hostile import bad_message
from scripts.check.soak.jobs import LONGEST, read_and_vanish
from scripts.check.soak.ledger import Ledger, Place, step_of
from scripts.check.soak.proxy import Proxy
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL"  # the first bytes of a ZMTP greeting
_RESTART_LIMIT_S = 90.0
_LOSS_EVERY_S = 30.0
#: Seconds that a worker of several ranks serves between two losses, so that requests make progress.
_SERVES_S = 12.0
#: What ends a worker, and the signal that does it.
LOSSES = {"rank killed": signal.SIGKILL, "rank stopped": signal.SIGSTOP, "worker killed": signal.SIGKILL}
_BATCH = 25
_ANSWER_MS = 60_000
#: Mean seconds between two faults of a kind.
EVERY_S = {"cut": 7.0, "vanish": 2.0, "rubbish": 3.0, "messages": 1.5, "zmq": 5.0, "disk": 9.0, "half": 45.0}


@dataclass(frozen=True, slots=True, order=True)
class Planned:
    """A fault: its time (seconds from the start), its kind, and its seed."""

    at_s: float
    kind: str
    seed: int


def plan_faults(seed: int, seconds: float, workers: int, ranks: int = 1) -> list[Planned]:
    """The faults of a run in order of time. The end of the run has no faults."""
    rng = random.Random(f"{seed}-faults")
    plan = []
    for kind, every_s in EVERY_S.items():
        at_s = rng.uniform(0.5, min(every_s, seconds * 0.4))
        while at_s < seconds * 0.95:
            plan.append(Planned(at_s, kind, rng.randrange(1 << 30)))
            at_s += rng.uniform(0.5, 1.5) * every_s
    if ranks > 1:
        losses = range(max(2, int(seconds / max(_LOSS_EVERY_S, seconds / 12))))
        every_s = 0.8 * seconds / len(losses)
        return sorted([*plan, *(Planned(0.05 * seconds + every_s * loss, "lose", loss) for loss in losses)])
    kills = [0.06 * seconds] if seconds >= 60 else []  # of the last worker
    plan += [Planned(at_s, "kill last", 0) for at_s in kills]
    at_s, every_s = max(3.0, 0.12 * seconds), max(12.0, seconds / 20)
    while at_s < seconds * 0.95:
        plan.append(Planned(at_s, "kill", rng.randrange(max(1, workers - 1))))
        at_s += every_s
    return sorted(plan)


class Faults:
    """The faults of one run. Belongs to one event loop."""

    def __init__(
        self, ledger: Ledger, worker: WorkerProcess, places: list[Place], proxies: list[Proxy], folder: Path
    ) -> None:
        self.restart_s: list[float] = []  # seconds of each restart
        self.pauses_s: list[float] = []  # of generation, caused by swaps
        self._ledger, self._worker, self._places, self._proxies, self._folder = ledger, worker, places, proxies, folder
        checkpoints = Path(__file__).parents[3] / "rollout" / "demo" / "checkpoints"
        self._checkpoints = {1: checkpoints / "ones", 2: checkpoints / "twos"}
        self._weights = {step: load_file(path / "model.safetensors") for step, path in self._checkpoints.items()}
        self._version = 0
        self._publishing = asyncio.Lock()
        self._losing = asyncio.Lock()
        self._ends_s = float("inf")
        self._tasks: set[asyncio.Task] = set()

    async def run(self, plan: list[Planned], began_s: float) -> None:
        """Cause every fault at its time; returns when all are over.

        Losses of ranks wait for each other. A loss that would come after the last other fault is left out.
        """
        self._ends_s = began_s + max(fault.at_s for fault in plan)
        for fault in plan:
            await asyncio.sleep(max(0.0, began_s + fault.at_s - time.monotonic()))
            task = asyncio.create_task(self._happen(fault))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)

    async def _happen(self, fault: Planned) -> None:
        rng = random.Random(fault.seed)
        faults: dict[str, Callable[[], Any]] = {
            "kill": lambda: self._kill(self._places[fault.seed]),
            "kill last": lambda: self._kill(self._places[-1]),
            "lose": lambda: self._lose(self._places[fault.seed % len(self._places)], fault.seed),
            "cut": lambda: self._cut(rng),
            "vanish": lambda: self._vanish(rng),
            "rubbish": lambda: self._rubbish(rng),
            "messages": lambda: self._bad_messages(rng),
            "zmq": lambda: self.swap("zmq", rng.choice([1, 1, 1, 2])),
            "disk": lambda: self.swap("disk", 1),
            "half": lambda: self._half_publish(rng),
        }
        if fault.kind in ("zmq", "disk", "half") and self._publishing.locked():
            return  # the previous one still waits for a worker that is down
        try:
            await faults[fault.kind]()
        except Exception as error:  # record a fault that could not be caused, and go on
            self._ledger.complain(f"fault {fault.kind}: {error!r}")

    # --- workers and connections --------------------------------------------------------------------------------------

    async def _kill(self, place: Place) -> None:
        before = self._worker.pids[place.index]
        if place.down or before is None:
            return
        place.down = True
        os.kill(before, signal.SIGKILL)
        self._ledger.faults["worker killed"] += 1
        await self._until_back(place, before)

    async def _lose(self, place: Place, loss: int) -> None:
        """Lose a rank of a worker, once the last loss is over and it has served for a while."""
        async with self._losing:
            while place.down or time.monotonic() < place.back_s + _SERVES_S:
                if time.monotonic() > self._ends_s:
                    return
                await asyncio.sleep(0.1)
            before, (kind, number) = self._worker.pids[place.index], list(LOSSES.items())[loss % len(LOSSES)]
            if before is None:
                return
            async with AsyncRolloutClient(place.direct, timeout_s=30.0) as client:
                ranks = (await client.status())["ranks"]
            place.down = True
            os.kill(ranks[0]["pid"] if kind == "worker killed" else ranks[1 + loss % (len(ranks) - 1)]["pid"], number)
            self._ledger.faults[kind] += 1
            await self._until_back(place, before)

    async def _until_back(self, place: Place, before: int) -> None:
        killed_s = time.monotonic()
        while self._worker.pids[place.index] == before:
            if time.monotonic() > killed_s + _RESTART_LIMIT_S:
                self._ledger.complain(f"worker {place.index} was not started again in {_RESTART_LIMIT_S:g} s")
                return
            await asyncio.sleep(0.1)
        self.restart_s.append(time.monotonic() - killed_s)
        place.back_s, place.down = time.monotonic(), False

    async def _cut(self, rng: random.Random) -> None:
        place = rng.choice(self._places)
        place.cut_s = time.monotonic()
        self._ledger.faults["connection cut"] += self._proxies[place.index].cut()

    async def _vanish(self, rng: random.Random) -> None:
        place = rng.choice(self._places)
        fields = {"prompt": f"{rng.randrange(9000)}:", "n": 3, "max_tokens": LONGEST, "stream": "tokens"}
        if rng.random() < 0.5:
            fields["client"] = f"vanished-{rng.randrange(1 << 30)}"
        await read_and_vanish(place, fields, "never-read", rng.randrange(3), rng.uniform(0.1, 5.0))
        self._ledger.faults["client vanished"] += 1

    async def _rubbish(self, rng: random.Random) -> None:
        place, since = rng.choice(self._places), time.monotonic()
        host, _, port = place.direct.removeprefix("tcp://").rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(_GREETING[: rng.randrange(1, 17)] if rng.random() < 0.5 else rng.randbytes(500))
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            writer.transport.abort()
        except OSError as error:
            self._ledger.excuse(place, since, False, error)
        self._ledger.faults["raw connection"] += 1

    async def _bad_messages(self, rng: random.Random) -> None:
        place, since = rng.choice(self._places), time.monotonic()
        messages = [bad_message(rng, f"bad-{i}") for i in range(_BATCH)]
        waited = sorted(request_id for _, request_id in messages)
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        answers: list[str] = []
        try:
            socket.connect(place.direct)
            for frames, _ in messages:
                await socket.send_multipart(frames)
            while len(answers) < _BATCH and await socket.poll(_ANSWER_MS):
                answers.append(msgpack.unpackb((await socket.recv_multipart())[0])["id"])
            if await socket.poll(50):
                answers.append("one more")
        finally:
            socket.close()
        self._ledger.faults["bad message"] += _BATCH
        if sorted(answers) != waited and not place.troubled_since(since, False):
            self._ledger.complain(f"{_BATCH} bad messages had the answers {sorted(answers)}, not {waited}")

    # --- weights ------------------------------------------------------------------------------------------------------

    async def swap(self, transport: str, growth: int = 1) -> int:
        """Publish the next version to all workers and return it. A worker that is down or dies keeps its version."""
        async with self._publishing:
            self._version += growth
            version, since = self._version, time.monotonic()
            self._ledger.published.add(version)
            errors = await asyncio.to_thread(self._publish, transport, version)
        for place in self._places:
            if place.direct in errors:
                self._ledger.excuse(place, since, False, errors[place.direct])
        if len(errors) < len(self._places):
            self._ledger.faults[f"swap over {transport}"] += 1
        return version

    def _publish(self, transport: str, version: int) -> dict[str, RolloutError]:
        endpoints = [place.direct for place in self._places]
        folder = str(self._folder) if transport == "disk" else None
        limits: dict[str, Any] = {"begin_s": 20.0, "stall_s": 10.0, "apply_s": 60.0}
        with WeightPublisher(endpoints, transport=transport, folder=folder, **limits) as publisher:
            handle = publisher.publish(self._weights[step_of(version)], version)
            try:
                handle.applied(120.0)
            except RolloutError as error:
                if not handle.errors:
                    raise
                del error  # of one worker; all are in `errors`
            self.pauses_s += [report.pause_s for report in handle.reports.values()]
            return dict(handle.errors)

    async def _half_publish(self, rng: random.Random) -> None:
        async with self._publishing:
            self._version += 2  # not published: any token of this version is wrong
            place, since = rng.choice(self._places), time.monotonic()
            words = [place.direct, str(self._checkpoints[step_of(self._version)]), str(self._version)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "scripts.check.soak.half_publisher", *words,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert process.stdout is not None and process.stderr is not None
            try:
                said = await asyncio.wait_for(process.stdout.readline(), 60.0)
            except TimeoutError:
                said = b""
            if process.returncode is None:
                process.kill()
            complaint = (await process.stderr.read()).decode(errors="replace")[-300:]
            await process.wait()
        if said == b"half\n":
            self._ledger.faults["publisher killed"] += 1
        elif not place.troubled_since(since, False):
            self._ledger.complain(f"half a publish: {complaint}")
