"""Replays agents that come back: many turns, tools between them, the whole history in each prompt.

    PYTHONPATH=.:kernels python -m scripts.bench.agents --load short --scale small --device cpu --model tiny
    ... --load short --model qwen3-8b --requests plain sessions --bandwidth 4.69 --out FILE   one GPU, about 160 s each
    ... --load short --scale small --device cpu --model tiny --update-every 2 --streams 4 --forks 0.5 --compact 0.5
    ... --load short --scale small --device cpu --model tiny --start 2 --route prefix round-robin
    ... --trace FILE --url http://127.0.0.1:8000 --model qwen3-8b       vLLM, or another server of OpenAI's completions
    ... --load long --write FILE                                        only write the trace

The trace is a file of JSON lines (`scripts.bench.agents.trace` has the format), or is made from --load and --seed. Its
tokens are random ids drawn from the seed; what the model drew is sent back as it came. So many agents as --agents run
at once; each takes the next trajectory when its own has ended.

Without --workers and --url, workers with random weights are started. With --scale small each has pages for a third of
what the agents hold at their ends, and 1 GiB of host memory for KV, unless --pool and --set say otherwise. --gateway
asks them through this project's gateway. A run is made for each of --requests, and for each of --route.

Prompt tokens are counted in three ways. `sent`: of all prompts. `distinct`: those that had not been sent or drawn
before after the same tokens; with all KV kept only these are computed. `computed`: what the engine says it computed.
`first_token_s` is the engine's own time from the arrival to the first token, or over HTTP that of the first event. A
token's staleness is how many weights versions behind the newest it is when its trajectory has ended.

With --bandwidth the floor is computed (`scripts.bench.agents.floor`): weights, KV read once a step, distinct prompts.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.agents import serve
from scripts.bench.agents.clients import HttpTurns, PageGauge, SocketTurns, WorkerGauge
from scripts.bench.agents.floor import Machine, floor_of
from scripts.bench.agents.loads import LOADS, SCALES, make_trace
from scripts.bench.agents.replay import Replay
from scripts.bench.agents.report import figures, table
from scripts.bench.agents.trace import Trajectory, count, longest, read_trace, write_trace
from scripts.bench.decode import step_needs
from scripts.bench.output import print_table, write_results
from scripts.bench.shapes import SHAPES, model_config
from trainer_bridge.client.asynchronous import AsyncRolloutClient

_NAMES = {"tiny": "toy"}
_SMALL = {"pool": 1 / 3, "host_kv_gib": "1"}
_CONNECT_S = 900.0


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print and write."""
    args = _parse(argv)
    trajectories = _trace(args)
    if args.write is not None:
        write_trace(args.write, trajectories)
        print(json.dumps(_facts(trajectories)))
        return 0
    agents = min(args.agents or len(trajectories), len(trajectories))
    rows: list[dict[str, Any]] = []
    floor = _floor(args, trajectories, agents)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        serve.checkpoint(args.model, folder / args.model, longest(trajectories) + 64)
        endpoints = args.workers
        if not endpoints and args.url is None:
            pages = None if args.pool is None else serve.pool_pages(trajectories, agents, args.pool)
            started = stack.enter_context(
                serve.workers(
                    folder / args.model, args.start, args.device, min(agents, args.max_rows), longest(trajectories),
                    pages, args.set,
                )
            )  # fmt: skip
            endpoints = [worker.endpoint for worker in started]
        url = stack.enter_context(serve.gateway(endpoints)) if args.gateway else args.url
        publisher = None
        if args.update_every:
            publisher = serve.Publisher(folder / args.model, endpoints, args.trainer_device, args.trainer_layers)
            stack.callback(publisher.close)
        for number, (requests, route) in enumerate((r, w) for r in args.requests for w in args.route):
            run = _run(args, trajectories, agents, endpoints, url, requests, route, args.seed + number, publisher)
            row = {"engine": "http" if url else "socket", "requests": requests, "route": route}
            row |= {"workers": max(1, len(endpoints)), **floor, **asyncio.run(run)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.out is not None:
                write_results(
                    args.out, rows, shape=args.model, agents=agents, settings=args.set, **_facts(trajectories)
                )
    print_table(f"{agents} agents, {len(trajectories)} trajectories, {args.model}", table(rows))
    return 0


async def _run(
    args: argparse.Namespace, trajectories: Sequence[Trajectory], agents: int, endpoints: Sequence[str],
    url: str | None, requests: str, route: str, seed: int, publisher: serve.Publisher | None,
) -> dict[str, Any]:  # fmt: skip
    """The figures of one replay."""
    async with contextlib.AsyncExitStack() as stack:
        client = None
        if endpoints:
            client = await stack.enter_async_context(AsyncRolloutClient(endpoints, connect_timeout_s=_CONNECT_S))
        sessions = requests == "sessions"
        if url is not None:
            turns: HttpTurns | SocketTurns = HttpTurns(url, sessions=sessions, threads=agents)
        else:
            assert client is not None
            turns = SocketTurns(client, sessions=sessions, in_turn=endpoints if route == "round-robin" else ())
        stack.callback(turns.close)
        replay = Replay(
            trajectories,
            turns,
            PageGauge(url or "") if client is None else WorkerGauge(client),
            agents=agents,
            vocab=model_config(args.model)["vocab_size"],
            seed=seed,
            limit_s=args.seconds,
            publish=None if publisher is None else publisher.publish,
            update_every_s=args.update_every,
        )
        return figures(await replay.run(), max(1, len(endpoints)))


def _trace(args: argparse.Namespace) -> list[Trajectory]:
    if args.trace is not None:
        return read_trace(args.trace)
    load = LOADS[args.load].scaled(SCALES[args.scale])
    return make_trace(
        load, args.seed, trajectories=args.trajectories, streams=args.streams, most_turns=args.turns,
        forks=args.forks, compact=args.compact,
    )  # fmt: skip


def _facts(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    counted = count(trajectories)
    return {
        "trajectories_asked": len(trajectories),
        "turns_asked": sum(len(one.out_lens) for one in trajectories),
        "longest_context": longest(trajectories),
        "held_tokens": counted.held,
        "sent": counted.sent,
        "distinct": counted.distinct,
        "drawn": counted.drawn,
    }


def _floor(args: argparse.Namespace, trajectories: Sequence[Trajectory], agents: int) -> Mapping[str, Any]:
    if args.bandwidth is None:
        return {}
    machine = Machine(args.bandwidth * 1e12, args.tflops * 1e12, max(args.start, len(args.workers)))
    floor = floor_of(trajectories, agents, step_needs(args.model, args.set), machine)
    return {"floor_s": floor.total_s, "floor_decode_s": floor.decode_s, "floor_prompts_s": floor.prompts_s}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.agents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--load", choices=LOADS, default="short")
    add("--scale", choices=SCALES, default="full", help="of the load: small is for a CPU")
    add("--trace", type=Path, help="replay this file in place of a load")
    add("--write", type=Path, help="only write the trace of the load there")
    add(
        "--seed",
        type=int,
        default=0,
        help="of the load and its tokens; every further run has the "
        "next one. A running worker that had a trace before needs another one",
    )
    add("--trajectories", type=int, help="of the load; default: its own number")
    add("--streams", type=int, help="of a group that shares a task; default: the load's own number")
    add("--turns", type=int, help="most turns of a trajectory of the load; default: the load's own number")
    add("--forks", type=float, default=0.0, help="share of a group's later streams that fork an earlier one")
    add("--compact", type=float, default=0.0, help="share of trajectories whose history is cut to half, once")
    add("--agents", type=int, help="trajectories at once; default: all")
    add("--seconds", type=float, help="begin no turn later than this; default: replay all")
    add("--model", default="qwen3-8b", help=f"shape with random weights: {', '.join((*_NAMES, *SHAPES))}")
    add("--device", default="auto", help="of the workers: auto, cpu or cuda; several workers have a GPU each")
    add("--start", type=int, default=1, help="workers to start")
    add("--max-rows", type=int, default=256, help="most rows of a worker; it has one for each agent")
    add(
        "--pool",
        type=float,
        help="pages for this share of the KV that the agents hold at their ends; default: what fits",
    )
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the workers, such as "
        "kv_dtype=fp8_e4m3; repeatable")  # fmt: skip
    add("--workers", default="", help="endpoints of running workers, separated by commas; each with a metrics port")
    add("--gateway", action="store_true", help="ask the workers through a gateway, over HTTP")
    add("--url", help="a server of OpenAI's completions, such as vLLM")
    add("--requests", nargs="+", choices=("plain", "sessions"), default=["plain"], help="a run for each")
    add("--route", nargs="+", choices=("prefix", "round-robin"), default=["prefix"],
        help="of several workers: the client that knows where KV is, or each in turn; a run for each")  # fmt: skip
    add("--update-every", type=float, default=0.0, help="seconds between two updates of the weights; 0: none")
    add("--trainer-device", help="of the updates; default: cpu for workers on a CPU, else cuda:0")
    add("--trainer-layers", type=int, default=1, help="that the trainer has memory for; 0: all")
    add("--bandwidth", type=float, help="TB/s that a GPU reads, for the floor")
    add("--tflops", type=float, default=790.0, help="of its matrix units, for the floor")
    add("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args(argv)
    args.model = _NAMES.get(args.model, args.model)
    args.workers = [endpoint for endpoint in args.workers.split(",") if endpoint]
    args.set = dict(change.partition("=")[::2] for change in args.set)
    if args.scale == "small":
        args.pool = _SMALL["pool"] if args.pool is None else args.pool
        args.set = {"host_kv_gib": _SMALL["host_kv_gib"], **args.set}
    if args.trainer_device is None:
        args.trainer_device = "cpu" if args.device == "cpu" else "cuda:0"
    if args.model not in SHAPES:
        parser.error(f"--model {args.model}: choose one of {', '.join((*_NAMES, *SHAPES))}")
    http = args.url is not None or args.gateway
    if args.bandwidth is not None and args.seconds is not None:
        parser.error("--bandwidth: the floor covers the whole trace; leave --seconds out")
    if args.url is not None and args.gateway:
        parser.error("--url and --gateway: give one")
    if args.update_every and args.url is not None and not args.workers:
        parser.error("--update-every needs this project's workers: leave --url out, or give --workers")
    if "round-robin" in args.route and (http or "sessions" in args.requests):
        parser.error("--route round-robin needs plain requests over the socket")
    if args.forks and (args.streams or LOADS[args.load].streams) < 2:
        parser.error("--forks needs groups of two streams or more: --streams 8")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
