"""Packs plans: from the host's state of sequences to the upload of a step (`upload.py` lists its sections).

    Plan of decode rows, and of spans of one     --> a decode: rows and the pages that they open; a row for each
      token that all draw                            token ahead, too
    any other                                    --> a prefill: tokens, positions, and what each span does

Both also set up the rows whose sequence runs its first step.

The bound on the size of an upload is here, too, next to the code that fills it; the scheduler plans by it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from rollout_kernels import PROMPT_BIT

from rollout.engine.messages.requests import MAX_LOGIT_BIAS, MAX_STOP_IDS
from rollout.engine.schedule.plan import Plan, Span
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.step.device_feature import DeviceFeature
from rollout.engine.step.row_state import FLOAT_RULES, FLOATS, INT_RULES, INTS
from rollout.engine.step.shared_pages import SharedPages
from rollout.engine.upload import (
    ALIGNMENT_WORDS,
    PLAIN,
    RowNeeds,
    Upload,
    UploadStaging,
    put_behind,
    put_decode,
    put_prefill,
)

#: int32 words of an upload. A token: id, position, span. A span: rows, ends, lengths, samples, copy, save, load,
#: next token, alignment.
_TOKEN_WORDS = 6
_SPAN_WORDS = 32
_INIT_WORDS = 2 * (1 + INTS) + FLOATS + 1  # row and ints as int64, floats, the column of a feature
#: The needs of rows that have more to set up.
_SETUP_NEEDS = RowNeeds.MIN_TOKENS | RowNeeds.BIAS | RowNeeds.PENALIZE
_SAVE_WORDS = 4  # an ended row with a state to save: row and place as int64


@dataclass(frozen=True, slots=True)
class CapturedSizes:
    """Rows of the steps that are captured, ascending."""

    whole: list[int]
    forward: list[int]

    def size_for(self, rows: int, needs: RowNeeds = PLAIN) -> int:
        """The captured size that a step of `rows` rows takes; 0 if none is large enough."""
        sizes = self.forward if needs & ~PLAIN else self.whole
        return next((size for size in sizes if size >= rows), 0)


class Packer:
    """Packs the plans of one engine.

    `captured` are the sizes of its captured decode steps. `shared` says what rows share, if attention reads shared
    pages once. `states`: the model has linear attention, whose states go through the tokens ahead of a row. `features`
    put their sections last; the list changes with the requests.
    """

    def __init__(
        self,
        captured: CapturedSizes,
        shared: SharedPages | None,
        states: bool,
        features: Seq[StepFeature],
    ) -> None:
        self._states = states
        self._features = features
        self.captured = captured
        self.shared = shared

    def pack(self, plan: Plan, staging: UploadStaging) -> Upload:
        """Pack a step, before it is noted as launched: its sequences are still as the plan saw them."""
        staging.begin()
        size = 0
        layout: tuple[tuple[int, int, int, int], ...] = ()
        if plan.decodes:
            size = self.captured.size_for(plan.draws, plan.needs)
            self._put_decode(plan, size or plan.draws, staging)
        else:
            layout = _put_prefill(plan.spans, staging)
        _put_states(plan, staging)
        if plan.kind == "prefill":
            if not layout:
                _put_known(plan.spans, staging)
            self._put_new_rows(plan.spans, staging)
        for feature in self._features:
            feature.pack(plan, staging)
        return staging.upload(
            plan.draws if plan.ahead else plan.rows,
            plan.tokens,
            plan.draws,
            plan.needs.value,
            plan.max_context,
            size=size,
            layout=layout,
            most_ahead=max((tokens.length for tokens in plan.ahead), default=0),
        )

    def _put_decode(self, plan: Plan, size: int, staging: UploadStaging) -> None:
        put_decode(staging, plan.token_rows, plan.opens, size)
        if self.shared is not None:
            self.shared.put(plan, size, staging)
        if plan.ahead and self._states:
            put_behind(staging, [draws - 1 for _, _, _, draws, _ in plan.spans], size)

    def _put_new_rows(self, spans: Seq[Span], staging: UploadStaging) -> None:
        """Rows that no step has set up yet, and the pages that are copied for them."""
        _put_setup(staging, [span.seq for span in spans if not span.seq.row_ready])
        if copies := [copy for span in spans for copy in span.prompt.copies]:
            staging.put("copies", np.array(copies, dtype=np.int32))


def _put_states(plan: Plan, staging: UploadStaging) -> None:
    """Copies of states between rows and snapshots."""
    saves, loads = list(plan.saves), list[tuple[int, int]]()
    if plan.kind == "prefill":
        for span in plan.spans:
            saves += span.prompt.saves
            loads += span.prompt.loads
    for name, pairs in (("state_saves", saves), ("state_loads", loads)):
        if pairs:
            staging.put(name, np.array(pairs, dtype=np.int64))


def _put_known(spans: Seq[Span], staging: UploadStaging) -> None:
    """The tokens of prompts that take the decode forward."""
    known = [(seq.row, prompt.tokens[0], start) for seq, start, _, _, prompt in spans]
    staging.put("known", np.array(known, dtype=np.int64))


def _put_prefill(spans: Seq[Span], staging: UploadStaging) -> tuple[tuple[int, int, int, int], ...]:
    tokens = np.concatenate([span.prompt.tokens for span in spans]).astype(np.int64)
    columns = [(seq.row, start, tokens_in, draws) for seq, start, tokens_in, draws, _ in spans]
    return put_prefill(staging, columns, tokens)


def _put_setup(staging: UploadStaging, seqs: Seq[Sequence]) -> None:
    """Pack what `RowState.set_up` needs for sequences whose first chunk is in this step."""
    if not seqs:
        return
    staging.put("init_ints", np.array([_ints(seq) for seq in seqs], dtype=np.int64))
    staging.put("init_floats", np.array([_floats(seq) for seq in seqs], dtype=np.float32))
    staging.put("page_updates", np.concatenate([_page_updates(seq) for seq in seqs]))
    _put_lists(staging, seqs)


def _put_lists(staging: UploadStaging, seqs: Seq[Sequence]) -> None:
    if banned := [seq for seq in seqs if seq.group.needs & RowNeeds.MIN_TOKENS]:
        staging.put("banned_rows", _rows(banned))
        staging.put("banned", np.array([_repeated(seq.group.request.stop.token_ids) for seq in banned], dtype=np.int64))
    if biased := [seq for seq in seqs if seq.group.needs & RowNeeds.BIAS]:
        ids = np.zeros((len(biased), MAX_LOGIT_BIAS), dtype=np.int64)
        values = np.zeros((len(biased), MAX_LOGIT_BIAS), dtype=np.float32)
        for i, seq in enumerate(biased):
            pairs = seq.group.request.sampling.logit_bias
            ids[i, : len(pairs)] = [token for token, _ in pairs]
            values[i, : len(pairs)] = [value for _, value in pairs]
        staging.put("bias_rows", _rows(biased))
        staging.put("bias_ids", ids)
        staging.put("bias", values)
    if counted := [seq for seq in seqs if seq.group.needs & RowNeeds.PENALIZE]:
        staging.put("counts_rows", _rows(counted))
        staging.put("counts", np.concatenate([_count_updates(seq) for seq in counted]))


def _rows(seqs: Seq[Sequence]) -> np.ndarray:
    return np.array([seq.row for seq in seqs], dtype=np.int64)


def _ints(seq: Sequence) -> list[float]:
    sampling = seq.group.request.sampling
    # Without stop tokens there is nothing to ban, and the row's list still belongs to its predecessor.
    min_tokens = seq.group.request.stop.min_tokens if seq.group.needs & RowNeeds.MIN_TOKENS else 0
    rules = [rule.row_value(sampling) for rule in INT_RULES]
    return [seq.row, 0, 0, seq.prompt_len, min_tokens, seq.group.request.prompt.rope_delta, *rules, seq.seed]


def _floats(seq: Sequence) -> list[float]:
    sampling = seq.group.request.sampling
    temperature, noise = (1.0, 0.0) if sampling.temperature == 0 else (sampling.temperature, 1.0)
    return [temperature, noise, *(rule.row_value(sampling) for rule in FLOAT_RULES)]


def _page_updates(seq: Sequence) -> np.ndarray:
    pages = seq.kv.pages
    updates = np.empty((len(pages), 3), dtype=np.int32)
    updates[:, 0] = seq.row
    updates[:, 1] = np.arange(len(pages))
    updates[:, 2] = pages
    return updates


def _repeated(ids: tuple[int, ...]) -> list[int]:
    return [*ids, *(ids[0] for _ in range(MAX_STOP_IDS - len(ids)))]


def _count_updates(seq: Sequence) -> np.ndarray:
    history = seq.kv.prefill_tokens
    prompt, generated = history[: seq.prompt_len], history[seq.prompt_len :]
    tokens = np.concatenate([np.unique(prompt), generated])
    updates = np.ones((len(tokens), 3), dtype=np.int32)
    updates[:, 0] = seq.row
    updates[:, 1] = tokens
    updates[: len(tokens) - len(generated), 2] = PROMPT_BIT
    return updates


# --- bounds ----------------------------------------------------------------------------------------------------------


def spare_words(max_rows: int, of_features: int = 0) -> int:
    """The most words that alignment, saves of states and features add to an upload, apart from words of tokens."""
    return ALIGNMENT_WORDS + _SAVE_WORDS * max_rows + of_features


def upload_words(seq: Sequence, length: int, features: Seq[DeviceFeature] = ()) -> int:
    """Upper bound on the int32 words that the next `length` tokens of a prompt add to an upload."""
    fresh = seq.fresh_from is not None
    of_features = sum(feature.token_words + feature.fresh_words * fresh for feature in features)
    words = (_TOKEN_WORDS + of_features) * length + _SPAN_WORDS
    if not seq.row_ready:
        kv = seq.kv
        words += _setup_words(len(kv.pages), len(kv.prefill_tokens), seq.group.needs) + 2
    return words


def slot_words(max_rows: int, max_pages: int, max_context: int, chunk_tokens: int, features: Seq[DeviceFeature]) -> int:
    """Size of a slot's staging buffer, int32 words: any decode step, any one chunk, and many small chunks."""
    token_words = sum(feature.token_words + feature.fresh_words for feature in features)
    setup = _setup_words(max_pages, max_context, _SETUP_NEEDS)
    largest = (_TOKEN_WORDS + token_words) * chunk_tokens + _SPAN_WORDS + setup
    spare = spare_words(max_rows, sum(feature.spare_words for feature in features))
    return max(16 * max_rows, largest) + 64 * max_rows + spare + 1024


def _setup_words(pages: int, history: int, needs: RowNeeds) -> int:
    """Upper bound on the int32 words that setting up a row adds to an upload; `history` in tokens."""
    words = _INIT_WORDS + 3 * pages + 32
    words += (MAX_STOP_IDS + 1) * 2 if needs & RowNeeds.MIN_TOKENS else 0
    words += (MAX_LOGIT_BIAS * 3 + 2) if needs & RowNeeds.BIAS else 0
    words += 3 * history + 2 if needs & RowNeeds.PENALIZE else 0
    return words
