"""What tests of hostile input share: little memory to take, little time to take it in, and sockets without manners."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

SPARE_BYTES = 256 << 20  # that hostile input may make the process take
SOON_S = 5.0  # of a core, on a slow machine; each takes a fraction of it

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)  # ZMTP 3.0
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@contextlib.contextmanager
def little_memory_and_time(spare_bytes: int = SPARE_BYTES, soon_s: float = SOON_S) -> Iterator[None]:
    """A process that can take hardly more memory than it has: what asks for much more fails, and in the wrong way."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    started = time.process_time()  # what others have of the machine does not count
    resource.setrlimit(resource.RLIMIT_AS, (taken + spare_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - started < soon_s, "took too long"


def rss_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def junk_for_a_port() -> list[bytes]:
    """What a stranger may write to a ZeroMQ port: other protocols, half handshakes, frames that lie about size."""
    huge = [struct.pack(">BQ", flags, size) for flags in (2, 3, 6) for size in (2**31, 2**40, 2**62, 2**63, 2**64 - 1)]
    return [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        os.urandom(1) * 4096,
        b"\xff" * 10_000,
        bytes(10_000),
        GREETING[:11],
        GREETING[:40],
        GREETING,
        GREETING.replace(b"NULL", b"EVIL"),
        GREETING.replace(b"NULL\0", b"CURVE"),
        GREETING + b"\x04\xff" + b"\x05READY" + b"\xff" * 249,
        GREETING + b"\x04\x0e\x05READY\xff" + b"x" * 7,
        GREETING + READY,
        GREETING + READY + b"\x00\x05ab",
        *(GREETING + frame for frame in huge),
        *(GREETING + READY + frame + b"x" * 1000 for frame in huge),
        *(GREETING + READY + b"\x01\x00" * 1000 + frame for frame in huge[:3]),
    ]


def throw_junk(endpoint: str, read_timeout_s: float = 0.02) -> int:
    """Write each piece of junk to a TCP endpoint on a connection of its own; how many connections that were."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    pieces = junk_for_a_port()
    kept = []
    for number, piece in enumerate(pieces):
        connection = socket.create_connection((host, int(port)), timeout=5)
        connection.settimeout(read_timeout_s)
        with contextlib.suppress(OSError):
            connection.sendall(piece)
            connection.recv(4096)
        if number % 2:
            kept.append(connection)  # some stay open, and say no more
        else:
            connection.close()
    for connection in kept:
        connection.close()
    return len(pieces)
