"""vLLM's `POST /inference/v1/generate`, and SkyRL's `/skyrl/v1/generate`: token ids in, token ids out.

Answers have no text. Tokens are named `token_id:N`, and have the integer as `token_id`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from rollout.gateway import experts
from rollout.gateway.answers import EventStream, json_answer, unless_gone
from rollout.gateway.bodies import Body
from rollout.gateway.call import Call
from rollout.gateway.errors import bad_request
from rollout.gateway.gateway import Gateway, end_facts, new_id, scores_version, usage, version_runs
from rollout.gateway.logprobs import LogprobFormat, prompt_entries
from rollout.gateway.sampling import (
    MAX_TOKEN_ID,
    MAX_TOP,
    CacheSalt,
    Int32,
    SamplingBody,
    StreamOptions,
    StreamOptionsField,
    TokenId,
)
from rollout.gateway.workers import TokenRequest
from trainer_bridge.client.media import MediaItem
from trainer_bridge.client.results import Completion
from trainer_bridge.wire.media_hash import PIXEL_TYPES

_PIXELS: dict[str, np.dtype[Any]] = {name: dtype for dtype, name in PIXEL_TYPES.items()}
#: A completion's experts, from a position on, as the answer has them.
ShowExperts = Callable[[Completion, int], Any]


class GenerateParams(SamplingBody):
    """The `sampling_params` of a request."""

    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    routed_experts_prompt_start: int = Field(0, ge=0, le=MAX_TOKEN_ID)


class GenerateBody(Body):
    """The body of `/inference/v1/generate`."""

    switched_off: ClassVar = {
        "features": (None,),
        "content_parts": (None, []),
        "kv_transfer_params": (None,),
        "ec_transfer_params": (None,),
    }

    token_ids: list[TokenId] = Field(min_length=1)
    media: list[dict[str, Any]] = []
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=128)
    stream: bool = False
    stream_options: StreamOptionsField = StreamOptions()
    priority: Int32 = 0
    cache_salt: CacheSalt | None = None
    return_token_ids: bool = False
    return_weight_versions: bool = False


def vllm_experts(gateway: Gateway) -> ShowExperts | None:
    """How `/inference/v1/generate` shows experts: as the gateway is set."""
    match gateway.settings.routed_experts:
        case "off":
            return None
        case "npy":
            return lambda completion, start: experts.npy(experts.expert_array(completion)[start:])
        case "object":
            return lambda completion, start: experts.described(experts.expert_array(completion), start)


def skyrl_experts(completion: Completion, start: int) -> Any:
    """SkyRL: nested lists of integers."""
    return experts.expert_array(completion)[start:].tolist()


class MediaBody(Body):
    """An image of a prompt, processed: as in the wire protocol, with the pixel values in base64."""

    offset: int = Field(ge=0, le=MAX_TOKEN_ID)
    length: int = Field(ge=1, le=MAX_TOKEN_ID)
    grid_thw: list[int] = Field(min_length=3, max_length=3)
    dtype: Literal["float32", "float16", "bfloat16"]
    pixel_values: str
    seconds_per_frame: float | None = Field(None, gt=0)


def media_of(items: list[dict[str, Any]]) -> tuple[MediaItem, ...]:
    """The images of a request. Raises `HttpError` that names the item."""
    media = []
    for place, fields in enumerate(items):
        item = MediaBody.take(fields, f"media.{place}.")
        frames, height, width = item.grid_thw
        try:
            data = base64.b64decode(item.pixel_values, validate=True)
            patches = frames * height * width
            if patches <= 0 or not data or len(data) % patches:
                raise ValueError(f"{len(data)} bytes are no rows for {patches} patches")
            values = np.frombuffer(data, _PIXELS[item.dtype]).reshape(patches, -1)
            media.append(MediaItem(item.offset, item.length, (frames, height, width), values, item.seconds_per_frame))
        except ValueError as error:  # also of base64
            raise bad_request(f"change the pixel values: {error!s:.200}", f"media.{place}.pixel_values") from None
    return tuple(media)


class Generate:
    """Answers requests with token ids. `show` says how experts look; None: the answer has none."""

    def __init__(self, gateway: Gateway, show: ShowExperts | None) -> None:
        self._gateway = gateway
        self._show = show

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        gateway = self._gateway
        body = GenerateBody.take(await gateway.body(request))
        params = GenerateParams.take(body.sampling_params, "sampling_params.")
        return await unless_gone(request, self._answer(request, body, params))

    async def _answer(self, request: Request, body: GenerateBody, params: GenerateParams) -> Response:
        gateway = self._gateway
        session, place = gateway.placement(request)
        if body.stream and (params.prompt_logprobs is not None or self._show is not None):
            raise bad_request("a stream has neither experts nor log-probs of the prompt; remove 'stream'", "stream")
        fields = params.worker_fields("sampling_params.") | place
        fields |= {"adapter": await gateway.adapter_of(body.model), "priority": -body.priority}
        fields["cache_salt"] = body.cache_salt
        fields |= {"logprobs": params.logprobs or 0, "return_routing": "all" if self._show is not None else False}
        request_id = new_id("", request, body.request_id)
        request_with_media = TokenRequest(
            body.token_ids, fields, params.n, media=await asyncio.to_thread(media_of, body.media)
        )
        call = Call(
            gateway, request_id, [request_with_media], session, params.worker_names("token_ids", "sampling_params.")
        )
        if body.stream:
            return EventStream(self._events(call, body, params), gateway.settings.send_s)
        (result,) = await call.whole()
        logprobs = self._logprobs(params)
        answer: dict[str, Any] = {
            "request_id": request_id,
            "choices": [self._choice(completion, body, params, logprobs, 0) for completion in result.completions],
            "prompt_logprobs": None,
            "usage": usage([result]),
        }
        if params.prompt_logprobs is not None:
            most, token_bytes = params.prompt_logprobs, gateway.text.token_bytes
            answer["prompt_logprobs"] = await prompt_entries(body.token_ids, result, most, token_bytes)
        if body.return_weight_versions:
            answer |= scores_version(result)
        if body.return_token_ids:
            answer["prompt_token_ids"] = body.token_ids
        return json_answer(answer)

    async def _events(
        self, call: Call, body: GenerateBody, params: GenerateParams
    ) -> AsyncGenerator[dict[str, Any], None]:
        logprobs = self._logprobs(params)
        first = body.return_token_ids
        async with aclosing(call.chunks()) as found:
            async for each in found:
                chunk = each.chunk
                event: dict[str, Any] = {
                    "request_id": call.id,
                    "choices": [self._choice(chunk.part, body, params, logprobs, chunk.offset)],
                }
                if first:
                    event["prompt_token_ids"], first = body.token_ids, False
                yield event | body.stream_options.usage_so_far(len(body.token_ids), chunk)
        if body.stream_options.include_usage:
            yield {"request_id": call.id, "choices": [], "usage": usage(list(call.results.values()))}

    def _logprobs(self, params: GenerateParams) -> LogprobFormat | None:
        return None if params.logprobs is None else self._gateway.logprob_format(params.logprobs, by_id=True)

    def _choice(
        self, part: Completion, body: GenerateBody, params: GenerateParams, logprobs: LogprobFormat | None, start: int
    ) -> dict[str, Any]:
        """A choice, or the new tokens of one."""
        choice: dict[str, Any] = {
            "index": part.index,
            "token_ids": part.token_ids.tolist(),
            "logprobs": None if logprobs is None else logprobs.content(part),
            **end_facts(part, params),
        }
        if self._show is not None:
            choice["routed_experts"] = self._show(part, params.routed_experts_prompt_start)
        if body.return_weight_versions:
            choice["weight_versions"] = version_runs(part, start)
        return choice
