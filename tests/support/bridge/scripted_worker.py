"""A test server that speaks the protocol over a real ROUTER socket and does what a test tells it.

For what a real worker does rarely or never: answers in another order, gaps, broken replies, a connection that goes.
`handler(worker, peer, header)` runs on the server's thread for every request and may call `worker.reply`. From other
threads use `worker.do`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from tests.support.ports import free_port
from trainer_bridge.wire import codec as wire

WAIT_S = 60.0


def completion(tokens: list[int], index: int = 0, version: int = 3, **more: Any) -> dict[str, Any]:
    """The per-completion fields of a reply."""
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    return {
        "index": index,
        "token_ids": np.array(tokens, np.int32),
        "logprobs": logprobs,
        "raw_logprobs": logprobs * 2,
        "versions": [[version, len(tokens)]] if tokens else [],
        "seed": 100 + index,
        **more,
    }


def result(completions: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A `result` reply without its envelope fields."""
    done = [{"finish_reason": "length", **item} for item in completions]
    timing = {"queued_s": 0.5, "prefill_s": 0.25, "decode_s": 1.0, "total_s": 1.75}
    counts = {"prompt_tokens": 2, "cached_tokens": 1, "preemptions": 0, "worker": "w0"}
    return {"op": "result", "completions": done, "timing": timing, **counts, **more}


def counting(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    """Answer everything: `n` completions that count on from the prompt's last token."""
    op = header["op"]
    if op == "status":
        worker.reply(peer, header, {"op": "status", "state": "serving", "weights_version": 3})
    elif op != "generate":
        worker.reply(peer, header, {"op": "ok"})
    else:
        first = int(header["prompt"][-1]) + 1
        tokens = list(range(first, first + header.get("max_tokens", 4)))
        items = [completion(tokens, index) for index in range(header.get("n", 1))]
        worker.reply(peer, header, result(items, metadata=header.get("metadata")))


Handler = Callable[["ScriptedWorker", bytes, dict[str, Any]], None]


class ScriptedWorker:
    """The server. `requests` holds every header in order of arrival, but for `ack`: clients send it by themselves.

    `acks` counts the `ack` messages, and `acknowledged` has the ids that they name.
    """

    def __init__(self, handler: Handler = counting, endpoint: str | None = None, hwm: int = 0) -> None:
        self.handler = handler
        self._mistake: Exception | None = None
        self._delimited: dict[bytes, bool] = {}
        self.requests: list[dict[str, Any]] = []
        self.acknowledged: list[str] = []
        self.acks = 0
        self._arrived: queue.Queue[dict[str, Any]] = queue.Queue()
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 1000)
        self._router.set(zmq.RCVHWM, hwm)
        self._router.bind(endpoint or f"tcp://127.0.0.1:{free_port()}")  # another one may be started there later
        self.endpoint = self._router.last_endpoint.decode()
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.bind("inproc://bell")
        self._ring = self._context.socket(zmq.PAIR)
        self._ring.set(zmq.LINGER, 0)
        self._ring.connect("inproc://bell")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a mistake in a script must fail the test, not hang it
            self._mistake = error
        finally:
            self._router.close()
            self._bell.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell in ready:
                self._bell.recv()
                job = self._jobs.get()
                if job is None:
                    return
                job()
            if self._router in ready:
                peer, *frames = self._router.recv_multipart()
                self._delimited[peer], frames = wire.split_envelope(frames)
                header = wire.decode(frames)
                if header["op"] == "ack":
                    self.acks += 1
                    self.acknowledged += header["targets"]
                    self.reply(peer, header, {"op": "ok"})
                else:
                    self.requests.append(header)
                    self.handler(self, peer, header)
                self._arrived.put(header)

    def reply(self, peer: bytes, request: dict[str, Any], fields: dict[str, Any]) -> None:
        """Send a reply with the request's id (server thread only)."""
        self.send(peer, wire.encode({"v": 1, "id": request["id"], **fields}))

    def send(self, peer: bytes, frames: list[bytes]) -> None:
        """Send frames as they are (server thread only)."""
        self._router.send_multipart([peer, *wire.join_envelope(self._delimited[peer], frames)])

    @property
    def peers(self) -> list[bytes]:
        """The connections that sent something, in order of their first message."""
        return list(self._delimited)

    def do(self, job: Callable[[], None]) -> None:
        """Run something on the server thread."""
        self._jobs.put(job)
        self._ring.send(b"")

    def vanish(self) -> None:
        """Have the server thread end, and every connection with it."""
        self._jobs.put(None)
        try:
            self._ring.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            pass  # it has ended

    def has_more(self, wait_ms: int) -> bool:
        """True if another request is there, or comes within this time (server thread only)."""
        return bool(self._router.poll(wait_ms))

    def next(self, op: str) -> dict[str, Any]:
        """The next request of this kind that was handled and not yet asked for."""
        while True:
            header = self._arrived.get(timeout=WAIT_S)
            if header["op"] == op:
                return header

    def stop(self) -> None:
        """Close the socket: every client loses its connection."""
        if not self._ring.closed:
            if self._thread.is_alive():
                self.vanish()
            self._thread.join(WAIT_S)
            self._ring.close()
            self._context.term()
            if self._mistake is not None:
                raise self._mistake
