"""Tool calls and reasoning in text: the same result however the text is cut, and nothing is lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rollout.gateway.reasoning import TaggedReasoning
from rollout.gateway.tools import HermesTools, Llama3Tools, ToolParser, tool_parser

CALL = {"name": "weather", "arguments": {"city": "Köln </tool_call", "days": [1, 2]}}
OTHER = {"name": "time", "arguments": {}}


def cuts(text: str) -> list[list[str]]:
    """The text whole, by character, and at random places."""
    ways = [[text], list(text)]
    for seed in range(20):
        places = sorted(random.Random(seed).choices(range(len(text) + 1), k=5))
        ways.append([text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)])
    return ways


def parsed(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    stream, content, calls = parser.stream(), "", []
    for place, piece in enumerate(pieces):
        text, found = stream.feed(piece, place == len(pieces) - 1)
        content += text
        calls += [(call.name, json.loads(call.arguments)) for call in found]
        assert len({call.id for call in found}) == len(found)
    return content, calls


def hermes(call: Any) -> str:
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call, 1 < 2 <tool", "no call, 1 < 2 <tool", []),
        (hermes(CALL), "", [CALL]),
        (f"I look.\n{hermes(OTHER)}\n{hermes(OTHER | {'name': 'date'})}", "I look.", [OTHER, OTHER | {"name": "date"}]),
        ('<tool_call>{"name": "time", "arguments": {}}', "", [OTHER]),
        ("<tool_call>{broken}</tool_call> more", "<tool_call>{broken}</tool_call> more", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    ],
)
def test_hermes(text: str, content: str, calls: list[Any]) -> None:
    for pieces in cuts(text):
        found, made = parsed(HermesTools(), pieces)
        assert (found.strip(), made) == (content, [(call["name"], call["arguments"]) for call in calls])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "time", "parameters": {}}', "", [OTHER]),
        ('<|python_tag|>{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}', "", [OTHER, OTHER]),
        ('{"name": "time"}', '{"name": "time"}', []),
        ('{"name": "time", "parameters": {}} and then', '{"name": "time", "parameters": {}} and then', []),
        ("It is noon. {}", "It is noon. {}", []),
        ("<|python", "<|python", []),
    ],
)
def test_llama3(text: str, content: str, calls: list[Any]) -> None:
    for pieces in cuts(text):
        found, made = parsed(Llama3Tools(), pieces)
        assert (found, made) == (content, [(call["name"], call["arguments"]) for call in calls])


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "answer"),
    [
        ("", "<think>\nhm, </thin\n</think>\n\n42", "\nhm, </thin\n", "\n\n42"),
        ("assistant\n<think>\n", "hm</think>42", "hm", "42"),
        ("", "<thinking> 42", "", "<thinking> 42"),
        ("", "\n <think>cut short", "cut short", ""),
        ("", "42 <think>", "", "42 <think>"),
        ("", "<thi", "", "<thi"),
    ],
)
def test_reasoning(prompt: str, text: str, reasoning: str, answer: str) -> None:
    for pieces in cuts(text):
        stream = TaggedReasoning().stream(prompt)
        found = [stream.feed(piece, place == len(pieces) - 1) for place, piece in enumerate(pieces)]
        assert ("".join(r for r, _ in found), "".join(a for _, a in found)) == (reasoning, answer)


def test_the_format_of_tools_follows_the_chat_template() -> None:
    assert isinstance(tool_parser("auto", "... <tool_call> ..."), HermesTools)
    assert isinstance(tool_parser("auto", '{"name": .., "parameters": ..} <|python_tag|>'), Llama3Tools)
    assert tool_parser("auto", "{{ messages }}") is None and tool_parser("none", "<tool_call>") is None
    with pytest.raises(ValueError, match="hermes"):
        tool_parser("pythonic", "")
