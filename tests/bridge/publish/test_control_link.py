"""The connections of a publisher to a worker: what arrives, and what a loss takes along."""

import threading
import time

import pytest
import zmq

from tests.support.bridge.harness import wait_for
from tests.support.ports import free_port
from trainer_bridge.publish.control_link import ControlLink, ask_all
from trainer_bridge.transports.base import Recipient, TransferRules
from trainer_bridge.transports.bucket_link import BUCKET, REFUSAL, REFUSAL_MAGIC, Link
from trainer_bridge.wire.codec import decode, encode, join_envelope, split_envelope
from trainer_bridge.wire.errors import ConnectionLost, InternalError, WeightsRejected


def answer_and_end(socket: zmq.Socket, context: zmq.Context) -> None:
    """A worker that says where its weight socket is, answers one message, and is gone."""
    here = {"op": "status", "weights_endpoint": socket.get_string(zmq.LAST_ENDPOINT)}
    for answer in (here, {"op": "error", "code": "internal", "message": "a fault"}):
        connection, *frames = socket.recv_multipart()
        delimiter, frames = split_envelope(frames)
        reply = encode({"v": 1, "id": decode(frames)["id"], **answer})
        socket.send_multipart([connection, *join_envelope(delimiter, reply)])
    socket.close(linger=2000)
    context.term()


@pytest.mark.parametrize("_", range(12))
def test_the_last_words_of_a_worker_arrive(_: int) -> None:
    """With no queue for an absent worker, ZeroMQ may drop them: about every other time."""
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
        wait_for(lambda: link.send({"action": "status"}) is None, "the end of the connection")
    finally:
        link.close()


def test_a_worker_that_is_back_is_found_though_its_endpoint_has_refused_for_long() -> None:
    """ZeroMQ has not tried again yet when the next message comes."""
    port = free_port()
    link, context = ControlLink(f"tcp://127.0.0.1:{port}", "trainer", refused_s=0.5), zmq.Context()
    question = [(link, {"action": "status"})]
    try:
        (answer,) = ask_all(question, "begin", 60.0, threading.Event())
        assert isinstance(answer, ConnectionLost) and "it has refused connections for 0.5 s" in str(answer)
        for _ in range(3):  # the next ones wait for one more refusal, and no longer
            link._refused_s, link._connection.refusing_since_s = 900.0, time.monotonic() - 1000.0
            (answer,) = ask_all(question, "begin", 60.0, threading.Event())
            assert isinstance(answer, ConnectionLost) and "refused" in str(answer)
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"tcp://127.0.0.1:{port}")
        worker = threading.Thread(target=answer_and_end, args=(socket, context))
        worker.start()
        (answer,) = ask_all(question, "begin", 60.0, threading.Event())
        assert isinstance(answer, InternalError) and "a fault" in str(answer)
        worker.join(60)
    finally:
        link.close()


def test_a_refusal_that_a_worker_ends_behind_is_read_though_the_connection_is_gone() -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    recipient = Recipient("the worker", b"t" * 16, {"window": 4, "endpoint": f"tcp://127.0.0.1:{port}"})
    link = Link(recipient, TransferRules(20.0, threading.Event()), None)
    monitor = link.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        link.send(0, 0, memoryview(b"data"))
        connection, header, _ = socket.recv_multipart()
        assert BUCKET.unpack(header)[1] == recipient.token
        socket.send_multipart([connection, REFUSAL.pack(REFUSAL_MAGIC, recipient.token) + b"it ends"])
        socket.close(linger=2000)
        context.term()
        assert monitor.poll(20_000)  # only now does the publisher come to look
        wait_for(lambda: link.read() or not link.alive, "the refusal")
        assert isinstance(recipient.error, WeightsRejected) and "it ends" in str(recipient.error)
    finally:
        link.socket.disable_monitor()
        monitor.close(0)
        link.close()
