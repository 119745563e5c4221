"""Workers of several ranks that lose one: followers that stand at a point, and the errors that clients must get."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.worker.harness import check, hooked, until
from tests.support.worker.zygote import children_running
from trainer_bridge.client.blocking import RolloutClient, Stream
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import Unavailable

LONG: dict[str, Any] = {"max_tokens": 30_000, "stream_every": 8, "stream": "tokens"}
PROMPTS = ("17:", "2024:")
#: The step that each version counts in.
COUNT = {0: 1, 1: 2}
FAULT = 3
#: Within which a client knows; 10 s on a machine with free cores.
KNOWN_S = 60.0
LOST = "tensor group is lost"
KILL_AND_STOP = [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "hung")]


@dataclass(frozen=True)
class Points:
    """The points at which followers can be made to stand."""

    folder: Path

    def order(self, point: str) -> None:
        """The next follower that comes to the point waits there."""
        (self.folder / f"{point}.reached").unlink(missing_ok=True)
        (self.folder / point).touch()

    def leave(self, point: str) -> None:
        """It goes on."""
        (self.folder / point).unlink()

    def reached(self, point: str) -> None:
        """Wait until it stands there."""
        until((self.folder / f"{point}.reached").exists, f"a follower at {point}")

    @property
    def environment(self) -> dict[str, str]:
        """What a worker's followers need to know of it."""
        return {"FAULTY_FOLLOWER": str(self.folder), **hooked("faulty_follower")}


def followers_of(pid: int) -> list[int]:
    """The processes of the other ranks of a worker, which may be starting."""
    return children_running(pid, "rollout.ranks.entry")


def ended(worker: WorkerProcess) -> int:
    until(lambda: worker.returncode is not None, "the end of the worker")
    assert worker.returncode is not None
    return worker.returncode


def streams_of(client: RolloutClient, least: int = 16) -> list[Stream]:
    """Two streams, each of which has received `least` tokens or more."""
    streams = [client.generate(prompt, **LONG) for prompt in PROMPTS]
    for stream in streams:
        read(stream, least)
    return streams


def read(stream: Stream, tokens: int) -> None:
    """Receive at least `tokens` more tokens of the only completion of a stream."""
    next(stream)
    until_tokens = len(stream.partials()[0].token_ids) + tokens
    while len(stream.partials()[0].token_ids) < until_tokens:
        next(stream)


def assert_handed_back(streams: list[Stream], said: str, least: int = 16) -> None:
    """Every request ends as `error` with the reason and all of its tokens, in time."""
    began_s = time.monotonic()
    for stream, prompt in zip(streams, PROMPTS, strict=True):
        (completion,) = stream.wait().completions
        (partial,) = stream.partials()
        assert completion.finish_reason == "error" and len(completion) >= least
        assert LOST in (completion.error or "") and said in (completion.error or ""), completion.error
        assert completion.token_ids.tolist() == partial.token_ids.tolist()
        check(prompt, completion, COUNT)
    assert time.monotonic() - began_s < KNOWN_S


def assert_answered(late: Stream) -> None:
    """A request that was sent when the group was lost ends, too; it may not have reached the engine."""
    try:
        (completion,) = late.wait().completions
    except Unavailable:
        return
    assert completion.finish_reason == "error" and LOST in (completion.error or "")
