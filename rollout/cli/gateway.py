"""`rollout gateway`: serves OpenAI's, vLLM's and SGLang's HTTP dialects for workers; a process of its own."""

from __future__ import annotations

import argparse
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rollout.cli.connection import add_access, curve_of
from rollout.cli.parser import CommandError, Parser, UsageError
from rollout.extras import install

DESCRIPTION = "Serve workers over HTTP: OpenAI's endpoints, vLLM's for reinforcement learning, and SGLang's."


def add_arguments(parser: Parser) -> None:
    """Declare the arguments: a flag for every setting."""
    from rollout.gateway.settings import GatewaySettings, declared

    parser.description = DESCRIPTION
    parser.add_argument("endpoints", metavar="ENDPOINT", nargs="+", help="address of a worker: tcp://127.0.0.1:5757")
    add_access(parser)
    hints = get_type_hints(GatewaySettings)
    for name, _, meaning, default in declared():
        _add_flag(parser, name, hints[name], meaning, default)


def _add_flag(parser: Parser, name: str, hint: Any, meaning: str, default: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    shown = "" if default in (None, ()) else f" [{str(default).lower()}]"
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": meaning.replace("%", "%%") + shown}
    kinds = (
        [kind for kind in get_args(hint) if kind is not types.NoneType]
        if get_origin(hint) is types.UnionType
        else [hint]
    )
    if kinds == [bool]:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif get_origin(kinds[0]) is Literal:
        parser.add_argument(flag, choices=get_args(kinds[0]), **options)
    elif get_origin(kinds[0]) is tuple:
        parser.add_argument(flag, metavar="NAME", nargs="+", **options)
    else:
        parser.add_argument(flag, type=kinds[0], metavar=name.rpartition("_")[2].upper(), **options)


def run(args: argparse.Namespace) -> int:
    """Serve until the process is ended; returns the exit code."""
    try:
        from rollout.gateway.serve import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "pydantic", "transformers"):
            raise
        raise UsageError(f"this command needs {error.name}: {install('http')}") from error
    from rollout.gateway.settings import GatewaySettings, declared

    given: dict[str, Any] = {name: vars(args)[name] for name, *_ in declared() if name in vars(args)}
    flags: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        settings = GatewaySettings(
            tuple(args.endpoints),
            **flags,
        )
        return serve(settings, curve_of(args))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise CommandError(str(error)) from error
