"""What the service knows of the model that the engine runs."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.engine.messages import RoutingShape


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the service knows of the model."""

    name: str
    vocab_size: int
    max_context_tokens: int
    eos_ids: tuple[int, ...] = ()
    sparse: bool = False  # it has experts
    routing: RoutingShape | None = None  # what is kept of those that tokens take
    adapters: bool = False  # requests can name them
    sleep: bool = False  # its memory can be given back
    min_version: int = 0  # no request begins under older weights
