"""Leases: how long a disconnected client keeps its requests.

A client holds a lease while it has requests in flight. It is gone when all connections that carried its messages are
closed. Its requests end `lease_s` later, unless another message of it arrives. A client without a name is its
connection. It cannot return, so its lease ends at once.
"""

from collections.abc import Callable

_NAMED, _UNNAMED = "client:", "connection:"
_GIVEN_BY_ZEROMQ = f"{_UNNAMED}00"  # ZeroMQ generates routing ids that begin with a zero byte, one for each connection


def client_key(name: str | None, connection: bytes) -> str:
    """The key of a client: its name, or its connection."""
    return f"{_UNNAMED}{connection.hex()}" if name is None else f"{_NAMED}{name}"


def may_return(client: str) -> bool:
    """True if the client can return over another connection."""
    return not client.startswith(_GIVEN_BY_ZEROMQ)


class Leases:
    """The clients with requests in flight, and the connections that carried their messages. Times are of `clock`."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._connections: dict[str, dict[bytes, None]] = {}  # connections of each client
        self._clients: dict[bytes, dict[str, None]] = {}  # clients of each connection
        self._left_s: dict[str, float] = {}  # disconnect time of clients that may return, in that order
        self._ended: list[str] = []

    def hold(self, client: str, connection: bytes) -> None:
        """Note that the client has a request in flight."""
        self._connections.setdefault(client, {})
        self.renew(client, connection)

    def renew(self, client: str, connection: bytes) -> None:
        """Note that a message of the client arrived."""
        connections = self._connections.get(client)
        if connections is not None:
            connections[connection] = None
            self._clients.setdefault(connection, {})[client] = None
            self._left_s.pop(client, None)

    def release(self, client: str) -> None:
        """Note that the client has no request in flight any more."""
        self._left_s.pop(client, None)
        for connection in self._connections.pop(client, {}):
            clients = self._clients[connection]
            del clients[client]
            if not clients:
                del self._clients[connection]

    def connection_closed(self, connection: bytes) -> None:
        """Note that the connection is closed."""
        for client in self._clients.pop(connection, {}):
            connections = self._connections[client]
            del connections[connection]
            if connections:
                continue
            if may_return(client):
                self._left_s[client] = self._clock()
            else:
                self._ended.append(client)

    def take_ended(self) -> list[str]:
        """Clients whose lease ended since the last call, each once."""
        ended, self._ended = self._ended, []
        while self.wait_s() == 0.0:
            client = next(iter(self._left_s))
            del self._left_s[client]
            ended.append(client)
        return ended

    def wait_s(self) -> float | None:
        """Seconds until the next lease of a disconnected client ends, or None."""
        if self._ended:
            return 0.0
        first_s = next(iter(self._left_s.values()), None)
        return None if first_s is None else max(0.0, first_s + self._lease_s - self._clock())
