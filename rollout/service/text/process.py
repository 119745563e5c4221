"""Renders and tokenizes prompts in a child process, so that the engine's loop does not wait for Python's lock.

    worker                                                    child: no torch, no other sockets
      BackgroundWork's thread  --- the request's own frames --->    decode, render the chat template, tokenize
                         <--- token ids, or an error ----

Chat templates are Python code: a long chat holds Python's lock for a long time. The child gets the client's own frames,
so the worker does not pack them again. It works on one prompt at a time.

Invariants:

- Every prompt gets token ids or a `RolloutError`, also if the child dies or takes more than `max_prompt_s`. The next
  prompt then starts a new child. Other prompts are not affected.
- The child ends when the worker does, also when the worker is killed. It ignores signals to the process group, because
  a draining worker still needs it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.process.child_processes import exit_with_parent, import_path, module_command
from rollout.process.interpreter import loading_libraries
from rollout.process.logs import LogFormat, set_up, worker_name
from rollout.text.codec import PromptEncoder, TextCodec
from trainer_bridge.wire.codec import REPLY_LIMITS, decode, encode, header_id
from trainer_bridge.wire.errors import BadRequest, InternalError, RolloutError, Unavailable, error_reply, from_reply

if TYPE_CHECKING:  # the child needs no settings: pydantic takes a quarter of its start
    from rollout.config import ServiceSettings

logger = logging.getLogger(__name__)

_START_S = 120.0  # time for the child to load the tokenizer
_DEATH_S = 1.0  # time for a child to end after it closed its connection
_AGAIN_S = 5.0  # time between two attempts to start a child
_NICE = 10  # lowers the child's priority: with few cores, the worker's loop comes first
_COUNT = struct.Struct("<Q")


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    ready: bool = False  # it has loaded the tokenizer


class TextProcess:
    """The worker's side. Only one thread may call `encode_prompt`; `close` and the attributes are for any thread."""

    def __init__(self, folder: str | Path, settings: ServiceSettings, log_format: LogFormat = "text") -> None:
        self.deaths = 0  # children that crashed or took too long
        self.problem: str | None = None  # why no child could be started
        self._folder = folder
        self._log_format = log_format
        self._max_s = settings.constants.max_prompt_s
        self._max_chars = settings.constants.max_prompt_chars
        self._child: _Child | None = None
        self._not_before_s = 0.0
        self._closed = False

    def start(self) -> None:
        """Start the child. It loads while the worker starts; the first prompt waits for it."""
        ours, theirs = socket.socketpair()
        options = [f"--socket={theirs.fileno()}", f"--folder={self._folder}", f"--max-chars={self._max_chars}"]
        options += [f"--log-format={self._log_format}", f"--worker={worker_name()}"]
        command = module_command("rollout.service.text.process", *options)
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # the worker's stdout is for its announcements
                pass_fds=[theirs.fileno()],
                env={**os.environ, **import_path()},
            )
        self._child = _Child(process, ours)

    @property
    def pid(self) -> int | None:
        """The child's process id, or None without a child."""
        return None if self._child is None else self._child.process.pid

    def encode_prompt(self, frames: Sequence[bytes]) -> np.ndarray:
        """The token ids of a `generate` message's prompt, int32 [n]. Raises `RolloutError`."""
        reply = self._ask(frames)
        if "code" in reply:
            raise from_reply(reply)
        return reply["token_ids"]

    def close(self) -> None:
        """End the child. A prompt that waits for it gets an error."""
        self._closed = True
        child = self._child
        if child is not None:
            child.process.kill()
            child.process.wait()

    def _ask(self, frames: Sequence[bytes]) -> dict[str, Any]:
        child = self._ready_child()
        try:
            child.socket.settimeout(self._max_s)
            _send(child.socket, frames)
            reply = _receive(child.socket)
        except TimeoutError:
            self._drop(child, f"took more than {self._max_s:g} s for a prompt", frames, grace_s=0.0)
            raise BadRequest(
                f"the prompt was not rendered and tokenized within {self._max_s:g} s; shorten it"
            ) from None
        except (EOFError, OSError):
            self._drop(child, "died with a prompt", frames)
            raise _died("died with this prompt") from None
        # Out of memory, for example. The rest of this reply must not be read as the reply to the next prompt.
        except BaseException:
            self._drop(child, "sent a reply that could not be read", frames, grace_s=0.0)
            raise
        return decode(reply, REPLY_LIMITS)

    def _ready_child(self) -> _Child:
        """The child, once it is ready; started if it does not run. Raises `RolloutError`."""
        if self._closed:
            raise Unavailable("this worker has ended; send to another one")
        if self._child is not None and self._child.ready and self._child.process.poll() is not None:
            self._drop(self._child, "died")
        if self._child is None:
            if time.monotonic() < self._not_before_s:
                raise _died("cannot be started")
            try:
                self.start()
            except OSError as error:  # no memory, descriptors or processes left
                logger.error("the process that prepares prompts could not be started: %s", error)
                raise self._no_child() from None
        child = self._child
        assert child is not None, "`start` makes one or raises"
        if child.ready:
            return child
        try:
            child.socket.settimeout(_START_S)
            _receive(child.socket)
        except (EOFError, OSError):
            self._drop(child, "could not be started")
            raise self._no_child() from None
        child.ready, self.problem = True, None
        return child

    def _no_child(self) -> RolloutError:
        self._not_before_s = time.monotonic() + _AGAIN_S
        self.problem = "the process that prepares prompts cannot be started"
        return _died("cannot be started")

    def _drop(self, child: _Child, what: str, frames: Sequence[bytes] = (), grace_s: float = _DEATH_S) -> None:
        """Discard the child: wait `grace_s` seconds for its end, then kill it."""
        try:
            child.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.process.kill()
        status = child.process.wait()
        child.socket.close()
        self._child = None
        if not self._closed:
            self.deaths += 1
            facts = {"status": status} | ({"request": header_id(list(frames))} if frames else {})
            logger.error("the process that prepares prompts %s; the next prompt starts a new one", what, extra=facts)


def _died(what: str) -> RolloutError:
    return InternalError(f"the process that prepares prompts {what}; the worker's log may show the reason")


# --- the child -------------------------------------------------------------------------------------------------------


def answer(prompts: PromptEncoder, frames: Sequence[bytearray]) -> dict[str, Any]:
    """The reply to one message: `token_ids`, or an `error` reply."""
    try:
        return {"token_ids": prompts.encode_prompt(frames)}
    except RolloutError as error:
        return error_reply(error)
    # A fault of ours, or of the tokenizer, ends this request only.
    except Exception:
        logger.exception("a prompt could not be prepared", extra={"request": header_id(list(frames))})
        return error_reply(InternalError("a fault in the worker; its log has the trace"))


def main(argv: Sequence[str] | None = None) -> int:
    """Answer until the worker closes the connection or ends."""
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
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers works without it: saves 1 s and 180 MB
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would warn that torch is missing
    with socket.socket(fileno=args.socket) as connection:
        with loading_libraries():
            prompts = PromptEncoder(TextCodec(args.folder), args.max_chars)
        try:
            _send(connection, encode({"ready": True}))
            while True:
                _send(connection, encode(answer(prompts, _receive(connection))))
        except (EOFError, OSError):  # the worker has ended or discarded this process
            return 0


# --- frames on a stream socket: number of frames, their sizes, their bytes -------------------------------------------


def _send(connection: socket.socket, frames: Sequence[bytes]) -> None:
    sizes = [len(frames), *(len(frame) for frame in frames)]
    connection.sendall(b"".join(_COUNT.pack(size) for size in sizes))
    for frame in frames:
        connection.sendall(frame)


def _receive(connection: socket.socket) -> list[bytearray]:
    """The next frames. Raises EOFError if the other side has closed the connection."""
    (count,) = _COUNT.unpack(receive_bytes(connection, _COUNT.size))
    sizes = receive_bytes(connection, count * _COUNT.size)
    return [receive_bytes(connection, size) for (size,) in _COUNT.iter_unpack(sizes)]


def receive_bytes(connection: socket.socket, size: int) -> bytearray:
    """The next `size` bytes. Raises EOFError if the other side has closed the connection."""
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
