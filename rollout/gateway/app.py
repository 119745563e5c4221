"""The application: which path is answered by what, and its life from the first status of a worker to its close."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollout.config.gateway_settings import GatewaySettings
from rollout.gateway.access import AccessRule
from rollout.gateway.admin import Admin
from rollout.gateway.answers import ClientGone
from rollout.gateway.catch_up import CatchUp
from rollout.gateway.chat import Chat, detokenize, tokenize
from rollout.gateway.completions import Completions
from rollout.gateway.control import Control
from rollout.gateway.errors import HttpError, answer_error
from rollout.gateway.folder_updates import FolderUpdates
from rollout.gateway.gateway import Gateway
from rollout.gateway.generate import Generate, skyrl_experts, vllm_experts
from rollout.gateway.group_updates import GroupUpdates
from rollout.gateway.groups import Groups
from rollout.gateway.health import Health
from rollout.gateway.images import Images
from rollout.gateway.sglang import SglangAdmin, SglangGenerate
from rollout.gateway.text import Text
from rollout.gateway.workers import RolloutPool, Workers
from rollout.model_name import readable_name
from trainer_bridge.wire.errors import RolloutError, Unavailable
from trainer_bridge.wire.keys import ClientCurve

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
#: Endpoints of OpenAI that clients ask for, and what is served in their place.
_NOT_SERVED = {
    "/v1/responses": "use /v1/chat/completions; ",
    "/v1/embeddings": "this gateway only generates; ",
}
_ASK_AGAIN_S = 0.05


def make_app(
    settings: GatewaySettings,
    keys: tuple[bytes, ...],
    pool: Callable[[], RolloutPool],
    curve: ClientCurve | None = None,
) -> Starlette:
    """The application. `pool` makes the client of the workers, on the event loop."""

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        client = pool()
        workers = Workers(client, settings)
        tasks = [asyncio.ensure_future(workers.watch.run())]
        gateway: Gateway | None = None
        try:
            gateway = await _start(settings, workers, curve)
            tasks.append(asyncio.ensure_future(CatchUp(workers, gateway.updates).run()))
            app.router.routes.extend(_routes(gateway))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if gateway is not None:
                await gateway.updates.close()
                gateway.text.close()
                if gateway.images is not None:
                    gateway.images.close()
            await client.close()

    handlers: dict[Any, Any] = {HttpError: answer_error, RolloutError: answer_error, HTTPException: _http_exception}
    handlers[Exception] = answer_error
    middleware = [Middleware(AccessRule, keys=keys)]
    return Starlette(lifespan=life, exception_handlers=handlers, middleware=middleware)


async def _start(settings: GatewaySettings, workers: Workers, curve: ClientCurve | None) -> Gateway:
    """The gateway, once a worker has answered. Raises `Unavailable` if none does in time."""
    end_s = asyncio.get_running_loop().time() + settings.start_s
    while True:
        try:
            status = (await workers.known())[0]
            break
        except Unavailable:
            if asyncio.get_running_loop().time() > end_s:
                raise
            await asyncio.sleep(_ASK_AGAIN_S)
    model = settings.model
    if model is None and Path(status["model"]).expanduser().is_dir():
        model = status["model"]
    text = Text.load(model)
    if not text.there:
        log.warning("there is no tokenizer: only token ids can be sent and received; name one with --model")
    images = None
    if text.folder is not None and "media" in (status.get("capabilities") or ()):
        images = Images.load(text.folder, settings.images_root)
    return Gateway(
        settings,
        workers,
        text,
        settings.served_model_name or tuple(dict.fromkeys((readable_name(status["model"]), status["model"]))),
        status["max_context_tokens"],
        FolderUpdates(settings.weights_root, settings.update_s, curve),
        text.formats(settings.tool_parser, settings.reasoning_parser),
        images,
    )


def _routes(gateway: Gateway) -> list[Route]:
    control = Control(gateway)
    health, chat = Health(gateway), Chat(gateway)
    updates = GroupUpdates(gateway, control)
    groups = Groups(gateway, updates)
    admin, sglang = Admin(gateway, control, groups), SglangAdmin(gateway, control, updates)
    generate = Generate(gateway, vllm_experts(gateway))
    skyrl = Generate(gateway, skyrl_experts)
    gets: dict[str, Handler] = {
        "/health": health.health,
        "/health_generate": health.health_generate,
        "/ping": health.ping,
        "/version": health.version,
        "/v1/models": health.models,
        "/metrics": health.metrics,
        "/server_info": health.server_info,
        "/get_server_info": health.server_info,
        "/get_world_size": admin.get_world_size,
        "/is_paused": admin.is_paused,
        "/is_sleeping": admin.is_sleeping,
        "/weight_info": admin.weight_info,
        "/get_weight_version": sglang.weight_version,
        "/weight_version": sglang.weight_version,
        "/get_model_info": sglang.model_info,
        "/model_info": sglang.model_info,
        "/v1/loads": sglang.loads,
        "/get_load": sglang.loads,
        "/flush_cache": sglang.flush_cache,
    }
    posts: dict[str, Handler] = {
        "/v1/completions": Completions(gateway).__call__,
        "/v1/chat/completions": chat.__call__,
        "/v1/chat/completions/render": chat.render,
        "/inference/v1/generate": generate.__call__,
        "/skyrl/v1/generate": skyrl.__call__,
        "/generate": SglangGenerate(gateway).__call__,
        "/tokenize": partial(tokenize, gateway),
        "/detokenize": partial(detokenize, gateway),
        "/ping": health.ping,
        "/pause": admin.pause,
        "/resume": admin.resume,
        "/sleep": admin.sleep,
        "/wake_up": admin.wake_up,
        "/reset_prefix_cache": admin.reset_prefix_cache,
        "/abort_requests": admin.abort_requests,
        "/v1/load_lora_adapter": admin.load_adapter,
        "/load_lora_adapter": admin.load_adapter_in_place,
        "/skyrl/v1/load_lora_adapter": admin.load_adapter_in_place,
        "/v1/unload_lora_adapter": admin.unload_adapter,
        "/update_weights": admin.update_weights,
        "/areal_update_weights": admin.update_weights,
        "/areal_pause_generation": admin.areal_pause,
        "/areal_continue_generation": sglang.resume,
        "/collective_rpc": admin.collective_rpc,
        "/finish_session": admin.finish_session,
        "/pause_generation": sglang.pause,
        "/continue_generation": sglang.resume,
        "/abort_request": sglang.abort,
        "/flush_cache": sglang.flush_cache,
        "/release_memory_occupation": sglang.release_memory,
        "/resume_memory_occupation": sglang.resume_memory,
        "/update_weights_from_disk": sglang.update_from_disk,
        "/init_weights_update_group": groups.join,
        "/update_weights_from_distributed": groups.update,
        "/destroy_weights_update_group": groups.leave,
        "/areal_init_weights_update_group": groups.join,
        "/areal_set_update_weight_meta": groups.announce,
        "/areal_update_weights_xccl": groups.update_announced,
        "/init_weight_transfer_engine": groups.init_engine,
        "/shutdown_weight_transfer_engine": groups.shut_engine_down,
        "/start_weight_update": groups.start,
        "/finish_weight_update": groups.finish,
    }
    for name in ("/init_broadcaster", "/update_weights_from_tensor"):
        posts[name] = admin.process_group
    return [Route(path, _plain(handler), methods=["GET"]) for path, handler in gets.items()] + [
        Route(path, _plain(handler), methods=["POST"]) for path, handler in posts.items()
    ]


def _plain(handler: Handler) -> Handler:
    """The handler as a function: Starlette takes bound methods and partials for other things."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGone as gone:
            return gone.response()  # it has no reader

    return endpoint


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, allowed, hint = request.url.path, (error.headers or {}).get("Allow"), ""
    if error.status_code == 404:
        hint = f"; {_NOT_SERVED.get(path) or _closest(path, request.app.routes)}docs/gateway.md lists all endpoints"
    elif allowed is not None:
        hint = f"; use {allowed}"
    answer = HttpError(error.status_code, f"{request.method} {path:.200}: {error.detail}{hint}").response()
    if allowed is not None:
        answer.headers["Allow"] = allowed
    return answer


def _closest(path: str, routes: Sequence[BaseRoute]) -> str:
    """The served path that is most like this one, as a question; empty if none is."""
    served = [route.path for route in routes if isinstance(route, Route)]
    ends = [each for each in served if path.endswith(each)]  # behind a prefix, such as a second /v1
    like = ends or difflib.get_close_matches(path[:200], served, n=1, cutoff=0.75)
    return f"did you mean {like[0]}? " if like else ""
