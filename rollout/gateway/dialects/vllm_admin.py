"""vLLM's admin endpoints, and the ones that prime-rl, SkyRL and AReaL add."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from rollout.gateway.dialects import process_groups
from rollout.gateway.dialects.handling import HttpRequest
from rollout.gateway.dialects.process_group_bodies import FinishBody, StartBody
from rollout.gateway.http.bodies import Body, Query, Truth
from rollout.gateway.http.http_errors import HttpError, bad_request
from rollout.gateway.orders.worker_orders import PauseMode

# --- pauses and sleep -------------------------------------------------------------------------------------------------


class PauseQuery(Query):
    """The parameters of `/pause`."""

    mode: str = "abort"
    clear_cache: str = ""
    wait_for_inflight_requests: Truth = False

    @property
    def order(self) -> PauseMode:
        """The mode of the pause. Raises `HttpError` for an unknown one."""
        modes: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
        mode = "wait" if self.wait_for_inflight_requests else self.mode
        if mode not in modes:
            raise bad_request("use abort, wait or keep", "mode")
        return modes[mode]


class SleepQuery(Query):
    """The parameters of `/sleep`."""

    level: Literal["0", "1", "2"] = "1"
    mode: str = ""
    tags: list[str] = []


class WakeQuery(Query):
    """The parameters of `/wake_up`."""

    tags: list[str] = []


async def pause(request: HttpRequest[Any]) -> None:
    """Pause all workers in one of three modes."""
    await request.gateway.orders.pause(request.body.order)


async def pause_and_abort(request: HttpRequest[Any]) -> None:
    """Pause all workers. Running requests end with their tokens; AReaL sends them again."""
    await request.gateway.orders.pause("abort")


async def resume(request: HttpRequest[Any]) -> None:
    """End a pause."""
    await request.gateway.orders.resume()


async def is_paused(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return whether a worker is paused."""
    return {"is_paused": await request.gateway.orders.is_paused()}


async def sleep(request: HttpRequest[SleepQuery]) -> None:
    """Release the memory of the workers' devices. Level 0 only pauses."""
    body = request.body
    if body.level == "0":
        await request.gateway.orders.pause("keep")
    else:
        await request.gateway.orders.sleep(int(body.level), body.tags or None)


async def wake_up(request: HttpRequest[Any]) -> None:
    """Allocate the memory of the workers' devices again."""
    await request.gateway.orders.wake(request.body.tags)


async def is_sleeping(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return whether a worker sleeps."""
    return {"is_sleeping": await request.gateway.orders.is_sleeping()}


# --- requests, sessions, caches ---------------------------------------------------------------------------------------


class AbortRequestsBody(Body):
    """The body of `/abort_requests`; without ids all requests end."""

    may_be_empty: ClassVar = True

    request_ids: list[str] | None = None


class ResetBody(Body):
    """The body of `/reset_prefix_cache`."""

    may_be_empty: ClassVar = True
    ignored: ClassVar = {"reset_running_requests": "see `engine.kv_on_swap`"}


class SessionQuery(Query):
    """The parameters of `/finish_session`."""

    session_id: str = Field(min_length=1)


class WorldSizeQuery(Query):
    """The parameters of `/get_world_size`."""

    include_dp: str = ""


async def abort_requests(request: HttpRequest[AbortRequestsBody]) -> dict[str, Any]:
    """End requests with their tokens, by their ids, or all."""
    ids = request.body.request_ids
    targets = [None] if ids is None else ids
    return {"aborted": sum([await request.gateway.orders.abort(target) for target in targets])}


async def reset_prefix_cache(request: HttpRequest[ResetBody]) -> dict[str, Any]:
    """No effect: `engine.max_kv_age` bounds the age of KV that is used."""
    await request.gateway.workers.ask()
    return {"success": True}


async def finish_session(request: HttpRequest[SessionQuery]) -> dict[str, Any]:
    """Free the KV of a session."""
    return {"finished": request.gateway.workers.sessions.end(request.body.session_id)}


async def get_world_size(request: HttpRequest[WorldSizeQuery]) -> dict[str, Any]:
    """Count the workers: each is one rank."""
    return {"world_size": len(request.gateway.workers.pool.endpoints)}


# --- adapters ---------------------------------------------------------------------------------------------------------


class AdapterBody(Body):
    """The body of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    ignored: ClassVar = {"base_model_name": "there is one model", "lora_int_id": "adapters have names"}
    switched_off: ClassVar = {"is_3d_lora_weight": (None, False)}
    #: A loaded adapter is replaced, whatever `load_inplace` says.
    replaces: ClassVar[bool] = False

    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str | None = Field(None, min_length=1, max_length=4096)
    load_inplace: bool = False


class ReplacingAdapterBody(AdapterBody):
    """The body of `/load_lora_adapter` and `/skyrl/v1/load_lora_adapter`."""

    replaces: ClassVar = True


async def load_adapter(request: HttpRequest[AdapterBody]) -> str:
    """Load an adapter from a folder below the workers' `adapter_root`."""
    body = request.body
    if body.lora_path is None:
        raise bad_request("name the adapter's folder", "lora_path")
    await request.gateway.orders.load_adapter(body.lora_name, body.lora_path, body.replaces or body.load_inplace)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


async def unload_adapter(request: HttpRequest[AdapterBody]) -> str:
    """Unload an adapter."""
    await request.gateway.orders.unload_adapter(request.body.lora_name)
    return f"Success: LoRA adapter '{request.body.lora_name}' removed successfully."


# --- weights ----------------------------------------------------------------------------------------------------------


class UpdateBody(Body):
    """The body of `/update_weights`: a folder of prime-rl (`weight_dir`) or AReaL (`model_path`).

    A body with vLLM's `update_info` means its weight transfer engine.
    """

    ignored: ClassVar = {
        "reset_prefix_cache": "see `engine.max_kv_age`",
        "clear_cache": "see `engine.max_kv_age`",
        "flush_cache": "see `engine.max_kv_age`",
        "abort_all_requests": "an update aborts nothing",
    }
    switched_off: ClassVar = {"load_format": (None, "auto", "safetensors"), "is_async": (None, False)}

    weight_dir: str | None = None
    model_path: str | None = None
    weight_version: int | str | None = None
    update_info: dict[str, Any] | None = None

    @property
    def folder(self) -> tuple[str, str]:
        """The folder, and the name of its field. Raises `HttpError` unless there is exactly one."""
        given = {name: path for name in ("weight_dir", "model_path") if (path := getattr(self, name)) is not None}
        if len(given) != 1:
            raise bad_request("name the folder of the new weights in 'weight_dir' or 'model_path'", "weight_dir")
        ((name, path),) = given.items()
        return path, name


async def update_weights(request: HttpRequest[UpdateBody]) -> dict[str, Any]:
    """Update the weights from a folder, or with `update_info` by vLLM's weight transfer engine."""
    body = request.body
    if body.update_info is not None:
        return await process_groups.receive_by_engine(request.gateway, body.update_info)
    folder, field = body.folder
    version = await request.gateway.orders.update_from_folder(folder, body.weight_version, field)
    return {"status": "ok", "success": True, "message": "Weights updated", "weight_version": version}


async def weight_info(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return the version that all workers have at least, as an integer."""
    return {"weight_version": await request.gateway.orders.version()}


# --- methods of worker extensions -------------------------------------------------------------------------------------


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
                501, f"{body.method}: updates are staged; call /sleep and /wake_up to give memory back", "method"
            )
        case method:
            raise bad_request(f"the method {method!r:.200} is unknown to this gateway", "method")
    return {"results": [result]}
