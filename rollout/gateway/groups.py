"""The endpoints by which trainers update weights through a process group: SGLang's and slime's, AReaL's, vLLM's."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from rollout.gateway.answers import json_answer
from rollout.gateway.bodies import Body
from rollout.gateway.errors import HttpError, bad_request
from rollout.gateway.gateway import Gateway
from rollout.gateway.group_updates import GroupUpdates, Rows

_VLLM_GROUP = "vllm weight transfer"
_ID_BYTES = 128
_GIB = 1 << 30
_WHOLE = 1 << 62  # packed bytes: all tensors of a part in one broadcast

Name = Annotated[str, Field(min_length=1, max_length=512)]
Dim = Annotated[int, Field(ge=0, lt=1 << 50)]
Shape = Annotated[list[Dim], Field(max_length=8)]


class GroupBody(Body):
    """The body of `/init_weights_update_group`; AReaL sends the port as a string."""

    master_address: str = Field(min_length=1, max_length=255)
    master_port: int | str
    rank_offset: int = Field(ge=0, lt=1 << 16)
    world_size: int = Field(ge=2, lt=1 << 16)
    group_name: str = Field("weight_update_group", min_length=1, max_length=128)
    backend: str = "nccl"


class GroupNameBody(Body):
    """The body of `/destroy_weights_update_group`."""

    group_name: str = Field("weight_update_group", min_length=1, max_length=128)


class TensorsBody(Body):
    """The body of `/update_weights_from_distributed` and `/areal_set_update_weight_meta`."""

    ignored: ClassVar = {
        "flush_cache": "KV of older weights is never used",
        "torch_empty_cache": "nothing is flushed",
        "abort_all_requests": "an update aborts nothing",
        "selector": "there is one model",
    }

    names: list[Name] = Field(min_length=1)
    dtypes: list[str]
    shapes: list[Shape]
    group_name: str = Field("weight_update_group", min_length=1, max_length=128)
    weight_version: int | str | None = None
    load_format: Literal["flattened_bucket"] | None = None

    def rows(self) -> Rows:
        """Name, dtype and shape of each tensor."""
        return _rows(self.names, self.dtypes, self.shapes, "dtypes")


class InitInfo(Body):
    """`init_info` of `/init_weight_transfer_engine`: vLLM's NCCL engine."""

    ignored: ClassVar = {"packed_num_buffers": "how many broadcasts are in flight changes nothing on the wire"}

    master_address: str | None = Field(None, min_length=1, max_length=255)
    master_port: int | None = Field(None, ge=1, lt=1 << 16)
    nccl_unique_id_b64: str | None = None
    rank_offset: int = Field(ge=0, lt=1 << 16)
    world_size: int = Field(ge=2, lt=1 << 16)
    packed: bool = False
    packed_buffer_size_bytes: int = Field(_GIB, ge=1, le=_WHOLE)


class InitBody(Body):
    """The body of `/init_weight_transfer_engine`."""

    init_info: dict[str, Any]


class UpdateInfo(Body):
    """`update_info` of vLLM's `/update_weights`. Empty lists: the tensors of the call before.

    vLLM before 0.28 says here, and not at the init, whether tensors are packed.
    """

    ignored: ClassVar = InitInfo.ignored

    names: list[Name] = []
    dtype_names: list[str] = []
    shapes: list[Shape] = []
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = Field(None, ge=1, le=_WHOLE)


class StartBody(Body):
    """The body of `/start_weight_update`."""

    switched_off: ClassVar = {"is_checkpoint_format": (None, True)}


class FinishBody(Body):
    """The body of `/finish_weight_update`."""

    weight_version: int | str | None = None


class Groups:
    """Answers the requests."""

    def __init__(self, gateway: Gateway, updates: GroupUpdates) -> None:
        self._gateway = gateway
        self._updates = updates
        self._announced: TensorsBody | None = None  # AReaL's, for the update that follows
        self._engine: InitInfo | None = None  # vLLM's
        self._started = False
        self._tensors: Rows = []  # of the last call of `/update_weights`

    # --- SGLang, slime, AReaL ----------------------------------------------------------------------------------------

    async def join(self, request: Request) -> Response:
        """`/init_weights_update_group` and `/areal_init_weights_update_group`."""
        body = GroupBody.take(await self._gateway.body(request))
        meeting = {
            "kind": "torch",
            "backend": body.backend,
            "host": body.master_address.removeprefix("[").removesuffix("]"),
            "port": _port(body.master_port),
        }
        await self._updates.join(body.group_name, meeting, body.rank_offset, body.world_size)
        return _succeeded("All workers have joined the process group.")

    async def leave(self, request: Request) -> Response:
        """`/destroy_weights_update_group`."""
        group = GroupNameBody.take(await self._gateway.optional_body(request)).group_name
        if not await self._updates.leave(group):
            raise HttpError(404, f"no worker is in the group {group!r}: none joined, or it broke", "group_name")
        return _succeeded("All workers have left the process group.")

    async def update(self, request: Request) -> Response:
        """`/update_weights_from_distributed`: a part, or the whole of an update."""
        return await self._receive(TensorsBody.take(await self._gateway.body(request)))

    async def announce(self, request: Request) -> Response:
        """`/areal_set_update_weight_meta`: what the next `/areal_update_weights_xccl` brings."""
        self._announced = TensorsBody.take(await self._gateway.body(request))
        return _succeeded("The tensors are known.")

    async def update_announced(self, request: Request) -> Response:
        """`/areal_update_weights_xccl`."""
        Body.take(await self._gateway.optional_body(request))
        body, self._announced = self._announced, None
        if body is None:
            raise HttpError(409, "no tensors were announced; call /areal_set_update_weight_meta first")
        return await self._receive(body)

    async def _receive(self, body: TensorsBody) -> Response:
        packed_bytes = None if body.load_format is None else _WHOLE
        missing = await self._updates.gather(body.group_name, body.rows(), packed_bytes)
        if not self._updates.begun:
            return _succeeded(f"{len(body.names)} tensors have come, and the workers have no use for them.")
        if missing:
            return _succeeded(f"{len(body.names)} tensors have come; the update still lacks {missing[0]}.")
        if waits_for := await self._updates.wait_for_more(body.weight_version):
            return _succeeded(f"The update is whole; {waits_for[0]} may follow until generation continues.")
        version = await self._updates.finish(body.weight_version)
        return _succeeded(f"The update is whole and in use as version {version}.")

    # --- vLLM --------------------------------------------------------------------------------------------------------

    async def init_engine(self, request: Request) -> Response:
        """`/init_weight_transfer_engine`."""
        info = InitInfo.take(InitBody.take(await self._gateway.body(request)).init_info, "init_info.")
        meeting: dict[str, Any] = {"kind": "vllm", "backend": "nccl"}
        if info.nccl_unique_id_b64 is not None and info.master_address is None and info.master_port is None:
            meeting["nccl_id"] = _nccl_id(info.nccl_unique_id_b64)
        elif info.nccl_unique_id_b64 is None and info.master_address is not None and info.master_port is not None:
            meeting |= {"host": info.master_address, "port": info.master_port}
        else:
            raise bad_request(
                "send master_address and master_port, or nccl_unique_id_b64 alone", "init_info.master_address"
            )
        self._engine, self._started, self._tensors = None, False, []
        await self._updates.join(_VLLM_GROUP, meeting, info.rank_offset, info.world_size)
        self._engine = info
        return json_answer({"message": "Weight transfer initialized"})

    async def shut_engine_down(self, request: Request) -> Response:
        """`/shutdown_weight_transfer_engine`."""
        if self._engine is not None:
            self._engine, self._started = None, False
            await self._updates.leave(_VLLM_GROUP)
        return json_answer({"message": "Weight transfer shut down"})

    async def start(self, request: Request) -> Response:
        """`/start_weight_update`."""
        return await self.start_engine(await self._gateway.optional_body(request))

    async def start_engine(self, fields: Any, place: str = "") -> Response:
        """Begin an update; `fields` are the body of `/start_weight_update`, and stand in the request at `place`."""
        StartBody.take(fields, place)
        if self._engine is None:
            raise HttpError(409, "no weight transfer was initialized; call /init_weight_transfer_engine first")
        await self._updates.start()
        self._started = True
        return json_answer({"message": "Weight update started"})

    async def update_engine(self, update_info: Any, place: str = "") -> Response:
        """`/update_weights {update_info}`: a part, or the whole of an update."""
        info = UpdateInfo.take(update_info, f"{place}update_info.")
        if self._engine is None or not self._started:
            raise HttpError(409, "no update was started; call /start_weight_update first")
        packed = self._engine.packed if info.packed is None else info.packed
        packed_bytes = info.packed_buffer_size_bytes or self._engine.packed_buffer_size_bytes
        if info.names:
            self._tensors = _rows(info.names, info.dtype_names, info.shapes, f"{place}update_info.dtype_names")
        if not self._tensors:
            raise bad_request("name the tensors; there is no earlier call whose names could be used", "names")
        await self._updates.gather(_VLLM_GROUP, self._tensors, packed_bytes if packed else None)
        return json_answer({"message": "Weights updated"})

    async def finish(self, request: Request) -> Response:
        """`/finish_weight_update {weight_version}`: the update is in use when the answer comes."""
        return await self.finish_engine(await self._gateway.optional_body(request))

    async def finish_engine(self, fields: Any, place: str = "") -> Response:
        """Put the update in use; `fields` and `place` as for `start_engine`."""
        body = FinishBody.take(fields, place)
        if not self._started:
            raise HttpError(409, "no update was started; call /start_weight_update first")
        self._started = False
        version = await self._updates.finish(body.weight_version)
        return json_answer({"message": "Weight update finished", "weight_version": str(version)})


def _rows(names: list[str], dtypes: list[str], shapes: list[list[int]], field: str) -> Rows:
    if not len(names) == len(dtypes) == len(shapes):
        raise bad_request(f"send a dtype and a shape for each of the {len(names)} names", field)
    plain = [dtype.removeprefix("torch.") for dtype in dtypes]
    return [list(row) for row in zip(names, plain, shapes, strict=True)]


def _port(given: int | str) -> int:
    port = int(given) if isinstance(given, int) or (given.isascii() and given.isdigit() and len(given) < 6) else 0
    if not 1 <= port < 1 << 16:
        raise bad_request("send the port of the trainer's store, 1 to 65535", "master_port")
    return port


def _nccl_id(given: str) -> str:
    """The id in hexadecimal."""
    try:
        nccl_id = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        nccl_id = b""
    if len(nccl_id) != _ID_BYTES:
        raise bad_request(f"send {_ID_BYTES} bytes in base64", "init_info.nccl_unique_id_b64")
    return nccl_id.hex()


def _succeeded(message: str) -> Response:
    return json_answer({"success": True, "message": message})
