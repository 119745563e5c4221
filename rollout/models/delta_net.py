"""The gated DeltaNet block: a mixer that keeps one state a row instead of KV.

    x --one product--> q k v | z | b a      q k v --short convolution, SiLU--> the delta rule with b, a --> o
                                            o --norm of each head, gated by z--> output product

Legend: T tokens, H hidden, N outputs of the input product, C channels of the convolution, W its width.
"""

import torch
from rollout_kernels.delta import DraftInputs, Spans, gated_delta, gated_norm, short_conv

from rollout.models.batch import AttentionBatch
from rollout.models.cut import Cut, CutView
from rollout.models.layers import Block, Build, LastProduct, Linear, RMSNorm, StepContext
from rollout.models.names import Region, one_name
from rollout.models.spec import DeltaNetSpec
from rollout.models.state_pool import LayerState, StatePool


class StateBlock(Block):
    """A mixer over the state pool: one product makes all its inputs from a token, and another one its output.

    `state_index` counts the layers that have states.
    """

    layer: int
    state_index: int
    in_proj: Linear
    conv_weight: torch.Tensor
    o_proj: Linear

    def forward(self, x_TH: torch.Tensor, context: StepContext) -> LastProduct:
        """The block's output for the normalised `x_TH`; advances the states of the step's rows."""
        inputs_TN, adapters = self.in_proj(x_TH), context.batch.adapters
        if adapters is not None:
            adapters.add(self.layer, "in", inputs_TN, x_TH)
        return LastProduct(self.o_proj, self.mix(inputs_TN, context), adapters, self.layer, "o")

    def mix(self, inputs_TN: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Compute the input of the output product from the first product; advances the states."""
        raise NotImplementedError

    def states_of(self, context: StepContext, one_by_one: bool = False) -> tuple[LayerState, Spans, DraftInputs | None]:
        """The states of this layer, the step's spans, and the writer of its drafts, if any."""
        states, spans = context.kv.states, step_spans(context.batch, one_by_one)
        assert isinstance(states, StatePool)
        kept = None if spans.behind_B is None else states.drafts_of(self.state_index)
        return states.layers[self.state_index], spans, kept

    def scale_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """None, since its products are never coded."""
        return {}


class DeltaNet(StateBlock):
    """Linear attention over the state pool."""

    def __init__(self, spec: DeltaNetSpec, layer: int, state_index: int, build: Build) -> None:
        super().__init__()
        self.spec, self.layer, self.state_index = spec, layer, state_index
        self.in_proj = Linear(spec.inputs, build)
        self.conv_weight = build.empty(spec.mixed, spec.conv)
        # The decay is an exponential of both parameters; 16 bits would cost long contexts their precision.
        self.a_log = build.empty(spec.value_heads, dtype=torch.float32)
        self.dt_bias = build.empty(spec.value_heads, dtype=torch.float32)
        self.norm = RMSNorm(spec.value_dim, spec.eps, build)
        self.o_proj = Linear(spec.out, build)

    def mix(self, inputs_TN: torch.Tensor, context: StepContext, one_by_one: bool = False) -> torch.Tensor:
        """The input of the output product, [T, H V]; advances the states. For `one_by_one` see `Spans`."""
        spec = self.spec
        # On a GPU chunks are products of tf32, which float32 is asked for to avoid.
        exact = inputs_TN.is_cuda and inputs_TN.dtype == torch.float32
        state, spans, kept = self.states_of(context, one_by_one or exact)
        mixed_TC, z_TV, b_TH, a_TH = self._split(inputs_TN)
        mixed_TC = short_conv(mixed_TC, self.conv_weight, state.conv_NCW, spans, kept=kept)
        gates = b_TH, a_TH, self.a_log, self.dt_bias
        out_THV = gated_delta(mixed_TC, *gates, state.recurrent_NHKV, spans, spec.beta_scale, kept)
        return gated_norm(out_THV, z_TV.unflatten(1, (-1, spec.value_dim)), self.norm.weight, spec.eps)

    def _split(self, all_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values side by side; z; b; a."""
        spec = self.spec
        q, k, v, z, b, a = spec.input_widths
        if not spec.interleaved:
            mixed_TC, z_TV, b_TH, a_TH = all_TN.split((q + k + v, z, b, a), dim=1)
            return mixed_TC, z_TV, b_TH, a_TH
        groups = spec.key_heads
        qkvz_TGX, ba_TGX = (part.unflatten(1, (groups, -1)) for part in all_TN.split((q + k + v + z, b + a), dim=1))
        *qkv, z_TGV = qkvz_TGX.split([width // groups for width in (q, k, v, z)], dim=2)
        b_TGH, a_TGH = ba_TGX.chunk(2, dim=2)
        mixed_TC = torch.cat([part.flatten(1) for part in qkv], dim=1)
        return mixed_TC, z_TGV.flatten(1), b_TGH.flatten(1), a_TGH.flatten(1)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        names = self.spec.names
        widths = self.spec.input_widths[:3]
        return [
            *self.in_proj.regions(prefix),
            conv_regions(prefix, names.conv, self.conv_weight.data, widths, self.spec.conv_cuts),
            one_name(f"{prefix}{names.a_log}", self.a_log, self.spec.head_cut),
            one_name(f"{prefix}{names.dt_bias}", self.dt_bias, self.spec.head_cut),
            one_name(f"{prefix}{names.norm}.weight", self.norm.weight),
            *self.o_proj.regions(prefix),
        ]


def conv_regions(
    prefix: str,
    names: tuple[tuple[str, ...], ...],
    weight_CW: torch.Tensor,
    widths: tuple[int, ...],
    cuts: tuple[Cut | None, ...],
) -> Region:
    """A convolution over queries, keys and values, which may be one tensor or three; for `cuts` see `conv_cuts`."""
    conv_C1W = weight_CW[:, None]
    joined, *each = cuts
    convs = {1: [(conv_C1W, joined)], 3: list(zip(conv_C1W.split(widths), each, strict=True))}
    alternatives = (
        {
            f"{prefix}{name}.weight": CutView.of(view, cut)
            for name, (view, cut) in zip(modules, convs[len(modules)], strict=True)
        }
        for modules in names
    )
    return Region(tuple(alternatives))


def step_spans(batch: AttentionBatch, one_by_one: bool = False) -> Spans:
    """The rows of a step as the kernels take them; made once a step."""

    def make() -> Spans:
        places_B = batch.rows_B
        assert places_B is not None, "a step of a model with states names the places of its rows"
        lengths, starts_B1 = None, batch.query_starts_C1
        if batch.chunks is not None:
            lengths = tuple(chunk.query_len for chunk in batch.chunks)
        elif one_by_one:
            lengths = (1,) * len(places_B)
            starts_B1 = torch.arange(len(places_B) + 1, dtype=torch.int32, device=places_B.device)
        return Spans(places_B, batch.positions_T, lengths, starts_B1, one_by_one, batch.behind_B)

    return batch.shared(("spans of states", one_by_one), make)
