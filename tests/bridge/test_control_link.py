"""The connection over which a publisher asks a worker: what arrives, and what a loss takes along."""

from __future__ import annotations

import threading

import pytest
import zmq
from weights_harness import wait_for

from trainer_bridge.errors import InternalError
from trainer_bridge.weight_messages import ControlLink, ask_all
from trainer_bridge.wire import decode, encode, split_envelope


def answer_and_end(socket: zmq.Socket, context: zmq.Context) -> None:
    """A worker that answers one message, and is gone."""
    connection, *frames = socket.recv_multipart()
    delimiter, frames = split_envelope(frames)
    asked = decode(frames)
    reply = encode({"v": 1, "op": "error", "id": asked["id"], "code": "internal", "message": "a fault"})
    socket.send_multipart([connection, *([b""] if delimiter else []), *reply])
    socket.close(linger=2000)
    context.term()


@pytest.mark.parametrize("_", range(12))
def test_the_last_words_of_a_worker_arrive(_: int) -> None:
    """ZeroMQ may drop them where it is told to queue nothing for a worker that is not there: about every other time."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    worker = threading.Thread(target=answer_and_end, args=(socket, context))
    worker.start()
    link = ControlLink(f"tcp://127.0.0.1:{port}", "trainer")
    try:
        (answer,) = ask_all([(link, {"action": "status"})], "status", 30.0, threading.Event())
        assert isinstance(answer, InternalError) and "a fault" in str(answer)
        worker.join(10)
        wait_for(lambda: link.send({"action": "status"}) is None, "that nothing goes where nobody is")
    finally:
        link.close()
