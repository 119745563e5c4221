"""`/v1/trajectories`: the tokens of a session, as the engine has read and drawn them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from rollout.gateway.dialects.handling import HttpRequest
from rollout.gateway.http.event_stream import json_answer
from rollout.gateway.http.http_errors import HttpError
from rollout.gateway.http.json_text import Json, json_text


async def read(request: HttpRequest[Any]) -> Response:
    """Return the turns of a session and its branches: token ids, masks, log-probs and weights versions."""
    session, gateway = _session(request), request.gateway
    found = gateway.trajectories.get(session)
    if found is None:
        raise _unknown(session)
    head = {"session": session, "model": gateway.model.names[0], "logprobs": gateway.settings.logprobs}
    snapshot = found.copy()  # it may grow while the text is made
    return json_answer(Json(await asyncio.to_thread(lambda: json_text(head | snapshot.shown()))))


async def delete(request: HttpRequest[Any]) -> dict[str, Any]:
    """Forget the tokens of a session."""
    session = _session(request)
    if not request.gateway.trajectories.drop(session):
        raise _unknown(session)
    return {"session": session, "deleted": True}


def _session(request: HttpRequest[Any]) -> str:
    """The session that the path names, or the one that holds the stored response of this id."""
    name = request.parts["session"]
    stored = request.gateway.responses.get(name)
    return name if stored is None else stored.trajectory


def _unknown(session: str) -> HttpError:
    return HttpError(
        404,
        f"no tokens are kept of the session {session!r:.200}: it is unknown, older than --session-s, or dropped "
        "because of --max-kept-bytes",
        "session",
    )
