"""Drafts on the device: verifies the drafts of a step, and makes the next ones.

    begin        pages and draft rows of a verify step                              `verify`
    forward      a draft model keeps hidden states
    step_ends    drafts are accepted that equal the token of the row before, up    `verify`; states of linear attention
                 to the first that does not                                         follow
                 the drafter on the device runs                                     `model_drafter`, `ngram_drafter`

Its output for the host is the next drafts of each row that draws: int32 [rows, G].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from rollout.config import EngineSettings
from rollout.engine.features.drafts import verify
from rollout.engine.features.drafts.counts import DraftCounts
from rollout.engine.features.drafts.decode_costs import measure_decode_costs
from rollout.engine.features.drafts.drafter import (
    NAME,
    NO_HOST_DRAFTER,
    DeviceDrafter,
    DraftAfter,
    HostDrafter,
    device_drafter,
)
from rollout.engine.features.drafts.feature import DraftsFeature
from rollout.engine.features.drafts.model_drafter import ModelDrafter
from rollout.engine.features.drafts.ngram_drafter import NgramDrafter
from rollout.engine.features.drafts.planner import DraftPlanner
from rollout.engine.features.drafts.step_costs import StepCosts
from rollout.engine.features.drafts.suffix_drafter import SuffixDrafter
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.step.device_feature import AheadFeature, Drawn, HostParts, Replays, Site
from rollout.engine.step.execute import Executor
from rollout.engine.step.row_state import RowState
from rollout.engine.step.slot import Slot
from rollout.engine.upload import Header, RowNeeds, StepInput, UploadStaging
from rollout.models.batch import AttentionBatch, BatchFields, KVCache
from rollout.models.decoder import Decoder
from rollout.models.language_model import LanguageModel, native

_CONSTRAIN = RowNeeds.CONSTRAIN.value  # flags of an enum are slow to test
# int32 words of an upload.
_DRAFT_WORDS = 8
_BEHIND_WORDS = 1  # a row or a draft of a model with states: the number of drafts after it
_BASE_WORDS = 4  # a row that the device drafts for after the step: row and index as int64
_PAGE_WORDS = 3  # a page that a verify step sends

#: Measures the costs of decode steps; see `measure_decode_costs`.
MeasureCosts = Callable[[Executor, Slot, int, bool], StepCosts]


class DraftVerifier(AheadFeature[torch.Tensor]):
    """Drafts for the model of a worker with speculation."""

    name = NAME
    batch_fields = frozenset({"taps"})
    model_drafter = ModelDrafter  # drafts on the device with "heads"

    def __init__(self, engine: EngineSettings, model: LanguageModel, measure: MeasureCosts) -> None:
        self._engine, self._model, self._measure = engine, model, measure
        self.on_device = device_drafter(engine, model)
        self._made = 0 if self.on_device == "none" else engine.speculation_tokens  # drafts of the device for a row
        self.spare_words = verify_words(engine.max_rows, engine.draft_rows, engine.speculation_tokens)
        # The same order in which the forward goes through the tokens: see `DeltaNet.mix`.
        self._one_by_one = engine.deterministic or model.embed.dtype == torch.float32
        self._of_rows: tuple[verify.DraftState, DeviceDrafter] | None = None  # built for the present row state
        self._costs: StepCosts | None = None  # measured before `host_part`

    @classmethod
    def make(cls, site: Site, measure: MeasureCosts = measure_decode_costs) -> DraftVerifier | None:
        engine, model = site.settings.engine, site.model
        if engine.speculation == "off":
            return None
        needed = engine.speculation == "heads" or engine.speculation_model is not None
        has_draft = isinstance(model, Decoder) and model.draft is not None
        assert has_draft or not needed, "the model was loaded for other settings"
        return cls(engine, model, measure)

    @classmethod
    def keeps_token_ids(cls, settings: EngineSettings, model: LanguageModel) -> bool:
        """See `DeviceFeature`: n-grams are looked for there."""
        return device_drafter(settings, model) == "ngram"

    def begin_rows(self, rows: RowState) -> None:
        """Allocate the drafts next to the rows, and make the drafter on the device."""
        state = verify.DraftState.allocate(rows, self._made)
        self._of_rows, self._costs = (state, self._drafter(rows, state.next_RG)), None

    def host_drafter(self) -> HostDrafter:
        """A new drafter on the host."""
        if self._engine.speculation in ("suffix", "auto"):
            return SuffixDrafter(self._engine.constants.speculation_kept_tokens)
        return NO_HOST_DRAFTER

    def _drafter(self, rows: RowState, next_RG: torch.Tensor) -> DeviceDrafter:
        engine = self._engine
        match self.on_device:
            case "heads":
                return self.model_drafter(native(self._model), rows, next_RG, engine.step_rows)
            case "ngram":
                return NgramDrafter(rows, next_RG)
            case "none":
                return DeviceDrafter(rows, next_RG)

    def measure(self, executor: Executor, slot: Slot) -> None:
        self._costs = self._measure(executor, slot, self._engine.step_rows, self._made > 0)

    def host_part(self, engine: HostParts, before: StepFeature | None) -> DraftsFeature:
        settings = self._engine
        adapts = settings.speculation == "auto"
        assert self._costs is not None, "the costs are measured before"
        planner = DraftPlanner(
            self.host_drafter(),
            settings.speculation_tokens,
            settings.speculation_rows,
            self._costs,
            adapts,
            self.on_device,
            settings.constants.unpaid_share,
        )
        names = self._model.draft_names() if isinstance(self._model, Decoder) else frozenset()
        version, counts = engine.version, DraftCounts()
        if isinstance(before, DraftsFeature):
            version, counts = before.draft_version, before.counts
        return DraftsFeature(planner, draft_rows(settings), names, version, counts)

    @property
    def state(self) -> verify.DraftState:
        """The drafts next to the row state."""
        return self._parts()[0]

    @property
    def drafter(self) -> DeviceDrafter:
        return self._parts()[1]

    def _parts(self) -> tuple[verify.DraftState, DeviceDrafter]:
        assert self._of_rows is not None, "the row state is there before the first step"
        return self._of_rows

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, rows: RowState, step: StepInput) -> None:
        """Set the pages and the draft rows of a verify step up."""
        if "pages" in step:
            verify.write_draft_pages(rows, step["pages"])
        if "drafts" in step:
            verify.set_up(rows, self.state, step)

    def decode_fields(
        self, rows: RowState, rows_B: torch.Tensor, positions_B: torch.Tensor, needs: int, output: torch.Tensor
    ) -> BatchFields:
        """Where the forward keeps hidden states."""
        return {"taps": self.drafter.decode_taps(positions_B)}

    def prefill_fields(self, rows: RowState, step: StepInput, output: torch.Tensor) -> BatchFields:
        """Where the forward keeps hidden states."""
        if _after(step.header) is DraftAfter.NOTHING:
            return {}
        return {"taps": self.drafter.prefill_taps(step.header.tokens)}

    def reads_hidden(self, header: Header) -> bool:
        """True for a draft model that reads the last layer."""
        return self.drafter.reads_last_layer

    def forward_ends(self, batch: AttentionBatch, output: torch.Tensor) -> None:
        """Keep the batch of a prefill, which the draft model reads."""
        if batch.chunks and batch.taps is not None:
            self.drafter.prefilled(batch, batch.taps)

    def step_ends(
        self, rows: RowState, step: StepInput, kv: KVCache, drawn: Drawn, output: torch.Tensor, replays: Replays
    ) -> None:
        """Verify the drafts of the step, and run the drafter on the device, if the step says so."""
        if step.header.most_ahead:
            self._verify(rows, step, kv, drawn)
        after = _after(step.header)
        if after is DraftAfter.NOTHING:
            return
        drafter = self.drafter
        rows_R = drafter.run(step, drawn.output_4R, drawn.accepted_R, kv, after, replays)
        if rows_R is not None:
            output[: len(rows_R)] = drafter.next_RG.index_select(0, rows_R)

    def _verify(self, rows: RowState, step: StepInput, kv: KVCache, drawn: Drawn) -> None:
        """Compare the drafts with the tokens drawn; rows and states go on after the last accepted one."""
        header = step.header
        if header.needs & _CONSTRAIN and len(drawn.masks.refused):
            verify.refuse(self.state, step, drawn.masks.refused)
        if _after(header) is DraftAfter.DRAFT:
            drawn.accepted_R.zero_()  # rows without drafts included
        verify.accept(rows, self.state, step, drawn.output_4R, drawn.accepted_R)
        kv.states.catch_up(step["verified"], step["rows"], drawn.accepted_R, self._one_by_one)

    def decode_work(self, size: int, max_context: int, kv: KVCache) -> Mapping[str, Callable[[], None]]:
        return self.drafter.decode_work(size, max_context, kv)

    # --- output -------------------------------------------------------------------------------------------------------

    def output_words(self, tokens: int) -> int:
        return self._engine.step_rows * self._made

    def output(self, words: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
        """The next drafts of the rows that draw."""
        return words.view(self._engine.step_rows, self._made)

    def read(self, words: np.ndarray, header: Header, output: torch.Tensor) -> list[list[int]] | None:
        """The next drafts of each row that draws, in their order; drafts of earlier steps may follow."""
        if _after(header) is not DraftAfter.DRAFT:
            return None
        return words.reshape(-1, self._made)[: header.draws].tolist()

    # --- start --------------------------------------------------------------------------------------------------------

    def put_largest(self, staging: UploadStaging, rows: int, token_ids: np.ndarray, needs: RowNeeds) -> None:
        """Have the drafter on the device run."""
        if self._made:
            staging.facts[NAME] = [str(DraftAfter.DRAFT)]
        if self.on_device == "heads" and len(token_ids):
            staging.put("next_tokens", np.zeros(rows, dtype=np.int64))


def _after(header: Header) -> DraftAfter:
    """The work of the drafter on the device after a step."""
    return DraftAfter(header.facts[NAME][0]) if NAME in header.facts else DraftAfter.NOTHING


def draft_rows(engine: EngineSettings) -> range:
    return range(engine.max_rows + 1, engine.step_rows + 1)


def verify_words(max_rows: int, draft_rows: int, most: int) -> int:
    """Upper bound on the int32 words that `draft_rows` drafts, `most` of a row, add to an upload; 0 without drafts."""
    if not draft_rows:
        return 0
    positions = 2 * (most + 1)  # a row's positions in such a step, plus the tokens of its path
    told = positions + most  # positions with a sent page: drafts of the device may follow
    of_drafts = draft_rows * (2 * (_DRAFT_WORDS + positions) + _BEHIND_WORDS)
    return of_drafts + max_rows * (_PAGE_WORDS * (told + 1) + _BASE_WORDS + _BEHIND_WORDS)
