"""The draw on a GPU against its torch twin: the same tokens, log-probabilities and row state."""

import pytest
import torch
from rollout_kernels import SamplingRows, gumbel_noise, sample
from rollout_kernels.sampling.triton_draw import draw_and_advance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = {"LAST": 0, "LENGTH": 1, "PROMPT": 2, "SEED": 5, "TEMPERATURE": 0, "NOISE": 1}


def row_state(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    ints = torch.zeros(rows + 1, 6, dtype=torch.int64)
    ints[:, 1] = torch.arange(rows + 1) + 20  # length
    ints[:, 2] = 9  # prompt
    ints[:, 5] = torch.arange(rows + 1) * 7919 + 2**40
    floats = torch.ones(rows + 1, 7)
    floats[:, 0] = torch.linspace(0.5, 2.0, rows + 1)
    floats[::3, 1] = 0.0  # greedy
    floats[::3, 0] = 1.0
    return ints.to(DEVICE), floats.to(DEVICE)


@pytest.mark.parametrize("vocab", [97, 2048, 5003])
@pytest.mark.parametrize("truncated", [False, True])
def test_the_draw_is_that_of_the_torch_twin(vocab, truncated):
    count = 7
    logits = torch.randn(count, vocab, device=DEVICE) * 3
    ints, floats = row_state(count, vocab)
    rows = torch.tensor([3, 1, 2, 7, 5, 6, 4], device=DEVICE)
    settings = SamplingRows(floats[rows, 0], floats[rows, 1], ints[rows, 5], ints[rows, 1] + 1 - ints[rows, 2])
    drawn = None
    if truncated:
        drawn = logits / settings.temperature_S[:, None]
        drawn = drawn.masked_fill(drawn < drawn.topk(5).values[:, -1:], -torch.inf)
    expected = sample(logits if drawn is None else drawn * settings.temperature_S[:, None], settings)
    output = torch.full((4, count + 2), -1, dtype=torch.int32, device=DEVICE)
    before = ints.clone()
    draw_and_advance(logits, drawn, rows, ints, floats, output, COLUMNS)
    assert output[0, :count].tolist() == expected.tokens_S.tolist()
    floats_out = output[1:, :count].view(torch.float32)
    plain = sample(logits, settings)
    if not truncated:
        assert torch.allclose(floats_out[0], plain.logprobs_S, atol=2e-5)
        assert torch.allclose(floats_out[1], plain.raw_logprobs_S, atol=2e-5)
    assert torch.allclose(floats_out[2], expected.drawn_logprobs_S, atol=2e-5)
    assert (output[:, count:] == -1).all()
    assert ints[rows, 0].tolist() == expected.tokens_S.tolist()
    assert (ints[rows, 1] == before[rows, 1] + 1).all()
    assert torch.equal(ints[:, 2:], before[:, 2:]) and torch.equal(ints[0], before[0])


def test_the_noise_is_the_twins():
    """With flat logits only the noise decides the draw."""
    vocab, count = 4099, 5
    logits = torch.zeros(count, vocab, device=DEVICE)
    ints, floats = row_state(count, vocab)
    floats[:, :2] = 1.0
    rows = torch.arange(1, count + 1, device=DEVICE)
    output = torch.zeros(4, count, dtype=torch.int32, device=DEVICE)
    noise = gumbel_noise(ints[rows, 5], ints[rows, 1] + 1 - ints[rows, 2], vocab)
    draw_and_advance(logits, None, rows, ints, floats, output, COLUMNS)
    assert output[0].tolist() == noise.argmax(1).tolist()


def test_padding_rows_are_left_alone():
    logits = torch.randn(3, 64, device=DEVICE)
    ints, floats = row_state(2, 64)
    before = ints.clone()
    output = torch.zeros(4, 3, dtype=torch.int32, device=DEVICE)
    draw_and_advance(logits, None, torch.tensor([1, 0, 0], device=DEVICE), ints, floats, output, COLUMNS)
    assert torch.equal(ints[[0, 2]], before[[0, 2]]) and ints[1, 1] == before[1, 1] + 1


def test_a_logit_that_is_nan_shows_in_the_log_probs():
    logits = torch.randn(2, 3000, device=DEVICE)
    logits[1, 2500] = float("nan")
    ints, floats = row_state(2, 3000)
    output = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    draw_and_advance(logits, None, torch.tensor([1, 2], device=DEVICE), ints, floats, output, COLUMNS)
    assert output[1:, 0].view(torch.float32).isfinite().all() and output[1:3, 1].view(torch.float32).isnan().all()
    assert output[0, 1] != 2500


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_all_three_log_probs_agree_where_nothing_is_reshaped(temperature):
    logits = torch.randn(4, 4100, device=DEVICE) * 4
    ints, floats = row_state(4, 4100)
    floats[:, 0], floats[:, 1] = temperature, 1.0
    rows, output = torch.arange(1, 5, device=DEVICE), torch.zeros(4, 4, dtype=torch.int32, device=DEVICE)
    draw_and_advance(logits, None, rows, ints, floats, output, COLUMNS)
    got, tokens = output[1:].view(torch.float32), output[0].long()
    exact = [torch.log_softmax(logits.double() / t, 1).gather(1, tokens[:, None])[:, 0] for t in (temperature, 1.0)]
    assert torch.allclose(got[0].double(), exact[0], atol=2e-5) and torch.allclose(got[1].double(), exact[1], atol=2e-5)
    assert torch.equal(got[0], got[2])
