"""`rollout demo` and `rollout bench NAME`: hand their arguments to a module's own `main(argv) -> int`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from rollout.cli_commands.parser import UsageError

COMMANDS = ("demo", "bench")
#: Modules of `rollout.bench`. Listed, so that help needs to import none of them.
BENCHMARKS = ("bookkeeping", "pipeline", "memory", "service_load", "moe")

_HELP = {
    "demo": "a worker and a trainer that checks 16K-token completions across a weight swap",
    "bench": f"measure one of: {', '.join(BENCHMARKS)}",
}
_BENCH_USAGE = f"""usage: rollout bench NAME [...]

Measure one of: {", ".join(BENCHMARKS)}. `rollout bench NAME --help` shows the arguments of one."""


def add_parsers(commands: Any) -> None:
    """Declare the commands for `rollout --help`; they are run by `run` before the parser sees them."""
    for name in COMMANDS:
        commands.add_parser(name, help=_HELP[name], add_help=False)


def run(command: str, arguments: Sequence[str]) -> int:
    """Run `demo`, or the benchmark that the first argument names; returns its exit code."""
    if command == "demo":
        return _main("rollout.demo.run", arguments)
    if arguments and arguments[0] in ("-h", "--help"):
        print(_BENCH_USAGE)
        return 0
    if not arguments or arguments[0] not in BENCHMARKS:
        what = f"unknown benchmark {arguments[0]}" if arguments else "no benchmark named"
        raise UsageError(f"{what}; choose one of: {', '.join(BENCHMARKS)}")
    return _main(f"rollout.bench.{arguments[0]}", arguments[1:])


def _main(module: str, arguments: Sequence[str]) -> int:
    from rollout.libraries import loading_libraries
    from rollout.progress import stage

    with stage("loading libraries", quiet=True), loading_libraries():
        main = importlib.import_module(module).main
    code: int = main(list(arguments))
    return code
