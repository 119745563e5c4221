"""Updates of weights, as each server and trainer orders them: from a folder, or through the trainer's process group."""

import base64
import binascii
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rollout_gateway.http.bodies import Body, EmptyBody
from rollout_gateway.http.http_errors import HttpError, bad_request
from rollout_gateway.orders.process_groups import TensorRows
from rollout_gateway.requests.http_request import POST, DialectState, Endpoint, Gateway, HttpRequest

_ID_BYTES = 128
_GIB = 1 << 30
_WHOLE = 1 << 62  # packed bytes: all tensors of a part in one broadcast

TensorName = Annotated[str, Field(min_length=1, max_length=512)]
Dim = Annotated[int, Field(ge=0, lt=1 << 50)]
Shape = Annotated[list[Dim], Field(max_length=8)]
Address = Annotated[str, Field(min_length=1, max_length=255)]
GroupName = Annotated[str, Field(min_length=1, max_length=128)]
Rank = Annotated[int, Field(ge=0, lt=1 << 16)]
WorldSize = Annotated[int, Field(ge=2, lt=1 << 16)]
_GROUP, _VLLM_GROUP = "weight_update_group", "vllm weight transfer"

# --- from a folder ----------------------------------------------------------------------------------------------------


class FolderBody(Body):
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

    async def update(self, gateway: Gateway) -> int:
        """Update the weights from the folder; returns their version. Raises `HttpError` unless exactly one is given."""
        given = {name: path for name in ("weight_dir", "model_path") if (path := getattr(self, name)) is not None}
        if len(given) != 1:
            raise bad_request("name the folder of the new weights in 'weight_dir' or 'model_path'", "weight_dir")
        ((name, path),) = given.items()
        return await gateway.orders.update_from_folder(path, self.weight_version, name)


async def update_weights(request: HttpRequest[FolderBody]) -> dict[str, Any]:
    """Update the weights from a folder, or with `update_info` by vLLM's weight transfer engine."""
    if request.body.update_info is not None:
        return await receive_by_engine(request.gateway, request.body.update_info)
    version = await request.body.update(request.gateway)
    return {"status": "ok", "success": True, "message": "Weights updated", "weight_version": version}


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
    return _succeeded(f"{body.local_checkpoint_dir} has version {body.target_version}.")


# --- through a process group: SGLang, slime, AReaL --------------------------------------------------------------------


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
        return _rows(self.names, self.dtypes, self.shapes, "dtypes")

    @property
    def packed_bytes(self) -> int | None:
        """Bytes of one broadcast of packed tensors; None: each tensor has a broadcast of its own."""
        return None if self.load_format is None else _WHOLE


def _rows(names: list[str], dtypes: list[str], shapes: list[list[int]], within: str) -> TensorRows:
    if not len(names) == len(dtypes) == len(shapes):
        raise bad_request(f"send a dtype and a shape for each of the {len(names)} names", within)
    plain = [dtype.removeprefix("torch.") for dtype in dtypes]
    return [list(row) for row in zip(names, plain, shapes, strict=True)]


async def join(request: HttpRequest[GroupBody]) -> dict[str, Any]:
    """Join the trainer's process group."""
    body = request.body
    await request.gateway.process_groups.join(body.group_name, body.meeting, body.rank_offset, body.world_size)
    return _succeeded("All workers have joined the process group.")


async def leave(request: HttpRequest[GroupNameBody]) -> dict[str, Any]:
    """Leave a process group."""
    group = request.body.group_name
    if not await request.gateway.process_groups.leave(group):
        raise HttpError(404, f"no worker is in the group {group!r}: none joined, or it broke", "group_name")
    return _succeeded("All workers have left the process group.")


async def update(request: HttpRequest[TensorsBody]) -> dict[str, Any]:
    """Receive a part of an update. The last part puts it in use."""
    return await _receive(request.gateway, request.body)


async def announce(request: HttpRequest[TensorsBody]) -> dict[str, Any]:
    """Announce the tensors of the next `/areal_update_weights_xccl`."""
    request.gateway.state(TransferState).announced = request.body
    return _succeeded("The tensors are known.")


async def update_announced(request: HttpRequest[EmptyBody]) -> dict[str, Any]:
    """Receive the tensors that were announced."""
    transfers = request.gateway.state(TransferState)
    body, transfers.announced = transfers.announced, None
    if body is None:
        raise HttpError(409, "no tensors were announced; call /areal_set_update_weight_meta first")
    return await _receive(request.gateway, body)


async def _receive(gateway: Gateway, body: TensorsBody) -> dict[str, Any]:
    updates = gateway.process_groups
    missing = await updates.gather(body.group_name, body.rows, body.packed_bytes)
    if not updates.begun:
        return _succeeded(f"{len(body.names)} tensors have come, and the workers have no use for them.")
    if missing:
        return _succeeded(f"{len(body.names)} tensors have come; the update still lacks {missing[0]}.")
    if waits_for := await updates.wait_for_more(body.weight_version):
        return _succeeded(f"The update is whole; {waits_for[0]} may follow until generation continues.")
    version = await updates.finish(body.weight_version)
    return _succeeded(f"The update is whole and in use as version {version}.")


def _succeeded(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}


# --- through a process group: vLLM, SkyRL -----------------------------------------------------------------------------


class InitInfo(Body):
    """`init_info` of `/init_weight_transfer_engine`: vLLM's NCCL engine."""

    ignored: ClassVar = {"packed_num_buffers": "changes nothing on the wire"}

    master_address: Address | None = None
    master_port: int | None = Field(None, ge=1, lt=1 << 16)
    nccl_unique_id_b64: str | None = None
    rank_offset: Rank
    world_size: WorldSize
    packed: bool = False
    packed_buffer_size_bytes: int = Field(_GIB, ge=1, le=_WHOLE)

    @property
    def meeting(self) -> dict[str, Any]:
        """The way in which the workers meet the trainer. Raises `HttpError` unless there is exactly one way."""
        meeting: dict[str, Any] = {"kind": "vllm", "backend": "nccl"}
        address = self.master_address, self.master_port
        if self.nccl_unique_id_b64 is not None and address == (None, None):
            return meeting | {"nccl_id": _nccl_id(self.nccl_unique_id_b64)}
        if self.nccl_unique_id_b64 is None and None not in address:
            return meeting | {"host": self.master_address, "port": self.master_port}
        raise bad_request(
            "send master_address and master_port, or nccl_unique_id_b64 alone", "init_info.master_address"
        )


class InitBody(Body):
    """The body of `/init_weight_transfer_engine`."""

    init_info: dict[str, Any]


class UpdateInfo(Body):
    """`update_info` of vLLM's `/update_weights`. Empty lists: the tensors of the call before.

    vLLM before 0.28 says here, and not at the init, whether tensors are packed.
    """

    ignored: ClassVar = InitInfo.ignored

    names: list[TensorName] = []
    dtype_names: list[str] = []
    shapes: list[Shape] = []
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = Field(None, ge=1, le=_WHOLE)

    def rows(self, within: str) -> TensorRows:
        """Name, dtype and shape of each tensor. `within`: where these fields stand in the request, for errors."""
        return _rows(self.names, self.dtype_names, self.shapes, f"{within}dtype_names")


class StartBody(Body):
    """The body of `/start_weight_update`."""

    may_be_empty: ClassVar = True
    switched_off: ClassVar = {"is_checkpoint_format": (None, True)}


class FinishBody(Body):
    """The body of `/finish_weight_update`."""

    may_be_empty: ClassVar = True

    weight_version: int | str | None = None


def _nccl_id(given: str) -> str:
    """The id in hexadecimal."""
    try:
        nccl_id = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        nccl_id = b""
    if len(nccl_id) != _ID_BYTES:
        raise bad_request(f"send {_ID_BYTES} bytes in base64", "init_info.nccl_unique_id_b64")
    return nccl_id.hex()


@dataclass(slots=True)
class TransferState(DialectState):
    """The state between the calls of an update. A gateway has one, so one trainer sends updates at a time."""

    #: Set by AReaL's `/areal_set_update_weight_meta`: the tensors of the next update.
    announced: TensorsBody | None = None
    #: vLLM's engine: its initialization, whether an update was started, and the tensors of its last call.
    engine: InitInfo | None = None
    started: bool = False
    tensors: TensorRows = field(default_factory=list)


async def init_engine(request: HttpRequest[InitBody]) -> dict[str, Any]:
    """Join the group of vLLM's weight transfer engine."""
    gateway, transfers = request.gateway, request.gateway.state(TransferState)
    info = InitInfo.take(request.body.init_info, "init_info.")
    meeting = info.meeting
    transfers.engine, transfers.started, transfers.tensors = None, False, []
    await gateway.process_groups.join(_VLLM_GROUP, meeting, info.rank_offset, info.world_size)
    transfers.engine = info
    return {"message": "Weight transfer initialized"}


async def shut_engine_down(request: HttpRequest[Any]) -> dict[str, Any]:
    """Leave the group of vLLM's engine."""
    gateway, transfers = request.gateway, request.gateway.state(TransferState)
    if transfers.engine is not None:
        transfers.engine, transfers.started = None, False
        await gateway.process_groups.leave(_VLLM_GROUP)
    return {"message": "Weight transfer shut down"}


async def start(request: HttpRequest[StartBody]) -> dict[str, Any]:
    """Start an update by vLLM's engine."""
    gateway = request.gateway
    if gateway.state(TransferState).engine is None:
        raise HttpError(409, "no weight transfer was initialized; call /init_weight_transfer_engine first")
    await gateway.process_groups.start()
    gateway.state(TransferState).started = True
    return {"message": "Weight update started"}


async def receive_by_engine(gateway: Gateway, update_info: Any, within: str = "") -> dict[str, Any]:
    """Receive a part of an update, or a whole one.

    `update_info`: the value of the field with this name, which stands in the request at `within`.
    """
    within, transfers = f"{within}update_info.", gateway.state(TransferState)
    info, engine = UpdateInfo.take(update_info, within), transfers.engine
    if engine is None or not transfers.started:
        raise HttpError(409, "no update was started; call /start_weight_update first")
    packed = engine.packed if info.packed is None else info.packed
    packed_bytes = info.packed_buffer_size_bytes or engine.packed_buffer_size_bytes
    if info.names:
        transfers.tensors = info.rows(within)
    if not transfers.tensors:
        raise bad_request("name the tensors: no earlier call has named them", "names")
    await gateway.process_groups.gather(_VLLM_GROUP, transfers.tensors, packed_bytes if packed else None)
    return {"message": "Weights updated"}


async def finish(request: HttpRequest[FinishBody]) -> dict[str, Any]:
    """Put the update in use."""
    gateway = request.gateway
    if not gateway.state(TransferState).started:
        raise HttpError(409, "no update was started; call /start_weight_update first")
    version = await gateway.process_groups.finish(request.body.weight_version)
    gateway.state(TransferState).started = False  # an update that lacks tensors may still get them
    return {"message": "Weight update finished", "weight_version": str(version)}


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


STATES = (TransferState,)
ENDPOINTS = (
    Endpoint(POST, "/update_weights", "vLLM", update_weights, FolderBody),
    Endpoint(POST, "/areal_update_weights", "AReaL", update_weights, FolderBody),
    Endpoint(POST, "/update_weights_from_disk", "SGLang", update_from_disk, FolderBody),
    Endpoint(POST, "/pull_weights", "slime", pull, PullBody),
    Endpoint(POST, "/init_weights_update_group", "SGLang", join, GroupBody),
    Endpoint(POST, "/areal_init_weights_update_group", "AReaL", join, GroupBody),
    Endpoint(POST, "/update_weights_from_distributed", "SGLang", update, TensorsBody),
    Endpoint(POST, "/areal_set_update_weight_meta", "AReaL", announce, TensorsBody),
    Endpoint(POST, "/areal_update_weights_xccl", "AReaL", update_announced, EmptyBody),
    Endpoint(POST, "/destroy_weights_update_group", "SGLang", leave, GroupNameBody),
    Endpoint(POST, "/init_weight_transfer_engine", "vLLM", init_engine, InitBody),
    Endpoint(POST, "/start_weight_update", "vLLM", start, StartBody),
    Endpoint(POST, "/finish_weight_update", "vLLM", finish, FinishBody),
    Endpoint(POST, "/shutdown_weight_transfer_engine", "vLLM", shut_engine_down),
    Endpoint(POST, "/collective_rpc", "SkyRL", collective_rpc, RpcBody),
)
