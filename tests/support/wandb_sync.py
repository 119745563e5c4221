"""Reads an offline run back with W&B's own reader: `wandb sync` itself, uploading to a server on this machine."""

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE_S

_RUN: dict[str, Any] = {"id": "x", "displayName": "n", "config": "{}", "summaryMetrics": "{}", "historyLineCount": 0}
_PROJECT = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}


@dataclass
class Uploaded:
    """What W&B would have of the run."""

    run: dict[str, Any] = field(default_factory=dict)  # project, group, name, config and so on, as sent last
    rows: list[dict[str, Any]] = field(default_factory=list)  # history, without W&B's own keys
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def step_metrics(self) -> dict[str, str]:
        """The x-axes that were defined, by metric or pattern."""
        entries = json.loads(self.run["config"])["_wandb"]["value"]["m"]
        named = [entry.get("1") or entry.get("2") for entry in entries]
        return {name: named[entry["5"] - 1] for name, entry in zip(named, entries, strict=True) if "5" in entry}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.uploaded = Uploaded()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The uploader drops its connections at the end."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Take one request in; returns its reply."""
        if path.endswith("/file_stream"):
            for name, part in (body.get("files") or {}).items():
                self._lines(name, part["content"], part["offset"])
            return {}
        query, variables = body.get("query", ""), body.get("variables") or {}
        if "RunResumeStatus" in query:
            return {"data": {"model": _PROJECT | {"bucket": self._resumed()}}}
        if "upsertBucket" in query:
            self.uploaded.run |= {key: value for key, value in variables.items() if value is not None}
            bucket = _RUN | {"name": variables.get("name"), "project": _PROJECT}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/storage/{name}"} for name in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}}
        return {"data": {"serverInfo": {"features": []}}}

    def _resumed(self) -> dict[str, Any] | None:
        """What W&B knows of the run, for a file that goes on with it."""
        found = self.uploaded
        if not found.rows:
            return None
        counts = {"historyLineCount": len(found.rows), "eventsLineCount": 0, "logLineCount": 0}
        tails = {
            "historyTail": json.dumps([json.dumps({"_step": len(found.rows) - 1, "_runtime": 1})]),
            "eventsTail": "[]",
        }
        known = {"summaryMetrics": json.dumps(found.summary), "config": found.run["config"], "tags": []}
        return _RUN | {"name": found.run["name"], "wandbConfig": '{"t": 1}'} | counts | tails | known

    def _lines(self, name: str, lines: list[str], offset: int) -> None:
        if name == "wandb-history.jsonl":
            assert offset == len(self.uploaded.rows), "a part would be written over another one"
            rows = (json.loads(line) for line in lines)
            self.uploaded.rows += [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]
        elif name == "wandb-summary.json":
            self.uploaded.summary = json.loads(lines[-1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        asks = self.path.endswith(("/graphql", "/file_stream"))
        self._reply(self.server.answer(self.path, json.loads(body)) if asks else {})

    do_PUT = do_POST

    def do_GET(self) -> None:
        self._reply({})

    def _reply(self, reply: dict[str, Any]) -> None:
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[dict[str, str], Uploaded]]:
    """A server for the time of the block: the variables that make it W&B's, and what it has got."""
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url}, server.uploaded
    finally:
        server.shutdown()
        server.server_close()


def sync(run: Path | Sequence[Path], home: Path) -> Uploaded:
    """What `wandb sync` makes of the run in a folder, or in several. `home` is where it may write."""
    folders = [run] if isinstance(run, Path) else run
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    with serving() as (account, uploaded):
        environ = kept | account | {"HOME": str(home)}
        command = [sys.executable, "-m", "wandb", "sync", *map(str, folders)]
        done = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return uploaded
