"""Reads an offline run back with W&B's own reader: `wandb sync` itself, uploading to a server on this machine."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE_S

_RUN = {"id": "x", "displayName": "n", "config": "{}", "summaryMetrics": "{}", "historyLineCount": 0}
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
                self._lines(name, part["content"])
            return {}
        query, variables = body.get("query", ""), body.get("variables") or {}
        if "upsertBucket" in query:
            self.uploaded.run |= {key: value for key, value in variables.items() if value is not None}
            bucket = _RUN | {"name": variables.get("name"), "project": _PROJECT}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/storage/{name}"} for name in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}}
        return {"data": {"serverInfo": {"features": []}}}

    def _lines(self, name: str, lines: list[str]) -> None:
        if name == "wandb-history.jsonl":
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


def sync(run: Path, home: Path) -> Uploaded:
    """What `wandb sync` makes of the run in a folder. `home` is where it may write."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        own = {"HOME": str(home), "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url}
        command = [sys.executable, "-m", "wandb", "sync", str(run)]
        done = subprocess.run(command, env=kept | own, cwd=home, capture_output=True, text=True, timeout=PATIENCE_S)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stdout + done.stderr
    return server.uploaded
