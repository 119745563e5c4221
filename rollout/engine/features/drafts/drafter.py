"""Drafters: what makes drafts, on the host and on the device, and how the settings name them.

A draft is a token that a row is expected to draw next. A verify step puts in a row's last token and its drafts; drafts
that equal the tokens drawn are accepted. A wrong draft costs time and changes no token.

    on the host      asked for a path, before a step: the tokens after the committed ones of a completion. A verify
                     step takes its drafts from the path, at the position where the row is when the step runs
    on the device    runs after a step, and leaves the next drafts of each row there. The host asks for nothing, and
                     learns these drafts with the tokens of their step
"""

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np
import torch

from rollout.config import EngineSettings
from rollout.engine.step.device_feature import NO_REPLAYS, Replays
from rollout.engine.step.row_state import RowState
from rollout.engine.upload import StepInput
from rollout.models.batch import AttentionBatch, HiddenTaps, KVCache
from rollout.models.decoder import Decoder
from rollout.models.language_model import LanguageModel

#: The name of the feature: of its part in plans, uploads and outputs.
NAME = "drafts"


class HostDrafter(Protocol):
    """Drafts on the host. `key` is one completion; only the loop calls it."""

    def path(self, key: Hashable, prompt: np.ndarray, tokens: Seq[int], want: int, version: int = 0) -> list[int]:
        """Up to `want` token ids expected after prompt (int32) and committed tokens; they may be any of the model's.

        From call to call with one key, `tokens` only grow. `version` is the weights version of the newest token.
        """

    def source(self, key: Hashable) -> int | None:
        """The version of the weights that drafted the last path of this completion; None if no weights did."""

    def ended(self, key: Hashable) -> None:
        """Note that this completion has ended; its key may be unknown."""


class NoHostDrafter:
    """Drafts nothing; a planner does not ask it."""

    def path(self, key: Hashable, prompt: np.ndarray, tokens: Seq[int], want: int, version: int = 0) -> list[int]:
        return []

    def source(self, key: Hashable) -> None:
        """None, since no path comes from weights."""

    def ended(self, key: Hashable) -> None:
        """No-op."""


NO_HOST_DRAFTER = NoHostDrafter()

#: The drafter on the device: the draft model (`heads`), or n-grams of the row.
DeviceDrafterName = Literal["none", "heads", "ngram"]


class DraftAfter(StrEnum):
    """The work of the drafter on the device after a step."""

    NOTHING = "nothing"
    READ = "read"  # a draft model reads the step but makes no drafts
    DRAFT = "draft"  # the next drafts are made for each row that draws; a draft model reads the step first


class DeviceDrafter:
    """Drafts on the device, on the compute stream: none. A drafter that reads no hidden states overrides `run` alone.

    `rows` is the row state, int64 `next_RG` [rows, drafts] receives the next drafts of each row.
    """

    reads_last_layer: bool = False  # it reads hidden states after the last layer

    def __init__(self, rows: RowState, next_RG: torch.Tensor) -> None:
        self.rows = rows
        self.next_RG = next_RG
        self.most = next_RG.shape[1]  # most drafts for a row

    def run(
        self,
        step: StepInput,
        output_4R: torch.Tensor,
        accepted_B: torch.Tensor,
        kv: KVCache,
        after: DraftAfter,
        replays: Replays = NO_REPLAYS,
    ) -> torch.Tensor | None:
        """Do `after` after a step whose tokens are drawn. Returns the rows that have drafts now, in their order.

        `accepted_B` (int32) counts accepted drafts by index, 0 for indices without drafts; read in steps with drafts.
        For `replays` see `AheadFeature.step_ends`.
        """
        return None

    def decode_taps(self, positions_B: torch.Tensor) -> HiddenTaps | None:
        """The buffer for hidden states of a decode forward of rows at these positions, at a fixed address."""
        return None

    def prefill_taps(self, tokens: int) -> HiddenTaps | None:
        """The buffer for hidden states of a prefill of this number of tokens."""
        return None

    def prefilled(self, batch: AttentionBatch, taps: HiddenTaps) -> None:
        """Note a prefill; `run` reads it after the draw."""

    def decode_work(self, size: int, max_context: int, kv: KVCache) -> Mapping[str, Callable[[], None]]:
        return {}


def device_drafter(settings: EngineSettings, model: LanguageModel) -> DeviceDrafterName:
    if settings.speculation in ("heads", "auto") and isinstance(model, Decoder) and model.draft is not None:
        return "heads"
    return "ngram" if settings.speculation in ("ngram", "auto") else "none"
