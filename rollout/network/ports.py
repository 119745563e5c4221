"""Checks that a worker's ports are free before it spends minutes on loading a model.

Ports of numeric addresses are checked, and paths of `ipc`: ZeroMQ would take the path of a worker that lives. The
file of a killed worker does no harm. Host names and interfaces fail later, when their socket is bound.
"""

import ipaddress
import socket

from rollout.config import Settings


def check_free(settings: Settings) -> None:
    """Raise ValueError if another process uses a port of the settings. Call `Access.check_binds` first."""
    for setting, endpoint in (("service.bind", settings.service.bind), ("weights.bind", settings.weights.bind)):
        if endpoint.startswith("ipc://") and _answers(endpoint.removeprefix("ipc://")):
            raise ValueError(f"cannot bind {endpoint}: another process listens there; choose another {setting!r}")
        if (address := _address(endpoint)) is None:
            continue
        family, host_port = address
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
            try:
                probe.bind(host_port)
            except OSError as error:
                why = f"{error.strerror}; choose another {setting!r}, or port 0 for a free one"
                raise ValueError(f"cannot bind {endpoint}: {why}") from error


def _address(endpoint: str) -> tuple[socket.AddressFamily, tuple[str, int]] | None:
    """Family, and host with port; None if the endpoint is not checked here."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or port == "*" or int(port) == 0:
        return None
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    return (socket.AF_INET if version == 4 else socket.AF_INET6), (host, int(port))


def _answers(path: str) -> bool:
    """Whether a process listens at the path of a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        except OSError:
            return False
    return True
