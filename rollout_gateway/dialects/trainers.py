"""Orders and sessions that SkyRL, prime-rl and AReaL add to vLLM's."""

from typing import Any

from pydantic import Field

from rollout_gateway.http.bodies import Query
from rollout_gateway.requests import admin
from rollout_gateway.requests.http_request import POST, Endpoint, HttpRequest


async def pause_and_abort(request: HttpRequest[Any]) -> None:
    """Pause all workers. Running requests end with their tokens."""
    await request.gateway.orders.pause("abort")


class SessionQuery(Query):
    """The parameters of `/finish_session`."""

    session_id: str = Field(min_length=1)


async def finish_session(request: HttpRequest[SessionQuery]) -> dict[str, Any]:
    """Free the KV of a session."""
    return {"finished": request.gateway.workers.sessions.end(request.body.session_id)}


ENDPOINTS = (
    Endpoint(POST, "/finish_session", "SkyRL", finish_session, SessionQuery),
    Endpoint(POST, "/skyrl/v1/load_lora_adapter", "SkyRL", admin.load_adapter, admin.ReplacingAdapterBody),
    Endpoint(POST, "/load_lora_adapter", "prime-rl", admin.load_adapter, admin.ReplacingAdapterBody),
    Endpoint(POST, "/areal_pause_generation", "AReaL", pause_and_abort, None, {"status": "paused"}, for_client=True),
    Endpoint(POST, "/areal_continue_generation", "AReaL", admin.continue_generation, answer=admin.CONTINUED),
)
