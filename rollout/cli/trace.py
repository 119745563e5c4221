"""`rollout trace`: the last steps of a worker as a Chrome trace, and as a picture of when host and device worked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.connect import add_worker, connect, where
from rollout.cli.parser import CommandError, UsageError

if TYPE_CHECKING:
    from rollout.metrics.recording import Recording

_MAX_STEPS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Save a worker's last steps as a Chrome trace; open it at https://ui.perfetto.dev. A worker always keeps its "
        f"last {_MAX_STEPS} steps, so a trace can be taken at any time."
    )
    parser.add_argument("--steps", type=int, default=200, help=f"number of steps, up to {_MAX_STEPS} [200]")
    parser.add_argument("-o", "--out", metavar="FILE", default="trace.json", help="file of the trace [trace.json]")
    parser.add_argument("--png", metavar="FILE", help="also draw a picture of when host and device worked")
    add_worker(parser, timeout_s=10.0)


def run(args: argparse.Namespace) -> int:
    """Fetch the steps, write the files, print what they show."""
    if not 1 <= args.steps <= _MAX_STEPS:
        raise UsageError(f"--steps must be from 1 to {_MAX_STEPS}; got {args.steps}")
    from rollout.metrics.chrome_trace import TRACKS, chrome_trace
    from rollout.metrics.overlap import COLOURS, clipped, device_intervals, host_intervals, overlap, shares

    reply, recording = _fetch(args)
    model = str(reply.get("model")).rstrip("/").rpartition("/")[2]
    name = f"{model} on {reply.get('worker')}"
    device = device_intervals(recording.steps)
    host = clipped(host_intervals(recording.steps), device[0][0], device[-1][1])  # the recording has only these steps
    stretches = overlap(device, host)
    caption = _caption(len(recording.steps), stretches[-1][0][1] - stretches[0][0][0], shares(stretches))
    try:
        _write(Path(args.out), json.dumps(chrome_trace(recording, name)))
        if args.png is not None:
            from rollout.metrics.overlap import write_overlap

            write_overlap({"": (device, host)}, args.png, f"{name}\n{caption}")
    except OSError as error:
        raise CommandError(f"cannot write {error.filename or args.out}: {error.strerror}") from error
    except ValueError as error:  # no matplotlib
        raise CommandError(str(error)) from error
    print(f"{args.out}: {caption}")
    print(_legend("Tracks of the trace", {track.title: track.meaning for track in TRACKS.values()}))
    if args.png is not None:
        print(_legend(f"Colours of {args.png}", {c.name: f"{c.title}: {c.meaning}" for c in COLOURS.values()}))
    return 0


def _legend(heading: str, meanings: Mapping[str, str]) -> str:
    width = max(map(len, meanings))
    return "\n".join([f"{heading}:", *(f"  {name:<{width}}  {meaning}" for name, meaning in meanings.items())])


def _fetch(args: argparse.Namespace) -> tuple[dict[str, Any], Recording]:
    from rollout.metrics.recording import Recording
    from trainer_bridge.wire.errors import RolloutError

    try:
        with connect(args.endpoint, args) as client:
            reply = client.control("trace", steps=args.steps)[0]
    except RolloutError as error:
        raise CommandError(where(args.endpoint, error)) from error
    try:
        recording = Recording.from_fields(reply)
    except ValueError as error:
        raise CommandError(f"{args.endpoint}: {error}") from error
    if not recording.steps:
        raise CommandError(f"the worker at {args.endpoint} has not run a step yet; send it a request first")
    return reply, recording


def _caption(steps: int, wall_s: float, parts: dict[str, float]) -> str:
    return (
        f"{steps} steps in {1e3 * wall_s:.1f} ms: host and device {parts['both']:.1f} %, "
        f"device alone {parts['device']:.1f} %, host alone {parts['host']:.1f} %, neither {parts['neither']:.1f} %"
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
