"""What a ZeroMQ socket's monitor has to tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message


def socket_events(monitor: zmq.Socket) -> Iterator[dict[str, Any]]:
    """The events that have come since they were last asked for, oldest first. Never blocks."""
    while True:
        try:
            message = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield dict(parse_monitor_message(message))
