"""The embedding buffer on the device, and the tower that writes to it.

    begin             pixels --H2D--> patches --tower--> embeddings --> their cells
    prefill_fields    cells --> embeddings of the tokens of a prefill

Legend: P cells, W numbers of a cell: the embeddings of one token, side by side.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from rollout.config import EngineSettings
from rollout.engine.features.images.encodings import BLOCK, Encode, Encodings, encodes_of, extra_of
from rollout.engine.features.images.feature import TOKEN_WORDS, ImagesFeature
from rollout.engine.messages.prompts import Pixels
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.step.device_feature import DeviceFeature, HostParts, Site
from rollout.engine.step.row_state import ROPE_DELTA, RowState
from rollout.engine.upload import RowNeeds, StepInput, UploadStaging
from rollout.models.batch import BatchFields, StepImages
from rollout.models.decoder import Decoder
from rollout.models.vision import VisionTower, to_device
from rollout.models.vision_spec import TowerSpec

log = logging.getLogger(__name__)


def image_cells(settings: EngineSettings) -> int:
    """Cells of the buffer for embeddings of images: `image_tokens`, in whole blocks."""
    return -(-settings.constants.image_tokens // BLOCK) * BLOCK


def image_buffer_bytes(settings: EngineSettings, tower: TowerSpec, dtype: torch.dtype) -> int:
    """Device memory of that buffer."""
    return image_cells(settings) * tower.width * dtype.itemsize


class ImageEncoder(DeviceFeature[None]):
    """A buffer of `cells` tokens for what `tower` makes. With `one_by_one` no image's bits depend on the others.

    A step encodes up to `most_patches`. `zeros` allocates the buffer, by default torch does.
    """

    name = "images"
    batch_fields = frozenset({"images", "rope_positions"})
    token_words = TOKEN_WORDS

    def __init__(
        self,
        tower: VisionTower,
        cells: int,
        most_patches: int,
        dtype: torch.dtype,
        device: torch.device,
        one_by_one: bool,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> None:
        self.spec, self.most_patches = tower.spec, most_patches
        self._tower, self._one_by_one, self._device = tower, one_by_one, device
        self.buffer_PW = zeros((cells, tower.spec.width), dtype)

    @classmethod
    def make(cls, site: Site) -> ImageEncoder | None:
        """The tower with its buffer, if the model has a tower. Raises ValueError if the buffer does not fit."""
        engine, device, memory = site.settings.engine, site.device, site.memory
        tower = site.model.tower if isinstance(site.model, Decoder) else None
        if tower is None:
            return None
        cells = image_cells(engine)
        assert tower.spec.merge**2 <= engine.constants.image_patches <= cells * tower.spec.merge**2, "two constants"
        dtype, where = site.model.embed.dtype, site.model.embed.device
        needed = image_buffer_bytes(engine, tower.spec, dtype)
        if needed > device.free_bytes():
            raise ValueError(
                f"image_tokens = {engine.constants.image_tokens} take {needed / 2**30:.2f} GiB and there are "
                f"{device.free_bytes() / 2**30:.2f} GiB: set model.images = false, or use a device with more memory"
            )
        log.info("buffer for embeddings of images", extra={"tokens": cells, "bytes": needed})
        return cls(tower, cells, engine.constants.image_patches, dtype, where, engine.deterministic, memory.zeros)

    def host_part(self, engine: HostParts, before: StepFeature | None) -> ImagesFeature:
        counts = before.encodings.counts if isinstance(before, ImagesFeature) else None
        beginnings = self.spec.family.beginnings
        return ImagesFeature(Encodings(len(self.buffer_PW), self.most_patches, beginnings, counts))

    def begin(self, rows: RowState, step: StepInput) -> None:
        """Encode the images of a step; returns once the work is enqueued."""
        for extra in step.extras:
            if extra.feature == self.name:
                self.encode(encodes_of(extra))

    @torch.inference_mode()
    def encode(self, encodes: Seq[Encode]) -> None:
        """Encode images; returns once the work is enqueued."""
        for batch in [[encode] for encode in encodes] if self._one_by_one else _of_one_dtype(encodes):
            patches = [to_device(_patches(encode.pixels.patches), self._device) for encode in batch]
            cells = torch.from_numpy(np.concatenate([encode.cells for encode in batch]))
            embeddings_NW = self._tower.embeddings(torch.cat(patches), [encode.pixels.grid for encode in batch])
            self.buffer_PW.index_copy_(0, to_device(cells, self._device), embeddings_NW)

    def decode_fields(
        self, rows: RowState, rows_B: torch.Tensor, positions_B: torch.Tensor, needs: int, output: None
    ) -> BatchFields:
        """Positions of the rotary embedding, where rows may have images."""
        return {"rope_positions": positions_B + rows.ints[:, ROPE_DELTA].index_select(0, rows_B)}

    def prefill_fields(self, rows: RowState, step: StepInput, output: None) -> BatchFields:
        """Positions of the rotary embedding, and the tokens that are images."""
        fields: BatchFields = {}
        if "rope_positions" in step:
            fields["rope_positions"] = step["rope_positions"]
        if "image_at" in step:
            fields["images"] = StepImages(step["image_at"], self.buffer_PW.index_select(0, step["image_cells"]))
        return fields

    def put_largest(self, staging: UploadStaging, rows: int, token_ids: np.ndarray, needs: RowNeeds) -> None:
        """Put the largest image, of zeros, if the step has everything that a prompt can ask for."""
        if len(token_ids) and needs & RowNeeds.LOGITS:
            staging.extras.append(extra_of([self.largest()]))

    def largest(self) -> Encode:
        """The largest image, of zeros."""
        merge, squares = self.spec.merge, self.most_patches // self.spec.merge**2
        height = math.isqrt(squares)
        grid = (1, height * merge, squares // height * merge)
        patches = np.zeros((grid[1] * grid[2], self.spec.patch_values), np.float32)
        return Encode(Pixels(b"", grid, patches), np.arange(self.spec.tokens(grid)))


def _of_one_dtype(encodes: Seq[Encode]) -> list[list[Encode]]:
    groups: dict[np.dtype, list[Encode]] = {}
    for encode in encodes:
        groups.setdefault(encode.pixels.patches.dtype, []).append(encode)
    return list(groups.values())


def _patches(array: np.ndarray) -> torch.Tensor:
    """Patches as a float tensor that shares their memory."""
    tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
