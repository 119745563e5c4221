"""SGLang's admin endpoints, as slime and routers use them."""

from __future__ import annotations

from typing import Any, ClassVar

from rollout.gateway.dialects.handling import HttpRequest
from rollout.gateway.dialects.shared_admin import UpdateBody
from rollout.gateway.http.bodies import Body
from rollout.gateway.http.http_errors import bad_request
from rollout.gateway.orders.worker_orders import PauseMode


class PauseBody(Body):
    """The body of `/pause_generation`."""

    may_be_empty: ClassVar = True

    mode: str = "abort"

    @property
    def order(self) -> PauseMode:
        """The mode of the pause. Raises `HttpError` for an unknown one."""
        modes: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}
        if self.mode not in modes:
            raise bad_request(f"use {', '.join(modes)}", "mode")
        return modes[self.mode]


class AbortBody(Body):
    """The body of `/abort_request`."""

    ignored: ClassVar = {"abort_message": "for readers"}

    rid: str = ""
    abort_all: bool = False


class MemoryBody(Body):
    """The body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    may_be_empty: ClassVar = True

    tags: list[str] | None = None


async def continue_generation(request: HttpRequest[Any]) -> None:
    """End a pause. An error while an update lacks tensors: no other call ends such an update."""
    await request.gateway.group_updates.finish_waiting()
    request.gateway.group_updates.check_whole()
    await request.gateway.orders.resume()


async def abort(request: HttpRequest[AbortBody]) -> None:
    """End one request with its tokens, or all."""
    body = request.body
    if not body.abort_all and not body.rid:
        raise bad_request("name a request in 'rid', or set 'abort_all'", "rid")
    await request.gateway.orders.abort(None if body.abort_all else body.rid)


async def flush_cache(request: HttpRequest[Any]) -> str:
    """No effect: `engine.max_kv_age` bounds the age of KV that is used."""
    await request.gateway.workers.known(fresh=True)
    return "Cache flushed: KV of older weights is used within engine.max_kv_age only.\n"


async def release_memory(request: HttpRequest[MemoryBody]) -> None:
    """Release the memory of the workers' devices. The workers keep a copy of the weights."""
    await request.gateway.orders.sleep(1, request.body.tags)


async def update_from_disk(request: HttpRequest[UpdateBody]) -> dict[str, Any]:
    """Update the weights from a folder."""
    folder, field = request.body.folder
    version = await request.gateway.orders.update_from_folder(folder, request.body.weight_version, field)
    message = f"Succeeded to update model weights to version {version}."
    return {"success": True, "message": message, "num_paused_requests": 0}


async def weight_version(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return the version that all workers have at least, as a string."""
    return {"weight_version": str(await request.gateway.orders.version())}


async def model_info(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return the model and its weights version."""
    path = request.gateway.workers.model_path
    version = str(await request.gateway.orders.version())
    names = {"model_path": path, "tokenizer_path": path, "served_model_name": request.gateway.model.names[0]}
    return names | {"is_generation": True, "weight_version": version}


async def loads(request: HttpRequest[Any]) -> dict[str, Any]:
    """Count the running and the waiting completions of each worker."""
    found = []
    for rank, state in enumerate(await request.gateway.workers.states(fresh=True)):
        if state.status is not None:
            running, waiting = state.status["rows"]["running"], state.status["queue"]["waiting"]
            counts = {"num_reqs": running + waiting, "num_running_reqs": running, "num_waiting_reqs": waiting}
            found.append({"dp_rank": rank, **counts, "num_tokens": state.status["pages"]["used"]})
    return {"loads": found, "dp_rank_count": len(found)}
