"""Chat messages: from OpenAI's form to what chat templates take, and from there to token ids.

Content parts of text are joined unless there are images among them, arguments of tool calls become maps, absent content
becomes "". An assistant message
may carry the tokens of an earlier answer (`prompt_token_ids`, `generation_token_ids`, as NeMo Gym sends them back):
then the prompt begins with exactly these, and only the text after them is tokenized. So a conversation never drifts
from the tokens that the model drew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rollout.gateway.errors import bad_request
from rollout.gateway.gateway import Gateway
from rollout.gateway.sampling import MAX_TOKEN_ID
from trainer_bridge.client.media import MediaItem

_MAX_MESSAGES = 65_536
#: What NeMo Gym keeps in messages beside the tokens.
_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "generation_logprobs")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt of a conversation."""

    text: str
    token_ids: list[int]
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a request wants its messages rendered."""

    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    template: str | None
    add_special_tokens: bool


async def render_chat(gateway: Gateway, messages: list[Any], how: Rendering) -> RenderedChat:
    """The prompt of messages. Raises `HttpError`."""
    if not 1 <= len(messages) <= _MAX_MESSAGES:
        raise bad_request(f"send 1 to {_MAX_MESSAGES} messages", "messages")
    if how.template is not None and not gateway.settings.trust_request_chat_template:
        raise bad_request(
            "a chat template is a program; start the gateway with --trust-request-chat-template to accept it",
            "chat_template",
        )
    urls: list[tuple[str, str]] = []
    plain = [_plain(message, f"messages.{place}", urls) for place, message in enumerate(messages)]
    if urls and gateway.images is None:
        raise bad_request("this gateway has no image processor for its model; send text alone", urls[0][1])
    text = await gateway.text.render(plain, how.tools, how.options, how.template)
    known = _drawn_tokens(messages)
    if known is None:
        return await _with_images(gateway, text, await gateway.text.encode(text, how.add_special_tokens), urls)
    place, drawn = known
    options = how.options | {"add_generation_prompt": False}
    before = await gateway.text.render(plain[: place + 1], how.tools, options, how.template)
    end = await gateway.text.end_of_turn(before, drawn)
    if end is None or not text.startswith(before[:end]):
        raise bad_request(
            "the chat template writes other text before this message than for the earlier answer; remove "
            "'generation_token_ids'",
            f"messages.{place}.generation_token_ids",
        )
    return await _with_images(gateway, text, drawn + await gateway.text.encode(text[end:], False), urls)


async def _with_images(gateway: Gateway, text: str, token_ids: list[int], urls: list[tuple[str, str]]) -> RenderedChat:
    """The prompt with the images of its messages."""
    images = gateway.images
    if images is None or not urls:  # without images the worker says what is wrong with a placeholder
        return RenderedChat(text, token_ids)
    expanded, media = images.expand(token_ids, await images.process(urls))
    return RenderedChat(text, expanded, media)


def _plain(message: Any, field: str, urls: list[tuple[str, str]]) -> dict[str, Any]:
    """A message as chat templates take it; the URLs of its images, with their fields, are added to `urls`."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request("each message is an object with a 'role', a string", f"{field}.role")
    plain = {name: value for name, value in message.items() if name not in _TOKEN_FIELDS and value is not None}
    plain["content"] = _content(message.get("content"), f"{field}.content", urls)
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        if not isinstance(calls, list):
            raise bad_request("'tool_calls' is a list", f"{field}.tool_calls")
        plain["tool_calls"] = [_call(call, f"{field}.tool_calls.{place}") for place, call in enumerate(calls)]
    return plain


def _content(content: Any, field: str, urls: list[tuple[str, str]]) -> str | list[dict[str, str]]:
    """A text; or a list of texts and images, if there are images."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("content is a string, or a list of parts", field)
    parts: list[dict[str, str]] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image_url":
            urls.append((_image_url(part, f"{field}.{place}.image_url"), f"{field}.{place}.image_url.url"))
            parts.append({"type": "image"})
            continue
        if kind not in ("text", "input_text", "output_text"):
            raise bad_request("this gateway takes parts of the types 'text' and 'image_url'", f"{field}.{place}.type")
        if not isinstance(part.get("text"), str):
            raise bad_request("'text' is a string", f"{field}.{place}.text")
        parts.append({"type": "text", "text": part["text"]})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _image_url(part: dict[str, Any], field: str) -> str:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url:
        raise bad_request('send {"type": "image_url", "image_url": {"url": ...}}', field)
    return url


def _call(call: Any, field: str) -> dict[str, Any]:
    """A tool call whose arguments are a map."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request("a tool call has a 'function' with a 'name'", f"{field}.function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise bad_request("'arguments' is JSON text", f"{field}.function.arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _drawn_tokens(messages: list[Any]) -> tuple[int, list[int]] | None:
    """The last message that carries the tokens of its answer: its place, and prompt and answer as token ids."""
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message.get("role") != "assistant" or message.get("generation_token_ids") is None:
            continue
        field = f"messages.{place}"
        return place, _ids(message, "prompt_token_ids", field) + _ids(message, "generation_token_ids", field)
    return None


def _ids(message: dict[str, Any], name: str, field: str) -> list[int]:
    ids = message.get(name)
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in ids):
        raise bad_request(f"{name!r} is a list of token ids", f"{field}.{name}")
    return ids
