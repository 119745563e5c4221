"""Prompts are rendered and tokenized in a process of their own: nobody there waits for the loop's Python lock.

    worker                                                    child: no torch, no sockets but this one
      BackgroundWork's thread  --- the request's own frames --->    decode, render the chat template, tokenize
                         <--- token ids, or an error ----

Chat templates are Python, and a long chat takes the lock for long. The frames travel as the client sent them, so that
the worker spends nothing on packing them either. One prompt is on its way at a time.

Invariants:

- Every prompt gets token ids or a `ServiceError`, also when the child dies with it, or takes more than `max_prompt_s`.
  Then the child is replaced, once there is a next prompt; no other prompt is touched.
- The child ends with the worker, however that ends. Signals to the process group are not for it: a draining worker
  still needs it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.config import ServiceSettings
from rollout.libraries import loading_libraries
from rollout.logs import LogFormat, set_up, worker_name
from rollout.process import exit_with_parent
from rollout.service.errors import ServiceError
from rollout.service.text.codec import PromptEncoder, TextCodec
from trainer_bridge.wire.codec import REPLY_LIMITS, decode, encode, header_id

logger = logging.getLogger(__name__)

_START_S = 120.0  # for the child to load the tokenizer
_DEATH_S = 1.0  # for a child that closed its connection to be gone
_AGAIN_S = 5.0  # after a child that could not start, before the next one
_NICE = 10  # where cores are few, the worker's loop goes first
_COUNT = struct.Struct("<Q")


class TextProcess:
    """The worker's side. `encode_prompt` is for one thread; `close` and the counts may be used from any."""

    def __init__(self, folder: str | Path, settings: ServiceSettings, log_format: LogFormat = "text") -> None:
        self.deaths = 0  # children that ended by themselves, or took too long
        self.problem: str | None = None  # why there is no child now, where none could be started
        self._folder = folder
        self._log_format = log_format
        self._max_s = settings.max_prompt_s
        self._max_chars = settings.max_prompt_chars
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._not_before_s = 0.0
        self._closed = False

    def start(self) -> None:
        """Start the child, and do not wait for it: it loads beside the worker, and the first prompt waits."""
        ours, theirs = socket.socketpair()
        options = [f"--socket={theirs.fileno()}", f"--folder={self._folder}", f"--max-chars={self._max_chars}"]
        options += [f"--log-format={self._log_format}", f"--worker={worker_name()}"]
        command = [sys.executable, "-P", "-m", "rollout.service.text.process", *options]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # the worker's stdout is for what it says itself
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        self._socket, self._ready = ours, False

    @property
    def pid(self) -> int | None:
        """The child's process id, where there is one."""
        return None if self._process is None else self._process.pid

    def encode_prompt(self, frames: Sequence[bytes]) -> np.ndarray:
        """The token ids of a `generate` message's prompt, int32 [n]. Raises `ServiceError`."""
        reply = self._ask(frames)
        if "code" in reply:
            raise ServiceError(reply["code"], reply["message"], reply["field"])
        return reply["token_ids"]

    def close(self) -> None:
        """End the child. Who waits for it gets an error."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _ask(self, frames: Sequence[bytes]) -> dict[str, Any]:
        self._have_child()
        assert self._socket is not None
        try:
            self._socket.settimeout(self._max_s)
            _send(self._socket, frames)
            reply = _receive(self._socket)
        except TimeoutError:
            self._drop(f"took more than {self._max_s:g} s for a prompt", frames, grace_s=0.0)
            raise ServiceError(
                "bad_request", f"the prompt was not rendered and tokenized within {self._max_s:g} s; shorten it"
            ) from None
        except (EOFError, OSError):
            self._drop("died with a prompt", frames)
            raise _died("died with this prompt") from None
        # Out of memory, for one. What is left of this reply must not be read as the next prompt's.
        except BaseException:
            self._drop("could not be understood", frames, grace_s=0.0)
            raise
        return decode(reply, REPLY_LIMITS)

    def _have_child(self) -> None:
        """Start a child if there is none, and wait until it can work. Raises `ServiceError`."""
        if self._closed:
            raise ServiceError("unavailable", "this worker has ended; send to another one")
        if self._process is not None and self._ready and self._process.poll() is not None:
            self._drop("died")
        if self._process is None:
            if time.monotonic() < self._not_before_s:
                raise _died("cannot be started")
            try:
                self.start()
            except OSError as error:  # no memory, descriptors or processes left
                logger.error("the process that prepares prompts could not be started: %s", error)
                raise self._no_child() from None
        if self._ready:
            return
        assert self._socket is not None
        try:
            self._socket.settimeout(_START_S)
            _receive(self._socket)
        except (EOFError, OSError):
            self._drop("could not be started")
            raise self._no_child() from None
        self._ready, self.problem = True, None

    def _no_child(self) -> ServiceError:
        self._not_before_s = time.monotonic() + _AGAIN_S
        self.problem = "the process that prepares prompts cannot be started"
        return _died("cannot be started")

    def _drop(self, what: str, frames: Sequence[bytes] = (), grace_s: float = _DEATH_S) -> None:
        """The child is of no use any more: it dies, within `grace_s` by itself."""
        assert self._process is not None and self._socket is not None
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait()
        self._socket.close()
        self._process = self._socket = None
        if not self._closed:
            self.deaths += 1
            facts = {"status": status} | ({"request": header_id(list(frames))} if frames else {})
            logger.error("the process that prepares prompts %s; the next prompt gets another one", what, extra=facts)


def _died(what: str) -> ServiceError:
    return ServiceError("internal", f"the process that prepares prompts {what}; the worker's log may say why")


# --- the child -------------------------------------------------------------------------------------------------------


def answer(prompts: PromptEncoder, frames: Sequence[bytearray]) -> dict[str, Any]:
    """What becomes of one message: `token_ids`, or `code`, `message` and `field` of an error."""
    try:
        return {"token_ids": prompts.encode_prompt(frames)}
    except ServiceError as error:
        return {"code": error.code, "message": str(error), "field": error.field}
    # A fault of ours, or of the tokenizer, ends this request and nothing else.
    except Exception:
        logger.exception("a prompt could not be prepared", extra={"request": header_id(list(frames))})
        return {"code": "internal", "message": "a fault in the worker; its log has the trace", "field": None}


def main(argv: Sequence[str] | None = None) -> int:
    """Answer until the worker closes the connection, or ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--max-chars", type=int, required=True)
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--worker", default=None, help="the worker's name in log lines")
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent(grace_s=0.0)
    os.nice(_NICE)
    set_up("info", args.log_format, args.worker or worker_name())
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers does without: a second less, 180 MB less
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would say that torch is missing
    with socket.socket(fileno=args.socket) as connection:
        with loading_libraries():
            prompts = PromptEncoder(TextCodec(args.folder), args.max_chars)
        try:
            _send(connection, encode({"ready": True}))
            while True:
                _send(connection, encode(answer(prompts, _receive(connection))))
        except (EOFError, OSError):  # the worker has ended, or has no use for this process any more
            return 0


# --- frames over a stream socket: their number, their sizes, their bytes ---------------------------------------------


def _send(connection: socket.socket, frames: Sequence[bytes]) -> None:
    sizes = [len(frames), *(len(frame) for frame in frames)]
    connection.sendall(b"".join(_COUNT.pack(size) for size in sizes))
    for frame in frames:
        connection.sendall(frame)


def _receive(connection: socket.socket) -> list[bytearray]:
    """The next frames. Raises EOFError when the other side has closed."""
    (count,) = _COUNT.unpack(_receive_bytes(connection, _COUNT.size))
    sizes = _receive_bytes(connection, count * _COUNT.size)
    return [_receive_bytes(connection, size) for (size,) in _COUNT.iter_unpack(sizes)]


def _receive_bytes(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError("the connection was closed")
        view = view[count:]
    return data


if __name__ == "__main__":
    raise SystemExit(main())
