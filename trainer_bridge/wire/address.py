"""Hosts and ports: how addresses are written, and which address of this host a peer sees. IPv6 as well as IPv4."""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

LOOPBACK = "127.0.0.1"


def endpoint_list(endpoints: Any) -> list[str]:
    """The endpoints of a client or publisher. Raises TypeError for other things, ValueError for none or one twice."""
    given = [endpoints] if not isinstance(endpoints, Iterable) or isinstance(endpoints, str) else list(endpoints)
    if wrong := [each for each in given if not isinstance(each, str)]:
        raise TypeError(
            f"endpoints must be addresses such as 'tcp://127.0.0.1:5757', not {type(wrong[0]).__name__}; "
            "of start_worker's object pass worker.endpoints"
        )
    if not given or len(set(given)) != len(given):
        raise ValueError("endpoints must name at least one worker, and each once")
    return given


def bracketed(host: str) -> str:
    """A host as it stands before `:PORT`: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def bare(host: str) -> str:
    """A host without the brackets of an IPv6 address."""
    return host.removeprefix("[").removesuffix("]")


def host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"{bracketed(host)}:{port}"


def is_loopback(host: str) -> bool:
    """True for an IP address that no other host can reach. Names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve(host: str, port: int, kind: socket.SocketKind) -> list[tuple[socket.AddressFamily, Any]]:
    """Families and socket addresses of a host, IPv4 first, as ZeroMQ prefers it for names. Raises OSError."""
    found = [(each[0], each[4]) for each in socket.getaddrinfo(host, port, type=kind)]
    return sorted(found, key=lambda each: each[0] != socket.AF_INET)


def with_zone(address: Any) -> str:
    """The host of a socket address, with the zone of a link-local one."""
    host, zone = address[0], address[3] if len(address) == 4 else 0
    return f"{host}%{zone}" if zone and "%" not in host else host


def address_towards(host: str, port: int | None) -> str:
    """The address of this host on the route to another one, or a loopback address without a route. Sends nothing."""
    try:
        found = resolve(host, port or 1, socket.SOCK_DGRAM)
    except OSError:  # an unknown name
        return LOOPBACK
    for family, address in found:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return with_zone(probe.getsockname())
        except OSError:  # no route in this family
            continue
    return LOOPBACK


def host_of(endpoint: str) -> str:
    """The host of a `tcp` endpoint, without brackets; empty for other transports."""
    return bare(endpoint.removeprefix("tcp://").rpartition(":")[0]) if endpoint.startswith("tcp://") else ""


def has_brackets(endpoint: str) -> bool:
    """False for an IPv6 address without its brackets, whose port is ambiguous."""
    return "[" in endpoint or ":" not in host_of(endpoint)


def is_name(host: str) -> bool:
    """True for a host that has to be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host not in ("", "*")
    return False
