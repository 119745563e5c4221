"""Updates by vLLM's weight transfer engine, and its `/update_weights`, which prime-rl calls with a folder."""

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from rollout_gateway.dialects.weights.from_folder import UpdateBody
from rollout_gateway.dialects.weights.through_group import (
    WHOLE,
    Address,
    Rank,
    Shape,
    TensorName,
    WorldSize,
    tensor_rows,
)
from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import HttpError, bad_request
from rollout_gateway.orders.process_groups import TensorRows
from rollout_gateway.requests.http_request import POST, DialectState, Endpoint, Gateway, HttpRequest

_ID_BYTES = 128
_GIB = 1 << 30
_GROUP = "vllm weight transfer"


class InitInfo(Body):
    """`init_info` of `/init_weight_transfer_engine`: vLLM's NCCL engine."""

    ignored: ClassVar = {"packed_num_buffers": "changes nothing on the wire"}

    master_address: Address | None = None
    master_port: int | None = Field(None, ge=1, lt=1 << 16)
    nccl_unique_id_b64: str | None = None
    rank_offset: Rank
    world_size: WorldSize
    packed: bool = False
    packed_buffer_size_bytes: int = Field(_GIB, ge=1, le=WHOLE)

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
    packed_buffer_size_bytes: int | None = Field(None, ge=1, le=WHOLE)

    def rows(self, within: str) -> TensorRows:
        """Name, dtype and shape of each tensor. `within`: where these fields stand in the request, for errors."""
        return tensor_rows(self.names, self.dtype_names, self.shapes, f"{within}dtype_names")


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

    engine: InitInfo | None = None  # the initialization
    started: bool = False  # an update was started
    tensors: TensorRows = field(default_factory=list)  # tensors of the last call


async def update_weights(request: HttpRequest[UpdateBody]) -> dict[str, Any]:
    """Update the weights from a folder, or with `update_info` by vLLM's weight transfer engine."""
    if request.body.update_info is not None:
        return await receive_by_engine(request.gateway, request.body.update_info)
    version = await request.body.update(request.gateway)
    return {"status": "ok", "success": True, "message": "Weights updated", "weight_version": version}


async def init_engine(request: HttpRequest[InitBody]) -> dict[str, Any]:
    """Join the group of vLLM's weight transfer engine."""
    gateway, transfers = request.gateway, request.gateway.state(TransferState)
    info = InitInfo.take(request.body.init_info, "init_info.")
    meeting = info.meeting
    transfers.engine, transfers.started, transfers.tensors = None, False, []
    await gateway.process_groups.join(_GROUP, meeting, info.rank_offset, info.world_size)
    transfers.engine = info
    return {"message": "Weight transfer initialized"}


async def shut_engine_down(request: HttpRequest[Any]) -> dict[str, Any]:
    """Leave the group of vLLM's engine."""
    gateway, transfers = request.gateway, request.gateway.state(TransferState)
    if transfers.engine is not None:
        transfers.engine, transfers.started = None, False
        await gateway.process_groups.leave(_GROUP)
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
    await gateway.process_groups.gather(_GROUP, transfers.tensors, packed_bytes if packed else None)
    return {"message": "Weights updated"}


async def finish(request: HttpRequest[FinishBody]) -> dict[str, Any]:
    """Put the update in use."""
    gateway = request.gateway
    if not gateway.state(TransferState).started:
        raise HttpError(409, "no update was started; call /start_weight_update first")
    version = await gateway.process_groups.finish(request.body.weight_version)
    gateway.state(TransferState).started = False  # an update that lacks tensors may still get them
    return {"message": "Weight update finished", "weight_version": str(version)}


STATES = (TransferState,)
ENDPOINTS = (
    Endpoint(POST, "/update_weights", "vLLM", update_weights, UpdateBody),
    Endpoint(POST, "/init_weight_transfer_engine", "vLLM", init_engine, InitBody),
    Endpoint(POST, "/start_weight_update", "vLLM", start, StartBody),
    Endpoint(POST, "/finish_weight_update", "vLLM", finish, FinishBody),
    Endpoint(POST, "/shutdown_weight_transfer_engine", "vLLM", shut_engine_down),
)
