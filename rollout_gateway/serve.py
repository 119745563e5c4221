"""Runs a gateway: binds the socket, makes the client of the workers, runs uvicorn, and ends it."""

import json
import logging
import os
import resource
import signal
import socket
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from rollout.config.gateway_settings import GatewaySettings
from rollout.process.announce import announce, remove_ready_file, write_atomically
from rollout.process.interpreter import collect_and_freeze
from rollout.process.logs import set_up
from rollout.process.open_files import raise_limit
from rollout_gateway.app import make_app
from rollout_gateway.http.access import read_keys
from rollout_gateway.http.client_connections import IN_USE_S, connection_class
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.wire.address import bare, host_port, resolve
from trainer_bridge.wire.keys import ClientCurve

log = logging.getLogger(__name__)

_BACKLOG = 2048
_OTHER_FILES = 128  # files besides the clients' connections: workers, libraries, weights
_GRACE_S = 5


def serve(settings: GatewaySettings, curve: ClientCurve | None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. Raises ValueError for settings that cannot work."""
    host = bare(settings.host)
    keys = read_keys(settings.api_key_file, host)
    set_up("info", "text", "gateway")
    settings = settings.model_copy(update={"max_connections": _most_connections(settings)})
    listening = _bind(host, settings.port)
    url = f"http://{host_port(host, listening.getsockname()[1])}"

    def pool() -> AsyncRolloutClient:
        return worker_client(settings, curve)

    config = uvicorn_config(settings, make_app(settings, keys, pool, curve), _GRACE_S)
    server = _Server(config, url, settings.ready_file)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn sends itself the signal again once it has ended
        signal.signal(number, signal.SIG_IGN)
    try:
        server.run(sockets=[listening])
    finally:
        if settings.ready_file is not None:
            remove_ready_file(Path(settings.ready_file))
    return 0 if server.started else 1


def worker_client(settings: GatewaySettings, curve: ClientCurve | None = None) -> AsyncRolloutClient:
    """The gateway's client of the workers. It waits at most three heartbeats for a worker that is lost."""
    return AsyncRolloutClient(
        settings.endpoints,
        curve=curve,
        resume=settings.resumes,
        resume_timeout_s=settings.resume_s,
        heartbeat_s=settings.heartbeat_s,
        connect_timeout_s=3 * settings.heartbeat_s,
    )


def uvicorn_config(
    settings: GatewaySettings, app: Starlette, grace_s: int, in_use_s: float = IN_USE_S
) -> uvicorn.Config:
    """The settings of uvicorn for a gateway. At the end, running requests have `grace_s` seconds.

    `in_use_s` is as for `connection_class`.
    """
    patience_s = max(settings.body_s, settings.send_s)
    return uvicorn.Config(
        app,
        http=connection_class(patience_s, settings.keep_alive_s, settings.max_connections, in_use_s),
        timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type] # a time of the event loop
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=grace_s,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        backlog=_BACKLOG,
    )


def _most_connections(settings: GatewaySettings) -> int:
    """`max_connections`, or fewer if this process may not open that many files."""
    limit = raise_limit(what="a gateway")
    room = settings.max_connections if limit == resource.RLIM_INFINITY else limit - _OTHER_FILES
    if room < settings.max_connections:
        log.warning("--max-connections is %d here: this process may open %d files (ulimit -Hn)", room, limit)
    return min(settings.max_connections, room)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket. uvicorn listens at it once a worker has answered."""
    try:
        family, address = resolve(host, port, socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        why = f"{error.strerror or error}; choose another --host or --port"
        raise ValueError(f"cannot listen at {host_port(host, port)}: {why}") from error
    return listening


class _Server(uvicorn.Server):
    """uvicorn's server, which announces when it is ready."""

    def __init__(self, config: uvicorn.Config, url: str, ready_file: str | None) -> None:
        super().__init__(config)
        self._url = url
        self._ready_file = ready_file

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down; exit at once if no worker has answered yet."""
        super().handle_exit(sig, frame)
        if not self.started:
            raise SystemExit(0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and announce the URL."""
        await super().startup(sockets)
        if self.started:
            collect_and_freeze()  # transformers' objects: a full collection would take 0.15 s, amid streams
            fact = {"event": "ready", "url": self._url, "pid": os.getpid()}
            if self._ready_file is not None:
                write_atomically(Path(self._ready_file), json.dumps(fact))
            announce(fact)
