"""`rollout serve`: runs a worker, with a flag for every setting."""

import argparse
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.cli.parser import CommandError, Parser, UsageError
from rollout.cli.setting_flags import add_setting_flags, given_flags
from rollout.config import Settings
from rollout.process.announce import remove_ready_file
from rollout.process.child_processes import module_command
from rollout.process.logs import set_up, worker_name
from rollout.settings_sources import (
    POSITIONAL,
    SettingsConflictError,
    SettingsError,
    flags_hint,
    load_settings,
    retired_flags,
    setting_keys,
)

DESCRIPTION = (
    "Serve a checkpoint over ZeroMQ. Settings come from --config, then ROLLOUT_<SECTION>__<KEY> environment variables, "
    "then flags; the later one wins. 'none' leaves an optional setting out."
)
#: Seconds between the end of a drain and SIGKILL, after the parent has ended.
PARENT_GRACE_S = 30.0
#: Most ranks that import libraries at once. More are started when the settings have been checked.
_RANKS_AT_ONCE = 8


#: Flags of other serving engines -> what to write here.
SYNONYMS = {
    "--model": "write the model without a flag: rollout serve MODEL",
    "--host": "write --bind tcp://HOST:PORT",
    "--port": "write --bind tcp://127.0.0.1:PORT",
    "--max-model-len": "write --max-context-tokens",
    "--context-length": "write --max-context-tokens",
    "--max-num-seqs": "write --max-rows",
    "--max-running-requests": "write --max-rows",
    "--max-num-batched-tokens": "write --prefill-chunk-tokens",
    "--chunked-prefill-size": "write --prefill-chunk-tokens",
    "--gpu-memory-utilization": "write --kv-memory-fraction, a share of the memory that the weights leave free",
    "--mem-fraction-static": "write --kv-memory-fraction, a share of the memory that the weights leave free",
    "--kv-cache-dtype": "write --kv-dtype",
    "--quantization": "write --weight-dtype for weights, --kv-dtype for KV",
    "--block-size": "write --page-size",
    "--enable-prefix-caching": "write --prefix-cache, which is on by default",
    "--enforce-eager": "write --cuda-graph-rows 0",
    "--enable-lora": "write --adapter-slots N",
    "--max-loras": "write --adapter-slots",
    "--max-lora-rank": "write --adapter-rank",
    "--lora-modules": "write --adapters name=folder",
    "--enable-sleep-mode": "write --sleep",
    "--cpu-offload-gb": "write --host-kv-gib to offload KV; weights are never offloaded while the worker is awake",
    "--tensor-parallel-size": "write --tensor-parallel",
    "--tp-size": "write --tensor-parallel",
    "--tp": "write --tensor-parallel",
    "--data-parallel-size": "write --workers",
    "--served-model-name": "remove it: clients do not name the model",
    "--tokenizer": "the tokenizer is the one in the checkpoint's folder",
    "--trust-remote-code": "the worker never runs code of a checkpoint",
    "--api-key": "write --curve-secret-key and --curve-client-keys (see rollout keys --help)",
    "--seed": "write the seed in each request, as sampling.seed",
}


def add_arguments(parser: Parser) -> None:
    """Declare the arguments: a flag for every setting."""
    parser.synonyms = SYNONYMS | retired_flags()
    parser.usage, parser.description = "rollout serve MODEL [--config FILE] [--SETTING VALUE ...]", DESCRIPTION
    # Set by a supervisor, which also handles Ctrl-C for its workers.
    parser.add_argument("--restarts", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--continued-run", nargs=2, metavar=("ID", "FILE"), default=None, help=argparse.SUPPRESS)
    add_setting_flags(parser, Settings)


def run(args: argparse.Namespace) -> int:
    """Load the settings and serve until the last worker ends; returns the exit code."""
    flags = given_flags(args, Settings)
    try:
        settings = load_settings(args.config, os.environ, flags)
    except SettingsConflictError as error:
        raise UsageError(f"{error}{flags_hint(str(error), flags)}") from error
    except SettingsError as error:  # it names the source of the value
        raise UsageError(str(error)) from error
    try:
        return _run(settings, args, flags)
    except SettingsError as error:
        raise UsageError(f"{error}{flags_hint(str(error), flags)}") from error


def _run(settings: Settings, args: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    if not settings.model.path:
        raise UsageError("no model: name a checkpoint folder or a hub id, as in: rollout serve MODEL")
    if args.restarts is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if settings.exit_with_parent:  # first: the parent may end while the model is loaded
        from rollout.process.child_processes import exit_with_parent

        exit_with_parent(grace_s=settings.service.drain_s + PARENT_GRACE_S)
    if settings.ready_file is None or args.restarts is not None:  # a supervisor handles the ready files of its workers
        return _start(settings, args, flags)
    ready_file = Path(settings.ready_file)
    try:
        ready_file.parent.mkdir(parents=True, exist_ok=True)
        ready_file.unlink(missing_ok=True)  # an earlier worker's file: this file means that this worker is ready
    except OSError as error:
        raise CommandError(f"cannot write --ready-file {ready_file}: {error.strerror}") from error
    try:
        return _start(settings, args, flags)
    finally:
        remove_ready_file(ready_file)


def _start(settings: Settings, args: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    from rollout.process.open_files import raise_limit

    try:
        raise_limit(settings.engine.tensor_parallel)  # first: libraries need many files
    except OSError as error:
        raise CommandError(str(error)) from error
    if args.restarts is None and (settings.supervisor.workers > 1 or settings.supervisor.supervise):
        return _supervise(settings, module_command("rollout.cli.main", "serve", *command_line(args.config, flags)))
    return _serve(settings, args.restarts, args.continued_run, flags)


def command_line(config: str | None, flags: Mapping[str, Any]) -> list[str]:
    """The arguments of `rollout serve` for these settings; `flags` are values by setting, as they were given."""
    words = [] if config is None else ["--config", config]
    for key in setting_keys():
        if key.path not in flags:
            continue
        value = flags[key.path]
        if key.path in POSITIONAL:
            words.insert(0, str(value))
        elif key.field.annotation is bool:
            words.append(key.flag if value else f"--no-{key.flag[2:]}")
        else:
            words.append(f"{key.flag}={value}")
    return words


def _supervise(settings: Settings, command: list[str]) -> int:
    from rollout.metrics.wandb_mode import wandb_mode
    from rollout.network.access import Access
    from rollout.supervisor import Supervisor, assign_devices

    set_up(settings.log_level, settings.log_format, worker_name())
    try:  # checked once, since a restart of a worker would not mend them
        if settings.metrics.wandb:
            wandb_mode(os.environ)
        Access.from_settings(settings.security).check_binds(settings)
        devices = assign_devices(settings, os.environ)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    try:
        return Supervisor(settings, command, devices).run()
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error


def _serve(
    settings: Settings, restarts: int | None, continued_run: Sequence[str] | None, flags: Mapping[str, Any]
) -> int:
    from trainer_bridge.client.launch import worker_environment

    for name in os.environ.keys() - worker_environment(os.environ, {}).keys():
        del os.environ[name]  # set by a launcher of ranks; W&B would log into the trainer's run
    set_up(settings.log_level, settings.log_format, worker_name())  # before the imports, which may warn
    from rollout.process.interpreter import loading_libraries
    from rollout.process.progress import stage
    from rollout.ranks.follower_processes import FollowerProcesses

    size, followers = settings.engine.tensor_parallel, None
    if 1 < size <= _RANKS_AT_ONCE:
        try:
            followers = FollowerProcesses(size - 1)
        except OSError as error:
            raise CommandError(str(error)) from error
    with stage("loading libraries", quiet=True), loading_libraries():
        import zmq

        from rollout.metrics.wandb_sink import ContinuedRun
        from rollout.worker import serve

    run = None if continued_run is None else ContinuedRun(continued_run[0], Path(continued_run[1]))
    try:
        return serve(settings, restarts, followers, run)
    except SettingsError:
        raise
    except (ValueError, OSError, zmq.ZMQError) as error:
        logging.getLogger(__name__).debug("the worker failed", exc_info=True)
        hint = flags_hint(str(error), flags)
        raise CommandError(f"{error}{hint} (--log-level debug shows the traceback)") from error
