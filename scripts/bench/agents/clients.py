"""How turns are asked for, and where the figures of an engine come from.

SocketTurns   this service, by the project's client: plain requests or sessions; prefix-aware or in turn
HttpTurns     any server with OpenAI's `/v1/completions` that takes and returns token ids: vLLM, the gateway
WorkerGauge   figures of this service's workers: `status`, and their metrics port
PageGauge     figures of vLLM: its `/metrics`
"""

import asyncio
import http.client
import itertools
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from trainer_bridge.client.asynchronous import AsyncRolloutClient

_TIMEOUT_S = 900.0
_LEASE_S = 1800.0  # of a session; a tool may take minutes
_REPORT_S = 20.0  # longest wait for a worker's next report


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: its tokens, seconds until the first token, `[version, tokens]` runs if known."""

    token_ids: np.ndarray  # int32 [tokens]
    first_s: float
    versions: Sequence[tuple[int, int]] = ()


class Ask(Protocol):
    """Asks for the next turn of one trajectory."""

    async def __call__(self, prompt: np.ndarray, max_tokens: int) -> Answer:
        """Complete the prompt, int32 [tokens], with exactly `max_tokens` tokens."""
        ...


class Turns(Protocol):
    """Asks an engine."""

    def trajectory(self) -> Any:
        """A context for one trajectory, which gives an `Ask`."""
        ...

    def close(self) -> None:
        """End its connections."""
        ...


# --- asking -----------------------------------------------------------------------------------------------------------


class SocketTurns:
    """Asks workers of this service over their sockets.

    Args:
        client: of one or several workers.
        sessions: a session for each trajectory; else plain requests.
        in_turn: these workers get the requests in turn; empty: the client chooses.
    """

    def __init__(self, client: AsyncRolloutClient, *, sessions: bool, in_turn: Sequence[str] = ()) -> None:
        self._client, self._sessions = client, sessions
        self._in_turn = itertools.cycle(in_turn) if in_turn else None

    @asynccontextmanager
    async def trajectory(self) -> AsyncIterator[Ask]:
        """One trajectory."""
        if not self._sessions:
            yield self._ask
            return
        async with self._client.session(lease_s=_LEASE_S) as session:

            async def ask(prompt: np.ndarray, max_tokens: int) -> Answer:
                return _answer(await session.generate(prompt, **_fields(max_tokens)))

            yield ask

    async def _ask(self, prompt: np.ndarray, max_tokens: int) -> Answer:
        where: Any = {} if self._in_turn is None else {"endpoint": next(self._in_turn)}
        return _answer(await self._client.generate(prompt, **_fields(max_tokens), **where))

    def close(self) -> None:
        """No-op: the client is the caller's."""


def _fields(max_tokens: int) -> Any:
    return {"max_tokens": max_tokens, "stop": {"ignore_eos": True}, "timeout_s": _TIMEOUT_S}


def _answer(result: Any) -> Answer:
    (completion,) = result.completions
    return Answer(completion.token_ids, result.timing.queued_s + result.timing.prefill_s, completion.versions)


class HttpTurns:
    """A server of OpenAI's completions, with streams: the first event has the first token.

    Each trajectory that runs has a thread.

    Args:
        url: such as http://127.0.0.1:8000.
        sessions: name the trajectory in X-Session-ID, as the gateway and routers read it.
        threads: trajectories at once.
    """

    def __init__(self, url: str, *, sessions: bool, threads: int) -> None:
        self._at = urllib.parse.urlsplit(url)
        self._sessions, self._numbers = sessions, itertools.count()
        self._pool = ThreadPoolExecutor(threads, "http")
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=_TIMEOUT_S) as page:
            self._model = json.load(page)["data"][0]["id"]

    @asynccontextmanager
    async def trajectory(self) -> AsyncIterator[Ask]:
        """One trajectory."""
        headers = {"Content-Type": "application/json"}
        if self._sessions:
            headers["X-Session-ID"] = f"agent-{next(self._numbers)}"

        async def ask(prompt: np.ndarray, max_tokens: int) -> Answer:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._complete, prompt, max_tokens, headers)

        yield ask

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _complete(self, prompt: np.ndarray, max_tokens: int, headers: Mapping[str, str]) -> Answer:
        body = {
            "model": self._model,
            "prompt": prompt.tolist(),
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "logprobs": 0,  # what a trainer needs
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # no tokenizer is needed
            "stream": True,
        }
        connection = http.client.HTTPConnection(self._at.hostname or "", self._at.port or 80, timeout=_TIMEOUT_S)
        try:
            began_s, first_s = time.perf_counter(), 0.0
            connection.request("POST", f"{self._at.path}/v1/completions", json.dumps(body), dict(headers))
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"the server answered {response.status}: {response.read(2000).decode()}")
            tokens: list[int] = []
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the server ended a stream: {event['error']}")
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        first_s = first_s or time.perf_counter() - began_s
                        tokens += choice["token_ids"]
            return Answer(np.asarray(tokens, dtype=np.int32), first_s)
        finally:
            connection.close()


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gauged:
    """Figures of an engine: `running` and `waiting` completions of now, `kv` of now by tier and name; the rest counts
    since its start.
    """

    running: int
    waiting: int
    computed: int  # prompt tokens that prefills computed
    known: int  # prompt tokens whose KV was there
    busy_s: float | None = None  # seconds in which the device ran a step, of all workers
    preemptions: int = 0
    kv: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Gauge(Protocol):
    """Reads the figures of an engine."""

    async def now(self) -> Gauged:
        """The figures, quickly; what an engine counts may be a few seconds old."""
        ...

    async def settled(self) -> Gauged:
        """The figures, with counts that are not older than this call."""
        ...


class WorkerGauge:
    """The workers of this service, added up. Each needs a metrics port."""

    def __init__(self, client: AsyncRolloutClient) -> None:
        self._client = client

    async def now(self) -> Gauged:
        """As `Gauge.now`."""
        return _gauged(list((await self._client.statuses()).values()), 0, 0)

    async def settled(self) -> Gauged:
        """As `Gauge.settled`. Raises RuntimeError for a worker without a metrics port."""
        asked_s = time.time()
        statuses = list((await self._client.statuses()).values())
        computed = known = 0
        for status in statuses:
            if not status["metrics_url"]:
                raise RuntimeError("a worker has no metrics port; start it with --metrics-port 0")
            page = await asyncio.to_thread(read_page, status["metrics_url"])
            while page.get("rollout_report_time_s", 0.0) <= asked_s:
                if time.time() - asked_s > _REPORT_S:
                    raise RuntimeError(f"a worker wrote no report for {_REPORT_S:.0f} s; lower its --interval-s")
                await asyncio.sleep(0.1)
                page = await asyncio.to_thread(read_page, status["metrics_url"])
            computed += int(page["rollout_prefill_tokens_computed_total"])
            known += int(page["rollout_prefill_tokens_shared_total"])
        return _gauged(statuses, computed, known)


def _gauged(statuses: Sequence[Mapping[str, Any]], computed: int, known: int) -> Gauged:
    kv: dict[str, dict[str, float]] = {}
    for status in statuses:
        for name, part in status.items():  # pages of the device, sessions, offload, and what tiers there will be
            if name == "pages" or name != "prefix_hits" and isinstance(part, Mapping) and "pages" in part:
                figures = kv.setdefault(name, {})
                for figure, value in part.items():
                    if isinstance(value, (int, float)):
                        figures[figure] = figures.get(figure, 0) + value
    return Gauged(
        running=sum(status["rows"]["running"] for status in statuses),
        waiting=sum(status["queue"]["waiting"] for status in statuses),
        computed=computed,
        known=known,
        busy_s=sum(status["gpu_busy_s"] for status in statuses),
        preemptions=sum(status["preemptions"] for status in statuses),
        kv=kv,
    )


class PageGauge:
    """vLLM's `/metrics`."""

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/metrics"

    async def now(self) -> Gauged:
        """As `Gauge.now`. Raises RuntimeError for a page without vLLM's counts."""
        page = await asyncio.to_thread(read_page, self._url)
        try:
            asked, hits = page["vllm:prefix_cache_queries_total"], page["vllm:prefix_cache_hits_total"]
        except KeyError as error:
            raise RuntimeError(
                f"{self._url} has no {error.args[0]}; of a gateway's workers give the endpoints with --workers"
            ) from error
        outside = page.get("vllm:external_prefix_cache_hits_total", 0.0)  # in host memory or beyond
        return Gauged(
            running=int(page.get("vllm:num_requests_running", 0)),
            waiting=int(page.get("vllm:num_requests_waiting", 0)),
            computed=int(asked - hits - outside),
            known=int(hits + outside),
            preemptions=int(page.get("vllm:num_preemptions_total", 0)),
            kv={
                "pages": {"used_share": page.get("vllm:kv_cache_usage_perc", 0.0), "hits": hits},
                "outside": {"hits": outside},
            },
        )

    settled = now  # the server counts at once


_SAMPLE = re.compile(r"^([^\s{#]+)(?:\{.*\})? (\S+)")


def read_page(url: str) -> dict[str, float]:
    """The samples of a Prometheus page by name, summed over labels."""
    with urllib.request.urlopen(url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    found: dict[str, float] = {}
    for match in filter(None, map(_SAMPLE.match, lines)):
        found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found
