"""Endpoints about the gateway itself, under several dialects' paths: health, models, metrics, tokens of sessions."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from starlette.responses import PlainTextResponse, Response

from rollout import __version__
from rollout_gateway.answers.answer_facts import now
from rollout_gateway.http.event_stream import json_answer
from rollout_gateway.http.http_errors import HttpError
from rollout_gateway.http.json_text import Json, json_text
from rollout_gateway.requests.http_request import DELETE, GET, POST, Endpoint, Gateway, HttpRequest
from rollout_gateway.workers.worker_watch import WatchedWorker

_PING_S = 10.0
_LOGPROB_MODES = {"policy": "policy_logprobs", "processed": "processed_logprobs", "raw": "raw_logprobs"}


async def health(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return 200 if a worker is in order and has the fleet's weights; else 503 with reasons."""
    return request.gateway.workers.health()


async def health_generate(request: HttpRequest[Any]) -> dict[str, Any]:
    """Like `/health`, and the loop of every healthy worker has answered."""
    workers = request.gateway.workers
    answer = workers.health()
    well = [state.endpoint for state in workers.watch.states() if not state.problem]
    await asyncio.gather(*(workers.pool.control("ping", endpoint=each, timeout_s=_PING_S) for each in well))
    return answer


async def ping(request: HttpRequest[Any]) -> None:
    """Answer as long as the gateway's process runs."""


async def models(request: HttpRequest[Any]) -> dict[str, Any]:
    """List the names of the model, and the loaded adapters."""
    gateway, model = request.gateway, request.gateway.model
    names = gateway.settings.served_model_name or model.names[:1]
    cards = [_card(name, gateway.workers.model_path, None, model.context_tokens) for name in names]
    adapters: dict[str, None] = {}
    for status in gateway.workers.watch.last_known():
        adapters |= dict.fromkeys(adapter["name"] for adapter in status.get("adapters") or ())
    cards += [_card(name, name, model.names[0], model.context_tokens) for name in adapters]
    return {"object": "list", "data": cards}


async def version(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return the version of this package."""
    return {"version": __version__}


async def server_info(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return fields of vLLM and SGLang, and the state of the workers."""
    gateway, model = request.gateway, request.gateway.model
    statuses = await gateway.workers.known()
    adapters = [status for status in statuses if status.get("adapters") is not None]
    shown = ("worker", "state", "weights_version", "rows", "queue", "capabilities")
    return {
        "vllm_config": {
            "model_config": {
                "model": gateway.workers.model_path,
                "max_model_len": model.context_tokens,
                "dtype": statuses[0].get("dtype"),
                "logprobs_mode": _LOGPROB_MODES[gateway.settings.logprobs],
            },
            "parallel_config": {
                "world_size": 1,
                "tensor_parallel_size": 1,
                "data_parallel_size": len(gateway.workers.pool.endpoints),
            },
            "lora_config": {} if adapters else None,
            "weight_transfer_config": {"backend": "nccl"},
        },
        "model_path": gateway.workers.model_path,
        "served_model_name": model.names[0],
        "context_length": model.context_tokens,
        "dtype": statuses[0].get("dtype"),
        "tp_size": 1,
        "dp_size": len(gateway.workers.pool.endpoints),
        "weight_version": str(min(status["weights_version"] for status in statuses)),
        "workers": [{name: status[name] for name in shown} for status in statuses],
    }


async def metrics(request: HttpRequest[Any]) -> Response:
    """Return the metrics as Prometheus text, with vLLM's names and ours."""
    text = "".join(f"{line}\n" for line in _metric_lines(request.gateway))
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _metric_lines(gateway: Gateway) -> Iterator[str]:
    workers, model = gateway.workers, _quoted(gateway.model.names[0])
    counts, states = workers.counts, workers.watch.states()
    yield from _family("rollout_gateway_in_flight", "gauge", [("", workers.in_flight)])
    yield from _family("rollout_gateway_requests_total", "counter", [("", counts.requests)])
    yield from _family("rollout_gateway_refused_total", "counter", [("", counts.refused)])
    yield from _family("rollout_gateway_sessions", "gauge", [("", len(workers.sessions))])
    yield from _family("rollout_gateway_min_version", "gauge", [("", workers.watch.floor(states))])
    rows: defaultdict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for engine, state in enumerate(states):
        labels = f'engine="{engine}",model_name="{model}"'
        for name, kind, value in _values(state):
            rows[name, kind].append((f"{{{labels}}}", value))
        if state.status is not None:
            pages = state.status["pages"]["total"]
            rows["vllm:cache_config_info", "gauge"].append((f'{{{labels},num_gpu_blocks="{pages}"}}', 1))
    for (name, kind), samples in rows.items():
        yield from _family(name, kind, samples)


def _values(state: WatchedWorker) -> Iterator[tuple[str, str, float]]:
    """Names, kinds and values of a worker's metrics."""
    yield "rollout_gateway_worker_up", "gauge", int(state.status is not None)
    yield "rollout_gateway_worker_in_order", "gauge", int(not state.problem)
    if (status := state.status) is None:
        return
    pages = status["pages"]
    yield "vllm:num_requests_running", "gauge", status["rows"]["running"]
    yield "vllm:num_requests_waiting", "gauge", status["queue"]["waiting"]
    yield "vllm:kv_cache_usage_perc", "gauge", pages["used"] / pages["total"] if pages["total"] else 0.0
    yield "vllm:num_preemptions_total", "counter", status["preemptions"]
    yield "vllm:generation_tokens_total", "counter", status["tokens"]
    yield "rollout_worker_weights_version", "gauge", status["weights_version"]
    yield "rollout_worker_tokens_per_s", "gauge", status["tokens_per_s"]
    for name, value in status.get("metrics", {}).items():
        if isinstance(value, (int, float)):
            yield "rollout_" + name.replace("/", "_"), "gauge", value


def _family(name: str, kind: str, samples: list[tuple[str, float]]) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{labels} {value}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _card(name: str, root: str, parent: str | None, context: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": now(),
        "owned_by": "rollout",
        "root": root,
        "parent": parent,
        "max_model_len": context,
    }


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


ENDPOINTS = (
    Endpoint(GET, "/health", "vLLM", health),
    Endpoint(GET, "/health_generate", "SGLang", health_generate),
    Endpoint(GET + POST, "/ping", "vLLM", ping),
    Endpoint(GET, "/version", "vLLM", version),
    Endpoint(GET, "/v1/models", "OpenAI", models),
    Endpoint(GET, "/metrics", "vLLM", metrics),
    Endpoint(GET, "/server_info", "vLLM", server_info, aliases=("/get_server_info",)),
    Endpoint(GET, "/v1/trajectories/{session:path}", "rollout", read),
    Endpoint(DELETE, "/v1/trajectories/{session:path}", "rollout", delete),
)
