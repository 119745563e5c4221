"""The pieces of a step that go through a module under a cache of transformers (`ways`), and how one runs.

    decode     the tokens of all rows together, or each row alone
    prefill    a prompt's first piece alone; a later piece alone as well, or token by token for all rows together

A piece of several rows has contexts of several lengths. The module gets them with their ends aligned, under a mask that
hides positions before a row's first token.

Legend: T tokens of the step, B rows of a piece, N tokens of each of them, L tokens of the longest context, C chunks.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from rollout.models.batch import AttentionBatch, KVCache, PromptChunk
from rollout.models.fallback.cache import CacheFacts, Piece, PieceCache, base_of, cache_argument
from rollout.models.fallback.ways import Way


class FallbackRows:
    """Cuts steps into pieces, for one module and one way."""

    def __init__(self, module: Any, way: Way, facts: CacheFacts) -> None:
        self._base, self._way, self._facts = base_of(module), way, facts
        self._cache_argument = cache_argument(module)
        self._takes = frozenset(inspect.signature(base_of(module).forward).parameters)

    def pieces(self, batch: AttentionBatch, kv: KVCache) -> Iterator[tuple[torch.Tensor, Piece]]:
        """The pieces of a step, each with the places of its tokens in the step, int64 [B, N]."""
        if batch.chunks is None:
            at_B = torch.arange(len(batch.positions_T), device=batch.positions_T.device)
            yield from self._tokens(batch, at_B, None, batch.max_context, kv)
            return
        later: list[tuple[int, PromptChunk]] = []
        for index, chunk in enumerate(batch.chunks):
            first = chunk.query_len == chunk.context_len
            if first or not (self._way.by_token or chunk.query_len == 1):
                yield self._chunk(batch, index, chunk, kv)
            else:
                later.append((index, chunk))
        for number in range(max((chunk.query_len for _, chunk in later), default=0)):
            having = [(index, chunk) for index, chunk in later if chunk.query_len > number]
            at_B = torch.tensor([chunk.query_start + number for _, chunk in having])
            rows_B = torch.tensor([index for index, _ in having])
            most = max(chunk.context_len - chunk.query_len + number + 1 for _, chunk in having)
            yield from self._tokens(batch, at_B, rows_B, most, kv)

    def run(self, ids_BN: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Run a piece: its KV and states are stored. Its hidden states after the final norm, [B, N, H]."""
        cache = PieceCache(self._facts, piece)
        arguments: dict[str, Any] = {
            self._cache_argument: cache,
            "position_ids": piece.batch.positions_T.long().view_as(ids_BN),
            "attention_mask": piece.visible_BL,
            "use_cache": True,
        }
        known = {name: value for name, value in arguments.items() if name in self._takes and value is not None}
        hidden_BNH = self._base(input_ids=ids_BN, **known).last_hidden_state
        cache.save_states()
        return hidden_BNH

    def _chunk(self, batch: AttentionBatch, index: int, chunk: PromptChunk, kv: KVCache) -> tuple[torch.Tensor, Piece]:
        """A piece of one row's prompt."""
        device, begin, length = batch.positions_T.device, chunk.query_start, chunk.query_len
        at_N, row = slice(begin, begin + length), slice(index, index + 1)
        own = AttentionBatch(
            positions_T=batch.positions_T[at_N],
            kv_slots_T=batch.kv_slots_T[at_N],
            page_table_BP=batch.page_table_BP[row],
            context_lens_B=batch.context_lens_B[row],
            max_context=chunk.context_len,
            chunks=(PromptChunk(0, length, chunk.context_len),),
            query_starts_C1=torch.tensor([0, length], dtype=torch.int32, device=device),
            rows_B=None if batch.rows_B is None else batch.rows_B[row],
        )
        before = chunk.context_len - length
        context_BL = None
        if self._way.attention == "gathered":
            context_BL, _ = _context(own, chunk.context_len, kv.page_size)
        at_BN = torch.arange(begin, begin + length, device=device)[None]
        return at_BN, Piece(own, kv, before, own.kv_slots_T.long(), before == 0, context_BL)

    def _tokens(
        self, batch: AttentionBatch, at_B: torch.Tensor, rows_B: torch.Tensor | None, most: int, kv: KVCache
    ) -> Iterator[tuple[torch.Tensor, Piece]]:
        """One later token of each of these rows; without `rows_B` the step is a decode, and token b is of row b."""
        device = batch.positions_T.device
        at_B = at_B.to(device)
        if rows_B is not None:
            rows_B = rows_B.to(device)
            batch = AttentionBatch(
                positions_T=batch.positions_T[at_B],
                kv_slots_T=batch.kv_slots_T[at_B],
                page_table_BP=batch.page_table_BP[rows_B],
                context_lens_B=batch.positions_T[at_B].int() + 1,
                max_context=most,
                rows_B=None if batch.rows_B is None else batch.rows_B[rows_B],
            )
        slots_B = batch.kv_slots_T.long()
        if self._way.attention == "paged" or (self._way.rows == "together" and not self._facts.kv_shapes):
            yield at_B[:, None], Piece(batch, kv, most - 1, slots_B, fresh=False)
            return
        if self._way.rows == "together":
            context_BL, visible_BL = _context(batch, most, kv.page_size)
            yield at_B[:, None], Piece(batch, kv, most - 1, slots_B, False, context_BL, visible_BL)
            return
        for row, length in enumerate(batch.context_lens_B.tolist()):
            if length:
                yield at_B[row : row + 1, None], _alone(batch, row, length, kv)


def _alone(batch: AttentionBatch, row: int, length: int, kv: KVCache) -> Piece:
    """The last token of one row whose context has `length` tokens."""
    at = slice(row, row + 1)
    own = AttentionBatch(
        positions_T=batch.positions_T[at],
        kv_slots_T=batch.kv_slots_T[at],
        page_table_BP=batch.page_table_BP[at],
        context_lens_B=batch.context_lens_B[at],
        max_context=length,
        rows_B=None if batch.rows_B is None else batch.rows_B[at],
    )
    context_BL, _ = _context(own, length, kv.page_size)
    return Piece(own, kv, length - 1, own.kv_slots_T.long(), False, context_BL)


def _context(batch: AttentionBatch, most: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each row's context, its last token at the end, int64 [B, most]; and where it has begun.

    A padding row counts as one token: its own, in page 0.
    """
    lengths_B1 = batch.context_lens_B.long().clamp_min(1)[:, None]
    positions_BL = torch.arange(most, device=lengths_B1.device) - (most - lengths_B1)
    begun_BL = positions_BL >= 0
    positions_BL = positions_BL.clamp_min(0)  # hidden values must be numbers: the row's first token has some
    pages_BL = batch.page_table_BP.long().gather(1, positions_BL // page_size)
    return pages_BL * page_size + positions_BL % page_size, begun_BL
