"""SGLang's orders to workers, and its views of them: pauses, memory, versions, loads."""

from typing import Any, ClassVar, Literal

from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.orders.worker_orders import MemoryTag, PauseMode
from rollout_gateway.requests import admin
from rollout_gateway.requests.http_request import GET, POST, Endpoint, HttpRequest


class PauseBody(Body):
    """The body of `/pause_generation`."""

    may_be_empty: ClassVar = True

    mode: Literal["abort", "retract", "in_place"] = "abort"

    @property
    def order(self) -> PauseMode:
        return "abort" if self.mode == "abort" else "keep"


class AbortBody(Body):
    """The body of `/abort_request`."""

    ignored: ClassVar = {"abort_message": "for readers"}

    rid: str = ""
    abort_all: bool = False


class MemoryBody(Body):
    """The body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    may_be_empty: ClassVar = True

    tags: list[MemoryTag] | None = None


async def abort(request: HttpRequest[AbortBody]) -> None:
    """End one request with its tokens, or all."""
    body = request.body
    if not body.abort_all and not body.rid:
        raise bad_request("name a request in 'rid', or set 'abort_all'", "rid")
    await request.gateway.orders.abort(None if body.abort_all else body.rid)


async def flush_cache(request: HttpRequest[Any]) -> str:
    """No effect: `engine.max_kv_age` bounds the age of KV."""
    await request.gateway.workers.known(fresh=True)
    return "Nothing to flush: KV of older weights is used within engine.max_kv_age only.\n"


async def release_memory(request: HttpRequest[MemoryBody]) -> None:
    """Release the devices' memory. The workers keep a copy of the weights."""
    await request.gateway.orders.sleep(1, request.body.tags)


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
    """Count running and waiting completions of each worker."""
    found = []
    for rank, state in enumerate(await request.gateway.workers.states(fresh=True)):
        if state.status is not None:
            running, waiting = state.status["rows"]["running"], state.status["queue"]["waiting"]
            counts = {"num_reqs": running + waiting, "num_running_reqs": running, "num_waiting_reqs": waiting}
            found.append({"dp_rank": rank, **counts, "num_tokens": state.status["pages"]["used"]})
    return {"loads": found, "dp_rank_count": len(found)}


_PAUSED = {"message": "Generation paused successfully.", "status": "ok"}


ENDPOINTS = (
    Endpoint(GET, "/get_model_info", "SGLang", model_info, aliases=("/model_info",)),
    Endpoint(GET, "/v1/loads", "SGLang", loads, aliases=("/get_load",)),
    Endpoint(POST, "/pause_generation", "SGLang", admin.pause, PauseBody, _PAUSED, for_client=True),
    Endpoint(POST, "/continue_generation", "SGLang", admin.continue_generation, answer=admin.CONTINUED),
    Endpoint(POST, "/release_memory_occupation", "SGLang", release_memory, MemoryBody),
    Endpoint(POST, "/resume_memory_occupation", "SGLang", admin.wake_up, MemoryBody),
    Endpoint(POST, "/abort_request", "SGLang", abort, AbortBody),
    Endpoint(GET + POST, "/flush_cache", "SGLang", flush_cache),
    Endpoint(GET, "/get_weight_version", "SGLang", weight_version, aliases=("/weight_version",)),
)
