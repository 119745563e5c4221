"""Whether a worker's ports are free: asked before its model is loaded, which may take minutes.

Only what is sure is said: about a port of a numeric address. Names, interfaces and other transports are left to the
sockets themselves, which bind once the model is there.
"""

from __future__ import annotations

import ipaddress
import socket

from rollout.config import Settings


def check_free(settings: Settings) -> None:
    """Raise ValueError if another process has a port that the settings name; `Access.check_binds` comes first."""
    for setting, endpoint in (("service.bind", settings.service.bind), ("weights.bind", settings.weights.bind)):
        if (place := _place(endpoint)) is None:
            continue
        family, address = place
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ: connections that end do not count
            try:
                probe.bind(address)
            except OSError as error:
                why = f"{error.strerror}; choose another {setting!r}, or port 0 for a free one"
                raise ValueError(f"cannot bind {endpoint}: {why}") from error


def _place(endpoint: str) -> tuple[socket.AddressFamily, tuple[str, int]] | None:
    """Family, address and port, or None where there is nothing to ask."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or port == "*" or int(port) == 0:
        return None
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    return (socket.AF_INET if version == 4 else socket.AF_INET6), (host, int(port))
