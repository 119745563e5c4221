"""`/tokenize` and `/detokenize`: token ids of a text or a conversation, and the text of token ids."""

from __future__ import annotations

from typing import Any, ClassVar

from rollout.gateway.dialects.handling import HttpRequest
from rollout.gateway.http.bodies import Body
from rollout.gateway.http.http_errors import bad_request
from rollout.gateway.prompts.chat_messages import Rendering, render_chat
from rollout.gateway.prompts.sampling import TokenId
from rollout.gateway.prompts.tool_choice import Tool


class TokenizeBody(Body):
    """The body of `/tokenize`: a text, or a conversation."""

    switched_off: ClassVar = {"return_token_strs": (None, False)}

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    tools: list[Tool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


async def tokenize(request: HttpRequest[TokenizeBody]) -> dict[str, Any]:
    """Return the token ids of a text or of a conversation."""
    body, gateway, model = request.body, request.gateway, request.gateway.model
    await gateway.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send exactly one of 'prompt' and 'messages'", "prompt")
    if body.prompt is not None:
        ids = await model.text.encode(body.prompt, body.add_special_tokens is not False)
    else:
        options = dict(body.chat_template_kwargs) | {"add_generation_prompt": body.add_generation_prompt}
        if body.continue_final_message:
            options["continue_final_message"] = True
        how = Rendering(body.tools or None, options, body.chat_template, bool(body.add_special_tokens))
        ids = (await render_chat(model, body.messages or [], how)).token_ids
    return {"count": len(ids), "max_model_len": model.context_tokens, "tokens": ids, "token_strs": None}


async def detokenize(request: HttpRequest[DetokenizeBody]) -> dict[str, Any]:
    """Return the text of token ids, special tokens included."""
    await request.gateway.adapter_of(request.body.model)
    return {"prompt": await request.gateway.model.text.decode(request.body.tokens)}
