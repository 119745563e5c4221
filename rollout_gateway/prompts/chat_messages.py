"""Chat messages: from OpenAI's form to what chat templates take, and from there to token ids.

Content reaches a template as in transformers, as a text or a list of parts, if the template takes this form; otherwise
in the other one. Arguments of tool calls become maps, unless the template takes their text.

The tokens of an earlier answer may be known: the gateway has kept them, or the answer's message carries them
(`prompt_token_ids`, `generation_token_ids`, as NeMo Gym sends them back). Then the prompt begins with exactly these
tokens, and only the text after them is tokenized. So a conversation never drifts from the tokens that the model drew.
"""

import json
from dataclasses import dataclass
from typing import Any

from rollout.text.codec import TextCodec
from rollout_gateway.formats.chat_turns import ChatTurns
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.http.json_text import encodable, json_text
from rollout_gateway.prompts.gateway_model import GatewayModel
from rollout_gateway.prompts.image_processor import ImageProcessor
from rollout_gateway.prompts.sampling import MAX_TOKEN_ID
from rollout_gateway.prompts.tokenizer import GatewayTokenizer, shown_text
from trainer_bridge.client.media import MediaItem

_MAX_MESSAGES = 65_536
_ROLES = ("system", "user", "assistant", "tool")
#: The fields of messages in which NeMo Gym keeps tokens and log-probs.
_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "generation_logprobs")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt of a conversation. `begun`: the part of the answer that the prompt has, such as `<think>`."""

    token_ids: list[int]
    begun: str
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendering:
    """The fields of a request that say how to render its messages."""

    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    template: str | None
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class DrawnTurn:
    """The tokens of an earlier answer and of its prompt. `position`: the position of the answer among the messages."""

    position: int
    prompt: list[int]
    answer: list[int]


async def render_chat(
    model: GatewayModel, messages: list[Any], how: Rendering, kept: DrawnTurn | None = None
) -> RenderedChat:
    """The prompt of messages; `kept` are the tokens of an earlier answer among them. Raises `HttpError`."""
    if not 1 <= len(messages) <= _MAX_MESSAGES:
        raise bad_request(f"send 1 to {_MAX_MESSAGES} messages", "messages")
    if how.template is not None and not model.trusts_templates:
        raise bad_request(
            "a chat template is a program; start the gateway with --trust-request-chat-template to accept it",
            "chat_template",
        )
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_request("each message must be an object with a 'role' (a string)", f"messages.{position}.role")
    urls = image_urls(messages)
    if urls and model.images is None:
        raise bad_request("this gateway has no image processor for its model; send text alone", urls[0][1])
    chat = await model.text.on_thread(lambda: prompt_of(model.text, messages, how, kept))
    return await _with_images(model.images, chat, urls)


def prompt_of(
    source: GatewayTokenizer, messages: list[dict[str, Any]], how: Rendering, kept: DrawnTurn | None = None
) -> RenderedChat:
    """The prompt of messages without their images. It may take long. Raises `HttpError` and `RolloutError`.

    Tokens that messages carry come first; they must fit. `kept` ones are not used where they do not.
    """
    codec, turns, sent = source.codec("messages"), source.turns(how.template), _drawn_tokens(messages)
    plain = [_plain(message, f"messages.{position}", turns) for position, message in enumerate(messages)]
    text = turns.text(plain, how.tools, how.options)
    begun = turns.begun(text)
    drawn = sent or kept
    after = None if drawn is None else _text_after(codec, turns, plain, drawn, how)
    if sent is not None and (after is None or not _asks(codec, plain[: sent.position], sent.prompt)):
        raise bad_request(
            "the tokens of this answer do not belong to these messages: "
            + ("the chat template does not show where it ends" if after is None else "its prompt has other texts")
            + "; remove 'generation_token_ids'",
            f"messages.{sent.position}.generation_token_ids",
        )
    if drawn is None or after is None:
        encode = codec.encode if how.add_special_tokens else codec.encode_rendered
        return RenderedChat(encode(text).tolist(), begun)
    tokens = drawn.prompt + drawn.answer + codec.encode_rendered(after).tolist()
    if not after:  # the answer itself goes on: a template closes thoughts that the model has not
        begun = turns.begun(shown_text(codec, tokens))
    return RenderedChat(tokens, begun)


def _text_after(
    codec: TextCodec, turns: ChatTurns, plain: list[dict[str, Any]], drawn: DrawnTurn, how: Rendering
) -> str | None:
    """The text of the prompt after a drawn answer; None if the template does not show where that ends."""
    last = drawn.answer[-1:]
    special = last and last[0] in codec.special_tokens.values()
    if how.options.get("continue_final_message") and drawn.position == len(plain) - 1:
        return None if special else ""  # the answer itself goes on
    return turns.after(plain, drawn.position, shown_text(codec, last) if special else "", how.tools, how.options)


def _asks(codec: TextCodec, messages: list[dict[str, Any]], prompt: list[int]) -> bool:
    """True if a prompt has the users' texts of these messages, in their order."""
    text, at = shown_text(codec, prompt), 0
    for message in messages:
        if message["role"] == "user":
            for said in _texts(message["content"]):
                # The tokenizer may have changed the text.
                known = shown_text(codec, codec.encode_rendered(said.strip()).tolist()).strip()
                at = text.find(known, at)
                if at < 0:
                    return False
                at += len(known)
    return True


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if part["type"] == "text"]


async def _with_images(images: ImageProcessor | None, chat: RenderedChat, urls: list[tuple[str, str]]) -> RenderedChat:
    """The prompt with the images of its messages."""
    if images is None or not urls:  # the worker reports placeholders without images
        return chat
    expanded, media = images.expand(chat.token_ids, await images.process(urls))
    return RenderedChat(expanded, chat.begun, media)


def image_urls(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The URLs of the images of messages, with the names of their fields."""
    return [
        (_image_url(part, f"{field}.image_url"), f"{field}.image_url.url")
        for position, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for number, part in enumerate(message["content"])
        if isinstance(part, dict) and part.get("type") == "image_url"
        for field in (f"messages.{position}.content.{number}",)
    ]


def _plain(message: dict[str, Any], field: str, turns: ChatTurns) -> dict[str, Any]:
    """A message as the chat template takes it."""
    plain = {name: value for name, value in message.items() if name not in _TOKEN_FIELDS and value is not None}
    role = message["role"]
    if role not in _ROLES and not any(turns.takes(role)):
        if role != "developer":
            raise bad_request(
                f"the chat template leaves out messages of the role {role!r:.80}; use {', '.join(_ROLES)}",
                f"{field}.role",
            )
        plain["role"] = role = "system"
    form = None
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        if not isinstance(calls, list):
            raise bad_request("'tool_calls' is a list", f"{field}.tool_calls")
        form = turns.call_form() if calls else None
        as_text = form is not None and form.as_text
        plain["tool_calls"] = [
            _call(call, f"{field}.tool_calls.{position}", as_text) for position, call in enumerate(calls)
        ]
    content = _content(message.get("content"), f"{field}.content")
    if form is not None and not content:
        plain["content"] = form.content
    else:
        plain["content"] = _in_form(content, *turns.takes(role))
    return plain


def _in_form(content: str | list[dict[str, Any]], takes_text: bool, takes_parts: bool) -> Any:
    """A content as a text or as a list of parts, whichever the template takes; as it is if it takes both or neither."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if takes_parts and not takes_text else content
    images = any(part["type"] == "image" for part in content)
    return "\n".join(part["text"] for part in content) if takes_text and not takes_parts and not images else content


def _content(content: Any, field: str) -> str | list[dict[str, Any]]:
    """A text, or a list of texts and images."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("'content' must be a string or a list of parts", field)
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(content):
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else None
        if kind == "image_url":
            parts.append({"type": "image"})
        elif kind in ("text", "input_text", "output_text"):
            text = part if isinstance(part, str) else part.get("text")
            if not isinstance(text, str):
                raise bad_request("'text' is a string", f"{field}.{position}.text")
            parts.append({"type": "text", "text": text})
        else:
            raise bad_request(
                "this gateway takes parts of the types 'text' and 'image_url'", f"{field}.{position}.type"
            )
    return parts


def _image_url(part: dict[str, Any], field: str) -> str:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url:
        raise bad_request('send {"type": "image_url", "image_url": {"url": ...}}', field)
    return url


def _call(call: Any, field: str, as_text: bool) -> dict[str, Any]:
    """A tool call whose arguments are a map, or the text of a map."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request("a tool call needs a 'function' with a 'name'", f"{field}.function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            decoded = encodable(json.loads(arguments or "{}"))
        except (ValueError, RecursionError):
            raise bad_request("'arguments' is JSON text", f"{field}.function.arguments") from None
        arguments = arguments if as_text else decoded
    elif as_text:
        arguments = json_text(arguments)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _drawn_tokens(messages: list[dict[str, Any]]) -> DrawnTurn | None:
    """The tokens of the last answer that brings its tokens; None if no answer does."""
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        if message["role"] != "assistant" or message.get("generation_token_ids") is None:
            continue
        field = f"messages.{position}"
        return DrawnTurn(
            position, _ids(message, "prompt_token_ids", field), _ids(message, "generation_token_ids", field)
        )
    return None


def _ids(message: dict[str, Any], name: str, field: str) -> list[int]:
    ids = message.get(name)
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in ids):
        raise bad_request(f"{name!r} is a list of token ids", f"{field}.{name}")
    return ids
