"""The table of all endpoints, from which the application and the reference page of the endpoints are made.

A row says how an endpoint is called, which class reads its body or its URL's parameters, and which handler answers it.
A handler gets an `HttpRequest` and returns what is answered:

    None                  the row's `answer`; without one, status 200 and no body
    a text                plain text
    an async generator    a stream of events, one for each value
    `NamedEvents`         a stream of named events
    a `Response`          itself
    another value         JSON
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rollout.config.gateway_settings import GatewaySettings
from rollout.gateway.dialects import (
    chat,
    chat_body,
    completions,
    health,
    messages,
    messages_body,
    process_groups,
    responses,
    responses_body,
    sglang_admin,
    sglang_generate,
    shared_admin,
    tokenization,
    trajectories,
    vllm_admin,
    vllm_generate,
    worker_extensions,
)
from rollout.gateway.dialects import process_group_bodies as group_bodies
from rollout.gateway.dialects.handling import Gateway, HttpRequest
from rollout.gateway.dialects.tinker import bodies as tinker_bodies
from rollout.gateway.dialects.tinker import handlers as tinker
from rollout.gateway.http.bodies import Body, EmptyBody, Query, decode, read_bytes
from rollout.gateway.http.event_stream import ClientGone, EventStream, NamedEvents, json_answer, unless_gone

Dialect = Literal["OpenAI", "Anthropic", "rollout", "vLLM", "SGLang", "SkyRL", "prime-rl", "AReaL", "Tinker"]
Handler = Callable[[HttpRequest[Any]], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint: `name` has its method, or two, then its path and the aliases of the path.

    `takes`: the class of its JSON body, or of its URL's parameters; None: neither is looked at. `answer`: what is
    answered if the handler returns None. `for_client`: the work ends if the client leaves.
    """

    name: str
    dialect: Dialect
    handler: Handler
    takes: type[Body] | None = None
    answer: Any = None
    for_client: bool = False

    @property
    def methods(self) -> list[str]:
        """The methods."""
        return self.name.split()[0].split("|")

    @property
    def paths(self) -> list[str]:
        """The path and its aliases."""
        return self.name.split()[1:]


_PAUSED, _RESUMED = {"status": "paused"}, {"status": "resumed"}
_SGLANG_PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
_SGLANG_RESUMED = {"message": "Generation continued successfully.", "status": "ok"}

ENDPOINTS: tuple[Endpoint, ...] = (
    # --- generation
    Endpoint("POST /v1/completions", "OpenAI", completions.complete, completions.CompletionBody, for_client=True),
    Endpoint("POST /v1/chat/completions", "OpenAI", chat.complete_chat, chat_body.ChatBody, for_client=True),
    Endpoint("POST /v1/responses", "OpenAI", responses.respond, responses_body.ResponsesBody, for_client=True),
    Endpoint("GET /v1/responses/{response_id}", "OpenAI", responses.read),
    Endpoint("DELETE /v1/responses/{response_id}", "OpenAI", responses.delete),
    Endpoint("POST /v1/messages", "Anthropic", messages.answer, messages_body.MessagesBody, for_client=True),
    Endpoint("POST /v1/messages/count_tokens", "Anthropic", messages.count_tokens, messages_body.CountBody),
    Endpoint(
        "POST /inference/v1/generate", "vLLM", vllm_generate.generate, vllm_generate.GenerateBody, for_client=True
    ),
    Endpoint(
        "POST /skyrl/v1/generate",
        "SkyRL",
        vllm_generate.generate_with_experts,
        vllm_generate.GenerateBody,
        for_client=True,
    ),
    Endpoint("POST /generate", "SGLang", sglang_generate.generate, sglang_generate.SglangBody, for_client=True),
    Endpoint("POST /v1/chat/completions/render", "vLLM", chat.render, chat_body.ChatBody),
    Endpoint("POST /tokenize", "vLLM", tokenization.tokenize, tokenization.TokenizeBody),
    Endpoint("POST /detokenize", "vLLM", tokenization.detokenize, tokenization.DetokenizeBody),
    # --- the gateway and its workers
    Endpoint("GET /health", "vLLM", health.health),
    Endpoint("GET /health_generate", "SGLang", health.health_generate),
    Endpoint("GET|POST /ping", "vLLM", health.ping),
    Endpoint("GET /version", "vLLM", health.version),
    Endpoint("GET /v1/models", "OpenAI", health.models),
    Endpoint("GET /metrics", "vLLM", health.metrics),
    Endpoint("GET /server_info /get_server_info", "vLLM", health.server_info),
    Endpoint("GET /get_model_info /model_info", "SGLang", sglang_admin.model_info),
    Endpoint("GET /v1/loads /get_load", "SGLang", sglang_admin.loads),
    Endpoint("GET /get_world_size", "vLLM", vllm_admin.get_world_size, vllm_admin.WorldSizeQuery),
    # --- pauses and sleep
    Endpoint("POST /pause", "vLLM", shared_admin.pause, vllm_admin.PauseQuery, _PAUSED, for_client=True),
    Endpoint(
        "POST /pause_generation", "SGLang", shared_admin.pause, sglang_admin.PauseBody, _SGLANG_PAUSED, for_client=True
    ),
    Endpoint(
        "POST /areal_pause_generation", "AReaL", worker_extensions.pause_and_abort, None, _PAUSED, for_client=True
    ),
    Endpoint("POST /resume", "vLLM", vllm_admin.resume, answer=_RESUMED),
    Endpoint("POST /continue_generation", "SGLang", sglang_admin.continue_generation, answer=_SGLANG_RESUMED),
    Endpoint("POST /areal_continue_generation", "AReaL", sglang_admin.continue_generation, answer=_SGLANG_RESUMED),
    Endpoint("GET /is_paused", "vLLM", vllm_admin.is_paused),
    Endpoint("POST /sleep", "vLLM", vllm_admin.sleep, vllm_admin.SleepQuery),
    Endpoint("POST /wake_up", "vLLM", shared_admin.wake_up, vllm_admin.WakeQuery),
    Endpoint("GET /is_sleeping", "vLLM", vllm_admin.is_sleeping),
    Endpoint("POST /release_memory_occupation", "SGLang", sglang_admin.release_memory, sglang_admin.MemoryBody),
    Endpoint("POST /resume_memory_occupation", "SGLang", shared_admin.wake_up, sglang_admin.MemoryBody),
    # --- requests, sessions, caches
    Endpoint("POST /abort_requests", "vLLM", vllm_admin.abort_requests, vllm_admin.AbortRequestsBody),
    Endpoint("POST /abort_request", "SGLang", sglang_admin.abort, sglang_admin.AbortBody),
    Endpoint("POST /finish_session", "SkyRL", worker_extensions.finish_session, worker_extensions.SessionQuery),
    Endpoint("GET /v1/trajectories/{session:path}", "rollout", trajectories.read),
    Endpoint("DELETE /v1/trajectories/{session:path}", "rollout", trajectories.delete),
    Endpoint("POST /reset_prefix_cache", "vLLM", vllm_admin.reset_prefix_cache, vllm_admin.ResetBody),
    Endpoint("GET|POST /flush_cache", "SGLang", sglang_admin.flush_cache),
    # --- adapters
    Endpoint("POST /v1/load_lora_adapter", "vLLM", shared_admin.load_adapter, shared_admin.AdapterBody),
    Endpoint("POST /load_lora_adapter", "prime-rl", shared_admin.load_adapter, shared_admin.ReplacingAdapterBody),
    Endpoint("POST /skyrl/v1/load_lora_adapter", "SkyRL", shared_admin.load_adapter, shared_admin.ReplacingAdapterBody),
    Endpoint("POST /v1/unload_lora_adapter", "vLLM", shared_admin.unload_adapter, shared_admin.AdapterBody),
    # --- weights from a folder
    Endpoint("POST /update_weights", "vLLM", shared_admin.update_weights, shared_admin.UpdateBody),
    Endpoint("POST /areal_update_weights", "AReaL", shared_admin.update_weights, shared_admin.UpdateBody),
    Endpoint("POST /update_weights_from_disk", "SGLang", sglang_admin.update_from_disk, shared_admin.UpdateBody),
    Endpoint("GET /weight_info", "vLLM", vllm_admin.weight_info),
    Endpoint("GET /get_weight_version /weight_version", "SGLang", sglang_admin.weight_version),
    # --- weights over a process group
    Endpoint("POST /init_weights_update_group", "SGLang", process_groups.join, group_bodies.GroupBody),
    Endpoint("POST /update_weights_from_distributed", "SGLang", process_groups.update, group_bodies.TensorsBody),
    Endpoint("POST /destroy_weights_update_group", "SGLang", process_groups.leave, group_bodies.GroupNameBody),
    Endpoint("POST /areal_init_weights_update_group", "AReaL", process_groups.join, group_bodies.GroupBody),
    Endpoint("POST /areal_set_update_weight_meta", "AReaL", process_groups.announce, group_bodies.TensorsBody),
    Endpoint("POST /areal_update_weights_xccl", "AReaL", process_groups.update_announced, EmptyBody),
    Endpoint("POST /init_weight_transfer_engine", "vLLM", process_groups.init_engine, group_bodies.InitBody),
    Endpoint("POST /start_weight_update", "vLLM", process_groups.start, group_bodies.StartBody),
    Endpoint("POST /finish_weight_update", "vLLM", process_groups.finish, group_bodies.FinishBody),
    Endpoint("POST /shutdown_weight_transfer_engine", "vLLM", process_groups.shut_engine_down),
    Endpoint("POST /collective_rpc", "SkyRL", worker_extensions.collective_rpc, worker_extensions.RpcBody),
    Endpoint("POST /init_broadcaster", "prime-rl", process_groups.refuse),
    Endpoint("POST /update_weights_from_tensor", "SGLang", process_groups.refuse),
    # --- Tinker
    Endpoint("GET /api/v1/healthz", "Tinker", tinker.healthz),
    Endpoint("GET /api/v1/get_server_capabilities", "Tinker", tinker.capabilities),
    Endpoint("POST /api/v1/client/config", "Tinker", tinker.client_config),
    Endpoint("POST /api/v1/client/dynamic_config", "Tinker", tinker.client_dynamic_config),
    Endpoint("POST /api/v1/telemetry", "Tinker", tinker.telemetry),
    Endpoint("POST /api/v1/create_session", "Tinker", tinker.create_session),
    Endpoint("POST /api/v1/session_heartbeat", "Tinker", tinker.heartbeat, tinker_bodies.SessionBody),
    Endpoint("POST /api/v1/sessions/{session}/finish", "Tinker", tinker.finish_session),
    Endpoint("POST /api/v1/create_sampling_session", "Tinker", tinker.create_sampler, tinker_bodies.SamplerBody),
    Endpoint("POST /api/v1/join_sampling_session", "Tinker", tinker.join_sampler, tinker_bodies.JoinBody),
    Endpoint("GET /api/v1/samplers/{sampler}", "Tinker", tinker.sampler),
    Endpoint("POST /api/v1/asample", "Tinker", tinker.sample, tinker_bodies.SampleBody),
    Endpoint("POST /api/v1/retrieve_future", "Tinker", tinker.retrieve, tinker_bodies.ResultBody, for_client=True),
    Endpoint("POST /api/v1/cancel_future", "Tinker", tinker.cancel, tinker_bodies.ResultBody),
)


def routes(gateway: Gateway) -> list[Route]:
    """The routes of all endpoints, GET before POST before DELETE."""
    return [
        Route(path, _answering(gateway, endpoint), methods=[method])
        for method in ("GET", "POST", "DELETE")
        for endpoint in ENDPOINTS
        if method in endpoint.methods
        for path in endpoint.paths
    ]


def _answering(gateway: Gateway, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body = await _taken(gateway.settings, endpoint.takes, request)
        parts = {name: str(value) for name, value in request.path_params.items()}
        work = endpoint.handler(HttpRequest(gateway, body, request.url.path, request.headers, parts))
        try:
            found = await (unless_gone(request, work) if endpoint.for_client else work)
        except ClientGone as gone:
            return gone.response()  # no one reads it
        return _response(endpoint.answer if found is None else found, gateway.settings.send_s)

    return answer


async def _taken(settings: GatewaySettings, takes: type[Body] | None, request: Request) -> Any:
    """The body or the parameters of a request, as this class. Raises `HttpError`."""
    if takes is None:
        return None
    if issubclass(takes, Query):
        return takes.of(request)
    data = await read_bytes(request, settings.max_body_bytes, settings.body_s)
    return takes.take({} if takes.may_be_empty and not data.strip() else decode(data))


def _response(found: Any, send_s: float) -> Response:
    match found:
        case None:
            return Response(status_code=200)
        case Response():
            return found
        case str():
            return PlainTextResponse(found)
        case AsyncGenerator() | NamedEvents():
            return EventStream(found, send_s)
    return json_answer(found)
