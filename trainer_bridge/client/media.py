"""Prompts with images: from what a Hugging Face processor returns to a prompt that `generate` takes.

    inputs = processor(text=..., images=..., return_tensors="pt")        as for the trainer's own forward
    client.generate(processor_prompt(inputs), max_tokens=64)

The pixels go to the worker as they are, so trainer and worker see the same image. The first message with an image
carries its pixels to a worker; later messages name its hash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainer_bridge.wire.media_hash import PIXEL_TYPES, media_hash

#: `mm_token_type_ids` of a processor, and the names of what belongs to them.
_KINDS = ((1, "pixel_values", "image_grid_thw"), (2, "pixel_values_videos", "video_grid_thw"))


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """An image or a video in a prompt."""

    offset: int  # place of its first placeholder in the prompt
    length: int  # tokens
    grid_thw: tuple[int, int, int]  # frames, and patches of their height and width
    pixel_values: np.ndarray  # [t h w, values]: float32, float16, or uint16 with the bits of bfloat16
    seconds_per_frame: float | None = None  # videos with joined frames in the prompt
    hash: str = ""  # computed where it is empty

    def __post_init__(self) -> None:
        values = self.pixel_values
        if values.ndim != 2 or values.dtype not in PIXEL_TYPES:
            raise ValueError(
                f"pixel_values are {values.dtype} of shape {values.shape}; they must be float32, float16 or bfloat16, "
                "a row for each patch"
            )
        if len(values) != math.prod(self.grid_thw):
            raise ValueError(f"the grid {self.grid_thw} has {math.prod(self.grid_thw)} patches, not {len(values)}")
        if not self.hash:
            object.__setattr__(self, "hash", media_hash(values, self.grid_thw))

    def fields(self) -> dict[str, Any]:
        """The item as the protocol has it."""
        fields = {
            "offset": self.offset,
            "length": self.length,
            "grid_thw": list(self.grid_thw),
            "hash": self.hash,
            "pixel_values": self.pixel_values,
        }
        return fields if self.seconds_per_frame is None else fields | {"seconds_per_frame": self.seconds_per_frame}


@dataclass(frozen=True, slots=True, eq=False)
class MediaPrompt:
    """Token ids with placeholders, and the images in their places."""

    token_ids: np.ndarray  # int32 [tokens]
    media: tuple[MediaItem, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def followed_by(self, token_ids: Sequence[int] | np.ndarray, more: MediaPrompt | None = None) -> MediaPrompt:
        """The next turn: this prompt, then tokens (a completion), then another prompt."""
        ids = [self.token_ids, np.asarray(token_ids, np.int32)]
        media = list(self.media)
        if more is not None:
            shift = len(self.token_ids) + len(token_ids)
            ids.append(more.token_ids)
            media += [replace(item, offset=item.offset + shift) for item in more.media]
        return MediaPrompt(np.concatenate(ids), tuple(media))


def processor_prompt(inputs: Mapping[str, Any], image_token_id: int | None = None) -> MediaPrompt:
    """`processor_prompts` for one prompt."""
    prompts = processor_prompts(inputs, image_token_id)
    if len(prompts) != 1:
        raise ValueError(f"the processor returned {len(prompts)} prompts; use processor_prompts")
    return prompts[0]


def processor_prompts(inputs: Mapping[str, Any], image_token_id: int | None = None) -> list[MediaPrompt]:
    """The prompts of a batch from a Hugging Face processor.

    Tokens outside of `attention_mask` are dropped. A processor without `mm_token_type_ids` needs `image_token_id`.
    """
    ids = _rows(inputs["input_ids"])
    mask = np.ones_like(ids, dtype=bool) if inputs.get("attention_mask") is None else _rows(inputs["attention_mask"])
    if inputs.get("mm_token_type_ids") is not None:
        types = _rows(inputs["mm_token_type_ids"])
    elif image_token_id is not None:
        types = (ids == image_token_id).astype(np.int64)
    elif any(inputs.get(name) is not None for _, name, _ in _KINDS):
        raise ValueError("the processor returned no mm_token_type_ids; give image_token_id, the id of a placeholder")
    else:
        types = np.zeros_like(ids)
    queues = {kind: _Pieces(inputs, kind, types[mask.astype(bool)], *names) for kind, *names in _KINDS}
    prompts = []
    for row_ids, row_types, row_mask in zip(ids, types, mask.astype(bool), strict=True):
        kept = row_types[row_mask]
        media = [item for queue in queues.values() for item in queue.take(np.flatnonzero(kept == queue.kind))]
        token_ids = row_ids[row_mask].astype(np.int32)
        prompts.append(MediaPrompt(token_ids, tuple(sorted(media, key=lambda item: item.offset))))
    for queue in queues.values():
        queue.check_empty()
    return prompts


def chat_prompt(processor: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> MediaPrompt:
    """The prompt of chat messages with images; `options` go to `processor.apply_chat_template`."""
    options = {"add_generation_prompt": True, **options}
    inputs = processor.apply_chat_template(
        [dict(message) for message in messages], tokenize=True, return_dict=True, return_tensors="pt", **options
    )
    return processor_prompt(inputs, getattr(processor, "image_token_id", None))


class _Pieces:
    """The images, or the videos, of a batch in their order."""

    def __init__(
        self, inputs: Mapping[str, Any], kind: int, types: np.ndarray, pixels_name: str, grid_name: str
    ) -> None:
        self.kind, self._name = kind, pixels_name
        self._at = 0
        self._left: list[tuple[tuple[int, int, int], np.ndarray, float | None]] = []
        placeholders = int((types == kind).sum())
        if inputs.get(pixels_name) is None:
            if placeholders:
                raise ValueError(f"the prompts have placeholders, and the processor returned no {pixels_name}")
            self._merged = 1
            return
        grids, values = _rows(inputs[grid_name]), as_pixels(inputs[pixels_name])
        patches = [math.prod(grid) for grid in grids.tolist()]
        merged, left = divmod(sum(patches), max(placeholders, 1))
        if sum(patches) != len(values) or not placeholders or left or math.isqrt(merged) ** 2 != merged:
            raise ValueError(
                f"{grid_name} has {sum(patches)} patches, {pixels_name} {len(values)}, and the prompts have "
                f"{placeholders} placeholders: they do not fit together"
            )
        self._merged = merged  # patches that one token stands for, a square of them
        seconds = inputs.get("second_per_grid_ts") if kind == 2 else None
        times = [None] * len(patches) if seconds is None else [float(each) for each in seconds]
        bounds = np.cumsum([0, *patches])
        for (frames, height, width), start, end, time in zip(grids.tolist(), bounds, bounds[1:], times, strict=False):
            self._left.append(((frames, height, width), values[start:end], time))

    def take(self, positions: np.ndarray) -> list[MediaItem]:
        """The items of one prompt, whose placeholders are at these places."""
        items: list[MediaItem] = []
        while len(positions):
            if self._at == len(self._left):
                raise ValueError(f"a prompt has more placeholders than {self._name} has images")
            (frames, height, width), values, seconds = self._left[self._at]
            self._at += 1
            length = frames * height * width // self._merged
            whole = _run(positions, length)
            for piece, size in (
                [((frames, height, width), length)] if whole else [((1, height, width), length // frames)] * frames
            ):
                if not _run(positions, size):
                    raise ValueError(f"an image or frame of {size} tokens has other tokens between its placeholders")
                count = math.prod(piece)
                piece_values, values = values[:count], values[count:]
                items.append(MediaItem(int(positions[0]), size, piece, piece_values, seconds if piece[0] > 1 else None))
                positions = positions[size:]
        return items

    def check_empty(self) -> None:
        """Raise ValueError if an image is in no prompt."""
        if self._at != len(self._left):
            raise ValueError(f"{self._name} has {len(self._left)} images, and the prompts have {self._at}")


def _run(positions: np.ndarray, length: int) -> bool:
    """True if the first `length` positions are consecutive."""
    return len(positions) >= length > 0 and int(positions[length - 1]) - int(positions[0]) == length - 1


def _rows(values: Any) -> np.ndarray:
    """An array, or a list of rows, as a two-dimensional array of integers."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    return array[None] if array.ndim == 1 else array


def as_pixels(values: Any) -> np.ndarray:
    """Pixel values of torch or numpy as a numpy array; bfloat16 becomes uint16 with the same bits."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().contiguous()
        if str(values.dtype) == "torch.bfloat16":
            import torch

            return values.view(torch.int16).numpy().view(np.uint16)
        values = values.numpy()
    return np.ascontiguousarray(values)
