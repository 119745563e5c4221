"""Scores that a step computes on request: likeliest tokens, log-probs of a prompt.

              device                                     host, pinned
    tops      [rows, 2, K] int32   ids, float bits       -D2H->     in steps where a row asks for them
    prompt    [chunk tokens] float32                     -D2H->     in steps with a prompt to score
    ranks     [chunk tokens] int32                       -D2H->     where such a prompt asks for them
    prompt tops  [chunk tokens, 2, K] int32              -D2H->     the same
    chosen    [words] float32                            -D2H->     of prompts with tokens that a request names
    entropy   [chunk tokens] float32                     -D2H->     of prompts whose request asks for it

Prompts are scored in two lists. The narrow buffer has positions with their own token and up to 20 likeliest tokens; the
wide buffer does not affect its numbers. The wide buffer has all other positions: its steps are as long as `WIDE_WORDS`
allows.

All are log-softmax of the model's own logits: before temperature, penalties, bias, bans and masks. The upload of a step
lists the rows and positions to score; a step without any enqueues no scoring. Each copy is one contiguous piece: CUDA
takes a copy with gaps through memory that is not pinned, and the host would wait.

Where each rank of a tensor group has the logits of a part of the vocabulary, the ranks exchange the largest logit of
each row, then sums, the likeliest tokens of their part, and how many tokens are likelier than the prompt's. All ranks
merge them in the order of the ranks and have the same scores; exact sums equal one rank's, bit for bit.

Legend: S rows that sample, C rows with tops, K tops, N scored positions, P positions at a time, M tokens named by a
request at a position, V vocabulary or the rank's part, R ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rollout_kernels.sampling import VocabShard

from rollout.engine.device.streams import Device
from trainer_bridge.wire.request_fields import MAX_PROMPT_TOKENS_SCORED, MAX_TOP_LOGPROBS

#: Prompt positions that go through the output layer at a time; only their logits exist at once. On a GPU every piece
#: has this size: another size may need another kernel, and nothing is compiled while serving.
SCORED_AT_ONCE = 128
#: Words of the wide buffers: a step's wide positions, times the most tokens at a position.
WIDE_WORDS = 1 << 19


def scored_multiple(device: torch.device) -> int:
    """The number to whose multiples an upload pads its scored positions."""
    return SCORED_AT_ONCE if device.type == "cuda" else 1


class Scoring(NamedTuple):
    """The prompt positions of one list of a step, and their scores."""

    scored: int = 0  # positions
    ranked: bool = False  # the ranks of these positions are returned
    tops: int = 0  # number of likeliest tokens at each position
    chosen: int = 0  # number of tokens named in the upload, for their log-probs
    entropy: bool = False  # the entropy is returned


def _nothing() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The scores of one list of prompt tokens, in order, on the host. Arrays that no request asked for are empty."""

    logprobs_N: np.ndarray = field(default_factory=_nothing)  # float32
    ranks_N: np.ndarray = field(default_factory=_nothing)  # int32
    ids_NK: np.ndarray = field(default_factory=_nothing)  # int32, likeliest first
    top_logprobs_NK: np.ndarray = field(default_factory=_nothing)  # float32
    chosen_NM: np.ndarray = field(default_factory=_nothing)  # float32
    entropy_N: np.ndarray = field(default_factory=_nothing)  # float32, nats


class ScoredSpan(NamedTuple):
    """The part of a span of a prompt that is scored: tokens for which the next prompt token's log-prob is wanted."""

    span_index: int  # index of the span in the step
    first: int  # tokens of the span before the scored ones
    scored: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one step, on the host."""

    top_rows: tuple[int, ...]  # indices of the rows with tops among the rows that sample
    top_ids_CK: np.ndarray  # int32, likeliest first
    top_logprobs_CK: np.ndarray  # float32
    narrow: ScoredPrompts
    wide: ScoredPrompts
    spans: tuple[ScoredSpan, ...]  # in the order in which their scores are in the lists


class VocabularyPart:
    """The vocabulary of logits: here the whole one."""

    def largest(self, own_P1: torch.Tensor) -> torch.Tensor:
        """The largest logit of each row, from the largest of the columns that are here."""
        return own_P1

    def sum(self, own_P: torch.Tensor) -> torch.Tensor:
        """The sum of each row, from the sum of the columns that are here."""
        return own_P

    def logit_of(self, logits_PV: torch.Tensor, tokens_P1: torch.Tensor) -> torch.Tensor:
        """The logits of a token of each row, [P, 1], or of several, [P, M]."""
        return logits_PV.gather(1, tokens_P1)

    def likeliest(self, logits_PV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` largest logits of each row and their tokens, [P, K]."""
        found = logits_PV.topk(k, dim=1)
        return found.values, found.indices


class _PartOfVocabulary(VocabularyPart):
    """The rank's part of the vocabulary; all ranks call the same methods and get the same results."""

    def __init__(self, shard: VocabShard) -> None:
        self._group, self._first = shard.group, shard.first_token

    def largest(self, own_P1: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(own_P1).amax(dim=0)

    def sum(self, own_P: torch.Tensor) -> torch.Tensor:
        first_P, *others = self._group.all_gather(own_P)
        for other_P in others:  # ordered by rank
            first_P = first_P + other_P
        return first_P

    def logit_of(self, logits_PV: torch.Tensor, tokens_P1: torch.Tensor) -> torch.Tensor:
        index_P1 = tokens_P1 - self._first
        foreign_P1 = (index_P1 < 0) | (index_P1 >= logits_PV.shape[1])  # one rank has the token
        own_P1 = logits_PV.gather(1, index_P1.masked_fill(foreign_P1, 0)).masked_fill(foreign_P1, 0.0)
        return self.sum(own_P1)

    def likeliest(self, logits_PV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = logits_PV.topk(min(k, logits_PV.shape[1]), dim=1)
        missing = (0, k - own.values.shape[1])
        values_PK = F.pad(own.values, missing, value=-torch.inf)
        ids_PK = F.pad((own.indices + self._first).int(), missing)
        both_R2PK = self._group.all_gather(torch.stack([values_PK.view(torch.int32), ids_PK]))
        bits_PRK, ids_PRK = both_R2PK.permute(1, 2, 0, 3).flatten(2)  # the tokens of the first rank come first
        top = bits_PRK.view(torch.float32).topk(k, dim=1)
        return top.values, ids_PRK.gather(1, top.indices)


_WHOLE = VocabularyPart()


def vocabulary(shard: VocabShard | None) -> VocabularyPart:
    """The vocabulary of this shard's logits; the whole vocabulary without a shard."""
    return _WHOLE if shard is None else _PartOfVocabulary(shard)


class PromptBuffers:
    """The buffers for one list of scored positions.

    `positions`: how many at most; `tops_words`, `chosen_words`: the most positions times their likeliest tokens, and
    times the named tokens.
    """

    def __init__(self, device: Device, positions: int, tops_words: int, chosen_words: int = 0) -> None:
        def pair(words: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(words, dtype=dtype, device=device.torch_device), device.host_buffer((words,), dtype)

        self._logprobs, self._logprobs_host = pair(positions, torch.float32)
        self._ranks, self._ranks_host = pair(positions, torch.int32)
        self._tops, self._tops_host = pair(2 * tops_words, torch.int32)
        self._chosen, self._chosen_host = pair(chosen_words, torch.float32)
        self._entropy, self._entropy_host = pair(positions, torch.float32)

    def score(
        self,
        hidden_TH: torch.Tensor,
        at_N: torch.Tensor,
        targets_N: torch.Tensor,
        chosen_NM: torch.Tensor | None,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        scoring: Scoring,
        exact_sums: bool = False,
        vocab: VocabularyPart = _WHOLE,
    ) -> None:
        """Log-probs of `targets_N` after the tokens `at_N` of a step, and what else is asked; on the compute stream.

        `chosen_NM` are the named tokens, int32. `compute_logits` gives logits of `vocab`; if that is a part, all ranks
        call this.
        """
        tops_N2K = self._tops[: 2 * len(at_N) * scoring.tops].view(-1, 2, max(scoring.tops, 1))
        scores_NM = self._chosen[: len(at_N) * scoring.chosen].view(-1, max(scoring.chosen, 1))
        for start in range(0, len(at_N), SCORED_AT_ONCE):
            part = slice(start, min(start + SCORED_AT_ONCE, len(at_N)))
            logits_PV = compute_logits(hidden_TH.index_select(0, at_N[part]))
            best_P1 = vocab.largest(logits_PV.amax(dim=1, keepdim=True))
            logits_PV.sub_(best_P1)  # small numbers lose no digits in the difference
            own_P1 = vocab.logit_of(logits_PV, targets_N[part, None])
            if scoring.ranked:
                likelier_P = (logits_PV > own_P1).sum(dim=1, dtype=torch.int32)
                self._ranks[part] = vocab.sum(likelier_P) + 1
            if scoring.tops:
                values_PK, top_ids_PK = vocab.likeliest(logits_PV, scoring.tops)
            if chosen_NM is not None:
                chosen_PM = vocab.logit_of(logits_PV, chosen_NM[part].long())
            if scoring.entropy:
                weighted_P = _weighted_logits(logits_PV, exact_sums, vocab)
            rest_P = _log_sum_exp(logits_PV, exact_sums, vocab)
            self._logprobs[part] = own_P1.squeeze(1) - rest_P
            if scoring.tops:
                ids_PK, bits_PK = tops_N2K[part].unbind(1)
                ids_PK.copy_(top_ids_PK)
                bits_PK.view(torch.float32).copy_(values_PK - rest_P[:, None])
            if chosen_NM is not None:
                torch.sub(chosen_PM, rest_P[:, None], out=scores_NM[part])
            if scoring.entropy:
                self._entropy[part] = rest_P - weighted_P / rest_P.exp()

    def copy(self, scoring: Scoring) -> None:
        """Copy the scores of a step to the host; on the D2H stream."""
        for host, device in self._parts(scoring):
            host.copy_(device, non_blocking=True)

    def _parts(self, scoring: Scoring) -> list[tuple[torch.Tensor, torch.Tensor]]:
        scored, tops, chosen = scoring.scored, 2 * scoring.scored * scoring.tops, scoring.scored * scoring.chosen
        sizes = (
            (self._logprobs_host, self._logprobs, scored),
            (self._ranks_host, self._ranks, scored if scoring.ranked else 0),
            (self._tops_host, self._tops, tops),
            (self._chosen_host, self._chosen, chosen),
            (self._entropy_host, self._entropy, scored if scoring.entropy else 0),
        )
        return [(host[:size], device[:size]) for host, device, size in sizes if size]

    def read(self, scoring: Scoring) -> ScoredPrompts:
        """A copy of the scores that have arrived; the next step overwrites the buffers."""
        if not scoring.scored:
            return ScoredPrompts()
        scored, more = scoring.scored, dict[str, Any]()
        if scoring.ranked:
            more["ranks_N"] = self._ranks_host[:scored].numpy().copy()
        if k := scoring.tops:
            tops_N2K = self._tops_host[: 2 * scored * k].view(scored, 2, k).numpy().copy()
            more |= {"ids_NK": tops_N2K[:, 0], "top_logprobs_NK": tops_N2K[:, 1].view(np.float32)}
        if m := scoring.chosen:
            more["chosen_NM"] = self._chosen_host[: scored * m].view(scored, m).numpy().copy()
        if scoring.entropy:
            more["entropy_N"] = self._entropy_host[:scored].numpy().copy()
        return ScoredPrompts(self._logprobs_host[:scored].numpy().copy(), **more)


class ScoreBuffers:
    """The buffers for the scores of one step."""

    def __init__(self, device: Device, max_rows: int, chunk_tokens: int, vocab: int) -> None:
        multiple = scored_multiple(device.torch_device)
        self.k = min(MAX_TOP_LOGPROBS, vocab)
        positions = -(-chunk_tokens // multiple) * multiple
        tops = (max_rows, 2, self.k)
        self._tops = torch.zeros(tops, dtype=torch.int32, device=device.torch_device)
        self._tops_host = device.host_buffer(tops, torch.int32)
        most = min(WIDE_WORDS, positions * MAX_PROMPT_TOKENS_SCORED) + multiple * MAX_PROMPT_TOKENS_SCORED
        self.narrow = PromptBuffers(device, positions, positions * self.k)
        self.wide = PromptBuffers(device, positions, most, most)

    def take_tops(
        self,
        logits_SV: torch.Tensor,
        at_C: torch.Tensor,
        exact_sums: bool = False,
        vocab: VocabularyPart = _WHOLE,
    ) -> None:
        """Find the likeliest tokens of some rows; on the compute stream. The logits are left as they are.

        They cover `vocab`; if that is a part, all ranks call this.
        """
        logits_CV = logits_SV.index_select(0, at_C)
        values_CK, top_ids_CK = vocab.likeliest(logits_CV, self.k)
        best_C1 = values_CK[:, :1]
        rest_C1 = _log_sum_exp(logits_CV.sub_(best_C1), exact_sums, vocab)[:, None]
        ids_CK, bits_CK = self._tops[: len(at_C)].unbind(1)
        ids_CK.copy_(top_ids_CK)
        bits_CK.view(torch.float32).copy_(values_CK - best_C1 - rest_C1)

    def copy(self, tops: int, narrow: Scoring, wide: Scoring) -> None:
        """Copy the tops of `tops` rows and the scores of two lists to the host; on the D2H stream."""
        if tops:
            self._tops_host[:tops].copy_(self._tops[:tops], non_blocking=True)
        self.narrow.copy(narrow)
        self.wide.copy(wide)

    def read(
        self, top_rows: tuple[int, ...], narrow: Scoring, wide: Scoring, spans: tuple[ScoredSpan, ...] = ()
    ) -> Scores:
        """A copy of the scores that have arrived; the next step overwrites the buffers."""
        tops_C2K = self._tops_host[: len(top_rows)].numpy().copy()
        ids_CK, logprobs_CK = tops_C2K[:, 0], tops_C2K[:, 1].view(np.float32)
        return Scores(top_rows, ids_CK, logprobs_CK, self.narrow.read(narrow), self.wide.read(wide), spans)


def _log_sum_exp(logits_RV: torch.Tensor, exact: bool, vocab: VocabularyPart) -> torch.Tensor:
    """[R]; no logit is above 0, and all are overwritten.

    A GPU groups the additions by the number of rows. With `exact` the terms are whole multiples of 2^-43, so a row's
    sum does not depend on the other rows, at a cost in memory and time. 2^19 tokens cannot overflow.
    """
    probs_RV = logits_RV.exp_()
    if exact:
        units_R = vocab.sum(probs_RV.mul_(2.0**43).long().sum(dim=1))
        return (units_R.double() * 2.0**-43).log_().float()
    return vocab.sum(probs_RV.sum(dim=1)).log_()


def _weighted_logits(logits_RV: torch.Tensor, exact: bool, vocab: VocabularyPart) -> torch.Tensor:
    """[R]: the sum of exp(logit) * logit. No logit is above 0; the logits of impossible tokens become finite.

    With `exact` as in `_log_sum_exp`: a term is at most 1 / e.
    """
    terms_RV = logits_RV.clamp_min_(-1e30).exp().mul_(logits_RV)
    if exact:
        return vocab.sum(terms_RV.mul_(2.0**43).long().sum(dim=1)).double().mul_(2.0**-43).float()
    return vocab.sum(terms_RV.sum(dim=1))
