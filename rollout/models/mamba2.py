"""Mamba-2: a mixer whose state decays and takes up each token, and is read by it.

    x --one product--> output gates z | x, B, C | steps dt     x, B, C --short convolution, SiLU
    S <- exp(dt A) S + B (dt x)        A = -exp(a_log)         dt = softplus(dt + dt_bias), within bounds
    o  = C S + D x                     o times silu(z) --norm of each group--> output product

It is the rule of `rollout_kernels.delta.states` without beta: B are keys, C queries, dt x values. Source: arXiv
2405.21060, section 7.

Legend: T tokens, H heads, G groups, K dimensions of a state, V of a head, I tokens of a chunk, C channels of the
convolution, W its width.
"""

import torch
import torch.nn.functional as F
from rollout_kernels.delta import short_conv, state_rule
from rollout_kernels.delta.rule import decays_between, end_of_chunk

from rollout.models.cut import CutView
from rollout.models.delta_net import StateBlock
from rollout.models.layers import Build, Linear, RMSNorm, StepContext
from rollout.models.names import Region, one_name
from rollout.models.spec import Mamba2Spec


class Mamba2(StateBlock):
    """A state for each head over the state pool."""

    def __init__(self, spec: Mamba2Spec, layer: int, state_index: int, build: Build) -> None:
        super().__init__()
        self.spec, self.layer, self.state_index, self.group = spec, layer, state_index, build.group
        channels = sum(spec.mixed_widths)
        self.in_proj = Linear(spec.inputs, build)
        self.conv_weight = build.empty(channels, spec.conv)
        self.conv_bias = build.empty(channels) if spec.conv_bias else None
        # The decay is an exponential of both parameters; 16 bits would cost long contexts their precision.
        self.a_log, self.dt_bias, self.skip = (build.empty(spec.heads, dtype=torch.float32) for _ in range(3))
        self.norm = RMSNorm(spec.width, spec.eps, build)
        self.o_proj = Linear(spec.out, build)

    def mix(self, inputs_TN: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The input of the output product; advances the states."""
        spec, (state, spans, kept) = self.spec, self.states_of(context)
        z_TX, mixed_TC, dt_TH = inputs_TN.split((spec.width, sum(spec.mixed_widths), spec.heads), dim=1)
        mixed_TC = short_conv(mixed_TC.contiguous(), self.conv_weight, state.conv_NCW, spans, self.conv_bias, kept)
        x_TX, keys, queries = mixed_TC.float().split(spec.mixed_widths, dim=1)
        k_THK, q_THK = (
            part.unflatten(1, (spec.groups, -1)).repeat_interleave(spec.heads // spec.groups, dim=1)
            for part in (keys, queries)
        )
        v_THV, dt_TH = x_TX.unflatten(1, (spec.heads, -1)), F.softplus(dt_TH.float() + self.dt_bias).clamp(*spec.steps)
        tokens = q_THK, k_THK, dt_TH[..., None] * v_THV, (-self.a_log.exp() * dt_TH)[..., None]
        out_THV = state_rule(tokens, state.recurrent_NHKV, spans, _one_chunk, kept)
        out_TX = (out_THV + self.skip[:, None] * v_THV).flatten(1) * F.silu(z_TX.float())
        return self._normed(out_TX).to(inputs_TN.dtype)

    def _normed(self, out_TX: torch.Tensor) -> torch.Tensor:
        """The outputs, normalised: each group on its own, and one group over all ranks."""
        out_TGX = out_TX.unflatten(1, (self.spec.groups, -1))
        mean_TG1 = out_TGX.square().mean(-1, keepdim=True)
        if self.spec.all_groups == 1:
            mean_TG1 = self.group.all_reduce(mean_TG1.flatten(1))[..., None] / self.group.size
        return (out_TGX * torch.rsqrt(mean_TG1 + self.spec.eps)).flatten(1) * self.norm.weight.float()

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        spec, names = self.spec, self.spec.names
        regions = [
            *self.in_proj.regions(prefix),
            Region(({f"{prefix}{names.conv}.weight": CutView.of(self.conv_weight.data[:, None], spec.conv_cut)},)),
            *(
                one_name(f"{prefix}{name}", tensor, spec.head_cut)
                for name, tensor in ((names.a_log, self.a_log), (names.dt_bias, self.dt_bias), (names.skip, self.skip))
            ),
            one_name(f"{prefix}{names.norm}.weight", self.norm.weight, spec.width_cut),
            *self.o_proj.regions(prefix),
        ]
        if self.conv_bias is not None:
            regions.append(one_name(f"{prefix}{names.conv}.bias", self.conv_bias, spec.conv_cut))
        return regions


def _one_chunk(
    state_HKV: torch.Tensor, q_IHK: torch.Tensor, k_IHK: torch.Tensor, u_IHV: torch.Tensor, g_IH1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q_HIK, k_HIK, u_HIV = (x.transpose(0, 1) for x in (q_IHK, k_IHK, u_IHV))
    d_HI = g_IH1[..., 0].t().cumsum(1)
    return end_of_chunk(state_HKV, q_HIK, k_HIK, u_HIV, d_HI, decays_between(d_HI))
