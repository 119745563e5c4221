"""A prompt in the engine: token ids and media, and the content that prefix keys and rotary positions depend on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class TokenIds:
    """A prompt item: a run of token ids."""

    token_ids: np.ndarray  # int32 [positions], at least one

    def content(self, start: int, end: int) -> bytes:
        """The content on which the KV of positions `start` to `end` - 1 depends, apart from earlier positions."""
        return self.token_ids[start:end].astype("<i4", copy=False).tobytes()


@dataclass(frozen=True, eq=False, slots=True)
class Pixels:
    """An image or a video as a processor returns it: the patches that a vision tower encodes."""

    digest: bytes  # digest of dtype, grid and patches; equal digests are the same image
    grid: tuple[int, int, int]  # frames, and patches of their height and width
    #: [frames height width, values]: float32, float16, or uint16 with the bits of bfloat16; writable for torch's sake.
    patches: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.patches.nbytes


@dataclass(frozen=True, eq=False, slots=True)
class Media:
    """A prompt item: an image or a video, instead of placeholder tokens."""

    token_ids: np.ndarray  # int32 [positions]: the placeholders
    pixels: Pixels
    #: Positions of the rotary embedding on three axes, int64 [3, positions], from the first one on.
    axes_3L: np.ndarray
    advance: int  # positions by which the text after it is further on

    def content(self, start: int, end: int) -> bytes:
        """See `TokenIds`: the placeholders of all images are equal, so pixels and positions are part of the content."""
        mark = self.pixels.digest + np.array([start, end, self.advance], "<i8").tobytes()
        times = self.axes_3L[0, start:end].astype("<i8", copy=False).tobytes()
        return self.token_ids[start:end].astype("<i4", copy=False).tobytes() + mark + times

    def identity(self) -> np.ndarray:
        """A negative number for each position, int64; equal numbers of different images are unlikely."""
        digest = blake2b(self.pixels.digest + self.axes_3L.astype("<i8").tobytes(), digest_size=8).digest()
        first = int.from_bytes(digest, "little") >> 2
        return -1 - (first + np.arange(len(self.token_ids), dtype=np.int64))


PromptItem = TokenIds | Media


class _Axes(NamedTuple):
    """The fields of a `Prompt` with images that follow from its items; of text alone by default."""

    media: tuple[tuple[int, Media], ...] = ()
    rope_3T: np.ndarray | None = None
    delta: int = 0
    jump: int = 0

    @classmethod
    def of(cls, items: tuple[PromptItem, ...]) -> _Axes:
        media: list[tuple[int, Media]] = []
        index, position, parts = 0, 0, list[np.ndarray]()
        for item in items:
            length = len(item.token_ids)
            if isinstance(item, Media):
                media.append((index, item))
                parts.append(item.axes_3L + position)
                position += item.advance
            else:
                parts.append(np.broadcast_to(np.arange(position, position + length), (3, length)))
                position += length
            index += length
        rope_3T = np.concatenate(parts, axis=1)
        end = int(rope_3T.max()) + 1  # the position of the first generated token, as in transformers
        return cls(tuple(media), rope_3T, end - index, end - position)


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A prompt: items in the order of their positions, at least one.

    An item covers one position or more. It has a token id for each position, and the `content` on which its KV depends;
    prefix keys are made of the content. Prompts with different salts share no KV by their keys.

    In a prompt with images a token has an index in the sequence, and positions of the rotary embedding, which differ
    from it: an image has fewer positions than tokens. `rope_delta` is added to the index of a later token.
    """

    items: tuple[PromptItem, ...]
    token_ids: np.ndarray = field(init=False)  # int32 [prompt tokens] of all items
    salt: bytes = b""  # part of the content of position 0, and so of every key
    media: tuple[tuple[int, Media], ...] = field(init=False)  # (first index, item)
    rope_3T: np.ndarray | None = field(init=False)  # int64 [3, prompt tokens]; None for text alone
    rope_delta: int = field(init=False)
    #: The difference if the generated tokens were part of the prompt: a video may reach further than the text.
    rope_jump: int = field(init=False)

    def __post_init__(self) -> None:
        arrays = [item.token_ids for item in self.items]
        object.__setattr__(self, "token_ids", arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        axes = _Axes.of(self.items) if any(isinstance(item, Media) for item in self.items) else _Axes()
        object.__setattr__(self, "media", axes.media)
        object.__setattr__(self, "rope_3T", axes.rope_3T)
        object.__setattr__(self, "rope_delta", axes.delta)
        object.__setattr__(self, "rope_jump", axes.jump)

    def rope_positions(self, start: int, end: int) -> np.ndarray:
        """Positions on three axes of tokens `start` to `end` - 1 of prompt and completion, int64 [3, tokens]."""
        length = len(self.token_ids)
        after = np.arange(max(start, length), end) + self.rope_delta
        later = np.broadcast_to(after, (3, len(after)))
        return later if self.rope_3T is None else np.concatenate([self.rope_3T[:, start:end], later], axis=1)

    def media_between(self, start: int, end: int) -> list[tuple[int, Media]]:
        """The images that have tokens from `start` on and before `end`, with the index of their first token."""
        return [(index, item) for index, item in self.media if index < end and index + len(item.token_ids) > start]

    def follows_row(self, start: int, end: int) -> bool:
        """True if these tokens are no images, and `rope_delta` gives their positions."""
        if not self.media:
            return True
        follows = self.rope_positions(start, end) == np.arange(start, end) + self.rope_delta
        return bool(follows.all()) and not self.media_between(start, end)

    def identity(self, tokens: np.ndarray) -> np.ndarray:
        """Numbers that are equal where the KV of the prompt and what follows may be equal.

        `tokens` (int32) are the ids of the prompt and of its completion. Without images they are the result.
        """
        if not self.media:
            return tokens
        identity, length = tokens.astype(np.int64), len(self.token_ids)
        for index, item in self.media:
            identity[index : index + len(item.token_ids)] = item.identity()
        identity[length:] += self.rope_jump << 32
        return identity

    @classmethod
    def of_tokens(cls, token_ids: np.ndarray) -> Prompt:
        """A prompt of token ids only, int32 [prompt tokens]."""
        return cls((TokenIds(token_ids),))

    @property
    def without_pixels(self) -> Prompt:
        """The same prompt; its images have their digests alone."""
        if not self.media:
            return self
        items = [
            replace(item, pixels=replace(item.pixels, patches=item.pixels.patches[:0].copy()))
            if isinstance(item, Media)
            else item
            for item in self.items
        ]
        return Prompt(tuple(items), salt=self.salt)

    def __len__(self) -> int:
        return len(self.token_ids)

    def content(self, start: int, end: int) -> bytes:
        """The content of the prompt's positions `start` to `end` - 1."""
        content = self._item_content(start, end)
        return self.salt + content if self.salt and start == 0 else content

    def _item_content(self, start: int, end: int) -> bytes:
        if len(self.items) == 1:  # the usual prompt; this runs for each of its pages
            return self.items[0].content(start, end)
        parts, first = [], 0
        for item in self.items:
            length = len(item.token_ids)
            if first < end and start < first + length:
                parts.append(item.content(max(start - first, 0), min(end - first, length)))
            first += length
        return b"".join(parts)
