"""Rows that decode during a benchmark of something else."""

import time
from collections.abc import Callable
from typing import Any

from trainer_bridge.client.blocking import RolloutClient, Stream
from trainer_bridge.client.results import Completion

_WARM_STEPS = 100
_LONG_S = 1e6  # of a request; it is stopped earlier
_POLL_S = 0.01


class Rows:
    """The `n` completions of a request, which is sent again when one of them ends."""

    def __init__(self, client: RolloutClient, asked: dict[str, Any], limit_s: float) -> None:
        self._client, self._asked, self._limit_s = client, asked, limit_s
        self._count: int = asked["n"]
        self._stream: Stream[Any] | None = None
        self.ended: list[Completion] = []

    def keep_running(self) -> None:
        """Send the request again if a completion has ended; returns once all have decoded for a while."""
        if self._stream is not None and self._running() == self._count:
            return
        self.stop()
        self._stream = self._client.generate(**self._asked, stream="completions", timeout_s=_LONG_S)
        self._await(lambda: self._running() == self._count, "all rows to run")
        self.decode(_WARM_STEPS)

    def decode(self, steps: int) -> None:
        """Return after this many more tokens of each row, or when the rows have ended."""
        enough = self._client.status()["tokens"] + steps * self._count

        def over() -> bool:
            status = self._client.status()
            return status["tokens"] >= enough or status["rows"]["running"] == 0

        self._await(over, "tokens")

    def stop(self) -> None:
        """Cancel them and keep their tokens."""
        if self._stream is not None:
            self._stream.cancel()
            result = self._stream.wait()
            self.ended += result.completions
            self._client.ack([result.id])
            self._stream = None

    def _running(self) -> int:
        return self._client.status()["rows"]["running"]

    def _await(self, happened: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + self._limit_s
        while not happened():
            if time.monotonic() > until_s:
                raise RuntimeError(f"still waiting for {what} after {self._limit_s:g} s")
            time.sleep(_POLL_S)
