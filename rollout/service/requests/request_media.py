"""Images and videos of `generate` messages: their checks, and the store from which later messages name them.

    message --check--> [ background: hash, finite values --> store ] --> prompt of the engine's request

A piece travels once: a message brings its pixels, later ones its hash. If the worker lacks a named piece, it answers
`media_needed` with the hashes; the client sends the message again with the pixels.

The store has a limit in bytes. Pieces that requests in flight need stay; of the others the least recently used go.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field

from rollout.engine.messages.prompts import Media, Pixels, Prompt, TokenIds
from rollout.models.vision_spec import TowerSpec
from rollout.service.requests.fields import Strict
from trainer_bridge.wire.errors import BadRequest, MediaNeeded, Overloaded
from trainer_bridge.wire.media_hash import HASH_CHARS, PIXEL_TYPES, media_hash

_MOST_SIDE = 1 << 20
#: Processors normalise pixels to a few units. Larger values could overflow in 16 bits, and NaN would spread in the KV.
_LARGEST = 1000.0


def _grid(value: Any) -> tuple[int, int, int]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list) or len(value) != 3 or any(type(size) is not int for size in value):
        raise ValueError("send three integers: frames, and patches of the height and the width of a frame")
    if any(not 1 <= size <= _MOST_SIDE for size in value):
        raise ValueError(f"frames, height and width must be from 1 to {_MOST_SIDE}")
    return value[0], value[1], value[2]


def _pixels(value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.ndim != 2 or value.dtype not in PIXEL_TYPES:
        found = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(
            f"send a two-dimensional blob of <f4, <f2, or <u2 with the bits of bfloat16: a row a patch, not {found}"
        )
    return value


class MediaFields(Strict):
    """An image or a video of a prompt, with its pixels or by its hash."""

    offset: int = Field(ge=0, le=2**31 - 1)
    length: int = Field(ge=1, le=2**31 - 1)
    hash: str = Field(pattern=rf"^[0-9a-f]{{{HASH_CHARS}}}$")
    grid_thw: Annotated[Any, BeforeValidator(_grid)]
    pixel_values: Annotated[Any, BeforeValidator(_pixels)] | None = None
    seconds_per_frame: float | None = Field(None, gt=0, le=1e6, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one request."""

    pieces: int
    patches: int  # most patches of all pieces in a request
    piece_patches: int  # most patches of one piece


def check_media(media: Sequence[MediaFields], prompt: Any, tower: TowerSpec | None, limits: MediaLimits) -> None:
    """All checks that need no pixels. Raises `RolloutError` that names the item."""
    _check_served(tower, limits, media)
    assert tower is not None
    if not isinstance(prompt, np.ndarray):
        raise BadRequest("'media' needs a prompt of token ids with placeholders for the images", field="prompt")
    end = patches = 0
    for index, item in enumerate(media):
        where = f"media.{index}"
        _check_grid(item, tower, limits, where)
        patches += math.prod(item.grid_thw)
        if item.offset < end:
            raise BadRequest("images must be in the order of their offsets and not overlap", field=f"{where}.offset")
        end = item.offset + item.length
        if end > len(prompt):
            raise BadRequest(
                f"the image ends at {end}, after the prompt's {len(prompt)} tokens", field=f"{where}.length"
            )
        if not np.isin(prompt[item.offset : end], tower.placeholders).all():
            raise BadRequest(
                f"the prompt must have placeholders ({_either(tower.placeholders)}) in the places of an image; it has "
                "other tokens",
                field=f"{where}.offset",
            )
    if patches > limits.patches:
        raise BadRequest(f"the images have {patches} patches; send at most {limits.patches}", field="media")


def check_pieces(media: Sequence[MediaFields], tower: TowerSpec | None, limits: MediaLimits) -> None:
    """The checks of images that come without a prompt. Raises `RolloutError` that names the item."""
    _check_served(tower, limits, media)
    assert tower is not None
    for index, item in enumerate(media):
        if item.pixel_values is None:
            raise BadRequest(
                "an image that comes ahead has its pixel values; add them", field=f"media.{index}.pixel_values"
            )
        _check_grid(item, tower, limits, f"media.{index}")


def _check_served(tower: TowerSpec | None, limits: MediaLimits, media: Sequence[MediaFields]) -> None:
    if tower is None:
        raise BadRequest(
            "this worker serves text alone; start it with --images (model.images) and a model that has a vision tower, "
            "or remove 'media' (see 'capabilities' in the status)",
            field="media",
        )
    if len(media) > limits.pieces:
        raise BadRequest(f"the request has {len(media)} images; send at most {limits.pieces}", field="media")


def check_placeholders(prompt: Prompt, tower: TowerSpec) -> None:
    """Raise `RolloutError` for placeholders without an image: the model would take them for words."""
    count = int(np.isin(prompt.token_ids, tower.placeholders).sum())
    covered = sum(len(item.token_ids) for _, item in prompt.media)
    if count != covered:
        raise BadRequest(
            f"the prompt has {count} placeholders ({_either(tower.placeholders)}), but its images take {covered}: send "
            "'media' for each image",
            field="media" if prompt.media else "prompt",
        )


def _check_grid(item: MediaFields, tower: TowerSpec, limits: MediaLimits, where: str) -> None:
    frames, height, width = item.grid_thw
    if height % tower.merge or width % tower.merge:
        raise BadRequest(
            f"height and width of the grid {list(item.grid_thw)} must be multiples of {tower.merge}",
            field=f"{where}.grid_thw",
        )
    if tower.family.single_frames and frames != 1:
        raise BadRequest(
            "each frame of a video stands on its own in a prompt of this model: send it as an item with one frame",
            field=f"{where}.grid_thw",
        )
    patches = frames * height * width
    if patches > limits.piece_patches:
        raise BadRequest(
            f"the image has {patches} patches and this worker takes {limits.piece_patches}; send a smaller one",
            field=f"{where}.grid_thw",
        )
    if (tokens := tower.tokens(item.grid_thw)) != item.length:
        raise BadRequest(
            f"the grid {list(item.grid_thw)} takes {tokens} tokens, and 'length' is {item.length}",
            field=f"{where}.length",
        )
    if item.pixel_values is not None and item.pixel_values.shape != (patches, tower.patch_values):
        raise BadRequest(
            f"the grid {list(item.grid_thw)} needs pixel values of shape [{patches}, {tower.patch_values}], not "
            f"{list(item.pixel_values.shape)}",
            field=f"{where}.pixel_values",
        )


def _either(ids: tuple[int, ...]) -> str:
    return " or ".join(map(str, ids))


def named_only(media: Iterable[MediaFields]) -> list[MediaFields]:
    """The items without their pixels."""
    return [item.model_copy(update={"pixel_values": None}) for item in media]


class MediaStore:
    """Pieces by digest. May be used from any thread."""

    def __init__(self, most_bytes: int) -> None:
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._pieces: OrderedDict[bytes, Pixels] = OrderedDict()  # least recently used first
        self._users: dict[bytes, int] = {}

    def prompt(self, token_ids: np.ndarray, media: Sequence[MediaFields], tower: TowerSpec) -> Prompt:
        """The prompt of checked items. Hashes their pixels, which takes a millisecond a megabyte.

        Raises `RolloutError`: the pixels do not match the hash or are not finite; pieces are missing; or there is no
        room for them.
        """
        found = [self._take(item, f"media.{index}") for index, item in enumerate(media)]
        missing = [item.hash for item, pixels in zip(media, found, strict=True) if pixels is None]
        if missing:
            raise MediaNeeded(
                f"this worker does not have {len(set(missing))} of the images that the request names; send it again "
                "with their 'pixel_values'",
                field="media",
                need=tuple(dict.fromkeys(missing)),
            )
        items: list[TokenIds | Media] = []
        at = 0
        for item, pixels in zip(media, found, strict=True):
            end = item.offset + item.length
            if item.offset > at:
                items.append(TokenIds(token_ids[at : item.offset]))
            axes_3L, advance = tower.positions(item.grid_thw, item.seconds_per_frame)
            assert pixels is not None
            items.append(Media(token_ids[item.offset : end], pixels, axes_3L, advance))
            at = end
        if at < len(token_ids):
            items.append(TokenIds(token_ids[at:]))
        return Prompt(tuple(items))

    def with_pixels(self, prompt: Prompt) -> Prompt | None:
        """A prompt `without_pixels`, with them again; None if some are not here any more."""
        if not prompt.media:
            return prompt
        with self._lock:
            found = {item.pixels.digest: self._pieces.get(item.pixels.digest) for _, item in prompt.media}
        items: list[TokenIds | Media] = []
        for item in prompt.items:
            if isinstance(item, Media):
                pixels = found[item.pixels.digest]
                if pixels is None:
                    return None
                item = replace(item, pixels=pixels)
            items.append(item)
        return Prompt(tuple(items), salt=prompt.salt)

    def add(self, media: Sequence[MediaFields]) -> None:
        """Keep checked items with their pixels. Raises `RolloutError` as `prompt` does."""
        for index, item in enumerate(media):
            self._take(item, f"media.{index}")

    def hold(self, prompt: Prompt) -> None:
        """Retain the pieces of a prompt for a request in flight."""
        with self._lock:
            for _, item in prompt.media:
                digest = item.pixels.digest
                self._users[digest] = self._users.get(digest, 0) + 1
                if digest not in self._pieces:  # the piece was dropped after the prompt was made
                    self._add(item.pixels)

    def release(self, prompt: Prompt) -> None:
        """Release the pieces of a request that has ended."""
        with self._lock:
            for _, item in prompt.media:
                digest = item.pixels.digest
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest]
            self._make_room(0)

    def _take(self, item: MediaFields, where: str) -> Pixels | None:
        digest = bytes.fromhex(item.hash)
        if item.pixel_values is None:
            return self._find(digest, item, where)
        if media_hash(item.pixel_values, item.grid_thw) != item.hash:
            raise BadRequest("the pixel values have another hash than 'hash': compute it anew", field=f"{where}.hash")
        if not _within_bounds(item.pixel_values):
            raise BadRequest(
                f"a pixel value is not finite, or larger than {_LARGEST:g}; send what the processor returns",
                field=f"{where}.pixel_values",
            )
        pixels = Pixels(digest, item.grid_thw, item.pixel_values.copy())
        with self._lock:
            if digest in self._pieces:
                self._pieces.move_to_end(digest)
                return self._pieces[digest]
            if not self._make_room(pixels.nbytes):
                raise Overloaded(
                    f"images of requests in flight take {self.nbytes} bytes of service.media_store_bytes; try again "
                    "later",
                    field=where,
                    retry_after_s=1.0,
                )
            self._add(pixels)
        return pixels

    def _find(self, digest: bytes, item: MediaFields, where: str) -> Pixels | None:
        with self._lock:
            pixels = self._pieces.get(digest)
            if pixels is None:
                return None
            self._pieces.move_to_end(digest)
        if pixels.grid != item.grid_thw:
            raise BadRequest(f"the image with this hash has the grid {list(pixels.grid)}", field=f"{where}.grid_thw")
        return pixels

    def _add(self, pixels: Pixels) -> None:
        self._pieces[pixels.digest] = pixels
        self.nbytes += pixels.nbytes

    def _make_room(self, nbytes: int) -> bool:
        """Drop unused pieces until `nbytes` are free; False if that is not enough."""
        for digest in [digest for digest in self._pieces if digest not in self._users]:
            if self.nbytes + nbytes <= self._most_bytes:
                break
            self.nbytes -= self._pieces.pop(digest).nbytes
        return self.nbytes + nbytes <= self._most_bytes


def _within_bounds(values: np.ndarray) -> bool:
    """True if all values are finite and within the bound."""
    if values.dtype == np.uint16:  # the bits of bfloat16 without the sign rise with the value
        return int((values & 0x7FFF).max(initial=0)) <= int(np.float32(_LARGEST).view(np.uint32) >> 16)
    return bool((np.abs(values) <= _LARGEST).all())
