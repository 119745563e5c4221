"""A real server and real clients, with a test in the engine's place: it takes commands and hands over events."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import zmq

from rollout.config import ServiceSettings
from rollout.engine.messages.requests import Request, RequestKey
from rollout.engine.messages.statuses import EngineStatus
from rollout.engine.messages.to_engine import Submit
from rollout.engine.messages.to_service import Delta, Finish, RequestDone
from rollout.service.capabilities import ServedEngine, ServedModel, WorkerAddress
from rollout.service.delivery.mismatch_reports import Compare, compare_result
from rollout.service.server import ServedText, Server
from tests.support.patience import PATIENCE_S
from tests.support.settings import settings_of
from trainer_bridge.wire.codec import REPLY_LIMITS, decode, encode

MODEL = ServedModel(name="tiny", vocab_size=302, max_context_tokens=1000, eos_ids=(301,))


class Client:
    """A DEALER or REQ socket that speaks the protocol."""

    def __init__(self, context: zmq.Context, endpoint: str, kind: int = zmq.DEALER, delimiter: bool = False) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.delimiter = delimiter

    def send(self, op: str, request_id: str = "a", **fields: Any) -> None:
        self.send_frames(encode({"v": 1, "op": op, "id": request_id, **fields}))

    def send_frames(self, frames: list[bytes]) -> None:
        self.socket.send_multipart([b"", *frames] if self.delimiter else frames)

    def receive(self) -> dict[str, Any]:
        frames = self.socket.recv_multipart()
        assert (frames[0] == b"") == self.delimiter, "the reply is framed otherwise than the request"
        return decode(frames[1:] if self.delimiter else frames, REPLY_LIMITS)

    def ask(self, op: str, request_id: str = "a", **fields: Any) -> dict[str, Any]:
        self.send(op, request_id, **fields)
        return self.receive()


@dataclass
class Bench:
    """What a test holds: the server, and the engine's end of it."""

    server: Server
    inbox: SimpleQueue
    context: zmq.Context
    status: list[EngineStatus]
    clients: list[Client] = field(default_factory=list)

    def client(self, kind: int = zmq.DEALER, delimiter: bool = False) -> Client:
        client = Client(self.context, self.server.endpoint, kind, delimiter)
        self.clients.append(client)
        return client

    def command(self) -> Any:
        return self.inbox.get(timeout=PATIENCE_S)

    def submitted(self) -> Request:
        command = self.command()
        assert isinstance(command, Submit), command
        return command.request

    def put(self, *events: Any) -> None:
        self.server.outbox.put(list(events))

    def finish(self, request: Request, tokens: list[int] | None = None, reason: str = "length") -> None:
        """Play an engine that generates the same tokens for all completions at once."""
        tokens = [1, 2, 3] if tokens is None else tokens
        start = len(request.prior.token_ids) if request.prior else 0
        for index in range(request.n):
            self.put(delta(request.key, index, start, tokens, finish=Finish(reason)))
        self.put(done(request))


def delta(key: RequestKey, index: int, offset: int, tokens: list[int], version: int = 7, **fields: Any) -> Delta:
    count = len(tokens)
    logprobs = -np.arange(offset, offset + count, dtype=np.float32)
    fields.setdefault("drawn_logprobs", None)
    return Delta(
        key=key,
        index=index,
        offset=offset,
        token_ids=np.array(tokens, np.int32),
        logprobs=logprobs,
        raw_logprobs=logprobs * 2,
        versions=[(version, count)] if count else [],
        seed=1000 + index,
        **fields,
    )


def done(request: Request) -> RequestDone:
    return RequestDone(request.key, len(request.prompt), 1, 2, 0.1, 0.2, 0.3, 0.6)


@contextmanager
def serving(
    text: Any = None,
    receiver: Any = None,
    model: ServedModel = MODEL,
    prompts: Any = None,
    compare: Compare = compare_result,
    **settings: Any,
) -> Iterator[Bench]:
    """A server on a free port for the time of a test."""
    inbox: SimpleQueue = SimpleQueue()
    status = [EngineStatus(weights_version=3, rows_running=2, rows_max=8, queue_max=16, pages_free=5)]
    server = Server(
        settings_of(ServiceSettings, **({"bind": "tcp://127.0.0.1:0"} | settings)),
        model,
        ServedEngine(inbox, lambda: status[0], receiver=receiver),
        ServedText(text, prompts),
        worker=WorkerAddress("worker-1"),
        compare=compare,
    )
    server.start()
    bench = Bench(server, inbox, zmq.Context(), status)
    try:
        yield bench
        assert not server.failed, "the service thread has ended by itself"
    finally:
        server.stop()
        for client in bench.clients:
            client.socket.close(0)
        bench.context.term()
        assert not server.alive, "the service thread did not end"
