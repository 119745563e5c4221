"""vLLM's dialect: token ids in, token ids out; `/tokenize`; the admin endpoints.

Answers of `/inference/v1/generate` have no text. Tokens are named `token_id:N`, and have the integer as `token_id`.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rollout.config.gateway_settings import ExpertFormat
from rollout_gateway.answers.answer_facts import choice_facts, experts_of, prompt_facts, prompt_ids, usage
from rollout_gateway.answers.logprobs import LogprobFormat
from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.prompts.chat_messages import Rendering, render_chat
from rollout_gateway.prompts.kv_hints import ForkField
from rollout_gateway.prompts.sampling import MAX_TOKEN_ID, MOST_IDS, RequestFields, SamplingBody, TokenId
from rollout_gateway.requests.call import Call, StreamedChunk, check_stream, fork_fields
from rollout_gateway.requests.chat_body import Tool
from rollout_gateway.requests.http_request import POST, Endpoint, HttpRequest
from rollout_gateway.workers.workers import TokenRequest
from trainer_bridge.client.media import MediaItem
from trainer_bridge.client.results import Completion, GenerateResult
from trainer_bridge.wire.media_hash import PIXEL_TYPES
from trainer_bridge.wire.request_fields import MAX_TOP_LOGPROBS

_PIXELS: dict[str, np.dtype[Any]] = {name: dtype for dtype, name in PIXEL_TYPES.items()}
#: The experts of a completion, from a position on, in the form of an answer.
ShowExperts = Callable[[Completion, int], Any]


def _npy_file(array: np.ndarray) -> str:
    """Base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _npy(completion: Completion, start: int) -> str:
    return _npy_file(experts_of(completion, start))


def _described(completion: Completion, start: int) -> dict[str, Any]:
    """Base64 with shape, start and dtype."""
    kept = np.ascontiguousarray(experts_of(completion, start))
    return {
        "data": base64.b64encode(kept.tobytes()).decode(),
        "shape": list(kept.shape),
        "start": start,
        "dtype": str(kept.dtype),
    }


def _nested(completion: Completion, start: int) -> list[Any]:
    """Nested lists of integers."""
    found: list[Any] = experts_of(completion, start).tolist()
    return found


_FORMS: dict[ExpertFormat, ShowExperts | None] = {"off": None, "npy": _npy, "object": _described}


_NO_TOKEN = -1  # fills rows of chosen tokens up
#: A token that is scored, or -1 for none.
ChosenId = Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)]


class GenerateParams(SamplingBody):
    """The `sampling_params` of a request."""

    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprob_token_ids: list[ChosenId] | list[list[ChosenId]] | None = None
    prompt_logprob_start: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    routed_experts_prompt_start: int = Field(0, ge=0, le=MAX_TOKEN_ID)


class GenerateBody(RequestFields, ForkField):
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
    for position, fields in enumerate(items):
        item = MediaBody.take(fields, f"media.{position}.")
        frames, height, width = item.grid_thw
        try:
            data = base64.b64decode(item.pixel_values, validate=True)
            patches = frames * height * width
            if patches <= 0 or not data or len(data) % patches:
                raise ValueError(f"{len(data)} bytes cannot be divided into {patches} patches")
            values = np.frombuffer(data, _PIXELS[item.dtype]).reshape(patches, -1)
            media.append(MediaItem(item.offset, item.length, (frames, height, width), values, item.seconds_per_frame))
        except ValueError as error:  # base64 raises it, too
            raise bad_request(f"change the pixel values: {error!s:.200}", f"media.{position}.pixel_values") from None
    return tuple(media)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens for the last tokens of a prompt: int32 [K] for each of `rows` tokens, or [rows, K]; -1: no token."""

    rows: int
    ids: np.ndarray

    @classmethod
    def of_vllm(cls, ids: list[int] | list[list[int]], start: int, prompt_tokens: int, within: str) -> ChosenTokens:
        """Rows of `prompt_logprob_token_ids`, one for each token after token `start`. Raises `HttpError`."""
        count, field = prompt_tokens - 1 - start, f"{within}prompt_logprob_token_ids"
        if count < 1:
            raise bad_request(
                f"the prompt has {prompt_tokens} tokens, and none is scored after token {start}; lower it",
                f"{within}prompt_logprob_start",
            )
        rows = [row for row in ids if isinstance(row, list)]
        if ids and not rows:
            return cls(count, np.array(ids, np.int32))
        most = max(map(len, rows), default=0)
        if len(rows) != count or not most:
            raise bad_request(
                f"send a row of tokens for each of the {count} tokens after token {start}, or one list for all", field
            )
        if count * most > MOST_IDS:
            raise bad_request(
                f"{count} rows of up to {most} tokens are more than {MOST_IDS} tokens; send shorter rows", field
            )
        filled = np.full((count, most), _NO_TOKEN, np.int32)
        for row, given in zip(filled, rows, strict=True):
            row[: len(given)] = given
        return cls(count, filled)

    def worker_ids(self, scored: int) -> np.ndarray:
        """The worker's ids if it scores the last `scored` tokens of the prompt, at least `rows`."""
        ids = np.where(self.ids == _NO_TOKEN, 0, self.ids)
        return ids if ids.ndim == 1 else np.pad(ids, ((scored - self.rows, 0), (0, 0)))

    def npy(self, result: GenerateResult) -> str | None:
        """Base64 of a .npy file, as vLLM answers: float32 [rows, K], -inf for no token. None if it was cut short."""
        scores = result.prompt_chosen_logprobs
        assert scores is not None, "they were asked for"
        scores = np.where(self.ids == _NO_TOKEN, np.float32(-np.inf), scores[-self.rows :])
        return None if np.isnan(scores).any() else _npy_file(scores.astype(np.float32))


async def generate(request: HttpRequest[GenerateBody]) -> Any:
    """Complete token ids; with `--routed-experts` also experts."""
    return await _generate(request, _FORMS[request.gateway.settings.routed_experts])


async def generate_with_experts(request: HttpRequest[GenerateBody]) -> Any:
    """Complete token ids. Experts are nested lists."""
    return await _generate(request, _nested)


async def _generate(request: HttpRequest[GenerateBody], show: ShowExperts | None) -> Any:
    """The answer to a request, or the events of its stream. `show`: how experts look; None: the answer has none."""
    body, gateway = request.body, request.gateway
    if body.fork is None and not body.token_ids:
        raise bad_request("send at least one token", "token_ids")
    params = GenerateParams.take(body.sampling_params, "sampling_params.")
    session, routing = request.placement()
    by_position = {"sampling_params.prompt_logprob_token_ids": params.prompt_logprob_token_ids is not None}
    forked = fork_fields(body, body.return_token_ids or params.prompt_logprobs is not None, by_position)
    chosen = _chosen(params, len(body.token_ids))
    check_stream(body.stream, params.prompt_logprobs is not None or chosen is not None or show is not None)
    fields = params.worker_fields("sampling_params.") | gateway.thinking_fields(params, "sampling_params.")
    fields |= routing | forked
    if chosen is not None:
        scored = chosen.rows if params.prompt_logprobs is None else len(body.token_ids)
        fields |= {"prompt_logprobs_last": scored, "prompt_logprob_token_ids": chosen.worker_ids(scored)}
    fields |= await gateway.request_fields(body)
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
            self._call.gateway.model.text,
            prompt_ids(self._call.requests[0], result),
            result,
            body,
            self._params.prompt_logprobs,
        )

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
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
            **choice_facts(part, self._params, self._body, start),
        }
        if self._show is not None:
            choice["routed_experts"] = self._show(part, self._params.routed_experts_prompt_start)
        return choice


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


ENDPOINTS = (
    Endpoint(POST, "/inference/v1/generate", "vLLM", generate, GenerateBody, for_client=True),
    Endpoint(POST, "/skyrl/v1/generate", "SkyRL", generate_with_experts, GenerateBody, for_client=True),
    Endpoint(POST, "/tokenize", "vLLM", tokenize, TokenizeBody),
    Endpoint(POST, "/detokenize", "vLLM", detokenize, DetokenizeBody),
)
