"""Ports for servers that a test starts later, or again."""

import random
import socket

import pytest

#: Below the ports that Linux gives to whoever asks for any: nobody takes one of these by chance in the meantime.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at."""
    draw = random.SystemRandom()  # the seed of a test run is the same in all its processes
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
