"""Whether the gateway can serve, what it serves, and its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rollout import __version__
from rollout.gateway.answers import json_answer
from rollout.gateway.errors import HttpError
from rollout.gateway.gateway import Gateway, now
from rollout.gateway.watch import WorkerState
from trainer_bridge.wire.errors import with_endpoint

_PING_S = 10.0
_LOGPROB_MODES = {"policy": "policy_logprobs", "processed": "processed_logprobs", "raw": "raw_logprobs"}


class Health:
    """Answers requests about the gateway itself."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, request: Request) -> Response:
        """`/health`: 200 if a worker is in order and has the fleet's weights, else 503 with the reasons."""
        watch = self._gateway.workers.watch
        states = watch.states()
        problems = {state.endpoint: state.problem for state in states if state.problem}
        if len(problems) == len(states):
            raise HttpError(503, "; ".join(with_endpoint(*problem) for problem in problems.items()))
        floor = watch.floor(states)
        return json_answer({"status": "ok", "workers": len(states), "unhealthy": problems, "min_version": floor})

    async def ping(self, request: Request) -> Response:
        """`/ping`: the gateway's process answers."""
        return Response(status_code=200)

    async def health_generate(self, request: Request) -> Response:
        """SGLang's `/health_generate`: as `/health`, and the loop of every healthy worker answers."""
        answer = await self.health(request)
        workers = self._gateway.workers
        well = [state.endpoint for state in workers.watch.states() if not state.problem]
        await asyncio.gather(*(workers.pool.control("ping", endpoint=each, timeout_s=_PING_S) for each in well))
        return answer

    async def models(self, request: Request) -> Response:
        """`/v1/models`: the model's names, and the loaded adapters."""
        gateway = self._gateway
        names = gateway.settings.served_model_name or gateway.names[:1]
        cards = [_card(name, gateway.workers.model_path, None, gateway.context_tokens) for name in names]
        adapters: dict[str, None] = {}
        for status in gateway.workers.watch.last_known():
            adapters |= dict.fromkeys(adapter["name"] for adapter in status.get("adapters") or ())
        cards += [_card(name, name, gateway.names[0], gateway.context_tokens) for name in adapters]
        return json_answer({"object": "list", "data": cards})

    async def version(self, request: Request) -> Response:
        """`/version`."""
        return json_answer({"version": __version__})

    async def server_info(self, request: Request) -> Response:
        """`/server_info`: what TRL reads of vLLM's configuration, what slime reads of SGLang's, and the workers."""
        gateway = self._gateway
        statuses = await gateway.workers.known()
        adapters = [status for status in statuses if status.get("adapters") is not None]
        version = min(status["weights_version"] for status in statuses)
        return json_answer(
            {
                "vllm_config": {
                    "model_config": {
                        "model": gateway.workers.model_path,
                        "max_model_len": gateway.context_tokens,
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
                "served_model_name": gateway.names[0],
                "context_length": gateway.context_tokens,
                "dtype": statuses[0].get("dtype"),
                "tp_size": 1,
                "dp_size": len(gateway.workers.pool.endpoints),
                "weight_version": str(version),
                "workers": [
                    {
                        name: status[name]
                        for name in ("worker", "state", "weights_version", "rows", "queue", "capabilities")
                    }
                    for status in statuses
                ],
            }
        )

    async def metrics(self, request: Request) -> Response:
        """`/metrics`: Prometheus text with vLLM's names and ours."""
        states = self._gateway.workers.watch.states()
        text = "".join(f"{line}\n" for line in self._lines(states))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _lines(self, states: list[WorkerState]) -> Iterator[str]:
        workers, model = self._gateway.workers, _quoted(self._gateway.names[0])
        counts = workers.counts
        yield from _family("rollout_gateway_in_flight", "gauge", [("", workers.in_flight)])
        yield from _family("rollout_gateway_requests_total", "counter", [("", counts.requests)])
        yield from _family("rollout_gateway_refused_total", "counter", [("", counts.refused)])
        yield from _family("rollout_gateway_sessions", "gauge", [("", len(workers.sessions))])
        yield from _family("rollout_gateway_min_version", "gauge", [("", workers.watch.floor(states))])
        rows: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for engine, state in enumerate(states):
            labels = f'{{engine="{engine}",model_name="{model}"}}'
            rows.setdefault(("rollout_gateway_worker_up", "gauge"), []).append((labels, int(state.status is not None)))
            rows.setdefault(("rollout_gateway_worker_in_order", "gauge"), []).append((labels, int(not state.problem)))
            for name, kind, value in _values(state.status):
                rows.setdefault((name, kind), []).append((labels, value))
            if state.status is not None:
                pages = state.status["pages"]["total"]
                shown = f'{{engine="{engine}",model_name="{model}",num_gpu_blocks="{pages}"}}'
                rows.setdefault(("vllm:cache_config_info", "gauge"), []).append((shown, 1))
        for (name, kind), samples in rows.items():
            yield from _family(name, kind, samples)


def _values(status: dict[str, Any] | None) -> Iterator[tuple[str, str, float]]:
    """Names, kinds and values of a worker's metrics."""
    if status is None:
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
