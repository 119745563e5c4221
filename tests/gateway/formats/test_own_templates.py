"""A response template that the tokenizer brings comes first, and reads what transformers' own parser reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response
from trl import chat_template_utils as trl_templates

from rollout.text.codec import TextCodec
from rollout_gateway.prompts.tokenizer import GatewayTokenizer
from tests.support.gateway.chat_templates import tokenizer_of
from tests.support.gateway.cuts import cut

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
        },
    }
]
TAGGED = (
    "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "x", "b": 3}}\n</tool_call>'
CHANNELS = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
)
CASES = [
    ("qwen3", trl_templates.qwen3_template, f"<think>\nhm\n</think>\n\nI look.\n{HERMES}\n{HERMES}"),
    ("qwen3", trl_templates.qwen3_template, "<think>\nhm\n</think>\n\n42"),
    ("qwen3", trl_templates.qwen3_template, "42"),
    ("qwen3.5", trl_templates.qwen3_5_template, f"<think>\nhm\n</think>\n\n{TAGGED}"),
    ("glm-4.5", trl_templates.glm4moe_template, f"\n<think>hm</think>\n{GLM}"),
    ("gpt-oss", trl_templates.gptoss_template, CHANNELS + '{"a": "x", "b": 3}<|call|>'),
    ("gemma-4", trl_templates.gemma4_template,
     '<|channel>thought\nhm<channel|><|tool_call>call:f{a:<|"|>x<|"|>,b:3}<tool_call|>'),
]  # fmt: skip


@pytest.mark.parametrize(("family", "template", "said"), CASES)
def test_an_answer_is_read_as_transformers_reads_it(
    family: str, template: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(family)
    tokenizer.response_template = template
    try:
        tokenizer.save_pretrained(tmp_path)
    finally:
        tokenizer.response_template = None
    text = GatewayTokenizer(TextCodec(tmp_path))
    formats = text.formats("auto", "auto")
    assert (formats.tools, formats.reasoning) == ("template", "template")
    theirs = parse_response(said, template, prefix="", tools=TOOLS)
    answer = cut(formats.cuts[True].regions, said, tools=TOOLS)
    assert answer.reasoning.strip() == (theirs.get("reasoning_content") or theirs.get("thinking") or "").strip()
    assert answer.content.strip() == theirs.get("content", "").strip()
    calls = [call["function"] for call in theirs.get("tool_calls", [])]
    assert [(name, json.loads(made)) for name, made in answer.named()] == [
        (call["name"], call["arguments"]) for call in calls
    ]
    assert text.formats("template", "none").tools == "template"
    text.close()


def test_a_template_that_is_none_is_an_error_if_it_is_asked_for(tmp_path: Path) -> None:
    tokenizer_of("qwen3").save_pretrained(tmp_path)
    text = GatewayTokenizer(TextCodec(tmp_path))
    with pytest.raises(ValueError, match="response template"):
        text.formats("template", "none")
    text.close()
