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
        receiver, views, status = self._engine.receiver, self._engine.views, self._engine.status()
        status = replace(
            status,
            state="draining" if generation.draining and status.state != "stalled" else status.state,
            queue_waiting=status.queue_waiting + preparing,
            queue_max=status.queue_max or self._settings.max_queue,
            reclaimed=generation.reclaimed,
        )
        weights = None
        if receiver is not None:
            versions = {"version": status.weights_version, "min_version": self._model.min_version}
            weights = versions | receiver.summary()
        reply = status_reply(
            request_id,
            status,
            self._model,
            results={"stored": len(generation.store), "bytes": generation.store.size},
            max_message_bytes=self._settings.max_message_bytes,
            worker=self._worker.name,
            metrics_url=self._worker.metrics_url,
            capabilities=list(self._capabilities),
            weights_endpoint=receiver.endpoint if receiver is not None else None,
            weights=weights,
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
