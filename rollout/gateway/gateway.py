"""What the handlers of a gateway share: settings, workers, tokenizer and parsers, and the rules for each request."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from rollout.config.gateway_settings import GatewaySettings
from rollout.gateway.bodies import decode, read_bytes
from rollout.gateway.errors import HttpError, bad_request
from rollout.gateway.folder_updates import FolderUpdates
from rollout.gateway.formats.choice import Formats
from rollout.gateway.images import Images
from rollout.gateway.logprobs import LogprobFormat
from rollout.gateway.sampling import OpenAiBody, SamplingBody
from rollout.gateway.text import Text
from rollout.gateway.workers import Workers
from trainer_bridge.client.results import Completion, GenerateResult

_MAX_ID = 128


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of a gateway. `names` are what requests may call the model; the first one is shown."""

    settings: GatewaySettings
    workers: Workers
    text: Text
    names: tuple[str, ...]
    context_tokens: int
    updates: FolderUpdates
    formats: Formats
    images: Images | None = None

    async def body(self, request: Request) -> Any:
        """The JSON value that a request brings. Raises `HttpError`."""
        return decode(await self.raw_body(request))

    async def optional_body(self, request: Request) -> Any:
        """As `body`; {} for an empty one."""
        data = await self.raw_body(request)
        return decode(data) if data.strip() else {}

    async def raw_body(self, request: Request) -> bytes:
        """The bytes that a request brings. Raises `HttpError`."""
        return await read_bytes(request, self.settings.max_body_bytes, self.settings.body_s)

    async def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request names as its model, None for the model itself. Raises `HttpError` (404)."""
        if model is None or model in self.names:
            return None
        for fresh in (False, True):  # it may be new
            for status in await self.workers.known(fresh):
                if any(adapter["name"] == model for adapter in status.get("adapters") or ()):
                    return model
        raise HttpError(
            404, f"the model {model!r:.200} does not exist; use {self.names[0]!r} or a loaded adapter", "model"
        )

    async def openai_fields(self, body: OpenAiBody) -> dict[str, Any]:
        """The arguments of `generate` for an OpenAI request, apart from log-probs."""
        adapter = await self.adapter_of(body.model)
        return body.worker_fields() | {"adapter": adapter, "priority": -body.priority, "cache_salt": body.cache_salt}

    def logprob_format(self, top: int, by_id: bool) -> LogprobFormat:
        """The format of log-probs for a request."""
        return LogprobFormat(self.settings.logprobs, top, self.text.token_bytes, by_id)

    def placement(self, request: Request) -> tuple[str | None, dict[str, Any]]:
        """The session of a request, and the fields that bring it to a worker: from its headers. Raises `HttpError`."""
        session = request.headers.get("x-session-id")
        if session is not None and not 1 <= len(session) <= _MAX_ID:
            raise bad_request(f"send 1 to {_MAX_ID} characters", "X-Session-ID")
        rank = request.headers.get("x-data-parallel-rank")
        if rank is None:
            return session, {}
        endpoints = self.workers.pool.endpoints
        if not (rank.isascii() and rank.isdigit() and len(rank) < 6 and int(rank) < len(endpoints)):
            raise bad_request(f"send the number of a worker, 0 to {len(endpoints) - 1}", "X-data-parallel-rank")
        return None, {"endpoint": endpoints[int(rank)]}


def new_id(prefix: str, request: Request, given: str | None) -> str:
    """The id that a client knows its request by: its own one, in the body or in `X-Request-Id`, or a new one."""
    found = given or request.headers.get("x-request-id") or uuid.uuid4().hex
    if len(found) > _MAX_ID:
        raise bad_request(f"send at most {_MAX_ID} characters", "X-Request-Id")
    return f"{prefix}{found}"


def now() -> int:
    """Unix time, for `created`."""
    return int(time.time())


def usage(results: list[GenerateResult]) -> dict[str, Any]:
    """OpenAI's `usage` of all results."""
    prompt = sum(result.prompt_tokens for result in results)
    tokens = sum(len(completion) for result in results for completion in result.completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results)},
    }


def fault(completion: Completion) -> HttpError | None:
    """The error of a completion that a fault has ended."""
    if completion.finish_reason == "error":
        return HttpError(500, f"the completion ended by a fault: {completion.error}")
    if completion.finish_reason == "cancelled" and completion.error is not None:
        return HttpError(503, f"the worker ended: {completion.error}", retry_s=1.0)
    return None


def end_facts(part: Completion, body: SamplingBody) -> dict[str, Any]:
    """How a completion ended, in vLLM's words; null while it goes on.

    `stop_reason` is a stop string or token of the request; the model's own end has none. A completion that a fault has
    ended has its tokens and an `error`; it is among others that are whole.
    """
    own = isinstance(part.stop, int) and part.stop not in body.stop_token_ids
    facts = {"finish_reason": _finish_reason(part), "stop_reason": None if own else part.stop}
    failed = fault(part)
    return facts if failed is None else facts | {"error": str(failed)}


def _finish_reason(completion: Completion) -> str | None:
    if fault(completion) is not None:
        return "error"
    reasons = {"cancelled": "abort", "stale": "abort", "deadline": "length"}
    reason = completion.finish_reason
    return None if reason is None else reasons.get(reason, reason)


def scores_version(result: GenerateResult) -> dict[str, int]:
    """The weights version of a prompt's log-probs, if the result has any."""
    return {} if result.prompt_version is None else {"prompt_weight_version": result.prompt_version}


def version_runs(part: Completion, start: int = 0) -> list[dict[str, int]]:
    """Runs of tokens with one weights version: `[{"version", "start", "end"}]`, with `end` exclusive."""
    runs = []
    for version, count in part.versions:
        runs.append({"version": version, "start": start, "end": start + count})
        start += count
    return runs
