"""Model families: which formats are found, and that what their templates write is read again and goes on unchanged."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rollout.text.codec import TextCodec
from rollout_gateway.formats.chat_turns import CallForm, ChatTurns
from rollout_gateway.formats.format_chooser import Formats
from rollout_gateway.prompts.chat_messages import DrawnTurn, Rendering, prompt_of
from rollout_gateway.prompts.tokenizer import GatewayTokenizer, shown_text
from tests.support.gateway.chat_templates import FAMILIES, families_with, tokenizer_of, tokenizer_with
from tests.support.gateway.cuts import cut

QUESTION = {"role": "user", "content": "What is the weather in Köln?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "looks something up",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "places": {"type": "array"}},
            "required": ["city"],
        },
    },
}
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"city": "Köln 𝄞", "days": 3},
    {"city": "two\nlines", "places": [1, {"a": None}]},
    {"city": "3"},
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, GatewayTokenizer]]:
    found = {}
    for name in FAMILIES:
        folder: Path = tmp_path_factory.mktemp("tokenizer")
        tokenizer_of(name).save_pretrained(folder)
        found[name] = GatewayTokenizer(TextCodec(folder), folder)
    yield found
    for text in found.values():
        text.close()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def text(family: str, texts: dict[str, GatewayTokenizer]) -> GatewayTokenizer:
    return texts[family]


def shown(text: GatewayTokenizer, formats: Formats, rendered: str) -> str:
    """A rendered answer as a completion's text: without special tokens that no format needs."""
    for name, token in text.codec("").special_tokens.items():
        if token not in formats.cuts[True].shown:
            rendered = rendered.replace(name, "")
    return rendered


def call_message(arguments: tuple[dict[str, Any], ...], form: CallForm) -> dict[str, Any]:
    """A message with calls, in OpenAI's form."""
    calls = [
        {
            "id": f"functions.look_up:{place}" if form.call_id.endswith(":0") else f"a1b2c3d4{place}",
            "type": "function",
            "function": {"name": "look_up", "arguments": json.dumps(each, ensure_ascii=False)},
        }
        for place, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_auto_finds_the_formats_of_a_family(family: str, text: GatewayTokenizer) -> None:
    formats = text.formats("auto", "auto")
    assert (formats.tools, formats.reasoning) == (FAMILIES[family].tools, FAMILIES[family].reasoning)
    assert text.formats("none", "none") == Formats()
    with pytest.raises(ValueError, match="hermes"):
        text.formats("unknown", "none")


def rendered(text: GatewayTokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    """What the template writes, as text with special tokens."""
    how = Rendering([TOOL], {"add_generation_prompt": False, **options}, None, False)
    return shown_text(text.codec(""), prompt_of(text, messages, how).token_ids)


def answer_of(text: GatewayTokenizer, message: dict[str, Any]) -> str:
    """What the template writes for an answer to the question, from its header on."""
    answered = rendered(text, [QUESTION, message]).partition(QUESTION["content"])[2]
    header = text.turns(None).header()
    return answered[answered.index(header) + len(header) :]


@pytest.mark.parametrize("family", list(families_with("tools")), indirect=True)
@pytest.mark.parametrize("arguments", [ARGUMENTS[:1], ARGUMENTS[1:2], ARGUMENTS[2:], ARGUMENTS, ({"city": ""},)])
def test_calls_are_read_out_of_what_the_template_writes(
    family: str, text: GatewayTokenizer, arguments: tuple[dict[str, Any], ...]
) -> None:
    if family in ("llama-3.1", "llama-3.2", "gpt-oss"):
        arguments = arguments[-1:]  # their templates take one call
    formats, form = text.formats("auto", "auto"), text.turns(None).call_form()
    assert form is not None
    said = shown(text, formats, answer_of(text, call_message(arguments, form)))
    answer = cut(formats.cuts[True].regions, said, tools=[TOOL], ways=3)
    assert [(name, json.loads(made)) for name, made in answer.named()] == [("look_up", each) for each in arguments]
    assert "look_up" not in answer.content and not answer.unparsed
    if form.call_id.endswith(":0") and family == "kimi-k2":
        assert [call[2] for call in answer.calls] == [f"functions.look_up:{place}" for place in range(len(arguments))]


@pytest.mark.parametrize("family", list(families_with("reasoning")), indirect=True)
def test_reasoning_is_read_out_of_what_the_template_writes(family: str, text: GatewayTokenizer) -> None:
    formats = text.formats("auto", "auto")
    message = {
        "role": "assistant",
        "content": "It rains.",
        **dict.fromkeys(("reasoning_content", "thinking"), "Hm, so."),
    }
    if family in ("deepseek-v3", "deepseek-v3.1", "deepseek-r1-distill"):  # their templates drop it
        said = "<think>Hm, so.</think>It rains."
    elif family == "gemma-4":
        pytest.skip("its template writes reasoning before calls only")
    else:
        said = answer_of(text, message)
    answer = cut(formats.cuts[True].regions, shown(text, formats, said), ways=3)
    assert (answer.reasoning.strip(), answer.content.strip(), answer.calls) == ("Hm, so.", "It rains.", ())


def test_reasoning_that_the_prompt_opens_or_closes(family: str, text: GatewayTokenizer) -> None:
    formats, turns = text.formats("auto", "auto"), text.turns(None)
    for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"thinking": True}):
        prompt = rendered(text, [QUESTION], add_generation_prompt=True, **options)
        begun = turns.begun(prompt)
        answer = cut(formats.cuts[True].regions, "It rains.", begun, ways=3)
        thinks = begun.rstrip().endswith(("<think>", "[THINK]"))
        assert (answer.reasoning, answer.content) == (("It rains.", "") if thinks else ("", "It rains."))


@pytest.mark.parametrize("family", list(families_with("reasoning")), indirect=True)
def test_a_message_that_goes_on_within_its_reasoning(family: str, text: GatewayTokenizer) -> None:
    formats = text.formats("auto", "auto")
    if formats.reasoning != "think" or family == "deepseek-v3.1":
        pytest.skip("its template has no header, channels, or the end of reasoning before the message")
    message = {"role": "assistant", "content": "<think>I see"}
    begun = text.turns(None).begun(rendered(text, [QUESTION, message], continue_final_message=True))
    answer = cut(formats.cuts[True].regions, " that</think>so", begun, ways=3)
    assert (answer.reasoning, answer.content) == (" that", "so")


def turns_of(text: GatewayTokenizer, family: str, calls: bool) -> list[dict[str, Any]]:
    """Messages after the question: an answer, and what follows it."""
    if not calls:
        return [{"role": "assistant", "content": "It rains."}, {"role": "user", "content": "And tomorrow?"}]
    form = text.turns(None).call_form()
    assert form is not None
    message = call_message(ARGUMENTS[:1], form)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "name": "look_up", "content": "rain"}
    return [message, result]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("calls", [False, True])
def test_the_next_prompt_goes_on_with_the_tokens_that_were_drawn(
    family: str, text: GatewayTokenizer, calls: bool, ended: bool
) -> None:
    """Whatever was drawn stays, and what follows it is what the template writes there: each turn's end once."""
    if calls and (FAMILIES[family].tools is None or not ended):
        pytest.skip("no calls, or the template does not show where a call ends that was cut off")
    codec, how = text.codec(""), Rendering([TOOL], {}, None, False)
    answer, follows = turns_of(text, family, calls)
    prompt = prompt_of(text, [QUESTION], how).token_ids
    end = codec.special_tokens.get(FAMILIES[family].ends[calls]) if ended else None
    # No tokenizer would make these tokens of their text.
    drawn = [*codec.encode_rendered("<think>x</think>It ra").tolist(), *codec.encode_rendered("ins.").tolist()]
    drawn += [] if end is None else [end]
    known = answer | {"prompt_token_ids": prompt, "generation_token_ids": drawn}
    found = prompt_of(text, [QUESTION, known, follows], how).token_ids
    assert found[: len(prompt) + len(drawn)] == prompt + drawn
    more = shown_text(codec, found[len(prompt) + len(drawn) :])
    whole = rendered(text, [QUESTION, answer, follows], add_generation_prompt=True)
    assert whole.endswith(more)
    before = whole[: len(whole) - len(more)]
    assert before.count(QUESTION["content"]) == 1 and QUESTION["content"] not in more
    # Before it the template has the answer, and the end that was drawn.
    last = ARGUMENTS[0]["city"] if calls else "It rains."
    tail = before[before.rindex(last) + len(last) :]
    drawn_end = "<|end|>" if family == "gpt-oss" and not calls else FAMILIES[family].ends[calls]
    assert tail.endswith(drawn_end) if ended else not tail.strip()
    assert follows["content"] in more


def test_a_template_that_begins_with_the_end_token_has_each_turn_once(tmp_path: Path) -> None:
    """The end token of the tokenizer is at the beginning alone; turns end with another one."""
    tokenizer = tokenizer_with("qwen3", "")
    tokenizer.chat_template = "{{- eos_token }}" + str(tokenizer.chat_template)
    tokenizer.save_pretrained(tmp_path)
    text = GatewayTokenizer(TextCodec(tmp_path), tmp_path)
    codec, how = text.codec(""), Rendering(None, {}, None, False)
    prompt = prompt_of(text, [QUESTION], how).token_ids
    drawn = [*codec.encode_rendered("It ra").tolist(), *codec.encode_rendered("ins.").tolist()]
    drawn.append(codec.special_tokens["<|im_end|>"])
    answer = {"role": "assistant", "content": "It rains.", "prompt_token_ids": prompt, "generation_token_ids": drawn}
    found = prompt_of(text, [QUESTION, answer, {"role": "user", "content": "And?"}], how).token_ids
    shown = shown_text(codec, found)
    assert found[: len(prompt) + len(drawn)] == prompt + drawn and shown.startswith("</s>")
    assert [shown.count(turn) for turn in (QUESTION["content"], "It rains.", "And?", "</s>")] == [1, 1, 1, 1]
    text.close()


def test_content_reaches_the_template_as_transformers_passes_it(family: str, text: GatewayTokenizer) -> None:
    tokenizer: PreTrainedTokenizerFast = tokenizer_of(family)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    takes_text, takes_parts = text.turns(None).takes("user")
    for content in ("one two", parts):
        if not (takes_text if isinstance(content, str) else takes_parts):
            continue
        messages = [{"role": "user", "content": content}]
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found = prompt_of(text, messages, Rendering(None, {}, None, False)).token_ids
        assert shown_text(text.codec(""), found) == wanted
    if not takes_parts:  # vLLM joins the parts like this, too
        found = prompt_of(text, [{"role": "user", "content": parts}], Rendering(None, {}, None, False)).token_ids
        assert "one\ntwo" in shown_text(text.codec(""), found)


def test_a_template_that_takes_lists_alone_gets_lists() -> None:
    seen: list[Any] = []

    def render(messages: list[dict[str, Any]], tools: Any, options: Any) -> str:
        seen.append(messages)
        return "".join(part["text"] for message in messages for part in message["content"] if isinstance(part, dict))

    turns = ChatTurns(render)
    assert turns.takes("user") == (False, True)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "glm-4.5", "kimi-k2"])
def test_a_thought_that_goes_on_in_its_own_tokens_is_open(texts: dict[str, GatewayTokenizer], family: str) -> None:
    """The template closes the thought of the message, which was cut short."""
    text, asking = texts[family], Rendering(None, {}, None, False)
    first = prompt_of(text, [QUESTION], asking)
    said = "half a" if "<think>" in first.begun else "<think>\nhalf a"
    kept = DrawnTurn(1, first.token_ids, text.codec("").encode_rendered(said).tolist())
    begun = [QUESTION, {"role": "assistant", "reasoning_content": "half a"}]
    going_on = Rendering(None, {"continue_final_message": True}, None, False)
    found = prompt_of(text, begun, going_on, kept)
    assert found.token_ids == kept.prompt + kept.answer
    assert found.begun == first.begun + said and "</think>" in prompt_of(text, begun, going_on).begun
