"""Scores: what a step computes beside its tokens where a request asks for it: likeliest tokens, log-probs of a prompt.

              device                                     host, pinned
    tops      [rows, 2, K] int32   ids, float bits       -D2H->     in steps where a row asks for them
    prompt    [chunk tokens] float32                     -D2H->     in steps with a prompt to score
    ranks     [chunk tokens] int32                       -D2H->     where such a prompt asks for them
    prompt tops  [chunk tokens, 2, K] int32              -D2H->     the same

All are log-softmax of the model's own logits: before temperature, penalties, bias, bans and masks. The upload of a step
says which rows and positions these are; a step without any enqueues nothing of this. Each copy is one contiguous piece:
CUDA takes a copy with gaps through memory that is not pinned, and the host would wait for it.

Where each rank of a tensor group has the logits of a part of the vocabulary, the ranks exchange the largest logit of
each row, then sums, the likeliest tokens of their part, and how many tokens are likelier than the prompt's. All ranks
merge them in the order of the ranks and have the same scores; exact sums are those of one rank, bit for bit.

Legend: S rows that sample, C of them with tops, K tops, N scored positions, P of them at a time, V vocabulary or the
rank's part of it, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from rollout_kernels.sampling import VocabShard

from rollout.engine.device.streams import Device
from rollout.engine.messages.requests import MAX_TOP_LOGPROBS

#: Prompt positions that go through the output layer at a time; only their logits exist at once. On a GPU every piece
#: has this size: another size may need another kernel, and nothing is compiled while serving.
SCORED_AT_ONCE = 128


def scored_multiple(device: torch.device) -> int:
    """An upload pads its scored positions to a multiple of this."""
    return SCORED_AT_ONCE if device.type == "cuda" else 1


def _nothing() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one step, on the host."""

    places: tuple[int, ...]  # of the rows with tops, among those that sample
    top_ids_CK: np.ndarray  # int32, likeliest first
    top_logprobs_CK: np.ndarray  # float32
    prompt_N: np.ndarray  # float32, of the prompt tokens that the step's spans score, in their order
    prompt_ranks_N: np.ndarray = field(default_factory=_nothing)  # int32, in a step that ranks them
    prompt_ids_NK: np.ndarray = field(default_factory=_nothing)  # int32, in a step that has their likeliest tokens
    prompt_logprobs_NK: np.ndarray = field(default_factory=_nothing)  # float32, the same


class Vocabulary:
    """What logits are of: the whole vocabulary."""

    def largest(self, own_P1: torch.Tensor) -> torch.Tensor:
        """The largest logit of each row, from the largest of the columns that are here."""
        return own_P1

    def sum(self, own_P: torch.Tensor) -> torch.Tensor:
        """The sum of each row, from the sum of the columns that are here."""
        return own_P

    def logit_of(self, logits_PV: torch.Tensor, tokens_P1: torch.Tensor) -> torch.Tensor:
        """The logit of a token of each row, [P, 1]."""
        return logits_PV.gather(1, tokens_P1)

    def likeliest(self, logits_PV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` largest logits of each row and their tokens, [P, K]."""
        found = logits_PV.topk(k, dim=1)
        return found.values, found.indices


class _PartOfVocabulary(Vocabulary):
    """The rank's part of the vocabulary; all ranks call the same methods and get the same results."""

    def __init__(self, shard: VocabShard) -> None:
        self._group, self._first = shard.group, shard.first_token

    def largest(self, own_P1: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(own_P1).amax(dim=0)

    def sum(self, own_P: torch.Tensor) -> torch.Tensor:
        first_P, *others = self._group.all_gather(own_P)
        for other_P in others:  # in the order of the ranks
            first_P = first_P + other_P
        return first_P

    def logit_of(self, logits_PV: torch.Tensor, tokens_P1: torch.Tensor) -> torch.Tensor:
        place_P1 = tokens_P1 - self._first
        foreign_P1 = (place_P1 < 0) | (place_P1 >= logits_PV.shape[1])  # one rank has the token
        own_P1 = logits_PV.gather(1, place_P1.masked_fill(foreign_P1, 0)).masked_fill(foreign_P1, 0.0)
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


_WHOLE = Vocabulary()


def vocabulary(shard: VocabShard | None) -> Vocabulary:
    """The vocabulary of logits of this shard; of all tokens without one."""
    return _WHOLE if shard is None else _PartOfVocabulary(shard)


class ScoreBuffers:
    """The buffers for the scores of one step."""

    def __init__(self, device: Device, max_rows: int, chunk_tokens: int, vocab: int) -> None:
        multiple = scored_multiple(device.torch_device)
        self._k = min(MAX_TOP_LOGPROBS, vocab)
        positions = -(-chunk_tokens // multiple) * multiple
        tops, prompt, prompt_tops = (max_rows, 2, self._k), (positions,), (positions, 2, self._k)
        self._tops = torch.zeros(tops, dtype=torch.int32, device=device.torch_device)
        self._tops_host = device.host_buffer(tops, torch.int32)
        self._prompt = torch.zeros(prompt, device=device.torch_device)
        self._prompt_host = device.host_buffer(prompt, torch.float32)
        self._ranks = torch.zeros(prompt, dtype=torch.int32, device=device.torch_device)
        self._ranks_host = device.host_buffer(prompt, torch.int32)
        self._prompt_tops = torch.zeros(prompt_tops, dtype=torch.int32, device=device.torch_device)
        self._prompt_tops_host = device.host_buffer(prompt_tops, torch.int32)

    def take_tops(
        self,
        logits_SV: torch.Tensor,
        at_C: torch.Tensor,
        exact_sums: bool = False,
        vocab: Vocabulary = _WHOLE,
    ) -> None:
        """Find the likeliest tokens of some rows; on the compute stream. The logits are left as they are.

        They cover `vocab`; if that is a part, all ranks call this.
        """
        logits_CV = logits_SV.index_select(0, at_C)
        values_CK, top_ids_CK = vocab.likeliest(logits_CV, self._k)
        best_C1 = values_CK[:, :1]
        rest_C1 = _log_sum_exp(logits_CV.sub_(best_C1), exact_sums, vocab)[:, None]
        ids_CK, bits_CK = self._tops[: len(at_C)].unbind(1)
        ids_CK.copy_(top_ids_CK)
        bits_CK.view(torch.float32).copy_(values_CK - best_C1 - rest_C1)

    def score_prompt(
        self,
        hidden_TH: torch.Tensor,
        at_N: torch.Tensor,
        targets_N: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        exact_sums: bool = False,
        *,
        ranked: bool = False,
        tops: bool = False,
        vocab: Vocabulary = _WHOLE,
    ) -> None:
        """Log-probs of `targets_N` after the tokens `at_N` of a step; on the compute stream.

        With `ranked` their ranks, too, and with `tops` the likeliest tokens at each position. `compute_logits` gives
        those of `vocab`; if that is a part, all ranks call this.
        """
        for start in range(0, len(at_N), SCORED_AT_ONCE):
            part = slice(start, min(start + SCORED_AT_ONCE, len(at_N)))
            logits_PV = compute_logits(hidden_TH.index_select(0, at_N[part]))
            best_P1 = vocab.largest(logits_PV.amax(dim=1, keepdim=True))
            logits_PV.sub_(best_P1)  # small numbers lose no digits in the difference
            chosen_P1 = vocab.logit_of(logits_PV, targets_N[part, None])
            if ranked:
                likelier_P = (logits_PV > chosen_P1).sum(dim=1, dtype=torch.int32)
                self._ranks[part] = vocab.sum(likelier_P) + 1
            if tops:
                values_PK, top_ids_PK = vocab.likeliest(logits_PV, self._k)
            rest_P = _log_sum_exp(logits_PV, exact_sums, vocab)
            self._prompt[part] = chosen_P1.squeeze(1) - rest_P
            if tops:
                ids_PK, bits_PK = self._prompt_tops[part].unbind(1)
                ids_PK.copy_(top_ids_PK)
                bits_PK.view(torch.float32).copy_(values_PK - rest_P[:, None])

    def copy(self, tops: int, scored: int, *, ranked: bool = False, prompt_tops: bool = False) -> None:
        """Copy the tops of `tops` rows and the scores of `scored` positions to the host; on the D2H stream."""
        if tops:
            self._tops_host[:tops].copy_(self._tops[:tops], non_blocking=True)
        if scored:
            self._prompt_host[:scored].copy_(self._prompt[:scored], non_blocking=True)
        if ranked:
            self._ranks_host[:scored].copy_(self._ranks[:scored], non_blocking=True)
        if prompt_tops:
            self._prompt_tops_host[:scored].copy_(self._prompt_tops[:scored], non_blocking=True)

    def read(self, places: tuple[int, ...], scored: int, *, ranked: bool = False, prompt_tops: bool = False) -> Scores:
        """A copy of the scores that have arrived; the next step overwrites the buffers."""
        tops_C2K = self._tops_host[: len(places)].numpy().copy()
        prompt_N = self._prompt_host[:scored].numpy().copy()
        scores = Scores(places, tops_C2K[:, 0], tops_C2K[:, 1].view(np.float32), prompt_N)
        if ranked:
            scores = replace(scores, prompt_ranks_N=self._ranks_host[:scored].numpy().copy())
        if prompt_tops:
            tops_N2K = self._prompt_tops_host[:scored].numpy().copy()
            ids_NK, logprobs_NK = tops_N2K[:, 0], tops_N2K[:, 1].view(np.float32)
            scores = replace(scores, prompt_ids_NK=ids_NK, prompt_logprobs_NK=logprobs_NK)
        return scores


def _log_sum_exp(logits_RV: torch.Tensor, exact: bool, vocab: Vocabulary) -> torch.Tensor:
    """[R]; no logit is above 0, and all are overwritten.

    A GPU groups the additions by the number of rows. With `exact` the terms are whole multiples of 2^-43, so a row's
    sum does not depend on the other rows; this takes more memory and time. 2^19 tokens cannot overflow.
    """
    probs_RV = logits_RV.exp_()
    if exact:
        units_R = vocab.sum(probs_RV.mul_(2.0**43).long().sum(dim=1))
        return (units_R.double() * 2.0**-43).log_().float()
    return vocab.sum(probs_RV.sum(dim=1)).log_()
