"""Compares streams through the HTTP gateway with streams of the zmq client: tokens per second, and latency of a token.

The worker, the gateway and the client (this process) are three processes on one machine. Each turn runs the same
requests with both clients, one after the other.

    tokens/s     `--rows` streams at once; both clients get events of `stream_every` tokens
    latency      from the commit of a token's step to the token's arrival in the client

On a paced device a step takes a given time and no core, as on a GPU; tokens/s are also measured for a worker that
computes on the CPU. For the latency, on a paced device, one stream is watched, with an event for each token, alone and
next to others that get 16 tokens an event. Its tokens are found among the commits by their order: the commits are
shifted so that no token arrives before its step, by as few steps as possible.

On few cores the worker, the gateway and the client compete: then the gateway's work slows the worker, too. So the CPU
time of a token is reported as well: of the client (`zmq`, `http`), and of the gateway.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollout.demo
from rollout.config import EngineSettings, ServiceSettings, Settings
from rollout.engine.build import local_links
from rollout.engine.inspect import Inspector
from rollout.engine.kv.allocator import pages_for
from rollout.metrics.meter import Meter
from rollout.metrics.step_timing import StepTiming
from rollout.process.interpreter import SWITCH_INTERVAL_S
from rollout.service.capabilities import Outbox, ServedEngine, ServedModel
from rollout.service.server import Server
from scripts.bench.bookkeeping import TINY_SHAPE
from scripts.bench.output import DEFAULT_FOLDER, print_table, write_results
from scripts.bench.service_load import make_engine, write_text_folder
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.launch import start_worker

PROMPT = [4, 10, 14]  # `17:`
_ONES = Path(rollout.demo.__file__).parent / "checkpoints" / "ones"
_STATUS_S = 0.1
_START_S = 120.0

#: Streams one completion: (prompt, tokens) to pairs of arrival (perf_counter) and number of new tokens.
Streamer = Callable[[int], AsyncIterator[tuple[float, int]]]


def main() -> None:
    """Run the benchmark and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128, help="streams at once")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--turns", type=int, default=3, help="turns of each comparison")
    parser.add_argument("--stream-every", type=int, nargs="+", default=[1, 16, 64], help="tokens of an event")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of a step of the paced device")
    parser.add_argument("--paced-worker", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, default=_ONES, help="checkpoint; its vocabulary has the prompt's ids")
    parser.add_argument("--note", default="", help="what else the machine does, for the JSON")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "gateway.json")
    args = parser.parse_args()
    if args.paced_worker is not None:
        serve_paced(args.paced_worker, args.rows, args.tokens, args.step_ms / 1e3)
        return
    flags = {
        "max_rows": args.rows,
        "max_context_tokens": args.tokens * 4 + 64,
        "wandb": False,
        "kv_memory_max_gib": 2.0,
    }
    with start_worker(args.model, progress=False, **flags) as worker:
        rows = [{"engine": "cpu", **row} for row in asyncio.run(compare_throughput(worker.endpoint, args))]
    with paced_worker(args, args.rows) as (endpoint, _):
        rows += [{"engine": "paced", **row} for row in asyncio.run(compare_throughput(endpoint, args))]
    print_table(f"{args.rows} streams", rows)
    delays = asyncio.run(compare_latency(args))
    print_table("latency of a token, median, ms", delays)
    write_results(args.out, rows, latency=delays, streams=args.rows, tokens=args.tokens, note=args.note)


async def compare_throughput(endpoint: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of both clients, by tokens of an event."""
    rows = []
    for every in args.stream_every:
        speeds: dict[str, list[float]] = {"zmq": [], "http": []}
        cpu_us: dict[str, list[float]] = {"zmq": [], "http": [], "gateway": []}
        with serving(endpoint, every) as (port, pid):
            async with AsyncRolloutClient(endpoint) as client:
                ways = {"zmq": zmq_streamer(client, every), "http": http_streamer(port)}
                for turn in range(args.turns + 1):
                    for name in sorted(ways, reverse=turn % 2 == 0):
                        start, own_s, gateway_s = time.perf_counter(), time.process_time(), cpu_s(pid)
                        counts = await asyncio.gather(*(count(ways[name](args.tokens)) for _ in range(args.rows)))
                        if turn:  # the first turn warms up
                            tokens = sum(counts)
                            speeds[name].append(tokens / (time.perf_counter() - start))
                            cpu_us[name].append(1e6 * (time.process_time() - own_s) / tokens)
                            if name == "http":
                                cpu_us["gateway"].append(1e6 * (cpu_s(pid) - gateway_s) / tokens)
        zmq, http = (statistics.median(speeds[name]) for name in ("zmq", "http"))
        rows.append(
            {
                "stream_every": every,
                "zmq_tokens_per_s": zmq,
                "http_tokens_per_s": http,
                "http_share": http / zmq,
                **{f"{name}_cpu_us_per_token": statistics.median(values) for name, values in cpu_us.items()},
            }
        )
    return rows


async def compare_latency(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Median latency of a token in both clients, alone and next to others."""
    rows = []
    for beside in (0, args.rows - 1):
        with (
            paced_worker(args, beside + 1) as (endpoint, commits),
            serving(endpoint, 1) as (one, _),
            serving(endpoint, 16) as (many, _),
        ):
            arrivals: list[tuple[str, np.ndarray]] = []
            async with AsyncRolloutClient(endpoint) as client:
                watched = {"zmq": zmq_streamer(client, 1), "http": http_streamer(one)}
                others = {"zmq": zmq_streamer(client, 16), "http": http_streamer(many)}
                for turn in range(args.turns):
                    for name in sorted(watched, reverse=turn % 2 == 0):
                        tasks = [asyncio.create_task(count(others[name](args.tokens * 3))) for _ in range(beside)]
                        while (await client.status())["rows"]["running"] < beside:
                            await asyncio.sleep(0.05)
                        items = [item async for item in watched[name](args.tokens)]
                        arrivals.append((name, np.array([at for at, tokens in items for _ in range(tokens)])))
                        for task in tasks:
                            task.cancel()
                        await asyncio.gather(*tasks, return_exceptions=True)
                        while (await client.status())["rows"]["running"]:
                            await asyncio.sleep(0.05)
            times = commits()
        found: dict[str, list[float]] = {"zmq": [], "http": []}
        for name, at in arrivals:
            found[name].append(1e3 * latency(at, times))
        zmq, http = (statistics.median(found[name]) for name in ("zmq", "http"))
        row = {"beside": beside, "step_ms": args.step_ms, "zmq_ms": zmq, "http_ms": http, "added_ms": http - zmq}
        rows.append(row)
    return rows


def latency(arrivals: np.ndarray, commits: np.ndarray) -> float:
    """Median seconds from the commit of a token's step to its arrival; both are times of `perf_counter`.

    The first token is left out: a prefill step drew it.
    """
    arrivals = arrivals[1:]
    for first in range(len(commits) - len(arrivals), -1, -1):
        delays = arrivals - commits[first : first + len(arrivals)]
        if delays.min() >= 0:
            return float(np.median(delays))
    raise ValueError("the commits do not have the steps of this stream")


class CommitTimes(Meter):
    """A meter that keeps when each decode step was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def step(self, record: StepTiming) -> None:
        """Keep the time of a step."""
        super().step(record)
        if record.kind == "decode" and record.committed_at_s is not None:
            self.times.append(record.committed_at_s)


@contextlib.contextmanager
def paced_worker(args: argparse.Namespace, rows: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """A process with a service and a paced engine: its endpoint, and a function that ends it and returns its commits.

    Commits are times of `perf_counter`, float64 [decode steps].
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.bench.gateway", "--paced-worker", folder, "--rows", str(rows)]
        more = ["--tokens", str(args.tokens), "--step-ms", str(args.step_ms)]
        process = subprocess.Popen([*command, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None

        def commits() -> np.ndarray:
            assert process.stdin is not None
            process.stdin.close()
            if process.wait(_START_S) != 0:
                raise RuntimeError("the paced worker failed")
            return np.array(json.loads((Path(folder) / "commits.json").read_text()))

        try:
            yield process.stdout.readline().strip(), commits
        finally:
            process.kill()
            process.wait()


def serve_paced(folder: Path, rows: int, tokens: int, step_s: float) -> None:
    """Be a paced worker until stdin is closed; then write the times of the commits to a file."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    write_text_folder(folder)
    context = 4 * tokens + 64
    engine_settings = EngineSettings(
        max_rows=rows, kv_pages=rows * (pages_for(context, 16) + 1) + 1, max_context_tokens=context, prefix_cache=False
    )
    settings = Settings(engine=engine_settings, service=ServiceSettings(bind="tcp://127.0.0.1:0"))
    outbox = Outbox()
    links = local_links(settings, outbox.put)
    engine, _ = make_engine(settings, links, step_s)
    engine.meter = meter = CommitTimes()
    inspector = Inspector(engine)
    status = [inspector.status()]
    model = ServedModel(str(folder), TINY_SHAPE["vocab_size"], context)
    server = Server(settings.service, model, ServedEngine(links.inbox, lambda: status[0], outbox))
    server.start()
    print(server.endpoint, flush=True)
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    looked_s = 0.0
    while not ended.is_set():
        if not engine.busy:
            engine.wait(0.01)
        engine.tick()
        if time.perf_counter() - looked_s > _STATUS_S:
            status[0], looked_s = inspector.status(), time.perf_counter()
    (folder / "commits.json").write_text(json.dumps(meter.times))
    server.stop()
    engine.executor.close()


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def count(stream: AsyncIterator[tuple[float, int]]) -> int:
    """Tokens of a stream."""
    return sum([tokens async for _, tokens in stream])


def zmq_streamer(client: AsyncRolloutClient, every: int) -> Streamer:
    """Streams by the zmq client."""

    async def stream(tokens: int) -> AsyncIterator[tuple[float, int]]:
        fields: Any = {"max_tokens": tokens, "stop": {"ignore_eos": True}, "stream_every": every}
        async with await client.generate(PROMPT, stream="tokens", **fields) as chunks:
            async for chunk in chunks:
                yield time.perf_counter(), len(chunk.token_ids)

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
                    yield time.perf_counter(), len(choice["token_ids"])
                elif line.startswith(b"data: [DONE]"):
                    return
            raise ConnectionError("the stream ended without [DONE]")
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    return stream


@contextlib.contextmanager
def serving(endpoint: str, every: int) -> Iterator[tuple[int, int]]:
    """The port and the process id of a gateway."""
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
            yield int(json.loads(ready.read_text())["url"].rpartition(":")[2]), process.pid
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
