"""The parent process: runs the children in turn, adds floors to their rows, writes one summary."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import rollout_kernels

import rollout
from scripts.bench.output import command_line, write_summary
from scripts.bench.peers.child import PREFIX
from scripts.bench.peers.experiments import Row
from scripts.bench.peers.floors import job_floor, step_floor_s
from scripts.bench.peers.job import SPECULATING, Job
from scripts.bench.peers.workloads import completion_lengths
from scripts.bench.shapes import StepBytes, step_bytes

_CHILD = "scripts.bench.peers.child"
_TAIL_LINES = 25
#: The fields that identify a row; a new row replaces an older one with the same values.
_IDENTITY = (
    "shape",
    "engine",
    "experiment",
    "rows",
    "prompt",
    "new",
    "context",
    "requests",
    "completions",
    "scale",
    "chance",
    "layers",
    "gpus",
    "workers",
)
#: Figures that help to follow a run. Such rows are printed, but no page shows them, so they are not written.
_ONLY_PRINTED = ("tokens_per_s", "first_s", "device_ms")
_OURS = ("ours", *SPECULATING, "service")
#: The figure for comparing engines, and whether a smaller one is better.
_FIGURES = {
    "decode": ("ms", True),
    "contexts": ("ms", True),
    "post": ("total_s", True),
    "short": ("requests_per_s", False),
    "long_job": ("total_s", True),
    "groups": ("total_s", True),
    "prefill": ("prefill_tokens_per_s", False),
    "arrivals": ("latency_s", True),
    "repeats": ("ms", True),
}


def child_environment(file: Path | None) -> dict[str, str]:
    """The environment of a child: this one, or the one in `file`. Both can import this project."""
    if file is None:
        environment = dict(os.environ)
    else:
        pairs = (line.partition("=") for line in file.read_text().split("\0") if line)
        environment = {name: value for name, _, value in pairs}
    packages = [str(Path(package.__file__ or "").parent.parent) for package in (rollout, rollout_kernels)]
    sources = [str(Path(__file__).parents[3]), *packages]
    paths = [*sources, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def run_child(
    arguments: Sequence[str], python: str, environment: Mapping[str, str], log: Path | None, deadline_s: float
) -> Iterator[Row]:
    """Run one child; yields its rows at once, and an `error` row if it fails or misses the deadline.

    Other output goes to `log`; if the child fails, the last lines also go to stderr. `deadline_s` is a time of
    `time.monotonic()`.
    """
    process = subprocess.Popen(
        [python, "-m", _CHILD, *arguments],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,  # can be killed as a group; a new session would outlive an interrupted command
    )
    assert process.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    talk: list[str] = []
    told_error = False
    try:
        while (line := _next_line(lines, deadline_s)) is not None:
            if line.startswith(PREFIX):
                row = json.loads(line.removeprefix(PREFIX))
                told_error |= "error" in row
                yield row
            else:
                talk.append(line)
        status = process.wait(max(1.0, deadline_s - time.monotonic()))
        if status != 0 and not told_error:
            yield {"error": f"ended with status {status}"}
    except TimeoutError:
        yield {"error": "ran out of time"}
        status = 1
    finally:
        end_group(process)
        if log is not None:
            log.write_text("".join(talk))
    if status != 0:
        sys.stderr.writelines(talk[-_TAIL_LINES:])


def _pump(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _next_line(lines: queue.SimpleQueue[str | None], deadline_s: float) -> str | None:
    try:
        return lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its group; afterwards the memory of the GPU is free."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class Report:
    """Rows with their floors: printed at once and kept in a summary, in the order of what identifies them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        before = json.loads(path.read_text()) if path.exists() else {}
        self._rows: list[Row] = before.get("rows", [])
        self._facts: list[Row] = before.get("facts", [])
        #: What was written into the file by hand, such as a note.
        self._kept = {name: value for name, value in before.items() if name not in ("facts", "rows")}
        self._bandwidth: float | None = None
        self._new: list[Row] = []

    def ceilings(self, told: Iterable[Row]) -> None:
        """Take the bandwidths of this run. Without a GPU there are no bandwidths and no floors."""
        for row in told:
            found = row.get("ceilings", {})
            self._bandwidth = found["read_tbps"] * 1e12 if found else None
            self._keep_fact({"run": self._run, "command": command_line(), "ceilings": found or row})

    def add(self, job: Job, row: Row) -> None:
        """Print a row and write it to the file."""
        named = {"shape": job.shape, "engine": job.engine, **({"layers": job.layers} if job.layers else {})}
        named |= {name: given for name in ("gpus", "workers") if (given := getattr(job, name)) > 1}
        if "facts" in row:
            self._keep_fact({"run": self._run, **named, **row["facts"]})
            return
        row = {**named, **row, "run": self._run}
        if self._bandwidth is not None and "experiment" in row and "skipped" not in row:
            row |= floors(job, row, self._bandwidth * job.ranks)
        print(json.dumps(_short(row)), flush=True)
        self._new.append(row)
        written = {name: value for name, value in row.items() if name not in _ONLY_PRINTED}
        key = _identity(row)
        self._rows = sorted([*(old for old in self._rows if _identity(old) != key), written], key=_identity)
        self._write()

    def compare(self) -> None:
        """Print the ratio of ours to another engine, or of one worker to several, where both have done the same."""
        for row in self._new:
            name, less_is_better = _FIGURES.get(row.get("experiment", ""), ("", True))
            if row["engine"] not in _OURS or name not in row:
                continue
            for other in self._rows:
                if name in other and _is_peer(row, other) and _same_work(row, other):
                    ratio = other[name] / row[name] if less_is_better else row[name] / other[name]
                    what = " ".join(f"{key} {row[key]}" for key in _IDENTITY[3:] if key in row)
                    when = "" if other["run"] == self._run else f" (measured in the run of {other['run']})"
                    ours, theirs = row["engine"], other["engine"]
                    if "workers" in other:
                        theirs = f"{theirs} of {other['workers']} workers"
                    print(f"{row['shape']} {row['experiment']} {what}: {ours} {ratio:.3f}x {theirs}{when}")

    def _keep_fact(self, fact: Row) -> None:
        print(json.dumps(_short(fact)), flush=True)
        self._facts.append(fact)
        self._write()

    def _write(self) -> None:
        write_summary(self._path, {**self._kept, "facts": self._facts, "rows": self._rows})


def floors(job: Job, row: Row, bandwidth: float) -> Row:
    """The floor of a row and the row's ratio to it; empty if the work is not decoding.

    `bandwidth` is that of the GPUs that run one model together. Of several workers each has an equal part of the rows.
    """
    need = step_bytes(row["shape"], layers=job.layers)
    if job.workers > 1:
        return _shared_floor(need, job, row, bandwidth)
    if row["experiment"] in ("decode", "contexts", "repeats"):  # one token a step: accepted drafts may beat it
        prompts = row["rows"] // row.get("completions", 1)  # the KV of each is read once
        own = (row.get("first_new", 0) + row["new"]) / 2
        context = prompts * row.get("context", row.get("prompt")) + row["rows"] * own
        chosen = row.get("distinct_experts")
        floor_ms = step_floor_s(need, row["rows"], context, bandwidth, chosen) * 1e3
        steady = {"steady_over_floor": row["steady_ms"] / floor_ms} if "steady_ms" in row else {}
        return {"floor_ms": floor_ms, "over_floor": row["ms"] / floor_ms, **steady}
    if row["experiment"] == "groups":  # a prompt's KV once for all its completions
        context = row["rows"] // row["completions"] * row["prompt"] + row["rows"] * row["new"] / 2
        steps = row["new"] - 1
        floor_s = steps * step_floor_s(need, row["rows"], context, bandwidth, row.get("distinct_experts"))
        return {"floor_s": floor_s, "over_floor": row["total_s"] / floor_s}
    if row["experiment"] == "post":
        work = [row["prompt"]] * row["rows"], [row["new"]] * row["rows"]
    elif row["experiment"] == "long_job":
        work = _long_job_sizes(job, row)
    else:
        return {}
    floor = job_floor(need, *work, row["rows"], bandwidth)
    tail = {"tail_floor_s": floor.tail_s} if "tail_s" in row else {}
    return {"floor_s": floor.total_s, "over_floor": row["total_s"] / floor.total_s, **tail}


def _shared_floor(need: StepBytes, job: Job, row: Row, bandwidth: float) -> Row:
    """The floor of the long job that workers share evenly: every worker reads all weights. Others have none."""
    if row["experiment"] != "long_job":
        return {}
    prompts, lengths = _long_job_sizes(job, row)
    longest = sorted(lengths, reverse=True)  # dealt out by length, so that the parts are alike
    rows = -(-row["rows"] // job.workers)
    parts = [longest[i :: job.workers] for i in range(job.workers)]
    total_s = max(job_floor(need, prompts[: len(part)], part, rows, bandwidth).total_s for part in parts)
    return {"floor_s": total_s, "over_floor": row["total_s"] / total_s}


def _long_job_sizes(job: Job, row: Row) -> tuple[list[int], list[int]]:
    """Tokens of the prompts and of the completions."""
    lengths = [max(16, int(n * row["scale"])) for n in completion_lengths(row["completions"])]
    return [job.job_prompt] * len(lengths), lengths


def _identity(row: Row) -> list[tuple[Any, ...]]:
    """What identifies a row. It can be compared: a row without a field is before those with it."""
    return [(row[name],) if row.get(name) is not None else () for name in _IDENTITY]


def _is_peer(row: Row, other: Row) -> bool:
    """Whether `other` is another project's engine, the same one with more workers, or ours without speculation."""
    if other["engine"] == row["engine"]:
        return other.get("workers", 1) > row.get("workers", 1)
    if row["engine"] in SPECULATING and other["engine"] == "ours":
        return True
    return other["engine"] not in _OURS


def _same_work(a: Row, b: Row) -> bool:
    return all(a.get(name) == b.get(name) for name in _IDENTITY if name not in ("engine", "workers"))


def _short(row: Row) -> Row:
    """A row for printing: fewer digits, without the run."""
    shown = {key: value for key, value in row.items() if key != "run"}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in shown.items()}
