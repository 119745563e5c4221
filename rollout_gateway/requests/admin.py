"""Admin endpoints that several dialects have, under names and answers of their own."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.requests.http_request import HttpRequest

#: SGLang's answer to the end of a pause.
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}

AdapterName = Annotated[str, Field(min_length=1, max_length=128)]


async def pause(request: HttpRequest[Any]) -> None:
    """Pause all workers in one of three modes."""
    await request.gateway.orders.pause(request.body.order)


async def wake_up(request: HttpRequest[Any]) -> None:
    """Take the devices' memory back; tags change nothing."""
    await request.gateway.orders.wake()


class AdapterBody(Body):
    """The body of `/v1/load_lora_adapter`."""

    ignored: ClassVar = {"base_model_name": "there is one model", "lora_int_id": "adapters have names"}
    switched_off: ClassVar = {"is_3d_lora_weight": (None, False)}
    #: If true, loading replaces an adapter of this name even without `load_inplace`.
    replaces: ClassVar[bool] = False

    lora_name: AdapterName
    lora_path: str | None = Field(None, min_length=1, max_length=4096)
    load_inplace: bool = False


class ReplacingAdapterBody(AdapterBody):
    """The body of `/load_lora_adapter` and `/skyrl/v1/load_lora_adapter`."""

    replaces: ClassVar = True


class UnloadBody(Body):
    """The body of `/v1/unload_lora_adapter`."""

    ignored: ClassVar = AdapterBody.ignored | dict.fromkeys(("lora_path", "load_inplace"), "the name is enough")
    switched_off: ClassVar = AdapterBody.switched_off

    lora_name: AdapterName


async def load_adapter(request: HttpRequest[AdapterBody]) -> str:
    """Load an adapter from a folder below `adapter_root`."""
    body = request.body
    if body.lora_path is None:
        raise bad_request("name the adapter's folder", "lora_path")
    await request.gateway.orders.load_adapter(body.lora_name, body.lora_path, body.replaces or body.load_inplace)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


async def unload_adapter(request: HttpRequest[UnloadBody]) -> str:
    """Unload an adapter."""
    await request.gateway.orders.unload_adapter(request.body.lora_name)
    return f"Success: LoRA adapter '{request.body.lora_name}' removed successfully."


async def continue_generation(request: HttpRequest[Any]) -> None:
    """End a pause. An error while an update lacks tensors."""
    await request.gateway.process_groups.finish_waiting()
    request.gateway.process_groups.check_whole()
    await request.gateway.orders.resume()
