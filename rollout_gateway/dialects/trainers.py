"""Admin endpoints that the worker extensions of SkyRL, prime-rl and AReaL add to vLLM's."""

from typing import Any, ClassVar

from pydantic import Field

from rollout_gateway.http.bodies import Body, EmptyBody, Query
from rollout_gateway.http.http_errors import HttpError, bad_request
from rollout_gateway.requests import admin, process_groups
from rollout_gateway.requests.http_request import Endpoint, HttpRequest


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
            folder, field = admin.UpdateBody.take(fields, "kwargs.").folder
            result = await gateway.orders.update_from_folder(folder, None, field)
        case "skyrl_start_weight_update":
            await process_groups.start(request.with_body(process_groups.StartBody.take(body.kwargs, "kwargs.")))
        case "update_weights_nccl":
            info = UpdateInfoBody.take(body.kwargs, "kwargs.").update_info
            await process_groups.receive_by_engine(gateway, info, "kwargs.")
        case "skyrl_finish_weight_update":
            await process_groups.finish(request.with_body(process_groups.FinishBody.take(body.kwargs, "kwargs.")))
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


ENDPOINTS = (
    Endpoint("POST /finish_session", "SkyRL", finish_session, SessionQuery),
    Endpoint("POST /skyrl/v1/load_lora_adapter", "SkyRL", admin.load_adapter, admin.ReplacingAdapterBody),
    Endpoint("POST /collective_rpc", "SkyRL", collective_rpc, RpcBody),
    Endpoint("POST /load_lora_adapter", "prime-rl", admin.load_adapter, admin.ReplacingAdapterBody),
    Endpoint("POST /init_broadcaster", "prime-rl", process_groups.refuse),
    Endpoint("POST /areal_pause_generation", "AReaL", pause_and_abort, None, {"status": "paused"}, for_client=True),
    Endpoint("POST /areal_continue_generation", "AReaL", admin.continue_generation, answer=admin.CONTINUED),
    Endpoint("POST /areal_update_weights", "AReaL", admin.update_weights, admin.UpdateBody),
    Endpoint("POST /areal_init_weights_update_group", "AReaL", process_groups.join, process_groups.GroupBody),
    Endpoint("POST /areal_set_update_weight_meta", "AReaL", process_groups.announce, process_groups.TensorsBody),
    Endpoint("POST /areal_update_weights_xccl", "AReaL", process_groups.update_announced, EmptyBody),
)
