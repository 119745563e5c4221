"""The headers of replies; `docs/reference/protocol.md` lists them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rollout.engine.messages.statuses import EngineStatus, SequenceStatus
from rollout.engine.messages.to_service import Delta, RequestDone
from rollout.service.capabilities import ServedModel
from trainer_bridge.wire.codec import JOINED_ARRAYS, PROTOCOL_VERSION
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.errors import error_reply as error_fields


def ok_reply(request_id: str) -> dict[str, Any]:
    """The reply to an order that was carried out."""
    return _header("ok", request_id)


def error_reply(request_id: str, error: RolloutError) -> dict[str, Any]:
    """The reply to a message that was refused or failed."""
    return _header("error", request_id) | error_fields(error)


def chunk_reply(request_id: str, fields: dict[str, Any]) -> dict[str, Any]:
    """New tokens of one completion."""
    return _header("chunk", request_id) | fields


def chunks_reply(chunks: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """New tokens of several completions: the id of each one's request, and the fields of its chunk.

    The arrays that every chunk has are joined, in order; `tokens` has the length of each chunk's part.
    """
    heads = []
    for request_id, fields in chunks:
        others = {name: value for name, value in fields.items() if name not in JOINED_ARRAYS}
        heads.append({"id": request_id, "tokens": len(fields["token_ids"])} | others)
    columns = {name: np.concatenate([fields[name] for _, fields in chunks]) for name in JOINED_ARRAYS}
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
        "timing": {
            "queued_s": done.queued_s,
            "prefill_s": done.prefill_s,
            "decode_s": done.decode_s,
            "total_s": done.total_s,
        },
        "seed": seed,
        "worker": worker,
    }
    reply |= prompt_scores(done)
    if metadata is not None:
        reply["metadata"] = metadata
    if media:
        reply["media"] = list(media)
    if prompt is not None:
        reply["prompt_token_ids"] = prompt
    return reply


def prompt_scores(event: Delta | RequestDone) -> dict[str, Any]:
    """The fields of a reply for the facts about the prompt's tokens in an event."""
    if event.prompt_logprobs is None:
        return {}
    fields: dict[str, Any] = {"prompt_logprobs": event.prompt_logprobs}
    if event.prompt_version is not None:
        fields["prompt_version"] = event.prompt_version
    if event.prompt_chosen is not None:
        fields["prompt_chosen_logprobs"] = event.prompt_chosen
    if event.prompt_entropy is not None:
        fields["prompt_entropy"] = event.prompt_entropy
    return fields if event.prompt_tops is None else fields | event.prompt_tops.fields()


def status_reply(
    request_id: str,
    status: EngineStatus,
    model: ServedModel,
    *,
    draining: bool,
    preparing: int,
    results: dict[str, int],
    max_queue: int,
    max_message_bytes: int,
    worker: str,
    metrics_url: str | None,
    capabilities: Sequence[str],
    weights_endpoint: str | None,
    weights: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The state of the worker. `preparing`: requests with the tokenizer, which count as waiting.

    `weights` describes how updates apply; it is None for a worker without a weight receiver. `metrics_url` is the
    address of the page for Prometheus, if there is one.
    """
    return _header("status", request_id) | {
        "model": model.name,
        "dtype": model.dtype,
        "worker": worker,
        "pid": os.getpid(),
        "metrics_url": metrics_url,
        "state": "draining" if draining and status.state != "stalled" else status.state,
        "weights_version": status.weights_version,
        "weights_endpoint": weights_endpoint,
        "weights": None
        if weights is None
        else {"version": status.weights_version, "min_version": model.min_version, **weights},
        "rows": {"running": status.rows_running, "max": status.rows_max},
        "queue": {
            "waiting": status.queue_waiting + preparing,
            "max": status.queue_max or max_queue,
            "clients": status.queue_clients,
        },
        "pages": {
            "free": status.pages_free,
            "cached": status.pages_cached,
            "used": status.pages_used,
            "total": status.pages_total,
        },
        "sessions": asdict(status.sessions),
        "offload": asdict(status.offload),
        "kept": asdict(status.kept),
        "sleep": None if status.sleep is None else asdict(status.sleep),
        "slots": {"in_flight": status.slots_in_flight},
        "adapters": None if status.adapters is None else [asdict(adapter) for adapter in status.adapters],
        "tokens_per_s": status.tokens_per_s,
        "gpu_active_pct": status.gpu_active_pct,
        "gpu_busy_s": status.gpu_busy_s,
        "idle_pct": dict(status.idle_pct),
        "metrics": dict(status.metrics),
        "tokens": status.tokens,
        "tokens_by_second": list(status.tokens_by_second),
        "swaps": [{"version": swap.version, "age_s": swap.age_s, "pause_s": swap.pause_s} for swap in status.swaps],
        "results": results,
        "reclaimed": status.reclaimed,
        "preemptions": status.preemptions,
        "prefix_hits": dict(status.prefix_hits),
        "uptime_s": status.uptime_s,
        "last_tick_s": status.last_tick_s,
        "faults": status.faults,
        "restarts": status.restarts,
        "prompt_faults": status.prompt_faults,
        "ranks": [asdict(rank) for rank in status.ranks],
        "problems": list(status.problems),
        "capabilities": list(capabilities),
        "max_context_tokens": model.max_context_tokens,
        "max_message_bytes": max_message_bytes,
        "vocab_size": model.vocab_size,
        "eos_ids": list(model.eos_ids),
    }


def sequence_fields(sequence: SequenceStatus) -> dict[str, Any]:
    """One entry of `sequences` in a `status` reply."""
    owner, key = sequence.key
    return {
        "owner": owner,
        "id": key.rpartition("#")[0],
        "index": sequence.index,
        "state": sequence.state,
        "prompt_tokens": sequence.prompt_tokens,
        "tokens": sequence.tokens,
        "max_tokens": sequence.max_tokens,
        "pages": sequence.pages,
        "age_s": sequence.age_s,
        "version": sequence.version,
        "priority": sequence.priority,
    }


def trace_reply(request_id: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The last steps of the engine."""
    return _header("trace", request_id) | fields


def _header(op: str, request_id: str) -> dict[str, Any]:
    return {"v": PROTOCOL_VERSION, "op": op, "id": request_id}
