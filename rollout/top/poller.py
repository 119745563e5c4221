"""Polls the status of one worker on a thread of its own, so that a silent worker delays no other."""

import threading
import time
from collections import deque
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from rollout.top.screen import CancelRequest, WorkerView
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.wire.errors import RolloutError

#: Rows that a poll asks a worker for.
MAX_ROWS = 256
_RATES = 60
_PATIENCE_S = 2.0  # an answer that is later than the interval by so much counts as missing


class Poller:
    """Polls one worker; owns the client from now on.

    Args:
        client: of one endpoint.
        interval_s: between two polls.
    """

    def __init__(self, client: RolloutClient, interval_s: float) -> None:
        self._client = client
        self._interval_s = interval_s
        self._commands: SimpleQueue[CancelRequest | None] = SimpleQueue()
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._before: tuple[float, int] | None = None
        self._answered_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        #: The outcome of the last cancel, a sentence.
        self.outcome: str | None = None
        #: The last answer; replaced as a whole.
        self.view = WorkerView(client.endpoints[0])

    def shown(self) -> WorkerView:
        """The last answer, with an error if it is too old."""
        view, silent_s = self.view, time.monotonic() - self._answered_s
        if view.error is not None or silent_s < self._interval_s + _PATIENCE_S:
            return view
        return replace(view, error=f"no answer for {silent_s:.0f} s")

    def start(self) -> None:
        self._thread.start()

    def cancel(self, request: CancelRequest) -> None:
        """Cancel a request of this worker, then poll at once."""
        self._commands.put(request)

    def stop(self) -> None:
        """Tell the thread to end; it closes the client."""
        self._commands.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, which a silent worker may delay."""
        self._thread.join(timeout_s)

    def poll(self) -> WorkerView:
        """Poll once. A worker's error is part of the view; it is not raised."""
        endpoint = self.view.endpoint
        try:
            status = self._client.control("status", sequences=MAX_ROWS)[0]
            self._note_rate(status)
            self.view = WorkerView(endpoint, status, tuple(self._rates))
        except RolloutError as error:
            self._before = None
            self.view = WorkerView(endpoint, None, (), str(error))
        self._answered_s = time.monotonic()
        return self.view

    def close(self) -> None:
        """Close the client, if the thread was never started."""
        self._client.close()

    def _run(self) -> None:
        try:
            while True:
                self.poll()
                try:
                    command = self._commands.get(timeout=self._interval_s)
                except Empty:
                    continue
                if command is None:
                    return
                self._cancel(command)
        finally:
            self._client.close()

    def _cancel(self, request: CancelRequest) -> None:
        try:
            self._client.control("cancel", target=request.id, owner=request.owner)
            self.outcome = f"Request {request.id} was cancelled."
        except RolloutError as error:
            self.outcome = f"Request {request.id} was not cancelled: {error}"

    def _note_rate(self, status: dict[str, Any]) -> None:
        now_s, tokens = time.monotonic(), int(status.get("tokens", 0))
        if self._before is None:
            self._rates.clear()
            self._rates.extend(float(value) for value in status.get("tokens_by_second", ()))
        elif now_s > self._before[0]:
            self._rates.append(max(0.0, (tokens - self._before[1]) / (now_s - self._before[0])))
        self._before = (now_s, tokens)
