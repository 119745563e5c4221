"""Scores of prompts beside those of transformers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def log_softmax_after(hf_model, tokens: list[int]) -> torch.Tensor:
    """[tokens, V]: row i belongs to the token that follows token i."""
    with torch.inference_mode():
        return hf_model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check_prompt(values: np.ndarray, prompt: list[int], hf_model) -> None:
    expected_NV = log_softmax_after(hf_model, prompt)[:-1]
    expected = expected_NV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert values.dtype == np.float32 and len(values) == len(prompt) and np.isnan(values[0])
    assert torch.allclose(torch.tensor(values[1:]), expected, atol=1e-4)


def check_prompt_tops(tops, prompt: list[int], k: int, hf_model) -> None:
    expected_NV = log_softmax_after(hf_model, prompt)[:-1]
    assert (tops.ranks.dtype, tops.ids.dtype, tops.logprobs.dtype) == (np.int32, np.int32, np.float32)
    assert tops.ranks.shape == (len(prompt),) and tops.ids.shape == tops.logprobs.shape == (len(prompt), k)
    assert tops.ranks[0] == 0 and (tops.ids[0] == -1).all() and np.isnan(tops.logprobs[0]).all()
    chosen_N1 = expected_NV.gather(1, torch.tensor(prompt[1:])[:, None])
    surely, perhaps = ((expected_NV > chosen_N1 + margin).sum(1) + 1 for margin in (1e-4, -1e-4))
    ranks = torch.tensor(tops.ranks[1:])
    assert (surely <= ranks).all() and (ranks <= perhaps).all(), "1 plus the number of likelier tokens"
    mine = torch.tensor(tops.logprobs[1:])
    assert torch.allclose(mine, expected_NV.topk(k).values, atol=1e-4), "the k largest, largest first"
    assert torch.allclose(mine, expected_NV.gather(1, torch.tensor(tops.ids[1:]).long()), atol=1e-4)


@dataclass(frozen=True)
class Wanted:
    """What a request asks about its prompt; all by default."""

    last: int | None = None
    tops: int | None = None
    chosen: np.ndarray | None = None
    entropy: bool = False

    def fields(self) -> dict[str, Any]:
        """The fields of the engine's request."""
        more = {"prompt_logprob_token_ids": self.chosen, "prompt_entropy": self.entropy}
        return {"prompt_logprobs": True, "prompt_logprobs_last": self.last, "prompt_top_logprobs": self.tops, **more}

    def check(self, told: Any, prompt: list[int], hf_model: Any, atol: float = 1e-4) -> None:
        """Compare the scores of an event with transformers': float32 logits, log-softmax and entropy in float64."""
        with torch.inference_mode():
            logits_TV = hf_model(input_ids=torch.tensor([prompt])).logits[0, :-1].double()
        expected_TV = logits_TV.log_softmax(-1)
        first = len(prompt) - (self.last or len(prompt))
        unknown = int(first == 0)  # rows of the prompt's first token
        expected_NV = expected_TV[max(first - 1, 0) :]
        rows = len(prompt) - first
        own_N = expected_NV.gather(1, torch.tensor(prompt[first + unknown :])[:, None])[:, 0]
        self._close(told.prompt_logprobs, own_N, (rows,), unknown, atol)
        assert (told.prompt_tops is None) == (self.tops is None)
        if self.tops is not None:
            tops = told.prompt_tops
            ranks = torch.tensor(tops.ranks[unknown:])
            surely, perhaps = ((expected_NV > own_N[:, None] + margin).sum(1) + 1 for margin in (atol, -atol))
            assert (surely <= ranks).all() and (ranks <= perhaps).all()
            self._close(tops.logprobs, expected_NV.topk(self.tops).values, (rows, self.tops), unknown, atol)
            self._close(
                tops.logprobs,
                expected_NV.gather(1, torch.tensor(tops.ids[unknown:]).long()),
                tops.ids.shape,
                unknown,
                atol,
            )
        assert (told.prompt_chosen_logprobs is None) == (self.chosen is None)
        if self.chosen is not None:
            ids = np.broadcast_to(self.chosen, (rows, self.chosen.shape[-1]))
            expected_NM = expected_NV.gather(1, torch.tensor(ids[unknown:]).long())
            self._close(told.prompt_chosen_logprobs, expected_NM, ids.shape, unknown, atol)
        assert (told.prompt_entropy is None) == (not self.entropy)
        if self.entropy:
            self._close(told.prompt_entropy, -(expected_NV.exp() * expected_NV).sum(1), (rows,), unknown, atol)

    @staticmethod
    def _close(found: np.ndarray, expected: torch.Tensor, shape: tuple[int, ...], unknown: int, atol: float) -> None:
        assert found.dtype == np.float32 and found.shape == shape and np.isnan(found[:unknown]).all()
        np.testing.assert_allclose(found[unknown:], expected, atol=atol, rtol=0)


def watch_output_layer(model) -> list[int]:
    """A list that gets how many tokens go through the output layer, by call."""
    sizes: list[int] = []
    compute_logits = model.compute_logits
    model.compute_logits = lambda hidden: (sizes.append(len(hidden)), compute_logits(hidden))[1]
    return sizes
