"""Compares streams through the HTTP gateway with streams of the zmq client: tokens per second, and latency of a token.

The worker, the gateway and the client (this process) are three processes on one machine. Each turn runs the same
requests with both clients, one after the other.

    tokens/s     `--rows` streams at once; both clients get events of `stream_every` tokens
    latency      from the commit of a token's step, as the worker's trace has it, to the token's arrival in the client

For the latency one stream is watched, alone and beside `--rows` - 1 others, with an event for each token. Its tokens
are found in the trace by their order: the trace's steps are shifted so that no token arrives before its step, by as few
steps as possible.

On few cores the worker, the gateway and the client compete: then the gateway's own work slows the worker, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import rollout.demo
from scripts.bench.output import DEFAULT_FOLDER, print_table, write_results
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.launch import start_worker

PROMPT = [4, 10, 14]  # `17:`
_ONES = Path(rollout.demo.__file__).parent / "checkpoints" / "ones"
_MOST_TRACED = 2000
_START_S = 120.0

#: Streams one completion: (prompt, tokens) to pairs of arrival (Unix time) and number of new tokens.
Streamer = Callable[[int], AsyncIterator[tuple[float, int]]]


def main() -> None:
    """Run the benchmark and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128, help="streams at once")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--turns", type=int, default=3, help="turns of each comparison")
    parser.add_argument("--stream-every", type=int, nargs="+", default=[1, 16, 64], help="tokens of an event")
    parser.add_argument("--model", type=Path, default=_ONES, help="checkpoint; its vocabulary has the prompt's ids")
    parser.add_argument("--note", default="", help="what else the machine does, for the JSON")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "gateway.json")
    args = parser.parse_args()
    flags = {
        "max_rows": args.rows,
        "max_context_tokens": args.tokens * 4 + 64,
        "wandb": False,
        "kv_memory_max_gib": 2.0,
    }
    with start_worker(args.model, progress=False, **flags) as worker:
        rows = asyncio.run(compare_throughput(worker.endpoint, args))
        delays = asyncio.run(compare_latency(worker.endpoint, args))
    print_table(f"{args.rows} streams", rows)
    print_table("latency of a token, median, ms", delays)
    write_results(args.out, rows, latency=delays, streams=args.rows, tokens=args.tokens, note=args.note)


async def compare_throughput(endpoint: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of both clients, by tokens of an event."""
    rows = []
    for every in args.stream_every:
        speeds: dict[str, list[float]] = {"zmq": [], "http": []}
        with serving(endpoint, every) as port:
            async with AsyncRolloutClient(endpoint) as client:
                ways = {"zmq": zmq_streamer(client, every), "http": http_streamer(port)}
                for turn in range(args.turns + 1):
                    for name in sorted(ways, reverse=turn % 2 == 0):
                        start = time.perf_counter()
                        counts = await asyncio.gather(*(count(ways[name](args.tokens)) for _ in range(args.rows)))
                        if turn:  # the first turn warms up
                            speeds[name].append(sum(counts) / (time.perf_counter() - start))
        zmq, http = (statistics.median(speeds[name]) for name in ("zmq", "http"))
        rows.append(
            {"stream_every": every, "zmq_tokens_per_s": zmq, "http_tokens_per_s": http, "http_share": http / zmq}
        )
    return rows


async def compare_latency(endpoint: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Median latency of a token in both clients, alone and beside others."""
    rows = []
    with serving(endpoint, 1) as port:
        async with AsyncRolloutClient(endpoint) as client:
            ways = {"zmq": zmq_streamer(client, 1), "http": http_streamer(port)}
            for beside in (0, args.rows - 1):
                found: dict[str, list[float]] = {"zmq": [], "http": []}
                for turn in range(args.turns):
                    for name in sorted(ways, reverse=turn % 2 == 0):
                        others = [asyncio.create_task(count(ways[name](args.tokens * 3))) for _ in range(beside)]
                        while (await client.status())["rows"]["running"] < beside:
                            await asyncio.sleep(0.05)
                        arrivals = [
                            at for at, tokens in [item async for item in ways[name](args.tokens)] if tokens == 1
                        ]
                        (trace,) = await client.control("trace", steps=min(_MOST_TRACED, args.tokens * 4))
                        found[name].append(1e3 * latency(np.array(arrivals), trace))
                        for other in others:
                            other.cancel()
                        await asyncio.gather(*others, return_exceptions=True)
                        while (await client.status())["rows"]["running"]:
                            await asyncio.sleep(0.05)
                zmq, http = (statistics.median(found[name]) for name in ("zmq", "http"))
                rows.append({"beside": beside, "zmq_ms": zmq, "http_ms": http, "added_ms": http - zmq})
    return rows


def latency(arrivals: np.ndarray, trace: dict[str, Any]) -> float:
    """Median seconds from the commit of a token's step to its arrival; `arrivals` are Unix times [tokens]."""
    steps = trace["steps"]
    commits = trace["origin_s"] + steps["committed_at_s"][steps["kind"] == 0]
    for first in range(len(commits) - len(arrivals), -1, -1):
        delays = arrivals - commits[first : first + len(arrivals)]
        if delays.min() >= 0:
            return float(np.median(delays))
    raise ValueError("the trace does not have the steps of this stream; lower --tokens")


async def count(stream: AsyncIterator[tuple[float, int]]) -> int:
    """Tokens of a stream."""
    return sum([tokens async for _, tokens in stream])


def zmq_streamer(client: AsyncRolloutClient, every: int) -> Streamer:
    """Streams by the zmq client."""

    async def stream(tokens: int) -> AsyncIterator[tuple[float, int]]:
        fields: Any = {"max_tokens": tokens, "stop": {"ignore_eos": True}, "stream_every": every}
        async with await client.generate(PROMPT, stream="tokens", **fields) as chunks:
            async for chunk in chunks:
                yield time.time(), len(chunk.token_ids)

    return stream


def http_streamer(port: int) -> Streamer:
    """Streams by HTTP/1.1, a connection each, as plainly as it can be read."""

    async def stream(tokens: int) -> AsyncIterator[tuple[float, int]]:
        params = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
        body = json.dumps({"token_ids": PROMPT, "sampling_params": params, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status = await reader.readline()
            assert b" 200 " in status, status
            async for line in reader:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    yield time.time(), len(choice["token_ids"])
                elif line.startswith(b"data: [DONE]"):
                    return
            raise ConnectionError("the stream ended without [DONE]")
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    return stream


@contextlib.contextmanager
def serving(endpoint: str, every: int) -> Iterator[int]:
    """The port of a gateway process."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [
            sys.executable,
            "-m",
            "rollout.cli.main",
            "gateway",
            endpoint,
            "--port",
            "0",
            "--ready-file",
            str(ready),
        ]
        process = subprocess.Popen([*command, "--stream-every", str(every)], stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + _START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the gateway did not start")
                time.sleep(0.05)
            yield int(json.loads(ready.read_text())["url"].rpartition(":")[2])
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
