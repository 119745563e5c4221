"""A feature of steps on the device: what an optional capability does around the forward, on every rank.

`DeviceStep` calls every feature of its worker by these hooks, and knows none by name. All work is enqueued on the
compute stream, so its order is that of the calls:

    prepare            before the step, for each `Extra` that the upload has of this feature
    begin              rows are set up, pages are copied
    decode_fields,     what the forward's `AttentionBatch` has of the feature
    prefill_fields
    end                the forward has run

Decode forwards are captured: `begin` is not, `decode_fields` and `end` are, and read only what they get, and memory at
fixed addresses. Memory that is large is kept when an engine is built anew after a fault; so is the feature's object.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from rollout.engine.schedule.feature import StepFeature
from rollout.engine.step.row_state import RowState
from rollout.engine.upload import Extra, StepInput


class DeviceFeature:
    """One feature of a worker. A hook that is not overridden does nothing."""

    name: ClassVar[str]
    #: int32 words that its sections add to a token of a prompt at most.
    token_words: ClassVar[int] = 0

    def host_part(self, before: StepFeature | None) -> StepFeature | None:
        """A new part on the host; `before` is the one that a fault ended, whose totals go on. Rank 0 calls it."""
        return None

    def prepare(self, extra: Extra) -> None:
        """Take what came beside the words of the step that comes next."""

    def decode_fields(self, rows: RowState, rows_B: torch.Tensor, positions_B: torch.Tensor) -> dict[str, Any]:
        """Fields of the batch of a decode forward: of rows at these positions."""
        return {}

    def prefill_fields(self, rows: RowState, step: StepInput) -> dict[str, Any]:
        """Fields of the batch of a prefill."""
        return {}

    def largest(self) -> Extra | None:
        """The largest extra that a step can have, to learn what it takes; None if steps have none."""
        return None
