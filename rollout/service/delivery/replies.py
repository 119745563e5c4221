"""The headers of replies; `docs/reference/protocol.md` lists them."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rollout.engine.messages.statuses import EngineStatus, SequenceStatus
from rollout.engine.messages.to_service import RequestDone
from rollout.service.capabilities import ServedModel
from trainer_bridge.wire.codec import PROTOCOL_VERSION
from trainer_bridge.wire.columns import TOKEN_COLUMNS
from trainer_bridge.wire.errors import InternalError, RolloutError
from trainer_bridge.wire.errors import error_reply as error_fields

logger = logging.getLogger(__name__)


def ok_reply(request_id: str) -> dict[str, Any]:
    """The reply to an order that was carried out."""
    return _header("ok", request_id)


def error_reply(request_id: str, error: RolloutError) -> dict[str, Any]:
    """The reply to a message that was refused or failed."""
    return _header("error", request_id) | error_fields(error)


def as_error(error: BaseException, what: str, fields: Mapping[str, Any]) -> RolloutError:
    """The error of a reply. Another exception is a fault of ours, for the log; `what` happened to `fields`."""
    if isinstance(error, RolloutError):
        return error
    logger.error(what, exc_info=error, extra=fields)
    return InternalError("a fault in the worker; its log has the trace under this id")


def chunk_reply(request_id: str, fields: dict[str, Any]) -> dict[str, Any]:
    """New tokens of one completion."""
    return _header("chunk", request_id) | fields


def chunks_reply(chunks: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """New tokens of several completions: the id of each one's request, and the fields of its chunk.

    The arrays that every chunk has are joined, in order; `tokens` has the length of each chunk's part.
    """
    heads = []
    for request_id, fields in chunks:
        others = {name: value for name, value in fields.items() if name not in TOKEN_COLUMNS}
        heads.append({"id": request_id, "tokens": len(fields["token_ids"])} | others)
    columns = {name: np.concatenate([fields[name] for _, fields in chunks]) for name in TOKEN_COLUMNS}
    return _header("chunks", "") | {"chunks": heads} | columns


def result_reply(
    request_id: str,
    done: RequestDone,
    completions: list[dict[str, Any]],
    *,
    seed: int,
    worker: str,
    metadata: dict[str, Any] | None,
    media: Sequence[str] = (),
    prompt: np.ndarray | None = None,
) -> dict[str, Any]:
    """All completions of a request, its timing, and the hashes of its images; with the token ids of its `prompt`."""
    reply = _header("result", request_id) | {
        "completions": completions,
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "preemptions": done.preemptions,
        "timing": {name: getattr(done, name) for name in ("queued_s", "prefill_s", "decode_s", "total_s")},
        "seed": seed,
        "worker": worker,
    }
    if done.prompt_logprobs is not None:
        reply |= done.score_fields()
    if metadata is not None:
        reply["metadata"] = metadata
    if media:
        reply["media"] = list(media)
    if prompt is not None:
        reply["prompt_token_ids"] = prompt
    return reply


def status_reply(request_id: str, status: EngineStatus, model: ServedModel, **facts: Any) -> dict[str, Any]:
    """The state of the worker: its engine, its model, and `facts`, which are more fields."""
    fields = asdict(status)
    for group in ("rows", "queue", "pages", "slots"):
        names = [name for name in fields if name.startswith(f"{group}_")]
        fields[group] = {name.removeprefix(f"{group}_"): fields.pop(name) for name in names}
    del fields["stale"]  # one of the problems
    fields |= {"model": model.name, "dtype": model.dtype, "max_context_tokens": model.max_context_tokens}
    fields |= {"vocab_size": model.vocab_size, "eos_ids": list(model.eos_ids), "pid": os.getpid()}
    return _header("status", request_id) | fields | facts


def sequence_fields(sequence: SequenceStatus) -> dict[str, Any]:
    """One entry of `sequences` in a `status` reply."""
    fields = asdict(sequence)
    owner, key = fields.pop("key")
    return {"owner": owner, "id": key.rpartition("#")[0], **fields}


def trace_reply(request_id: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The last steps of the engine."""
    return _header("trace", request_id) | fields


def _header(op: str, request_id: str) -> dict[str, Any]:
    return {"v": PROTOCOL_VERSION, "op": op, "id": request_id}
