"""Several residual streams in the place of one (manifold-constrained hyper-connections, arXiv 2512.24880).

    streams --norm of all, one product--> of each block: weights in, weights out, weights between streams
    the block reads the sum of the streams by its weights in
    a stream becomes the block's output times its weight out, plus a sum of the streams by the weights between

The weights between streams are about doubly stochastic: rows and columns are normalised in turn (Sinkhorn-Knopp).
Weights and their parameters are float32. Legend: T tokens, N streams, H hidden, X = N H.
"""

import torch
import torch.nn.functional as F

from rollout.models.layers import Block, Build
from rollout.models.names import Region, one_name
from rollout.models.spec import ModelSpec, StreamsSpec


class ResidualStreams(Block):
    """The streams around a block; with `last` those after all layers, which become one."""

    def __init__(self, spec: ModelSpec, streams: StreamsSpec, build: Build, last: bool = False) -> None:
        super().__init__()
        self.spec, self.eps, number = streams, spec.eps, streams.number
        self.widths = (number,) if last else (number, number, number * number)
        shapes = (sum(self.widths), number * spec.hidden), (sum(self.widths),), (len(self.widths),)
        self.fn, self.base, self.scale = (build.empty(*shape, dtype=torch.float32) for shape in shapes)

    def read(self, x_TX: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The sum of the streams, [T, H], and what makes the weights that `write` takes."""
        products_TY = F.linear(F.rms_norm(x_TX.float(), x_TX.shape[1:], eps=self.eps), self.fn)
        parts = zip(products_TY.split(self.widths, 1), self.scale, self.base.split(self.widths), strict=True)
        in_TN, *others = (product * scale + base for product, scale, base in parts)
        x_TNH = x_TX.unflatten(1, (self.spec.number, -1))
        return ((in_TN.sigmoid() + self.spec.eps)[..., None] * x_TNH).sum(1).to(x_TX.dtype), others

    def write(
        self, x_TX: torch.Tensor, y_TH: torch.Tensor, out_TN: torch.Tensor, between_TX: torch.Tensor
    ) -> torch.Tensor:
        """The streams after the block, whose output is `y_TH`."""
        eps, shape = self.spec.eps, (self.spec.number, -1)
        between_TNN = between_TX.unflatten(1, shape).softmax(-1) + eps
        for dim in (-2, *(-1, -2) * (self.spec.rounds - 1)):
            between_TNN = between_TNN / (between_TNN.sum(dim, keepdim=True) + eps)
        added_TNH = 2.0 * out_TN.sigmoid()[..., None] * y_TH[:, None].float()
        return torch.baddbmm(added_TNH, between_TNN.mT, x_TX.unflatten(1, shape).float()).to(x_TX.dtype).flatten(1)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors whose names begin with `prefix`."""
        return [one_name(prefix + name, getattr(self, name)) for name in ("fn", "base", "scale")]
