"""The state of a gateway, by its own endpoints.

    /health         200 or 503, workers that are out of order; open to everybody
    /server_info    the model, and the workers that answer        } with --api-key-file, the token of a gateway that
    /metrics        what it has done since its start              } needs one

Redirections are not followed: they would take the token elsewhere.
"""

import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollout.cli.parser import CommandError, UsageError

_MOST_BYTES = 16 << 20
#: Metrics of the gateway itself, without labels -> the field of `counts`.
_COUNTS = {
    "rollout_gateway_in_flight": "in_flight",
    "rollout_gateway_requests_total": "requests",
    "rollout_gateway_refused_total": "refused",
    "rollout_gateway_sessions": "sessions",
}


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """The answers of a gateway. Without `server_info` or `counts` it refused them; `missing` is the reason."""

    health: Mapping[str, Any]  # the answer of /health; of a gateway without a worker in order, `status` and `reason`
    server_info: Mapping[str, Any] | None
    counts: Mapping[str, int] | None
    missing: str = ""

    def fields(self) -> dict[str, Any]:
        """All fields, for JSON."""
        fields = {"health": dict(self.health), "server_info": self.server_info, "counts": self.counts}
        return fields | ({"missing": self.missing} if self.missing else {})

    def lines(self) -> Iterator[tuple[str, str]]:
        """The most important lines."""
        health, info, counts = self.health, self.server_info, self.counts
        unhealthy = health.get("unhealthy") or {}
        yield "state", str(health["status"])
        if "reason" in health:
            yield "reason", str(health["reason"])
        if info is not None:
            yield "model", f"{info.get('model_path')}, {info.get('context_length')} tokens of context"
        if "workers" in health:
            yield "workers", f"{health['workers']}, {len(unhealthy)} of them unhealthy"
        for endpoint, reason in unhealthy.items():
            yield "unhealthy", f"{endpoint}: {reason}"
        if info is not None:
            least = f", at least {health['min_version']} is needed" if health.get("min_version") else ""
            yield "weights", f"version {info.get('weight_version')}{least}"
            for worker in info.get("workers") or ():
                rows, queue = worker["rows"], worker["queue"]
                load = f"{rows['running']} of {rows['max']} rows generate, {queue['waiting']} completions wait"
                yield "worker", f"{worker['worker']}: {worker['state']}, version {worker['weights_version']}, {load}"
        if counts is not None:
            yield "requests", "{requests} since the start, {refused} refused".format_map(counts)
            yield "in flight", "{in_flight} completions, {sessions} sessions".format_map(counts)
        if self.missing:
            yield "not shown", self.missing


def ask_gateway(url: str, timeout_s: float, key_file: str | None) -> GatewayStatus:
    """The status of a gateway. Raises `CommandError` without an answer, `UsageError` for wrong flags."""
    gateway = _Gateway(url, timeout_s, key_file)
    health = _health(url, *gateway.get("/health"))
    try:
        info = _read_json(gateway, "/server_info")
        status, text = gateway.get("/metrics")
        counts = _counts(text) if status == http.client.OK else None
        return GatewayStatus(health, info, counts)
    except _RefusedError as refused:
        return GatewayStatus(health, None, None, str(refused))


class _RefusedError(Exception):
    """The gateway refuses this request; the message says why."""


class _Gateway:
    """GET requests to one address."""

    def __init__(self, url: str, timeout_s: float, key_file: str | None) -> None:
        if not timeout_s > 0:
            raise UsageError("--timeout-s must be more than 0 seconds")
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"{url} is not an address: {error}") from error
        if not self._host:
            raise UsageError(f"{url} names no host: write http://HOST:PORT")
        tls = parts.scheme == "https"
        self._connection = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        self._url, self._path, self._timeout_s = url, parts.path.rstrip("/"), timeout_s
        self._headers: dict[str, str | bytes] = {}
        if key_file is not None:
            self._headers["Authorization"] = f"Bearer {_token(key_file)}".encode()

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of an answer. Raises `CommandError` if none comes."""
        connection = self._connection(self._host or "", self._port, timeout=self._timeout_s)
        try:
            connection.request("GET", self._path + path, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MOST_BYTES).decode("utf-8", "replace")
        except TimeoutError as error:
            raise CommandError(f"{self._url}: {path} had no answer within {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise CommandError(f"{self._url}: {reason or error or type(error).__name__}") from error
        finally:
            connection.close()


def _token(key_file: str) -> str:
    try:
        tokens = Path(key_file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --api-key-file {key_file}: {error}") from error
    if not tokens:
        raise UsageError(f"--api-key-file {key_file} holds no token")
    return tokens[0]


def _health(url: str, status: int, text: str) -> Mapping[str, Any]:
    answer = _json(text)
    if status == http.client.OK and isinstance(answer.get("workers"), int):
        return answer
    if status == http.client.SERVICE_UNAVAILABLE and (reason := _message(answer)):
        return {"status": "unavailable", "reason": reason}
    raise CommandError(
        f"{url} answers, but not as a gateway does ({status} to /health): name the address of `rollout gateway`, or a "
        "worker's, such as tcp://127.0.0.1:5757"
    )


def _read_json(gateway: _Gateway, path: str) -> Mapping[str, Any]:
    """The answer of an endpoint. Raises `_RefusedError`."""
    status, text = gateway.get(path)
    answer = _json(text)
    if status == http.client.UNAUTHORIZED:
        raise _RefusedError("model, weights and counts: this gateway needs a token; give --api-key-file FILE")
    if status != http.client.OK:
        raise _RefusedError(f"model, weights and counts: {_message(answer) or f'status {status} to {path}'}")
    return answer


def _json(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    return str(error.get("message", "")) if isinstance(error, Mapping) else ""


def _counts(page: str) -> dict[str, int]:
    """The gateway's own counts on a page for Prometheus: the lines of its metrics have a name and a number."""
    counts = dict.fromkeys(_COUNTS.values(), 0)
    for line in page.splitlines():
        name, _, value = line.partition(" ")
        if name in _COUNTS:
            counts[_COUNTS[name]] = int(float(value))
    return counts
