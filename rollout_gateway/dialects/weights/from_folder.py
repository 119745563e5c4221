"""Updates from a folder: the body of prime-rl and AReaL, and the endpoints of SGLang and slime."""

from typing import Any, ClassVar

from pydantic import Field

from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.requests.http_request import POST, Endpoint, Gateway, HttpRequest


class FolderBody(Body):
    """The body of `/update_weights_from_disk`: a folder of prime-rl (`weight_dir`) or AReaL (`model_path`)."""

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

    async def update(self, gateway: Gateway) -> int:
        """Update the weights from the folder; returns their version. Raises `HttpError` unless exactly one is given."""
        given = {name: path for name in ("weight_dir", "model_path") if (path := getattr(self, name)) is not None}
        if len(given) != 1:
            raise bad_request("name the folder of the new weights in 'weight_dir' or 'model_path'", "weight_dir")
        ((name, path),) = given.items()
        return await gateway.orders.update_from_folder(path, self.weight_version, name)


class UpdateBody(FolderBody):
    """The body of `/update_weights`: a folder, or `update_info` of vLLM's weight transfer engine."""

    update_info: dict[str, Any] | None = None


async def update_from_disk(request: HttpRequest[FolderBody]) -> dict[str, Any]:
    """Update the weights from a folder."""
    version = await request.body.update(request.gateway)
    message = f"Succeeded to update model weights to version {version}."
    return {"success": True, "message": message, "num_paused_requests": 0}


class PullBody(Body):
    """The body of slime's and miles' `/pull_weights`."""

    local_checkpoint_dir: str
    source_dir: str
    target_version: int = Field(ge=0, lt=10**6)


async def pull(request: HttpRequest[PullBody]) -> dict[str, Any]:
    """Bring a checkpoint on this host to a version that was published as a whole or as changes."""
    body = request.body
    await request.gateway.orders.pull(body.local_checkpoint_dir, body.source_dir, body.target_version)
    return {"success": True, "message": f"{body.local_checkpoint_dir} has version {body.target_version}."}


ENDPOINTS = (
    Endpoint(POST, "/update_weights_from_disk", "SGLang", update_from_disk, FolderBody),
    Endpoint(POST, "/pull_weights", "slime", pull, PullBody),
)
