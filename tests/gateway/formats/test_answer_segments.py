"""Reasoning, content and calls in text: the same however the text is cut, and nothing is lost."""

import json
from typing import Any

import pytest

from rollout_gateway.formats.known_formats import THOUGHTS
from tests.support.gateway.cuts import Answer, cut, format_of, in_pieces

HERMES = format_of("hermes", "think")
TIME, DATE = {"name": "time", "arguments": {}}, {"name": "date", "arguments": {}}
WEATHER = {"name": "weather", "arguments": {"city": "Köln </tool_call", "days": [1, 2]}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "on": {"type": "boolean"},
                    "list": {"type": "array"},
                    "map": {"type": ["object", "null"]},
                },
            },
        },
    }
]


def hermes(call: Any) -> str:
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def decoded(answer: Answer) -> list[dict[str, Any]]:
    return [{"name": name, "arguments": json.loads(arguments)} for name, arguments in answer.named()]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call, 1 < 2 <tool", "no call, 1 < 2 <tool", []),
        (hermes(WEATHER), "", [WEATHER]),
        (f"I look.\n{hermes(TIME)}\n{hermes(DATE)}\n", "I look.", [TIME, DATE]),
        (f"{hermes(TIME)}\nDone.\n", "\nDone.\n", [TIME]),
        ('<tool_call>{"name": "time", "arguments": {}}', "", [TIME]),  # the end may be missing
        ('<tool_call>{"name": "time", "parameters": {}}</tool_call>', "", [TIME]),
        (f"<tool_call>{json.dumps([TIME, DATE])}</tool_call>", "", [TIME, DATE]),
        (f"<tool_call>{json.dumps(TIME)}\n{json.dumps(DATE)}</tool_call>", "", [TIME, DATE]),
        (f"<tool_call>{{broken}}</tool_call> more {hermes(TIME)}", "<tool_call>{broken}</tool_call> more", [TIME]),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("<tool_call>say</tool_call> x", "<tool_call>say</tool_call> x", []),
        ('<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
        ('<tool_call>{"name": " ", "arguments": {}}', '<tool_call>{"name": " ", "arguments": {}}', []),
        ('<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
        (f'<tool_call>{{"name": "f", "a": "x}}\n{hermes(TIME)}', '<tool_call>{"name": "f", "a": "x}', [TIME]),
        (f"<tool_call>\n{hermes(TIME)}", "<tool_call>", [TIME]),
    ],
)
def test_calls_as_json_in_tags(text: str, content: str, calls: list[Any]) -> None:
    answer = cut(HERMES, text)
    assert (answer.content, decoded(answer), answer.reasoning) == (content, calls, "")
    assert bool(answer.unparsed) == ("<tool_call>" in content)


@pytest.mark.parametrize(
    "mark", ["</tool_call>", "<tool_call>", "<think>", "</think>", '\\"</tool_call>', "}</tool_call>"]
)
def test_a_mark_inside_of_a_string_ends_no_call(mark: str) -> None:
    said = json.loads(f'"{mark}"')
    first = {"name": "echo", "arguments": {"text": f"echo {said} done", "more": [{"a": said}]}}
    answer = cut(HERMES, f"{hermes(first)}\n{hermes(TIME)}")
    assert (answer.content, decoded(answer)) == ("", [first, TIME])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"\\udc00": 1}', {"\ufffd": 1}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ('{"a": NaN}', None),
        ('{"a": -Infinity}', None),
        ('{"a": 1e999}', None),
        ('{"a": ' + "9" * 5000 + "}", None),
        ('{"a": ' + "[" * 150 + "]" * 150 + "}", {"a": json.loads("[" * 150 + "]" * 150)}),
        ('{"a": ' + "[" * 2000 + "]" * 2000 + "}", None),
        ('{"a": ' + "[" * 2000, None),
        ('{"a": 1}' * 2, None),
        ('{"a": "\x01"}', None),
        ('{"a": "\0"}', None),
        ('{"a": .5}', None),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"": null}', {"": None}),
    ],
)
def test_arguments_are_json_or_stay_text(arguments: str, shown: Any) -> None:
    text = f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>'
    answer = cut(HERMES, text, ways=5)
    if shown is None:
        assert (answer.content, answer.calls, answer.unparsed) == (text, (), ("tool_calls",))
    else:
        ((name, found),) = answer.named()
        assert (name, json.loads(found), answer.content) == ("f", shown, "")
        assert found.encode()


def test_half_a_surrogate_pair_in_a_name_becomes_a_character() -> None:
    answer = cut(HERMES, '<tool_call>{"name":"f\\ud83d","arguments":{}}</tool_call>')
    assert answer.named() == [("f\ufffd", "{}")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "time", "parameters": {}}', "", [TIME]),
        ('<|python_tag|>{"name": "time", "parameters": {}}; {"name": "date", "parameters": {}}', "", [TIME, DATE]),
        ('{"name": "time"}', '{"name": "time"}', []),
        ('{"name": "time", "parameters": {}} and then', '{"name": "time", "parameters": {}} and then', []),
        ("It is noon. {}", "It is noon. {}", []),
        ("<|python", "<|python", []),
        ('{"name":"f","parameters":{"a":"\\ud83d"}}', "", [{"name": "f", "arguments": {"a": "\ufffd"}}]),
    ],
)
def test_an_answer_that_consists_of_calls(text: str, content: str, calls: list[Any]) -> None:
    answer = cut(format_of("llama3"), text)
    assert (answer.content, decoded(answer)) == (content, calls)


@pytest.mark.parametrize("name", ["llama3", "pythonic"])
@pytest.mark.parametrize(("begun", "thoughts"), [("", "<think>hm</think>"), ("<think>\n", "hm</think>"), ("", "")])
@pytest.mark.parametrize("space", ["", "\n\n"])
def test_an_answer_that_consists_of_calls_begins_behind_its_reasoning(
    name: str, begun: str, thoughts: str, space: str
) -> None:
    call = {"llama3": '{"name": "time", "parameters": {}}', "pythonic": "[time()]"}[name]
    regions = format_of(name, "think")
    answer = cut(regions, f"{thoughts}{space}{call}", begun)
    assert (answer.reasoning, answer.content, decoded(answer)) == ("hm" if thoughts else "", "", [TIME])
    closed = cut(regions, call, f"<think>\n\n</think>{space}")
    assert (closed.reasoning, closed.content, decoded(closed)) == ("", "", [TIME])
    later = cut(regions, f"{thoughts}I say {call}", begun)
    assert (later.content, later.calls) == (f"I say {call}", ())


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<parameter=text>\necho </tool_call> done\n</parameter>", {"text": "echo </tool_call> done"}),
        ("<parameter=text>\n<parameter=x>\n</parameter>", {"text": "<parameter=x>"}),
        ("<parameter=count>\n3\n</parameter>\n<parameter=on>\ntrue\n</parameter>", {"count": 3, "on": True}),
        ("<parameter=text>\n3\n</parameter>", {"text": "3"}),
        ('<parameter=map>\n{"a": [1]}\n</parameter>', {"map": {"a": [1]}}),
        ("<parameter=map>\nnull\n</parameter>", {"map": None}),
        ("<parameter=list>\nno list\n</parameter>", {"list": "no list"}),
        ("<parameter=text>\n  two\n\nlines \n</parameter>", {"text": "  two\n\nlines "}),
        ("<parameter=text></parameter>", {"text": ""}),
        ("", {}),
    ],
)
def test_tagged_values_have_the_types_of_the_schema(text: str, arguments: dict[str, Any]) -> None:
    call = f"<tool_call>\n<function=f>\n{text}\n</function>\n</tool_call>"
    answer = cut(format_of("qwen3_coder"), f"I call.\n\n{call}\n{call}", tools=TOOLS)
    assert (answer.content, decoded(answer)) == ("I call.", [{"name": "f", "arguments": arguments}] * 2)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n<parameter=text>\nopen\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>\nopen",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        '<tool_call>\n<function=f>\n<parameter=map>\n{"a": NaN}\n</parameter>\n</function>\n</tool_call>',
    ],
)
def test_a_tagged_call_that_is_not_whole_stays_text(text: str) -> None:
    answer = cut(format_of("qwen3_coder"), text, tools=TOOLS)
    assert (answer.content, answer.calls) == (text, ())


def test_functions_of_one_block_are_calls_of_their_own() -> None:
    """Models also leave out the mark before the first one."""
    parts = [f"<function=f>\n<parameter=count>\n{count}\n</parameter>\n</function>\n" for count in (1, 2)]
    calls = [{"name": "f", "arguments": {"count": count}} for count in (1, 2)]
    for opening in ("<tool_call>\n", ""):
        answer = cut(format_of("qwen3_coder"), f"{opening}{''.join(parts)}</tool_call>", tools=TOOLS)
        assert (answer.content, decoded(answer)) == ("", calls)
    said = "<parameter=text>\n</function>\n</parameter>\n"
    answer = cut(format_of("qwen3_coder"), f"<tool_call>\n<function=f>\n{said}</tool_call>", tools=TOOLS)
    assert decoded(answer) == [{"name": "f", "arguments": {"text": "</function>"}}]


@pytest.mark.parametrize("space", ["", "\n"])
def test_a_call_without_arguments_in_tags(space: str) -> None:
    calls = f"<tool_call>time{space}</tool_call>\n<tool_call>date{space}</tool_call>"
    assert decoded(cut(format_of("glm45", "think"), calls)) == [TIME, DATE]
    answer = cut(format_of("glm45", "think"), f"<tool_call>time{space}")
    assert (answer.content, answer.calls) == (f"<tool_call>time{space}", ())


@pytest.mark.parametrize(
    "tools", [[{"function": {"name": "f", "parameters": {"properties": {"a": {"anyOf": 5}}}}}], [{}]]
)
def test_a_schema_that_is_none_fails_no_answer(tools: list[Any]) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    answer = cut(format_of("qwen3_coder"), text, tools=tools)
    assert answer.calls or answer.content == text


@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm, </thin\n</think>\n\n42", "\nhm, </thin\n", "\n\n42"),
        ("<think>\n", "hm</think>42", "hm", "42"),
        ("<think>I see", " that</think>so", " that", "so"),
        ("<think>\n\n</think>\n\n<think>I see", " that</think>so", " that", "so"),
        ("<think>\n\n</think>\n\n<think>I</think>s", "o<think>", "", "o<think>"),
        ("<think>\n\n</think>\n\n", "<think>I</think>", "", "<think>I</think>"),
        ("<think>\n\n</think>\n\nThe tag <think>", " is</think>", "", " is</think>"),
        ("<think>\n\n</think>\n\n", "42<think>", "", "42<think>"),
        ("<think>\n\n</think>\n\n", "<think>42</think>", "", "<think>42</think>"),
        ("<think>\n\n</think>\n\n<think>I see", " that</think>so", " that", "so"),
        ("<think>\n\n</think>\n\nYes: <think>", "a</think>b", "", "a</think>b"),
        ("I see", " <think>that</think>", "", " <think>that</think>"),
        ("<thi", "nk>a</think>b", "a", "b"),
        ("", "<thinking> 42", "", "<thinking> 42"),
        ("", "\n <think>cut short", "cut short", ""),
        ("", "42 <think>", "", "42 <think>"),
        ("", "a<think>b</think>c", "", "a<think>b</think>c"),
        ("", "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("", "<thi", "", "<thi"),
        ("", " \n", "", " \n"),
        ("", "", "", ""),
    ],
)
def test_reasoning(begun: str, text: str, reasoning: str, content: str) -> None:
    for regions in (format_of(reasoning="think"), HERMES):
        answer = cut(regions, text, begun)
        assert (answer.reasoning, answer.content, answer.calls) == (reasoning, content, ())


def test_a_call_ends_reasoning_that_is_never_closed() -> None:
    answer = cut(HERMES, f"I think\n{hermes(TIME)}", "<think>")
    assert (answer.reasoning, answer.content, decoded(answer)) == ("I think\n", "", [TIME])


def test_a_call_in_reasoning_that_is_closed_is_reasoning() -> None:
    answer = cut(HERMES, f"I could {hermes(TIME)}.</think>{hermes(DATE)}", "<think>")
    assert (answer.reasoning, answer.content, decoded(answer)) == (f"I could {hermes(TIME)}.", "", [DATE])


def test_reasoning_that_names_a_mark_stays_reasoning() -> None:
    answer = cut(HERMES, "<think>I use <tool_call> and then", "")
    assert answer == ("I use <tool_call> and then", "", (), ())


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
            "hm",
            "42",
            [],
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.time "
            "<|constrain|>json<|message|>{}<|call|>",
            "hm",
            "",
            [TIME],
        ),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.date<|channel|>commentary "
         "json<|message|>{}", "", "I look.", [DATE]),
        ("<|channel|>analysis<|message|>cut", "cut", "", []),
        ("<|channel|>analysis text<|message|>hm<|end|><|start|>assistant<|channel|>final text<|message|>42", "hm", "42",
         []),
        ("<|channel|>commentary to=functions.time code<|message|>{}<|call|>", "", "", [TIME]),
        ("<|channel|>commentary to=functions.time <|constrain|>JSON<|message|>{}<|call|>", "", "", [TIME]),
        ("<|channel|>final<|message|>cut <|en", "", "cut <|en", []),
        ("no channel", "", "no channel", []),
        ("<|channel|>commentary to=functions.time<|message|>{broken", "",
         "<|channel|>commentary to=functions.time<|message|>{broken", []),
    ],
)  # fmt: skip
def test_channels(text: str, reasoning: str, content: str, calls: list[Any]) -> None:
    answer = cut(format_of("gpt_oss", "gpt_oss"), text)
    assert (answer.reasoning, answer.content, decoded(answer)) == (reasoning, content, calls)


def test_a_call_of_kimi_keeps_its_id() -> None:
    call = '<|tool_call_begin|>functions.time:3<|tool_call_argument_begin|>{"a": "<|tool_call_end|>"}<|tool_call_end|>'
    answer = cut(format_of("kimi_k2"), f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>")
    assert answer.calls == (("time", '{"a": "<|tool_call_end|>"}', "functions.time:3"),)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes", '<tool_call>{"'),
        ("hermes", '<tool_call>{"a":"</tool_call>'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>"),
        ("glm45", "<tool_call>f<arg_key>"),
        ("minimax_m2", '<invoke name="f"><parameter name="a">'),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{"),
        ("llama3", '{"'),
        ("gemma4", '<|tool_call>call:f{a:<|"|>'),
        ("mistral_json", '[TOOL_CALLS][{"'),
    ],
)
def test_text_that_repeats_the_beginning_of_a_call_is_cut_in_time_and_stays(name: str, unit: str) -> None:
    text = unit * (20_000 // len(unit))  # what is quadratic takes minutes
    answer = cut(format_of(name, "think" if name != "gpt_oss" else None), text, ways=1)
    assert (answer.content, answer.calls) == (text, ())


#: The beginning of an answer, by format, behind which white space may be the beginning of a mark.
BEFORE_SPACE = [
    ("pythonic", ""),
    ("llama3", ""),
    ("qwen3_coder", "<tool_call>"),
    ("glm45", "<tool_call>f"),
    ("glm45", "<tool_call>f<arg_key>a</arg_key>"),
    ("mistral", "[TOOL_CALLS]f"),
    ("mistral_json", "[TOOL_CALLS]"),
    ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": '),
    ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": '),
    ("kimi_k2", "<|tool_call_begin|>"),
    ("minimax_m2", "<invoke "),
    ("gpt_oss", "<|channel|>commentary to=f"),
    ("gemma4", "<|tool_call>call:f"),
    ("phi4_mini", "functools"),
]


@pytest.mark.parametrize(("name", "before"), BEFORE_SPACE)
def test_white_space_without_end_is_cut_in_time_and_stays(name: str, before: str) -> None:
    """A model may write nothing else. Each token must cost the same, however many came before it."""
    regions, space = format_of(name, "think" if name != "gpt_oss" else None), "\n" * 10_000
    answer = in_pieces(regions, [before, *space])  # what is quadratic takes minutes
    assert (answer.content, answer.calls) == (before + space, ())


@pytest.mark.parametrize("name", sorted(THOUGHTS))
def test_a_budget_has_the_marks_of_the_format(name: str) -> None:
    """A forced end closes the reasoning, and what follows is the answer."""
    start, end = THOUGHTS[name]
    header = "<|start|>assistant<|channel|>final<|message|>" if name == "gpt_oss" else ""
    answer = cut(format_of(None, name), f"{start}a thought{end}{header}an answer")
    assert (answer.reasoning, answer.content) == ("a thought", "an answer")
