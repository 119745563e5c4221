"""The interface of every dialect: rows of the table of endpoints, and the argument of their handlers.

A handler gets an `HttpRequest` and returns what is answered:

    None                  the row's `answer`; without one, status 200 and no body
    a text                plain text
    an async generator    a stream of events, one for each value
    `NamedEvents`         a stream of named events
    a `Response`          itself
    another value         JSON
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from rollout.config.gateway_settings import GatewaySettings
from rollout_gateway.answers.logprobs import LogprobFormat
from rollout_gateway.history.trajectories import StoredResponse, Trajectories
from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import HttpError, bad_request
from rollout_gateway.orders.process_groups import ProcessGroupUpdates
from rollout_gateway.orders.worker_orders import WorkerOrders
from rollout_gateway.prompts.gateway_model import GatewayModel
from rollout_gateway.prompts.kv_hints import ForkField, KvFields
from rollout_gateway.prompts.sampling import OpenAiBody, RequestFields, SamplingBody
from rollout_gateway.workers.workers import Workers
from trainer_bridge.expiring_cache import ExpiringCache

_MAX_ID = 128
B = TypeVar("B", bound=Body)
C = TypeVar("C", bound=Body)


class DialectState:
    """A dialect's data between requests, from the start of the gateway to its end."""

    async def run(self) -> None:
        """Work until cancelled, if there is work apart from requests."""

    async def close(self) -> None:
        """Release what is kept."""


S = TypeVar("S", bound=DialectState)


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of a gateway."""

    settings: GatewaySettings
    workers: Workers
    model: GatewayModel
    orders: WorkerOrders
    process_groups: ProcessGroupUpdates
    trajectories: Trajectories
    responses: ExpiringCache[str, StoredResponse]
    states: Mapping[type[DialectState], Any]

    def state(self, kind: type[S]) -> S:
        """The state of this class, which a dialect names in its `STATES`."""
        found: S = self.states[kind]
        return found

    async def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request names as its model, None for the model itself. Raises `HttpError` (404)."""
        if model is None or model in self.model.names:
            return None
        for fresh in (False, True):  # an adapter may be new
            for status in await self.workers.known(fresh):
                if any(adapter["name"] == model for adapter in status.get("adapters") or ()):
                    return model
        raise HttpError(
            404, f"the model {model!r:.200} does not exist; use {self.model.names[0]!r} or a loaded adapter", "model"
        )

    async def openai_fields(self, body: OpenAiBody) -> dict[str, Any]:
        """The arguments of `generate` for an OpenAI request, apart from log-probs."""
        return body.worker_fields() | self.thinking_fields(body) | await self.request_fields(body)

    async def request_fields(self, body: RequestFields) -> dict[str, Any]:
        """The arguments of `generate` about a request as a whole. Raises `HttpError`."""
        adapter = await self.adapter_of(body.model)
        return {"adapter": adapter, "priority": -body.priority, "cache_salt": body.cache_salt}

    def thinking_fields(self, body: SamplingBody, within: str = "") -> dict[str, Any]:
        """The arguments of `generate` for a request's budget of thoughts. Raises `HttpError`."""
        budget, name = body.thought_budget(within)
        if budget is None:
            return {}
        if self.model.formats.thoughts is None:
            raise bad_request(
                "this gateway does not know how thoughts of this model start and end: start it with "
                "--reasoning-parser, or remove the field",
                name,
            )
        start, end = self.model.formats.thoughts
        return {"thinking_token_budget": budget, "thinking": {"start": start, "end": end}}

    def logprob_format(self, top: int, by_id: bool) -> LogprobFormat:
        """The format of log-probs for a request."""
        return LogprobFormat(self.settings.logprobs, top, self.model.text.token_bytes, by_id)


@dataclass(frozen=True, slots=True)
class HttpRequest(Generic[B]):
    """One request of a client. `body`: its JSON body or its URL's parameters, whichever the endpoint takes.

    `parts`: the parts of the path that the endpoint names.
    """

    gateway: Gateway
    body: B
    path: str
    headers: Mapping[str, str]
    parts: Mapping[str, str] = field(default_factory=dict)

    def with_body(self, body: C) -> HttpRequest[C]:
        return HttpRequest(self.gateway, body, self.path, self.headers, self.parts)

    def placement(self, key: str | None = None) -> tuple[str | None, dict[str, Any]]:
        """The session of the request, and the arguments of `generate` about its KV and its worker. Raises `HttpError`.

        `key` names the session if no header does.
        """
        session, fields = self._session_and_worker()
        session = session or key
        if isinstance(self.body, KvFields):
            fields |= self.body.hints(session)
        fork = self.body.continued(session) if isinstance(self.body, ForkField) else None
        return session, fields if fork is None else fields | {
            "fork": self.gateway.workers.request_ids.worker_fork(fork)
        }

    def _session_and_worker(self) -> tuple[str | None, dict[str, Any]]:
        session = self.headers.get("x-session-id")
        if session is not None and not 1 <= len(session) <= _MAX_ID:
            raise bad_request(f"send 1 to {_MAX_ID} characters", "X-Session-ID")
        rank = self.headers.get("x-data-parallel-rank")
        if rank is None:
            return session, {}
        endpoints = self.gateway.workers.pool.endpoints
        if not (rank.isascii() and rank.isdigit() and len(rank) < 6 and int(rank) < len(endpoints)):
            raise bad_request(f"send the number of a worker, 0 to {len(endpoints) - 1}", "X-data-parallel-rank")
        return None, {"endpoint": endpoints[int(rank)]}

    def id(self, prefix: str, given: str | None) -> str:
        """The id by which the client knows the request: `given` in the body, or in `X-Request-Id`, or a new one."""
        found = given or self.headers.get("x-request-id") or uuid.uuid4().hex
        if len(found) > _MAX_ID:
            raise bad_request(f"send at most {_MAX_ID} characters", "X-Request-Id")
        return f"{prefix}{found}"


Handler = Callable[[HttpRequest[Any]], Coroutine[Any, Any, Any]]
Clients = Literal["OpenAI", "Anthropic", "rollout", "vLLM", "SGLang", "SkyRL", "prime-rl", "AReaL", "slime", "Tinker"]


GET, POST, DELETE = ("GET",), ("POST",), ("DELETE",)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint. `clients`: the server or trainer whose clients call it.

    `takes`: the class of its JSON body, or of its URL's parameters; None: neither is looked at. `answer`: what is
    answered if the handler returns None. `for_client`: the work ends if the client leaves.
    """

    methods: tuple[str, ...]
    path: str
    clients: Clients
    handler: Handler
    takes: type[Body] | None = None
    answer: Any = None
    for_client: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)
