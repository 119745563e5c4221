"""What a step computes beyond its tokens, for rows that ask: the likeliest tokens, and log-probs of a prompt.

              device                                     host, pinned
    tops      [rows, 2, K] int32   ids, float bits       -D2H->     in steps in which a row asks for them
    prompt    [chunk tokens] float32                     -D2H->     in prefill steps with a prompt to score

All are log-softmax of the model's own logits: before temperature, penalties, bias, bans and masks. Which rows and
positions these are comes with the step's upload; a step without any enqueues nothing of this. What is copied is of one
piece: CUDA takes a copy with gaps through memory that is not pinned, and the host waits for it.

Legend: S rows that sample, C of them with tops, K tops, N scored positions, P of them at a time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rollout.engine.device.streams import Device
from rollout.engine.messages import MAX_TOP_LOGPROBS
from rollout.engine.step.top_logprobs import Scores

#: Prompt positions that go through the output layer at a time: their logits are all that is there of them. On a GPU
#: there are always so many, since another number might be another kernel, and none is compiled while serving.
SCORED_AT_ONCE = 128


class StepScores:
    """The scores of one step: buffers, and what of them is in use."""

    def __init__(self, device: Device, max_rows: int, chunk_tokens: int, vocab: int) -> None:
        self._multiple = SCORED_AT_ONCE if device.torch_device.type == "cuda" else 1
        self._k = min(MAX_TOP_LOGPROBS, vocab)
        tops, prompt = (max_rows, 2, self._k), (self._padded(chunk_tokens),)
        self._tops = torch.zeros(tops, dtype=torch.int32, device=device.torch_device)
        self._tops_host = device.host_buffer(tops, torch.int32)
        self._prompt = torch.zeros(prompt, device=device.torch_device)
        self._prompt_host = device.host_buffer(prompt, torch.float32)
        self._places: tuple[int, ...] = ()
        self._scored = 0

    @property
    def wanted(self) -> bool:
        """True if this step has any."""
        return bool(self._places) or self._scored > 0

    def begin(self) -> None:
        """Forget the last step."""
        self._places, self._scored = (), 0

    def want_tops(self, places: Sequence[int]) -> np.ndarray:
        """Take the tops of these of the sampling rows; what to upload as `top_at`, int64 [C]."""
        self._places = tuple(places)
        return np.array(places, dtype=np.int64)

    def want_prompt(self, at: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Score `targets`, each after the token of the step that is `at`.

        What to upload as `scored_at` and `scored_targets`: the same, int64, padded.
        """
        self._scored = len(at)
        padding = (0, self._padded(len(at)) - len(at))
        return np.pad(at, padding).astype(np.int64), np.pad(targets, padding).astype(np.int64)

    def take_tops(self, logits_SV: torch.Tensor, at_C: torch.Tensor, exact_sums: bool = False) -> None:
        """Find the likeliest tokens of some rows; on the compute stream. The logits are left as they are."""
        logits_CV = logits_SV.index_select(0, at_C)
        top_CK = logits_CV.topk(self._k, dim=1)
        best_C1 = top_CK.values[:, :1]
        rest_C1 = _log_sum_exp(logits_CV.sub_(best_C1), exact_sums)[:, None]
        ids_CK, bits_CK = self._tops[: len(at_C)].unbind(1)
        ids_CK.copy_(top_CK.indices)
        bits_CK.view(torch.float32).copy_(top_CK.values - best_C1 - rest_C1)

    def score_prompt(
        self,
        hidden_TH: torch.Tensor,
        at_N: torch.Tensor,
        targets_N: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        exact_sums: bool = False,
    ) -> None:
        """Log-probs of `targets_N` after the tokens `at_N` of a step; on the compute stream."""
        for start in range(0, len(at_N), SCORED_AT_ONCE):
            part = slice(start, start + SCORED_AT_ONCE)
            logits_PV = compute_logits(hidden_TH.index_select(0, at_N[part]))
            logits_PV.sub_(logits_PV.amax(dim=1, keepdim=True))  # small numbers lose no digits in the difference
            chosen_P = logits_PV.gather(1, targets_N[part, None]).squeeze(1)
            self._prompt[start : start + len(chosen_P)] = chosen_P - _log_sum_exp(logits_PV, exact_sums)

    def copy(self) -> None:
        """Copy device to host what there is; on the D2H stream."""
        if count := len(self._places):
            self._tops_host[:count].copy_(self._tops[:count], non_blocking=True)
        if self._scored:
            self._prompt_host[: self._scored].copy_(self._prompt[: self._scored], non_blocking=True)

    def read(self) -> Scores:
        """What has arrived, copied: the buffers are the next step's."""
        tops_C2K = self._tops_host[: len(self._places)].numpy().copy()
        prompt_N = self._prompt_host[: self._scored].numpy().copy()
        return Scores(self._places, tops_C2K[:, 0], tops_C2K[:, 1].view(np.float32), prompt_N)

    def _padded(self, count: int) -> int:
        return -(-count // self._multiple) * self._multiple


def _log_sum_exp(logits_RV: torch.Tensor, exact: bool) -> torch.Tensor:
    """[R]; no logit is above 0, and all are overwritten.

    A GPU groups the additions by the number of rows. With `exact` they are of whole numbers, multiples of 2^-43 (of
    which 2^19 tokens are no overflow): the same whatever the other rows, for more memory and time.
    """
    probs_RV = logits_RV.exp_()
    if exact:
        return (probs_RV.mul_(2.0**43).long().sum(dim=1).double() * 2.0**-43).log_().float()
    return probs_RV.sum(dim=1).log_()
