"""A minimal driver of a model over the paged cache: the part of an engine that tests of models need."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rollout.models import AttentionBatch, Decoder, KVCache, LoadedModel, PromptChunk
from rollout.models.batch import ExpertRecord, HiddenTaps, WantedTokens
from rollout.models.fused import FusedDecoder
from rollout.models.language_model import LanguageModel
from rollout.models.lora_slots import AdapterSlots, StepAdapters
from rollout.models.spec import WHOLE
from rollout.models.state_pool import StatePool


class PagedRunner:
    """Rows with pages in shuffled order. Unwritten cache has large values, so that reading it would show."""

    def __init__(
        self,
        model: LanguageModel,
        rows: int,
        max_tokens: int,
        page_size: int = 7,
        seed: int = 0,
        forward: Any = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.forward = forward or model  # runs the steps
        if isinstance(model, Decoder) and any(getattr(layer.mixer, "chunk", None) for layer in model.spec.layers):
            page_size = 8  # chunks of positions are whole pages
        if isinstance(model, Decoder) and model.spec.indexed_layers:
            page_size = 8  # so are blocks
        of = {model.spec.split: model.spec.shard} if isinstance(model, Decoder) else {}
        split = of.get("context", WHOLE)
        if page_size % split.size:
            page_size = 8
        self.page_size = page_size
        self.width = -(-max_tokens // page_size)
        pages = list(range(1, rows * self.width + 1))
        random.Random(seed).shuffle(pages)
        #: Rows may be dealt to ranks: row r to rank r modulo their number.
        self.dealt = of.get("rows", WHOLE)
        self.device, dtype = model.embed.device, model.embed.dtype
        of_states = (
            partial(StatePool.allocate, model.spec) if isinstance(model, Decoder) else model.spec.allocate_states
        )
        self.states = of_states(rows + 1, dtype, self.device)  # row 0 is padding
        self.kv = KVCache.allocate(
            model.spec, len(pages) + 1, page_size, kv_dtype or dtype, self.device, states=self.states, split=split
        )
        self.kv = replace(self.kv, dealt=self.dealt)
        for cache in self.kv.tensors:
            cache.fill_(50.0)
        for state in self.states.tensors:
            state.fill_(float("nan"))  # at position 0 no state is read
        self.tables = [pages[row * self.width : (row + 1) * self.width] for row in range(rows)]
        firsts = [row % self.dealt.size * self.kv.pages for row in range(rows)]
        self.tables = [[first + page for page in table] for first, table in zip(firsts, self.tables, strict=True)]
        self.lengths = [0] * rows
        self.decode_position_shift = 0
        self.experts: ExpertRecord | None = None  # written by steps
        self.taps: HiddenTaps | None = None  # written by steps
        self.adapters: AdapterSlots | None = None
        self.adapter_of = [0] * rows  # slot

    def prefill(self, pieces: dict[int, list[int]], last_of: list[int] | None = None) -> dict[int, torch.Tensor]:
        """Append tokens to rows in one step; returns the logits of each token, or of the last ones of these rows."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        chunks: list[PromptChunk] = []
        for row, ids in pieces.items():
            start = self.lengths[row]
            self.lengths[row] += len(ids)
            chunks.append(PromptChunk(len(tokens), len(ids), self.lengths[row]))
            tokens += ids
            positions += range(start, self.lengths[row])
            slots += [self._slot(row, position) for position in range(start, self.lengths[row])]
        logits = self._run(tokens, positions, slots, list(pieces), tuple(chunks), last_of=last_of)
        if last_of is not None:
            return {row: logits[i : i + 1] for i, row in enumerate(last_of)}
        return {row: logits[c.query_start : c.query_start + c.query_len] for row, c in zip(pieces, chunks, strict=True)}

    def decode(self, step: dict[int, int], padding: int = 0) -> dict[int, torch.Tensor]:
        """Append one token to each row of `step`, and `padding` rows after them; returns the logits of the rows."""
        positions, slots = [], []
        for row in step:
            positions.append(self.lengths[row] + self.decode_position_shift)
            slots.append(self._slot(row, self.lengths[row]))
            self.lengths[row] += 1
        blank = [0] * padding
        logits = self._run([*step.values(), *blank], positions + blank, slots + blank, list(step), None, padding)
        return dict(zip(step, logits, strict=False))

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.page_size] * self.page_size + position % self.page_size

    def _step_adapters(
        self, rows: list[int], chunks: tuple[PromptChunk, ...] | None, padding: int
    ) -> StepAdapters | None:
        if self.adapters is None:
            return None
        lengths = [1] * len(rows) if chunks is None else [chunk.query_len for chunk in chunks]
        slots = [self.adapter_of[row] for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
        return StepAdapters(self.adapters, torch.tensor(slots + [0] * padding, dtype=torch.int32), chunks is not None)

    def _run(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        rows: list[int],
        chunks: tuple[PromptChunk, ...] | None,
        padding: int = 0,
        last_of: list[int] | None = None,
    ) -> torch.Tensor:
        def ints(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        # Entries past a row's context point at the dump page, as in an engine that grows rows lazily.
        used = [-(-self.lengths[row] // self.page_size) for row in rows]
        tables = [self.tables[r][:n] + [0] * (self.width - n) for r, n in zip(rows, used, strict=True)]
        batch = AttentionBatch(
            positions_T=ints(positions),
            kv_slots_T=ints(slots),
            page_table_BP=ints(tables + [[0] * self.width] * padding),
            context_lens_B=ints([self.lengths[row] for row in rows] + [0] * padding),
            max_context=max(self.lengths[row] for row in rows),
            chunks=chunks,
            query_starts_C1=None if chunks is None else ints([*(c.query_start for c in chunks), len(tokens)]),
            experts=self.experts,
            taps=self.taps,
            adapters=self._step_adapters(rows, chunks, padding),
            rows_B=torch.tensor([row + 1 for row in rows] + [0] * padding, device=self.device),
        )
        if self.dealt.size > 1 and chunks is not None:
            mine = tuple(place for place, row in enumerate(rows) if row % self.dealt.size == self.dealt.rank)
            batch = replace(batch, own_chunks=mine)
        if chunks is not None and last_of is not None:
            batch = replace(batch, wanted=self._wanted([rows.index(row) for row in last_of], batch, chunks))
        return self.forward.compute_logits(self.forward(ints(tokens), batch, self.kv))

    def _wanted(self, spans: list[int], batch: AttentionBatch, chunks: tuple[PromptChunk, ...]) -> WantedTokens:
        last = torch.tensor([chunks[i].query_start + chunks[i].query_len - 1 for i in spans], dtype=torch.int64)
        own = AttentionBatch(
            positions_T=batch.positions_T[last],
            kv_slots_T=batch.kv_slots_T[last],
            page_table_BP=batch.page_table_BP[spans],
            context_lens_B=batch.context_lens_B[spans],
            max_context=batch.max_context,
            chunks=tuple(PromptChunk(i, 1, chunks[span].context_len) for i, span in enumerate(spans)),
        )
        return WantedTokens(last, own)


PROMPT = [7, 30, 11, 52, 9, 4, 77, 18, 23, 60, 2, 41, 5, 16]


def check(
    loaded: LoadedModel, reference: Any, adapters: AdapterSlots | None = None, atol: float = 1e-4, fused: bool = True
) -> None:
    """Two rows: a prompt in two chunks and decode steps, by the generic path and the fused one, where there is one.

    `fused=False` leaves out the fused path: Triton's interpreter takes a second for it.
    """
    with torch.no_grad():
        exact = reference(torch.tensor([PROMPT])).logits[0].float()
    native = isinstance(loaded.model, Decoder)
    kernels = [FusedDecoder(loaded.model)] if fused and native else []
    for forward in (loaded.model, *kernels):
        runner = PagedRunner(loaded.model, rows=2, max_tokens=len(PROMPT), forward=forward)
        if adapters is not None:
            runner.adapters, runner.adapter_of = adapters, [1, 1]
        steps = [runner.prefill(dict.fromkeys(range(2), part)) for part in (PROMPT[:7], PROMPT[7:11])]
        decoded = [runner.decode(dict.fromkeys(range(2), token)) for token in PROMPT[11:]]
        for row in range(2):
            logits = [step[row] for step in steps] + [step[row][None] for step in decoded]
            assert (torch.cat(logits) - exact).abs().max() < atol


def assert_logits_in_chunks_and_steps(
    model: Any,
    reference: Any,
    ids: Sequence[list[int]],
    prompts: Sequence[int],
    chunks: Iterable[dict[int, tuple[int, int]]],
    steps: int = 200,
    atol: float = 1e-4,
) -> None:
    """Prompts in `chunks`, then decode steps of three rows give the logits of transformers' model within `atol`.

    `ids` has each row's prompt and `steps` more tokens, `prompts` the lengths of the prompts. A chunk has the begin and
    the end of each row's piece.
    """
    runner = PagedRunner(model, rows=3, max_tokens=360)
    logits: list[list[torch.Tensor]] = [[], [], []]
    for pieces in chunks:
        found = runner.prefill({row: ids[row][start:end] for row, (start, end) in pieces.items()})
        for row, piece in found.items():
            logits[row].append(piece)
    for step in range(steps):
        found = runner.decode({row: ids[row][prompts[row] + step] for row in (2, 0, 1)}, padding=step % 3)
        for row, piece in found.items():
            logits[row].append(piece[None])
    for row in range(3):
        with torch.no_grad():
            exact = reference(torch.tensor([ids[row]])).logits[0].float()
        assert (torch.cat(logits[row]) - exact).abs().max() < atol
