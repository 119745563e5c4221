"""The state of the rows on the device, and how a row's settings travel there.

    ints    [rows, 6]  int64     last token, length (tokens whose KV is written), prompt length, min_tokens, top-k, seed
    floats  [rows, 7]  float32   temperature, noise (1 draws, 0 takes the best), top-p, min-p, three penalties
    pages   [rows, P]  int32     page table; entries past a row's pages are the dump page
    step_*  [rows, P]  int32     page table of the running decode step, in its order; on a GPU, where it is written in
                                 place. Entries past a row's context are those of earlier steps
    counts  [rows, V]  int32     occurrences of each token, for penalties
    bias_*  [rows, K]            logit bias, padded with id 0 and bias 0
    banned  [rows, K]            stop ids, padded by repeating the first; banned until min_tokens
    adapters [rows]    int32     slot of the row's adapter, 0 for none; where adapters are served

Row 0 is padding. A row is set up by the first prefill step of its sequence, from the `init_*` and list sections of
that step's upload; after that the device keeps it current by itself. Everything here runs on the compute stream.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from rollout_kernels import PROMPT_BIT

from rollout.engine.messages import MAX_LOGIT_BIAS, MAX_STOP_IDS
from rollout.engine.schedule.sequence import Feature, Sequence
from rollout.engine.step.slot import Slot, Upload

LAST, LENGTH, PROMPT, MIN_TOKENS, TOP_K, SEED = range(6)
TEMPERATURE, NOISE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(7)
_INIT_WORDS = 2 * 7 + 7 + 1  # row and ints as int64, floats, adapter


class RowState:
    """Device tensors indexed by row."""

    def __init__(self, max_rows: int, max_pages: int, vocab: int, device: torch.device, adapters: bool = False) -> None:
        rows = max_rows + 1
        self.vocab = vocab
        self.ints = torch.zeros(rows, 6, dtype=torch.int64, device=device)
        self.floats = torch.ones(rows, 7, device=device)
        self.pages = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.counts = torch.zeros(rows, vocab, dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self.bias = torch.zeros(rows, MAX_LOGIT_BIAS, device=device)
        self.banned = torch.zeros(rows, MAX_STOP_IDS, dtype=torch.int64, device=device)
        self.adapters = torch.zeros(rows, dtype=torch.int32, device=device) if adapters else None
        on_gpu = device.type == "cuda"
        self.step_pages = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device) if on_gpu else None

    @staticmethod
    def nbytes(max_rows: int, max_pages: int, vocab: int) -> int:
        """Device memory of the state, bytes."""
        a_row = 6 * 8 + 7 * 4 + 2 * 4 * max_pages + 4 * vocab + (8 + 4) * MAX_LOGIT_BIAS + 8 * MAX_STOP_IDS
        return (max_rows + 1) * a_row

    def clear_padding(self) -> None:
        """Make row 0 what padding is after it was used as a row that samples."""
        for state in (self.ints, self.counts, self.pages):
            state[0] = 0
        if self.adapters is not None:
            self.adapters[0] = 0

    def set_up(self, upload: Upload) -> None:
        """Set up the rows that this prefill step starts."""
        if "init_ints" not in upload:
            return
        records = upload["init_ints"]
        rows = records[:, 0]
        self.ints.index_copy_(0, rows, records[:, 1:])
        self.floats.index_copy_(0, rows, upload["init_floats"])
        self.pages.index_fill_(0, rows, 0)
        if self.adapters is not None:
            self.adapters.index_copy_(0, rows, upload["init_adapters"])
        row, column, page = upload["page_updates"].long().unbind(1)
        self.pages.index_put_((row, column), page.int())
        self.bias.index_fill_(0, rows, 0.0)  # a step that biases one row gathers the bias of all
        if "banned" in upload:
            self.banned.index_copy_(0, upload["banned_rows"], upload["banned"])
        if "bias_ids" in upload:
            self.bias_ids.index_copy_(0, upload["bias_rows"], upload["bias_ids"])
            self.bias.index_copy_(0, upload["bias_rows"], upload["bias"])
        if "counts" in upload:
            self.counts.index_fill_(0, upload["counts_rows"], 0)
            row, token, amount = upload["counts"].long().unbind(1)
            self.counts.index_put_((row, token), amount.int(), accumulate=True)


def setup_words(seq: Sequence, history: int) -> int:
    """Upper bound on the int32 words that setting up a row adds to an upload; `history` in tokens."""
    words = _INIT_WORDS + 3 * len(seq.pages) + 32
    words += (MAX_STOP_IDS + 1) * 2 if seq.features & Feature.MIN_TOKENS else 0
    words += (MAX_LOGIT_BIAS * 3 + 2) if seq.features & Feature.BIAS else 0
    words += 3 * history + 2 if seq.features & Feature.PENALIZE else 0
    return words


def most_setup_words(max_pages: int, max_context: int) -> int:
    """What `setup_words` can be at the most."""
    return _INIT_WORDS + 3 * max_pages + 32 + (MAX_STOP_IDS + 1) * 2 + MAX_LOGIT_BIAS * 3 + 2 + 3 * max_context + 2


def put_setup(slot: Slot, seqs: Seq[Sequence], vocab: int, adapters: bool = False) -> None:
    """Pack what `RowState.set_up` needs for sequences whose first chunk is in this step."""
    if not seqs:
        return
    slot.put("init_ints", np.array([_ints(seq, vocab) for seq in seqs], dtype=np.int64))
    slot.put("init_floats", np.array([_floats(seq) for seq in seqs], dtype=np.float32))
    slot.put("page_updates", np.concatenate([_page_updates(seq) for seq in seqs]))
    if adapters:
        slot.put("init_adapters", np.array([_adapter(seq) for seq in seqs], dtype=np.int32))
    _put_lists(slot, seqs)


def _put_lists(slot: Slot, seqs: Seq[Sequence]) -> None:
    if banned := [seq for seq in seqs if seq.features & Feature.MIN_TOKENS]:
        slot.put("banned_rows", _rows(banned))
        slot.put("banned", np.array([_repeated(seq.group.request.stop.token_ids) for seq in banned], dtype=np.int64))
    if biased := [seq for seq in seqs if seq.features & Feature.BIAS]:
        ids = np.zeros((len(biased), MAX_LOGIT_BIAS), dtype=np.int64)
        values = np.zeros((len(biased), MAX_LOGIT_BIAS), dtype=np.float32)
        for i, seq in enumerate(biased):
            pairs = seq.group.request.sampling.logit_bias
            ids[i, : len(pairs)] = [token for token, _ in pairs]
            values[i, : len(pairs)] = [value for _, value in pairs]
        slot.put("bias_rows", _rows(biased))
        slot.put("bias_ids", ids)
        slot.put("bias", values)
    if counted := [seq for seq in seqs if seq.features & Feature.PENALIZE]:
        slot.put("counts_rows", _rows(counted))
        slot.put("counts", np.concatenate([_count_updates(seq) for seq in counted]))


def _rows(seqs: Seq[Sequence]) -> np.ndarray:
    return np.array([seq.row for seq in seqs], dtype=np.int64)


def _ints(seq: Sequence, vocab: int) -> list[int]:
    sampling = seq.group.request.sampling
    greedy = sampling.temperature == 0
    top_k = vocab if greedy or sampling.top_k == 0 else sampling.top_k
    # Without stop tokens there is nothing to ban, and what the row's list holds is its predecessor's.
    min_tokens = seq.group.request.stop.min_tokens if seq.features & Feature.MIN_TOKENS else 0
    return [seq.row, 0, 0, seq.prompt_len, min_tokens, top_k, seq.seed]


def _adapter(seq: Sequence) -> int:
    return 0 if seq.adapter_slot is None else seq.adapter_slot.number


def _floats(seq: Sequence) -> list[float]:
    s = seq.group.request.sampling
    greedy = s.temperature == 0
    # Cumulative sums round: with top-p off the bound is infinite, so that no tail is cut.
    top_p = np.inf if greedy or s.top_p >= 1.0 else s.top_p
    temperature, min_p = (1.0, 0.0) if greedy else (s.temperature, s.min_p)
    penalties = [s.repetition_penalty, s.presence_penalty, s.frequency_penalty]
    return [temperature, 0.0 if greedy else 1.0, top_p, min_p, *penalties]


def _page_updates(seq: Sequence) -> np.ndarray:
    updates = np.empty((len(seq.pages), 3), dtype=np.int32)
    updates[:, 0] = seq.row
    updates[:, 1] = np.arange(len(seq.pages))
    updates[:, 2] = seq.pages
    return updates


def _repeated(ids: tuple[int, ...]) -> list[int]:
    return [*ids, *(ids[0] for _ in range(MAX_STOP_IDS - len(ids)))]


def _count_updates(seq: Sequence) -> np.ndarray:
    assert seq.prefill_tokens is not None
    prompt, generated = seq.prefill_tokens[: seq.prompt_len], seq.prefill_tokens[seq.prompt_len :]
    tokens = np.concatenate([np.unique(prompt), generated])
    updates = np.ones((len(tokens), 3), dtype=np.int32)
    updates[:, 0] = seq.row
    updates[:, 1] = tokens
    updates[: len(tokens) - len(generated), 2] = PROMPT_BIT
    return updates
