"""Right messages with made-up images, for a server without a model."""

from typing import Any

import numpy as np

from rollout.models.vision_spec import TowerFamily, TowerSpec
from rollout.service.capabilities import ServedModel
from tests.support.service.harness import MODEL
from trainer_bridge.wire.media_hash import media_hash

PLACEHOLDER, PATCH = 299, 8
TOWER = TowerSpec(
    family=TowerFamily(model_type="qwen3_vl_vision", module="", single_frames=True),
    values=(),
    hidden=4,
    placeholders=(PLACEHOLDER, PLACEHOLDER + 1),
    merge=2,
    patch_values=PATCH,
    deepstack=0,
    tokens_per_second=None,
)
WITH_IMAGES = ServedModel(
    MODEL.name, MODEL.vocab_size, MODEL.max_context_tokens, MODEL.eos_ids, images=TOWER, image_patches=64
)


def pixels_of(grid: tuple[int, int, int], seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    """Random pixel values of an image with this grid."""
    return np.random.default_rng(seed).normal(size=(grid[0] * grid[1] * grid[2], PATCH)).astype(dtype)


def item_of(offset: int, grid: tuple[int, int, int] = (1, 2, 4), seed: int = 0, **changes: Any) -> dict[str, Any]:
    """An item with its pixels."""
    pixels = pixels_of(grid, seed)
    item = {
        "offset": offset,
        "length": grid[0] * grid[1] * grid[2] // 4,
        "grid_thw": list(grid),
        "hash": media_hash(pixels, grid),
        "pixel_values": pixels,
    }
    return item | changes


def by_name(item: dict[str, Any]) -> dict[str, Any]:
    """The item without its pixels."""
    return {name: value for name, value in item.items() if name != "pixel_values"}


def prompt_for(*items: dict[str, Any], tokens: int = 12) -> list[int]:
    """A prompt with placeholders in the places of the items."""
    prompt = list(range(1, tokens + 1))
    for item in items:
        for place in range(item["offset"], item["offset"] + item["length"]):
            prompt[place] = PLACEHOLDER
    return prompt
