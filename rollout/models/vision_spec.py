"""A vision tower as plain data: its config, the sizes that follow from it, and the positions of an image.

    image    --processor-->  patches  --tower-->  embeddings, one for each square of `merge` x `merge` patches
             (a trainer's)   [t h w, V]            [t h w / merge^2, (1 + deepstack) H]

A grid is (t, h, w): frames, and the patches of a frame's height and width. The embeddings take the places of
placeholder tokens in a prompt, in the order of frames, then rows, then columns. Their rotary embedding has a position
for each of three axes, while a token of text has the same position on all three.

Sources: P. Wang et al., "Qwen2-VL", arXiv 2409.12191 (positions by axis); L. Meng et al., "DeepStack", arXiv
2406.04334.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.models.config_rules import MOST_LAYERS, TEXT, Rule, integer

Grid = tuple[int, int, int]

_MOST_PATCH = 256
_INDICES = Rule(
    f"a list of at most 64 integers from 0 to {MOST_LAYERS}",
    lambda value: (
        isinstance(value, (list, tuple))
        and len(value) <= 64
        and all(type(item) is int and 0 <= item <= MOST_LAYERS for item in value)
    ),
)
#: The keys of `vision_config` that are read; no other key reaches transformers.
VISION_RULES: Mapping[str, Rule] = {
    "depth": integer(1, MOST_LAYERS),
    "hidden_size": integer(1, 1 << 16),
    "intermediate_size": integer(1, 1 << 18),
    "num_heads": integer(1, 4096),
    "hidden_act": TEXT,
    "in_channels": integer(1, 16),
    "patch_size": integer(1, _MOST_PATCH),
    "spatial_merge_size": integer(1, 64),
    "temporal_patch_size": integer(1, 64),
    "out_hidden_size": integer(1, 1 << 18),
    "num_position_embeddings": integer(1, 1 << 20),
    "deepstack_visual_indexes": _INDICES,
    "tokens_per_second": integer(1, 1 << 16),
    "window_size": integer(1, 1 << 16),
    "fullatt_block_indexes": _INDICES,
}
TOKEN_RULES: Mapping[str, Rule] = {
    "image_token_id": integer(0, 1 << 24),
    "video_token_id": integer(0, 1 << 24),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFamily:
    """The vision tower of a model of text and images, as `registry` declares it."""

    model_type: str  # the model type in transformers' config of the tower
    module: str  # the class of transformers
    #: Each frame of a video stands on its own in a prompt, after a time stamp, so a grid has one frame.
    single_frames: bool
    #: The prefixes of its tensors; files usually have the first, a trainer's module has any.
    beginnings: tuple[str, ...] = ("model.visual.", "visual.")


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A vision tower, complete: nothing that builds or runs it reads config.json again."""

    family: TowerFamily
    values: tuple[tuple[str, Any], ...]  # values of its config; lists are tuples
    hidden: int  # width of an embedding, as in the language model
    placeholders: tuple[int, ...]  # token ids that stand for its embeddings
    merge: int
    patch_values: int  # numbers of a patch
    deepstack: int  # further embeddings of a token: each is added after one of the first layers
    tokens_per_second: int | None  # positions of a second of video; None where frames have no distance

    @property
    def width(self) -> int:
        """Numbers that the tower makes for one token."""
        return (1 + self.deepstack) * self.hidden

    def tokens(self, grid: Grid) -> int:
        """Tokens that an image or a video of this grid takes in a prompt."""
        frames, height, width = grid
        return frames * (height // self.merge) * (width // self.merge)

    def positions(self, grid: Grid, seconds_per_frame: float | None = None) -> tuple[np.ndarray, int]:
        """Positions of the tokens on the three axes, int64 [3, tokens], from the first one on; and how far text moves.

        `seconds_per_frame` is the time between two frames of the grid; None: 1 s.
        """
        frames, height, width = grid[0], grid[1] // self.merge, grid[2] // self.merge
        interval = 1.0
        if self.tokens_per_second is not None and frames > 1:
            interval = self.tokens_per_second * (1.0 if seconds_per_frame is None else seconds_per_frame)
        times = (np.arange(frames, dtype=np.float32) * np.float32(interval)).astype(np.int64)
        axes = np.meshgrid(times, np.arange(height), np.arange(width), indexing="ij")
        return np.stack([axis.reshape(-1) for axis in axes]).astype(np.int64), max(height, width)


def tower_spec(family: TowerFamily, vision: Mapping[str, Any], ids: Mapping[str, Any], config: Any) -> TowerSpec:
    """The spec of a tower. `vision` has the checked keys of its config, with transformers' defaults; `ids` the tokens.

    `config` is the language model's. Raises ValueError for a tower that does not fit it.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    if vision["out_hidden_size"] != hidden:
        raise ValueError(
            f"vision_config: out_hidden_size is {vision['out_hidden_size']}, and the language model has {hidden}"
        )
    if vision["hidden_size"] % (4 * vision["num_heads"]):
        raise ValueError("vision_config: hidden_size must be a multiple of 4 num_heads, for rotary embeddings by axis")
    deepstack = vision.get("deepstack_visual_indexes") or ()
    if len(deepstack) >= layers or any(index >= vision["depth"] for index in deepstack):
        raise ValueError("vision_config: deepstack_visual_indexes names more layers than there are")
    if len(set(deepstack)) != len(deepstack):
        raise ValueError("vision_config: deepstack_visual_indexes names a layer twice")
    given = (ids.get(name) for name in TOKEN_RULES)
    placeholders = tuple(dict.fromkeys(token for token in given if token is not None))
    if not placeholders or max(placeholders) >= config.vocab_size:
        raise ValueError("config.json needs image_token_id or video_token_id, ids of the vocabulary")
    return TowerSpec(
        family=family,
        values=tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in sorted(vision.items())),
        hidden=hidden,
        placeholders=placeholders,
        merge=vision["spatial_merge_size"],
        patch_values=vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
        deepstack=len(deepstack),
        tokens_per_second=vision.get("tokens_per_second"),
    )
