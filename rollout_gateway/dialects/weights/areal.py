"""Updates as AReaL orders them: SGLang's tensors in two calls, the names before the broadcast."""

from dataclasses import dataclass
from typing import Any

from rollout_gateway.dialects.weights.from_folder import UpdateBody
from rollout_gateway.dialects.weights.through_group import GroupBody, TensorsBody, join, receive, succeeded
from rollout_gateway.dialects.weights.vllm_engine import update_weights
from rollout_gateway.http.bodies import EmptyBody
from rollout_gateway.http.http_errors import HttpError
from rollout_gateway.requests.http_request import POST, DialectState, Endpoint, HttpRequest


@dataclass(slots=True)
class AnnouncedTensors(DialectState):
    """The tensors of the next update. A gateway has one such state, so one trainer sends updates at a time."""

    body: TensorsBody | None = None


async def announce(request: HttpRequest[TensorsBody]) -> dict[str, Any]:
    """Announce the tensors of the next `/areal_update_weights_xccl`."""
    request.gateway.state(AnnouncedTensors).body = request.body
    return succeeded("The tensors are known.")


async def update_announced(request: HttpRequest[EmptyBody]) -> dict[str, Any]:
    """Receive the tensors that were announced."""
    announced = request.gateway.state(AnnouncedTensors)
    body, announced.body = announced.body, None
    if body is None:
        raise HttpError(409, "no tensors were announced; call /areal_set_update_weight_meta first")
    return await receive(request.gateway, body)


STATES = (AnnouncedTensors,)
ENDPOINTS = (
    Endpoint(POST, "/areal_update_weights", "AReaL", update_weights, UpdateBody),
    Endpoint(POST, "/areal_init_weights_update_group", "AReaL", join, GroupBody),
    Endpoint(POST, "/areal_set_update_weight_meta", "AReaL", announce, TensorsBody),
    Endpoint(POST, "/areal_update_weights_xccl", "AReaL", update_announced, EmptyBody),
)
