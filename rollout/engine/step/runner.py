"""Runs plans on the device: packs the upload, enqueues the step, reads its outputs.

    host      launch: pack, enqueue                                              read: wait for d2h_done
    h2d       h2d_start | copy | h2d_done
    compute                       wait h2d_done | start | forward, sample, advance rows | end
    d2h                                                                           wait end | copy | d2h_done

A step with constrained rows stops after its forward, until `draw` comes with their masks. What rows ask for beside
their tokens (`scores.py`) is taken from the forward's results before the draw, and has a copy to the host of its own.

`launch` never waits. The sampled token goes from the sampler into the row state on the device (carry-over): the next
step reads it there, whether or not the host has seen it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Sequences

import numpy as np
import torch
from rollout_kernels.step import begin_step

from rollout.engine.device.streams import Device, Event, Stream
from rollout.engine.kv.page_mover import PageMover
from rollout.engine.schedule.plan import Plan, StepOutput
from rollout.engine.schedule.sequence import Feature, Sequence
from rollout.engine.step.graphs import PLAIN, DecodeGraphs
from rollout.engine.step.packing import chunk_tokens, put_scored, put_scored_at, put_tops
from rollout.engine.step.row_state import LAST, LENGTH, RowState, put_setup
from rollout.engine.step.sampler import Sampler
from rollout.engine.step.scores import StepScores
from rollout.engine.step.slot import Slot, Upload
from rollout.engine.step.step_record import StepRecord
from rollout.models.adapters import AdapterSlots, StepAdapters
from rollout.models.batch import AttentionBatch, Chunk, KVCache
from rollout.models.decoder import Decoder
from rollout.models.fused import FusedDecoder, supports

#: A forward on the compute stream: logits and rows of those that sample, None if none do.
#: The record, if there is one, gets the experts of the step's tokens.
Forward = Callable[[Upload, StepRecord | None], tuple[torch.Tensor, torch.Tensor] | None]
#: What a launch enqueues on the compute stream.
Step = Callable[[Upload, Slot], None]

_ADAPTER = Feature.ADAPTER.value  # flags of an enum are slow to test


class Runner:
    """The model, its KV and row state, and the three streams."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        kv: KVCache,
        rows: RowState,
        fused_experts: bool = False,
        deterministic: bool = False,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.device = device
        self.model = model
        fused = supports(model, fused_experts)
        self.forward = FusedDecoder(model, deterministic) if fused else model  # what steps are run by
        self.kv = kv
        self.rows = rows
        self.adapters = adapters
        self.loads = None if adapters is None else device.stream("adapters")  # copies them to slots that nobody reads
        self.sample = Sampler(rows)
        self._exact_sums = deterministic  # a row's scores do not depend on the other rows
        self.graphs: DecodeGraphs | None = None  # captured decode steps, where the device has them
        self.mover: PageMover | None = None  # of pages to the host and back, where they are offloaded
        self.h2d, self.compute, self.d2h = device.stream("h2d"), device.stream("compute"), device.stream("d2h")

    def launch(self, plan: Plan, slot: Slot) -> None:
        """Enqueue a step; returns without waiting for anything."""
        slot.begin()
        step = self._pack_decode(plan, slot) if plan.kind == "decode" else self._pack_prefill(plan, slot)
        upload = slot.upload()
        self.h2d.record(slot.h2d_start)
        self.h2d.run(upload.copy)
        self.h2d.record(slot.h2d_done)

        self.compute.wait(slot.h2d_done)
        self.compute.record(slot.start)
        self.compute.run(functools.partial(step, upload, slot))
        if plan.held:
            self.compute.record(slot.forward_end)
        else:
            self._finish(plan, slot)

    def draw(self, plan: Plan, slot: Slot, at: Sequences[int]) -> None:
        """Enqueue the draw of a launched step that is held; its first masks are those of the sampled rows `at`."""
        slot.masks.hold(at)
        self.h2d.run(slot.masks.copy)
        self.h2d.record(slot.masks.arrived)
        self.compute.wait(slot.masks.arrived)
        self.compute.record(slot.draw_start)
        self.compute.run(functools.partial(self._draw, plan.features, slot))
        self._finish(plan, slot)

    def _finish(self, plan: Plan, slot: Slot) -> None:
        self.compute.record(slot.end)
        self.d2h.wait(slot.end)
        self.d2h.record(slot.d2h_start)
        self.d2h.run(functools.partial(slot.download, 0 if slot.record is None else plan.tokens))
        if slot.scores.wanted:
            self.d2h.run(slot.scores.copy)
        self.d2h.record(slot.d2h_done)

    def read(self, plan: Plan, slot: Slot) -> StepOutput:
        """Wait for the outputs of a launched step. Raises DeviceError if anything on the device failed."""
        slot.d2h_done.synchronize()
        self.check()
        count = len(plan.sampled)
        output = slot.output_host[:, :count].numpy()
        logprobs = output[1:].view(np.float32)
        scores = slot.scores.read() if slot.scores.wanted else None
        record = None if slot.record is None else slot.record_host(plan.tokens)
        return StepOutput(
            output[0].tolist(), logprobs[0].tolist(), logprobs[1].tolist(), logprobs[2].tolist(), scores, record
        )

    def enqueue(self, work: Callable[[], object], start: Event, end: Event) -> None:
        """Run `work` on the compute stream between the last launched step and the next."""
        self.compute.record(start)
        self.compute.run(work)
        self.compute.record(end)

    def finish(self) -> None:
        """Return when all that is enqueued is done. Raises DeviceError if any of it failed."""
        for stream in self._streams:
            done = self.device.event()
            stream.record(done)
            done.synchronize()
        self.check()

    def check(self) -> None:
        """Raise DeviceError if work on a stream failed."""
        for stream in self._streams:
            stream.check()

    def close(self) -> None:
        """Finish what is enqueued and end the streams."""
        for stream in self._streams:
            stream.close()
        if self.mover is not None:
            self.mover.close()

    @property
    def _streams(self) -> list[Stream]:
        return [self.h2d, self.compute, self.d2h, *([] if self.loads is None else [self.loads])]

    # --- packing, on the host ----------------------------------------------------------------------------------------

    def _pack_decode(self, plan: Plan, slot: Slot) -> Step:
        rows = len(plan.seqs)
        size = self.graphs.size_for(rows, plan.features) if self.graphs is not None else None
        self.stage_decode(slot, plan.seqs, size or rows, plan.new_pages)
        put_tops(slot, plan)
        if self.graphs is None or size is None:
            forward: Forward = functools.partial(self._decode, plan.max_context, bool(plan.features.value & _ADAPTER))
        elif plan.features & ~PLAIN:
            forward = functools.partial(self.graphs.forward, size, rows, bool(plan.features.value & _ADAPTER))
        else:
            return functools.partial(self._replay, self.graphs, size)
        return functools.partial(self._step, forward, plan.features)

    @staticmethod
    def stage_decode(slot: Slot, seqs: list[Sequence], size: int, new_pages: Sequences[int] = ()) -> None:
        """Put a decode step's rows and new pages into a slot, padded to `size` with row 0."""
        rows = np.zeros(size, dtype=np.int64)
        rows[: len(seqs)] = [seq.row for seq in seqs]
        pages = np.zeros(size, dtype=np.int32)
        pages[: len(new_pages)] = new_pages
        slot.put("rows", rows)
        slot.put("new_pages", pages)

    def _pack_prefill(self, plan: Plan, slot: Slot) -> Step:
        chunks = plan.chunks
        adapted = self.adapters is not None and any(chunk.seq.adapter_slot is not None for chunk in chunks)
        put_setup(slot, [chunk.seq for chunk in chunks if chunk.first], self.rows.vocab, self.adapters is not None)
        if copies := [chunk.copy for chunk in chunks if chunk.copy is not None]:
            slot.put("copies", np.array(copies, dtype=np.int32))
        layout = self.stage_prefill(
            slot,
            [(chunk.seq.row, chunk.start, chunk.length, chunk.final) for chunk in chunks],
            np.concatenate([chunk_tokens(chunk) for chunk in chunks]),
        )
        put_tops(slot, plan)
        put_scored(slot, chunks)
        if all(chunk.length == 1 and chunk.final for chunk in chunks):
            forward: Forward = functools.partial(self._go_on, plan.max_context, adapted)
        else:
            forward = functools.partial(self._prefill, plan.max_context, layout, slot.scores, adapted)
        return functools.partial(self._step, forward, plan.features)

    @staticmethod
    def stage_prefill(
        slot: Slot, spans: Sequences[tuple[int, int, int, bool]], tokens: np.ndarray
    ) -> tuple[Chunk, ...]:
        """Put a prefill step into a slot: for each chunk (row, start, length, final), and all token ids (int64)."""
        rows, starts, lengths, final = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
        ends = starts + lengths
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        samples = np.flatnonzero(final)
        slot.put("tokens", tokens)
        slot.put("positions", np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths))
        slot.put("token_chunk", np.repeat(np.arange(len(spans)), lengths))
        slot.put("rows", rows)
        slot.put("ends", ends)
        slot.put("lengths", ends - final)  # sampling advances a row by one, so one that samples is left one short
        slot.put("sampled_rows", rows[samples])
        slot.put("sampled_at", bounds[1:][samples] - 1)
        slot.put("query_starts", bounds.astype(np.int32))
        return tuple(map(Chunk, bounds[:-1].tolist(), lengths.tolist(), ends.tolist()))

    # --- rehearsal: steps on padding, before there is anything to serve -----------------------------------------------

    def rehearse_decode(self, slot: Slot, rows: int, features: Feature, max_context: int) -> None:
        """Run a decode step of `rows` rows, launched kernel by kernel."""
        slot.begin()
        self.stage_decode(slot, [], rows)
        if features & Feature.TOP:
            slot.put("top_at", slot.scores.want_tops(range(rows)))
        adapted = self._adapted(features)
        self._on_padding(slot, functools.partial(self._decode, max_context, adapted), features, rows)

    def rehearse_prefill(self, slot: Slot, lengths: Sequences[int], features: Feature, max_context: int) -> None:
        """Run a prefill step of whole prompts of `lengths` tokens, each with a page to copy."""
        slot.begin()
        slot.put("copies", np.zeros((len(lengths), 2), dtype=np.int32))
        tokens = np.arange(sum(lengths), dtype=np.int64) % self.rows.vocab
        layout = self.stage_prefill(slot, [(0, 0, length, True) for length in lengths], tokens)
        if features & Feature.TOP:
            slot.put("top_at", slot.scores.want_tops(range(len(lengths))))
            put_scored_at(slot, np.arange(len(tokens)), tokens)
        forward = functools.partial(self._prefill, max_context, layout, slot.scores, self._adapted(features))
        self._on_padding(slot, forward, features, len(lengths))

    def _adapted(self, features: Feature) -> bool:
        return self.adapters is not None and bool(features & Feature.ADAPTER)

    def _on_padding(self, slot: Slot, forward: Forward, features: Feature, rows: int) -> None:
        upload = slot.upload()
        slot.masks.hold(range(rows))
        self.compute.run(upload.copy)
        self.compute.run(slot.masks.copy)
        self.compute.run(functools.partial(self._step, forward, features, upload, slot))
        self.compute.run(functools.partial(self._draw, features, slot))  # where it was held
        self.compute.run(self.rows.clear_padding)
        done = self.device.event()
        self.compute.record(done)
        done.synchronize()  # the next one overwrites what is uploaded
        self.check()

    # --- steps, on the compute stream --------------------------------------------------------------------------------

    def _step(self, forward: Forward, features: Feature, upload: Upload, slot: Slot) -> None:
        """A forward, and the draw unless that is held."""
        slot.forwarded = forward(upload, slot.record)
        if slot.forwarded is not None and "top_at" in upload:
            slot.scores.take_tops(slot.forwarded[0], upload["top_at"], self._exact_sums)
        if not features & Feature.CONSTRAIN:
            self._draw(features, slot)

    def _draw(self, features: Feature, slot: Slot) -> None:
        forwarded, slot.forwarded = slot.forwarded, None
        if forwarded is not None:
            self.sample(*forwarded, features, slot.output, slot.masks)

    @staticmethod
    def _replay(graphs: DecodeGraphs, size: int, upload: Upload, slot: Slot) -> None:
        graphs.run(slot, size)

    def _decode(
        self, max_context: int, adapted: bool, upload: Upload, record: StepRecord | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._one_token(max_context, adapted, upload["rows"], upload["new_pages"], record)

    def _one_token(
        self,
        max_context: int,
        adapted: bool,
        rows_B: torch.Tensor,
        new_pages_B: torch.Tensor,
        record: StepRecord | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each row: its last token goes in at position `length`. Logits of the next one, and rows."""
        token_ids_B, batch = self.begin_decode(rows_B, new_pages_B, max_context, record, adapted)
        hidden_BD = self.forward(token_ids_B, batch, self.kv)
        if record is not None:
            record.end(batch)
        return self.forward.compute_logits(hidden_BD), rows_B

    def begin_decode(
        self,
        rows_B: torch.Tensor,
        new_pages_B: torch.Tensor,
        max_context: int,
        record: StepRecord | None = None,
        adapted: bool = False,
    ) -> tuple[torch.Tensor, AttentionBatch]:
        """The input of a decode step from the row state: token ids, and where they sit; opens new pages."""
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
        batch = AttentionBatch(
            positions_T=begun.positions_B,
            kv_slots_T=begun.kv_slots_B,
            page_table_BP=begun.page_table_BC,
            context_lens_B=begun.context_lens_B,
            max_context=max_context,
            experts=None if record is None else record.experts,
            adapters=self._step_adapters(rows_B) if adapted else None,
        )
        return begun.token_ids_B, batch

    def _go_on(
        self, max_context: int, adapted: bool, upload: Upload, record: StepRecord | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Set up rows whose KV is there but for that of their last token: the rest is a decode step, bit for bit."""
        self.rows.set_up(upload)
        if "copies" in upload:
            self._copy_pages(upload["copies"].long())
        rows_B = upload["rows"]
        self.rows.ints[rows_B, LAST] = upload["tokens"]
        self.rows.ints[rows_B, LENGTH] = upload["positions"]
        opened_B = torch.zeros(len(rows_B), dtype=torch.int32, device=rows_B.device)  # none: the set-up has their pages
        return self._one_token(max_context, adapted, rows_B, opened_B, record)

    def _prefill(
        self,
        max_context: int,
        layout: tuple[Chunk, ...],
        scores: StepScores,
        adapted: bool,
        upload: Upload,
        record: StepRecord | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Chunks of prompts; logits and rows of those whose prompt is complete, None if there are none."""
        self.rows.set_up(upload)
        if "copies" in upload:
            self._copy_pages(upload["copies"].long())
        rows_C, ends_C, positions_T = upload["rows"], upload["ends"], upload["positions"]
        page_table_CP = self._page_table(rows_C, max_context)
        pages_T = page_table_CP[upload["token_chunk"], positions_T // self.kv.page_size]
        batch = AttentionBatch(
            positions_T=positions_T,
            kv_slots_T=pages_T * self.kv.page_size + positions_T % self.kv.page_size,
            page_table_BP=page_table_CP,
            context_lens_B=ends_C,
            max_context=max_context,
            chunks=layout,
            query_starts_C1=upload["query_starts"],
            experts=None if record is None else record.experts,
            adapters=self._step_adapters(rows_C, upload["token_chunk"]) if adapted else None,
        )
        hidden_TD = self.forward(upload["tokens"], batch, self.kv)
        if record is not None:
            record.end(batch)
        self.rows.ints[rows_C, LENGTH] = upload["lengths"]
        if "scored_at" in upload:
            at_N, targets_N, head = upload["scored_at"], upload["scored_targets"], self.forward.compute_logits
            scores.score_prompt(hidden_TD, at_N, targets_N, head, self._exact_sums)
        if len(upload["sampled_rows"]) == 0:
            return None
        return self.forward.compute_logits(hidden_TD[upload["sampled_at"]]), upload["sampled_rows"]

    def _step_adapters(self, rows_B: torch.Tensor, row_of_T: torch.Tensor | None = None) -> StepAdapters:
        """The slots of the rows, or of the tokens of their chunks."""
        assert self.adapters is not None and self.rows.adapters is not None
        slots = self.rows.adapters.index_select(0, rows_B)
        if row_of_T is None:
            return StepAdapters(self.adapters, slots, segmented=False)
        return StepAdapters(self.adapters, slots.index_select(0, row_of_T), segmented=True)

    def _page_table(self, rows_B: torch.Tensor, max_context: int) -> torch.Tensor:
        columns = -(-max_context // self.kv.page_size)
        return self.rows.pages[:, :columns].index_select(0, rows_B)

    def _copy_pages(self, copies_N2: torch.Tensor) -> None:
        source_N, target_N = copies_N2.unbind(1)
        for cache in self.kv.tensors:
            cache.index_copy_(0, target_N, cache.index_select(0, source_N))
