"""The `rollout` command: finds the subcommand, parses its arguments, turns errors into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings. A user's mistake prints one line on stderr, never a traceback.
The module of a command is imported when the command is run: `rollout --help` needs only the standard library.
"""

import argparse
import atexit
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rollout import __version__
from rollout.cli.parser import CommandError, Parser, UsageError
from rollout.extras import install
from rollout.process.logs import report_failure
from trainer_bridge.wire.near_names import near_name

#: Command -> (module, help text). A module has `add_arguments(parser)` and `run(args) -> int`.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "serve": ("rollout.cli.serve", "run a worker"),
        "plan": ("rollout.cli.plan", "show how the memory of a GPU would be divided; needs no GPU and no weights"),
        "kernels": ("rollout.cli.kernels", "compile a model's kernels into a folder, for faster starts"),
        "gateway": ("rollout.cli.gateway", "serve workers over HTTP, as OpenAI, Anthropic, Tinker, vLLM and SGLang do"),
        "status": ("rollout.cli.status", "show the state of a worker"),
        "generate": ("rollout.cli.generate", "complete a prompt on a worker"),
        "top": ("rollout.cli.top", "watch workers live in the terminal"),
        "trace": ("rollout.cli.trace", "save the last steps of a worker as a trace and a picture"),
        "keys": ("rollout.cli.keys", "make CURVE keys for a worker and its clients"),
        "demo": ("rollout.cli.demo", "run a worker and a trainer that checks every token across a weight swap"),
    }
)
#: Packages of the extra `worker`. Without them a command that needs one says how to install them.
WORKER_PACKAGES = ("torch", "transformers", "pydantic", "safetensors", "triton", "wandb", "prometheus_client")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rollout`; returns the exit code. `argv` is without the program's name; None takes `sys.argv`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        name = _command(arguments)
        args = parser_of(name).parse_args(arguments[1:])
        code: int = importlib.import_module(COMMANDS[name][0]).run(args)
        return code
    except UsageError as error:
        return _fail(error, 2)
    except CommandError as error:
        return _fail(error, 1)
    except ModuleNotFoundError as error:
        if error.name not in WORKER_PACKAGES:
            raise
        extra = "http" if arguments[0] == "gateway" else "worker"
        return _fail(ImportError(f"this command needs {error.name}: {install(extra)}"), 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has ended, as in `rollout generate ... | head`
        sys.stderr.close()
        return 1


def parser_of(command: str) -> Parser:
    parser = Parser(prog=f"rollout {command}")
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    return parser


def _command(arguments: Sequence[str]) -> str:
    """The command at the start of `arguments`. Raises UsageError if it is unknown; `--help` and `--version` exit."""
    if arguments and arguments[0] in COMMANDS:
        return arguments[0]
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    parser = Parser(
        prog="rollout",
        usage="rollout COMMAND [ARGUMENTS]",
        description="Generation service for reinforcement learning of language models.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`rollout COMMAND --help` shows the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rollout {__version__}")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    command: str = parser.parse_known_args(list(arguments[:1]))[0].command
    near = near_name(command, COMMANDS)
    guess = f"; did you mean {near}" if near else ""
    raise UsageError(f"unknown command {command}{guess}. Commands: {', '.join(COMMANDS)}")


def run() -> None:
    """Run `main` and exit with its code.

    Threads are joined and exit handlers run as usual, but the interpreter does not free its objects. A worker's
    libraries leave half a million objects; to free them takes longer than a shutdown.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)  # registered first, so it runs last
    codes.append(main())
    sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    if not codes:  # an error, or an exit of the parser: exit as usual
        return
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):  # the reader may have ended
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(codes[0])


def _fail(error: Exception, code: int) -> int:
    report_failure(f"rollout: {' '.join(str(error).split())}")
    return code


if __name__ == "__main__":
    run()
