"""How messages are taken from the request socket, whatever their size."""

import msgpack
import numpy as np
import pytest
import zmq

from rollout.network.router_socket import receive_parts
from tests.support.service.harness import serving

PARTS = 100_000


@pytest.fixture
def pair():
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        for socket in (one, two):
            socket.linger = 0
            socket.rcvtimeo = 5000
        one.bind("inproc://pair")
        two.connect("inproc://pair")
        yield one, two


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ([b"a", b"bc"], [b"a", b"bc"]),
        ([], []),
        ([b""] * PARTS, [b""] * 4),
        ([b"12345", b"123456", b"x", b"y"], [b"12345", b"123456"]),
    ],
)
def test_what_is_kept_of_a_message_is_bounded_and_the_next_one_is_whole(pair, sent, kept):
    one, two = pair
    one.send_multipart([b"first", *sent])
    one.send_multipart([b"next", b"message"])
    assert two.recv() == b"first"
    assert receive_parts(two, max_parts=4, max_bytes=10) == kept
    assert two.recv_multipart() == [b"next", b"message"]


@pytest.mark.parametrize("delimiter", [False, True])
def test_a_message_of_very_many_frames_is_answered_under_its_id(delimiter):
    with serving(max_blobs=2) as bench:
        client = bench.client(delimiter=delimiter)
        header = msgpack.packb({"v": 1, "op": "ping", "id": "many"})
        client.send_frames([header, *[b"x"] * PARTS])
        reply = client.receive()
        assert (reply["id"], reply["code"]) == ("many", "bad_message") and "more than 2 blobs" in reply["message"]
        client.send_frames([header, *[bytes(1 << 22)] * 20])
        reply = client.receive()
        assert (reply["id"], reply["code"]) == ("many", "bad_message")
        assert client.ask("ping", "p")["op"] == "ok"


def test_a_long_plain_list_is_refused_and_a_blob_of_that_length_is_not(codec):
    with serving(codec, max_prompt_tokens=1 << 17) as bench:
        client = bench.client()
        error = client.ask("generate", "a", prompt=[1] * ((1 << 16) + 1))
        assert error["code"] == "bad_message" and "blobs" in error["message"]
        error = client.ask("generate", "b", prompt=np.ones((1 << 16) + 1, np.int32))
        assert error["code"] == "too_long", "the model's context, not the message, is what it exceeds"
