"""The blocking client. Needs ZeroMQ, msgpack and numpy.

    with RolloutClient("tcp://127.0.0.1:5757") as client:
        result = client.generate("17:", max_tokens=64, temperature=1.0)
        print(result.completions[0].token_ids, result.completions[0].logprobs)

A client belongs to one thread at a time; make one for each thread (a connection is cheap), or use
`AsyncRolloutClient`. Many requests are best sent with `generate_many`, which keeps them in flight together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar, Unpack

import zmq

from trainer_bridge.client import calls
from trainer_bridge.client.batch import MAX_IN_FLIGHT, BatchItem, Settled, plan_batch, settle_all
from trainer_bridge.client.calls import Call
from trainer_bridge.client.core import ClientCall
from trainer_bridge.client.face import ClientFace, SessionView, StreamView
from trainer_bridge.client.generate_request import GenerateFields, Prompt, StreamKind
from trainer_bridge.client.results import Chunk, Completion, GenerateResult
from trainer_bridge.process_bound import Closing

_Item = TypeVar("_Item", Chunk, Completion)
_Params = ParamSpec("_Params")
_Value = TypeVar("_Value")


class RolloutClient(ClientFace[GenerateResult, "Stream[Chunk]", "Stream[Completion]"], Closing):
    """Sends requests to workers. Not thread-safe.

    Args:
        endpoints: The workers' request sockets.
        client: Its name across connections.
        timeout_s: Until `RolloutTimeout`.
        connect_timeout_s: Seconds to connect before `ConnectionLost`. None: 30, or 3 if refused.
        curve: Keys for workers that use CURVE.
        resume: Continue requests of lost, failed or ended workers at any endpoint.
        resume_timeout_s: Seconds without a worker before `ResumeFailed`.
        resume_max_faults: Workers lost in a row without a new token before `ResumeFailed`.
        journal: A file of requests, tokens and results; turns `resume` on.
        journal_fsync: Wait for the disk `never`, at `results`, or `always`.
        acknowledge: The worker drops a result that arrived. None: True, unless the client has a name and no journal.
        heartbeat_s: A worker that hangs is lost after at most four heartbeats.
    """

    def generate_as_completed(
        self, requests: Iterable[BatchItem], *, max_in_flight: int = MAX_IN_FLIGHT, **common: Unpack[GenerateFields]
    ) -> Generator[Settled, None, None]:
        """The outcomes of `generate_many` as they come. Closing the iterator cancels the rest."""
        return self._settle(plan_batch(requests, common), max_in_flight)

    def session(self, name: str | None = None, *, lease_s: float | None = None) -> Session:
        """A conversation whose KV stays for `lease_s` seconds after a turn; None: 300."""
        return Session(self, self._core.next_id() if name is None else name, lease_s)

    def _answer(self, begin: Callable[[], ClientCall], stream: StreamKind | Literal[False]) -> Any:
        call = begin()
        return Stream(self, call, stream) if stream else self._run(calls.finish, call)

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        self._core.close()
        self._core.term()

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _prepare_to_wait(self) -> None:
        self._poller = zmq.Poller()
        self._watched: dict[zmq.Socket, str] = {}  # endpoints by socket
        self._core.on_opened, self._core.on_closing = self._watch, self._unwatch
        for endpoint in self._core.connections:
            self._watch(endpoint)

    def _watch(self, endpoint: str) -> None:
        connection = self._core.connections[endpoint]
        for socket in (connection.socket, connection.monitor):
            self._poller.register(socket, zmq.POLLIN)
            self._watched[socket] = endpoint

    def _unwatch(self, endpoint: str) -> None:
        connection = self._core.connections[endpoint]
        for socket in (connection.socket, connection.monitor):
            self._poller.unregister(socket)
            del self._watched[socket]

    def _wait_once(self, wait_s: float | None) -> None:
        """Wait for messages, and read them."""
        ready = self._poller.poll(None if wait_s is None else math.ceil(wait_s * 1000))
        for endpoint in sorted({self._watched[socket] for socket, _ in ready}):
            self._core.read_replies(endpoint)

    def _run(self, call: Call[_Params, _Value], /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Value:
        """Make a call and wait for its value."""
        with closing(call(self._core, _nothing, *args, **kwargs)) as waits:
            while True:
                try:
                    wait_s = next(waits)
                except StopIteration as stop:
                    return stop.value
                self._wait_once(wait_s)

    def _settle(self, plans: list, max_in_flight: int) -> Generator[Settled, None, None]:
        with closing(settle_all(self._core, _nothing, plans, max_in_flight)) as steps:
            for step in steps:
                if isinstance(step, Settled):
                    yield step
                else:
                    self._wait_once(step)


def _nothing() -> None:
    """No-op: a blocking client checks its calls after every poll."""


class Stream(StreamView, Closing, Generic[_Item]):
    """The chunks or completions of a request, as they arrive. Leaving a `with` block, or `close`, ends it early.

    A failed request raises its error after the last chunk; `result` is then None.
    """

    _client: RolloutClient

    def __iter__(self) -> Iterator[_Item]:
        return self

    def __next__(self) -> _Item:
        chunk = self._client._run(calls.next_chunk, self._call)
        if chunk is None:
            raise StopIteration
        return self._item(chunk)

    def wait(self) -> GenerateResult:
        """The result of the whole request; unread chunks can be read afterwards."""
        return self._client._run(calls.finish, self._call)

    def cancel(self) -> None:
        """End the request at the worker; chunks of its tokens still arrive."""
        self._client._run(calls.end_stream, self._call)


class Session(SessionView):
    """Turns of one conversation, one at a time."""

    _client: RolloutClient

    def generate(self, prompt: Prompt | None = None, **fields: Unpack[GenerateFields]) -> GenerateResult:
        """The next turn: `RolloutClient.generate` for one completion."""
        return self._client.generate(prompt, **self._turn(fields))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._owned:
            self.end()
