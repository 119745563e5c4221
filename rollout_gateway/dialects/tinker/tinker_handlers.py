"""The handlers of Tinker's endpoints. Errors have OpenAI's body; clients send requests again for 408, 429 and 5xx."""

import asyncio
import hashlib
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from rollout_gateway.dialects.tinker.answers import SampleAnswer
from rollout_gateway.dialects.tinker.request_bodies import (
    NAMES,
    JoinBody,
    Params,
    ResultBody,
    SampleBody,
    SamplerBody,
    SessionBody,
    TinkerPrompt,
)
from rollout_gateway.dialects.tinker.tinker_sessions import TinkerSampler, TinkerSessions
from rollout_gateway.http.http_errors import HttpError, bad_request
from rollout_gateway.http.json_text import json_text
from rollout_gateway.requests.call import Call
from rollout_gateway.requests.http_request import GET, POST, Endpoint, Gateway, HttpRequest
from rollout_gateway.workers.workers import TokenRequest

_POLL_S = 20.0  # clients wait 45 s for an answer
_CLIENT_REQUESTS = 2000  # most requests in flight of one client
_SCHEME, _WEIGHTS = "tinker://", "/sampler_weights/"
_PROTOBUF = "application/x-protobuf"
#: Status of a fault after which a client may sample again: a full or lost worker, an abort.
_AGAIN = frozenset((429, 502, 503, 504))


# --- the service ------------------------------------------------------------------------------------------------------


async def healthz(request: HttpRequest[Any]) -> dict[str, Any]:
    """Answer as `/health`."""
    request.gateway.workers.health()
    return {"status": "ok"}


async def capabilities(request: HttpRequest[Any]) -> dict[str, Any]:
    """List the names of the model. It can be sampled from, not trained."""
    model = request.gateway.model
    facts = {"max_context_length": model.context_tokens, "trainable": False, "sampleable": True}
    return {"supported_models": [{"model_name": name} | facts for name in model.names]}


async def client_config(request: HttpRequest[Any]) -> dict[str, Any]:
    """Tell a client how to behave: keys as they are, few enough requests at once for the gateway's connections."""
    settings = request.gateway.settings
    most = min(_CLIENT_REQUESTS, settings.max_in_flight, max(1, settings.max_connections // 2))
    return {"pjwt_auth_enabled": False, "sample_max_concurrent_requests": most, "sample_join_sampling_session": True}


async def client_dynamic_config(request: HttpRequest[Any]) -> dict[str, Any]:
    """Tell a client to cancel requests whose results it does not wait for."""
    return {"sample_cancel_enabled": True}


async def telemetry(request: HttpRequest[Any]) -> dict[str, Any]:
    """Accept a client's telemetry and throw it away."""
    return {"status": "accepted"}


# --- sessions and samplers --------------------------------------------------------------------------------------------


async def create_session(request: HttpRequest[Any]) -> dict[str, Any]:
    """Begin a session. It ends 120 s after its client's last heartbeat or other request."""
    return {"type": "create_session", "session_id": _sessions(request).create()}


async def heartbeat(request: HttpRequest[SessionBody]) -> dict[str, Any]:
    """Keep a session; 410 if it has ended."""
    _sessions(request).seen(request.body.session_id)
    return {"type": "session_heartbeat"}


async def finish_session(request: HttpRequest[Any]) -> dict[str, Any]:
    """End a session and its requests."""
    _sessions(request).end(request.parts["session"])
    return {}


async def create_sampler(request: HttpRequest[SamplerBody]) -> dict[str, Any]:
    """Make a sampler for the model (`base_model`) or for a loaded adapter (`model_path`)."""
    body, sessions = request.body, _sessions(request)
    sessions.seen(body.session_id)
    adapter = await _adapter(request.gateway, body.base_model, body.model_path)
    name = f"{body.session_id}:{body.sampling_session_seq_id}"
    sessions.add(TinkerSampler(name, body.session_id, request.gateway.model.names[0], body.model_path, adapter))
    return {"type": "create_sampling_session", "sampling_session_id": name}


async def join_sampler(request: HttpRequest[JoinBody]) -> dict[str, Any]:
    """Give a number to one more client of a sampler."""
    number = _sessions(request).join(request.body.sampling_session_id)
    return {"type": "join_sampling_session", "client_counter": number}


async def sampler(request: HttpRequest[Any]) -> dict[str, Any]:
    """Tell the model of a sampler."""
    found = _sessions(request).sampler(request.parts["sampler"])
    return {"sampler_id": found.id, "base_model": found.base_model, "model_path": found.model_path}


def _sessions(request: HttpRequest[Any]) -> TinkerSessions:
    return request.gateway.state(TinkerSessions)


async def _adapter(gateway: Gateway, base_model: str | None, model_path: str | None) -> str | None:
    """The adapter that a request names, None for the model itself. Raises `HttpError`."""
    if base_model is None and model_path is None:
        raise bad_request("name 'base_model' or 'model_path'", "base_model")
    if base_model is not None and base_model not in gateway.model.names:
        message = f"the model {base_model!r:.200} does not exist; use {gateway.model.names[0]!r}"
        raise HttpError(404, message, "base_model")
    if model_path is None:
        return None
    path = model_path.removeprefix(_SCHEME)
    for name in dict.fromkeys((path, path.rpartition(_WEIGHTS)[2])):
        with suppress(HttpError):  # it does not exist
            return await gateway.adapter_of(name)
    raise HttpError(
        404,
        f"no adapter is loaded that {model_path!r:.200} names; load one, and use {_SCHEME}NAME or "
        f"{_SCHEME}RUN{_WEIGHTS}NAME",
        "model_path",
    )


# --- samples ----------------------------------------------------------------------------------------------------------


async def sample(request: HttpRequest[SampleBody]) -> dict[str, Any]:
    """Begin to sample, and return the id of the request. The same `seq_id` again names the same request."""
    body, gateway = request.body, request.gateway
    sessions = _sessions(request)
    if body.sampling_session_id is None:
        adapter, session = await _adapter(gateway, body.base_model, body.model_path), None
        name = None
    else:
        if body.seq_id is None:
            raise bad_request("number the requests of a sampler", "seq_id")
        found = sessions.sampler(body.sampling_session_id)
        adapter, session, name = found.adapter, found.session, f"{found.id}:{body.seq_id}"
    digest = hashlib.sha256(body.model_dump_json().encode()).digest()
    if name is None or not sessions.known(name, digest):
        work = _Sample(body, adapter)
        session = sessions.create() if session is None else session
        name = f"{session}:0:0" if name is None else name
        await sessions.start(name, session, digest, work.answer(gateway, name))
    return {"request_id": name, "sample_sequence_ids": [f"{name}:{index}" for index in range(body.num_samples)]}


async def retrieve(request: HttpRequest[ResultBody]) -> Response:
    """Return the result of a request: protobuf, or JSON if the header Accept does not name it.

    After 20 s without a result the status is 408: ask again. 410: there is no result, sample again. A request that
    failed has status 200 and an `error`.
    """
    name = request.body.request_id
    answer = await _sessions(request).ended(name, _POLL_S)
    if answer is None:
        return _json(_waiting(request.gateway, name), 408)
    if isinstance(answer, HttpError):
        return _failed(answer)
    if _PROTOBUF in request.headers.get("accept", ""):
        return Response(await asyncio.to_thread(answer.protobuf), media_type=_PROTOBUF)
    return _json(await asyncio.to_thread(answer.json))


async def cancel(request: HttpRequest[ResultBody]) -> dict[str, Any]:
    """End a request and forget its result."""
    _sessions(request).cancel(request.body.request_id)
    return {}


class _Sample:
    """A sample that is checked: what the workers are asked for, and how the answer is made of theirs."""

    def __init__(self, body: SampleBody, adapter: str | None) -> None:
        prompt = TinkerPrompt.take(body.prompt, "prompt.").token_ids()
        params = Params.take(body.sampling_params, "sampling_params.")
        self._body = body
        self._scored = body.last_scored(len(prompt))
        self._targets = body.targets(len(prompt))
        scored = max(self._scored, 0 if self._targets is None else len(self._targets.ids))
        fields: dict[str, Any] = params.worker_fields()
        fields |= {"adapter": adapter, "logprobs": body.topk_sample_logprobs}
        if scored:
            fields |= {"prompt_logprobs": True, "prompt_logprobs_last": scored}
        if body.topk_prompt_logprobs:
            fields["prompt_top_logprobs"] = body.topk_prompt_logprobs
        if self._targets is not None:
            fields["prompt_logprob_token_ids"] = self._targets.worker_ids(scored)
        self._request = TokenRequest(prompt, fields, body.num_samples, NAMES)

    async def answer(self, gateway: Gateway, name: str) -> SampleAnswer:
        """The answer. Raises `HttpError`."""
        (result,) = await Call(gateway, name, [self._request], None).whole()
        mode = gateway.settings.logprobs
        return await asyncio.to_thread(SampleAnswer.of, result, self._body, self._scored, self._targets, mode)


def _failed(error: HttpError) -> Response:
    """The answer for a request that has failed."""
    if error.status in _AGAIN:
        raise HttpError(410, f"sample again: {error}", error.param)
    named = error.param is None or repr(error.param) in str(error)  # clients show this text alone
    text = str(error) if named else f"{error.param}: {error}"
    return _json({"error": text, "category": "user" if error.status < 500 else "server"})


def _waiting(gateway: Gateway, name: str) -> dict[str, Any]:
    """Tinker's answer for a request that has not ended."""
    answer = {"type": "try_again", "request_id": name, "queue_state": "active"}
    if gateway.workers.lasting_order is None:
        return answer
    return answer | {"queue_state": "paused_capacity", "queue_state_reason": "generation is paused"}


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(json_text(value), status, media_type="application/json")


STATES = (TinkerSessions,)
ENDPOINTS = (
    Endpoint(GET, "/api/v1/healthz", "Tinker", healthz),
    Endpoint(GET, "/api/v1/get_server_capabilities", "Tinker", capabilities),
    Endpoint(POST, "/api/v1/client/config", "Tinker", client_config),
    Endpoint(POST, "/api/v1/client/dynamic_config", "Tinker", client_dynamic_config),
    Endpoint(POST, "/api/v1/telemetry", "Tinker", telemetry),
    Endpoint(POST, "/api/v1/create_session", "Tinker", create_session),
    Endpoint(POST, "/api/v1/session_heartbeat", "Tinker", heartbeat, SessionBody),
    Endpoint(POST, "/api/v1/sessions/{session}/finish", "Tinker", finish_session),
    Endpoint(POST, "/api/v1/create_sampling_session", "Tinker", create_sampler, SamplerBody),
    Endpoint(POST, "/api/v1/join_sampling_session", "Tinker", join_sampler, JoinBody),
    Endpoint(GET, "/api/v1/samplers/{sampler}", "Tinker", sampler),
    Endpoint(POST, "/api/v1/asample", "Tinker", sample, SampleBody),
    Endpoint(POST, "/api/v1/retrieve_future", "Tinker", retrieve, ResultBody, for_client=True),
    Endpoint(POST, "/api/v1/cancel_future", "Tinker", cancel, ResultBody),
)
