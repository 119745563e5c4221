"""Formats of answers by name, in the form of transformers' response templates.

A response template is data: where a region of the text begins and ends, and how its content is read
(`transformers.utils.chat_parsing`). A checkpoint may bring its own as `response_template` of the tokenizer; this table
is for all other checkpoints. To add a format, add an entry; nothing else changes. Three rules go beyond transformers':

- a field without `close` and with structured content ends where its value ends,
- a reasoning field that does not repeat opens at the beginning of an answer only,
- the `close` of the content outside of all regions is not used: the text of special tokens is not in a completion.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Template = dict[str, Any]

#: The name of the format that a tokenizer brings itself.
OWN = "template"

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_CALL_WITH_ID = _CALL | {"id": "{id}"}
_WHOLE_CALL = {"type": "function", "function": "{content}"}  # a map with name and arguments, or a list of these


def _bounded(fields: Mapping[str, Template]) -> Mapping[str, Template]:
    """The fields with marks that have at most 64 characters of white space in a row.

    A model may write nothing else. If all of it could be the beginning of a mark, each token would cost more time.
    """
    patterns = ("open_pattern", "close_pattern")
    return MappingProxyType(
        {
            name: field
            | {
                key: field[key].replace(r"\s*", r"\s{0,64}").replace(r"\s+", r"\s{1,64}")
                for key in patterns
                if key in field
            }
            for name, field in fields.items()
        }
    )


def _calls(**field: Any) -> dict[str, Any]:
    return {"repeats": True, "transform": _CALL, **field}


def _tagged_values(pattern: str) -> dict[str, Any]:
    """Arguments as `<tag>value</tag>`; the tool's schema gives their types."""
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern}}


_QWEN3_CODER = _calls(  # models leave out the first mark; a block may have several functions
    open_pattern=r"(?:<tool_call>)?\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>(?:\s*</tool_call>)?|</tool_call>",
    **_tagged_values(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
)
_DEEPSEEK = {"close_pattern": r"\s*(?:```\s*)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?", "content": "json"}
_HARMONY_TYPE = r"\s*(?:(?:<\|constrain\|>)?\s*\w{1,64})?\s*"  # a message's content type, such as `<|constrain|>json`
_HARMONY_CALL = (
    r"(?:<\|start\|>assistant)?\s*"
    r"(?:to=(?:functions\.)?(?P<name>[^\s<]+)\s*<\|channel\|>\s*(?:commentary|analysis)"
    r"|<\|channel\|>\s*(?:commentary|analysis)\s+to=(?:functions\.)?(?P<name>[^\s<]+))"
    rf"{_HARMONY_TYPE}<\|message\|>"
)

#: Formats of tool calls, as the field `tool_calls` of a response template. `auto` takes the first that fits.
TOOL_CALLS: Mapping[str, Template] = _bounded(
    {
        # Qwen2.5, Qwen3, Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>
        "hermes": _calls(open="<tool_call>", close="</tool_call>", content="json", transform=_WHOLE_CALL),
        # Qwen3-Coder, Qwen3.5, Nemotron 3: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>...
        "qwen3_coder": _QWEN3_CODER,
        # GLM-4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
        "glm45": _calls(
            open_pattern=r"<tool_call>\s*(?P<name>[^\s<{]+)\s*(?=<arg_key>|</tool_call>)",
            close="</tool_call>",
            **_tagged_values(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        ),
        # Llama 3: the whole answer is {"name": ..., "parameters": {...}}, or several such objects with ";" between
        # them.
        "llama3": {
            "open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{)",
            "close_pattern": r"\Z",
            "content": "json",
            "transform": _WHOLE_CALL,
        },
        # Mistral since Tekken v11: [TOOL_CALLS]NAME[ARGS]{...}
        "mistral": _calls(
            open_pattern=r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]+)\s*(?:\[CALL_ID\]\s*[^\[\]{}\s]*\s*)?(?:\[ARGS\]|(?=\{))",
            content="json",
        ),
        # Mistral before: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
        "mistral_json": {"open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)", "content": "json", "transform": _WHOLE_CALL},
        # DeepSeek-V3, R1: a header with the kind and the name, the arguments in a code block
        "deepseek_v3": _calls(
            open_pattern=r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>\w+<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\s*",
            **_DEEPSEEK,
        ),
        # DeepSeek-V3.1: the name and the arguments
        "deepseek_v31": _calls(
            open_pattern=r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^\n<{]+)<｜tool▁sep｜>(?=\s*\{)",
            **_DEEPSEEK,
        ),
        # Kimi-K2: the id functions.NAME:INDEX, which the next turn has to name
        "kimi_k2": _calls(
            open_pattern=r"(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*"
            r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>",
            close_pattern=r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
            content="json",
            transform=_CALL_WITH_ID,
        ),
        # MiniMax-M2: <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
        "minimax_m2": _calls(
            open_pattern=r"(?:<minimax:tool_call>)?\s*<invoke\s+name=\"(?P<name>[^\"\n]+)\"\s*>",
            close_pattern=r"</invoke>(?:\s*</minimax:tool_call>)?",
            **_tagged_values(r"<parameter\s+name=\"(?P<key>[^\"\n]+)\"\s*>(?P<value>.*?)</parameter>"),
        ),
        # gpt-oss: a message to functions.NAME
        "gpt_oss": _calls(
            open_pattern=_HARMONY_CALL, close_pattern=r"<\|call\|>|<\|end\|>|(?=<\|start\|>)", content="json"
        ),
        # Gemma 4: <|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>
        "gemma4": _calls(
            open_pattern=r"<\|tool_call>\s*call:(?P<name>[^\s{]+)\s*(?=\{)",
            close="<tool_call|>",
            content="json",
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        ),
        # Phi-4-mini: <|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>, one call alone, or functools[...]
        "phi4_mini": {
            "open_pattern": r"<\|tool_call\|>|functools\s*(?=\[)",
            "close": "<|/tool_call|>",
            "content": "json",
            "transform": _WHOLE_CALL,
        },
        # Gemma 3 and Llama 4 with a template that asks for it: the whole answer is [name(key=value), ...]
        "pythonic": {
            "open_pattern": r"\A\s*(?:<\|python_start\|>)?\s*(?=\[)",
            "content": "python-call-list",
            "transform": _WHOLE_CALL,
        },
    }
)

#: Formats of reasoning: the fields of a response template besides `tool_calls`.
REASONING: Mapping[str, Mapping[str, Template]] = MappingProxyType(
    {
        # Qwen3, GLM, DeepSeek-R1, Kimi-K2-Thinking, MiniMax-M2: <think>...</think>, or opened by the prompt
        "think": {"reasoning_content": {"open": "<think>", "close": "</think>"}},
        # Magistral and later Mistral models
        "mistral": {"reasoning_content": {"open": "[THINK]", "close": "[/THINK]"}},
        # gpt-oss: messages on channels
        "gpt_oss": _bounded(
            {
                "reasoning_content": {
                    "open_pattern": r"(?:<\|start\|>assistant)?\s*<\|channel\|>\s*analysis"
                    + _HARMONY_TYPE
                    + r"<\|message\|>",
                    "close_pattern": r"<\|end\|>|(?=<\|start\|>)",
                    "repeats": True,
                    "join": "",
                },
                "content": {
                    "open_pattern": r"(?:<\|start\|>assistant)?\s*<\|channel\|>\s*(?:final|commentary)"
                    + _HARMONY_TYPE
                    + r"<\|message\|>",
                    "close_pattern": r"<\|return\|>|<\|end\|>|(?=<\|start\|>)",
                    "repeats": True,
                    "join": "",
                },
            }
        ),
        # Gemma 4
        "gemma4": {"reasoning_content": {"open_pattern": r"<\|channel>thought\n?", "close": "<channel|>"}},
    }
)

#: The texts with which a thought starts and ends: a budget for thoughts counts between them, and forces the second.
THOUGHTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "think": ("<think>", "</think>"),
        "mistral": ("[THINK]", "[/THINK]"),
        "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|>"),
        "gemma4": ("<|channel>thought", "<channel|>"),
    }
)

#: The text after which a thinking model's answer begins: a constraint holds from there on.
ANSWER_AFTER: Mapping[str, str] = MappingProxyType(
    {name: end for name, (_, end) in THOUGHTS.items()} | {"gpt_oss": "<|channel|>final<|message|>"}
)

#: Names that vLLM has for these formats.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "hf": OWN,
        "qwen3_json": "hermes",
        "qwen3_xml": "qwen3_coder",
        "llama3_json": "llama3",
        "glm47": "glm45",
        "openai": "gpt_oss",
        "openai_gptoss": "gpt_oss",
        "phi4_mini_json": "phi4_mini",
        **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3"), "think"),
    }
)
