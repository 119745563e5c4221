"""The endpoints by which trainers update weights through a process group: SGLang's and slime's, AReaL's, vLLM's."""

from __future__ import annotations

from typing import Any

from rollout.gateway.dialects.handling import Gateway, HttpRequest
from rollout.gateway.dialects.process_group_bodies import (
    FinishBody,
    GroupBody,
    GroupNameBody,
    InitBody,
    InitInfo,
    StartBody,
    TensorsBody,
    UpdateInfo,
)
from rollout.gateway.http.bodies import EmptyBody
from rollout.gateway.http.http_errors import HttpError, bad_request

_VLLM_GROUP = "vllm weight transfer"

# --- SGLang, slime, AReaL ---------------------------------------------------------------------------------------------


async def join(request: HttpRequest[GroupBody]) -> dict[str, Any]:
    """Let all workers join the trainer's process group."""
    body = request.body
    await request.gateway.group_updates.join(body.group_name, body.meeting, body.rank_offset, body.world_size)
    return _succeeded("All workers have joined the process group.")


async def leave(request: HttpRequest[GroupNameBody]) -> dict[str, Any]:
    """Let all workers leave a process group."""
    group = request.body.group_name
    if not await request.gateway.group_updates.leave(group):
        raise HttpError(404, f"no worker is in the group {group!r}: none joined, or it broke", "group_name")
    return _succeeded("All workers have left the process group.")


async def update(request: HttpRequest[TensorsBody]) -> dict[str, Any]:
    """Receive a part of an update, or a whole one. The last part puts the update in use."""
    return await _receive(request.gateway, request.body)


async def announce(request: HttpRequest[TensorsBody]) -> dict[str, Any]:
    """Announce the tensors of the next `/areal_update_weights_xccl`."""
    request.gateway.transfers.announced = request.body
    return _succeeded("The tensors are known.")


async def update_announced(request: HttpRequest[EmptyBody]) -> dict[str, Any]:
    """Receive the tensors that were announced."""
    transfers = request.gateway.transfers
    body, transfers.announced = transfers.announced, None
    if body is None:
        raise HttpError(409, "no tensors were announced; call /areal_set_update_weight_meta first")
    return await _receive(request.gateway, body)


async def _receive(gateway: Gateway, body: TensorsBody) -> dict[str, Any]:
    updates = gateway.group_updates
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


# --- vLLM -------------------------------------------------------------------------------------------------------------


async def init_engine(request: HttpRequest[InitBody]) -> dict[str, Any]:
    """Let all workers join the group of vLLM's weight transfer engine."""
    gateway, transfers = request.gateway, request.gateway.transfers
    info = InitInfo.take(request.body.init_info, "init_info.")
    meeting = info.meeting
    transfers.engine, transfers.started, transfers.tensors = None, False, []
    await gateway.group_updates.join(_VLLM_GROUP, meeting, info.rank_offset, info.world_size)
    transfers.engine = info
    return {"message": "Weight transfer initialized"}


async def shut_engine_down(request: HttpRequest[Any]) -> dict[str, Any]:
    """Let all workers leave the group of vLLM's weight transfer engine."""
    gateway, transfers = request.gateway, request.gateway.transfers
    if transfers.engine is not None:
        transfers.engine, transfers.started = None, False
        await gateway.group_updates.leave(_VLLM_GROUP)
    return {"message": "Weight transfer shut down"}


async def start(request: HttpRequest[StartBody]) -> dict[str, Any]:
    """Start an update by vLLM's engine."""
    gateway = request.gateway
    if gateway.transfers.engine is None:
        raise HttpError(409, "no weight transfer was initialized; call /init_weight_transfer_engine first")
    await gateway.group_updates.start()
    gateway.transfers.started = True
    return {"message": "Weight update started"}


async def receive_by_engine(gateway: Gateway, update_info: Any, place: str = "") -> dict[str, Any]:
    """Receive a part of an update, or a whole one.

    `update_info`: the value of the field with this name, which stands in the request at `place`.
    """
    place, transfers = f"{place}update_info.", gateway.transfers
    info, engine = UpdateInfo.take(update_info, place), transfers.engine
    if engine is None or not transfers.started:
        raise HttpError(409, "no update was started; call /start_weight_update first")
    packed = engine.packed if info.packed is None else info.packed
    packed_bytes = info.packed_buffer_size_bytes or engine.packed_buffer_size_bytes
    if info.names:
        transfers.tensors = info.rows(place)
    if not transfers.tensors:
        raise bad_request("name the tensors: no earlier call has named them", "names")
    await gateway.group_updates.gather(_VLLM_GROUP, transfers.tensors, packed_bytes if packed else None)
    return {"message": "Weights updated"}


async def finish(request: HttpRequest[FinishBody]) -> dict[str, Any]:
    """Put the update of vLLM's engine in use."""
    gateway = request.gateway
    if not gateway.transfers.started:
        raise HttpError(409, "no update was started; call /start_weight_update first")
    gateway.transfers.started = False
    version = await gateway.group_updates.finish(request.body.weight_version)
    return {"message": "Weight update finished", "weight_version": str(version)}


# --- refused ----------------------------------------------------------------------------------------------------------


async def refuse(request: HttpRequest[Any]) -> dict[str, Any]:
    """Refused: this way to send weights needs its own receiver, or pickle."""
    raise HttpError(
        501,
        f"{request.path} is not served: it needs a receiver of its own, or pickle. Send weights by "
        "/update_weights_from_distributed, from a folder, or with WeightPublisher",
    )
