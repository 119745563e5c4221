"""A step on the device: set rows up, run the forward, draw. Everything here runs on the compute stream.

    begin      set rows up, copy pages, put tokens that the host knows where a decode forward reads them
    decode     each row's last token, from the row state; logits of its next token
    prefill    the tokens of spans of any length; logits where a token is drawn
    sample     from logits to tokens, in the row state and in the output

The sampled token goes from `sample` into the row state (carry-over): the next step reads it there, whether or not the
host has seen it. Inputs are a `StepInput` and device tensors; nothing here knows a sequence or the scheduler.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from rollout_kernels.attention.segments import no_segments
from rollout_kernels.parallel import ONE_RANK
from rollout_kernels.step import begin_step

from rollout.engine.schedule.step_feature import of_kind
from rollout.engine.step.device_feature import DeviceFeature, LogitsFeature, OutputFeature
from rollout.engine.step.row_state import LAST, LENGTH, RowState
from rollout.engine.step.sampler import Sampler
from rollout.engine.upload import Header, RowNeeds, StepInput, UploadStaging, put_decode
from rollout.models.batch import AttentionBatch, BatchFields, KVCache, PromptChunk
from rollout.models.decoder import Decoder
from rollout.models.fused import FusedDecoder, obstacle, supports
from rollout.models.language_model import LanguageModel

log = logging.getLogger(__name__)

#: Outputs of features for the host, by feature name.
Outputs = Mapping[str, Any]
_NO_OUTPUTS: Outputs = {}


def make_forward(
    model: LanguageModel, deterministic: bool, codes_from: int | None = None
) -> LanguageModel | FusedDecoder:
    """The executor of a model's forwards: the fused kernels if they support it, else the model itself."""
    if not isinstance(model, Decoder):
        return model
    if supports(model):
        return FusedDecoder(model, deterministic, codes_from=codes_from)
    if model.embed.is_cuda:
        log.warning("%s runs by torch and not by the fused kernels: %s", model.spec.architecture, obstacle(model))
    return model


class DeviceStep:
    """The model, its KV and the state of the rows. `forward` executes `model`.

    With `exact_sums` a row's scores do not depend on the other rows. With `shares_pages` decode steps say what
    their rows share.
    """

    def __init__(
        self,
        model: LanguageModel,
        forward: LanguageModel | FusedDecoder,
        kv: KVCache,
        rows: RowState,
        exact_sums: bool = False,
        shares_pages: bool = False,
        features: Seq[DeviceFeature] = (),
    ) -> None:
        self.model = model
        self.forward = forward
        self.kv = kv
        self.rows = rows
        #: The part of the vocabulary that the forwards' logits cover; None if they cover all of it.
        self.shard = model.vocab_shard if isinstance(model, Decoder) else None
        self.group = model.group if isinstance(model, Decoder) else ONE_RANK
        self.sample = Sampler(rows, self.shard)
        self.exact_sums = exact_sums
        self.shares_pages = shares_pages
        self.features = features
        self.with_output, self._of_logits = of_kind(features, OutputFeature), of_kind(features, LogitsFeature)
        _check_fields(features)
        #: The features of forwards that are captured apart, and their bits together.
        self.kinds = (RowNeeds.NONE, *(feature.changes_forward for feature in features if feature.changes_forward))
        self.changes = functools.reduce(lambda bits, kind: bits | kind.value, self.kinds, 0)
        self.skips_unwanted = isinstance(forward, FusedDecoder) and forward.takes_wanted

    def with_kv(self, kv: KVCache) -> DeviceStep:
        """The same step over another KV cache."""
        return DeviceStep(self.model, self.forward, kv, self.rows, self.exact_sums, self.shares_pages, self.features)

    def put_rows(self, staging: UploadStaging, rows: Seq[int], size: int) -> None:
        """Put a decode of rows that share nothing and open no page, padded to `size`."""
        put_decode(staging, rows, [], size)
        if self.shares_pages:
            staging.put("segments", no_segments(size))

    def begin(self, step: StepInput) -> None:
        """Set rows up, copy states and pages, put tokens that the host knows where a decode forward reads them."""
        for name in ("state_saves", "state_loads"):
            if name in step:
                self.kv.states.copy(step[name])
        self.rows.set_up(step)
        if "copies" in step:
            self._copy_pages(step["copies"].long())
        if "known" in step:
            self.rows.take_known(step["known"])
        for feature in self.features:
            feature.begin(self.rows, step)

    def decode(self, step: StepInput, outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each row: its last token goes in at position `length`. Logits of the next one, and rows."""
        header = step.header
        return self.decode_rows(step, header.max_context, header.needs, outputs), step["rows"]

    def decode_rows(self, step: StepInput, max_context: int, needs: int, outputs: Outputs) -> torch.Tensor:
        """Logits after the last tokens of a step's rows, whose contexts are up to `max_context` tokens."""
        token_ids_B, batch = self.begin_decode(
            step["rows"],
            step["new_pages"],
            max_context,
            outputs,
            needs,
            step.get("segments"),
            step.get("behind"),
        )
        hidden_BD = self.forward(token_ids_B, batch, self.kv)
        self._forward_ends(batch, outputs)
        return self.forward.compute_logits(hidden_BD)

    def begin_decode(
        self,
        rows_B: torch.Tensor,
        new_pages_B: torch.Tensor,
        max_context: int,
        outputs: Outputs = _NO_OUTPUTS,
        needs: int = 0,
        segments_SW: torch.Tensor | None = None,
        behind_B: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, AttentionBatch]:
        """The input of a decode forward from the row state: token ids, and where they sit; opens new pages."""
        page_size, columns = self.kv.page_size, -(-max_context // self.kv.page_size)
        begun = begin_step(
            rows_B,
            new_pages_B,
            self.rows.ints,
            self.rows.pages,
            last=LAST,
            length=LENGTH,
            page_size=page_size,
            columns=columns,
            table_BP=self.rows.step_pages,
        )
        self.kv.note_tokens(begun.kv_slots_B, begun.token_ids_B)
        batch = AttentionBatch(
            positions_T=begun.positions_B,
            kv_slots_T=begun.kv_slots_B,
            page_table_BP=begun.page_table_BC,
            context_lens_B=begun.context_lens_B,
            max_context=max_context,
            rows_B=rows_B,
            behind_B=behind_B,
            segments_SW=segments_SW,
            **self._fields(
                lambda feature: feature.decode_fields(
                    self.rows, rows_B, begun.positions_B, needs, outputs.get(feature.name)
                )
            ),
        )
        return begun.token_ids_B, batch

    def computed(self, step: StepInput, logits_SV: torch.Tensor, outputs: Outputs) -> None:
        """Show features the logits of a step, before its draw."""
        for feature in self._logits_features(step.header):
            feature.computed(step, logits_SV, outputs.get(feature.name))

    def _logits_features(self, header: Header) -> list[LogitsFeature]:
        return [feature for feature in self._of_logits if feature.takes_part(header)]

    def _forward_ends(self, batch: AttentionBatch, outputs: Outputs) -> None:
        for feature in self.with_output:
            feature.forward_ends(batch, outputs.get(feature.name))

    def _fields(self, of_feature: Callable[[DeviceFeature], BatchFields]) -> BatchFields:
        fields: BatchFields = {}
        for feature in self.features:
            given = of_feature(feature)
            assert feature.batch_fields.issuperset(given), f"{feature.name} gives a field that it does not declare"
            fields.update(given)
        return fields

    def prefill(self, step: StepInput, outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Spans of known tokens: logits and rows of the spans that draw, or None."""
        header = step.header
        rows_C, ends_C, positions_T = step["rows"], step["ends"], step["positions"]
        page_table_CP = self._page_table(rows_C, header.max_context)
        pages_T = page_table_CP[step["token_span"], positions_T // self.kv.page_size]
        batch = AttentionBatch(
            positions_T=positions_T,
            kv_slots_T=pages_T * self.kv.page_size + positions_T % self.kv.page_size,
            page_table_BP=page_table_CP,
            context_lens_B=ends_C,
            max_context=header.max_context,
            chunks=tuple(PromptChunk(*span) for *span, _ in header.layout),
            query_starts_C1=step["query_starts"],
            rows_B=rows_C,
            **self._fields(lambda feature: feature.prefill_fields(self.rows, step, outputs.get(feature.name))),
        )
        self.kv.note_tokens(batch.kv_slots_T, step["tokens"])
        if self.skips_unwanted and not any(feature.reads_hidden(header) for feature in self.features):
            at_S, ends = step["sampled_at"], [end for _, _, end, draws in header.layout if draws]
            wanted = batch.wanted_at(at_S, step["token_span"][at_S], ends)
            hidden_SD = self.forward(step["tokens"], replace(batch, wanted=wanted), self.kv)
            self._forward_ends(batch, outputs)
            self.rows.ints[rows_C, LENGTH] = step["lengths"]
            return (self.forward.compute_logits(hidden_SD), step["sampled_rows"]) if header.draws else None
        hidden_TD = self.forward(step["tokens"], batch, self.kv)
        self._forward_ends(batch, outputs)
        self.rows.ints[rows_C, LENGTH] = step["lengths"]
        for feature in self._logits_features(header):
            feature.prefilled(step, hidden_TD, self.forward.compute_logits, outputs.get(feature.name))
        if header.draws == 0:
            return None
        return self.forward.compute_logits(hidden_TD[step["sampled_at"]]), step["sampled_rows"]

    def _page_table(self, rows_B: torch.Tensor, max_context: int) -> torch.Tensor:
        columns = -(-max_context // self.kv.page_size)
        return self.rows.pages[:, :columns].index_select(0, rows_B)

    def _copy_pages(self, copies_N2: torch.Tensor) -> None:
        source_N, target_N = self.kv.local_pages(copies_N2).unbind(1)
        for cache in self.kv.tensors:
            cache.index_copy_(0, target_N, cache.index_select(0, source_N))


def _check_fields(features: Seq[DeviceFeature]) -> None:
    """Raise ValueError if two features give the same field of a batch: the forward would see only the last one."""
    givers: dict[str, str] = {}
    for feature in features:
        for field in sorted(feature.batch_fields):
            if field in givers:
                raise ValueError(f"the features {givers[field]!r} and {feature.name!r} both give {field!r} of a batch")
            givers[field] = feature.name
