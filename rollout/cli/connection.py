"""What the commands that talk to a worker share: its flags for CURVE, and how they say what went wrong where."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rollout.cli.parser import UsageError

if TYPE_CHECKING:
    from trainer_bridge.client.blocking import RolloutClient
    from trainer_bridge.client.keys import ClientCurve
    from trainer_bridge.wire.errors import RolloutError


def add_access(parser: argparse.ArgumentParser, timeout_s: float | None) -> None:
    """Declare the flags that `connect` reads."""
    shown = "for ever" if timeout_s is None else f"{timeout_s:g}"
    parser.add_argument("--curve-key", metavar="FILE", help="this client's secret key, for a worker with CURVE")
    parser.add_argument("--curve-server-key", metavar="FILE", help="the worker's public key; goes with --curve-key")
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help=f"seconds to wait for an answer [{shown}]")


def connect(endpoint: str, args: argparse.Namespace) -> RolloutClient:
    """A client of one endpoint. Raises `UsageError` for flags that are wrong."""
    from trainer_bridge.client.blocking import RolloutClient

    if args.timeout_s is not None and not args.timeout_s > 0:
        raise UsageError("--timeout-s must be more than 0 seconds")
    # The connection's limit comes first: its error says more than that of a call without an answer.
    limits = {} if args.timeout_s is None else {"connect_timeout_s": 0.8 * args.timeout_s}
    try:
        return RolloutClient(endpoint, timeout_s=args.timeout_s, curve=_curve(args), **limits)
    except ValueError as error:  # not an endpoint
        raise UsageError(f"{endpoint}: {error}") from error


def where(endpoint: str, error: RolloutError) -> str:
    """What went wrong and where, which some errors say themselves."""
    return str(error) if endpoint in str(error) else f"{endpoint}: {error}"


def _curve(args: argparse.Namespace) -> ClientCurve | None:
    from trainer_bridge.client.keys import ClientCurve

    if args.curve_key is None and args.curve_server_key is None:
        return None
    if args.curve_key is None or args.curve_server_key is None:
        raise UsageError("--curve-key and --curve-server-key go together")
    try:
        return ClientCurve.from_files(args.curve_key, args.curve_server_key)
    except ValueError as error:
        raise UsageError(str(error)) from error
