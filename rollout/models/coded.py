"""Weights that are kept as e4m3 codes: views that take weights and store codes.

Coded are q, k, v and o of attention, the products of latent attention except `kv_b`, feed-forward blocks and experts.
Embedding, output layer, norms, routers, gates, linear attention, draft models (save experts) and towers of images keep
the model's dtype.

A checkpoint or a trainer sends weights; the model holds codes and scales. The codes of a tensor have its shape and lie
where its weights would. So a view of the codes tells which parameters a name writes, as any view does. Only the copy
into it differs: it quantises, on the view's device. Codes are stored as they are, and their scales are tensors of their
own (`scale_views` of the blocks).

    weights from a file or over the bridge  --copy_-->  CodedView  = codes, and the scales that go with them
    codes (float8_e4m3fn)                   --copy_-->  CodedView  = codes
    scales (name + "_scale_inv")            --copy_-->  a view of the scales
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rollout_kernels.moe.formats import GROUP, SCALE_BLOCKS, ExpertWeights, Format
from rollout_kernels.moe.quantize import quantize_to

from rollout.models.cut import Cut
from rollout.models.spec import AttentionSpec, LatentSpec, LayerSpec, LinearSpec, ModelSpec, MoESpec


class CodedView(torch.Tensor):
    """Codes (uint8) of one tensor of a checkpoint, in the shape of the weights.

    Of experts whose tensor is `turned`, it has inputs before outputs, and the memory has not.
    """

    _weights: ExpertWeights
    _turned: bool
    #: Results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, weights: ExpertWeights, shape: tuple[int, ...], turned: bool = False) -> CodedView:
        """A view of `weights`, which have this shape, for one tensor."""
        codes = weights.values_ENK.detach().view(shape)
        view = (codes.mT if turned else codes).as_subclass(cls)
        view._weights, view._turned = weights, turned
        return view

    def __iter__(self) -> Iterator[CodedView]:
        """The view of each expert, of a view of all."""
        shape = self._weights.values_ENK.shape[1:]
        return (CodedView.of(self._weights.part(expert), tuple(shape), self._turned) for expert in range(len(self)))

    def copy_(self, weights: torch.Tensor, non_blocking: bool = False) -> CodedView:  # type: ignore[override]
        """Quantise weights of the view's shape, from any device, into codes and scales, or store codes alone.

        Raises TypeError for integers.
        """
        if not weights.is_floating_point():
            raise TypeError(f"weights to be quantised must be floating point, not {weights.dtype}")
        if weights.shape != self.shape:
            raise ValueError(f"weights of shape {list(weights.shape)} do not fit into {list(self.shape)}")
        weights = weights.detach().mT if self._turned else weights.detach()
        if weights.dtype == torch.float8_e4m3fn:
            codes = weights.view(torch.uint8).reshape(self._weights.values_ENK.shape)
            self._weights.values_ENK.copy_(codes, non_blocking)
            return self
        quantize_to(weights.reshape(self._weights.values_ENK.shape), self._weights, non_blocking)
        return self

    def decoded_values(self) -> torch.Tensor:
        """The weights that the codes stand for, float32, in the view's shape."""
        weights_ENK = self._weights.dequantized(torch.float32)
        return (weights_ENK.mT if self._turned else weights_ENK).reshape(self.shape)

    @property
    def format(self) -> Format:
        return self._weights.format


#: Ends the name of the scales of a tensor in a checkpoint or an update.
SCALES = "_scale_inv"


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 weights [N, K] of codes (float8_e4m3fn) and the scales of their blocks of 128 x 128."""
    return ExpertWeights(codes.view(torch.uint8)[None], scales.float()[None], "fp8_block").dequantized(torch.float32)[0]


def scale_cut(cut: Cut | None, format: Format) -> Cut | None:
    """The part of a tensor's scales that a rank with `cut` keeps; its ranges are whole blocks (`check_format`)."""
    if cut is None:
        return None
    rows, columns = SCALE_BLOCKS[format]
    block = rows if cut.dim == 0 else columns
    if block is None:  # a row has one scale
        return None
    ranges = tuple((begin // block, -(-end // block)) for begin, end in cut.ranges)
    return Cut(cut.dim, -(-cut.whole // block), ranges)


def coded_products(spec: ModelSpec) -> Iterator[LinearSpec]:
    """The coded products of a model, each once, without the experts' products."""
    layers = () if spec.only_experts_coded else spec.layers
    yield from dict.fromkeys(product for layer in layers for product in _coded_products(layer))


def _coded_products(layer: LayerSpec) -> Iterator[LinearSpec]:
    mixer, block = layer.mixer, layer.feed_forward
    if isinstance(mixer, AttentionSpec):
        yield from (mixer.qkv, mixer.o)
    elif isinstance(mixer, LatentSpec):
        yield from (product for product in (mixer.inputs, mixer.q_b, mixer.o) if product is not None)
    dense = block.shared if isinstance(block, MoESpec) else block
    if dense is not None:
        yield from (dense.gate_up, dense.down)


def check_format(spec: ModelSpec, format: Format) -> None:
    """Raise ValueError with the reason if the weights of a model or of its shard cannot be kept in `format`."""
    if format == "plain":
        return
    other = "use weight_dtype = bf16"
    if format == "fp8_block" and spec.moe is not None and spec.moe.clamped is not None:
        raise ValueError(
            f"gate and up rows of {spec.architecture} alternate, and a block of fp8_block would have both: use "
            "weight_dtype = mxfp8, or bf16"
        )
    products = list(coded_products(spec))
    widths = [product.inputs for product in products] if format == "mxfp8" else []
    if spec.moe is not None:
        widths += [spec.moe.width, spec.moe.intermediate]
    if not products and spec.moe is None:
        raise ValueError(f"weight_dtype = {format} applies to no weights of {spec.architecture}: {other}")
    odd = [width for width in widths if width % GROUP]
    if odd:
        raise ValueError(f"weight_dtype = {format} needs widths that are multiples of {GROUP}, not {odd[0]}: {other}")
    for product in products:
        _check_cut(product.input_cut, format, product.modules[0], spec)
        for cut, module in zip(product.output_cuts, product.modules, strict=False):
            _check_cut(cut, format, module, spec)
    experts = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MoESpec)]
    if format == "fp8_row" and any(block.width_cut for block in experts):
        raise ValueError(_CUT_ROWS.format(spec.shard.size))


_CUT_ROWS = (
    "weight_dtype = fp8_row has a scale for a row of weights, and {} ranks cut these rows: use fp8_block or mxfp8"
)


def _check_cut(cut: Cut | None, format: Format, module: str, spec: ModelSpec) -> None:
    if cut is None:
        return
    block = SCALE_BLOCKS[format][cut.dim]
    if block is None:
        raise ValueError(_CUT_ROWS.format(spec.shard.size))
    if any(edge % block and edge != cut.whole for cut_range in cut.ranges for edge in cut_range):
        raise ValueError(
            f"weight_dtype = {format} has a scale for each {block} neighbours, and {spec.shard.size} ranks would cut "
            f"{module} between such neighbours: use fewer ranks, another format, or bf16"
        )
