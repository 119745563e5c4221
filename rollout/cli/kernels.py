"""`rollout kernels`: compiles the kernels of a model's worker into a folder, from which other machines start faster."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rollout.cli import serve
from rollout.cli.parser import CommandError, Parser, UsageError
from rollout.cli.setting_flags import given_flags
from rollout.config import Settings

DESCRIPTION = (
    "Start a worker with random weights on this machine's GPU, keep the kernels that it compiles, and end it. Give the "
    "settings of your workers: kernels depend on them, on the kind of GPU, and on the versions of this package and "
    "Triton. Then start workers with --kernel-cache FOLDER, from wherever the folder is."
)


def add_arguments(parser: Parser) -> None:
    """Declare the arguments: the folder, and the arguments of `rollout serve`."""
    serve.add_arguments(parser)
    parser.usage, parser.description = "rollout kernels MODEL --into FOLDER [--SETTING VALUE ...]", DESCRIPTION
    parser.add_argument("--into", metavar="FOLDER", required=True, help="folder for the kernels; created if missing")


def run(args: argparse.Namespace) -> int:
    """Compile, and say what the folder holds."""
    from trainer_bridge.client.launch import WorkerFailed, start_worker

    flags = given_flags(args, Settings)
    model, folder = flags.pop("model.path", None), Path(args.into).resolve()
    flags.pop("ready_file", None)  # `start_worker` waits for one of its own
    flags["engine.kernel_cache"] = "none"  # kernels of another folder would be missing in this one
    if model is None:
        raise UsageError("no model: name a checkpoint folder or a hub id, as in: rollout kernels MODEL --into FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write to {folder}: {error.strerror}") from error
    words = serve.command_line(args.config, flags)
    environment = {"TRITON_CACHE_DIR": os.fspath(folder)}
    try:
        start_worker(model, args=words, env=environment, load_format="random", wandb=False).kill()
    except WorkerFailed as error:
        raise CommandError(str(error)) from error
    files = [path for path in folder.rglob("*") if path.is_file()]
    kernels = sum(path.suffix == ".cubin" for path in files)
    print(f"{folder}: {kernels} kernels, {sum(path.stat().st_size for path in files) / 2**20:.0f} MiB")
    if not kernels:
        raise CommandError("the worker compiled no kernel: is there a GPU?")
    return 0
