"""vLLM's `/inference/v1/generate`, and SkyRL's `/skyrl/v1/generate`: token ids in, token ids out.

Answers have no text. Tokens are named `token_id:N`, and have the integer as `token_id`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rollout.config.gateway_settings import ExpertFormat
from rollout.gateway.answers import routed_experts
from rollout.gateway.answers.logprobs import LogprobFormat
from rollout.gateway.dialects.answer_facts import (
    check_fork,
    end_facts,
    prompt_facts,
    prompt_ids,
    usage,
    version_runs,
)
from rollout.gateway.dialects.call import Call, StreamedChunk
from rollout.gateway.dialects.handling import HttpRequest
from rollout.gateway.http.bodies import Body
from rollout.gateway.http.http_errors import bad_request
from rollout.gateway.prompts.chosen_tokens import ChosenTokens
from rollout.gateway.prompts.kv_hints import ForkField, KvFields
from rollout.gateway.prompts.sampling import (
    MAX_TOKEN_ID,
    MAX_TOP,
    CacheSalt,
    Int32,
    SamplingBody,
    StreamOptions,
    StreamOptionsField,
    TokenId,
)
from rollout.gateway.workers.workers import TokenRequest
from trainer_bridge.client.media import MediaItem
from trainer_bridge.client.results import Completion
from trainer_bridge.wire.media_hash import PIXEL_TYPES

_PIXELS: dict[str, np.dtype[Any]] = {name: dtype for dtype, name in PIXEL_TYPES.items()}
#: The experts of a completion, from a position on, in the form of an answer.
ShowExperts = Callable[[Completion, int], Any]
_FORMS: dict[ExpertFormat, ShowExperts | None] = {
    "off": None,
    "npy": routed_experts.npy,
    "object": routed_experts.described,
}


#: A token that is scored, or -1 for none.
ChosenId = Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)]


class GenerateParams(SamplingBody):
    """The `sampling_params` of a request."""

    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    prompt_logprob_token_ids: list[ChosenId] | list[list[ChosenId]] | None = None
    prompt_logprob_start: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    routed_experts_prompt_start: int = Field(0, ge=0, le=MAX_TOKEN_ID)


class GenerateBody(KvFields, ForkField):
    """The body of `/inference/v1/generate`."""

    switched_off: ClassVar = {
        "features": (None,),
        "content_parts": (None, []),
        "kv_transfer_params": (None,),
        "ec_transfer_params": (None,),
    }

    token_ids: list[TokenId] = []
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
                raise ValueError(f"{len(data)} bytes cannot be divided into {patches} patches")
            values = np.frombuffer(data, _PIXELS[item.dtype]).reshape(patches, -1)
            media.append(MediaItem(item.offset, item.length, (frames, height, width), values, item.seconds_per_frame))
        except ValueError as error:  # base64 raises it, too
            raise bad_request(f"change the pixel values: {error!s:.200}", f"media.{place}.pixel_values") from None
    return tuple(media)


async def generate(request: HttpRequest[GenerateBody]) -> Any:
    """Complete token ids. The flag `--routed-experts` says whether the answer has experts."""
    return await _generate(request, _FORMS[request.gateway.settings.routed_experts])


async def generate_with_experts(request: HttpRequest[GenerateBody]) -> Any:
    """Complete token ids. The answer has the experts of all tokens as nested lists."""
    return await _generate(request, routed_experts.nested)


async def _generate(request: HttpRequest[GenerateBody], show: ShowExperts | None) -> Any:
    """The answer to a request, or the events of its stream. `show`: how experts look; None: the answer has none."""
    body, gateway = request.body, request.gateway
    if body.fork is None and not body.token_ids:
        raise bad_request("send at least one token", "token_ids")
    params = GenerateParams.take(body.sampling_params, "sampling_params.")
    session, place = request.placement()
    if body.fork is not None and params.prompt_logprob_token_ids is not None:
        raise bad_request(
            "the gateway does not know the positions of a fork's prompt; remove this field or 'fork'",
            "sampling_params.prompt_logprob_token_ids",
        )
    chosen = _chosen(params, len(body.token_ids))
    if body.stream and (params.prompt_logprobs is not None or chosen is not None or show is not None):
        raise bad_request("a stream has neither experts nor log-probs of the prompt; remove 'stream'", "stream")
    fields = params.worker_fields("sampling_params.") | gateway.thinking_fields(params, "sampling_params.") | place
    if body.fork is not None:
        check_fork(body.stream, body.return_token_ids, body.stream_options)
        fields["return_prompt_ids"] = body.return_token_ids or params.prompt_logprobs is not None
    if chosen is not None:
        scored = chosen.rows if params.prompt_logprobs is None else len(body.token_ids)
        fields |= {"prompt_logprobs_last": scored, "prompt_logprob_token_ids": chosen.worker_ids(scored)}
    fields |= {"adapter": await gateway.adapter_of(body.model), "priority": -body.priority}
    fields["cache_salt"] = body.cache_salt
    fields |= {"logprobs": params.logprobs or 0, "return_routing": "all" if show is not None else False}
    request_id = request.id("", body.request_id)
    names = params.worker_names("token_ids", "sampling_params.")
    names["prompt_logprob_token_ids"] = "sampling_params.prompt_logprob_token_ids"
    media = await asyncio.to_thread(media_of, body.media)
    call = Call(gateway, request_id, [TokenRequest(body.token_ids, fields, params.n, names, media)], session)
    answer = _Answer(call, body, params, show, chosen)
    return answer.events() if body.stream else await answer.whole()


def _chosen(params: GenerateParams, prompt_tokens: int) -> ChosenTokens | None:
    """The tokens that a request has scored at positions of its prompt. Raises `HttpError`."""
    if params.prompt_logprob_token_ids is None:
        if params.prompt_logprob_start is not None:
            raise bad_request(
                "'prompt_logprob_start' needs 'prompt_logprob_token_ids'; add them or remove it",
                "sampling_params.prompt_logprob_start",
            )
        return None
    start = params.prompt_logprob_start or 0
    return ChosenTokens.of_vllm(params.prompt_logprob_token_ids, start, prompt_tokens, "sampling_params.")


class _Answer:
    """The answer to a call."""

    def __init__(
        self,
        call: Call,
        body: GenerateBody,
        params: GenerateParams,
        show: ShowExperts | None,
        chosen: ChosenTokens | None,
    ) -> None:
        self._call = call
        self._body = body
        self._params = params
        self._show = show
        self._chosen = chosen
        self._logprobs: LogprobFormat | None = None
        if params.logprobs is not None:
            self._logprobs = call.gateway.logprob_format(params.logprobs, by_id=True)

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        (result,) = await self._call.whole()
        body, chosen = self._body, self._chosen
        scores = {}
        if chosen is not None:
            scores["prompt_token_id_logprobs"] = await asyncio.to_thread(chosen.npy, result)
        return {
            "request_id": self._call.id,
            "choices": [self._choice(completion, 0) for completion in result.completions],
            "prompt_logprobs": None,
            "usage": usage([result]),
            **scores,
        } | await prompt_facts(
            self._call.gateway,
            prompt_ids(self._call.requests[0], result),
            result,
            self._params.prompt_logprobs,
            body.return_weight_versions,
            body.return_token_ids,
        )

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of the stream."""
        first = {"prompt_token_ids": self._body.token_ids} if self._body.return_token_ids else {}

        def event(each: StreamedChunk) -> dict[str, Any]:
            found = {"choices": [self._choice(each.chunk.part, each.chunk.offset)]} | first
            first.clear()
            return found

        return self._call.events({"request_id": self._call.id}, self._body.stream_options, event)

    def _choice(self, part: Completion, start: int) -> dict[str, Any]:
        """A choice, or the new tokens of one."""
        choice: dict[str, Any] = {
            "index": part.index,
            "token_ids": part.token_ids.tolist(),
            "logprobs": None if self._logprobs is None else self._logprobs.content(part),
            **end_facts(part, self._params),
        }
        if self._show is not None:
            choice["routed_experts"] = self._show(part, self._params.routed_experts_prompt_start)
        if self._body.return_weight_versions:
            choice["weight_versions"] = version_runs(part, start)
        return choice
