"""SGLang's dialect, as slime and routers use it: `/generate` and the admin endpoints.

The answer to one prompt is an object, to several prompts or `n` > 1 a list of objects. Every event of a stream has the
whole text up to this event, as in SGLang.
"""

import base64
import math
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rollout_gateway.answers.answer_facts import REPETITION, end_facts, experts_of, fault, prompt_ids
from rollout_gateway.answers.logprobs import finite
from rollout_gateway.answers.text_pieces import text_pieces, worker_decodes
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.prompts.kv_hints import ForkField, KvFields
from rollout_gateway.prompts.sampling import MAX_TOKEN_ID, Int32, SamplingBody, TokenId
from rollout_gateway.requests.call import Call, check_stream, fork_fields
from rollout_gateway.requests.http_request import POST, Endpoint, HttpRequest
from rollout_gateway.workers.workers import TokenRequest
from trainer_bridge.client.results import Completion, GenerateResult
from trainer_bridge.wire.request_fields import MAX_PROMPT_TOKENS_SCORED

_MAX_PROMPTS = 4096
_STREAM_EVERY = 16  # tokens of an event: each event repeats all earlier text


class CustomParams(Body):
    """The `custom_params` that have a meaning here."""

    thinking_budget: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)


class SglangParams(SamplingBody):
    """The `sampling_params` of a request, for one prompt."""

    switched_off: ClassVar = SamplingBody.switched_off | {
        "prompt_logprobs": (None,),  # here `return_logprob` and `logprob_start_len` ask for them
        "stop_regex": (None, []),
        "structural_tag": (None,),
        "stream_interval": (None,),
    }

    max_new_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    min_new_tokens: int = Field(0, ge=0, le=MAX_TOKEN_ID)
    sampling_seed: int | None = Field(None, ge=0, lt=2**63)
    no_stop_trim: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    custom_params: dict[str, Any] = {}

    def thought_budget(self, within: str = "") -> tuple[int | None, str]:
        """See `SamplingBody`; SGLang's name for it is `custom_params.thinking_budget`."""
        custom = CustomParams.take(self.custom_params, f"{within}custom_params.")
        if custom.thinking_budget is None:
            return super().thought_budget(within)
        if self.thinking_token_budget is not None:
            raise bad_request(
                "send this or 'custom_params.thinking_budget', not both", f"{within}thinking_token_budget"
            )
        budget = None if custom.thinking_budget == -1 else custom.thinking_budget
        return budget, f"{within}custom_params.thinking_budget"

    def response_constraint(self, within: str) -> dict[str, Any] | None:
        """SGLang's constraints."""
        kinds = (("json_schema", self.json_schema), ("regex", self.regex), ("grammar", self.ebnf))
        given = {name: value for name, value in kinds if value is not None}
        if len(given) > 1:
            raise bad_request("send one of json_schema, regex and ebnf", within + next(iter(given)))
        return given or None

    def worker_names(self, prompt: str, within: str = "") -> dict[str, str]:
        """See `SamplingBody`."""
        names = super().worker_names(prompt, within)
        names |= {
            ours: within + theirs
            for ours, theirs in (
                ("sampling.seed", "sampling_seed"),
                ("max_tokens", "max_new_tokens"),
                ("stop.min_tokens", "min_new_tokens"),
            )
            if getattr(self, theirs)
        }
        if self.response_constraint(within) is not None:
            names |= {f"constraint.{kind}": within + kind for kind in ("json_schema", "regex")}
            names["constraint.grammar"] = f"{within}ebnf"
        return names

    def worker_fields(self, within: str = "") -> dict[str, Any]:
        """The arguments of `generate`."""
        fields = super().worker_fields(within)
        for ours, theirs in (("seed", "sampling_seed"), ("max_tokens", "max_new_tokens")):
            if getattr(self, theirs) is not None:
                fields[ours] = getattr(self, theirs)
        if self.min_new_tokens:
            fields["stop"]["min_tokens"] = self.min_new_tokens
        return fields


class SglangBody(KvFields, ForkField):
    """The body of `/generate`."""

    ignored: ClassVar = {
        "log_metrics": "metrics are always counted",
        "require_reasoning": "thoughts are found in the tokens; SGLang has it for a budget of thoughts",
    }
    switched_off: ClassVar = {
        "return_text_in_logprobs": (None, False),
        "return_bytes": (None, False),
        "bootstrap_host": (None,),
        "bootstrap_port": (None,),
        "bootstrap_room": (None,),
        "image_data": (None, []),
        "video_data": (None, []),
        "audio_data": (None, []),
        "input_embeds": (None,),
        "return_hidden_states": (None, False),
        "session_params": (None,),
        "custom_logit_processor": (None,),
        "model": (None,),  # sglang-router adds these
        "background": (None, False),
        "no_logs": (None, False),
        "return_entropy": (None, False),
    }

    text: str | Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS)] | None = None
    input_ids: list[TokenId] | Annotated[list[list[TokenId]], Field(min_length=1, max_length=_MAX_PROMPTS)] | None = (
        None
    )
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    rid: str | list[str] | None = None
    return_logprob: bool = False
    logprob_start_len: Int32 = -1
    top_logprobs_num: int = Field(0, ge=0, le=MAX_PROMPT_TOKENS_SCORED)
    token_ids_logprob: list[TokenId] | list[list[TokenId]] | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = Field(0, ge=0, le=MAX_TOKEN_ID)
    stream: bool = False
    lora_path: str | None = None
    priority: Int32 = 0

    @property
    def several(self) -> bool:
        """True if the answer is a list."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    @property
    def prompts(self) -> dict[str, str | list[int]]:
        """All prompts, by the names of their fields."""
        if self.fork is not None and self.text is None and self.input_ids is None:
            return {"input_ids": []}
        if (self.text is None) == (self.input_ids is None):
            raise bad_request("send exactly one of 'text' and 'input_ids'", "text")
        name, given = ("text", self.text) if self.text is not None else ("input_ids", self.input_ids)
        found: Any = given
        return (
            {f"{name}.{position}": prompt for position, prompt in enumerate(found)} if self.several else {name: found}
        )

    def chosen(self, count: int) -> list[list[int]]:
        """The tokens that are scored at each position of each prompt. Raises `HttpError`."""
        ids = self.token_ids_logprob or []
        if ids and (not self.return_logprob or self.logprob_start_len < 0):
            raise bad_request(
                "this field asks for log-probs at positions of the prompt: set 'return_logprob', and set "
                "'logprob_start_len' to the first position",
                "token_ids_logprob",
            )
        rows = [row for row in ids if isinstance(row, list)]
        if not rows:
            return [[token for token in ids if isinstance(token, int)]] * count
        if len(rows) != count:
            raise bad_request(f"send tokens for each of the {count} prompts, or one list for all", "token_ids_logprob")
        return rows

    def scored(self, prompt: list[int]) -> int:
        """The number of prompt tokens that are scored. Raises `HttpError`."""
        start = self.logprob_start_len
        if start >= len(prompt):
            message = f"the prompt has {len(prompt)} tokens; name a token from 0 to {len(prompt) - 1}"
            raise bad_request(message, "logprob_start_len")
        return len(prompt) - start

    def params(self, count: int) -> list[tuple[str, SglangParams]]:
        """The sampling parameters of each prompt, with the beginning of the names of their fields."""
        if isinstance(self.sampling_params, dict):
            return [("sampling_params.", SglangParams.take(self.sampling_params, "sampling_params."))] * count
        if len(self.sampling_params) != count:
            raise bad_request(f"send parameters for each of the {count} prompts", "sampling_params")
        positions = ((f"sampling_params.{position}.", params) for position, params in enumerate(self.sampling_params))
        return [(position, SglangParams.take(params, position)) for position, params in positions]


async def generate(request: HttpRequest[SglangBody]) -> Any:
    """Complete texts or token ids. Several prompts are answered by a list."""
    body, gateway, text = request.body, request.gateway, request.gateway.model.text
    prompts = body.prompts
    params = body.params(len(prompts))
    session, routing = request.placement(request.headers.get("x-smg-routing-key") or None)
    scored = body.return_logprob and body.logprob_start_len >= 0
    common: dict[str, Any] = routing | {
        "adapter": await gateway.adapter_of(body.lora_path),
        "priority": body.priority,
        "prompt_logprobs": scored,
        "return_routing": "all" if body.return_routed_experts else False,
    }
    if scored and body.top_logprobs_num:
        common["prompt_top_logprobs"] = body.top_logprobs_num
    check_stream(body.stream, scored or body.return_routed_experts)
    common |= fork_fields(body, scored, {"logprob_start_len": scored and body.logprob_start_len > 0})
    requests, chosen = [], body.chosen(len(prompts))
    for (name, prompt), (within, each), tokens in zip(prompts.items(), params, chosen, strict=True):
        ids = await text.encode(prompt, body.fork is None, name) if isinstance(prompt, str) else prompt
        fields = each.worker_fields(within) | gateway.thinking_fields(each, within) | common
        fields |= {"return_text": worker_decodes(text, each)}
        if body.return_logprob and each.max_new_tokens != 0:
            fields["logprobs"] = body.top_logprobs_num
        if scored and body.fork is None:
            fields["prompt_logprobs_last"] = body.scored(ids)
        if tokens:
            fields["prompt_logprob_token_ids"] = tokens
        names = each.worker_names(name, within) | {
            **dict.fromkeys(("logprobs", "prompt_top_logprobs"), "top_logprobs_num"),
            "prompt_logprob_token_ids": "token_ids_logprob",
        }
        requests.append(TokenRequest(ids, fields, each.n, names))
    rid = body.rid if isinstance(body.rid, str) else None
    call = Call(gateway, request.id("", rid), requests, session)
    answer = _Answer(call, body, [each for _, each in params])
    if body.stream:
        return answer.events()
    answers = await answer.whole()
    return answers if body.several or requests[0].n > 1 else answers[0]


class _Answer:
    """The answers to a call."""

    def __init__(self, call: Call, body: SglangBody, params: list[SglangParams]) -> None:
        self._call = call
        self._gateway = call.gateway
        self._body = body
        self._params = params

    async def whole(self) -> list[dict[str, Any]]:
        """The answers without streaming, prompt by prompt."""
        answers = []
        for position, result in enumerate(await self._call.whole()):
            for completion in result.completions:
                views = self._views(position)
                answers.append(self._shown(position, completion, views.take(completion).content, views, result))
        return answers

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of the stream. Each has the whole text and all tokens of its completion up to this event.

        The last event of a completion comes at the end of its request, and has the request's cached tokens and times.
        """
        requests = self._call.requests
        texts = [[""] * request.n for request in requests]
        views = [[self._views(position) for _ in range(request.n)] for position, request in enumerate(requests)]
        ended: list[tuple[int, Completion]] = []
        async with aclosing(self._call.chunks(_STREAM_EVERY)) as found:
            async for each in found:
                position, index = each.position, each.chunk.index
                texts[position][index] += views[position][index].take(each.chunk.part).content
                whole = next(part for part in each.stream.partials() if part.index == index)
                if each.chunk.finish_reason is not None:
                    ended.append((position, whole))
                else:
                    yield self._event(position, whole, texts[position][index], views[position][index], None)
        for position, whole in ended:
            result = self._call.results[position]
            yield self._event(position, whole, texts[position][whole.index], views[position][whole.index], result)

    def _event(
        self, position: int, completion: Completion, text: str, views: CompletionViews, result: GenerateResult | None
    ) -> dict[str, Any]:
        event = self._shown(position, completion, text, views, result)
        requests = self._call.requests
        if self._body.several or requests[position].n > 1:
            event["index"] = sum(request.n for request in requests[:position]) + completion.index
        return event

    def _shown(
        self, position: int, completion: Completion, text: str, views: CompletionViews, result: GenerateResult | None
    ) -> dict[str, Any]:
        """The answer for one completion. `result`: the result of its request, None while the request goes on."""
        request, params = self._call.requests[position], self._params[position]
        several = len(self._call.requests) > 1 or params.n > 1
        # Without tokens it is the version that has scored the prompt.
        version = None if result is None else result.prompt_version
        if completion.versions:
            version = completion.versions[-1][0]
        meta: dict[str, Any] = {
            "id": f"{self._call.id}-{position}-{completion.index}" if several else self._call.id,
            "finish_reason": _finish(completion, params),
            "prompt_tokens": self._prompt_tokens(request, result),
            "completion_tokens": len(completion),
            "cached_tokens": 0 if result is None else result.cached_tokens,
            "weight_version": None if version is None else str(version),
            "weight_versions": [list(run) for run in completion.versions],
            **views.facts(completion),
        }
        if completion.forced:
            meta["forced"] = completion.forced
        if result is not None:
            meta["e2e_latency"] = result.timing.total_s
        if self._body.return_logprob:
            form = self._gateway.logprob_format(self._body.top_logprobs_num, by_id=True)
            tokens = completion.token_ids.tolist()
            pairs = zip(form.sampled(completion), tokens, strict=True)
            meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
            if self._body.top_logprobs_num:
                meta["output_top_logprobs"] = [
                    [[value, token, None] for token, value in top.items()] for top in form.likeliest(completion)
                ]
            if result is not None and result.prompt_logprobs is not None:
                prompt = prompt_ids(request, result)[self._body.logprob_start_len :]
                meta["input_token_logprobs"] = self._entries(result.prompt_logprobs.tolist(), prompt)
                if (tops := result.prompt_tops) is not None:
                    rows = zip(tops.logprobs.tolist(), tops.ids.tolist(), strict=True)
                    meta["input_top_logprobs"] = [None if row[1][0] < 0 else self._entries(*row) for row in rows]
                if result.prompt_chosen_logprobs is not None:
                    meta["input_token_ids_logprobs"] = [
                        None
                        if any(map(math.isnan, row))
                        else self._entries(row, request.fields["prompt_logprob_token_ids"])
                        for row in result.prompt_chosen_logprobs.tolist()
                    ]
        if self._body.return_routed_experts:
            start = self._body.routed_experts_start_len
            experts = experts_of(completion, start).astype("<i4")
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        return {"text": text, "output_ids": completion.token_ids.tolist(), "meta_info": meta}

    def _prompt_tokens(self, request: TokenRequest, result: GenerateResult | None) -> int | None:
        """The number, or None before the end of a stream that continues other tokens."""
        if result is not None:
            return result.prompt_tokens
        return len(request.prompt) if self._body.fork is None else None

    @staticmethod
    def _entries(logprobs: Iterable[float], tokens: Iterable[int]) -> list[list[Any]]:
        return [[finite(value), token, None] for value, token in zip(logprobs, tokens, strict=True)]

    def _views(self, position: int) -> CompletionViews:
        params = self._params[position]
        keep_stop = params.no_stop_trim or params.include_stop_str_in_output
        return CompletionViews(text_pieces(self._gateway.model.text, params, keep_stop))


def _finish(completion: Completion, params: SglangParams) -> dict[str, Any] | None:
    """SGLang's finish reason: null while the completion goes on."""
    match end_facts(completion, params)["finish_reason"]:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": completion.stop}
        case "length":
            return {"type": "length", "length": len(completion)}
        case "repetition":
            return {"type": "stop", "matched": REPETITION}
        case "error":
            return {"type": "abort", "message": str(fault(completion))}
        case _:
            return {"type": "abort", "message": "the request was aborted"}


ENDPOINTS = (Endpoint(POST, "/generate", "SGLang", generate, SglangBody, for_client=True),)
