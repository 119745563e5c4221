"""Facts about the served model that the service needs."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.engine.messages.requests import RoutingShape
from rollout.models.vision_spec import TowerSpec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the served model."""

    name: str
    vocab_size: int
    max_context_tokens: int
    eos_ids: tuple[int, ...] = ()
    sparse: bool = False  # a mixture of experts
    routing: RoutingShape | None = None  # shape of the expert records; None: not recorded
    adapters: bool = False  # requests may name adapters
    sleep: bool = False  # sleep and wake are offered
    min_version: int = 0  # no completion begins under an older version
    images: TowerSpec | None = None  # the vision tower; None: requests have no images
    image_patches: int = 0  # most patches of an image
    dtype: str = ""  # dtype of the computation, such as `bfloat16`
