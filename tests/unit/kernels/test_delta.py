"""Gated DeltaNet: twins and kernels against the recurrence in float64, token by token."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from rollout_kernels import delta
from rollout_kernels.delta import Spans, triton_conv, triton_rule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACES = 5
NAN = float("nan")
#: The interpreter computes in float32; on a GPU some products are tf32.
RULE_ERROR = 2e-5 if DEVICE == "cpu" else 2e-3


class Sizes(NamedTuple):
    """Of a block."""

    heads: int = 4
    key_heads: int = 2
    key_dim: int = 20
    value_dim: int = 24
    width: int = 4


#: Tokens of each row of a step, and the position of its first one. A decode step has one of each.
STEPS: dict[str, tuple[list[int] | None, list[int]]] = {
    "decode": (None, [7, 0, 130]),
    "prefill": ([70, 1, 3], [0, 9, 2]),
    "whole chunks": ([128, 64], [64, 0]),
    "one by one": ([5, 1, 2], [0, 9, 2]),
}
RULES: Any = {"twin": delta.gated_delta, "kernel": triton_rule.gated_delta}
CONVS: Any = {"twin": delta.short_conv, "kernel": triton_conv.short_conv}


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device, copy=True) for tensor in tensors]


def spans_of(step: str, device: str) -> tuple[Spans, list[tuple[int, int, int]]]:
    """The spans of a step, and (place, first token, tokens) of each of its rows."""
    lengths, first = STEPS[step]
    each = lengths or [1] * len(first)
    starts = [sum(each[:row]) for row in range(len(each) + 1)]
    places = [3, 1, 4][: len(each)]
    positions = torch.cat([torch.arange(at, at + length) for at, length in zip(first, each, strict=True)])
    tensors = on(device, torch.tensor(places), positions, torch.tensor(starts, dtype=torch.int32))
    lengths = None if lengths is None else tuple(lengths)
    spans = Spans(tensors[0], tensors[1], lengths, tensors[2], one_by_one=step == "one by one")
    return spans, list(zip(places, starts, each, strict=False))


def exact_rule(mixed, b, a, a_log, dt_bias, state, rows, fresh, beta_scale):
    """One token after the other, in float64."""
    mixed, b, a, a_log, dt_bias = (x.double() for x in (mixed, b, a, a_log, dt_bias))
    state, out = state.double(), []
    _, heads, key_dim, value_dim = state.shape
    keys = (mixed.shape[1] - heads * value_dim) // 2
    for place, start, length in rows:
        s = torch.zeros_like(state[place]) if fresh[start] else state[place]
        for t in range(start, start + length):
            q, k, v = mixed[t].split((keys, keys, heads * value_dim))
            q, k = (x.view(-1, key_dim).repeat_interleave(heads * key_dim // keys, 0) for x in (q, k))
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            decay, beta = (-a_log.exp() * F.softplus(a[t] + dt_bias)).exp(), beta_scale * b[t].sigmoid()
            s = s * decay[:, None, None]
            u = beta[:, None] * (v.view(heads, -1) - torch.einsum("hk,hkv->hv", k, s))
            s = s + k[:, :, None] * u[:, None]
            out.append(torch.einsum("hk,hkv->hv", q, s) * key_dim**-0.5)
        state[place] = s
    return torch.stack(out), state


def rule_inputs(sizes: Sizes, tokens: int, keys: str, dtype: torch.dtype = torch.float32):
    heads, key_heads, key_dim, value_dim, _ = sizes
    mixed = torch.randn(tokens, 2 * key_heads * key_dim + heads * value_dim)
    a, a_log = torch.randn(tokens, heads), torch.linspace(-3, 2, heads)
    if keys == "equal":  # and no decay: the powers of the triangular system would be as large as they get
        mixed[:, key_heads * key_dim : 2 * key_heads * key_dim] = 1.0
        a_log = torch.full((heads,), -20.0)
    b = torch.randn(tokens, 2 * heads)[:, heads:]  # a part of a wider product
    state = torch.randn(PLACES, heads, key_dim, value_dim)
    return mixed.to(dtype), b.to(dtype), a.to(dtype), a_log, torch.randn(heads), state


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.cpu().double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("keys", "beta_scale"), [("random", 2.0), ("equal", 1.0)])
def test_the_rule_is_the_recurrence(rule: str, step: str, keys: str, beta_scale: float) -> None:
    sizes = Sizes() if step != "whole chunks" else Sizes(heads=2, key_heads=1, key_dim=16, value_dim=40)
    device = DEVICE if rule == "kernel" else "cpu"
    spans, rows = spans_of(step, device)
    *inputs, state = rule_inputs(sizes, len(spans.positions_T), keys)
    fresh = (spans.positions_T == 0).cpu()
    exact, exact_state = exact_rule(*inputs, state, rows, fresh, beta_scale)
    for place, start, _ in rows:
        if fresh[start]:
            state[place] = NAN  # at position 0 no state is read
    *got_inputs, got_state = on(device, *inputs, state)
    got_inputs[1] = torch.cat((got_inputs[1], got_inputs[1]), 1)[:, sizes.heads :]
    got = RULES[rule](*got_inputs, got_state, spans, beta_scale)
    used = [place for place, *_ in rows]
    assert error(got, exact) < RULE_ERROR and error(got_state[used], exact_state[used]) < RULE_ERROR
    others = [place for place in range(PLACES) if place not in used]
    assert torch.equal(got_state.cpu()[others], state[others]), "states of other rows stay"


def exact_conv(x, weight, state, rows, fresh, bias):
    x, weight, state, out = x.double(), weight.double(), state.double(), []
    width = weight.shape[1]
    for place, start, length in rows:
        past = torch.zeros_like(state[place]) if fresh[start] else state[place]
        seen = torch.cat((past, x[start : start + length].t()), 1)
        out += [F.silu((seen[:, t : t + width] * weight).sum(1) + bias.double()) for t in range(length)]
        state[place] = seen[:, -(width - 1) :]
    return torch.stack(out), state


@pytest.mark.parametrize("conv", CONVS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("width", "biased"), [(2, False), (4, False), (4, True)])
def test_the_convolution_goes_on_from_the_inputs_before(conv: str, step: str, width: int, biased: bool) -> None:
    device = DEVICE if conv == "kernel" else "cpu"
    spans, rows = spans_of(step, device)
    wide = torch.randn(len(spans.positions_T), 90)
    x, weight, state = wide[:, :70], torch.randn(70, width), torch.randn(PLACES, 70, width - 1)
    fresh = (spans.positions_T == 0).cpu()
    bias = torch.randn(70) if biased else torch.zeros(70)
    exact, exact_state = exact_conv(x, weight, state, rows, fresh, bias)
    for place, start, _ in rows:
        if fresh[start]:
            state[place] = NAN
    got_wide, got_weight, got_state, got_bias = on(device, wide, weight, state, bias)
    got = CONVS[conv](got_wide[:, :70], got_weight, got_state, spans, got_bias if biased else None)
    used = [place for place, *_ in rows]
    assert error(got, exact) < 1e-6 and error(got_state[used], exact_state[used]) < 1e-6
    others = [place for place in range(PLACES) if place not in used]
    assert torch.equal(got_state.cpu()[others], state[others])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_one_by_one_bits_do_not_depend_on_the_step(rule: str, one_by_one: bool) -> None:
    """A row of 7 tokens, alone in steps of these sizes or beside others. Chunks give other bits."""
    sizes = Sizes(heads=2, key_heads=1, key_dim=16, value_dim=16)
    device = DEVICE if rule == "kernel" else "cpu"
    mixed, b, a, a_log, dt_bias, state = on(device, *rule_inputs(sizes, 7 + 3, "random"))
    weight, past = torch.randn(mixed.shape[1], 4, device=device), torch.randn(PLACES, mixed.shape[1], 3, device=device)
    found = []
    for steps, beside in (((7,), 0), ((1,) * 7, 0), ((3, 1, 3), 2), ((2, 5), 3)):
        own_state, own_past, out, first = state.clone(), past.clone(), [], 0
        for length in steps:
            lengths = (*([1] * beside), length)
            tokens = [*range(7, 7 + beside), *range(first, first + length)]
            places = torch.tensor([*range(2, 2 + beside), 1], device=device)
            positions = torch.tensor([3] * beside + list(range(first, first + length)), device=device)
            starts = torch.tensor([*range(beside + 1), beside + length], dtype=torch.int32, device=device)
            spans = Spans(places, positions, lengths, starts, one_by_one)
            convolved = CONVS[rule](mixed[tokens], weight, own_past, spans)
            out.append(RULES[rule](convolved, b[tokens], a[tokens], a_log, dt_bias, own_state, spans)[beside:])
            first += length
        found.append((torch.cat(out), own_state[1], own_past[1]))
    equal = [all(map(torch.equal, found[0], other)) for other in found[1:]]
    assert all(equal) == one_by_one


@pytest.mark.parametrize("norm", [delta.gated_norm, triton_rule.gated_norm], ids=["twin", "kernel"])
def test_the_gated_norm_is_that_of_each_head(norm: Any) -> None:
    out, wide, weight = on(DEVICE, torch.randn(5, 3, 20), torch.randn(5, 100), torch.randn(20))
    z = wide[:, 20:80].unflatten(1, (3, 20))
    got = norm(out, z, weight, 1e-3)
    x = out.double()
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double() * F.silu(z.double())
    assert error(got, exact.flatten(1).cpu()) < 1e-6


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_kernels_round_16_bits_as_their_twins(step: str) -> None:
    sizes = Sizes(heads=2, key_heads=2, key_dim=16, value_dim=16)
    spans, rows = spans_of(step, DEVICE)
    twin_spans, _ = spans_of(step, "cpu")
    *inputs, state = rule_inputs(sizes, len(spans.positions_T), "random", torch.bfloat16)
    twin_state, (*got_inputs, got_state) = state.clone(), on(DEVICE, *inputs, state)
    twin, got = (
        delta.gated_delta(*inputs, twin_state, twin_spans),
        triton_rule.gated_delta(*got_inputs, got_state, spans),
    )
    assert got.dtype == torch.bfloat16 and error(got, twin.double()) < 3e-3
    x, weight = inputs[0], torch.randn(inputs[0].shape[1], 4).bfloat16()
    past = torch.randn(PLACES, inputs[0].shape[1], 3).bfloat16()
    twin_past, (got_x, got_weight, got_past) = past.clone(), on(DEVICE, x, weight, past)
    twin = delta.short_conv(x, weight, twin_past, twin_spans)
    got = triton_conv.short_conv(got_x, got_weight, got_past, spans)
    assert error(got, twin.double()) < 3e-3 and torch.equal(got_past.cpu(), twin_past)
