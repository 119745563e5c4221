"""A Hugging Face hub of one model, on this machine: enough of its API for `snapshot_download`, at a chosen speed."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: Answers about the models of some owners: status and the hub's error code.
_REFUSALS = {
    "missing": (404, "RepoNotFound"),
    "gated": (403, "GatedRepo"),
    "unrevised": (404, "RevisionNotFound"),
    "broken": (500, "Broken"),
}


@contextmanager
def fake_hub(folder: Path, repository: str, weights_s: float = 0.0) -> Iterator[str]:
    """Serve `folder` as `repository`; yields the endpoint. The safetensors take `weights_s` seconds."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _json(self, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _file(self, name: str, with_body: bool) -> None:
            body = files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", _COMMIT)
            self.end_headers()
            parts = 10 if name.endswith(".safetensors") and with_body else 1
            size = -(-len(body) // parts)
            for begin in range(0, len(body) if with_body else 0, size):
                self.wfile.write(body[begin : begin + size])
                self.wfile.flush()
                time.sleep(weights_s / parts if parts > 1 else 0)

        def _answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0]
            if (refusal := _REFUSALS.get(path.removeprefix("/api/models/").split("/")[0])) is not None:
                status, code = refusal
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if path.startswith(f"/{repository}/resolve/") and path.rpartition("/")[2] in files:
                self._file(path.rpartition("/")[2], with_body)
            elif path.startswith(f"/api/models/{repository}/tree/"):
                self._json(
                    [
                        {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                        for name, body in files.items()
                    ]
                )
            elif path.startswith(f"/api/models/{repository}"):
                self._json({"id": repository, "sha": _COMMIT, "siblings": [{"rfilename": name} for name in files]})
            else:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def do_HEAD(self) -> None:  # noqa: N802
            self._answer(with_body=False)

        def do_GET(self) -> None:  # noqa: N802
            self._answer(with_body=True)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
