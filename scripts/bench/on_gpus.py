"""Runs commands on the GPUs of a host, as many at once as have their GPUs, each with a time limit.

    PYTHONPATH=.:kernels python -m scripts.bench.on_gpus PLAN --out FOLDER [--seconds 560] [--gpus 4]

PLAN has a line for each run: how many GPUs, its limit in seconds, a name, and the command, in which {out} is FOLDER.
Empty lines, and lines that begin with #, are left out.

    4 300 tp4_235b python -m scripts.bench.compare_peers --gpus 4 --shapes qwen3-235b-a22b --out {out}/tp4_235b.json
    2 200 tp2_8b   python -m scripts.bench.compare_peers --gpus 2 --shapes qwen3-8b --out {out}/tp2_8b.json
    1 100 one      python -m scripts.bench.decode --out {out}/one.json

Runs begin in the order of the plan: one waits for its GPUs, and no later one overtakes it. A run sees only its own
GPUs (CUDA_VISIBLE_DEVICES). Its output goes to FOLDER/NAME.log. At its limit, or after --seconds for all, it is ended
with all its processes. What ended how is printed at once, and written to FOLDER/runs.json. The exit status is 1 if a
run failed, was ended or did not begin.
"""

import argparse
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.bench.peers.runs import end_group

_POLL_S = 0.1
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


@dataclass(frozen=True, slots=True)
class Run:
    """A line of the plan."""

    gpus: int
    limit_s: float
    name: str
    command: tuple[str, ...]


@dataclass(slots=True)
class Ended:
    """How a run ended: its exit status, or why it has none."""

    name: str
    gpus: list[int]
    began_s: float  # after the start of the plan
    took_s: float
    status: int | str


def read_plan(text: str, out: Path, gpus: int) -> list[Run]:
    """The runs of a plan. Raises ValueError with the line that is wrong."""
    runs: list[Run] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not words:
            continue
        if len(words) < 4 or not words[0].isdigit() or not words[1].isdigit():
            raise ValueError(f"line {number}: a run is GPUS SECONDS NAME COMMAND, not {line!r}")
        run = Run(
            int(words[0]), float(words[1]), words[2], tuple(word.replace("{out}", str(out)) for word in words[3:])
        )
        if run.gpus > gpus:
            raise ValueError(f"line {number}: {run.name} needs {run.gpus} GPUs, and there are {gpus}")
        if not set(run.name) <= _NAME or run.name in {other.name for other in runs}:
            raise ValueError(f"line {number}: {run.name!r} must be a file's name that no other run has")
        runs.append(run)
    return runs


class _Process:
    """A run that has begun."""

    def __init__(self, run: Run, gpus: list[int], out: Path, began_s: float) -> None:
        self.run, self.gpus, self.began_s = run, gpus, began_s
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        with (out / f"{run.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                run.command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # can be killed as a group; a new session would outlive an interrupted command
            )

    def ended(self, now_s: float, end_s: float) -> Ended | None:
        """How it ended; None if it still runs. Ends it, with its processes, after its time."""
        status: int | str | None = self._process.poll()
        if status is None and now_s < min(self.began_s + self.run.limit_s, end_s):
            return None
        self.kill()
        status = "ran out of time" if status is None else status
        return Ended(self.run.name, self.gpus, self.began_s, now_s - self.began_s, status)

    def kill(self) -> None:
        """End it and what it has started."""
        end_group(self._process)


def run_all(runs: Sequence[Run], out: Path, gpus: int, seconds: float, clock: Callable[[], float]) -> list[Ended]:
    """Run them all; how each ended. `clock` gives seconds."""
    waiting, free = list(runs), set(range(gpus))
    running: list[_Process] = []
    ended: list[Ended] = []
    start_s = clock()

    def note(one: Ended) -> None:
        ended.append(one)
        print(f"{one.began_s + one.took_s:6.0f} s  {one.name}: {one.status} after {one.took_s:.0f} s", flush=True)
        facts: list[dict[str, Any]] = [asdict(other) for other in ended]
        (out / "runs.json").write_text(json.dumps(facts, indent=1) + "\n")

    try:
        while waiting or running:
            now_s = clock() - start_s
            for process in list(running):
                if (one := process.ended(now_s, seconds)) is not None:
                    running.remove(process)
                    free |= set(process.gpus)
                    note(one)
            while waiting and now_s < seconds and waiting[0].gpus <= len(free):
                run = waiting.pop(0)
                own = sorted(free)[: run.gpus]
                free -= set(own)
                try:
                    running.append(_Process(run, own, out, now_s))
                except OSError as error:
                    free |= set(own)
                    note(Ended(run.name, own, now_s, 0.0, str(error)))
                else:
                    print(f"{now_s:6.0f} s  {run.name} begins on {own}", flush=True)
            if now_s >= seconds:
                for run in waiting:
                    note(Ended(run.name, [], now_s, 0.0, "did not begin"))
                waiting = []
            time.sleep(_POLL_S)
    finally:
        for process in running:
            process.kill()
    return ended


def main(argv: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Run a plan; `clock` gives seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all runs")
    parser.add_argument("--gpus", type=int, help="how many there are; default: as CUDA says")
    args = parser.parse_args(argv)
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
    try:
        runs = read_plan(args.plan.read_text(), args.out, args.gpus)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    return int(any(one.status != 0 for one in run_all(runs, args.out, args.gpus, args.seconds, clock)))


if __name__ == "__main__":
    raise SystemExit(main())
