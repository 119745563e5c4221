"""The replies to `status` and `trace`."""

from dataclasses import replace
from typing import Any

from rollout.config import ServiceSettings
from rollout.service.capabilities import ServedEngine, ServedModel, WorkerAddress
from rollout.service.delivery.replies import sequence_fields, status_reply, trace_reply
from rollout.service.generation import Generation
from trainer_bridge.wire.errors import BadRequest


class WorkerStatus:
    """Makes replies on the service thread without waiting for the loop."""

    def __init__(
        self,
        settings: ServiceSettings,
        engine: ServedEngine,
        model: ServedModel,
        worker: WorkerAddress,
        capabilities: tuple[str, ...],
    ) -> None:
        self._settings, self._engine, self._model = settings, engine, model
        self._worker, self._capabilities = worker, capabilities

    def reply(self, request_id: str, generation: Generation, preparing: int, sequences: int) -> dict[str, Any]:
        """The reply to `status`. `preparing`: requests with the tokenizer. `sequences`: number of rows to list."""
        receiver, views = self._engine.receiver, self._engine.views
        reply = status_reply(
            request_id,
            replace(self._engine.status(), reclaimed=generation.reclaimed),
            self._model,
            draining=generation.draining,
            preparing=preparing,
            results={"stored": len(generation.store), "bytes": generation.store.size},
            max_queue=self._settings.max_queue,
            max_message_bytes=self._settings.max_message_bytes,
            worker=self._worker.name,
            metrics_url=self._worker.metrics_url,
            capabilities=self._capabilities,
            weights_endpoint=receiver.endpoint if receiver is not None else None,
            weights=receiver.summary() if receiver is not None else None,
        )
        if sequences == 0 or views is None:
            return reply
        return reply | {"sequences": [sequence_fields(sequence) for sequence in views.sequences(sequences)]}

    def trace(self, request_id: str, steps: int) -> dict[str, Any]:
        """The reply to `trace`. Raises `RolloutError` if the worker records no steps."""
        if self._engine.views is None:
            raise BadRequest("this worker records no steps; do not ask for a trace", field="op")
        names = {"model": self._model.name, "worker": self._worker.name}
        return trace_reply(request_id, names | self._engine.views.recording(steps))
