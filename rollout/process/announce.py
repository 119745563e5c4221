"""Announcements of a worker and a supervisor: lines on stdout, and the ready file.

The lines of a supervised worker have no reader of their own: they are lines of its log.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def announce(fact: Mapping[str, Any], in_log: bool = False, terminal: bool | None = None) -> None:
    """Print a fact on stdout, or in the log: one line of JSON for a launcher, or a sentence if stdout is a terminal.

    `terminal` says whether it is; None: it is asked.
    """
    if terminal is None:
        terminal = sys.stdout.isatty()
    if in_log:
        counts = {name: value for name, value in fact.get("totals", {}).items() if name.startswith("total/")}
        facts = {name: value for name, value in fact.items() if name not in ("event", "totals")}
        log.info("%s", fact["event"], extra=facts | counts)
    else:
        print(_sentence(fact) if terminal else json.dumps(fact), flush=True)


def _sentence(fact: Mapping[str, Any]) -> str:
    match fact:
        case {"event": "ready", "endpoint": endpoint, "model": model, "weights_version": version}:
            return f"ready: {model}, weights version {version}, at {endpoint} (Ctrl-C drains and ends the worker)"
        case {"event": "ready", "workers": workers}:
            return "ready: " + ", ".join(str(worker.get("endpoint")) for worker in workers)
        case {"event": "worker_ready", "endpoint": endpoint}:
            return f"ready again: {endpoint}"
        case {"event": "worker_ended", "worker": index, "status": status, "restart_in_s": None}:
            return f"worker {index} ended with status {status} and is not started again"
        case {"event": "worker_ended", "worker": index, "status": status, "restart_in_s": seconds}:
            return f"worker {index} ended with status {status}; restart in {seconds:g} s"
        case {"event": "ended", "wandb_run": str(run)}:
            return f"ended; the W&B run is in {run}"
        case {"event": event}:
            return str(event)
    return json.dumps(fact)


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the whole text or no file.

    What a killed process left of it has the name that the next one writes to.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def remove_ready_file(path: Path) -> None:
    """Remove a ready file if its `pid` is this process."""
    try:
        written = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    if isinstance(written, dict) and written.get("pid") == os.getpid():
        path.unlink(missing_ok=True)
