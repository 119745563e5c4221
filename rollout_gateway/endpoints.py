"""The endpoints of all dialects, from which the application and the reference page are made, and their states."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rollout.config.gateway_settings import GatewaySettings
from rollout_gateway.dialects import (
    anthropic,
    openai_chat,
    openai_completions,
    own,
    sglang,
    sglang_orders,
    trainers,
    vllm,
    vllm_orders,
)
from rollout_gateway.dialects.responses import handlers as responses
from rollout_gateway.dialects.tinker import tinker_handlers as tinker
from rollout_gateway.dialects.weights import areal, from_folder, through_group, vllm_engine, worker_extension
from rollout_gateway.http.bodies import Body, Query, decode, read_bytes
from rollout_gateway.http.event_stream import ClientGone, EventStream, NamedEvents, json_answer, unless_gone
from rollout_gateway.requests.http_request import DialectState, Endpoint, Gateway, HttpRequest

STATES: tuple[type[DialectState], ...] = (*vllm_engine.STATES, *areal.STATES, *tinker.STATES)
ENDPOINTS: tuple[Endpoint, ...] = (
    *openai_completions.ENDPOINTS,
    *openai_chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *anthropic.ENDPOINTS,
    *vllm.ENDPOINTS,
    *vllm_orders.ENDPOINTS,
    *sglang.ENDPOINTS,
    *sglang_orders.ENDPOINTS,
    *trainers.ENDPOINTS,
    *from_folder.ENDPOINTS,
    *through_group.ENDPOINTS,
    *vllm_engine.ENDPOINTS,
    *areal.ENDPOINTS,
    *worker_extension.ENDPOINTS,
    *own.ENDPOINTS,
    *tinker.ENDPOINTS,
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
            found = await (unless_gone(request.receive, work) if endpoint.for_client else work)
        except ClientGone as gone:
            return gone.response()  # the client has left
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
