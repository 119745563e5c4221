"""Tiny models of text and images for verl, and their processor. verl imports this module by `model.external_lib`.

Qwen's own processors need a package of videos, which not every machine has.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor, BatchFeature, Qwen2_5_VLConfig, Qwen3VLConfig

from tests.support.gateway.image_folder import add_processor
from tests.support.integrations.image_processor import WordsAndImages
from tests.support.models.images import VIDEO, make_model

NAME = "tests.support.integrations.verl_vision"
MERGE, PATCH = 2, 4


class _Pictures(WordsAndImages):
    """Takes videos, too, as arrays [frames, channels, height, width], and sees how often it is called."""

    calls = 0

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template)
        self.video_token, self.video_token_id = "<video>", VIDEO

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **options: Any) -> BatchFeature:
        type(self).calls += 1
        found = super().__call__(images, text, **options)
        if videos is not None:
            assert options["do_sample_frames"] is False
            made = [patches_of(np.asarray(video)) for video in videos]
            found["pixel_values_videos"] = torch.from_numpy(np.concatenate([patches for patches, _ in made]))
            found["video_grid_thw"] = torch.tensor([grid for _, grid in made])
            if "fps" in options["video_metadata"][0]:
                found["second_per_grid_ts"] = [2 / each["fps"] for each in options["video_metadata"]]
        return found


class Qwen3VLProcessor(_Pictures):
    """verl knows a processor by the name of its class."""


class Qwen2_5_VLProcessor(_Pictures):  # noqa: N801
    """verl knows a processor by the name of its class."""


AutoProcessor.register(Qwen3VLConfig, Qwen3VLProcessor, exist_ok=True)
AutoProcessor.register(Qwen2_5_VLConfig, Qwen2_5_VLProcessor, exist_ok=True)


def patches_of(video_FCHW: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches of a video, float32 [patches, values], and its grid: squares of patches one after the other."""
    frames, channels, height, width = video_FCHW.shape
    grid = frames // 2, height // PATCH, width // PATCH
    shape = (grid[0], 2, channels, grid[1] // MERGE, MERGE, PATCH, grid[2] // MERGE, MERGE, PATCH)
    split = video_FCHW.reshape(shape).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(split.reshape(math.prod(grid), -1), np.float32) / 128 - 1, grid


def make_vision_checkpoint(name: str, folder: Path) -> Any:
    """A model of `tests.support.models.images`, with the files that verl needs; returns transformers' model."""
    model = make_model(name, folder)
    model.name_or_path = str(folder)
    add_processor(folder, ("<|im_end|>", "\n"))  # verl asks for these two of Qwen's tokenizers
    return model
