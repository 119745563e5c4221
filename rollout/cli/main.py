"""The `rollout` command: parses the command line, runs one command, turns errors into a line and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings. What a user did wrong is one line on stderr, never a
traceback. Nothing heavy is imported before the command line has been understood.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from rollout import __version__
from rollout.cli import client, forward, keys, serve, top, trace
from rollout.cli.parser import CommandError, Parser, UsageError
from rollout.logs import complain
from rollout.settings_sources import SettingsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rollout`; returns the exit code. `argv` is without the program's name; None takes `sys.argv`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in forward.COMMANDS:  # these parse their own arguments
            return forward.run(arguments[0], arguments[1:])
        args = build_parser().parse_args(arguments)
        code: int = args.run(args)
        return code
    except (UsageError, SettingsError) as error:
        return _complain(error, 2)
    except CommandError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `rollout generate ... | head`
        sys.stderr.close()
        return 1


def run() -> None:
    """`main` as a process of its own, which ends with what `main` returns.

    Threads are waited for and exit handlers run as ever; only, nothing is taken apart after that. For a worker, with
    half a million objects of its libraries, that takes longer than its shutdown.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first to be registered is the last to run
    codes.append(main())
    sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    if not codes:  # an error, or the parser's own end: the usual way
        return
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):  # of a reader that has gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(codes[0])


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog="rollout", description="Generation service for reinforcement learning of language models.")
    parser.add_argument("--version", action="version", version=f"rollout {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    serve.add_parser(commands)
    client.add_parsers(commands)
    top.add_parser(commands)
    trace.add_parser(commands)
    keys.add_parser(commands)
    forward.add_parsers(commands)
    return parser


def _complain(error: Exception, code: int) -> int:
    complain(f"rollout: {' '.join(str(error).split())}")
    return code


if __name__ == "__main__":
    run()
