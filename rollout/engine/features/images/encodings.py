"""The books of the embedding buffer: which images are encoded, and where their embeddings are.

    buffer    | block 0 | block 1 | ...       blocks of cells; a cell holds the embeddings of one token

An encoding is needed from its own step to the last step that computes KV of its tokens. All steps run on one stream, so
a cell is free once no planned step needs it: a later encoding overwrites the cell after the earlier steps have read it.
So nothing is freed by hand. The least recently used encodings go first. An image that is needed again is encoded
again: requests keep pixels on the host.

Encodings belong to the weights of the tower: an update that changes these drops all of them.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from rollout.engine.messages.prompts import Media, Pixels
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.upload import Extra

#: Cells of a block.
BLOCK = 64


@dataclass(frozen=True, eq=False, slots=True)
class Encode:
    """An image that a step encodes before its forward."""

    pixels: Pixels
    cells: np.ndarray  # int64 [tokens]: where its embeddings go


def extra_of(encodes: Seq[Encode]) -> Extra:
    """Images to encode as a part of an upload: of each one its patches, and then its cells."""
    arrays = [array for encode in encodes for array in (encode.pixels.patches, encode.cells)]
    return Extra("images", [list(encode.pixels.grid) for encode in encodes], tuple(arrays))


def encodes_of(extra: Extra) -> list[Encode]:
    """The arguments of `extra_of`, without the digests of the images."""
    pairs = zip(extra.arrays[::2], extra.arrays[1::2], strict=True)
    return [
        Encode(Pixels(b"", tuple(grid), patches), cells)
        for grid, (patches, cells) in zip(extra.fields, pairs, strict=True)
    ]


@dataclass(frozen=True, eq=False, slots=True)
class ImageTokens:
    """Neighbouring tokens of a span that are one image, or a part of one."""

    first: int  # token of the span
    cells: np.ndarray  # int64 [tokens]: where their embeddings are


@dataclass(slots=True)
class EncodingCounts:
    """Totals since start."""

    encoded: int = 0  # images and videos
    patches: int = 0
    reused: int = 0  # chunks of prompts that found an encoding which an earlier chunk or request needed


class Encodings:
    """The encodings in the buffer. `plan_begins`, then `fit` for each span, then `take_encodes`: one step.

    `cells` is the size of the buffer, tokens; `most_patches` bounds what one step encodes. `beginnings` are the
    beginnings of the names of the tower's tensors.
    """

    def __init__(
        self, cells: int, most_patches: int, beginnings: tuple[str, ...], counts: EncodingCounts | None = None
    ) -> None:
        self.total = cells // BLOCK * BLOCK
        self.counts = counts or EncodingCounts()
        self._most_patches = most_patches
        self._beginnings = beginnings
        self._free = list(range(self.total // BLOCK))
        self._blocks: OrderedDict[bytes, list[int]] = OrderedDict()  # key: digest; least recently used first
        self._named: set[bytes] = set()  # needed by the step that is being planned
        self._encodes: list[Encode] = []
        self._patches = 0  # patches in `_encodes`

    @property
    def used(self) -> int:
        """Cells that hold encodings."""
        return self.total - len(self._free) * BLOCK

    def plan_begins(self) -> None:
        """A step of prompts is being planned."""
        self._named.clear()
        self._encodes, self._patches = [], 0

    def fit(self, seq: Sequence, start: int, length: int) -> int:
        """The number of the next `length` tokens of a prompt that fit in the step; their images are encoded or will be.

        Less than `length` ends before an image for which the step has no room. At least 1 for the first span.
        """
        for first, item in seq.group.request.prompt.media_between(start, start + length):
            if not self._have(item):
                return max(0, first - start)
        return length

    def tokens_of(self, seq: Sequence, start: int, length: int) -> tuple[ImageTokens, ...]:
        """The tokens of a span that are images; after `fit`."""
        found = []
        for first, item in seq.group.request.prompt.media_between(start, start + length):
            begin, end = max(start, first), min(start + length, first + len(item.token_ids))
            cells = self._cells(item.pixels, len(item.token_ids))
            found.append(ImageTokens(begin - start, cells[begin - first : end - first]))
        return tuple(found)

    def take_encodes(self) -> tuple[Encode, ...]:
        """The images that the planned step encodes first. Launch the step at once, in the order of plans."""
        encodes, self._encodes = tuple(self._encodes), []
        self.counts.encoded += len(encodes)
        self.counts.patches += self._patches
        return encodes

    def weights_changed(self, names: Iterable[str]) -> None:
        """Drop the encodings if an update wrote tensors of the tower: they belong to older weights."""
        if any(name.startswith(self._beginnings) for name in names):
            self.drop_all()

    def drop_all(self) -> None:
        for blocks in self._blocks.values():
            self._free += blocks
        self._blocks.clear()

    def check(self) -> None:
        """Assert that every block is free or used once."""
        blocks = [*self._free, *(block for blocks in self._blocks.values() for block in blocks)]
        assert sorted(blocks) == list(range(self.total // BLOCK)), "a block of the embedding buffer is lost"

    def _have(self, item: Media) -> bool:
        """Make sure that the step can read an item's encoding; False if it has no room for it."""
        pixels = item.pixels
        if pixels.digest in self._blocks:
            if pixels.digest not in self._named:
                self.counts.reused += 1
            self._blocks.move_to_end(pixels.digest)
            self._named.add(pixels.digest)
            return True
        patches, wanted = len(pixels.patches), -(-len(item.token_ids) // BLOCK)
        if self._encodes and self._patches + patches > self._most_patches:
            return False
        givers = [digest for digest in self._blocks if digest not in self._named]
        if wanted > len(self._free) + sum(len(self._blocks[digest]) for digest in givers):
            assert self._named, "the service refuses images that are larger than the buffer"
            return False
        for digest in givers:
            if wanted <= len(self._free):
                break
            self._free += self._blocks.pop(digest)
        self._blocks[pixels.digest] = [self._free.pop() for _ in range(wanted)]
        self._named.add(pixels.digest)
        self._encodes.append(Encode(pixels, self._cells(pixels, len(item.token_ids))))
        self._patches += patches
        return True

    def _cells(self, pixels: Pixels, tokens: int) -> np.ndarray:
        first = np.array(self._blocks[pixels.digest], dtype=np.int64) * BLOCK
        return (first[:, None] + np.arange(BLOCK)).reshape(-1)[:tokens]
