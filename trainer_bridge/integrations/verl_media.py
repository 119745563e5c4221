"""Images of verl's prompts: from the pictures of an agent loop to a prompt with pixels.

    prompt_ids                 they have a placeholder for each token of an image, and stay as they are
    image_data, video_data     pictures  --the model's processor, as verl's trainer calls it-->  pixels and grids

The trainer processes the same pictures with the same processor after the rollout, so both see the same numbers. An
agent loop sends a picture again with each completion of a group and with each turn. So the newest results are kept, by
the content of the picture.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import Image
from verl.utils import hf_processor
from verl.utils.import_utils import import_external_libs
from verl.utils.tokenizer import build_multimodal_processor_inputs, get_processor_token_id

from trainer_bridge.client.media import MediaItem, MediaPrompt, as_pixels, processor_prompt
from trainer_bridge.expiring_cache import ExpiringCache

#: The most memory for the newest results.
_MOST_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class _Kind:
    """Images or videos, in the words of verl and of processors."""

    name: str
    data: str
    types: int  # the type in `mm_token_type_ids`
    pixels: str
    grid: str


_KINDS = (
    _Kind("image", "image_data", 1, "pixel_values", "image_grid_thw"),
    _Kind("video", "video_data", 2, "pixel_values_videos", "video_grid_thw"),
)


@dataclass(slots=True)
class _Processed:
    """The processor's output for an image or a video."""

    inputs: dict[str, Any]
    patches: int
    #: Its items from the first placeholder on, by the placeholders: frames of a video may stand apart.
    items: dict[bytes, tuple[MediaItem, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessorSource:
    """The place of a model's processor, as in verl's model configuration; code of the folder is never run."""

    folder: str
    external_lib: Any  # modules that verl imports before it loads a model

    @classmethod
    def of(cls, config: Any) -> ProcessorSource:
        """The source of the processor of verl's `model_config`."""
        names = ("local_tokenizer_path", "tokenizer_path", "local_path", "path")
        folder = next(value for value in map(config.get, names) if value)
        return cls(folder, config.get("external_lib"))


class MediaProcessor:
    """The processor of a model, which keeps up to `most_bytes` of pixels. Raises ValueError if verl cannot load one."""

    def __init__(self, source: ProcessorSource, most_bytes: int = _MOST_BYTES) -> None:
        import_external_libs(source.external_lib)
        self._processor = hf_processor(source.folder)
        merge = getattr(getattr(self._processor, "image_processor", None), "merge_size", None)
        if merge is None:
            raise ValueError(
                f"verl finds no processor of images in {source.folder}, or it has no merge_size; install torchvision, "
                "or set engine_kwargs.rollout.images=false"
            )
        self._merged = int(merge) ** 2
        self._ids = {kind: get_processor_token_id(self._processor, kind.name) for kind in _KINDS}
        self._kept: ExpiringCache[bytes, _Processed] = ExpiringCache(most_bytes)
        # Equal pictures of several requests wait for the first one.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="media")

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Token ids that stand for images and videos: if a completion had them, the trainer would look for images."""
        return tuple(token for token in self._ids.values() if token is not None)

    async def prompt(
        self, token_ids: Sequence[int], images: Any, videos: Any, options: Mapping[str, Any] | None
    ) -> MediaPrompt:
        """The prompt for the client's `generate`. `options` are verl's `mm_processor_kwargs`.

        Raises ValueError if pictures and placeholders do not fit together.
        """
        given = (token_ids, (images, videos), dict(options or {}))
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._prompt, *given)

    def _prompt(self, token_ids: Sequence[int], data: tuple[Any, Any], options: dict[str, Any]) -> MediaPrompt:
        ids = np.asarray(token_ids, np.int32)
        media: list[MediaItem] = []
        for kind, pieces in zip(_KINDS, data, strict=True):
            token = self._ids[kind]
            places = np.flatnonzero(ids == token) if token is not None else np.zeros(0, np.int64)
            for piece in () if pieces is None else pieces:
                found = self._processed(kind, piece, options)
                count = found.patches // self._merged
                if len(places) < count:
                    raise ValueError(f"prompt_ids have {len(places)} placeholders left for a {kind.name} of {count}")
                media += _placed(kind, found, ids[places[0] : places[count - 1] + 1] == token, int(places[0]))
                places = places[count:]
            if len(places):
                raise ValueError(f"prompt_ids have {len(places)} placeholders more than {kind.data} takes")
        return MediaPrompt(ids, tuple(sorted(media, key=lambda item: item.offset)))

    def _processed(self, kind: _Kind, piece: Any, options: dict[str, Any]) -> _Processed:
        content = blake2b(f"{kind.name} {sorted(options.items())!r}".encode(), digest_size=32)
        key = content.digest() if _add_content(content, piece) else None
        if key is not None and (kept := self._kept.get(key)) is not None:
            return kept
        pieces = {"images" if kind.name == "image" else "videos": [piece]}
        inputs = build_multimodal_processor_inputs(self._processor, text=[" "], mm_processor_kwargs=options, **pieces)
        pixels, grid = as_pixels(inputs[kind.pixels]), np.asarray(inputs[kind.grid])
        # verl's positions do not depend on the time between frames (`second_per_grid_ts`), so the worker's must not.
        parts = {kind.pixels: pixels, kind.grid: grid}
        found = _Processed(parts, sum(math.prod(sizes) for sizes in grid.tolist()))
        if key is not None:
            self._kept.put(key, found, pixels.nbytes)
        return found


def _placed(kind: _Kind, found: _Processed, is_placeholder: np.ndarray, offset: int) -> list[MediaItem]:
    """The items of an image or a video whose first placeholder is at `offset` of the prompt."""
    key = is_placeholder.tobytes()
    if key not in found.items:
        types = is_placeholder.astype(np.int64) * kind.types
        # The tokens between the frames of a video do not matter.
        found.items[key] = processor_prompt({"input_ids": types, "mm_token_type_ids": types, **found.inputs}).media
    return [replace(item, offset=item.offset + offset) for item in found.items[key]]


def _add_content(content: Any, value: Any, in_map: bool = False) -> bool:
    """Add all that a picture or a video consists of to a hash; False where it cannot be seen, as in a file's name."""
    if isinstance(value, Image.Image):
        plain = value.convert("RGBA") if value.mode == "P" else value
        content.update(f"{plain.mode} {plain.size} ".encode())
        content.update(plain.tobytes())
        return True
    if isinstance(value, np.ndarray) or hasattr(value, "detach"):
        array = as_pixels(value)
        content.update(f"{array.dtype} {array.shape} ".encode())
        content.update(array.tobytes())
        return True
    if isinstance(value, Mapping):
        content.update(f"{sorted(value)!r} ".encode())
        return all([_add_content(content, value[name], True) for name in sorted(value)])
    if isinstance(value, (list, tuple)):
        content.update(f"{len(value)} ".encode())
        return all([_add_content(content, part) for part in value])
    content.update(f"{value!r} ".encode())
    return value is None or isinstance(value, (bool, int, float, np.generic)) or (in_map and isinstance(value, str))
