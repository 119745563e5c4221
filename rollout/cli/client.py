"""`rollout status` and `rollout generate`: a worker seen from a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.connection import add_access, connect, where
from rollout.cli.parser import CommandError, UsageError

if TYPE_CHECKING:
    from trainer_bridge.client.blocking import RolloutClient
    from trainer_bridge.client.results import Completion, GenerateResult

#: Flag, type, meaning of what `generate` sends as it is; the destination is the protocol's name.
_SENT = (
    ("--n", int, "completions [1]"),
    ("--max-tokens", int, "tokens of each completion, at most"),
    ("--temperature", float, "0 is greedy [1.0]"),
    ("--top-p", float, "keep the likeliest tokens that make up this share [1.0]"),
    ("--top-k", int, "keep this many of the likeliest tokens; 0 keeps all [0]"),
    ("--min-p", float, "keep tokens at least this likely, relative to the likeliest [0.0]"),
    ("--seed", int, "of the request's random numbers [drawn by the worker]"),
    ("--deadline-s", float, "seconds after which completions end with what they have"),
)
#: Tokens of a completion between two looks at how far it is.
_PROGRESS_EVERY = 256


def add_parsers(commands: Any) -> None:
    """Declare `rollout status` and `rollout generate`."""
    status = commands.add_parser("status", help="show how a worker is", description="Show how a worker is.")
    status.set_defaults(run=run_status)
    _add_connection(status, timeout_s=10.0)

    generate = commands.add_parser(
        "generate", help="have a worker complete a prompt", description="Have a worker complete a prompt."
    )
    generate.set_defaults(run=run_generate)
    _add_connection(generate, timeout_s=None)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text; - reads it from stdin")
    prompt.add_argument("--messages", metavar="FILE", help="JSON list of role/content maps; - reads it from stdin")
    prompt.add_argument("--token-ids", metavar="IDS", help="token ids, with commas or spaces between them")
    for flag, kind, meaning in _SENT:
        generate.add_argument(flag, type=kind, metavar=flag[2:].upper().replace("-", "_"), help=meaning)
    generate.add_argument("--stop", action="append", metavar="TEXT", help="string that ends a completion; repeatable")
    generate.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    generate.add_argument("--stream", action="store_true", help="print tokens as they come")


def _add_connection(parser: argparse.ArgumentParser, timeout_s: float | None) -> None:
    parser.add_argument("endpoint", metavar="ENDPOINT", help="of the worker, such as tcp://127.0.0.1:5757")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")
    add_access(parser, timeout_s)


def run_status(args: argparse.Namespace) -> int:
    """Print the status of a worker."""
    from trainer_bridge.wire.errors import RolloutError

    try:
        with connect(args.endpoint, args) as client:
            status = client.status()
    except RolloutError as error:
        raise CommandError(where(args.endpoint, error)) from error
    status = {name: value for name, value in status.items() if name not in ("v", "op", "id")}
    if args.json:
        print(json.dumps(status))
    else:
        _print_table(args.endpoint, status)
    return 0


def run_generate(args: argparse.Namespace) -> int:
    """Print completions, as a whole or as they come; 1 if one of them ended with an error."""
    from trainer_bridge.wire.errors import RolloutError

    prompt, fields = _request(args)
    show = _show_json if args.json else _show_text
    try:
        with connect(args.endpoint, args) as client:
            if args.stream:
                result = _stream(client, prompt, fields, args.json)
            else:
                result = _generate(client, prompt, fields, quiet=args.json)
                for completion in result.completions:
                    show(completion)
    except RolloutError as error:
        raise CommandError(where(args.endpoint, error)) from error
    for completion in result.completions:
        _note(completion)
    return 1 if any(completion.finish_reason == "error" for completion in result.completions) else 0


def _generate(client: RolloutClient, prompt: Any, fields: Mapping[str, Any], quiet: bool) -> GenerateResult:
    """The result, with how many of the tokens that it may have at most are there while it is waited for."""
    from rollout.progress import stage

    done, most = 0, fields.get("n", 1) * fields.get("max_tokens", 0)
    with stage("generating", quiet=quiet) as advance:
        with client.generate(prompt, stream="tokens", stream_every=_PROGRESS_EVERY, **fields) as chunks:
            for chunk in chunks:
                done += len(chunk.part.token_ids)
                advance(done, most)
            return chunks.wait()


def _request(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    names = [flag[2:].replace("-", "_") for flag, _, _ in _SENT]
    fields: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    stop: dict[str, Any] = {}
    if args.stop:
        stop["strings"] = args.stop
    if args.ignore_eos:
        stop["ignore_eos"] = True
    if stop:
        fields["stop"] = stop
    fields["return_text"] = args.token_ids is None
    if args.messages is not None:
        fields["messages"] = _messages(args.messages)
        return None, fields
    if args.token_ids is not None:
        try:
            return [int(part) for part in args.token_ids.replace(",", " ").split()], fields
        except ValueError as error:
            raise UsageError(f"--token-ids takes integers: {error}") from error
    return sys.stdin.read() if args.prompt == "-" else args.prompt, fields


def _messages(source: str) -> list[dict[str, Any]]:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        messages = json.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read --messages {source}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--messages {source} is not JSON: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f"--messages {source} must hold a list of maps with role and content")
    return messages


def _stream(client: RolloutClient, prompt: Any, fields: Mapping[str, Any], as_json: bool) -> GenerateResult:
    """Print chunks as they come: one completion as running text, several with a line a chunk."""
    several = fields.get("n", 1) > 1
    every = 32 if several else 1
    with client.generate(prompt, stream="tokens", **(dict(fields) | {"stream_every": every})) as chunks:
        for chunk in chunks:
            if as_json:
                print(json.dumps(_as_json(chunk.part) | {"offset": chunk.offset}), flush=True)
                continue
            text = chunk.part.text if chunk.part.text is not None else _ids(chunk.part) + " "
            print(f"[{chunk.index}] {text}" if several else text, end="\n" if several else "", flush=True)
        if not as_json and not several:
            print()
        return chunks.wait()


def _show_text(completion: Completion) -> None:
    print(completion.text if completion.text is not None else _ids(completion))


def _show_json(completion: Completion) -> None:
    print(json.dumps(_as_json(completion)))


def _ids(completion: Completion) -> str:
    return " ".join(map(str, completion.token_ids.tolist()))


def _as_json(completion: Completion) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": completion.index,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": [round(value, 6) for value in completion.logprobs.tolist()],
        "versions": [list(run) for run in completion.versions],
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "seed": completion.seed,
        "error": completion.error,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _note(completion: Completion) -> None:
    """How a completion ended, on stderr so that stdout holds completions only."""
    versions = ", ".join(str(version) for version, _ in completion.versions) or "none"
    reason = completion.finish_reason if completion.error is None else f"{completion.finish_reason}: {completion.error}"
    ending = f"{len(completion)} tokens, {reason}, weights version {versions}"
    print(f"[completion {completion.index}: {ending}]", file=sys.stderr)


def _print_table(endpoint: str, status: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=endpoint, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in status.items():
        table.add_row(name, _shown(value))
    Console(markup=False, highlight=False).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.2g}"
    return str(value)
