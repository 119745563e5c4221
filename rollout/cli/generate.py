"""`rollout generate`: a worker completes a prompt. The text goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.connection import add_worker, connect, where
from rollout.cli.parser import CommandError, UsageError
from trainer_bridge.wire.sampling_rules import RULES

if TYPE_CHECKING:
    from trainer_bridge.client.blocking import Stream
    from trainer_bridge.client.results import Chunk, Completion, GenerateResult

#: Flag, type and meaning of the fields that are sent unchanged. The flag's name is the field's name.
_SENT = (
    ("--n", int, "completions [1]"),
    ("--max-tokens", int, "most tokens of each completion"),
    *((f"--{rule.name.replace('_', '-')}", rule.kind, f"{rule.meaning} [{rule.default}]") for rule in RULES),
    ("--seed", int, "seed of the random numbers [chosen by the worker]"),
    ("--deadline-s", float, "seconds after which completions end with their tokens so far"),
)
#: Tokens of a completion between two updates of the progress bar.
_PROGRESS_EVERY = 256


#: Finish reasons of complete completions; with any other one the command exits with 1.
_COMPLETE = ("stop", "length")


def add_arguments(generate: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    generate.description = "Have a worker complete a prompt. Ctrl-C shows the tokens so far."
    add_worker(generate, timeout_s=None)
    generate.add_argument("--json", action="store_true", help="print JSON, one object a completion or chunk")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="prompt text; - reads it from stdin")
    prompt.add_argument("--messages", metavar="FILE", help="JSON list of role/content maps; - reads it from stdin")
    prompt.add_argument("--token-ids", metavar="IDS", help="token ids, with commas or spaces between them")
    for flag, kind, meaning in _SENT:
        generate.add_argument(flag, type=kind, metavar=flag[2:].upper().replace("-", "_"), help=meaning)
    generate.add_argument("--stop", action="append", metavar="TEXT", help="string that ends a completion; repeatable")
    generate.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    generate.add_argument("--stream", action="store_true", help="print tokens as they arrive")


def run(args: argparse.Namespace) -> int:
    """Print completions, whole or in chunks. Returns 1 if one of them was cut short, 130 after Ctrl-C."""
    from trainer_bridge.wire.errors import RolloutError

    prompt, fields = _request(args)
    shown = _Shown(args.json, fields.get("n", 1), whole=not args.stream)
    every = _PROGRESS_EVERY if shown.whole else shown.stream_every
    try:
        with connect(args.endpoint, args) as client:
            with client.generate(prompt, stream="tokens", stream_every=every, **fields) as chunks:
                result = _receive(chunks, shown, fields, quiet=args.json or args.stream)
    except RolloutError as error:
        shown.end()
        raise CommandError(where(args.endpoint, error)) from error
    except KeyboardInterrupt:
        shown.end()
        print(f"[interrupted after {shown.tokens} tokens]", file=sys.stderr)
        return 130
    shown.end(result)
    for completion in result.completions:
        _note(completion)
    return 0 if all(completion.finish_reason in _COMPLETE for completion in result.completions) else 1


def _receive(chunks: Stream, shown: _Shown, fields: Mapping[str, Any], quiet: bool) -> GenerateResult:
    """Add every chunk to `shown`, and show the number of tokens in a progress bar."""
    from rollout.process.progress import stage

    most = fields.get("n", 1) * fields.get("max_tokens", 0)
    with stage("generating", quiet=quiet) as advance:
        for chunk in chunks:
            shown.add(chunk)
            advance(shown.tokens, most)
        return chunks.wait()


class _Shown:
    """Prints completions: at their end (`whole`), or chunk by chunk."""

    def __init__(self, as_json: bool, n: int, whole: bool) -> None:
        self.whole = whole
        self.tokens = 0
        self.stream_every = 32 if n > 1 else 1
        self._as_json = as_json
        self._several = n > 1
        self._kept: dict[int, list[str]] = {}  # text by completion, if whole

    def add(self, chunk: Chunk) -> None:
        """Take a chunk."""
        self.tokens += len(chunk.part.token_ids)
        text = chunk.part.text if chunk.part.text is not None else _ids(chunk.part) + " "
        if self.whole:
            self._kept.setdefault(chunk.index, []).append(text)
        elif self._as_json:
            print(json.dumps(_as_json(chunk.part) | {"offset": chunk.offset}), flush=True)
        elif self._several:
            print(f"[{chunk.index}] {text}", flush=True)
        else:
            print(text, end="", flush=True)

    def end(self, result: GenerateResult | None = None) -> None:
        """Print the result. Without a result (after an error), print the text so far."""
        if self.whole and result is not None:
            for completion in result.completions:
                print(json.dumps(_as_json(completion)) if self._as_json else _text(completion))
        elif self.whole and not self._as_json:
            for index in sorted(self._kept):
                print("".join(self._kept[index]))
        elif not self._as_json and not self._several:
            print()


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


def _text(completion: Completion) -> str:
    return completion.text if completion.text is not None else _ids(completion)


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
    """Print the end of a completion on stderr; stdout holds completions only."""
    versions = ", ".join(str(version) for version, _ in completion.versions) or "none"
    reason = completion.finish_reason if completion.error is None else f"{completion.finish_reason}: {completion.error}"
    ending = f"{len(completion)} tokens, {reason}, weights version {versions}"
    print(f"[completion {completion.index}: {ending}]", file=sys.stderr)
