"""The application: its life from the first status of a worker to its close, and its answer to an unknown path."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollout.config.gateway_settings import GatewaySettings
from rollout_gateway.endpoints import STATES, routes
from rollout_gateway.history.trajectories import StoredResponse, Trajectories
from rollout_gateway.http.access import AccessRule
from rollout_gateway.http.http_errors import HttpError, answer_error
from rollout_gateway.orders.catch_up import CatchUp
from rollout_gateway.orders.folder_updates import FolderUpdates
from rollout_gateway.orders.process_groups import ProcessGroupUpdates
from rollout_gateway.orders.worker_orders import WorkerOrders
from rollout_gateway.prompts.gateway_model import GatewayModel
from rollout_gateway.requests.http_request import Gateway
from rollout_gateway.workers.workers import Workers
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.expiring_cache import ExpiringCache
from trainer_bridge.wire.errors import RolloutError, Unavailable
from trainer_bridge.wire.keys import ClientCurve
from trainer_bridge.wire.near_names import near_name

_NO_RECEIVER = (
    "it needs a receiver of its own, or pickle: send weights by /update_weights_from_distributed, from a folder, or "
    "with WeightPublisher; "
)
#: Beginnings of paths that are not served, each with a hint for the error.
_NOT_SERVED = {
    "/init_broadcaster": _NO_RECEIVER,
    "/update_weights_from_tensor": _NO_RECEIVER,
    "/v1/embeddings": "this gateway only generates; ",
    "/api/v1/": "this gateway samples by Tinker's API; it does not train, and keeps no checkpoints, runs or accounts; ",
}
_ASK_AGAIN_S = 0.05


def make_app(
    settings: GatewaySettings,
    keys: tuple[bytes, ...],
    pool: Callable[[], AsyncRolloutClient],
    curve: ClientCurve | None = None,
) -> Starlette:
    """The application. `pool` makes the client of the workers, on the event loop."""

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        client = pool()
        workers = Workers(client, settings)
        folder_updates = FolderUpdates(settings.weights_root, settings.update_s, curve)
        states = {kind: kind() for kind in STATES}
        running = [workers.watch.run(), *(state.run() for state in states.values())]
        tasks = [asyncio.ensure_future(each) for each in running]
        model: GatewayModel | None = None
        try:
            model = GatewayModel.load(await _first_status(workers, settings.start_s), settings)
            tasks.append(asyncio.ensure_future(CatchUp(workers, folder_updates).run()))
            orders = WorkerOrders(workers, model.names, folder_updates)
            process_groups = ProcessGroupUpdates(client, orders, settings.update_s)
            trajectories = Trajectories(settings.max_kept_bytes, settings.session_s)
            responses: ExpiringCache[str, StoredResponse] = ExpiringCache(settings.max_kept_bytes, settings.session_s)
            gateway = Gateway(settings, workers, model, orders, process_groups, trajectories, responses, states)
            app.router.routes.extend(routes(gateway))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for state in states.values():
                await state.close()
            await folder_updates.close()
            if model is not None:
                model.close()
            await client.close()

    handlers: dict[Any, Any] = {HttpError: answer_error, RolloutError: answer_error, HTTPException: _http_exception}
    handlers[Exception] = answer_error
    middleware = [Middleware(AccessRule, keys=keys)]
    return Starlette(lifespan=life, exception_handlers=handlers, middleware=middleware)


async def _first_status(workers: Workers, within_s: float) -> dict[str, Any]:
    """The status of the first worker that answers. Raises `Unavailable` if no worker answers in time."""
    end_s = asyncio.get_running_loop().time() + within_s
    while True:
        try:
            return (await workers.known())[0]
        except Unavailable:
            if asyncio.get_running_loop().time() > end_s:
                raise
            await asyncio.sleep(_ASK_AGAIN_S)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, allowed, hint = request.url.path, (error.headers or {}).get("Allow"), ""
    if error.status_code == 404:
        known = (told for start, told in _NOT_SERVED.items() if path.startswith(start))
        near = next(known, None) or _closest(path, request.app.routes)
        hint = f"; {near}docs/reference/endpoints.md lists all endpoints"
    elif allowed is not None:  # Starlette names only the methods of the first matching route
        same = [route for route in request.app.routes if isinstance(route, Route) and route.path_regex.match(path)]
        allowed = ", ".join(sorted({method for route in same for method in route.methods or ()}))
        hint = f"; use {allowed}"
    answer = HttpError(error.status_code, f"{request.method} {path:.200}: {error.detail}{hint}").response(path)
    if allowed is not None:
        answer.headers["Allow"] = allowed
    return answer


def _closest(path: str, routes: Sequence[BaseRoute]) -> str:
    """The most similar served path, as a question; empty if no path is similar."""
    served = [route.path for route in routes if isinstance(route, Route)]
    ends = [each for each in served if path.endswith(each)]  # paths after a prefix, such as a second /v1
    like = ends[0] if ends else near_name(path, served, 0.75)
    return f"did you mean {like}? " if like else ""
