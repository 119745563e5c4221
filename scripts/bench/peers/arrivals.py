"""Requests that arrive at given times, and when their tokens came: the clock of the experiment `arrivals`."""

import time

from scripts.bench.peers.experiments import Served


class ArrivalLog:
    """Says which requests are due, and takes down when tokens are there. Begins now; times ascend."""

    def __init__(self, arrivals_s: list[float]) -> None:
        self._began_s = time.perf_counter()
        self._arrivals_s = arrivals_s
        self._asked = self._ended = 0
        self._last_s: list[float | None] = [None] * len(arrivals_s)
        self._latencies_s: list[float] = []
        self._first_s: list[float] = []
        self._gaps_s: list[float] = []

    @property
    def complete(self) -> bool:
        """All requests have ended."""
        return self._ended == len(self._arrivals_s)

    def due(self) -> list[int]:
        """The requests that have arrived since the last call."""
        first = self._asked
        while self._asked < len(self._arrivals_s) and self._arrivals_s[self._asked] <= self._now_s():
            self._asked += 1
        return list(range(first, self._asked))

    def wait(self) -> None:
        """Sleep until the next request arrives."""
        if self._asked < len(self._arrivals_s):
            time.sleep(max(0.0, self._arrivals_s[self._asked] - self._now_s()))

    def tokens(self, request: int, count: int, finished: bool) -> None:
        """`count` new tokens of a request are there. Tokens that come together have no gap between them."""
        now_s, last_s = self._now_s(), self._last_s[request]
        if count:
            if last_s is None:
                self._first_s.append(now_s - self._arrivals_s[request])
            else:
                self._gaps_s.append(now_s - last_s)
            self._gaps_s += [0.0] * (count - 1)
            self._last_s[request] = now_s
        if finished:
            self._latencies_s.append(now_s - self._arrivals_s[request])
            self._ended += 1

    def served(self) -> Served:
        """What was taken down."""
        return Served(self._latencies_s, self._first_s, self._gaps_s)

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s
