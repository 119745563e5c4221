"""vLLM's orders to workers, and its views of them: pauses, sleep, adapters, versions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from rollout_gateway.http.bodies import Body, Query, Truth
from rollout_gateway.orders.worker_orders import MemoryTag, PauseMode
from rollout_gateway.requests import admin
from rollout_gateway.requests.http_request import GET, POST, Endpoint, HttpRequest

# --- pauses and sleep -------------------------------------------------------------------------------------------------


class PauseQuery(Query):
    """The parameters of `/pause`."""

    ignored: ClassVar = {"clear_cache": "see `engine.max_kv_age`"}

    mode: PauseMode = "abort"
    wait_for_inflight_requests: Truth = False

    @property
    def order(self) -> PauseMode:
        return "wait" if self.wait_for_inflight_requests else self.mode


class SleepQuery(Query):
    """The parameters of `/sleep`."""

    ignored: ClassVar = {"mode": "the workers' own policy holds"}

    level: Literal["0", "1", "2"] = "1"
    tags: list[MemoryTag] = []


class WakeQuery(Query):
    """The parameters of `/wake_up`."""

    tags: list[MemoryTag] = []


async def resume(request: HttpRequest[Any]) -> None:
    """End a pause."""
    await request.gateway.orders.resume()


async def is_paused(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return whether a worker is paused."""
    return {"is_paused": await request.gateway.orders.is_paused()}


async def sleep(request: HttpRequest[SleepQuery]) -> None:
    """Release the devices' memory. Level 0 only pauses."""
    body = request.body
    if body.level == "0":
        await request.gateway.orders.pause("keep")
    else:
        await request.gateway.orders.sleep(int(body.level), body.tags or None)


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


class WorldSizeQuery(Query):
    """The parameters of `/get_world_size`."""

    ignored: ClassVar = {"include_dp": "each worker is one rank"}


async def abort_requests(request: HttpRequest[AbortRequestsBody]) -> dict[str, Any]:
    """End requests with their tokens, by their ids, or all."""
    ids = request.body.request_ids
    targets = [None] if ids is None else ids
    return {"aborted": sum([await request.gateway.orders.abort(target) for target in targets])}


async def reset_prefix_cache(request: HttpRequest[ResetBody]) -> dict[str, Any]:
    """No effect: `engine.max_kv_age` bounds the age of KV."""
    await request.gateway.workers.ask()
    return {"success": True}


async def get_world_size(request: HttpRequest[WorldSizeQuery]) -> dict[str, Any]:
    """Count the workers: each is one rank."""
    return {"world_size": len(request.gateway.workers.pool.endpoints)}


async def weight_info(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return the version that all workers have at least, as an integer."""
    return {"weight_version": await request.gateway.orders.version()}


ENDPOINTS = (
    Endpoint(GET, "/get_world_size", "vLLM", get_world_size, WorldSizeQuery),
    Endpoint(POST, "/pause", "vLLM", admin.pause, PauseQuery, {"status": "paused"}, for_client=True),
    Endpoint(POST, "/resume", "vLLM", resume, answer={"status": "resumed"}),
    Endpoint(GET, "/is_paused", "vLLM", is_paused),
    Endpoint(POST, "/sleep", "vLLM", sleep, SleepQuery),
    Endpoint(POST, "/wake_up", "vLLM", admin.wake_up, WakeQuery),
    Endpoint(GET, "/is_sleeping", "vLLM", is_sleeping),
    Endpoint(POST, "/abort_requests", "vLLM", abort_requests, AbortRequestsBody),
    Endpoint(POST, "/reset_prefix_cache", "vLLM", reset_prefix_cache, ResetBody),
    Endpoint(POST, "/v1/load_lora_adapter", "vLLM", admin.load_adapter, admin.AdapterBody),
    Endpoint(POST, "/v1/unload_lora_adapter", "vLLM", admin.unload_adapter, admin.UnloadBody),
    Endpoint(GET, "/weight_info", "vLLM", weight_info),
)
