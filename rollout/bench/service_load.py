"""The gap between steps, with clients and without: what the service thread takes from the loop.

A step of the (paced) device takes a fixed time, as a GPU's does, so the time between two commits is that time plus
whatever kept the loop from its work. The same completions run twice in each turn: once without clients, and once with
8 clients that stream and one that gets 100 results of 16K tokens, one after the other. The clients are in a process of
their own; the engine, the service and their threads are as in a worker.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from rollout.bench.bookkeeping import TINY_SHAPE
from rollout.bench.load_clients import PROMPT, TOKEN, ClientProcess, Load
from rollout.bench.paced_device import PacedDevice, PacedRunner
from rollout.bench.results import DEFAULT_FOLDER, print_table, write_results
from rollout.config import EngineSettings, ServiceSettings, Settings
from rollout.engine.build import build_engine
from rollout.engine.engine import Engine
from rollout.engine.memory import pages_for
from rollout.engine.types import Command, Prior, Request, SamplingParams, Submit
from rollout.metrics.meter import Meter, StepRecord
from rollout.models.decoder import Decoder
from rollout.models.registry import spec_from_config
from rollout.service.intake import ServedModel
from rollout.service.server import Server
from rollout.service.text import load_text_codec

_STATUS_EVERY_S = 0.1
_LOOK_EVERY = 64  # turns of the loop between two looks at the clients
_QUANTILES = {"median_ms": 0.5, "p99_ms": 0.99, "p99.9_ms": 0.999}


class Commits(Meter):
    """A meter that keeps when each step was committed, and which were prefill steps."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[tuple[str, float]] = []

    def step(self, record: StepRecord) -> None:
        """Keep the moment."""
        super().step(record)
        assert record.committed_at_s is not None
        self.commits.append((record.kind, record.committed_at_s))

    def take_gaps_ms(self) -> np.ndarray:
        """Milliseconds between the decode steps since the last prefill step; forgets everything so far."""
        commits, self.commits = self.commits, []
        last_prefill = max(i for i, (kind, _) in enumerate(commits) if kind == "prefill")
        return np.diff([at_s for _, at_s in commits[last_prefill + 1 :]]) * 1e3


class Bench:
    """An engine and a service in this process, and the loop that drives them."""

    def __init__(self, load: Load, step_s: float) -> None:
        from rollout.demo.run import CHECKPOINTS

        self.load = load
        inbox: SimpleQueue[Command] = SimpleQueue()
        context = len(PROMPT) + load.known + load.steps + 16
        model = ServedModel("paced", TINY_SHAPE["vocab_size"], context)
        text = load_text_codec(CHECKPOINTS / "ones")
        settings = _settings(load, context)
        self.server = Server(settings.service, model, inbox=inbox, status=lambda: self.status, text=text)
        self.engine, self.commits = _make_engine(settings, inbox, self.server, step_s)
        self.status = self.engine.status()
        self.server.start()
        self.clients = ClientProcess(self.server.endpoint, load)

    def quiet(self) -> np.ndarray:
        """The gaps, ms, while completions run that no client asked for."""
        for request in _requests(self.load):
            self.engine.inbox.put(Submit(request))
        self._turn()
        while self.engine.busy:
            self._turn()
        return self.commits.take_gaps_ms()

    def loaded(self) -> np.ndarray:
        """The gaps, ms, while the clients have the same completions."""
        self.clients.begin()
        turns = 0
        while self.engine.busy or turns % _LOOK_EVERY or not self.clients.finished():
            self._turn()
            turns += 1
        return self.commits.take_gaps_ms()

    def close(self) -> None:
        """End the clients, the service and the streams."""
        self.clients.close()
        self.server.stop()
        self.engine.check_integrity()
        self.engine.runner.close()

    def _turn(self) -> None:
        """As the worker's."""
        if not self.engine.busy:
            self.engine.wait(0.001)
        self.engine.tick()
        if time.perf_counter() - self.engine_status_s >= _STATUS_EVERY_S:
            self.status, self.engine_status_s = self.engine.status(), time.perf_counter()

    engine_status_s = 0.0


def _settings(load: Load, context: int) -> Settings:
    rows = load.streams + load.results
    engine = EngineSettings(
        max_rows=rows,
        kv_pages=rows * (pages_for(context, 16) + 1) + 1,
        max_context_tokens=context,
        prefill_chunk_tokens=8 * load.known,
        prefix_cache=False,
    )
    return Settings(engine=engine, service=ServiceSettings(bind="tcp://127.0.0.1:0", max_results_bytes=64 << 20))


def _make_engine(
    settings: Settings, inbox: SimpleQueue[Command], server: Server, step_s: float
) -> tuple[Engine, Commits]:
    from transformers import Qwen3Config

    device = PacedDevice()
    model = Decoder(spec_from_config(Qwen3Config(**TINY_SHAPE), "Qwen3ForCausalLM"), torch.float32, torch.device("cpu"))
    engine = build_engine(settings, device, model, inbox, server.outbox.put)
    runner = PacedRunner(device, model, engine.runner.kv, engine.runner.rows)
    runner.step_s = step_s
    engine.runner = runner
    engine.meter = commits = Commits()
    return engine, commits


def _requests(load: Load) -> list[Request]:
    """What the clients ask for, as the engine gets it; nobody hears of it."""
    prior = Prior(np.full(load.known, TOKEN, np.int32))
    streams = [
        Request(("quiet", f"s{i}"), PROMPT, load.steps, sampling=SamplingParams(seed=i)) for i in range(load.streams)
    ]
    results = [
        Request(("quiet", f"r{i}"), PROMPT, load.known + load.new_tokens(i), prior=prior) for i in range(load.results)
    ]
    return streams + results


def summary(turn: int, clients: bool, gaps_ms: np.ndarray) -> dict[str, Any]:
    """A row of the table."""
    quantiles = {name: float(np.quantile(gaps_ms, q)) for name, q in _QUANTILES.items()}
    load_average = os.getloadavg()[0]
    row = {"turn": turn, "clients": clients, "steps": len(gaps_ms), **quantiles, "max_ms": float(gaps_ms.max())}
    return row | {"load_average": load_average}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(prog="rollout bench service_load", description=__doc__)
    parser.add_argument("--step-ms", type=float, default=4.0, help="time of a step on the device")
    parser.add_argument("--turns", type=int, default=5, help="turns of each, without clients and with them")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-every", type=int, default=16, help="tokens of a chunk")
    parser.add_argument("--results", type=int, default=100)
    parser.add_argument("--spacing", type=int, default=30, help="steps between the ends of two results")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "service_load.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = Load(args.streams, args.stream_every, results=args.results, spacing=args.spacing)
    bench = Bench(load, args.step_ms * 1e-3)
    rows: list[dict[str, Any]] = []
    try:
        for turn in range(args.turns):
            rows.append(summary(turn, False, bench.quiet()))
            rows.append(summary(turn, True, bench.loaded()))
    finally:
        bench.close()
    print_table("gap between steps, without clients and with them", rows)
    added = {name: _added_ms(rows, name) for name in _QUANTILES}
    print("added by the clients, median of the turns: " + ", ".join(f"{k} {v:+.3f}" for k, v in added.items()))
    write_results(args.out, rows, step_ms=args.step_ms, added_by_clients=added)
    return 0


def _added_ms(rows: list[dict[str, Any]], name: str) -> float:
    without, with_clients = ([row[name] for row in rows if row["clients"] is clients] for clients in (False, True))
    return statistics.median(b - a for a, b in zip(without, with_clients, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
