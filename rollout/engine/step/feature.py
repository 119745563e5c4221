"""A feature of steps on the device: what an optional capability does around the forward, on every rank.

`DeviceStep` calls every feature of its worker by these hooks, and knows none by name. All work is enqueued on the
compute stream, so its order is that of the calls:

    prepare            before the step, for each `Extra` that the upload has of this feature
    begin              the rows of the step are set up
    decode_fields,     what the forward's `AttentionBatch` has of the feature
    prefill_fields
    forward_ends
    drawn              the rows have advanced by the tokens of the step
    step_ends

Decode forwards are captured, with `decode_fields` and `forward_ends`: these read only what they get, and memory at
fixed addresses. So is the `decode_work` of a feature, which it launches itself. Memory that is large is kept when an
engine is built anew after a fault; so is the feature's object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from rollout.engine.schedule.feature import StepFeature
from rollout.engine.sequence.row_needs import RowNeeds
from rollout.engine.step.masks import StepMasks
from rollout.engine.step.row_state import RowState
from rollout.engine.step.streams import Orders, Streams
from rollout.engine.upload import Extra, Header, Staging, StepInput
from rollout.models.batch import AttentionBatch, KVCache


@dataclass(frozen=True, slots=True)
class HostParts:
    """What the host's part of a feature is built from, besides the part on the device."""

    streams: Streams
    orders: Orders  # to the other ranks
    kv: KVCache
    host_pages: int  # that KV can be offloaded to
    version: int  # of the weights


class Drawn(NamedTuple):
    """What a step has drawn, in the memory of its slot."""

    output_4R: torch.Tensor  # as `Slot.output`
    accepted_R: torch.Tensor  # int32; of a row that draws several tokens, at the place of its first: drafts accepted
    masks: StepMasks  # of a step whose rows have constraints


#: Launches captured work, by its name and the size of the decode steps that it was captured for.
Replays = Mapping[str, Mapping[int, Callable[[], object]]]
NO_REPLAYS: Replays = MappingProxyType({})


class DeviceFeature:
    """One feature of a worker. A hook that is not overridden does nothing."""

    name: ClassVar[str]
    #: int32 words that its sections add to a token of a prompt at most.
    token_words: ClassVar[int] = 0

    changes_forward: ClassVar[RowNeeds] = RowNeeds.NONE  # rows with this take decode forwards that are captured apart
    #: At most one feature of a worker may: the kernel that sets draft rows up copies one.
    row_column: ClassVar[bool] = False  # it has a column of the row state, set up from the section `init_NAME`
    own_stream: ClassVar[bool] = False  # it has a stream for work beside the steps
    spare_words: int = 0  # int32 words that it adds to an upload at most, besides those of tokens

    def host_part(self, engine: HostParts, before: StepFeature | None) -> StepFeature | None:
        """A new part on the host; `before` is the one that a fault ended, whose totals go on. Rank 0 calls it."""
        return None

    def begin_rows(self, rows: RowState) -> None:
        """The row state of the engine is there; after a fault it is a new one. No step has run yet."""

    def prepare(self, extra: Extra) -> None:
        """Take what came beside the words of the step that comes next."""

    def begin(self, rows: RowState, step: StepInput) -> None:
        """The rows that a step begins are set up, its forward is not launched."""

    def decode_fields(
        self, rows: RowState, rows_B: torch.Tensor, positions_B: torch.Tensor, needs: int, output: Any
    ) -> dict[str, Any]:
        """Fields of the batch of a decode forward: of rows at these positions. `needs` are bits of `RowNeeds`."""
        return {}

    def prefill_fields(self, rows: RowState, step: StepInput, output: Any) -> dict[str, Any]:
        """Fields of the batch of a prefill."""
        return {}

    def reads_hidden(self, header: Header) -> bool:
        """True if the last layer of a prefill may leave out no token."""
        return False

    def forward_ends(self, batch: AttentionBatch, output: Any) -> None:
        """The forward of `batch` is enqueued."""

    def wanted_fields(self, rows: RowState, step: StepInput) -> dict[str, Any]:
        """Fields of the batch of those tokens of a prefill after which rows draw, one a row."""
        return {}

    def prefilled(
        self,
        step: StepInput,
        hidden_TD: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        output: Any,
    ) -> None:
        """A prefill has the hidden states of its tokens. `compute_logits` gives those of some; they may be changed."""

    def computed(self, step: StepInput, logits_SV: torch.Tensor, output: Any) -> None:
        """The logits are there, before any sampling rule. They may not be changed.

        On a GPU, rows that need this have a bit of `RowNeeds`: plain decode steps are captured whole.
        """

    def drawn(self, rows: RowState, step: StepInput, kv: KVCache, drawn: Drawn) -> None:
        """The tokens of a step are drawn, and its rows have advanced by one each."""

    def step_ends(self, step: StepInput, kv: KVCache, drawn: Drawn, output: Any, replays: Replays) -> None:
        """The rows are where the next step finds them; also after a step that draws nothing.

        `replays` launch what was captured of `decode_work`; empty where decode steps are not captured.
        """

    def decode_work(self, size: int, max_context: int, kv: KVCache) -> Mapping[str, Callable[[], None]]:
        """What `step_ends` can launch after a decode step of `size` rows, by name; it is captured at start-up."""
        return {}

    # --- output -------------------------------------------------------------------------------------------------------

    def output_words(self, tokens: int) -> int:
        """int32 words that a step of `tokens` tokens gives to the host. They are downloaded with its tokens."""
        return 0

    def output(self, words: torch.Tensor) -> Any:
        """What writes to these words on the device: of a slot, or of a captured forward. The hooks get it."""

    def slot_output(self, rows: int, tokens: int, words: torch.Tensor) -> Any:
        """The output of a slot, for steps of up to `rows` rows and `tokens` tokens; it may have more memory."""
        return self.output(words)

    def downloads(self, header: Header, output: Any) -> Seq[Callable[[], None]]:
        """What copies the rest of a step's output to the host, on the D2H stream."""
        return ()

    def downloaded(self, header: Header, output: Any) -> Any:
        """What the host's part gets at the commit (`StepOutput.of_features`), of what `downloads` have copied."""

    def copy_output(self, target: Any, source: Any, tokens: int) -> None:
        """Copy what a captured forward of `tokens` tokens has written to the output of the step's slot."""

    def read(self, words: np.ndarray, header: Header) -> Any:
        """The same, from the words of a step."""

    # --- start --------------------------------------------------------------------------------------------------------

    def largest(self) -> Seq[Extra]:
        """The largest extras that a step can have, to learn what they take."""
        return ()

    def put_largest(self, staging: Staging, rows: int, token_ids: np.ndarray | None, needs: RowNeeds) -> None:
        """Put the most that a step of `rows` rows with `features` can have; `token_ids` are those of a prefill."""
