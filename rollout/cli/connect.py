"""The connection of a command to a worker: endpoint, CURVE keys, time-out, and errors that name the endpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rollout.cli.parser import UsageError

if TYPE_CHECKING:
    from trainer_bridge.client.blocking import RolloutClient
    from trainer_bridge.wire.keys import ClientCurve

#: Most seconds to wait for a connection; a worker that runs accepts one at once.
_CONNECT_S = 4.0


def is_http(address: str) -> bool:
    """True for the address of a gateway; a worker's is a ZeroMQ endpoint."""
    return address.startswith(("http://", "https://"))


def add_worker(parser: argparse.ArgumentParser, timeout_s: float | None) -> None:
    """Declare ENDPOINT and the flags that `connect` reads."""
    parser.add_argument("endpoint", metavar="ENDPOINT", help="address of the worker, such as tcp://127.0.0.1:5757")
    add_connection(parser, timeout_s)


def add_connection(parser: argparse.ArgumentParser, timeout_s: float | None) -> None:
    """Declare the flags that `connect` reads."""
    add_access(parser)
    shown = "no limit" if timeout_s is None else f"{timeout_s:g}"
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help=f"seconds to wait for an answer [{shown}]")


def add_access(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `curve_of` reads."""
    parser.add_argument("--curve-key", metavar="FILE", help="this client's secret key file, for a worker with CURVE")
    parser.add_argument(
        "--curve-server-key", metavar="FILE", help="the worker's public key file; required with --curve-key"
    )


def connect(
    endpoint: str, args: argparse.Namespace, client: str | None = None, acknowledge: bool | None = None
) -> RolloutClient:
    """A client of one endpoint, with the arguments of `RolloutClient`. Raises `UsageError` for wrong flags."""
    from trainer_bridge.client.blocking import RolloutClient

    if is_http(endpoint):
        raise UsageError(
            f"{endpoint} is the address of an HTTP gateway, and this command speaks to workers: name the address of a "
            "worker, such as tcp://127.0.0.1:5757 (`rollout status` shows a gateway, too)"
        )
    if args.timeout_s is not None and not args.timeout_s > 0:
        raise UsageError("--timeout-s must be more than 0 seconds")
    # The connection's time-out comes first, because its error is more specific.
    limits = {} if args.timeout_s is None else {"connect_timeout_s": min(0.8 * args.timeout_s, _CONNECT_S)}
    try:
        return RolloutClient(
            endpoint, client=client, timeout_s=args.timeout_s, curve=curve_of(args), acknowledge=acknowledge, **limits
        )
    except ValueError as error:  # not an endpoint
        raise UsageError(where(endpoint, error)) from error


def where(endpoint: str, error: Exception) -> str:
    """The error with the endpoint in front, unless its text names the endpoint already."""
    from trainer_bridge.wire.errors import with_endpoint

    return with_endpoint(endpoint, str(error))


def curve_of(args: argparse.Namespace) -> ClientCurve | None:
    """The keys of the flags, or None. Raises `UsageError` for one flag without the other."""
    from trainer_bridge.wire.keys import ClientCurve

    if args.curve_key is None and args.curve_server_key is None:
        return None
    if args.curve_key is None or args.curve_server_key is None:
        raise UsageError("give both --curve-key and --curve-server-key, or neither")
    try:
        return ClientCurve.from_files(args.curve_key, args.curve_server_key)
    except ValueError as error:
        raise UsageError(str(error)) from error
