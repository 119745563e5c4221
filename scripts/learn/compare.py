"""Several runs side by side, in one command and a bounded time: modes, staleness, seeds.

    python -m scripts.learn.compare --json learn.json --seconds 240 --seeds 0 1 --model MODEL
        --run "sync: --mode sync" --run "staleness 4: --staleness 4"

Each run is a process of its own with its own worker; together they share the GPU, so compare their wall times with each
other only. Flags that are not named here go to every run. The file has one line for each run, and is written again
every few seconds: a run that is killed leaves its points.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.output import circumstances, write_summary

_POINTS = (
    *("step", "wall_s", "tokens_total", "level", "reward", "right", "mixed_pct", "staleness/mean", "staleness/max"),
    *("ratio/mean", "ratio/p1", "ratio/p99", "ratio/capped_pct", "entropy", "gradient", "turns", "tokens"),
    *("time/wait_s", "time/train_s", "time/update_s", "prompt/computed_again_pct", "worker/gpu/active_pct"),
    *("worker/speculation/accepted_pct",),
)
_EVALUATIONS = ("evaluated", "wall_s", "tokens_total", "accuracy", "reward")
_SHARED = ("command", "date", "machine", "versions")
_WRITE_S = 5.0


def in_one_line(name: str, seed: int, run: Mapping[str, Any]) -> dict[str, Any]:
    """A run's summary with its points as columns."""
    kept = {key: value for key, value in run.items() if key not in (*_SHARED, "points", "evaluations")}
    points, evaluations = run.get("points", []), run.get("evaluations", [])
    columns = {key: [point.get(key) for point in points] for key in _POINTS if any(key in point for point in points)}
    held_out = {key: [row[key] for row in evaluations] for key in _EVALUATIONS}
    last = evaluations[-1]["by_level"] if evaluations else None
    return {"name": name, "seed": seed, **kept, "points": columns, "held_out": held_out, "last_by_level": last}


def read_runs(folders: Mapping[tuple[str, int], Path]) -> list[dict[str, Any]]:
    """The runs that have written something, one line each."""
    found = []
    for (name, seed), folder in folders.items():
        try:
            found.append(in_one_line(name, seed, json.loads((folder / "run.json").read_text())))
        except (FileNotFoundError, json.JSONDecodeError):  # not there, or not all of it
            continue
    return found


def write(path: Path, folders: Mapping[tuple[str, int], Path], began_s: float, note: str) -> None:
    """Write the file of all runs."""
    elapsed = round(time.perf_counter() - began_s, 1)
    facts = {**circumstances(), "seconds": elapsed, **({"note": note} if note else {})}
    write_summary(path, {**facts, "rows": read_runs(folders)})


def _copy_lines(process: subprocess.Popen[str], label: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{label}] {line}", end="", flush=True)


def start(label: str, words: Sequence[str], out: Path) -> tuple[subprocess.Popen[str], threading.Thread]:
    """A run as a process; its lines are copied with its label."""
    command = [sys.executable, "-u", "-m", "scripts.learn", *words, "--out", str(out)]
    out.mkdir(parents=True, exist_ok=True)
    errors = (out / "errors.log").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    errors.close()
    thread = threading.Thread(target=_copy_lines, args=(process, label), daemon=True)
    thread.start()
    return process, thread


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", required=True, metavar="NAME: FLAGS", help="one configuration")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="of training; all runs begin together")
    parser.add_argument("--at-once", type=int, default=8, help="processes at once; the others wait")
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"), help="of the runs (%(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="file of all runs")
    parser.add_argument("--note", default="", help="what a reader of the figures must know")
    arguments, common = parser.parse_known_args()
    began_s = time.perf_counter()
    folders: dict[tuple[str, int], Path] = {}
    waiting = []
    for seed in arguments.seeds:
        for spoken in arguments.run:
            name, colon, flags = spoken.partition(":")
            if not colon:
                parser.error(f"--run {spoken!r} has no colon; write 'NAME: FLAGS'")
            folder = arguments.folder / f"{name.strip().replace(' ', '_')}-{seed}"
            folders[name.strip(), seed] = folder
            words = [*common, *shlex.split(flags), "--seed", str(seed), "--max-seconds", str(arguments.seconds)]
            waiting.append((f"{name.strip()}/{seed}", words, folder))
    running: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}
    failed = []
    written_s = time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < arguments.at_once:
                label, words, folder = waiting.pop(0)
                running[label] = start(label, words, folder)
            for label, (process, thread) in list(running.items()):
                if process.poll() is not None:
                    thread.join()
                    del running[label]
                    if process.returncode:
                        failed.append(label)
                        print(f"[{label}] ended with status {process.returncode}", flush=True)
            if time.perf_counter() - written_s > _WRITE_S:
                write(arguments.json, folders, began_s, arguments.note)
                written_s = time.perf_counter()
            time.sleep(0.2)
    finally:
        for process, _ in running.values():
            process.terminate()
        write(arguments.json, folders, began_s, arguments.note)
    for label in failed:
        name, _, seed = label.rpartition("/")
        print((folders[name, int(seed)] / "errors.log").read_text()[-3000:], file=sys.stderr)
    print(f"{arguments.json}: {len(folders) - len(failed)} runs of {len(folders)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
