"""How the request socket is set up, and how a message is taken from it."""

from __future__ import annotations

import zmq

from rollout.config import ServiceSettings
from rollout.service.access import Access

SEND_HWM = 256  # messages in the pipe of one connection, before its backlog
RECEIVE_HWM = 64  # messages of one connection that wait to be read; beyond that it is held up by TCP
_HEARTBEATS_MISSED = 3


def receive_parts(socket: zmq.Socket, max_parts: int, max_bytes: int) -> list[bytes]:
    """The parts of a message after its first one, which was received just now.

    They are kept up to `max_parts`, and until they are more than `max_bytes` together; the rest is dropped one by one.
    """
    parts: list[bytes] = []
    size = 0
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK)
        if len(parts) < max_parts and size <= max_bytes:
            parts.append(part)
            size += len(part)
    return parts


def open_router(context: zmq.Context, settings: ServiceSettings, access: Access) -> zmq.Socket:
    """A bound ROUTER socket. Raises ValueError if the endpoint cannot be bound, or must not be without CURVE."""
    access.check_bind(settings.bind, "service.bind")
    socket = context.socket(zmq.ROUTER)
    interval_ms = max(int(settings.heartbeat_s * 1000), 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to nobody is an error that we see
    # A client with a routing id of its own that reconnects takes its id over, though its old connection, which may be
    # half-open, has not ended for us yet. Otherwise ZeroMQ would ignore the new one for good.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
    # Somewhat more than what is allowed, so that a message that is just too large is told so; far larger ones are cut
    # off before they take memory.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * settings.max_message_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEATS_MISSED * interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(_HEARTBEATS_MISSED * interval_ms, 6_553_500))
    if "[" in settings.bind:
        socket.setsockopt(zmq.IPV6, 1)
    access.secure(context, socket)
    try:
        socket.bind(settings.bind)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ValueError(f"cannot bind {settings.bind}: {error}; choose another 'service.bind'") from error
    return socket
