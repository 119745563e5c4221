"""Updates through the trainer's process group: SGLang's endpoints, which slime calls."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import HttpError, bad_request
from rollout_gateway.orders.process_groups import TensorRows
from rollout_gateway.requests.http_request import POST, Endpoint, Gateway, HttpRequest

#: Packed bytes: all tensors of a part in one broadcast.
WHOLE = 1 << 62

TensorName = Annotated[str, Field(min_length=1, max_length=512)]
Dim = Annotated[int, Field(ge=0, lt=1 << 50)]
Shape = Annotated[list[Dim], Field(max_length=8)]
Address = Annotated[str, Field(min_length=1, max_length=255)]
GroupName = Annotated[str, Field(min_length=1, max_length=128)]
Rank = Annotated[int, Field(ge=0, lt=1 << 16)]
WorldSize = Annotated[int, Field(ge=2, lt=1 << 16)]
_GROUP = "weight_update_group"


class GroupBody(Body):
    """The body of `/init_weights_update_group`; AReaL sends the port as a string."""

    master_address: Address
    master_port: int | str
    rank_offset: Rank
    world_size: WorldSize
    group_name: GroupName = _GROUP
    backend: str = "nccl"

    @property
    def meeting(self) -> dict[str, Any]:
        """The way in which the workers meet the trainer. Raises `HttpError` for a wrong port."""
        given = self.master_port
        port = int(given) if isinstance(given, int) or (given.isascii() and given.isdigit() and len(given) < 6) else 0
        if not 1 <= port < 1 << 16:
            raise bad_request("send the port of the trainer's store, 1 to 65535", "master_port")
        host = self.master_address.removeprefix("[").removesuffix("]")
        return {"kind": "torch", "backend": self.backend, "host": host, "port": port}


class GroupNameBody(Body):
    """The body of `/destroy_weights_update_group`."""

    may_be_empty: ClassVar = True

    group_name: GroupName = _GROUP


class TensorsBody(Body):
    """The body of `/update_weights_from_distributed` and `/areal_set_update_weight_meta`."""

    ignored: ClassVar = {
        "flush_cache": "see `engine.max_kv_age`",
        "torch_empty_cache": "nothing is flushed",
        "abort_all_requests": "an update aborts nothing",
        "selector": "there is one model",
    }

    names: list[TensorName] = Field(min_length=1)
    dtypes: list[str]
    shapes: list[Shape]
    group_name: GroupName = _GROUP
    weight_version: int | str | None = None
    load_format: Literal["flattened_bucket"] | None = None

    @property
    def rows(self) -> TensorRows:
        """Name, dtype and shape of each tensor. Raises `HttpError` for lists of different lengths."""
        return tensor_rows(self.names, self.dtypes, self.shapes, "dtypes")

    @property
    def packed_bytes(self) -> int | None:
        """Bytes of one broadcast of packed tensors; None: each tensor has a broadcast of its own."""
        return None if self.load_format is None else WHOLE


def tensor_rows(names: list[str], dtypes: list[str], shapes: list[list[int]], within: str) -> TensorRows:
    """Name, dtype and shape of each tensor. Raises `HttpError`, at the field `within`, for lists of other lengths."""
    if not len(names) == len(dtypes) == len(shapes):
        raise bad_request(f"send a dtype and a shape for each of the {len(names)} names", within)
    plain = [dtype.removeprefix("torch.") for dtype in dtypes]
    return [list(row) for row in zip(names, plain, shapes, strict=True)]


async def join(request: HttpRequest[GroupBody]) -> dict[str, Any]:
    """Join the trainer's process group."""
    body = request.body
    await request.gateway.process_groups.join(body.group_name, body.meeting, body.rank_offset, body.world_size)
    return succeeded("All workers have joined the process group.")


async def leave(request: HttpRequest[GroupNameBody]) -> dict[str, Any]:
    """Leave a process group."""
    group = request.body.group_name
    if not await request.gateway.process_groups.leave(group):
        raise HttpError(404, f"no worker is in the group {group!r}: none joined, or it broke", "group_name")
    return succeeded("All workers have left the process group.")


async def update(request: HttpRequest[TensorsBody]) -> dict[str, Any]:
    """Receive a part of an update. The last part puts it in use."""
    return await receive(request.gateway, request.body)


async def receive(gateway: Gateway, body: TensorsBody) -> dict[str, Any]:
    """Receive these tensors; the last part puts the update in use."""
    updates = gateway.process_groups
    missing = await updates.gather(body.group_name, body.rows, body.packed_bytes)
    if not updates.begun:
        return succeeded(f"{len(body.names)} tensors have come, and the workers have no use for them.")
    if missing:
        return succeeded(f"{len(body.names)} tensors have come; the update still lacks {missing[0]}.")
    if waits_for := await updates.wait_for_more(body.weight_version):
        return succeeded(f"The update is whole; {waits_for[0]} may follow until generation continues.")
    version = await updates.finish(body.weight_version)
    return succeeded(f"The update is whole and in use as version {version}.")


def succeeded(message: str) -> dict[str, Any]:
    """The reply of SGLang's endpoints."""
    return {"success": True, "message": message}


ENDPOINTS = (
    Endpoint(POST, "/init_weights_update_group", "SGLang", join, GroupBody),
    Endpoint(POST, "/update_weights_from_distributed", "SGLang", update, TensorsBody),
    Endpoint(POST, "/destroy_weights_update_group", "SGLang", leave, GroupNameBody),
)
