"""Access to a worker's sockets: the rule for addresses, CURVE, and the list of clients.

    client -- CURVE handshake --> socket --ZAP--> ClientKeyList thread: is this public key in the folder? --> 200 or 400

Invariants:

- An address that other hosts can reach is bound only with CURVE or with the setting `insecure`.
- It fails closed: without an answer from the thread no client connects (`ZAP_ENFORCE_DOMAIN`).
- The thread ends when its context is terminated, not earlier.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from rollout.config import SecuritySettings, Settings
from trainer_bridge.wire.address import has_brackets
from trainer_bridge.wire.keys import PUBLIC_SUFFIX, KeyPair, read_pair, read_public

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_FRAMES = 7  # a CURVE request: version, id, domain, address, identity, mechanism, key
_DOMAIN = b"rollout"
_RELOAD_S = 1.0
_MAX_CLIENT_KEYS = 1 << 16

_log = logging.getLogger(__name__)


def is_loopback(endpoint: str) -> bool:
    """True for an endpoint that no other host can reach: 127.0.0.0/8, ::1, ipc and inproc. Names are not looked up."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    try:
        url = urlsplit(endpoint)
        return url.scheme == "tcp" and ipaddress.ip_address(url.hostname or "").is_loopback
    except ValueError:  # a name, a wildcard, an interface
        return False


def _names_port(endpoint: str) -> bool:
    """True if the port is `*` or fits 16 bits; ZeroMQ would wrap a larger number."""
    port = endpoint.rpartition(":")[2]
    return port == "*" or (port.isascii() and port.isdigit() and int(port) < 1 << 16)


@dataclass(frozen=True, slots=True)
class Access:
    """The access rules of the settings. `keys` and `clients` are both set or both None."""

    keys: KeyPair | None
    clients: ClientKeyList | None
    insecure: bool

    @classmethod
    def from_settings(cls, settings: SecuritySettings) -> Access:
        """Read the keys. Raises ValueError that names the file."""
        if settings.curve_secret_key is None or settings.curve_client_keys is None:
            return cls(None, None, settings.insecure)
        keys = read_pair(settings.curve_secret_key)
        return cls(keys, ClientKeyList(Path(settings.curve_client_keys)), settings.insecure)

    def check_bind(self, endpoint: str, setting: str) -> None:
        """Raise ValueError for an endpoint that is wrong or open to other hosts; `setting` is its name."""
        wrong = endpoint.startswith("tcp://") and not (_names_port(endpoint) and has_brackets(endpoint))
        if "://" not in endpoint or wrong:
            raise ValueError(
                f"{setting} = {endpoint} is not an endpoint: write ipc://PATH, or tcp://HOST:PORT with an IPv6 address "
                "in brackets and a port up to 65535, 0 for a free one"
            )
        if self.keys is None and not self.insecure and not is_loopback(endpoint):
            raise ValueError(
                f"{setting} = {endpoint} lets other hosts connect, shut this worker down and change its weights: set "
                "security.curve_secret_key and security.curve_client_keys (`rollout keys` makes them), bind 127.0.0.1, "
                "or pass --insecure if the network keeps strangers out"
            )

    def check_binds(self, settings: Settings) -> None:
        """Raise ValueError if an endpoint of the worker is wrong or open to other hosts; warn if no client may connect.

        A process calls this once, so the warning is logged once, although each socket reads the keys.
        """
        self.check_bind(settings.service.bind, "service.bind")
        self.check_bind(settings.weights.bind, "weights.bind")
        if self.clients is not None:
            self.clients.warn_if_empty()

    def secure(self, context: zmq.Context, socket: zmq.Socket) -> None:
        """Restrict an unbound socket to allowed clients. Call it once a context."""
        if self.keys is None or self.clients is None:
            return
        self.clients.serve(context)
        socket.curve_server = True
        socket.curve_publickey = self.keys.public
        socket.curve_secretkey = self.keys.secret
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class ClientKeyList:
    """The public keys in a folder. The folder is read again every second while clients connect: a new key may connect,
    a removed key may not; existing connections stay.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._names: dict[bytes, str] = {}
        self._loaded_s = 0.0
        if not folder.is_dir():
            raise ValueError(
                f"security.curve_client_keys = {folder} is not a folder; put the clients' .key files there"
            )
        self._load()

    def warn_if_empty(self) -> None:
        """Log a warning if no client can connect."""
        if not self._names:
            _log.warning("%s holds no *%s files: no client can connect", self._folder, PUBLIC_SUFFIX)

    def name_of(self, public: bytes) -> str | None:
        """The name of the file that holds a key (Z85), without its suffix, or None."""
        with self._lock:
            if time.monotonic() - self._loaded_s > _RELOAD_S:
                self._load()
            return self._names.get(public)

    def serve(self, context: zmq.Context) -> None:
        """Answer ZAP requests of a context's sockets, on a thread that ends with the context."""
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(_ZAP_ENDPOINT)
        threading.Thread(target=self._run, args=(socket,), name="allow-list", daemon=True).start()

    def _load(self) -> None:
        names: dict[bytes, str] = {}
        try:
            files = sorted(file for file in self._folder.iterdir() if file.suffix == PUBLIC_SUFFIX)
        except OSError as error:  # fail closed: a key that cannot be looked up is refused
            _log.error("the folder of client keys cannot be read: %s", error)
            files = []
        for file in files[:_MAX_CLIENT_KEYS]:
            try:
                names[read_public(file)] = file.stem
            except ValueError as error:
                _log.error("a client key is ignored: %s", error)
        self._names, self._loaded_s = names, time.monotonic()

    def _run(self, socket: zmq.Socket) -> None:
        try:
            while True:
                frames = socket.recv_multipart()
                socket.send_multipart(self.answer(frames))
        except zmq.ContextTerminated:
            pass
        # Without this thread no client can connect; the log has the reason.
        except Exception:
            _log.critical("the list of allowed clients failed; no client can connect any more", exc_info=True)
        finally:
            socket.close(0)

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The reply to a question of ZAP, the protocol by which ZeroMQ asks whether a client may connect."""
        if len(frames) != _ZAP_FRAMES or frames[0] != _ZAP_VERSION or frames[5] != b"CURVE" or len(frames[6]) != 32:
            request_id = frames[1] if len(frames) > 1 else b""
            return [_ZAP_VERSION, request_id, b"400", b"not a CURVE request", b"", b""]
        public, address = z85.encode(frames[6]), frames[3].decode(errors="replace")
        name = self.name_of(public)
        if name is None:
            facts = {"address": address, "key": public.decode()}
            _log.warning("refused a client: its public key is not in the list", extra=facts)
            return [_ZAP_VERSION, frames[1], b"400", b"this key is not allowed", b"", b""]
        _log.info("a client connected", extra={"key_name": name, "address": address})
        return [_ZAP_VERSION, frames[1], b"200", b"OK", name.encode(), b""]
