"""One request in flight, or its outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from trainer_bridge.client.assembly import Assembler
from trainer_bridge.client.results import Chunk, Completion, GenerateResult
from trainer_bridge.wire.errors import RolloutError


class Call:
    """Made by `ClientCore.start`, which alone changes it. Ends with one of `result`, `reply` and `error`.

    `place` is the index of its endpoint, `weight` what it adds to that endpoint's load, `deadline` of
    `time.monotonic`. `on_update` is called whenever something has come for it.
    """

    def __init__(self, request_id: str, op: str, place: int, weight: int, deadline: float) -> None:
        self.id = request_id
        self.op = op
        self.place = place
        self.weight = weight
        self.deadline = deadline
        self.started = time.monotonic()
        self.target: str | None = None  # of `attach`
        self.detached = False  # the worker goes on if this client goes
        self.assembler: Assembler | None = None  # of a stream
        self.chunks: deque[Chunk] = deque()  # of a stream, not yet taken
        self.result: GenerateResult | None = None  # of `generate` and `attach`
        self.reply: dict[str, Any] | None = None  # of anything else
        self.error: RolloutError | None = None
        self.on_update: Callable[[], object] = lambda: None

    @property
    def done(self) -> bool:
        """True once there is an outcome."""
        return self.result is not None or self.reply is not None or self.error is not None

    def joined(self, index: int) -> Completion:
        """A completion of a stream, with what has come of it."""
        assert self.assembler is not None, "not a stream"
        return self.assembler.joined(index)

    def fail(self, error: RolloutError) -> None:
        """End with an error; chunks that had come stay."""
        error.request_id = self.id
        self.error = error
        self.on_update()
