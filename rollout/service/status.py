"""The replies to `status` and `trace`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollout.engine.messages.statuses import EngineStatus
from rollout.service.capabilities import EngineViews, ServedModel, WeightControl
from rollout.service.delivery.replies import sequence_fields, status_reply, trace_reply
from rollout.service.generation import Generation
from trainer_bridge.wire.errors import BadRequest


class WorkerStatus:
    """Makes replies on the service thread without waiting for the loop: `engine` returns its latest snapshot."""

    def __init__(
        self,
        engine: Callable[[], EngineStatus],
        model: ServedModel,
        receiver: WeightControl | None,
        views: EngineViews | None,
        *,
        worker: str,
        metrics_url: str | None,
        capabilities: Sequence[str],
        max_queue: int,
        max_message_bytes: int,
    ) -> None:
        self._engine = engine
        self._model = model
        self._receiver = receiver
        self._views = views
        self._worker = worker
        self._metrics_url = metrics_url
        self._capabilities = tuple(capabilities)
        self._max_queue = max_queue
        self._max_message_bytes = max_message_bytes

    def reply(self, request_id: str, generation: Generation, preparing: int, sequences: int) -> dict[str, Any]:
        """The reply to `status`. `preparing`: requests with the tokenizer. `sequences`: number of rows to list."""
        reply = status_reply(
            request_id,
            replace(self._engine(), reclaimed=generation.reclaimed),
            self._model,
            draining=generation.draining,
            preparing=preparing,
            results={"stored": len(generation.store), "bytes": generation.store.size},
            max_queue=self._max_queue,
            max_message_bytes=self._max_message_bytes,
            worker=self._worker,
            metrics_url=self._metrics_url,
            capabilities=self._capabilities,
            weights_endpoint=self._receiver.endpoint if self._receiver is not None else None,
            weights=self._receiver.summary() if self._receiver is not None else None,
        )
        if sequences == 0 or self._views is None:
            return reply
        return reply | {"sequences": [sequence_fields(sequence) for sequence in self._views.sequences(sequences)]}

    def trace(self, request_id: str, steps: int) -> dict[str, Any]:
        """The reply to `trace`. Raises `RolloutError` if the worker records no steps."""
        if self._views is None:
            raise BadRequest("this worker records no steps; do not ask for a trace", field="op")
        names = {"model": self._model.name, "worker": self._worker}
        return trace_reply(request_id, names | self._views.recording(steps))
