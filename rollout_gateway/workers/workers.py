"""The workers of a gateway: requests to them, their states, and their sessions.

    handlers --> Workers --> AsyncRolloutClient, which balances the fleet --> workers
                    +------> WorkerWatch (what is known of each worker)

A request enters by `generate`, `generate_all` or `stream`. These count requests, refuse them (429), hold them during a
pause that waits, and cancel them at the worker if the handler's task is cancelled.
"""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np

from rollout.config.gateway_settings import GatewaySettings
from rollout_gateway.http.http_errors import HttpError, Names, bad_request, from_worker
from rollout_gateway.workers.worker_watch import WatchedWorker, WorkerWatch
from trainer_bridge.client.asynchronous import AsyncRolloutClient, AsyncStream
from trainer_bridge.client.media import MediaItem, MediaPrompt
from trainer_bridge.client.results import Chunk, GenerateResult
from trainer_bridge.expiring_cache import ExpiringCache
from trainer_bridge.wire.errors import NotFound, RolloutError, Unavailable, with_endpoint

_MOST = 16_384  # most worker-side ids remembered; a worker remembers as many
#: Prefixes that the gateway adds to a client's id of a request.
PREFIXES = ("cmpl-", "chatcmpl-", "msg_", "resp_")

#: Ids at the workers, and the number of completions of each, in the order of the prompts.
Parts = tuple[tuple[str, int], ...]


class RequestIds:
    """Ids at the workers, by the id that the client knows; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._parts: OrderedDict[str, Parts] = OrderedDict()
        self._count = 0  # ids at workers

    @contextmanager
    def note(self, known_id: str, parts: Sequence[tuple[str, int]]) -> Iterator[None]:
        """A request is sent in this block. If it is refused, an earlier request with its id is known again."""
        earlier, mine = self._parts.get(known_id), tuple(parts)
        self._keep(known_id, mine)
        try:
            yield
        except HttpError as error:
            if earlier is not None and error.status < 500 and self._parts.get(known_id) is mine:
                self._keep(known_id, earlier)
            raise

    def worker_fork(self, fork: Mapping[str, Any]) -> Mapping[str, Any]:
        """A fork as the workers know it: `index` counts the choices of an answer. Raises `HttpError`."""
        known_id = fork.get("request")
        if known_id is None:
            return fork
        parts, index = self._find(known_id), fork["index"]
        for request_id, n in parts:
            if index < n:
                return {**fork, "request": request_id, "index": index}
            index -= n
        count = sum(n for _, n in parts)
        raise bad_request(f"the request has {count} choices; use an index below that", "fork.index")

    def _keep(self, known_id: str, parts: Parts) -> None:
        self._count += len(parts) - len(self._parts.pop(known_id, ()))
        self._parts[known_id] = parts
        while self._count > _MOST and len(self._parts) > 1:
            self._count -= len(self._parts.popitem(last=False)[1])

    def _find(self, known_id: str) -> Parts:
        """The parts of a request; its id may lack the prefix that the gateway put in front."""
        for name in (known_id, *(f"{prefix}{known_id}" for prefix in PREFIXES)):
            if name in self._parts:
                return self._parts[name]
        raise HttpError(
            404,
            f"this gateway does not know the request {known_id!r} (any more): send the tokens as a prompt",
            "fork.request",
        )


#: Seconds within which a worker must tell its status before and after an order.
STATUS_S = 5.0
_LOOK_S = 1.0  # time between two pings of a worker that carries out an order
_LEAST_SILENT_S, _SILENT_HEARTBEATS = 2.0, 1.5  # a worker hangs if it is silent for the longer of the two times

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A prompt as token ids, and the arguments of `AsyncRolloutClient.generate`.

    `names`: the fields of the client's request, or of this item of it, by the workers' names for them, for errors.
    """

    prompt: list[int]
    fields: dict[str, Any]
    n: int = 1
    names: Names = field(default_factory=dict)
    media: tuple[MediaItem, ...] = ()
    request_id: str = field(default_factory=lambda: f"gateway-{uuid.uuid4().hex}")

    @property
    def ends_session(self) -> bool:
        """True if it is the last request of its session."""
        return "end_of_session" in self.fields


@dataclass(slots=True)
class RequestCounts:
    """The requests since the start of the gateway."""

    requests: int = 0
    refused: int = 0


class Workers:
    """All workers of a gateway."""

    def __init__(self, pool: AsyncRolloutClient, settings: GatewaySettings) -> None:
        self.pool = pool
        self.counts = RequestCounts()
        self.in_flight = 0  # completions
        silent_s = max(_LEAST_SILENT_S, _SILENT_HEARTBEATS * settings.heartbeat_s)
        self.watch = WorkerWatch(pool, settings.min_version, silent_s)
        self.publishing = asyncio.Lock()  # held while the weights of a worker change
        self.lasting_order: tuple[str, dict[str, Any]] | None = (
            None  # a pause or sleep that has not ended, and its fields
        )
        self.adapters: dict[str, str] = {}  # paths of the adapters that this gateway has loaded, by name
        self.sessions = SessionTurns(pool, settings.session_s)
        self.request_ids = RequestIds()
        self._most = settings.max_in_flight
        self._resumes = settings.resumes
        self._running: dict[str, set[str]] = {}  # ids at workers, by the id that the client knows
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, known_id: str, request: TokenRequest, session: str | None) -> GenerateResult:
        """The result of one request. Raises `HttpError`."""
        async with self._counted(known_id, [request]):
            with _named_errors(request), self.sessions.turn(session, request) as turn:
                result: GenerateResult = await self.pool.generate(**_arguments(request), **turn)
                return result

    async def generate_all(
        self, known_id: str, requests: list[TokenRequest], session: str | None
    ) -> list[GenerateResult]:
        """The results of several requests, in order. The first error ends all.

        Requests that do not fit into a worker's queue are sent again later. Raises as `generate`.
        """
        if len(requests) == 1:
            return [await self.generate(known_id, requests[0], session)]
        results: dict[int, GenerateResult] = {}
        async with self._counted(known_id, requests):
            outcomes = self.pool.generate_as_completed([_arguments(request) for request in requests])
            async with aclosing(outcomes) as settled:
                async for outcome in settled:
                    with _named_errors(requests[outcome.index]):
                        results[outcome.index] = outcome.unwrap()
        if session is not None and requests[0].ends_session:
            self.sessions.end(session)
        return [results[index] for index in range(len(requests))]

    @asynccontextmanager
    async def stream(
        self, known_id: str, request: TokenRequest, every: int, session: str | None
    ) -> AsyncIterator[AsyncStream[Chunk]]:
        """The chunks of one request, at least `every` tokens each. Leaving the block cancels it.

        Raises as `generate`.
        """
        async with self._counted(known_id, [request]):
            with _named_errors(request), self.sessions.turn(session, request) as turn:
                stream = await self.pool.generate(
                    **_arguments(request), **turn, stream="tokens", stream_every=every, join_chunks=True
                )
                try:
                    yield stream
                finally:
                    stream.close()

    async def abort(self, known_id: str | None) -> int:
        """End a request, or all, with the tokens that they have; returns their number. An id may lack its prefix."""
        targets = [
            target
            for name, ids in self._running.items()
            for target in ids
            if known_id is None or name in (known_id, *(f"{prefix}{known_id}" for prefix in PREFIXES))
        ]
        outcomes = await asyncio.gather(*map(self.pool.cancel, targets), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, NotFound):  # NotFound: it has just ended
                raise outcome
        return len(targets)

    # --- pauses ------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Hold new requests, and return when the running ones have ended."""
        self._open.clear()
        await self._idle.wait()

    def admit(self) -> None:
        """Let requests in again."""
        self._open.set()

    # --- states ------------------------------------------------------------------------------------------------------

    async def states(self, fresh: bool = False) -> list[WatchedWorker]:
        """The state of every worker, at most half a second old; with `fresh` of now, where workers answer at once."""
        if fresh:
            await self.watch.refresh()
        return self.watch.states()

    async def known(self, fresh: bool = False) -> list[dict[str, Any]]:
        """The statuses of the workers that answer. Raises `Unavailable` if none does."""
        return _statuses(await self.states(fresh))

    def health(self) -> dict[str, Any]:
        """The state of all workers. Raises `HttpError` (503) if none is in order with the fleet's weights."""
        states = self.watch.states()
        problems = {state.endpoint: state.problem for state in states if state.problem}
        if len(problems) == len(states):
            raise HttpError(503, "; ".join(with_endpoint(*problem) for problem in problems.items()))
        return {"status": "ok", "workers": len(states), "unhealthy": problems, "min_version": self.watch.floor(states)}

    @property
    def model_path(self) -> str:
        """The model as the workers name it: a folder or a hub id."""
        path: str = self.watch.last_known()[0]["model"]
        return path

    async def ask(self) -> list[dict[str, Any]]:
        """Wait for the present status and return it like `known`. Call it before and after orders."""
        await self.watch.refresh(STATUS_S)
        return _statuses(self.watch.states())

    async def unless_lost(self, work: Coroutine[Any, Any, _T], endpoints: Sequence[str]) -> _T:
        """The result of `work`; raises `ConnectionLost` once one of these workers is lost meanwhile."""
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._until_lost(endpoints))
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                watching.result()  # raises
            return await working
        finally:
            working.cancel()
            watching.cancel()

    async def _until_lost(self, endpoints: Sequence[str]) -> NoReturn:
        """Raise `ConnectionLost` once one of these workers is lost."""
        while True:
            await asyncio.gather(*map(self._ping, endpoints))
            await asyncio.sleep(_LOOK_S)

    async def _ping(self, endpoint: str) -> None:
        with suppress(Unavailable):  # the worker is there, and busy
            await self.pool.control("ping", endpoint=endpoint)

    # --- counting ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _counted(self, known_id: str, requests: list[TokenRequest]) -> AsyncIterator[None]:
        weight = sum(request.n for request in requests)
        if weight > self._most:
            raise HttpError(400, f"the request has {weight} completions, more than --max-in-flight ({self._most})")
        self._check_reachable(requests)
        if self.in_flight + weight > self._most:
            self.counts.refused += 1
            raise HttpError(429, f"{self.in_flight} completions are in flight; try again later", retry_s=1.0)
        ids = {request.request_id for request in requests}
        self.in_flight += weight
        try:
            await self._open.wait()
            self._idle.clear()
            self.counts.requests += 1
            self._running.setdefault(known_id, set()).update(ids)
            yield
        finally:
            self.in_flight -= weight
            if known_id in self._running:
                self._running[known_id] -= ids
                if not self._running[known_id]:
                    del self._running[known_id]
            if not self._running:
                self._idle.set()

    def _check_reachable(self, requests: list[TokenRequest]) -> None:
        """Raise `Unavailable` if requests are not resumed and no worker can take them: they would only wait."""
        named = requests[0].fields.get("endpoint")
        endpoints = self.pool.endpoints if named is None else (named,)
        if not self._resumes and not any(map(self.watch.is_connected, endpoints)):
            raise Unavailable(f"no worker can be reached: {_problems(self.watch.states(), endpoints)}")


class SessionTurns:
    """The conversations that clients name by `X-Session-ID`, whose KV the pool keeps at one worker each.

    One turn at a time uses the session's own KV. Other requests of the session, and requests for several completions,
    go where the pool finds their prompt.
    """

    def __init__(self, pool: AsyncRolloutClient, idle_s: float) -> None:
        self._used: ExpiringCache[str, None] = ExpiringCache(0, idle_s, dropped=lambda name, _: pool.end_session(name))
        self._busy: set[str] = set()

    def __len__(self) -> int:
        return len(self._used)

    @contextmanager
    def turn(self, session: str | None, request: TokenRequest) -> Iterator[dict[str, Any]]:
        """The fields of a request of this session."""
        if session is None:
            yield {}
            return
        if request.n > 1 or session in self._busy:
            yield {}
        else:
            self._used.get(session)  # it does not expire now
            self._busy.add(session)
            try:
                yield {"session": session}
            finally:
                self._busy.discard(session)
                self._used.put(session, None, 0)
        if request.ends_session:
            self.end(session)

    def end(self, session: str) -> bool:
        """Forget a session and free its KV; False if it is unknown."""
        return self._used.drop(session)


def _statuses(states: list[WatchedWorker]) -> list[dict[str, Any]]:
    statuses = [state.status for state in states if state.status is not None]
    if not statuses:
        raise Unavailable(f"no worker answers: {_problems(states)}")
    return statuses


def _problems(states: list[WatchedWorker], endpoints: Sequence[str] = ()) -> str:
    """The problems of all workers, or of the workers at these endpoints."""
    return "; ".join(f"{s.endpoint}: {s.problem}" for s in states if not endpoints or s.endpoint in endpoints)


@contextmanager
def _named_errors(request: TokenRequest) -> Iterator[None]:
    """Workers' errors as `HttpError` with the client's name of the field."""
    try:
        yield
    except RolloutError as error:
        raise from_worker(error, request.names) from error


def _arguments(request: TokenRequest) -> dict[str, Any]:
    prompt: Any = request.prompt
    if request.media:
        prompt = MediaPrompt(np.array(request.prompt, np.int32), request.media)
    fields = {
        name: value for name, value in request.fields.items() if name != "end_of_session"
    }  # see `SessionTurns.turn`
    return {"prompt": prompt, "n": request.n, "request_id": request.request_id, **fields}
