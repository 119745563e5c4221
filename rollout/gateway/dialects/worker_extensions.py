"""Admin endpoints that the worker extensions of SkyRL, prime-rl and AReaL add to vLLM's."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from rollout.gateway.dialects import process_groups
from rollout.gateway.dialects.handling import HttpRequest
from rollout.gateway.dialects.process_group_bodies import FinishBody, StartBody
from rollout.gateway.dialects.shared_admin import UpdateBody
from rollout.gateway.http.bodies import Body, Query
from rollout.gateway.http.http_errors import HttpError, bad_request


async def pause_and_abort(request: HttpRequest[Any]) -> None:
    """Pause all workers. Running requests end with their tokens; AReaL sends them again."""
    await request.gateway.orders.pause("abort")


class SessionQuery(Query):
    """The parameters of `/finish_session`."""

    session_id: str = Field(min_length=1)


async def finish_session(request: HttpRequest[SessionQuery]) -> dict[str, Any]:
    """Free the KV of a session."""
    return {"finished": request.gateway.workers.sessions.end(request.body.session_id)}


class RpcBody(Body):
    """The body of `/collective_rpc`."""

    ignored: ClassVar = {"timeout": "the workers' own time limits hold"}

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class UpdateInfoBody(Body):
    """The `kwargs` of SkyRL's `update_weights_nccl`."""

    update_info: dict[str, Any]


async def collective_rpc(request: HttpRequest[RpcBody]) -> dict[str, Any]:
    """Run a method of SkyRL's or prime-rl's worker extension."""
    body, gateway = request.body, request.gateway
    result: Any = None
    match body.method:
        case "update_weights_from_path":
            fields = {**body.kwargs, **({"weight_dir": body.args[0]} if len(body.args) == 1 else {})}
            folder, field = UpdateBody.take(fields, "kwargs.").folder
            result = await gateway.orders.update_from_folder(folder, None, field)
        case "skyrl_start_weight_update":
            await process_groups.start(request.with_body(StartBody.take(body.kwargs, "kwargs.")))
        case "update_weights_nccl":
            info = UpdateInfoBody.take(body.kwargs, "kwargs.").update_info
            await process_groups.receive_by_engine(gateway, info, "kwargs.")
        case "skyrl_finish_weight_update":
            await process_groups.finish(request.with_body(FinishBody.take(body.kwargs, "kwargs.")))
        case "update_weights_ipc":
            raise HttpError(
                501,
                "CUDA IPC handles are pickled, so this gateway does not read them; set SkyRL's colocate_all=false",
                "method",
            )
        case "skyrl_sleep_for_weight_sync" | "skyrl_wake_for_weight_sync":
            raise HttpError(
                501,
                f"{body.method} is not served: updates need no sleep. To release memory call /sleep and /wake_up",
                "method",
            )
        case method:
            raise bad_request(f"the method {method!r:.200} is unknown to this gateway", "method")
    return {"results": [result]}
