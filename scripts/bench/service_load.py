"""Measures the gap between steps with and without clients: the time that the service takes from the loop.

A step of the paced device takes a fixed time, as on a GPU. So the time between two commits is that time plus the delay
of the loop. Each turn runs the same completions three times: without clients; with 8 clients that stream and one that
gets 100 results of 16K tokens, one after the other; and with these and a client that sends long chats, which Python
renders. A chat is refused as too long after it was rendered and tokenized, so the steps of the engine stay the same.
The clients run in their own process. The engine, the service, their threads and the process that prepares prompts are
as in a worker.

On a busy machine most of the long gaps are waits for a core. The kernel counts these waits for each thread, so the gaps
are also reported without them (`own`): the work of the loop, its waits for Python's lock, and the device. `idle` is the
time between two steps in which the device has no work. A commit that is late by less than a step costs nothing, because
the next step runs meanwhile.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.config import EngineSettings, ServiceConstants, ServiceSettings, Settings
from rollout.engine.build import build_engine, local_links
from rollout.engine.inspect import Inspector
from rollout.engine.kv.allocator import pages_for
from rollout.engine.loop import Engine
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Prior, Request, SamplingParams
from rollout.engine.messages.to_engine import Submit
from rollout.engine.parts import EngineLinks
from rollout.metrics.meter import Meter
from rollout.metrics.step_timing import StepTiming
from rollout.models.config_spec import spec_from_config
from rollout.models.decoder import Decoder
from rollout.process.interpreter import SWITCH_INTERVAL_S, collect_and_freeze
from rollout.service.capabilities import Outbox, ServedEngine, ServedModel
from rollout.service.server import ServedText, Server
from rollout.service.text.process import TextProcess
from rollout.text.codec import TextCodec
from scripts.bench.bookkeeping import TINY_SHAPE
from scripts.bench.load_clients import PROMPT, TOKEN, ClientProcess, Load
from scripts.bench.output import DEFAULT_FOLDER, print_table, spread, write_results
from scripts.bench.paced_device import PacedDevice, PacedExecutor

_STATUS_EVERY_S = 0.1
_LOOK_EVERY = 64  # turns of the loop between two checks of the clients
_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '1:' + m.content | trim + '\n' }}"
    "{% else %}{{ '2:' + m.content + '\n' }}{% endif %}{% endfor %}"
)
_LOADS = ("none", "clients", "templates")
_QUANTILES = {"median_ms": 0.5, "p99_ms": 0.99, "p99.9_ms": 0.999}
_KINDS = ("", "own_", "idle_")
FIGURES = [kind + name for kind in _KINDS for name in _QUANTILES]


class Commits(Meter):
    """A meter that keeps for each step the time of its commit, its kind, and the loop's waits for a core."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: list[str] = []
        self._moments: list[tuple[float, float, float, float]] = []  # commit, waits so far, start, end; seconds
        self._schedstat: int | None = None

    def step(self, record: StepTiming) -> None:
        """Keep the times of a step."""
        super().step(record)
        assert record.committed_at_s is not None
        self._kinds.append(record.kind)
        self._moments.append((record.committed_at_s, self._waited_s(), record.start_s, record.end_s))

    def take_gaps_ms(self) -> np.ndarray:
        """For each decode step since the last prefill step: the gap before it, the same without waits, and the
        device's idle time before it; float64 [3, gaps]. Forgets everything so far.
        """
        after_prefill = max(i for i, kind in enumerate(self._kinds) if kind == "prefill") + 1
        commits_G, waits_G, starts_G, ends_G = np.array(self._moments[after_prefill:]).T * 1e3
        self._kinds, self._moments = [], []
        gaps_G = np.diff(commits_G)
        return np.stack([gaps_G, gaps_G - np.diff(waits_G), starts_G[1:] - ends_G[:-1]])

    def _waited_s(self) -> float:
        if self._schedstat is None:
            self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        return int(os.pread(self._schedstat, 64, 0).split()[1]) * 1e-9


class Bench:
    """An engine and a service in this process, and the loop that drives them."""

    def __init__(self, load: Load, step_s: float, folder: Path) -> None:
        self.load = load
        context = len(PROMPT) + load.known + load.steps + 16
        assert load.messages * load.chars > context, "chats must be too long"
        model = ServedModel("paced", TINY_SHAPE["vocab_size"], context)
        settings, outbox = _settings(load, context), Outbox()
        links = local_links(settings, outbox.put)
        self.prompts = TextProcess(folder, settings.service)
        self.prompts.start()
        self.server = Server(
            settings.service,
            model,
            ServedEngine(links.inbox, lambda: self.status, outbox),
            ServedText(TextCodec(folder), self.prompts),
        )
        self.engine, self.commits = make_engine(settings, links, step_s)
        self._inspector = Inspector(self.engine)
        self.status, self._status_s = self._inspector.status(), 0.0
        self.server.start()
        self.clients = ClientProcess(self.server.endpoint, load)

    def quiet(self) -> np.ndarray:
        """The gaps, ms, of completions without clients."""
        for request in _requests(self.load):
            self.engine.inbox.put(Submit(request))
        self._turn()
        while self.engine.busy:
            self._turn()
        return self.commits.take_gaps_ms()

    def templates(self) -> np.ndarray:
        """As `loaded`, with chats."""
        return self.loaded(chats=True)

    def loaded(self, *, chats: bool = False) -> np.ndarray:
        """The gaps, ms, while the clients request the same completions."""
        self.clients.begin(chats=chats)
        turns = 0
        while self.engine.busy or turns % _LOOK_EVERY or not self.clients.finished():
            self._turn()
            turns += 1
        return self.commits.take_gaps_ms()

    def close(self) -> None:
        """End the clients, the service and the streams."""
        self.clients.close()
        self.server.stop()
        self.prompts.close()
        self.engine.check_integrity()
        self.engine.executor.close()

    def _turn(self) -> None:
        """As the worker's."""
        if not self.engine.busy:
            self.engine.wait(0.001)
        self.engine.tick()
        if time.perf_counter() - self._status_s >= _STATUS_EVERY_S:
            self.status, self._status_s = self._inspector.status(), time.perf_counter()


def write_text_folder(folder: Path) -> None:
    """A tokenizer with one token per character, and a chat template."""
    from rollout.demo.run import CHECKPOINTS

    shutil.copy(CHECKPOINTS / "ones" / "tokenizer.json", folder)
    config = json.loads((CHECKPOINTS / "ones" / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": _TEMPLATE}))


def _settings(load: Load, context: int) -> Settings:
    rows = load.streams + load.results
    engine = EngineSettings(
        max_rows=rows,
        kv_pages=rows * (pages_for(context, 16) + 1) + 1,
        max_context_tokens=context,
        prefill_chunk_tokens=8 * load.known,
        prefix_cache=False,
    )
    constants = ServiceConstants(max_results_bytes=64 << 20)
    return Settings(engine=engine, service=ServiceSettings(bind="tcp://127.0.0.1:0", constants=constants))


def make_engine(settings: Settings, links: EngineLinks, step_s: float) -> tuple[Engine, Commits]:
    """An engine on a paced device, whose steps take `step_s` seconds, and its meter."""
    from transformers import Qwen3Config

    device = PacedDevice()
    model = Decoder(spec_from_config(Qwen3Config(**TINY_SHAPE), "Qwen3ForCausalLM"), torch.float32, torch.device("cpu"))
    engine = build_engine(settings, device, model, links)
    executor = PacedExecutor(device, engine.executor.streams, engine.executor.step)
    executor.step_s = step_s
    engine.restart(replace(engine.parts, executor=executor))
    engine.meter = commits = Commits()
    return engine, commits


def _requests(load: Load) -> list[Request]:
    """The requests of the clients, as engine requests; their results are not sent."""
    prior = Prior(np.full(load.known, TOKEN, np.int32))
    streams = [
        Request(("quiet", f"s{i}"), Prompt.of_tokens(PROMPT), load.steps, sampling=SamplingParams(seed=i))
        for i in range(load.streams)
    ]
    results = [
        Request(("quiet", f"r{i}"), Prompt.of_tokens(PROMPT), load.known + load.new_tokens(i), prior=prior)
        for i in range(load.results)
    ]
    return streams + results


def summary(turn: int, load: str, gaps_ms: np.ndarray) -> dict[str, Any]:
    """A row of the table."""
    row: dict[str, Any] = {"turn": turn, "load": load, "steps": gaps_ms.shape[1]}
    for kind, gaps in zip(_KINDS, gaps_ms, strict=True):
        row |= {f"{kind}{name}": float(np.quantile(gaps, q)) for name, q in _QUANTILES.items()}
    return row | {"load_average": os.getloadavg()[0]}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.service_load", description=__doc__)
    parser.add_argument("--step-ms", type=float, default=4.0, help="time of a step on the device")
    parser.add_argument("--turns", type=int, default=3, help="turns of all three")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-every", type=int, default=16, help="tokens of a chunk")
    parser.add_argument("--results", type=int, default=100)
    parser.add_argument("--spacing", type=int, default=15, help="steps between the ends of two results")
    parser.add_argument(
        "--switch-interval-ms", type=float, default=SWITCH_INTERVAL_S * 1e3, help="of Python's lock; 5 is Python's own"
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "service_load.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sys.setswitchinterval(args.switch_interval_ms * 1e-3)
    load = Load(args.streams, args.stream_every, results=args.results, spacing=args.spacing)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_text_folder(Path(folder))
        bench = Bench(load, args.step_ms * 1e-3, Path(folder))
        collect_and_freeze()
        try:
            for turn in range(args.turns):
                for name, measure in zip(_LOADS, (bench.quiet, bench.loaded, bench.templates), strict=True):
                    # No progress bar: its thread would affect the results.
                    print(f"turn {turn + 1} of {args.turns}, load {name} ...", file=sys.stderr, flush=True)
                    rows.append(summary(turn, name, measure()))
                    print(json.dumps(rows[-1]), flush=True)
        finally:
            bench.close()
    shown = ("turn", "load", "steps", "p99.9_ms", "own_p99_ms", "own_p99.9_ms", "idle_p99.9_ms", "load_average")
    print_table("gap between steps", [{key: row[key] for key in shown} for row in rows])
    added = {load: {name: _added_ms(rows, load, name) for name in FIGURES} for load in _LOADS[1:]}
    for load_name, figures in added.items():
        print(f"added by {load_name}, median of the turns: " + ", ".join(f"{k} {v:+.3f}" for k, v in figures.items()))
    facts = {"turns": args.turns, "step_ms": args.step_ms, "switch_interval_ms": args.switch_interval_ms}
    write_results(args.out, over_turns(rows), **facts, added=added)
    return 0


def over_turns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each load: the spread of each figure over the turns."""
    return [
        {"load": load, **{name: spread([row[name] for row in rows if row["load"] == load]) for name in FIGURES}}
        for load in _LOADS
    ]


def _added_ms(rows: list[dict[str, Any]], load: str, name: str) -> float:
    without, with_load = ([row[name] for row in rows if row["load"] == kind] for kind in ("none", load))
    return statistics.median(b - a for a, b in zip(without, with_load, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
