"""Images in plans and uploads.

Sections of a prefill of prompts with images:

    rope_positions         int64 [3, T]: positions of the rotary embedding by axis
    image_at, _cells      int64 [n]: tokens of the step that are images, and cells of their embeddings in the buffer

Images that the step encodes first are an extra: their pixels are too large for the words.
"""

from collections.abc import Collection, Mapping

import numpy as np

from rollout.engine.features.images.encodings import Encodings, extra_of
from rollout.engine.schedule.plan import Plan, Span
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.upload import UploadStaging
from rollout.metrics.samples import percent

#: int32 words of a token, of any prompt of a step with images: three positions, its index in the step, its cell in the
#: buffer.
TOKEN_WORDS = 10


class ImagesFeature(StepFeature):
    """The images of one engine; `encodings` records where they are."""

    name = "images"

    def __init__(self, encodings: Encodings) -> None:
        self.encodings = encodings

    def fit(self, seq: Sequence, start: int, length: int, first: bool) -> int:
        """Tokens before the first image for which the step has no room."""
        if first:
            self.encodings.plan_begins()
        return self.encodings.fit(seq, start, length)

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        """Put where the images of a prefill are and the positions by axis, if any prompt has images."""
        if plan.kind == "decode" or not any(span.seq.group.request.prompt.media for span in plan.spans):
            return
        if not plan.decodes:
            self._put_prefill(plan.spans, staging)
        if encodes := self.encodings.take_encodes():
            staging.extras.append(extra_of(encodes))

    def _put_prefill(self, spans: list[Span], staging: UploadStaging) -> None:
        at, cells, axes, begin = [], [], [], 0
        for seq, start, tokens_in, _, _ in spans:
            prompt = seq.group.request.prompt
            for image in self.encodings.tokens_of(seq, start, tokens_in):
                at.append(np.arange(begin + image.first, begin + image.first + len(image.cells)))
                cells.append(image.cells)
            plain = np.broadcast_to(np.arange(start, start + tokens_in), (3, tokens_in))
            axes.append(prompt.rope_positions(start, start + tokens_in) if prompt.media else plain)
            begin += tokens_in
        staging.put("rope_positions", np.concatenate(axes, axis=1).astype(np.int64))
        if at:
            staging.put("image_at", np.concatenate(at).astype(np.int64))
            staging.put("image_cells", np.concatenate(cells))

    def weights_changed(self, version: int, names: Collection[str]) -> None:
        """Drop the encodings if the update changed the tower."""
        self.encodings.weights_changed(names)

    def memory_leaves(self) -> None:
        """The buffer is given back with the KV."""
        self.encodings.drop_all()

    def gauges(self) -> Mapping[str, float]:
        counts = self.encodings.counts
        return {
            "images/encoded": counts.encoded,
            "images/patches": counts.patches,
            "images/reused": counts.reused,
            "images/buffer_used_pct": percent(self.encodings.used, self.encodings.total),
        }

    def check(self) -> None:
        self.encodings.check()
