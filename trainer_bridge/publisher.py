"""The trainer's side of the weight bridge: publish a model's tensors to running workers.

    with WeightPublisher(endpoints) as publisher:
        handle = publisher.publish(model.state_dict(), version=1)
        handle.held()       # the trainer may change its tensors
        handle.applied()    # every worker samples from them

`publish` returns at once; a thread of the publisher does the work, one update after the other:

    prepare -> begin (all workers) -> transfer -> commit (all workers) -> reports
                                         ^ held                             ^ applied

Invariants:

- Tensors are read until `held` and not later. Nothing is copied up front.
- A worker that fails does not stop the others; `applied` then raises its error.
- Every phase has a deadline, and its error names the phase and the worker.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer_bridge.errors import ProtocolError, RolloutError, RolloutTimeout
from trainer_bridge.keys import ClientCurve
from trainer_bridge.manifest import DEFAULT_BUCKET_BYTES
from trainer_bridge.payload import NamedTensors, Payload
from trainer_bridge.transports import Peer, TransferRules, make_sender
from trainer_bridge.weight_messages import ControlLink, ask_all, read_token

_ABORT_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """How one worker took an update."""

    endpoint: str
    version: int
    transport: str
    nbytes: int
    pause_s: float  # how long generation stood still
    seconds: float  # from publish() until the worker used the new weights
    phases: dict[str, float]  # seconds on the worker: receive, verify, wait, apply


class PublishHandle:
    """An update on its way. All methods may be called from any thread, any number of times."""

    def __init__(self, payload: Payload) -> None:
        self.version = payload.manifest.version
        self.nbytes = payload.manifest.tensor_bytes
        self.phase = "queued"
        self.reports: dict[str, WorkerReport] = {}  # by endpoint, of the workers that use the new weights
        self.errors: dict[str, RolloutError] = {}  # by endpoint, of the others
        self._payload = payload
        self._published_s = time.monotonic()
        self._held_error: RolloutError | None = None
        self._error: RolloutError | None = None
        self._done = threading.Event()

    def held(self, timeout: float | None = None) -> None:
        """Return when the trainer may change its tensors: all of them have been copied out of its memory.

        Raises the error that ended the update before that (the tensors are free then, too), or `RolloutTimeout` after
        `timeout` seconds (they are not).
        """
        if not self._payload.wait_released(timeout):
            raise RolloutTimeout(f"{self.phase}: version {self.version} still reads its tensors after {timeout:g} s")
        if self._held_error is not None:
            raise self._held_error

    def applied(self, timeout: float | None = None) -> list[WorkerReport]:
        """Return when every worker samples from the new weights: a report for each, in the order of the endpoints.

        Raises a worker's error (`WeightsRejected` with its reason, `RolloutTimeout` or `ConnectionLost` with the
        phase and the endpoint) once all workers have answered or failed: `reports` and `errors` say which did what.
        After `timeout` seconds raises `RolloutTimeout`; the update goes on.
        """
        if not self._done.wait(timeout):
            raise RolloutTimeout(f"{self.phase}: version {self.version} is not applied after {timeout:g} s")
        if self._error is not None:
            raise self._error
        return list(self.reports.values())

    def _report(self, endpoint: str, transport: str, reply: dict[str, Any]) -> None:
        try:
            self.reports[endpoint] = WorkerReport(
                endpoint=endpoint,
                version=int(reply["version"]),
                transport=transport,
                nbytes=int(reply["bytes"]),
                pause_s=float(reply["pause_s"]),
                seconds=time.monotonic() - self._published_s,
                phases={str(name): float(seconds) for name, seconds in reply["phases"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.errors[endpoint] = ProtocolError(f"commit: {endpoint} sent a report that cannot be read: {error!r}")

    def _end(self, error: RolloutError | None) -> None:
        if error is None and self.errors:
            error, *others = self.errors.values()
            for other in others:
                error.add_note(str(other))
        self._error = error
        if not self._payload.wait_released(0):
            self._held_error = error
            self._payload.release()
        self._done.set()


class WeightPublisher:
    """Publishes weights to one or several workers.

    `endpoints` are the workers' request sockets, as `RolloutClient` takes them. `transport` is `zmq`, `disk` (with
    `folder`, on a path that the workers can read) or `auto`: the fastest that works, which is `zmq`; reports say which
    was used. Deadlines in seconds: `begin_s` for connecting and for the workers' check of the manifest, `stall_s`
    without progress of a transfer, `apply_s` from commit until a worker uses the weights. `curve` has the keys for
    workers that use CURVE.

    Closing ends what is unfinished: wait for `applied` first. Workers keep what they serve.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        transport: str = "auto",
        folder: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        begin_s: float = 30.0,
        stall_s: float = 30.0,
        apply_s: float = 120.0,
        curve: ClientCurve | None = None,
    ) -> None:
        self.endpoints = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not self.endpoints or len(set(self.endpoints)) != len(self.endpoints):
            raise ValueError("endpoints must name at least one worker, and each once")
        self.transport = "zmq" if transport == "auto" else transport
        self._curve = curve
        self._sender = make_sender(self.transport, folder, curve)
        self._bucket_bytes, self._begin_s, self._apply_s = bucket_bytes, begin_s, apply_s
        self._closing = threading.Event()
        self._rules = TransferRules(stall_s, self._closing)
        self._client = f"publisher-{secrets.token_hex(4)}"
        self._links = self._connect()
        self._jobs: queue.SimpleQueue[tuple[Payload, PublishHandle] | None] = queue.SimpleQueue()
        self._jobs_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    def publish(self, named_tensors: NamedTensors, version: int) -> PublishHandle:
        """Start to publish every parameter, under its Hugging Face name, as `version`, which must grow.

        Tensors are float32, bfloat16 or float16, on the CPU or one CUDA device; what the current CUDA stream was
        given before is waited for on the device. They must not change before `held`. Raises ValueError for tensors
        that cannot be sent, `WeightsRejected` for a version or names that no worker can take.
        """
        payload = Payload(named_tensors, version, self._bucket_bytes)
        handle = PublishHandle(payload)
        with self._jobs_lock:
            if self._closing.is_set():
                raise ValueError("this publisher is closed; make a new one")
            self._jobs.put((payload, handle))
        return handle

    def status(self, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """Each worker's weights `version`, `state`, `incoming` update and `last` report, in the order of `endpoints`.

        Raises the error of the first worker that does not answer.
        """
        links = self._connect()
        try:
            answers = ask_all([(link, {"action": "status"}) for link in links], "status", timeout_s, self._closing)
        finally:
            for link in links:
                link.close()
        for answer in answers:
            if isinstance(answer, RolloutError):
                raise answer
        return [{"endpoint": link.endpoint, **answer} for link, answer in zip(links, answers, strict=True)]  # type: ignore[dict-item]

    def close(self) -> None:
        """End the thread and the connections; handles that are not done fail. Idempotent."""
        with self._jobs_lock:
            self._closing.set()
            self._jobs.put(None)
        self._thread.join()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _connect(self) -> list[ControlLink]:
        links: list[ControlLink] = []
        try:
            for endpoint in self.endpoints:
                links.append(ControlLink(endpoint, self._client, self._curve))
        except ValueError:
            for link in links:
                link.close()
            raise
        return links

    # --- the publisher's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            payload, handle = job
            try:
                self._publish(payload, handle)
                handle._end(None)
            except RolloutError as error:
                handle._end(error)
            except Exception as error:  # whoever waits for the handle must hear of it, whatever it is
                _log.exception("publishing version %d failed", handle.version)
                fault = RolloutError(f"{handle.phase}: the publisher failed: {error!r:.300}")
                fault.__cause__ = error
                handle._end(fault)
        self._sender.close()
        for link in self._links:
            link.close()

    def _publish(self, payload: Payload, handle: PublishHandle) -> None:
        peers = [Peer(endpoint) for endpoint in self.endpoints]
        handle.phase = "prepare"
        self._check_open(handle)
        options = self._sender.prepare(payload)
        try:
            handle.phase = "begin"
            begin = {
                "action": "begin",
                "version": payload.manifest.version,
                "manifest": payload.manifest.to_wire(),
                "transport": self._sender.name,
                "options": options,
            }
            for peer, grant in self._ask(peers, lambda peer: begin, "begin", self._begin_s):
                _note_grant(peer, grant)
            handle.phase = "transfer"
            finished = self._sender.transfer(payload, [peer for peer in peers if not peer.error], self._rules)
            self._check_open(handle)
            handle.phase = "commit"
            commit = {"action": "commit", "options": finished}
            asked = self._ask(peers, lambda peer: {**commit, "token": peer.token.hex()}, "commit", self._apply_s)
            for peer, reply in asked:
                handle._report(peer.endpoint, self._sender.name, reply)
        finally:
            self._abort(peers, handle)
            handle.errors |= {peer.endpoint: peer.error for peer in peers if peer.error}
            self._sender.release(payload, applied=len(handle.reports) == len(peers))

    def _ask(self, peers: list[Peer], message: Any, phase: str, timeout_s: float) -> list[tuple[Peer, dict[str, Any]]]:
        """Ask the peers that have not failed; the replies of those that did not fail now."""
        asked = [(peer, link) for peer, link in zip(peers, self._links, strict=True) if not peer.error]
        answers = ask_all([(link, message(peer)) for peer, link in asked], phase, timeout_s, self._closing)
        replies = []
        for (peer, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, RolloutError):
                peer.fail(answer)
            else:
                replies.append((peer, answer))
        return replies

    def _abort(self, peers: list[Peer], handle: PublishHandle) -> None:
        """Tell workers that began and will hear no more; their own deadline does it when this does not reach them."""
        left = [
            (link, {"action": "abort", "token": peer.token.hex()})
            for peer, link in zip(peers, self._links, strict=True)
            if peer.token and peer.endpoint not in handle.reports
        ]
        if left:
            ask_all(left, "abort", _ABORT_S, threading.Event())

    def _check_open(self, handle: PublishHandle) -> None:
        if self._closing.is_set():
            raise RolloutError(
                f"{handle.phase}: the publisher was closed; the workers keep their weights", code="closed"
            )


def _note_grant(peer: Peer, reply: dict[str, Any]) -> None:
    try:
        peer.token, peer.grant = read_token(reply.get("token")), reply.get("grant", {})
    except RolloutError:
        peer.token = b""
    if len(peer.token) != 16 or type(peer.grant) is not dict:
        peer.fail(ProtocolError(f"begin: {peer.endpoint} answered without a token and a grant"))
