"""Updates by methods of a worker extension, as SkyRL and prime-rl call them."""

from typing import Any, ClassVar

from rollout_gateway.dialects.weights.from_folder import FolderBody
from rollout_gateway.dialects.weights.vllm_engine import FinishBody, StartBody, finish, receive_by_engine, start
from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.requests.http_request import POST, Endpoint, HttpRequest


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
            result = await FolderBody.take(fields, "kwargs.").update(gateway)
        case "skyrl_start_weight_update":
            await start(request.with_body(StartBody.take(body.kwargs, "kwargs.")))
        case "update_weights_nccl":
            await receive_by_engine(gateway, UpdateInfoBody.take(body.kwargs, "kwargs.").update_info, "kwargs.")
        case "skyrl_finish_weight_update":
            await finish(request.with_body(FinishBody.take(body.kwargs, "kwargs.")))
        case method:
            raise bad_request(
                f"the method {method!r:.200} is not served: updates need no sleep, and CUDA IPC handles are pickled; "
                "send weights by NCCL (SkyRL: colocate_all=false) or from a folder",
                "method",
            )
    return {"results": [result]}


ENDPOINTS = (Endpoint(POST, "/collective_rpc", "SkyRL", collective_rpc, RpcBody),)
