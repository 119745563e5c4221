"""The admin endpoints of vLLM's RL dialect, and what prime-rl, SkyRL and AReaL add to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rollout.gateway.answers import json_answer, unless_gone
from rollout.gateway.bodies import Body
from rollout.gateway.control import Control, PauseMode, no_group
from rollout.gateway.errors import HttpError, bad_request
from rollout.gateway.gateway import Gateway
from rollout.gateway.groups import Groups

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class AdapterBody(Body):
    """The body of `/v1/load_lora_adapter`."""

    ignored: ClassVar = {"base_model_name": "there is one model", "lora_int_id": "adapters have names"}
    switched_off: ClassVar = {"is_3d_lora_weight": (None, False)}

    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str | None = Field(None, min_length=1, max_length=4096)
    load_inplace: bool = False


class UpdateBody(Body):
    """The body of `/update_weights`: a folder of prime-rl (`weight_dir`) or AReaL (`model_path`).

    A body with vLLM's `update_info` means its weight transfer engine.
    """

    ignored: ClassVar = {
        "reset_prefix_cache": "KV of older weights is never used",
        "clear_cache": "KV of older weights is never used",
        "flush_cache": "KV of older weights is never used",
        "abort_all_requests": "an update aborts nothing",
    }
    switched_off: ClassVar = {"load_format": (None, "auto", "safetensors"), "is_async": (None, False)}

    weight_dir: str | None = None
    model_path: str | None = None
    weight_version: int | str | None = None
    update_info: dict[str, Any] | None = None

    def folder(self) -> tuple[str, str]:
        """The folder, and the name of its field. Raises `HttpError` unless there is exactly one."""
        given = {name: path for name in ("weight_dir", "model_path") if (path := getattr(self, name)) is not None}
        if len(given) != 1:
            raise bad_request("name the folder of the new weights in 'weight_dir' or 'model_path'", "weight_dir")
        ((name, path),) = given.items()
        return path, name


class AbortBody(Body):
    """The body of `/abort_requests`; without ids all requests end."""

    request_ids: list[str] | None = None


class RpcBody(Body):
    """The body of `/collective_rpc`."""

    ignored: ClassVar = {"timeout": "the workers' own time limits hold"}

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class UpdateInfoBody(Body):
    """The `kwargs` of SkyRL's `update_weights_nccl`."""

    update_info: dict[str, Any]


class ResetBody(Body):
    """The body of `/reset_prefix_cache`."""

    ignored: ClassVar = {"reset_running_requests": "the worker's `kv_on_swap` says what becomes of KV of older weights"}


class Admin:
    """Answers admin requests."""

    def __init__(self, gateway: Gateway, control: Control, groups: Groups) -> None:
        self._gateway = gateway
        self._control = control
        self._groups = groups

    async def pause(self, request: Request) -> Response:
        """`/pause?mode=abort|wait|keep`."""
        given = query(request, "mode", "clear_cache", "wait_for_inflight_requests")
        mode: Any = given.get("mode", "abort")
        if truth(given, "wait_for_inflight_requests", False):
            mode = "wait"
        if mode not in ("abort", "wait", "keep"):
            raise bad_request("use abort, wait or keep", "mode")
        return await self._pause(request, mode)

    async def _pause(self, request: Request, mode: PauseMode) -> Response:
        await unless_gone(request, self._control.pause(mode))
        return json_answer({"status": "paused"})

    async def areal_pause(self, request: Request) -> Response:
        """`/areal_pause_generation`: running requests end with their tokens; AReaL sends them again."""
        return await self._pause(request, "abort")

    async def resume(self, request: Request) -> Response:
        """`/resume`."""
        await self._control.resume()
        return json_answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """`/is_paused`."""
        return json_answer({"is_paused": await self._control.is_paused()})

    async def sleep(self, request: Request) -> Response:
        """`/sleep?level=1|2`."""
        given = query(request, "level", "mode", "tags")
        if given.get("level", "1") not in ("0", "1", "2"):
            raise bad_request("use level 1 or 2, or 0 to pause", "level")
        if given.get("level") == "0":
            await self._control.pause("keep")
        else:
            await self._control.sleep(int(given.get("level", "1")), tags(request))
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        """`/wake_up?tags=`."""
        query(request, "tags")
        await self._control.wake(tags(request))
        return Response(status_code=200)

    async def is_sleeping(self, request: Request) -> Response:
        """`/is_sleeping`."""
        return json_answer({"is_sleeping": await self._control.is_sleeping()})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """`/reset_prefix_cache`: nothing needs to be reset, since prefix keys hold the weights version."""
        ResetBody.take(await self._gateway.optional_body(request))
        await self._gateway.workers.ask()
        return json_answer({"success": True})

    async def abort_requests(self, request: Request) -> Response:
        """`/abort_requests`."""
        body = AbortBody.take(await self._gateway.optional_body(request))
        ids = [None] if body.request_ids is None else body.request_ids
        return json_answer({"aborted": sum([await self._control.abort(request_id) for request_id in ids])})

    async def load_adapter(self, request: Request) -> Response:
        """`/v1/load_lora_adapter`."""
        body = await self._adapter(request)
        return await self._load(body, body.load_inplace)

    async def load_adapter_in_place(self, request: Request) -> Response:
        """`/load_lora_adapter` of prime-rl and `/skyrl/v1/load_lora_adapter`: a loaded adapter is replaced."""
        return await self._load(await self._adapter(request), True)

    async def _load(self, body: AdapterBody, in_place: bool) -> Response:
        if body.lora_path is None:
            raise bad_request("name the adapter's folder", "lora_path")
        await self._control.load_adapter(body.lora_name, body.lora_path, in_place)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """`/v1/unload_lora_adapter`."""
        body = await self._adapter(request)
        await self._control.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _adapter(self, request: Request) -> AdapterBody:
        return AdapterBody.take(await self._gateway.body(request))

    async def update_weights(self, request: Request) -> Response:
        """`/update_weights` and `/areal_update_weights`: from a folder, or by vLLM's weight transfer engine."""
        body = UpdateBody.take(await self._gateway.body(request))
        if body.update_info is not None:
            return await self._groups.update_engine(body.update_info)
        folder, field = body.folder()
        version = await self._control.update_from_folder(folder, body.weight_version, field)
        return json_answer({"status": "ok", "success": True, "message": "Weights updated", "weight_version": version})

    async def weight_info(self, request: Request) -> Response:
        """`/weight_info`: the version that all workers have at least."""
        return json_answer({"weight_version": await self._control.version()})

    async def collective_rpc(self, request: Request) -> Response:
        """`/collective_rpc`: methods of SkyRL's and prime-rl's worker extensions."""
        body = RpcBody.take(await self._gateway.body(request))
        result: Any = None
        match body.method:
            case "update_weights_from_path":
                fields = {**body.kwargs, **({"weight_dir": body.args[0]} if len(body.args) == 1 else {})}
                folder, field = UpdateBody.take(fields, "kwargs.").folder()
                result = await self._control.update_from_folder(folder, None, field)
            case "skyrl_start_weight_update":
                await self._groups.start_engine(body.kwargs, "kwargs.")
            case "update_weights_nccl":
                info = UpdateInfoBody.take(body.kwargs, "kwargs.").update_info
                await self._groups.update_engine(info, "kwargs.")
            case "skyrl_finish_weight_update":
                await self._groups.finish_engine(body.kwargs, "kwargs.")
            case "update_weights_ipc":
                raise HttpError(
                    501,
                    "handles of CUDA IPC are pickled, and never read here; set SkyRL's colocate_all=false",
                    "method",
                )
            case "skyrl_sleep_for_weight_sync" | "skyrl_wake_for_weight_sync":
                raise HttpError(
                    501, f"{body.method}: updates are staged; call /sleep and /wake_up to give memory back", "method"
                )
            case method:
                raise bad_request(f"the method {method!r:.200} is unknown to this gateway", "method")
        return json_answer({"results": [result]})

    async def finish_session(self, request: Request) -> Response:
        """`/finish_session?session_id=`: frees the session's KV."""
        session = query(request, "session_id").get("session_id")
        if not session:
            raise bad_request("name the session", "session_id")
        return json_answer({"finished": self._gateway.workers.sessions.end(session)})

    async def get_world_size(self, request: Request) -> Response:
        """`/get_world_size`: one for each worker."""
        query(request, "include_dp")
        return json_answer({"world_size": len(self._gateway.workers.pool.endpoints)})

    async def process_group(self, request: Request) -> Response:
        """Endpoints that send weights through a process group."""
        raise no_group(request.url.path)


def query(request: Request, *known: str) -> Mapping[str, str]:
    """The parameters of a URL. Raises `HttpError` for an unknown one."""
    for name in request.query_params:
        if name not in known:
            raise bad_request(f"the parameter {name!r:.80} is unknown here; remove it", name)
    return request.query_params


def truth(given: Mapping[str, str], name: str, default: bool) -> bool:
    """A parameter that is true or false."""
    if name not in given:
        return default
    if given[name].lower() not in _TRUTH:
        raise bad_request("use true or false", name)
    return _TRUTH[given[name].lower()]


def tags(request: Request) -> list[str] | None:
    """The parameter `tags`, which may come several times; None without it."""
    return request.query_params.getlist("tags") or None
