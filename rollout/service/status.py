"""What a worker tells of itself: the answers to `status` and `trace`, out of what its parts show at this moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollout.engine.messages import EngineStatus
from rollout.service.capabilities import Views, WeightControl
from rollout.service.delivery.replies import sequence_fields, status_reply, trace_reply
from rollout.service.errors import bad_request
from rollout.service.generation import Generation
from rollout.service.served_model import ServedModel


class WorkerStatus:
    """Made on the service thread, without asking the loop: `engine` returns the engine's latest snapshot."""

    def __init__(
        self,
        engine: Callable[[], EngineStatus],
        model: ServedModel,
        receiver: WeightControl | None,
        views: Views | None,
        *,
        worker: str,
        capabilities: Sequence[str],
        max_queue: int,
    ) -> None:
        self._engine = engine
        self._model = model
        self._receiver = receiver
        self._views = views
        self._worker = worker
        self._capabilities = tuple(capabilities)
        self._max_queue = max_queue

    def reply(self, request_id: str, generation: Generation, preparing: int, sequences: int) -> dict[str, Any]:
        """The answer to `status`: `preparing` requests are with the tokenizer, so many `sequences` are wanted."""
        reply = status_reply(
            request_id,
            replace(self._engine(), reclaimed=generation.reclaimed),
            self._model,
            draining=generation.draining,
            preparing=preparing,
            results={"stored": len(generation.store), "bytes": generation.store.size},
            max_queue=self._max_queue,
            worker=self._worker,
            capabilities=self._capabilities,
            weights_endpoint=self._receiver.endpoint if self._receiver is not None else None,
            weights=self._receiver.summary() if self._receiver is not None else None,
        )
        if sequences == 0 or self._views is None:
            return reply
        return reply | {"sequences": [sequence_fields(sequence) for sequence in self._views.sequences(sequences)]}

    def trace(self, request_id: str, steps: int) -> dict[str, Any]:
        """The answer to `trace`. Raises `ServiceError` for a worker that keeps no record."""
        if self._views is None:
            raise bad_request("this worker keeps no record of its steps; leave the request out", "op")
        names = {"model": self._model.name, "worker": self._worker}
        return trace_reply(request_id, names | self._views.recording(steps))
