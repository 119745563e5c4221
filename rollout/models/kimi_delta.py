"""Kimi delta attention: gated DeltaNet in which each channel of a key decays on its own.

    x --one product--> q k v | b | two latents       q k v --short convolution, SiLU--> the delta rule --> o
    latents --products--> decays of channels g, output gates z     o --norm of each head--> times sigmoid(z) --> product

Without latents the first product makes g and z.

The rule is in `rollout_kernels.delta.states`, with a decay for each channel. Source: arXiv 2510.26692, section 3.

Legend: T tokens, B rows, H heads, K and V dimensions of a key and a value, N places, I tokens of a chunk, C channels of
the convolution, W its width.
"""

import torch
import torch.nn.functional as F
from rollout_kernels.delta import short_conv, state_rule
from rollout_kernels.delta.rule import heads_of
from rollout_kernels.norm_rope.elementwise import rms_norm

from rollout.models.delta_net import StateBlock, conv_regions
from rollout.models.layers import Build, Linear, RMSNorm, StepContext
from rollout.models.names import Region, one_name
from rollout.models.spec import KimiDeltaSpec

#: Tokens of a row that a prefill computes at once: their decays relative to each other are in memory.
_CHUNK = 32


class KimiDelta(StateBlock):
    """Linear attention over the state pool."""

    def __init__(self, spec: KimiDeltaSpec, layer: int, state_index: int, build: Build) -> None:
        super().__init__()
        self.spec, self.layer, self.state_index = spec, layer, state_index
        self.in_proj = Linear(spec.inputs, build)
        self.decay_proj = None if spec.decay is None else Linear(spec.decay, build)
        self.gate_proj = None if spec.gate is None else Linear(spec.gate, build)
        self.conv_weight = build.empty(spec.mixed, spec.conv)
        # The decay is an exponential of both parameters; 16 bits would cost long contexts their precision.
        self.a_log = build.empty(spec.value_heads, dtype=torch.float32)
        self.dt_bias = build.empty(spec.value_heads * spec.key_dim, dtype=torch.float32)
        self.norm = RMSNorm(spec.value_dim, spec.eps, build)
        self.o_proj = Linear(spec.out, build)

    def mix(self, inputs_TN: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The input of the output product; advances the states."""
        spec, (state, spans, kept) = self.spec, self.states_of(context)
        mixed_TC, b_TH, decay_TX, gate_TX = inputs_TN.split((spec.mixed, *spec.inputs.widths[3:]), dim=1)
        if self.decay_proj is not None and self.gate_proj is not None:
            decay_TX, gate_TX = self.decay_proj(decay_TX), self.gate_proj(gate_TX)
        mixed_TC = short_conv(mixed_TC.contiguous(), self.conv_weight, state.conv_NCW, spans, kept=kept)
        g_THK = (decay_TX.float() + self.dt_bias).unflatten(1, (spec.value_heads, -1))
        rate_H1 = self.a_log.exp()[:, None]
        if spec.bound is None:
            g_THK = -rate_H1 * F.softplus(g_THK)
        else:
            g_THK = spec.bound * torch.sigmoid(rate_H1 * g_THK)
        tokens = *heads_of(mixed_TC, state.recurrent_NHKV), g_THK, b_TH.float().sigmoid()
        out_THV = state_rule(tokens, state.recurrent_NHKV, spans, _one_chunk, kept, _CHUNK)
        normed_THV = rms_norm(out_THV, self.norm.weight.float(), spec.eps)
        gate_THV = gate_TX.float().unflatten(1, (spec.value_heads, -1))
        return (normed_THV * gate_THV.sigmoid()).to(inputs_TN.dtype).flatten(1)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        spec, names = self.spec, self.spec.names
        latents = [proj for proj in (self.decay_proj, self.gate_proj) if proj is not None]
        a_log, heads = self.a_log.data, spec.head_cut
        if latents:  # models with them have it as [1, 1, heads, 1]
            a_log, heads = a_log[None, None, :, None], None if heads is None else heads.at(2)
        return [
            *self.in_proj.regions(prefix),
            *(region for proj in latents for region in proj.regions(prefix)),
            conv_regions(prefix, names.conv, self.conv_weight.data, (spec.width,) * 3, spec.conv_cuts),
            one_name(f"{prefix}{names.a_log}", a_log, heads),
            one_name(f"{prefix}{names.dt_bias}", self.dt_bias, spec.width_cut),
            one_name(f"{prefix}{names.norm}.weight", self.norm.weight),
            *self.o_proj.regions(prefix),
        ]


def _one_chunk(
    state_HKV: torch.Tensor,
    q_IHK: torch.Tensor,
    k_IHK: torch.Tensor,
    v_IHV: torch.Tensor,
    g_IHK: torch.Tensor,
    beta_IH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The equations of `rollout_kernels.delta.rule`."""
    q_HIK, k_HIK, v_HIV = (x.transpose(0, 1) for x in (q_IHK, k_IHK, v_IHV))
    beta_HI1, d_HIK = beta_IH.t()[..., None], g_IHK.transpose(0, 1).cumsum(1)
    size = d_HIK.shape[1]
    later_II1 = torch.ones(size, size, dtype=torch.bool, device=d_HIK.device).triu(1)[..., None]
    decay_HIIK = (d_HIK[:, :, None] - d_HIK[:, None]).masked_fill(later_II1, float("-inf")).exp()
    keys_HIIK = decay_HIIK * k_HIK[:, None]
    since_HIK = d_HIK.exp()
    system_HII = beta_HI1 * torch.matmul(keys_HIIK, k_HIK[..., None])[..., 0]  # its diagonal is taken as 1
    right_HIV = beta_HI1 * (v_HIV - (since_HIK * k_HIK) @ state_HKV)
    u_HIV = torch.linalg.solve_triangular(system_HII, right_HIV, upper=False, unitriangular=True)
    out_HIV = (since_HIK * q_HIK) @ state_HKV + torch.matmul(keys_HIIK, q_HIK[..., None])[..., 0] @ u_HIV
    state_HKV = since_HIK[:, -1, :, None] * state_HKV + keys_HIIK[:, -1].mT @ u_HIV
    return out_HIV.transpose(0, 1), state_HKV
