"""A feature of steps on the device: the work of an optional capability around the forward, on every rank.

`DeviceStep` calls these hooks of every feature that its worker has. All work is enqueued on the compute stream, so it
runs in the order of the calls:

    begin
    decode_fields or prefill_fields                       before the forward
    forward_ends, prefilled, computed                     between forward and draw
    step_ends                                             after the draw

An `OutputFeature` gives something to the host, a `LogitsFeature` reads hidden states and logits, and an `AheadFeature`
makes tokens ahead of a row's draw.

`decode_fields` and `forward_ends` are captured with decode forwards, and `decode_work` is captured alone. So they may
read only their arguments, and memory at fixed addresses. After a fault an engine is built anew, but the feature's
object and its large memory stay.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch

from rollout.config import EngineSettings, Settings
from rollout.engine.device.rank_orders import NoRankOrders
from rollout.engine.device.releasable import ReleasableMemory
from rollout.engine.device.streams import Device, Streams
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.step.masks import StepMasks
from rollout.engine.step.row_state import RowState
from rollout.engine.upload import Header, RowNeeds, StepInput, StepOutput, Upload, UploadStaging
from rollout.models.batch import AttentionBatch, BatchFields, KVCache
from rollout.models.language_model import LanguageModel


class Orders(NoRankOrders):
    """Tells the other ranks, in order, what this rank enqueues on its compute stream.

    This base class is for a worker of one rank: no rank takes its orders.
    """

    def step(self, upload: Upload) -> None:
        """The next step."""

    def draw(self, masks: StepMasks) -> None:
        """The draw of the last step, whose masks are written."""

    def swap(self, version: int) -> None:
        """The copy of the update that all ranks have prepared; `version` is the version of later steps."""

    def confirm(self, output: StepOutput) -> None:
        """Raise if another rank knows that these outputs may be wrong."""


NO_ORDERS = Orders()


class OrderSizes(NamedTuple):
    """The sizes of the largest step that is ordered of other ranks."""

    words: int  # int32 words of its upload
    rows: int
    mask_words: int  # int32 words of a mask
    tokens: int


#: Waits for the other ranks of a tensor group.
Lead = Callable[[OrderSizes], Orders]


def alone(sizes: OrderSizes) -> Orders:
    """The `Lead` of a worker of one rank."""
    return NO_ORDERS


@dataclass(frozen=True, slots=True)
class Site:
    """The inputs from which the parts of an engine are built, at the start and after each fault."""

    settings: Settings
    device: Device
    model: LanguageModel
    memory: ReleasableMemory  # memory of this rank that a sleep releases
    lead: Lead = alone  # orders of the first rank to the others
    follows: bool = False  # this is not the first rank
    shared: Seq[object] = ()  # objects of features that other threads use, too


@dataclass(frozen=True, slots=True)
class HostParts:
    """The inputs of a feature's host part, besides its part on the device."""

    streams: Streams
    orders: Orders  # orders to the other ranks
    kv: KVCache
    host_pages: int  # host pages for offloaded KV
    version: int  # weights version


class Drawn(NamedTuple):
    """The results of a step's draw, in the memory of its slot."""

    output_4R: torch.Tensor  # the same layout as `Slot.output`
    accepted_R: torch.Tensor  # int32: accepted tokens ahead, at the index of the row's first draw
    masks: StepMasks  # masks of the rows with constraints


#: The object to which a feature writes its output.
Output = TypeVar("Output")
#: Launches captured work, by its name and the size of the decode steps that it was captured for.
Replays = Mapping[str, Mapping[int, Callable[[], object]]]
NO_REPLAYS: Replays = MappingProxyType({})


class DeviceFeature(Generic[Output]):
    """One feature of a worker. `Output` is None unless it is an `OutputFeature`.

    A hook that is not overridden does nothing.
    """

    name: ClassVar[str]
    #: The most int32 words that its sections have for a prompt token; if its KV has to be fresh, `fresh_words` more.
    token_words: ClassVar[int] = 0
    fresh_words: ClassVar[int] = 0

    batch_fields: ClassVar[frozenset[str]] = frozenset()  # its `BatchFields`, which no other feature of a worker gives
    changes_forward: ClassVar[RowNeeds] = RowNeeds.NONE  # rows with this take decode forwards that are captured apart
    #: Only one feature of a worker may set this (`RowState`).
    row_column: ClassVar[bool] = False  # the feature has a column of the row state, set up from the section `init_NAME`
    own_stream: ClassVar[bool] = False  # the feature has a stream for work while steps run
    spare_words: int = 0  # most int32 words that it adds to an upload, apart from the words of tokens

    @classmethod
    def make(cls, site: Site) -> Self | None:
        """Called on every rank at the start: return the feature; None without it. ValueError: there is no room."""
        raise NotImplementedError

    @classmethod
    def host_bytes(cls, settings: EngineSettings, model: LanguageModel) -> int:
        """Called before there is a feature: return the most host memory that it takes while the worker runs."""
        return 0

    @classmethod
    def keeps_token_ids(cls, settings: EngineSettings, model: LanguageModel) -> bool:
        """Called before there is a feature: return True if it reads the token ids of rows from the KV pool."""
        return False

    def host_part(self, engine: HostParts, before: StepFeature | None) -> StepFeature:
        """Called on rank 0 when an engine is built: return a new part on the host.

        `before` is the part that a fault ended; its totals go on.
        """
        raise NotImplementedError

    def begin(self, rows: RowState, step: StepInput) -> None:
        """Called when a step has set up its rows, before the forward: take its extras, set up what the feature adds."""

    def decode_fields(
        self, rows: RowState, rows_B: torch.Tensor, positions_B: torch.Tensor, needs: int, output: Output
    ) -> BatchFields:
        """Called before a decode forward: return the feature's fields of its `AttentionBatch`.

        The rows are at these positions; `needs` are bits of `RowNeeds`.
        """
        return {}

    def prefill_fields(self, rows: RowState, step: StepInput, output: Output) -> BatchFields:
        """Called before a prefill: return the feature's fields of its `AttentionBatch`."""
        return {}

    def reads_hidden(self, header: Header) -> bool:
        """Called before a prefill: return True if the last layer must compute all tokens, not only the ones that
        draw.
        """
        return False

    def put_largest(self, staging: UploadStaging, rows: int, token_ids: np.ndarray, needs: RowNeeds) -> None:
        """Called for each step that is rehearsed: put the most that a step of `rows` rows with these needs can have.

        `token_ids` are a prefill's, int64; a decode has none.
        """


class OutputFeature(DeviceFeature[Output]):
    """A feature that writes its output for the host to an object of class `Output`, in each step."""

    def takes_part(self, header: Header) -> bool:
        """Called when a step is read: return True if the feature has an output in it."""
        return True

    def forward_ends(self, batch: AttentionBatch, output: Output) -> None:
        """Called when the forward of `batch` is enqueued: enqueue what follows it."""

    def output_words(self, tokens: int) -> int:
        """Called for each slot and step: return how many int32 words a step of `tokens` tokens gives to the host."""
        return 0

    def output(self, words: torch.Tensor, rows: int, tokens: int) -> Output | None:
        """Called for each slot, and for each captured forward if it has words: return the object that writes to these.

        It may have more memory of its own. Its steps have up to `rows` rows and `tokens` tokens. The other hooks get it
        as `output`.
        """

    def copy_output(self, target: Output, source: Output, tokens: int) -> None:
        """Called after a captured forward of `tokens` tokens: copy its output, `source`, to the slot's output."""

    def read(self, words: np.ndarray, header: Header, output: Output) -> object:
        """Called when a step is read: return the entry of `StepOutput.of_features`, or None for none.

        `words` are the output's, on the host; the copies of `downloads` have arrived, too.
        """


class LogitsFeature(OutputFeature[Output]):
    """A feature that reads hidden states and logits, in steps whose header has facts of the feature.

    In other steps its hooks between forward and draw, `downloads` and `read` are not called.
    """

    def takes_part(self, header: Header) -> bool:
        return self.name in header.facts

    def prefilled(
        self,
        step: StepInput,
        hidden_TD: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        output: Output,
    ) -> None:
        """Called when a prefill has the hidden states of all its tokens: read them.

        `compute_logits` gives the logits of some of them; the feature may change these logits.
        """

    def computed(self, step: StepInput, logits_SV: torch.Tensor, output: Output) -> None:
        """Called with the logits of the rows that draw, before any sampling rule: read them, and do not change them.

        Plain decode steps on a GPU are captured whole and do not call it. Rows that need it have `RowNeeds.LOGITS`.
        """

    def downloads(self, header: Header, output: Output) -> Seq[Callable[[], None]]:
        """Called when a step is enqueued: return the copies of more outputs to the host, for the D2H stream."""
        return ()


class AheadFeature(OutputFeature[Output], ABC):
    """A feature that makes tokens ahead of a row's draw: it has rows of its own, and may run captured work.

    A worker has one at most.
    """

    @abstractmethod
    def begin_rows(self, rows: RowState) -> None:
        """Called when an engine has a new row state, before its first step: allocate the feature's row state."""

    @abstractmethod
    def decode_work(self, size: int, max_context: int, kv: KVCache) -> Mapping[str, Callable[[], None]]:
        """Called at the start for each captured size: return what `step_ends` can launch after such a step, by name."""

    def step_ends(
        self, rows: RowState, step: StepInput, kv: KVCache, drawn: Drawn, output: Output, replays: Replays
    ) -> None:
        """Called last in every step, when each row that drew is one token further: correct that, prepare the next step.

        `replays` launch what was captured of `decode_work`; empty where decode steps are not captured.
        """
