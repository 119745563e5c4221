"""The sessions of Tinker's clients, the samplers in them, and the requests whose results the clients fetch by id.

    client  create_session --> create_sampling_session --> asample --> retrieve_future, until there is a result
            session_heartbeat, every 10 s

A request runs whether its client waits for it or not. It ends with its session: when the client finishes it, or has
sent nothing for `SILENT_S` seconds. A result stays for `RESULT_S` seconds, since a client fetches it again if its
connection broke. All results together have at most `MOST_BYTES` bytes: the oldest that was read goes first, then the
oldest that was not.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rollout_gateway.dialects.tinker.answers import SampleAnswer
from rollout_gateway.http.http_errors import HttpError, bad_request, http_error
from rollout_gateway.requests.http_request import DialectState

SILENT_S = 120.0
RESULT_S = 600.0
MOST_BYTES = 1 << 30
_MOST_SESSIONS, _MOST_SAMPLERS = 65_536, 4096  # the limits of all sessions together, and of each
_LOOK_S = 5.0
_ERROR_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TinkerSampler:
    """A model that a client samples from. `adapter`: None for the model itself."""

    id: str
    session: str
    base_model: str
    model_path: str | None
    adapter: str | None


@dataclass(slots=True)
class TinkerSession:
    """One client. `seen_s`: when it has last sent something; `samplers`: those used last stand last."""

    seen_s: float
    samplers: OrderedDict[str, TinkerSampler] = field(default_factory=OrderedDict)
    requests: set[str] = field(default_factory=set)
    joined: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(slots=True)
class SampleRequest:
    """One request of a session. `digest`: of what it asks for. `task`: gives its result, or its error as a value."""

    id: str
    session: str
    digest: bytes
    task: asyncio.Task[SampleAnswer | HttpError]
    ended_s: float = 0.0
    size: int = 0


class TinkerSessions(DialectState):
    """All sessions. The methods belong to one event loop. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_bytes: int = MOST_BYTES) -> None:
        self._clock = clock
        self._most_bytes = most_bytes
        self._sessions: dict[str, TinkerSession] = {}
        self._requests: dict[str, SampleRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # requests, in the order of their ends
        self._read: OrderedDict[str, None] = OrderedDict()  # the results that were read, the oldest first
        self._bytes = 0

    # --- sessions and samplers ---------------------------------------------------------------------------------------

    def create(self) -> str:
        """The id of a new session. Raises `HttpError` (429)."""
        if len(self._sessions) >= _MOST_SESSIONS:
            self.forget_old()
        if len(self._sessions) >= _MOST_SESSIONS:
            raise HttpError(429, f"there are {_MOST_SESSIONS} sessions; finish some, or try again later", retry_s=10.0)
        name = uuid.uuid4().hex
        self._sessions[name] = TinkerSession(self._clock())
        return name

    def seen(self, name: str) -> TinkerSession:
        """A session whose client has sent something. Raises `HttpError` (410): clients end their heartbeats then."""
        found = self._sessions.get(name)
        if found is None:
            why = f"it was finished, or its client was silent for {SILENT_S:g} s, or the gateway was restarted"
            raise HttpError(410, f"the session {name!r:.200} is over: {why}; make a new client", "session_id")
        found.seen_s = self._clock()
        return found

    def add(self, sampler: TinkerSampler) -> None:
        """Keep a sampler. The same one may come again. Raises `HttpError`."""
        samplers = self.seen(sampler.session).samplers
        if samplers.setdefault(sampler.id, sampler) != sampler:
            message = "this number belongs to another sampler of the session; send the next one"
            raise bad_request(message, "sampling_session_seq_id")
        if len(samplers) > _MOST_SAMPLERS:
            samplers.popitem(last=False)

    def sampler(self, name: str) -> TinkerSampler:
        """A sampler that is in use. Raises `HttpError` (404)."""
        session = self._sessions.get(name.partition(":")[0])
        if session is None or name not in session.samplers:
            message = f"the sampler {name!r:.200} is not known (any more); create a sampling client again"
            raise HttpError(404, message, "sampling_session_id")
        session.seen_s = self._clock()
        session.samplers.move_to_end(name)
        return session.samplers[name]

    def join(self, sampler: str) -> int:
        """A number for one more client of a sampler, unique in its session. Raises `HttpError`."""
        return next(self.seen(self.sampler(sampler).session).joined)

    def end(self, name: str) -> None:
        """End a session and its requests. Raises `HttpError` (410)."""
        self.seen(name)
        for request in self._sessions.pop(name).requests:
            self._drop(request)

    # --- requests ----------------------------------------------------------------------------------------------------

    def known(self, name: str, digest: bytes) -> bool:
        """True if a request with this id runs or has ended: clients send a request again if its answer was lost.

        Raises `HttpError` if the id belongs to a request for something else.
        """
        found = self._requests.get(name)
        if found is not None and found.digest != digest:
            raise bad_request("this number belongs to another request of the sampler; send the next one", "seq_id")
        return found is not None

    async def start(self, name: str, session: str, digest: bytes, work: Coroutine[Any, Any, SampleAnswer]) -> None:
        """Run a request. Raises the error of a request that the gateway refuses before a worker has it."""
        request = SampleRequest(name, session, digest, asyncio.ensure_future(self._outcome(work)))
        self._requests[name] = request
        owner = self._sessions[session]
        owner.requests.add(name)
        request.task.add_done_callback(lambda _: self._end(request))
        await asyncio.sleep(0)  # the task runs up to its first wait
        outcome = request.task.result() if request.task.done() and not request.task.cancelled() else None
        if isinstance(outcome, HttpError):
            self.cancel(name)
            if not owner.samplers:  # a session of this request alone
                self._sessions.pop(session, None)
            raise outcome

    async def _outcome(self, work: Coroutine[Any, Any, SampleAnswer]) -> SampleAnswer | HttpError:
        """The result of a request, or its error without the trace: the frames of a trace keep the whole request."""
        try:
            found = await work
        except Exception as error:
            kept = http_error(error).with_traceback(None)
            kept.__cause__ = kept.__context__ = None
            return kept
        if found.size > self._most_bytes:
            message = f"the result has {found.size} bytes, and a gateway keeps {self._most_bytes}"
            return bad_request(f"{message}; ask for fewer samples, tokens or log-probs")
        return found

    async def ended(self, name: str, within_s: float) -> SampleAnswer | HttpError | None:
        """The outcome of a request that has ended, which counts as read; None if it does not end within the time.

        Raises `HttpError` (410) if the request is not known or was cancelled.
        """
        request = self._requests.get(name)
        if request is not None:
            self.seen(request.session)
            await asyncio.wait([request.task], timeout=within_s)
            if not request.task.done():
                return None
        if request is None or request.task.cancelled():
            message = f"there is no result for {name!r:.200} (any more): it was cancelled or dropped; sample again"
            raise HttpError(410, message, "request_id")
        if name in self._ended:
            self._read[name] = None
        return request.task.result()

    def cancel(self, name: str) -> None:
        """End a request and forget its result, if it is known."""
        if name in self._requests:
            self._drop(name)

    def _end(self, request: SampleRequest) -> None:
        """Count the result of a request that has just ended."""
        if self._requests.get(request.id) is not request:
            return
        request.ended_s = self._clock()
        outcome = None if request.task.cancelled() else request.task.result()
        request.size = _ERROR_BYTES if outcome is None or isinstance(outcome, HttpError) else outcome.size
        self._bytes += request.size
        self._ended[request.id] = None
        while self._bytes > self._most_bytes:
            self._drop(next(iter(self._read or self._ended)))

    def _drop(self, name: str) -> None:
        request = self._requests.pop(name)
        self._ended.pop(name, None)
        self._read.pop(name, None)
        self._bytes -= request.size
        request.task.cancel()
        if request.session in self._sessions:
            self._sessions[request.session].requests.discard(name)

    # --- time --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Forget what is old, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.forget_old()

    def forget_old(self) -> None:
        """End the sessions of silent clients, and drop old results."""
        now_s = self._clock()
        for name in [name for name, session in self._sessions.items() if session.seen_s <= now_s - SILENT_S]:
            self.end(name)
        while self._ended:
            name = next(iter(self._ended))
            if self._requests[name].ended_s > now_s - RESULT_S:
                return
            self._drop(name)

    async def close(self) -> None:
        """Cancel all requests."""
        tasks = [request.task for request in self._requests.values()]
        for name in list(self._sessions):
            self.end(name)
        await asyncio.gather(*tasks, return_exceptions=True)
