"""The mask of a constraint: the kernel and the twin against plain Python."""

import pytest
import torch
from rollout_kernels import SamplingRows, sample
from rollout_kernels.sampling import allow_only
from rollout_kernels.sampling.triton_allow import allow_only as on_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(rows: int, vocab: int, constrained: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + vocab)
    logits_SV = torch.randn(rows, vocab, generator=generator)
    at_C = torch.randperm(rows, generator=generator)[:constrained]
    masks_CW = torch.randint(-(2**31), 2**31, (constrained, -(-vocab // 32)), generator=generator).int()
    return logits_SV, at_C, masks_CW


@pytest.mark.parametrize("banned", [allow_only, on_gpu], ids=["twin", "kernel"])
@pytest.mark.parametrize(("rows", "vocab", "constrained"), [(1, 5, 1), (3, 64, 0), (4, 97, 2), (2, 4099, 2)])
def test_tokens_without_a_bit_become_minus_infinity_and_others_do_not_change(banned, rows, vocab, constrained):
    logits_SV, at_C, masks_CW = problem(rows, vocab, constrained)
    device = DEVICE if banned is on_gpu else "cpu"
    got_SV = logits_SV.to(device)
    if constrained:
        banned(got_SV, at_C.to(device), masks_CW.to(device))
    expected_SV = logits_SV.clone()
    for row, mask_W in zip(at_C.tolist(), masks_CW.tolist(), strict=True):
        for token in range(vocab):
            if not mask_W[token // 32] >> (token % 32) & 1:
                expected_SV[row, token] = -torch.inf
    assert torch.equal(got_SV.cpu(), expected_SV)


def test_a_draw_obeys_the_mask_and_also_reports_the_models_own_logprobs():
    logits_SV, at_C, masks_CW = problem(64, 97, 40)
    before_SV = logits_SV.clone()
    rows = SamplingRows(
        temperature_S=torch.full((64,), 0.7),
        noise_S=torch.ones(64),
        seed_S=torch.arange(64),
        index_S=torch.zeros(64, dtype=torch.int64),
        masked_C=at_C,
        masks_CW=masks_CW,
    )
    drawn = sample(logits_SV, rows)
    assert torch.equal(logits_SV, before_SV), "the given logits do not change"
    for place, row in enumerate(at_C.tolist()):
        token = int(drawn.tokens_S[row])
        assert masks_CW[place, token // 32] >> (token % 32) & 1
    assert torch.allclose(
        drawn.logprobs_S, (logits_SV / 0.7).log_softmax(1).gather(1, drawn.tokens_S[:, None])[:, 0], atol=1e-5
    )
    free = torch.ones(64, dtype=torch.bool)
    free[at_C] = False
    assert torch.equal(drawn.drawn_logprobs_S[free], drawn.logprobs_S[free])
    assert (drawn.drawn_logprobs_S[at_C] > drawn.logprobs_S[at_C]).all()
