"""Several runs in one command and a bounded time: modes, staleness, seeds, tasks, TRL beside.

    python -m scripts.learn.compare --json learn.json --seconds 240 --seeds 0 1 --model MODEL
        --run "sync: --mode sync" --run "staleness 4: --staleness 4"
    python -m scripts.learn.compare --json learn.json --plan scripts/learn/plans/modes.toml --model MODEL

Each run is a process of its own with its own worker. The runs of a wave start one after another on each GPU, since a
worker measures free memory, and then train together. They share the GPU, so compare their wall times with each other
only. Flags that are not named here go to every run; a run whose flags begin with the word `trl` is one of
`scripts.learn.trl`. A plan is a TOML file:

    flags = "--steps 10000"              # for every run
    [[wave]]                             # waves follow each other
    seconds = 200                        # of training; less for all waves, in proportion, if --budget is short
    seeds = [0, 1]                       # default: 0
    runs = ["sync: --mode sync", "staleness 4: --staleness 4 --seed 1"]     # the second has one seed of its own

The file of --json has one line for each run, and is written again every few seconds: a run that is killed leaves its
points.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.bench.output import circumstances, write_summary
from scripts.learn.together import READY

_POINTS = (
    *("step", "wall_s", "tokens_total", "level", "reward", "right", "mixed_pct", "staleness/mean", "staleness/max"),
    *("ratio/mean", "ratio/p1", "ratio/p99", "ratio/capped_pct", "entropy", "entropy/weight", "gradient"),
    *("groups", "turns", "tokens", "time/wait_s", "time/train_s", "time/update_s"),
    *("prompt/computed_again_pct", "worker/gpu/active_pct", "worker/speculation/accepted_pct"),
)
_EVALUATIONS = ("evaluated", "wall_s", "tokens_total", "accuracy", "by_level", "reward")
_SHARED = ("command", "date", "machine", "versions")
_WRITE_S = 5.0
_LAST_S = 15.0  # for the last step and the evaluation of a run
_END_S = 8.0  # for the end of a run that was told to end
_IMPORTS_S = 15.0  # before a run may start its worker


def in_one_line(name: str, seed: int, run: Mapping[str, Any]) -> dict[str, Any]:
    """A run's summary with its points as columns."""
    kept = {key: value for key, value in run.items() if key not in (*_SHARED, "points", "evaluations")}
    points, evaluations = run.get("points", []), run.get("evaluations", [])
    columns = {key: [point.get(key) for point in points] for key in _POINTS if any(key in point for point in points)}
    held_out = {key: [row[key] for row in evaluations] for key in _EVALUATIONS}
    return {"name": name, "seed": seed, **kept, "points": columns, "held_out": held_out}


def read_runs(folders: Mapping[tuple[str, int], Path]) -> list[dict[str, Any]]:
    """The runs that have written something, one line each."""
    found = []
    for (name, seed), folder in folders.items():
        try:
            found.append(in_one_line(name, seed, json.loads((folder / "run.json").read_text())))
        except (FileNotFoundError, json.JSONDecodeError):  # not there, or not all of it
            continue
    return found


@dataclass(frozen=True)
class Wave:
    """Runs that train together: their labels, and the words of their commands."""

    seconds: float
    cells: dict[tuple[str, int], list[str]]


def read_wave(seconds: float, seeds: Sequence[int], runs: Sequence[str], common: Sequence[str]) -> Wave:
    """A wave; `common` are words for every run. Raises ValueError for a run without a name, or a name twice."""
    asked: list[tuple[str, int, list[str]]] = []
    for spoken in runs:
        name, colon, flags = spoken.partition(":")
        if not colon:
            raise ValueError(f"the run {spoken!r} has no colon; write 'NAME: FLAGS'")
        words = shlex.split(flags)
        named = [int(seed) for flag, seed in pairwise(words) if flag == "--seed"]
        asked += [(name.strip(), seed, words) for seed in named[-1:] or seeds]
    cells: dict[tuple[str, int], list[str]] = {}
    for name, seed, words in sorted(asked, key=lambda one: one[1]):
        if (name, seed) in cells:
            raise ValueError(f"two runs are named {name!r}")
        module = ["scripts.learn.trl"] if words[:1] == ["trl"] else ["scripts.learn"]
        own = words[1:] if words[:1] == ["trl"] else words
        cells[name, seed] = [*module, *common, *own, "--seed", str(seed)]
    return Wave(seconds, cells)


def read_plan(text: str, common: Sequence[str]) -> list[Wave]:
    """The waves of a plan. Raises ValueError that says what is wrong."""
    plan = tomllib.loads(text)
    if unknown := plan.keys() - {"flags", "wave"}:
        raise ValueError(f"a plan has no {sorted(unknown)}; it has 'flags' and [[wave]]")
    if not isinstance(plan.get("wave"), list):
        raise ValueError("a plan needs at least one [[wave]]")
    waves: list[Wave] = []
    for number, wave in enumerate(plan["wave"], 1):
        if unknown := wave.keys() - {"seconds", "seeds", "runs"}:
            raise ValueError(f"wave {number} has no {sorted(unknown)}; it has 'seconds', 'seeds' and 'runs'")
        if missing := {"seconds", "runs"} - wave.keys():
            raise ValueError(f"wave {number} lacks {sorted(missing)}")
        if not isinstance(wave["runs"], list) or not wave["runs"]:
            raise ValueError(f"'runs' of wave {number} must be a list of 'NAME: FLAGS'")
        words = [*shlex.split(plan.get("flags", "")), *common]
        waves.append(read_wave(float(wave["seconds"]), wave.get("seeds", [0]), wave["runs"], words))
        if twice := [label for other in waves[:-1] for label in other.cells if label in waves[-1].cells]:
            raise ValueError(f"two runs are named {twice[0][0]!r}")
    return waves


def in_parts(wave: Wave, most: int) -> list[Wave]:
    """A wave as several, each with at most `most` runs."""
    cells = list(wave.cells.items())
    return [Wave(wave.seconds, dict(cells[i : i + most])) for i in range(0, len(cells), most)]


def training_seconds(wanted: Sequence[float], left_s: float, starts_s: float) -> float:
    """For the first of the waves that are left, whose runs are ready: all that it wants, or its share of the time.

    `left_s` is the time that is left, and `starts_s` what the starts of the later waves take. At least a second: 0
    would be no limit.
    """
    spare = left_s - starts_s - _LAST_S * len(wanted) - _END_S
    return max(1.0, min(wanted[0], spare * wanted[0] / sum(wanted)))


class Running:
    """A run's process, whose lines are copied with its label."""

    def __init__(self, label: tuple[str, int], words: Sequence[str], out: Path, lock: Path, gpu: int | None) -> None:
        self.label, self.out = label, out
        self.ready = threading.Event()
        command = [sys.executable, "-u", "-m", *words, "--out", str(out), "--start-lock", str(lock), "--hold"]
        out.mkdir(parents=True, exist_ok=True)
        (out / "run.json").unlink(missing_ok=True)  # of an earlier comparison
        environment = dict(os.environ)
        if gpu is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
        with (out / "errors.log").open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self._copying = threading.Thread(target=self._copy_lines, daemon=True)
        self._copying.start()

    def _copy_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.rstrip() == READY:
                self.ready.set()
            print(f"[{self.label[0]}/{self.label[1]}] {line}", end="", flush=True)

    @property
    def ended(self) -> bool:
        """Whether the process is over."""
        return self.process.poll() is not None

    def go(self, seconds: float) -> None:
        """Have a run that is ready train."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it ended meanwhile, which its status says
            self.process.stdin.write(f"{seconds}\n")
            self.process.stdin.close()

    def end(self) -> None:
        """Wait for its end, which it was asked for; kill it if it takes long. Its worker ends with it."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._copying.join()


@dataclass
class Comparison:
    """All waves of a command, and how each run ended."""

    folder: Path
    json: Path
    gpus: int
    deadline_s: float  # on the clock of `time.perf_counter`
    note: str
    began_s: float = field(default_factory=time.perf_counter)
    folders: dict[tuple[str, int], Path] = field(default_factory=dict)
    ended: dict[tuple[str, int], str] = field(default_factory=dict)
    _written_s: float = 0.0

    def run(self, waves: Sequence[Wave]) -> None:
        """Run them one after another."""
        worker_s = 0.0  # what the start of a worker and a trainer took, at most
        for number, wave in enumerate(waves):
            for label in wave.cells:
                self.folders[label] = self.folder / f"{label[0].replace(' ', '_').replace('/', '_')}-{label[1]}"
            began_s = time.perf_counter()
            if self.deadline_s - began_s <= worker_s * self._in_turn(wave) + _LAST_S + _END_S:
                self.ended |= dict.fromkeys(wave.cells, "no time was left")
                continue
            running = self._start(wave)
            try:
                ready = self._wait(running, lambda run: run.ready.is_set())
                worker_s = max(worker_s, (time.perf_counter() - began_s) / self._in_turn(wave))
                later = waves[number + 1 :]
                starts_s = sum(_IMPORTS_S + worker_s * self._in_turn(other) for other in later)
                wanted = [wave.seconds, *(other.seconds for other in later)]
                seconds = training_seconds(wanted, self.deadline_s - time.perf_counter(), starts_s)
                print(f"{len(ready)} runs train for {seconds:.0f} s", flush=True)
                for run in ready:
                    run.go(seconds)
                self._wait(ready, lambda run: False)
            finally:
                late = [run for run in running if not run.ended]
                for run in late:
                    self.ended[run.label] = "its time was over"
                    run.process.terminate()
                for run in late:
                    run.end()
                self.write()
        self.write()

    def _in_turn(self, wave: Wave) -> int:
        """How many runs start one after another on a GPU."""
        return math.ceil(len(wave.cells) / self.gpus)

    def _start(self, wave: Wave) -> list[Running]:
        self.folder.mkdir(parents=True, exist_ok=True)
        running = []
        for i, (label, words) in enumerate(wave.cells.items()):
            gpu = i % self.gpus
            lock = self.folder / f"start-{gpu}.lock"
            running.append(Running(label, words, self.folders[label], lock, gpu if self.gpus > 1 else None))
        return running

    def _wait(self, running: Sequence[Running], enough: Callable[[Running], bool]) -> list[Running]:
        """Wait until each run has ended or is far enough, or the time is over. Returns the runs that have not ended."""
        waiting = list(running)
        while waiting and time.perf_counter() < self.deadline_s - _END_S:
            for run in [run for run in waiting if run.ended or enough(run)]:
                waiting.remove(run)
                if run.ended:
                    status = run.process.returncode
                    self.ended[run.label] = "done" if status == 0 else f"failed with status {status}"
                    if status:
                        cause = (run.out / "errors.log").read_text().strip().rpartition("\n")[2]
                        print(f"[{run.label[0]}/{run.label[1]}] ended with status {status}: {cause}", flush=True)
            if time.perf_counter() - self._written_s > _WRITE_S:
                self.write()
            time.sleep(0.1)
        return [run for run in running if not run.ended]

    def write(self) -> None:
        """Write the file of all runs."""
        self._written_s = time.perf_counter()
        elapsed = round(self._written_s - self.began_s, 1)
        ended = {f"{name}/{seed}": how for (name, seed), how in self.ended.items()}
        facts = {**circumstances(), "seconds": elapsed, "ended": ended, **({"note": self.note} if self.note else {})}
        write_summary(self.json, {**facts, "rows": read_runs(self.folders)})


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", default=[], metavar="NAME: FLAGS", help="one configuration")
    parser.add_argument("--plan", type=Path, help="file of waves, in place of --run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="for each --run")
    parser.add_argument("--seconds", type=float, default=240.0, help="of training, for each --run (%(default)s)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all, starts and ends included")
    parser.add_argument("--at-once", type=int, default=8, help="runs of a wave; others wait (%(default)s)")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the runs take in turn (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"), help="of the runs (%(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="file of all runs")
    parser.add_argument("--note", default="", help="what a reader of the figures must know")
    arguments, common = parser.parse_known_args()
    deadline_s = time.perf_counter() + arguments.budget
    if bool(arguments.run) == (arguments.plan is not None):
        parser.error("name --run, or a --plan")
    if arguments.at_once < 1 or arguments.gpus < 1:
        parser.error("--at-once and --gpus must be at least 1")
    try:
        if arguments.plan is not None:
            waves = read_plan(arguments.plan.read_text(), common)
        else:
            waves = [read_wave(arguments.seconds, arguments.seeds, arguments.run, common)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    comparison = Comparison(arguments.folder, arguments.json, arguments.gpus, deadline_s, arguments.note)
    comparison.run([part for wave in waves for part in in_parts(wave, arguments.at_once)])
    failed = [label for label, how in comparison.ended.items() if how not in ("done", "its time was over")]
    for label in failed:
        print(f"{label[0]}/{label[1]}: {comparison.ended[label]}", file=sys.stderr)
        if (log := comparison.folders[label] / "errors.log").exists():
            print(log.read_text()[-3000:], file=sys.stderr)
    print(f"{arguments.json}: {len(comparison.folders) - len(failed)} runs of {len(comparison.folders)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
