"""`rollout generate`: a worker completes a prompt. Completions go to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.connect import add_worker, connect, where
from rollout.cli.parser import CommandError, Parser, UsageError
from trainer_bridge.wire.finish_reasons import COMPLETE
from trainer_bridge.wire.sampling_rules import RULES


class Inputs:
    """Reads the values of a command's flags. Only one argument may be `-`, which is stdin."""

    def __init__(self) -> None:
        self._stdin_flag: str | None = None

    def text(self, flag: str, value: str) -> str:
        """The value itself, or the text of stdin."""
        return self._stdin(flag) if value == "-" else value

    def file(self, flag: str, value: str, advice: str = "") -> str:
        """The text of the file with this name, or of stdin. `advice` ends the error about a file."""
        if value == "-":
            return self._stdin(flag)
        try:
            return Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"cannot read {flag} {value}: {reason}{advice}") from error

    def json(self, flag: str, value: str, example: str) -> Any:
        """The JSON value of a text that begins with a brace or a bracket, of stdin, or of a file.

        Raises `UsageError`, which shows the `example`.
        """
        is_text = value.lstrip()[:1] in ("{", "[")
        source = value if is_text else self.file(flag, value, f"; give a file, or JSON such as '{example}'")
        try:
            return json.loads(source)
        except ValueError as error:
            place = "" if is_text else f" {value}"
            raise UsageError(f"{flag}{place} is not JSON: {error}; write it as in '{example}'") from error

    def _stdin(self, flag: str) -> str:
        if self._stdin_flag is not None:
            raise UsageError(f"{self._stdin_flag} and {flag} cannot both read stdin: give one flag a file or a text")
        self._stdin_flag = flag
        return sys.stdin.read()


if TYPE_CHECKING:
    from trainer_bridge.client.blocking import RolloutClient, Stream
    from trainer_bridge.client.results import Chunk, Completion, GenerateResult
    from trainer_bridge.wire.errors import RolloutError

#: Flag, type and meaning of the fields that are sent unchanged. The flag's name is the field's name.
_SENT = (
    ("--n", int, "completions [1]"),
    ("--max-tokens", int, "most tokens of each completion"),
    *((f"--{rule.name.replace('_', '-')}", rule.kind, f"{rule.meaning} [{rule.default}]") for rule in RULES),
    ("--seed", int, "seed of the random numbers [chosen by the worker]"),
    ("--deadline-s", float, "seconds after which completions end with their tokens so far"),
    ("--min-version", int, "wait until the weights have at least this version [0]"),
    ("--max-version-span", int, "end completions that would have tokens of more versions: newest minus oldest"),
    ("--max-kv-age", int, "most weights versions by which KV of earlier requests may be older"),
    ("--priority", int, "higher is admitted first [0]"),
    ("--adapter", str, "name of a LoRA adapter that the worker has loaded"),
    ("--session", str, "name of a conversation, whose KV the worker keeps for the next turn"),
)
#: Flags whose fields have another name -> the field of an error.
_FIELDS = {
    "--stop": "stop.strings",
    "--stop-token-ids": "stop.token_ids",
    "--min-tokens": "stop.min_tokens",
    "--ignore-eos": "stop.ignore_eos",
    "--json-schema": "constraint.json_schema",
    "--regex": "constraint.regex",
    "--grammar": "constraint.grammar",
    "--choice": "constraint.choices",
    "--logprobs": "logprobs",
    "--tools": "tools",
    "--chat-template-kwargs": "chat_template_kwargs",
}
#: Names of fields, and flags of other programs -> what to write here.
SYNONYMS = {
    "--constraint": "write --json-schema, --regex, --grammar or --choice",
    "--schema": "write --json-schema",
    "--guided-json": "write --json-schema",
    "--guided-regex": "write --regex",
    "--guided-grammar": "write --grammar",
    "--guided-choice": "write --choice, once for each text",
    "--choices": "write --choice, once for each text",
    "--max-new-tokens": "write --max-tokens",
    "--num-return-sequences": "write --n",
    "--stop-strings": "write --stop, once for each text",
    "--top-logprobs": "write --logprobs K",
    "--return-logprobs": "write --logprobs",
    "--system-prompt": "write --system",
    "--message": "write --chat TEXT, or --messages FILE",
    "--text": "write --prompt",
    "--session-id": "write --session",
    "--endpoint": "write the address without a flag: rollout generate tcp://127.0.0.1:5757",
    "--host": "write the address without a flag: rollout generate tcp://127.0.0.1:5757",
    "--port": "write the address without a flag: rollout generate tcp://127.0.0.1:5757",
    "--url": "write the address without a flag: rollout generate tcp://127.0.0.1:5757",
    "--model": "remove it: a worker serves one model",
    "--weight-version": "write --min-version",
}
_CHAT_EXAMPLE = '[{"role": "user", "content": "Hello"}]'
#: Tokens of a completion between two updates of the progress bar.
_PROGRESS_EVERY = 256
#: A raw prompt was probably a mistake if the model has a chat template and stops after at most this number of tokens.
_NEARLY_EMPTY = 1


def add_arguments(generate: Parser) -> None:
    generate.usage = (
        "rollout generate ENDPOINT (--chat TEXT | --prompt TEXT | --messages FILE|JSON | --token-ids IDS) [FLAG ...]"
    )
    generate.synonyms = SYNONYMS
    generate.stray = "write --chat TEXT, or --prompt TEXT for a text without the chat template"
    generate.description = (
        "Have a worker complete a prompt. Use --chat for a model that was trained for conversations, --prompt for a "
        "text to go on with. A FILE|JSON that begins with { or [ is JSON. Ctrl-C shows the tokens so far."
    )
    add_worker(generate, timeout_s=None)
    generate.add_argument("--json", action="store_true", help="print JSON, one object a completion or chunk")
    asked = generate.add_argument_group("prompt, one of")
    prompt = asked.add_mutually_exclusive_group()
    prompt.add_argument("--chat", metavar="TEXT", help="a user message, for the chat template; - reads stdin")
    prompt.add_argument("--prompt", metavar="TEXT", help="prompt text as it is; - reads stdin")
    prompt.add_argument("--messages", metavar="FILE|JSON", help="list of messages with role and content; - reads stdin")
    prompt.add_argument("--token-ids", metavar="IDS", help="token ids, with commas or spaces between them")
    chat = generate.add_argument_group("with --chat or --messages")
    chat.add_argument("--system", metavar="TEXT", help="with --chat: system message before the user message")
    chat.add_argument("--tools", metavar="FILE|JSON", help="list of functions, for the chat template")
    chat.add_argument(
        "--chat-template-kwargs",
        metavar="FILE|JSON",
        help="more variables for the chat template, such as '{\"enable_thinking\": false}'",
    )
    sampling = generate.add_argument_group("completions")
    for flag, kind, meaning in _SENT:
        sampling.add_argument(flag, type=kind, metavar=flag[2:].upper().replace("-", "_"), help=meaning)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="string that ends a completion; repeatable")
    sampling.add_argument("--stop-token-ids", metavar="IDS", help="token ids that end a completion")
    sampling.add_argument("--min-tokens", type=int, metavar="MIN_TOKENS", help="least tokens before a stop [0]")
    sampling.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence token")
    rules = generate.add_argument_group("constraint, at most one of")
    constraint = rules.add_mutually_exclusive_group()
    constraint.add_argument("--json-schema", metavar="FILE|JSON", help="the completion is JSON of this schema")
    constraint.add_argument("--regex", metavar="RE", help="the completion matches this whole regular expression")
    constraint.add_argument(
        "--choice", action="append", metavar="TEXT", help="the completion is this text or another --choice"
    )
    constraint.add_argument(
        "--grammar", metavar="FILE", help="the completion follows this EBNF grammar, from its rule root"
    )
    shown = generate.add_argument_group("output")
    shown.add_argument("--stream", action="store_true", help="print tokens as they arrive")
    shown.add_argument(
        "--logprobs",
        type=int,
        nargs="?",
        const=0,
        metavar="K",
        help="print a line for each token: its log-prob at the request's temperature, and with K (up to 20) also the K "
        "likeliest tokens at its position, with their log-probs at temperature 1",
    )


def run(args: argparse.Namespace) -> int:
    """Print completions, whole or in chunks. Returns 1 if a completion was cut short, 130 after Ctrl-C."""
    if args.chat is args.prompt is args.messages is args.token_ids is None:
        raise UsageError("no prompt: give one of --chat TEXT, --prompt TEXT, --messages FILE|JSON and --token-ids IDS")
    from trainer_bridge.wire.errors import RolloutError

    prompt, fields = _request(args)
    shown = _Shown(args.json, fields.get("n", 1), not args.stream, None if args.logprobs is None else TokenLines())
    every = _PROGRESS_EVERY if shown.whole and args.logprobs is None else shown.stream_every
    # A session belongs to a client, so both have the same name in each call of this command.
    client_name = None if args.session is None else f"rollout-generate/{args.session}"[:128]
    try:
        with connect(args.endpoint, args, client_name, acknowledge=True) as client:
            if shown.lines is not None and args.logprobs:
                shown.lines.find_texts(client.status()["model"])
            with _ask(client, prompt, fields | {"stream_every": every}) as chunks:
                result = _receive(chunks, shown, fields, quiet=args.json or args.stream)
            hint = _nearly_empty(args, result) and "messages" in client.status()["capabilities"]
    except RolloutError as error:
        shown.end()
        raise CommandError(where(args.endpoint, error) + _flag_of(error, args)) from error
    except KeyboardInterrupt:
        shown.end()
        print(f"[interrupted after {shown.tokens} tokens]", file=sys.stderr)
        return 130
    shown.end(result)
    for completion in result.completions:
        _note(completion)
    if args.session is not None:
        print(f"[{result.cached_tokens} of {result.prompt_tokens} prompt tokens were known]", file=sys.stderr)
    if hint:
        print("[this model has a chat template: try --chat instead of --prompt]", file=sys.stderr)
    return 0 if all(completion.finish_reason in COMPLETE for completion in result.completions) else 1


def _ask(client: RolloutClient, prompt: Any, fields: dict[str, Any]) -> Stream:
    try:
        return client.generate(prompt, stream="tokens", **fields)
    except ValueError as error:  # a field that no worker would take
        raise UsageError(str(error)) from error


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
    """Prints completions: at their end (`whole`), or chunk by chunk; as text, as `lines` of tokens, or as JSON."""

    def __init__(self, as_json: bool, n: int, whole: bool, lines: TokenLines | None) -> None:
        self.whole = whole
        self.lines = lines
        self.tokens = 0
        self.stream_every = 32 if n > 1 and lines is None else 1
        self._as_json = as_json
        self._several = n > 1
        self._kept: dict[int, list[str]] = {}  # text by completion, if whole

    def add(self, chunk: Chunk) -> None:
        self.tokens += len(chunk.part.token_ids)
        text = chunk.part.text if chunk.part.text is not None else _ids(chunk.part) + " "
        if self.lines is not None and not self._as_json:
            text = "".join(f"{line}\n" for line in self.lines.of(chunk))
        if self.whole:
            self._kept.setdefault(chunk.index, []).append(text)
        elif self._as_json:
            print(json.dumps(_as_json(chunk.part) | {"offset": chunk.offset}), flush=True)
        elif self._several:
            print("".join(f"[{chunk.index}] {line}\n" for line in text.splitlines() or [""]), end="", flush=True)
        else:
            print(text, end="", flush=True)

    def end(self, result: GenerateResult | None = None) -> None:
        """Print the result, or after an error the text that has arrived."""
        if self.whole and result is not None:
            for completion in result.completions:
                print(json.dumps(_as_json(completion)) if self._as_json else _text(completion))
                if self.lines is not None and not self._as_json:
                    print("".join(self._kept.get(completion.index, [])), end="")
        elif self.whole and not self._as_json:
            for index in sorted(self._kept):
                print("".join(self._kept[index]))
        elif not self._as_json and not self._several and self.lines is None:
            print()


def _request(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The prompt, or None with `messages`, and the other fields."""
    inputs = Inputs()
    names = [flag[2:].replace("-", "_") for flag, _, _ in _SENT]
    fields: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if stop := _stop(args):
        fields["stop"] = stop
    if args.logprobs:
        fields["logprobs"] = args.logprobs
    fields["return_text"] = args.token_ids is None
    prompt = _prompt(args, inputs, fields)
    if (constraint := _constraint(args, inputs)) is not None:
        fields["constraint"] = constraint
    return prompt, fields


def _prompt(args: argparse.Namespace, inputs: Inputs, fields: dict[str, Any]) -> Any:
    if args.system is not None and args.chat is None:
        raise UsageError("--system needs --chat; in --messages, put a message with the role system first")
    if args.chat is None and args.messages is None:
        for flag, given in (("--tools", args.tools), ("--chat-template-kwargs", args.chat_template_kwargs)):
            if given is not None:
                raise UsageError(f"{flag} is for the chat template: give --chat or --messages")
    if args.token_ids is not None:
        return _token_ids("--token-ids", args.token_ids)
    if args.prompt is not None:
        return inputs.text("--prompt", args.prompt)
    if args.chat is not None:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        fields["messages"] = [*system, {"role": "user", "content": inputs.text("--chat", args.chat)}]
    else:
        fields["messages"] = _maps(inputs, "--messages", args.messages, _CHAT_EXAMPLE)
    if args.tools is not None:
        fields["tools"] = _maps(inputs, "--tools", args.tools, '[{"type": "function", "function": {"name": "add"}}]')
    if args.chat_template_kwargs is not None:
        example = '{"enable_thinking": false}'
        options = inputs.json("--chat-template-kwargs", args.chat_template_kwargs, example)
        if not isinstance(options, dict):
            raise UsageError(f"--chat-template-kwargs must be a map, such as '{example}'")
        fields["chat_template_kwargs"] = options
    return None


def _maps(inputs: Inputs, flag: str, value: str, example: str) -> list[dict[str, Any]]:
    given = inputs.json(flag, value, example)
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise UsageError(f"{flag} must be a list of maps, such as '{example}'")
    return given


def _token_ids(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(f"{flag} takes integers: {error}") from error


def _stop(args: argparse.Namespace) -> dict[str, Any]:
    stop: dict[str, Any] = {}
    if args.stop:
        stop["strings"] = args.stop
    if args.stop_token_ids is not None:
        stop["token_ids"] = _token_ids("--stop-token-ids", args.stop_token_ids)
    if args.min_tokens is not None:
        stop["min_tokens"] = args.min_tokens
    if args.ignore_eos:
        stop["ignore_eos"] = True
    return stop


def _constraint(args: argparse.Namespace, inputs: Inputs) -> dict[str, Any] | None:
    if args.json_schema is not None:
        example = '{"type": "object"}'
        schema = inputs.json("--json-schema", args.json_schema, example)
        if not isinstance(schema, dict):
            raise UsageError(f"--json-schema must be a map, such as '{example}'")
        return {"json_schema": schema}
    if args.regex is not None:
        return {"regex": args.regex}
    if args.choice is not None:
        return {"choices": args.choice}
    return None if args.grammar is None else {"grammar": inputs.file("--grammar", args.grammar)}


def _nearly_empty(args: argparse.Namespace, result: GenerateResult) -> bool:
    """True if a raw prompt got almost no tokens."""
    return args.prompt is not None and all(
        completion.finish_reason == "stop" and (len(completion) <= _NEARLY_EMPTY or not (completion.text or "").strip())
        for completion in result.completions
    )


def _flag_of(error: RolloutError, args: argparse.Namespace) -> str:
    """The flag of the field at fault, for the end of a message."""
    if error.field is None:
        return ""
    given = vars(args)
    flags = [flag for flag, field in _FIELDS.items() if _is_in(error.field, field)]
    flags += [flag for flag, *_ in _SENT if error.field.removeprefix("sampling.") == flag[2:].replace("-", "_")]
    flags += [flag for flag in ("--prompt", "--token-ids") if _is_in(error.field, "prompt")]
    flags += [flag for flag in ("--chat", "--messages") if _is_in(error.field, "messages")]
    used = [flag for flag in flags if given[flag[2:].replace("-", "_")] is not None]
    return f" ({used[0]})" if used and used[0] not in str(error).split() else ""


def _is_in(field: str, outer: str) -> bool:
    """True if the two fields are equal, or one is a part of the other."""
    return f"{field}.".startswith(f"{outer}.") or f"{outer}.".startswith(f"{field}.")


def _text(completion: Completion) -> str:
    return completion.text if completion.text is not None else _ids(completion)


def _ids(completion: Completion) -> str:
    return " ".join(map(str, completion.token_ids.tolist()))


def _as_json(completion: Completion) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": completion.index,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": _rounded(completion.logprobs.tolist()),
        "top_ids": None if completion.top_ids is None else completion.top_ids.tolist(),
        "top_logprobs": None if completion.top_logprobs is None else _rounded(completion.top_logprobs.tolist()),
        "versions": [list(run) for run in completion.versions],
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "seed": completion.seed,
        "error": completion.error,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else round(values, 6)


def _note(completion: Completion) -> None:
    """Print the end of a completion on stderr; stdout holds completions only."""
    versions = ", ".join(str(version) for version, _ in completion.versions) or "none"
    reason = completion.finish_reason if completion.error is None else f"{completion.finish_reason}: {completion.error}"
    ending = f"{len(completion)} tokens, {reason}, weights version {versions}"
    print(f"[completion {completion.index}: {ending}]", file=sys.stderr)


_TEXT_WIDTH = 14


class TokenLines:
    """A line for each token of a completion: position, log-prob, id, text, and the likeliest tokens at its position.

              0   -0.693     13  ' 1'    ' 1' -0.691, ' 2' -0.704

    The text of a token is what its chunk added to the text of the completion: nothing while a character is not whole,
    or while the worker keeps back what may become a stop string. The likeliest tokens come as ids; the model's
    tokenizer.json gives their texts, if this machine has it.
    """

    def __init__(self) -> None:
        self._text_of: Callable[[int], str] | None = None

    def find_texts(self, model: str) -> None:
        """Look for the tokenizer of a model, a folder or a hub id, on this machine. Nothing is downloaded."""
        self._text_of = _texts_of(model)

    def of(self, chunk: Chunk) -> Iterator[str]:
        """A line for each token of a chunk. The last line has the text of the whole chunk."""
        part = chunk.part
        last = len(part) - 1
        if last < 0 and part.text:  # text that was kept back and is no stop string
            yield f"{'':>25}  {part.text!r}"
        for row, (token, logprob) in enumerate(zip(part.token_ids.tolist(), part.logprobs.tolist(), strict=True)):
            text = "" if part.text is None else repr(part.text if row == last else "")
            line = f"{chunk.offset + row:>7} {logprob:>9.3f} {token:>7}  {text:<{_TEXT_WIDTH}}"
            yield f"{line}  {self._likeliest(chunk, row)}".rstrip()

    def _likeliest(self, chunk: Chunk, row: int) -> str:
        ids, logprobs = chunk.part.top_ids, chunk.part.top_logprobs
        if ids is None or logprobs is None:
            return ""
        pairs = zip(ids[row].tolist(), logprobs[row].tolist(), strict=True)
        return ", ".join(f"{self._name(token)} {logprob:.3f}" for token, logprob in pairs)

    def _name(self, token: int) -> str:
        return str(token) if self._text_of is None else repr(self._text_of(token))


def _texts_of(model: str) -> Callable[[int], str] | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
        from tokenizers import Tokenizer
    except ModuleNotFoundError:  # clients are installed without them
        return None
    file = Path(model).expanduser() / "tokenizer.json"
    if not file.is_file():
        try:
            cached = try_to_load_from_cache(model, file.name)
        except HFValidationError:  # a folder on the worker's machine
            return None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    tokenizer = Tokenizer.from_file(str(file))
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)
