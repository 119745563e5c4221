"""Decode steps with drafts: outputs and states are those of plain steps with one token each, whatever is accepted."""

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from rollout_kernels import delta
from rollout_kernels.delta import DraftInputs, Rule, Spans, triton_conv, triton_drafts, triton_rule, triton_states
from rollout_kernels.delta.rule import gates_of, heads_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 20, 40
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
LAYERS, ROWS, FIRST, DRAFTS = 2, 6, 9, 8  # rows have the places 1 to 6, draft rows the numbers from 9
NAN = float("nan")

#: Width of the convolution, dtype, scale of beta; the rule.
SIZES: list[tuple[int, torch.dtype, float, Rule]] = [
    (4, torch.float32, 1.0, "gated"),
    (2, torch.bfloat16, 2.0, "gated"),
    (4, torch.float32, 1.0, "channels"),
    (3, torch.bfloat16, 1.0, "plain"),
]
#: Floats that a step keeps of a draft, by rule: of keys and values, of gates.
KEPT = {
    "gated": (CHANNELS, 2 * HEADS),
    "channels": (HEADS * (KEY_DIM + VALUE_DIM), HEADS * (1 + KEY_DIM)),
    "plain": (HEADS * (KEY_DIM + VALUE_DIM), HEADS),
}
#: The rows of a step with their drafts, and how many of these are accepted. Row 0 is padding.
STEPS: dict[str, list[tuple[int, int, int]]] = {
    "some": [(3, 2, 1), (1, 0, 0), (5, 3, 3), (2, 1, 0), (0, 0, 0), (0, 0, 0)],
    "one row": [(4, 7, 7)],
    "none accepted": [(1, 3, 0), (2, 3, 0)],
}


class Operations(NamedTuple):
    """The twins, or the kernels."""

    conv: Any
    rule: Any
    ready_rule: Any
    catch_up: Any


def ready_twin(tokens: Any, state: torch.Tensor, spans: Spans, kept: DraftInputs | None) -> torch.Tensor:
    return delta.state_rule(tokens, state, spans._replace(lengths=None, one_by_one=False), one_chunk=None, kept=kept)


KINDS = {
    "twin": Operations(*(delta.short_conv, delta.gated_delta, ready_twin, delta.catch_up)),
    "kernel": Operations(
        triton_conv.short_conv,
        triton_rule.gated_delta,
        triton_states.decode_states,
        triton_drafts.catch_up,
    ),
}


class Layers:
    """Weights, states and what is kept of drafts, of `LAYERS` layers."""

    def __init__(self, width: int, dtype: torch.dtype, device: str, beta_scale: float, rule: Rule) -> None:
        self.bias = torch.randn(LAYERS, CHANNELS).to(device, dtype) if rule == "plain" else [None] * LAYERS
        self.weight = torch.randn(LAYERS, CHANNELS, width).to(device, dtype)
        self.a_log, self.dt_bias = torch.randn(LAYERS, HEADS).to(device), torch.randn(LAYERS, HEADS).to(device)
        self.state = torch.randn(LAYERS, ROWS + 1, HEADS, KEY_DIM, VALUE_DIM).to(device)
        self.conv = torch.randn(LAYERS, ROWS + 1, CHANNELS, width - 1).to(device, dtype)
        self.kept = DraftInputs(
            torch.full((LAYERS, DRAFTS, CHANNELS), NAN, dtype=dtype, device=device),
            torch.full(
                (LAYERS, DRAFTS, KEPT[rule][0]), NAN, dtype=dtype if rule == "gated" else torch.float32, device=device
            ),
            torch.full((LAYERS, DRAFTS, KEPT[rule][1]), NAN, device=device),
            FIRST,
            rule,
        )
        self.beta_scale = beta_scale

    def step(self, of: Operations, tokens: Any, spans: Spans) -> torch.Tensor:
        """The outputs of all layers, [L, T, H, V]; the states advance."""
        outputs = []
        for layer, (x, b, a) in enumerate(tokens):
            kept = None if spans.behind_B is None else self.kept.of_layer(layer)
            mixed = of.conv(x, self.weight[layer], self.conv[layer], spans, self.bias[layer], kept)
            gates = b, a, self.a_log[layer], self.dt_bias[layer]
            if self.kept.rule == "gated":
                outputs.append(of.rule(mixed, *gates, self.state[layer], spans, self.beta_scale, kept))
            else:
                tokens = self._ready(mixed, *gates)
                outputs.append(of.ready_rule(tokens, self.state[layer], spans, kept))
        return torch.stack(outputs)

    def _ready(self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *gates: torch.Tensor) -> Any:
        """What the other rules take of tokens: some numbers."""
        q, k, v = heads_of(mixed, self.state[0])
        g, beta = gates_of(b, a, *gates, self.beta_scale)
        if self.kept.rule == "plain":
            return q, k, v, g
        return q, k, v, g * torch.linspace(0.5, 2.0, KEY_DIM, device=g.device), beta


def one_by_one_spans(places: torch.Tensor, positions: torch.Tensor, one_by_one: bool) -> Spans:
    if not one_by_one:
        return Spans(places, positions)
    starts = torch.arange(len(places) + 1, dtype=torch.int32, device=places.device)
    return Spans(places, positions, (1,) * len(places), starts, True)


#: In the interpreter, "some" meets every kernel: by one path with each of the sizes. Of its rows all drafts
#: are accepted, some, or none.
USUAL = {("some", True, torch.float32, "gated"), ("some", False, torch.bfloat16, "gated")} | {
    ("some", False, dtype, rule) for _, dtype, _, rule in SIZES[2:]
}


def _cases() -> list[Any]:
    """The whole grid; those that only the nightly run has are marked."""
    cases = []
    for kind, one_by_one, step, sizes in product(KINDS, [True, False], STEPS, SIZES):
        if one_by_one and sizes[3] != "gated":  # a rule with one way
            continue
        always = kind == "twin" or DEVICE == "cuda" or (step, one_by_one, sizes[1], sizes[3]) in USUAL
        cases.append(pytest.param(kind, one_by_one, step, *sizes, marks=() if always else pytest.mark.nightly))
    return cases


@pytest.mark.parametrize(("kind", "one_by_one", "step", "width", "dtype", "beta_scale", "rule"), _cases())
def test_a_step_with_drafts_is_as_many_plain_steps(kind, one_by_one, step, width, dtype, beta_scale, rule) -> None:
    of, device = KINDS[kind], DEVICE if kind == "kernel" else "cpu"
    # A step's tiles depend on its size, except one by one; torch makes the decays of the other rules.
    exact = kind == "kernel" and (one_by_one or DEVICE == "cpu") and rule == "gated"
    rows = STEPS[step]
    mine, plain = (_layers(width, dtype, device, beta_scale, rule) for _ in range(2))
    before = mine.state.clone()
    # The step: each row, then its drafts. A row of the first step is at position 0, where no state is read.
    places, behind, positions, verified, accepted, draft = [], [], [], [], [], FIRST
    for row, drafts, takes in rows:
        if drafts:
            verified.append((row, len(places), drafts, 0))
        accepted += [takes] + [77] * drafts
        positions += range(row - 1, row + drafts) if row else [0]
        places += [row, *range(draft, draft + drafts)]
        behind += [drafts] + [-1] * drafts
        draft += drafts
    count = len(places)
    wide = torch.randn(LAYERS, count, CHANNELS + 2 * HEADS).to(device, dtype)
    tokens = [part.split((CHANNELS, HEADS, HEADS), dim=1) for part in wide]
    places_B, positions_B = torch.tensor(places, device=device), torch.tensor(positions, device=device)
    spans = one_by_one_spans(places_B, positions_B, one_by_one)
    spans = spans._replace(behind_B=torch.tensor(behind, dtype=torch.int32, device=device))
    outputs = mine.step(of, tokens, spans)
    after_token = mine.state.clone()
    if verified:
        accepted_S = torch.tensor(accepted, dtype=torch.int32, device=device)
        verified_M4 = torch.tensor(verified, device=device)
        of.catch_up(mine.state, mine.conv, mine.kept, verified_M4, places_B, accepted_S, one_by_one)

    expected, at = torch.empty_like(outputs), 0
    for row, drafts, takes in rows:
        if row:
            for i in range(1 + drafts):
                place_1, position_1 = (torch.tensor([value], device=device) for value in (row, row - 1 + i))
                here = [tuple(part[at + i : at + i + 1] for part in layer) for layer in tokens]
                one = one_by_one_spans(place_1, position_1, one_by_one)
                expected[:, at + i : at + i + 1] = plain.step(of, here, one)
                if i == 0:
                    same(after_token[:, row], plain.state[:, row], exact)
                if i == takes:
                    same(mine.state[:, row], plain.state[:, row], exact)
                    same(mine.conv[:, row], plain.conv[:, row], exact)
        else:
            expected[:, at : at + 1 + drafts] = outputs[:, at : at + 1 + drafts]
        at += 1 + drafts
    same(outputs, expected, exact)
    others = [row for row in range(1, ROWS + 1) if row not in {row for row, *_ in rows}]
    assert torch.equal(mine.state[:, others], before[:, others]), "states of other rows stay"


def _layers(width: int, dtype: torch.dtype, device: str, *of_rule: Any) -> Layers:
    torch.manual_seed(1)
    layers = Layers(width, dtype, device, *of_rule)
    torch.manual_seed(2)
    return layers


def same(got: torch.Tensor, expected: torch.Tensor, exact: bool) -> None:
    """Equal bits, or nearly: torch's exponential on a CPU depends on a value's place in the tensor."""
    if exact:
        assert torch.equal(got, expected), (got.float() - expected.float()).abs().max()
    else:
        torch.testing.assert_close(got, expected, rtol=1e-5 if got.dtype == torch.float32 else 1e-2, atol=1e-5)
