"""The embedding buffer on the device, and the tower that writes to it. On the compute stream.

    encode      pixels --H2D--> patches --tower--> embeddings --> their places
    select      places --> embeddings of the tokens of a prefill

Legend: P places, W numbers of a place: the embeddings of one token, side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from rollout.engine.messages import Pixels
from rollout.engine.sequence.images import Encode
from rollout.models.vision import VisionTower, to_device


class ImageEncoder:
    """A buffer of `places` tokens for what `tower` makes. With `one_by_one` no image's bits depend on the others.

    A step encodes up to `most_patches`. `zeros` allocates the buffer, by default torch does.
    """

    def __init__(
        self,
        tower: VisionTower,
        places: int,
        most_patches: int,
        dtype: torch.dtype,
        device: torch.device,
        one_by_one: bool = False,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        self.spec, self.most_patches = tower.spec, most_patches
        self._tower, self._one_by_one, self._device = tower, one_by_one, device
        shape = (places, tower.spec.width)
        self.buffer_PW = torch.zeros(shape, dtype=dtype, device=device) if zeros is None else zeros(shape, dtype)

    @torch.inference_mode()
    def encode(self, encodes: Seq[Encode]) -> None:
        """Encode images; returns once the work is enqueued."""
        for batch in [[encode] for encode in encodes] if self._one_by_one else _of_one_dtype(encodes):
            patches = [to_device(_patches(encode.pixels.patches), self._device) for encode in batch]
            places = torch.from_numpy(np.concatenate([encode.places for encode in batch]))
            embeddings_NW = self._tower.embeddings(torch.cat(patches), [encode.pixels.grid for encode in batch])
            self.buffer_PW.index_copy_(0, to_device(places, self._device), embeddings_NW)

    def largest(self) -> Encode:
        """The largest image, of zeros: to learn what it takes."""
        merge, squares = self.spec.merge, self.most_patches // self.spec.merge**2
        height = math.isqrt(squares)
        grid = (1, height * merge, squares // height * merge)
        patches = np.zeros((grid[1] * grid[2], self.spec.patch_values), np.float32)
        return Encode(Pixels(b"", grid, patches), np.arange(self.spec.tokens(grid)))

    def select(self, places_N: torch.Tensor) -> torch.Tensor:
        """The embeddings at these places, [N, W]."""
        return self.buffer_PW.index_select(0, places_N)


def _of_one_dtype(encodes: Seq[Encode]) -> list[list[Encode]]:
    groups: dict[np.dtype, list[Encode]] = {}
    for encode in encodes:
        groups.setdefault(encode.pixels.patches.dtype, []).append(encode)
    return list(groups.values())


def _patches(array: np.ndarray) -> torch.Tensor:
    """Patches as a float tensor that shares their memory."""
    tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
