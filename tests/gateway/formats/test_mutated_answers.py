"""What a model could write: answers in every format, mutated, through the views, whole and streamed.

No answer fails, a whole one and a stream are equal in every field, and calls are JSON that every parser takes.
"""

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic_core import from_json

from rollout.text.codec import TextCodec
from rollout_gateway.answers.text_pieces import text_pieces
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.formats.format_chooser import Formats
from rollout_gateway.http.json_text import json_text
from rollout_gateway.prompts.sampling import OpenAiBody
from rollout_gateway.prompts.tokenizer import GatewayTokenizer, shown_text
from tests.support.gateway.chat_templates import FAMILIES, tokenizer_of
from trainer_bridge.client.results import Completion

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "object"}}},
        },
    }
]
JSON = (
    '{"a": 1}', '{"a": "x</tool_call>y", "b": {"c": [1, {"d": null}]}}', '{"a": "\\ud83d"}', '{"a": NaN}', "{}",
    '{"a": 1e999}', '{"b": ' + "[" * 300 + "]" * 300 + "}", '{"a": "\\\\\\""}', '{"k": "𝄞é"}', "[]", '"x"', '{"a": ',
)  # fmt: skip
ODD = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>",
    "</parameter>", "<arg_key>", "</arg_value>", "<|channel|>", "final", "<|message|>", "<|call|>", "[TOOL_CALLS]",
    "[ARGS]", '"', "\\",
    "{", "}", "[", "]", "\0", "\x01", "\x02", "\ufffd", "é", "𝄞", "\u2028", " ", "\n", "\n\n", "<", ">", "|", "NaN",
    "\\ud83d", "'", "=", ":", ",", ";", "0", "-", "1e999", "null", "<|", "</", "functions.f:0", "analysis", "```",
)  # fmt: skip


def valid(family: str, chance: random.Random) -> str:
    """An answer as the family's model would write it, with thoughts, content and calls by chance."""
    arguments = chance.choice(JSON)
    call = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>',
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{arguments}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{arguments}</arg_value>\n</tool_call>",
        "llama3": f'{{"name": "f", "parameters": {arguments}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{arguments}",
        "mistral_json": f'[TOOL_CALLS] [{{"name": "f", "arguments": {arguments}, "id": "a1b2c3d4e"}}]',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        f"{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|><|tool_calls_section_end|>",
        "minimax_m2": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{arguments}</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "gpt_oss": "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        f"{arguments}<|call|>",
        "gemma4": '<|tool_call>call:f{a:<|"|>x<|"|>,b:' + arguments + "}<tool_call|>",
        "phi4_mini": f'<|tool_call|>[{{"name": "f", "arguments": {arguments}}}]<|/tool_call|>',
        "pythonic": f"[f(a={arguments})]",
        None: "",
    }[FAMILIES[family].tools]
    thoughts = {
        "think": "<think>\nhm\n</think>\n\n",
        "mistral": "[THINK]hm[/THINK]",
        "gpt_oss": "<|channel|>analysis<|message|>hm<|end|>",
        "gemma4": "<|channel>thought\nhm<channel|>",
        None: "",
    }[FAMILIES[family].reasoning]
    content = chance.choice(("", "I look.\n", "  ", "42"))
    if family == "gpt-oss" and content:
        content = f"<|start|>assistant<|channel|>final<|message|>{content}<|end|>"
    return "".join(part for part in (thoughts, content, call * chance.choice((0, 1, 1, 2))) if chance.random() < 0.9)


def mutated(text: str, chance: random.Random) -> str:
    """The text with some parts cut out, repeated, exchanged or put in."""
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        start, end = sorted(chance.choices(range(len(text) + 1), k=2))
        end = min(end, start + chance.choice((1, 3, 10, 1000)))
        match chance.randrange(5):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:end] + text[start:end] + text[end:]
            case 2:
                text = text[:start] + chance.choice(ODD) + text[start:]
            case 3:
                text = text[:start] + chance.choice(ODD) + text[end:]
            case 4:
                text = text[:end]
    return text


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[GatewayTokenizer, Formats]]]:
    found = {}
    for name in FAMILIES:
        folder: Path = tmp_path_factory.mktemp("tokenizer")
        tokenizer_of(name).save_pretrained(folder)
        text = GatewayTokenizer(TextCodec(folder), folder)
        found[name] = text, text.formats("auto", "auto")
    yield found
    for text, _ in found.values():
        text.close()


def completion(tokens: list[int], stop: int | None, last: bool) -> Completion:
    numbers = np.zeros(len(tokens), np.float32)
    reason = None if not last else "length" if stop is None else "stop"
    return Completion(0, np.array(tokens, np.int32), numbers, numbers, [(0, len(tokens))], None, reason, stop)  # type: ignore[arg-type]


def joined(views: CompletionViews, parts: list[Completion]) -> dict[str, Any]:
    """All fields of a message that arrives in these parts."""
    pieces = [views.take(part) for part in parts]
    calls = [(call.name, call.arguments) for piece in pieces for call in piece.calls]
    return {
        "reasoning": "".join(piece.reasoning for piece in pieces),
        "content": "".join(piece.content for piece in pieces),
        "calls": calls,
        "missing": views.missing,
        "empty": views.empty,
    }


def check(text: GatewayTokenizer, formats: Formats, said: str, family: str, chance: random.Random) -> bool:
    """Check one answer; true if it has a call."""
    body = OpenAiBody.take({"skip_special_tokens": chance.random() < 0.9})
    # Without stop tokens the worker would write the text of some formats.
    body = body.model_copy(update={"stop_token_ids": [1 << 30]})
    codec = text.codec("")
    tokens = codec.encode_rendered(said).tolist()
    if chance.random() < 0.1:  # tokens of which no text consists, and ids without a token
        tokens.insert(chance.randrange(len(tokens) + 1), chance.choice((200, 201, 1 << 20)))
    stop = codec.special_tokens.get(chance.choice(FAMILIES[family].ends)) if chance.random() < 0.5 else None
    tokens += [] if stop is None else [stop]
    begun = chance.choice(("", "", "<think>\n", "[THINK]", "<think>\n\n</think>\n\n", "I see <thi"))
    cut = formats.cuts[chance.random() < 0.95]

    def views() -> CompletionViews:
        return CompletionViews(text_pieces(text, body, False, cut.shown), cut.regions, TOOLS, begun)

    whole = joined(views(), [completion(tokens, stop, True)])
    assert "text" not in whole["missing"] and "message" not in whole["missing"], whole["missing"]
    for every in (1, chance.randrange(2, 9)):
        starts = list(range(0, len(tokens), every)) or [0]
        last = starts[-1]
        parts = [completion(tokens[at : at + every], stop if at == last else None, at == last) for at in starts]
        assert joined(views(), parts) == whole, (every, tokens)
    for name, arguments in whole["calls"]:
        assert name.strip() and isinstance(from_json(arguments, allow_inf_nan=False), dict)
        assert json.loads(arguments) == from_json(arguments)
    json_text(whole).encode()
    if not cut.regions:
        hidden = () if not body.skip_special_tokens else codec.special_tokens.values()
        left = [token for token in tokens if token not in hidden and token != stop]
        assert whole["content"] == shown_text(codec, left)
    return bool(whole["calls"])


def run(texts: dict[str, tuple[GatewayTokenizer, Formats]], count: int, seed: int) -> None:
    chance = random.Random(seed)
    calls = 0
    for number in range(count):
        family = chance.choice(list(FAMILIES))
        said = mutated(valid(family, chance), chance)
        try:
            calls += check(*texts[family], said, family, chance)
        except Exception:
            print(f"answer {number} of seed {seed}: {family} {said!r}")
            raise
    assert calls > count / 20


def test_no_answer_fails_and_streams_equal_whole_answers(
    texts: dict[str, tuple[GatewayTokenizer, Formats]], caplog: pytest.LogCaptureFixture
) -> None:
    run(texts, 400, random.SystemRandom().randrange(1 << 30))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_no_answer_of_very_many_fails(texts: dict[str, tuple[GatewayTokenizer, Formats]], seed: int) -> None:
    run(texts, 20_000, seed)
