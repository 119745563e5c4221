"""The torch twins of router and experts against a loop over tokens."""

import pytest
import torch
from rollout_kernels import moe_experts, route


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_takes_the_likeliest_experts(renormalize: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 3.5]])
    weights, experts = route(logits, 2, renormalize)
    assert experts.tolist() == [[1, 2], [3, 0]]
    expected = torch.softmax(logits, -1).gather(1, experts)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)
    assert weights.dtype == torch.float32


def test_router_takes_the_lower_index_of_equal_experts() -> None:
    assert route(torch.zeros(2, 64), 3, True)[1].tolist() == [[0, 1, 2]] * 2
    assert route(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), 3, True)[1].tolist() == [[1, 3, 0]]


def test_router_weighs_in_float32() -> None:
    logits = torch.randn(4, 8).bfloat16()
    assert torch.equal(route(logits, 2, False)[0], route(logits.float(), 2, False)[0])


def test_experts_follow_a_loop_over_tokens() -> None:
    tokens, experts, top_k, hidden, inner = 9, 5, 2, 6, 4
    x, gate_up = torch.randn(tokens, hidden), torch.randn(experts, 2 * inner, hidden)
    down, weights = torch.randn(experts, hidden, inner), torch.rand(tokens, top_k)
    chosen = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(tokens)])  # the last is never chosen
    gate_up[-1], down[-1] = float("nan"), float("nan")
    out = moe_experts(x, weights, chosen, gate_up, down)
    for token in range(tokens):
        expected = torch.zeros(hidden)
        for slot, expert in enumerate(chosen[token].tolist()):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected += weights[token, slot] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(out[token], expected, rtol=1e-4, atol=1e-4)
