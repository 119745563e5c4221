"""ZeroMQ's own thread stopped for a while, as on a machine whose cores are all taken.

ZeroMQ calls a function of ours when it has written a message and wants its memory no more: from the thread that reads
and writes all sockets of the message's context. A function that waits there holds that thread, and nothing else.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import pytest
import zmq

WAIT_S = 60.0
_MESSAGE_BYTES = 64  # sizeof(zmq_msg_t)
_LARGE = 1 << 20  # ZeroMQ copies small messages, and lets go of them in the thread that sends

_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


@contextlib.contextmanager
def standing_still(context: zmq.Context) -> Iterator[None]:
    """Hold the thread of a context (which must have one): what is sent meanwhile goes out after it."""
    library = _library()
    stopped, go_on = threading.Event(), threading.Event()

    def wait(data: int, hint: int) -> None:
        stopped.set()
        go_on.wait(WAIT_S)

    free, data = _Free(wait), ctypes.create_string_buffer(_LARGE)
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    with zmq.Context() as elsewhere, elsewhere.socket(zmq.PULL) as sink, context.socket(zmq.PUSH) as source:
        sink.set(zmq.LINGER, 0)
        source.connect(f"tcp://127.0.0.1:{sink.bind_to_random_port('tcp://127.0.0.1')}")
        library.zmq_msg_init_data(message, data, ctypes.c_size_t(_LARGE), free, None)
        assert library.zmq_msg_send(message, ctypes.c_void_p(source.underlying), 0) == _LARGE
        try:
            assert stopped.wait(WAIT_S), "ZeroMQ never let go of the message"
            yield
        finally:
            go_on.set()
            source.close(0)


def _library() -> ctypes.CDLL:
    """The libzmq that pyzmq runs on."""
    try:
        from zmq.backend.cython import _zmq

        library = ctypes.CDLL(_zmq.__file__)
        library.zmq_msg_init_data, library.zmq_msg_send  # noqa: B018 -- is it there?
    except (ImportError, OSError, AttributeError):
        pytest.skip("pyzmq's libzmq can't be called directly here")
    return library
