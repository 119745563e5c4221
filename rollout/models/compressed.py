"""Attention to a window of tokens and to entries that stand for earlier windows of tokens.

    token --one product--> latent of queries | key | values and gates of compressors
    latent --norm, product, norm of each head--> queries         key --norm--> it is the value, too
    entry of a window = sum over its tokens of  value softmax(gate + position bias), normalised, turned as its first one
    a token attends to its last `window` keys, to entries of windows that have ended, and to a sink
    output, turned back --products of groups of heads--> output product

Without an indexer all entries take part. With one, those with the largest scores do; it has entries of its own, and an
entry is made of the window before as well: of other values and gates of each token.

All of it lies in pages at the place of a token, so that a context can be cut anywhere:

    k of the layer    S keys, then S / 4 entries: the entry of a window is where its last token is
    v of the layer    S / 4 entries of the indexer
    another k and v   values and gates of the compressors

Source: DeepSeek-V4, as transformers computes it. Legend: T tokens, H hidden, Q query heads, D head dimension, P pages,
S page size, R what a page keeps, N windows that end in a step, W tokens that make an entry, X places that a token
attends to, E entries that it chooses.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rollout_kernels import apply_rope

from rollout.models.batch import AttentionBatch
from rollout.models.indexer import Choice, IndexQueries, best_positions, chosen_attention
from rollout.models.layers import Block, Build, LastProduct, Linear, RMSNorm, Rope, StepContext
from rollout.models.names import Region, one_name
from rollout.models.spec import ENTRY_TOKENS, CompressedSpec


class TokenPlaces(NamedTuple):
    """Places of tokens in the cache, int64."""

    page: torch.Tensor
    offset: torch.Tensor

    def in_rows(self, size: int, tokens: int = 1, first: int = 0) -> torch.Tensor:
        """Their rows, where a page has `size` rows, and `tokens` tokens have one from row `first` of a page on."""
        return self.page * size + first + self.offset // tokens


class EndedWindows(NamedTuple):
    """The windows that end in a step. In a decode step each row has one; where it ends later, `last_N` is in page 0."""

    tokens_NW: TokenPlaces  # its tokens; before them the tokens of the window before it, if they overlap
    last_N: TokenPlaces
    absent_NW1: torch.Tensor  # bool: there is no such token
    cos_sin: tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the position of its first token


class CompressedAttention(Block):
    """Attention over the paged cache; writes keys, and entries of windows that end, first.

    `rope` is the index of its rotary embedding in the model; `kv_index` and `key_index` are places in the cache.
    """

    def __init__(
        self, spec: CompressedSpec, layer: int, kv_index: int, key_index: int | None, rope: int, build: Build
    ) -> None:
        super().__init__()
        build = build.plain
        self.spec, self.layer, self.kv_index, self.key_index, self.rope = spec, layer, kv_index, key_index, rope
        self.in_proj, self.q_b_proj, self.o_a_proj = (Linear(part, build) for part in (spec.inputs, spec.q_b, spec.o_a))
        self.o_proj = Linear(spec.out, build)
        self.q_norm, self.kv_norm = (RMSNorm(dim, spec.eps, build) for dim in (spec.q_rank, spec.head_dim))
        self.sinks = build.empty(spec.heads, dtype=torch.float32)
        self.rope_of_entries = Rope(*spec.turned, build.device)
        self.compressor = None if spec.windows is None else Compressor(spec, spec.head_dim, build)
        self.indexer = None if spec.indexer is None else EntryIndexer(spec, layer, build)

    def forward(self, x_TH: torch.Tensor, context: StepContext) -> LastProduct:
        """Attention of the normalised `x_TH`."""
        spec, batch, size = self.spec, context.batch, context.kv.page_size
        cache, slots_T, cos_sin = context.kv.layer(self.kv_index), context.slots_T, context.cos_sin[self.rope]
        all_TN = self.in_proj(x_TH)
        if batch.adapters is not None:
            batch.adapters.add(self.layer, "in", all_TN, x_TH)
        q_TK, key_TD, *raw = all_TN.split(spec.inputs.widths, dim=1)
        q_TK = self.q_norm(q_TK)
        q_TN = self.q_b_proj(q_TK)
        if batch.adapters is not None:
            batch.adapters.add(self.layer, "q_b", q_TN, q_TK)
        q_TQD = q_TN.unflatten(1, (spec.heads, -1))
        q_TQD = F.rms_norm(q_TQD.float(), (spec.head_dim,), eps=spec.eps).to(x_TH.dtype)
        both_TXD = turned(torch.cat((q_TQD, self.kv_norm(key_TD)[:, None]), dim=1), *cos_sin)
        q_TQD, key_T1D = both_TXD.split((spec.heads, 1), dim=1)
        rows_PR1D = cache.k_PSGD.view(len(cache.k_PSGD), -1, 1, spec.head_dim)
        rows = rows_PR1D.shape[1]
        now_T = TokenPlaces(slots_T // size, slots_T % size)
        rows_PR1D.flatten(0, 2).index_copy_(0, now_T.in_rows(rows), key_T1D[:, 0])
        chosen_TE = None
        if self.compressor is not None and self.key_index is not None and spec.windows is not None:
            kept, windows = context.kv.layer(self.key_index), self._ended(batch, size)
            entries_ND = self.compressor(raw[:2], kept.k_PSGD, windows, slots_T)
            rows_PR1D.flatten(0, 2).index_copy_(0, windows.last_N.in_rows(rows, ENTRY_TOKENS, size), entries_ND)
            if self.indexer is not None:
                keys_PR1D = cache.v_PSGD.view(len(cache.v_PSGD), -1, 1, self.indexer.dim)
                entries_ND = self.indexer(raw[2:], kept.v_PSGD, windows, slots_T)
                last_N = windows.last_N.in_rows(keys_PR1D.shape[1], ENTRY_TOKENS)
                keys_PR1D.flatten(0, 2).index_copy_(0, last_N, entries_ND)
                chosen_TE = self.indexer.choose(x_TH, q_TK, cos_sin, batch, keys_PR1D)
        log_sum_TQ = q_TQD.new_empty(q_TQD.shape[:2], dtype=torch.float32)
        how: dict[str, Any] = {"rank": spec.head_dim, "scale": spec.head_dim**-0.5, "log_sum_TQ": log_sum_TQ}
        kind = ("places", spec.windows, spec.indexer, spec.window)
        if chosen_TE is None:
            places = batch.shared(kind, lambda: self._places(None, batch, size, rows))
        else:
            places = self._places(chosen_TE, batch, size, rows)
        out_TQD = chosen_attention(q_TQD, rows_PR1D, places, batch, plan_of=kind, **how)
        out_TQD = (out_TQD * torch.sigmoid(log_sum_TQ * math.log(2.0) - self.sinks)[..., None]).to(x_TH.dtype)
        out_GTX = turned(out_TQD, cos_sin[0], -cos_sin[1]).flatten(1).unflatten(1, (spec.groups, -1)).transpose(0, 1)
        narrow_GTK = torch.bmm(out_GTX, self.o_a_proj.weight.unflatten(0, (spec.groups, -1)).mT)
        return LastProduct(self.o_proj, narrow_GTK.transpose(0, 1).flatten(1), batch.adapters, self.layer, "o")

    def _ended(self, batch: AttentionBatch, page_size: int) -> EndedWindows:
        """The windows that end in a step."""
        assert self.spec.windows is not None
        (tokens, overlap), device = self.spec.windows, batch.positions_T.device

        def make() -> EndedWindows:
            rows_N, last_N = _rows(batch), batch.positions_T.long()
            if batch.chunks is not None:
                spans = (
                    (row, (end - length) // tokens * tokens, end) for row, (_, length, end) in enumerate(batch.chunks)
                )
                ends = [(row, at) for row, begin, end in spans for at in range(begin + tokens - 1, end, tokens)]
                # No kernel takes empty tensors: a window of the first token has not ended.
                rows_N, last_N = torch.tensor(ends or [(0, 0)], device=device).unbind(1)
            positions_NW = last_N[:, None] + torch.arange(1 - tokens * (1 + overlap), 1, device=device)
            places = places_of(batch, rows_N[:, None], positions_NW.clamp_min(0), page_size)
            last = TokenPlaces(places.page[:, -1].where((last_N + 1) % tokens == 0, 0), places.offset[:, -1])
            cos_sin = self.rope_of_entries((last_N - tokens + 1).clamp_min(0))
            return EndedWindows(places, last, (positions_NW < 0)[..., None], cos_sin)

        return batch.shared(("ended windows", self.spec.windows, self.spec.turned), make)

    def _places(self, chosen_TE: torch.Tensor | None, batch: AttentionBatch, page_size: int, rows: int) -> Choice:
        """The places that each token attends to: entries, then its window."""
        positions_T1, window = batch.positions_T.long()[:, None], self.spec.window
        tokens, most = 1, 0
        if self.spec.windows is not None:
            tokens = self.spec.windows.tokens
            most = batch.max_context // tokens if chosen_TE is None else chosen_TE.shape[1]
        ended_T1 = ((positions_T1 + 1) // tokens).clamp_max(most)
        at_X = torch.arange(most + min(window, batch.max_context), device=positions_T1.device)
        number_TX = at_X if chosen_TE is None else F.pad(chosen_TE, (0, len(at_X) - most))
        is_entry_TX = at_X < ended_T1
        positions_TX = torch.where(is_entry_TX, (number_TX + 1) * tokens - 1, positions_T1 + ended_T1 - at_X)
        positions_TX = positions_TX.clamp_min(0).minimum(positions_T1)
        places = places_of(batch, _rows(batch)[:, None], positions_TX, page_size)
        entries_TX = places.in_rows(rows, ENTRY_TOKENS, page_size)
        counts_T = ended_T1[:, 0] + (batch.positions_T + 1).clamp_max(window)
        return Choice(torch.where(is_entry_TX, entries_TX, places.in_rows(rows)).int(), counts_T.int())

    def scale_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """None, since its products are never coded."""
        return {}

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        parts: list[Linear | Compressor] = [self.in_proj, self.q_b_proj, self.o_a_proj, self.o_proj]
        parts += [part for part in (self.compressor, self.indexer) if part is not None]
        return [
            *(region for part in parts for region in part.regions(prefix)),
            one_name(f"{prefix}self_attn.q_a_norm.weight", self.q_norm.weight),
            one_name(f"{prefix}self_attn.kv_norm.weight", self.kv_norm.weight),
            one_name(f"{prefix}self_attn.sinks", self.sinks, self.spec.shard.cut(self.spec.heads)),
        ]


class Compressor(Block):
    """Makes entries of windows, from values and gates of their tokens."""

    module = "self_attn.compressor"

    def __init__(self, spec: CompressedSpec, dim: int, build: Build) -> None:
        super().__init__()
        assert spec.windows is not None
        self.dim, (self.tokens, self.overlap) = dim, spec.windows
        self.position_bias = build.empty(self.tokens, dim * (1 + self.overlap), dtype=torch.float32)
        self.norm = RMSNorm(dim, spec.eps, build)

    def forward(
        self, raw: list[torch.Tensor], kept_PS1X: torch.Tensor, windows: EndedWindows, slots_T: torch.Tensor
    ) -> torch.Tensor:
        """The entries of windows that end, [N, D]; values and gates of the step's tokens go to the cache."""
        kept_SX, size = kept_PS1X.flatten(0, 2), kept_PS1X.shape[1]
        kept_SX.index_copy_(0, slots_T, torch.cat(raw, dim=1))
        values_NWD, gates_NWD = map(self._of_window, kept_SX[windows.tokens_NW.in_rows(size)].float().chunk(2, dim=2))
        gates_NWD = gates_NWD + torch.cat(self.position_bias.split(self.dim, dim=1))
        weights_NWD = gates_NWD.masked_fill(windows.absent_NW1, -math.inf).softmax(1)
        entries_ND = (values_NWD * weights_NWD).sum(1).to(kept_SX.dtype)
        return turned(self.norm(entries_ND)[:, None], *windows.cos_sin)[:, 0]

    def _of_window(self, x_NWX: torch.Tensor) -> torch.Tensor:
        """The part that each token gives: the first half is for the window after its own."""
        if not self.overlap:
            return x_NWX
        return torch.cat((x_NWX[:, : self.tokens, : self.dim], x_NWX[:, self.tokens :, self.dim :]), dim=1)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        norm = one_name(f"{prefix}{self.module}.kv_norm.weight", self.norm.weight)
        return [one_name(f"{prefix}{self.module}.position_bias", self.position_bias), norm]


class EntryIndexer(Compressor):
    """Makes entries by which entries are chosen."""

    module = "self_attn.compressor.indexer"

    def __init__(self, spec: CompressedSpec, layer: int, build: Build) -> None:
        assert spec.indexer is not None
        super().__init__(spec, spec.indexer.dim, build)
        self.spec, self.layer, self.q_proj = spec.indexer, layer, Linear(spec.indexer.q, build)
        # The weights of heads decide between nearly equal scores, as in `rollout.models.indexer`.
        self.head_weights = build.empty(self.spec.heads, self.spec.hidden, dtype=torch.float32)

    def choose(
        self,
        x_TH: torch.Tensor,
        latent_TK: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        keys_PR1D: torch.Tensor,
    ) -> torch.Tensor | None:
        """The numbers of the entries that a token attends to, int64 [T, E], if there are any; later ones come last."""
        heads, most = self.spec.heads, batch.max_context // self.tokens
        if not most:
            return None
        q_TN = self.q_proj(latent_TK)
        if batch.adapters is not None:
            batch.adapters.add(self.layer, "index", q_TN, latent_TK)
        q_TYD = turned(q_TN.unflatten(1, (heads, -1)), *cos_sin)
        queries = IndexQueries(q_TYD, F.linear(x_TH.float(), self.head_weights) * (heads * self.dim) ** -0.5)
        last_T = (batch.positions_T + 1) // self.tokens - 1
        top_k, a_page = min(self.spec.top_k, most), keys_PR1D.shape[1] * self.tokens
        found = best_positions(queries, batch, keys_PR1D, last_T, top_k, a_page)
        return torch.cat([F.pad(best_TE, (0, top_k - best_TE.shape[1])) for _, best_TE in found])

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        weights = one_name(f"{prefix}{self.spec.names.weights}.weight", self.head_weights)
        return [*super().regions(prefix), *self.q_proj.regions(prefix), weights]


def turned(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Heads whose last dimensions turn with their neighbours."""
    kept_THX, turning_THR = x_THD.tensor_split((x_THD.shape[2] - cos_T1R.shape[2],), dim=2)
    return torch.cat((kept_THX, apply_rope(turning_THR.contiguous(), cos_T1R, sin_T1R, True)), dim=2)


def places_of(batch: AttentionBatch, rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> TokenPlaces:
    """The places of positions in rows of the page table."""
    return TokenPlaces(batch.page_table_BP[rows, positions // page_size].long(), positions % page_size)


def _rows(batch: AttentionBatch) -> torch.Tensor:
    """The row of each token of a step."""
    device, chunks = batch.positions_T.device, batch.chunks
    if chunks is None:
        return torch.arange(len(batch.positions_T), device=device)

    def make() -> torch.Tensor:
        return torch.repeat_interleave(torch.tensor([chunk.query_len for chunk in chunks])).to(device)

    return batch.shared("rows of tokens", make)
