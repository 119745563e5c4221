"""`rollout gateway`: serves workers over HTTP, in a process of its own (`rollout_gateway`)."""

import argparse
import os

from rollout.cli.connect import add_access, curve_of
from rollout.cli.parser import CommandError, Parser, UsageError
from rollout.cli.setting_flags import add_setting_flags, given_flags
from rollout.config.gateway_settings import GatewayFile
from rollout.extras import install
from rollout.settings_sources import SettingsError, load_program

DESCRIPTION = (
    "Serve workers over HTTP: endpoints of OpenAI, Anthropic, Tinker, vLLM and SGLang. Settings come from "
    "--config, then ROLLOUT_GATEWAY__<KEY> environment variables, then flags; the later one wins."
)


def add_arguments(parser: Parser) -> None:
    """Declare the arguments: a flag for every setting."""
    parser.usage, parser.description = "rollout gateway ENDPOINT ... [--SETTING VALUE ...]", DESCRIPTION
    add_access(parser)
    add_setting_flags(parser, GatewayFile)


def run(args: argparse.Namespace) -> int:
    """Serve until the process is ended; returns the exit code."""
    try:
        from rollout_gateway.serve import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "transformers"):
            raise
        raise UsageError(f"this command needs {error.name}: {install('http')}") from error
    try:
        settings = load_program(GatewayFile, args.config, os.environ, given_flags(args, GatewayFile)).gateway
    except SettingsError as error:
        raise UsageError(str(error)) from error
    try:
        return serve(settings, curve_of(args))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise CommandError(str(error)) from error
