"""Access to the gateway: tokens, and the addresses that need them.

A gateway that other hosts can reach needs tokens: its requests can pause workers and change their weights. Only
`/health` and `/ping` answer without a token, because routers and probes send none. A gateway without tokens refuses the
requests of web pages: any page in a browser could reach a loopback address.
"""

import hmac
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_gateway.http.http_errors import HttpError
from trainer_bridge.wire.address import is_loopback

OPEN_PATHS = frozenset({"/health", "/ping"})
_MIN_CHARS = 16


def read_keys(file: str | None, host: str) -> tuple[bytes, ...]:
    """The tokens in a file, one a line. Raises ValueError if `host` needs a token and there is no file."""
    if file is None:
        if not (host == "localhost" or is_loopback(host)):
            raise ValueError(
                f"--host {host} lets other hosts change the workers' weights: write a token of at least {_MIN_CHARS} "
                "characters to a file and name it with --api-key-file, or listen at 127.0.0.1"
            )
        return ()
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --api-key-file {file}: {error}") from error
    if not lines or any(len(line) < _MIN_CHARS for line in lines):
        raise ValueError(f"--api-key-file {file} needs tokens of at least {_MIN_CHARS} characters, one a line")
    return tuple(line.encode() for line in lines)


class AccessRule:
    """ASGI middleware: refuses requests without a valid token; if there are no tokens, requests of web pages."""

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            refused = self._refusal(scope)
            if refused is not None:
                await refused.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> HttpError | None:
        if self._keys:
            message = "send a valid token in the header 'Authorization: Bearer TOKEN' or 'X-Api-Key: TOKEN'"
            return None if self._known(scope) else HttpError(401, message)
        if any(name == b"origin" for name, _ in scope["headers"]):
            return HttpError(403, "web pages may not use a gateway without tokens; start it with --api-key-file")
        return None

    def _known(self, scope: Scope) -> bool:
        bearers = [value for name, value in scope["headers"] if name == b"authorization"]
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(bearers) > 1 or len(given) > 1:
            return False
        given += [value[7:].strip() for value in bearers if value[:7].lower() == b"bearer "]
        # Every key is compared, so the time does not tell which key fits.
        return any([hmac.compare_digest(token, key) for token in given for key in self._keys])
