"""Experts beside a dense block that stands for a shared expert; each reads the residual stream by a norm of its own.

    residual stream --norm--> dense block --norm--> + --> output
                    --norm--> experts ------norm--> +
                    --norm--> router

Both parts are whole before the norms of their outputs, so a shard sums them over the ranks here.

Legend: T tokens, E experts, K experts a token, H hidden.
"""

from __future__ import annotations

import torch

from rollout.models.layers import Build, RMSNorm, SparseFeedForward
from rollout.models.names import Region, one_name
from rollout.models.spec import MoESpec


class ApartExperts(SparseFeedForward):
    """A sparse block whose input is the residual stream."""

    def __init__(self, spec: MoESpec, sparse_index: int, build: Build) -> None:
        super().__init__(spec, sparse_index, build)
        norms = [RMSNorm(spec.hidden, spec.eps, build) for _ in range(5)]
        self.shared_norm, self.shared_output_norm, self.experts_norm, self.experts_output_norm = norms[:4]
        self.router_norm = norms[4]
        self.expert_factors = build.empty(spec.experts)  # factors of weights

    def router_input(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.router_norm(x_TH) * self.spec.hidden**-0.5

    def read(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.experts_norm(x_TH)

    def weighed(self, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        return weights_TK * self.expert_factors[experts_TK.long()]

    def complete(self, y_TH: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        assert self.shared is not None
        shared_TH = self.group.all_reduce(self.shared(self.shared_norm(x_TH)))
        return self.shared_output_norm(shared_TH) + self.experts_output_norm(self.group.all_reduce(y_TH))

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        names = self.spec.apart
        assert names is not None
        norms = {
            f"{names.shared}.weight": self.shared_norm,
            f"{names.shared_output}.weight": self.shared_output_norm,
            f"{names.experts}.weight": self.experts_norm,
            f"{names.experts_output}.weight": self.experts_output_norm,
            names.router_scale: self.router_norm,
        }
        regions = [one_name(prefix + name, norm.weight) for name, norm in norms.items()]
        return [*super().regions(prefix), *regions, one_name(prefix + names.expert_factors, self.expert_factors)]
