"""The decoder-only transformer: embedding, the layers of a `ModelSpec`, a last norm and the output layer.

Legend: T tokens of a step, S selected tokens, H hidden, V vocabulary.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from rollout_kernels import gated
from rollout_kernels.moe.formats import Format
from rollout_kernels.parallel import ONE_RANK, TensorGroup
from rollout_kernels.sampling import VocabShard
from torch import nn

from rollout.models.apart_experts import ApartExperts
from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.chosen_blocks import BlockAttention
from rollout.models.compressed import CompressedAttention
from rollout.models.dealt_rows import deal, mixed
from rollout.models.delta_net import DeltaNet
from rollout.models.draft_head import DraftHead
from rollout.models.kimi_delta import KimiDelta
from rollout.models.latent import LatentAttention
from rollout.models.layers import (
    Attention,
    Block,
    Build,
    DenseFeedForward,
    Embedding,
    Linear,
    RMSNorm,
    Rope,
    RunExperts,
    SparseFeedForward,
    StepContext,
    float32_product,
)
from rollout.models.mamba2 import Mamba2
from rollout.models.names import Region, all_views, one_name, with_spellings
from rollout.models.residual_streams import ResidualStreams
from rollout.models.spec import (
    CompressedSpec,
    DeltaNetSpec,
    FeedForwardSpec,
    KimiDeltaSpec,
    LatentSpec,
    LinearSpec,
    Mamba2Spec,
    MixerSpec,
    ModelSpec,
    MoESpec,
    StateMixer,
    TokenInputSpec,
)
from rollout.models.vision import VisionTower

MixerBlock = Attention | LatentAttention | CompressedAttention | DeltaNet | KimiDelta | Mamba2
FeedForwardBlock = DenseFeedForward | SparseFeedForward
_STATE_BLOCKS = {DeltaNetSpec: DeltaNet, KimiDeltaSpec: KimiDelta, Mamba2Spec: Mamba2}


class Norms(NamedTuple):
    """The norms of a block's input and of its output."""

    before: RMSNorm | None
    after: RMSNorm | None


class DecoderLayer(Block):
    """A mixer and a feed-forward block, or one of the two; each with its norms and added to the residual stream."""

    def __init__(self, spec: ModelSpec, index: int, build: Build) -> None:
        super().__init__()
        self.spec = layer = spec.layers[index]

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden, spec.eps, build, spec.unit_offset)

        self.mixer_norm = None if layer.mixer is None else norm()
        apart = isinstance(layer.feed_forward, MoESpec) and layer.feed_forward.apart is not None
        self.feed_forward_norm = None if layer.feed_forward is None or apart else norm()
        around = layer.norms == "around"
        assert layer.norms == "before" or len(layer.blocks) == 2, "a layer of one block has no other norm"
        self.mixer_output_norm = norm() if around else None
        self.feed_forward_output_norm = norm() if around else None
        rest = build.plain if spec.only_experts_coded else build
        self.mixer = None if layer.mixer is None else _mixer(spec, index, layer.mixer, rest)
        inputs = spec.token_inputs
        streams = spec.streams
        self.mixer_streams = None if streams is None else ResidualStreams(spec, streams, build)
        self.feed_forward_streams = None if streams is None else ResidualStreams(spec, streams, build)
        self.token_input = None if inputs is None else TokenInput(spec, inputs, index, build)
        self.factor = None if layer.factor is None else build.empty(1)
        feed_forward = layer.feed_forward
        rest = build if isinstance(feed_forward, MoESpec) else rest
        self.feed_forward = None if feed_forward is None else _feed_forward(spec, index, feed_forward, rest)

    @property
    def blocks(self) -> tuple[MixerBlock | FeedForwardBlock, ...]:
        """Its blocks, in their order."""
        return tuple(block for block in (self.mixer, self.feed_forward) if block is not None)

    @property
    def mixer_norms(self) -> Norms:
        return self._norms(self.mixer_norm, self.mixer_output_norm)

    @property
    def feed_forward_norms(self) -> Norms:
        return self._norms(self.feed_forward_norm, self.feed_forward_output_norm)

    def _norms(self, norm: RMSNorm | None, output_norm: RMSNorm | None) -> Norms:
        return Norms(None, norm) if self.spec.norms == "after" else Norms(norm, output_norm)

    def forward(self, x_TH: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The residual stream after this layer."""
        if self.mixer is not None:
            x_TH = self._add(x_TH, self.mixer, self.mixer_norms, self.mixer_streams, context)
        if self.feed_forward is not None:
            x_TH = self._add(x_TH, self.feed_forward, self.feed_forward_norms, self.feed_forward_streams, context)
        if self.token_input is not None:
            x_TH = x_TH + self.token_input(x_TH, context)
        return x_TH if self.factor is None else x_TH * self.factor

    def _add(
        self, x_TH: torch.Tensor, block: Block, norms: Norms, streams: ResidualStreams | None, context: StepContext
    ) -> torch.Tensor:
        if streams is not None and norms.before is not None:
            read_TH, weights = streams.read(x_TH)
            return streams.write(x_TH, block(norms.before(read_TH), context).value(), *weights)
        scale = self.spec.residual_scale
        normed_TH = x_TH if norms.before is None else norms.before(x_TH)
        if context.own is not None and block is self.mixer:
            output = mixed(block, normed_TH, context.own, context)
        else:
            output = block(normed_TH, context)
        if norms.after is None and scale == 1.0:
            return output.add_to(x_TH)
        y_TH = output.value() if norms.after is None else norms.after(output.value())
        return x_TH + scale * y_TH

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under `prefix`."""
        names, factor = self.spec.names, self.spec.factor
        regions = [region for block in self.blocks for region in block.regions(prefix)]
        if self.mixer_norm is not None:
            regions.append(_norm_region(prefix, (names.mixer_norm, names.also_mixer_norm), self.mixer_norm))
        if self.feed_forward_norm is not None:
            also = (names.feed_forward_norm, names.also_feed_forward_norm)
            regions.append(_norm_region(prefix, also, self.feed_forward_norm))
        if self.mixer_streams is not None and self.feed_forward_streams is not None:
            regions += self.mixer_streams.regions(f"{prefix}attn_hc.")
            regions += self.feed_forward_streams.regions(f"{prefix}ffn_hc.")
        if self.token_input is not None:
            regions += self.token_input.regions(prefix)
        if self.factor is not None:  # a buffer of transformers' layer: trainers may send parameters alone
            regions.append(Region(({f"{prefix}{factor}": self.factor.detach()},), kept_if_absent=True))
        outputs = (
            (names.mixer_output_norm, self.mixer_output_norm),
            (names.feed_forward_output_norm, self.feed_forward_output_norm),
        )
        return regions + [one_name(f"{prefix}{name}.weight", norm.weight) for name, norm in outputs if norm is not None]


class TokenInput(Block):
    """The block of a layer's own input of the tokens. It is whole on every rank."""

    def __init__(self, spec: ModelSpec, inputs: TokenInputSpec, layer: int, build: Build) -> None:
        super().__init__()
        self.spec, self.layer = inputs, layer
        names = inputs.names
        self.gate_proj = Linear(LinearSpec(spec.hidden, (names.gate,), (inputs.dim,), False), build.plain)
        self.widen_proj = Linear(LinearSpec(inputs.dim, (names.widen,), (spec.hidden,), False), build.plain)
        self.output_norm = RMSNorm(spec.hidden, spec.eps, build, spec.unit_offset)

    def forward(self, x_TH: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The sum that the layer adds to its residual stream `x_TH`."""
        return self.output_norm(self.widened(x_TH, context))

    def widened(self, x_TH: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The same before its norm."""
        assert context.token_inputs_TLD is not None
        input_TD = context.token_inputs_TLD[:, self.layer]
        gates_values_T2D = torch.cat((self.gate_proj(x_TH), input_TD), dim=1)
        return self.widen_proj(gated(gates_values_T2D, self.spec.activation))

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under the layer's `prefix`."""
        norm = one_name(f"{prefix}{self.spec.names.output_norm}.weight", self.output_norm.weight)
        return [*self.gate_proj.regions(prefix), *self.widen_proj.regions(prefix), norm]


class TokenInputs(Block):
    """Makes the inputs that layers have of the tokens of a step: half of token ids, half of the embedding."""

    def __init__(self, spec: ModelSpec, inputs: TokenInputSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.layers = inputs, len(spec.layers)
        width = self.layers * inputs.dim
        self.embed = build.empty(inputs.vocab, width)
        self.project = Linear(LinearSpec(spec.hidden, (inputs.names.project,), (width,), False), build.plain)
        self.norm = RMSNorm(inputs.dim, spec.eps, build, spec.unit_offset)
        self.embed_scale = torch.tensor(inputs.dim**0.5, dtype=build.dtype).item()
        self.project_scale = spec.hidden**-0.5

    def forward(self, token_ids_T: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        """The inputs of ids and their embeddings, [T, L, D] for L layers."""
        ids_TW = F.embedding(token_ids_T, self.embed) * self.embed_scale
        products_TLD = (self.project(x_TH) * self.project_scale).unflatten(1, (self.layers, self.spec.dim))
        return (self.norm(products_TLD) + ids_TW.view_as(products_TLD)) * 0.5**0.5

    def regions(self) -> list[Region]:
        """Hugging Face tensors."""
        names = self.spec.names
        embed, norm = (f"{name}.weight" for name in (names.embed, names.norm))
        return [one_name(embed, self.embed), *self.project.regions(""), one_name(norm, self.norm.weight)]


def _mixer(spec: ModelSpec, index: int, mixer: MixerSpec, build: Build) -> MixerBlock:
    if isinstance(mixer, StateMixer):
        block: Any = _STATE_BLOCKS[type(mixer)]
        return block(mixer, index, spec.state_layers.index(index), build.plain)
    kv_index, rope = spec.kv_index(index), spec.ropes.index(mixer.turned)
    if isinstance(mixer, CompressedSpec):
        key_index = None if mixer.windows is None else spec.key_index(index)
        return CompressedAttention(mixer, index, kv_index, key_index, rope, build)
    if isinstance(mixer, LatentSpec):
        return LatentAttention(mixer, index, kv_index, rope, build)
    if mixer.blocks is not None:
        key_index = spec.key_index(index)
        return BlockAttention(mixer, index, kv_index, key_index, rope, build)
    return Attention(mixer, index, kv_index, rope, build)


def _feed_forward(spec: ModelSpec, index: int, block: FeedForwardSpec, build: Build) -> FeedForwardBlock:
    if isinstance(block, MoESpec):
        kind = SparseFeedForward if block.apart is None else ApartExperts
        return kind(block, spec.sparse_layers.index(index), build)
    return DenseFeedForward(block, index, build)


def _norm_region(prefix: str, names: tuple[str, str | None], norm: RMSNorm) -> Region:
    return Region(tuple({f"{prefix}{name}.weight": norm.weight.detach()} for name in names if name is not None))


class Decoder(Block):
    """A language model over a paged KV cache. Its parameters are uninitialised until a loader has filled them.

    `format` is for the weights that may be codes (`rollout.models.coded`); everything else is of `dtype`, save routers'
    biases (float32). With a spec of a shard, `group` has the ranks of the other shards, which run the same steps.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        format: Format = "plain",
        group: TensorGroup = ONE_RANK,
    ) -> None:
        super().__init__()
        assert (group.rank, group.size) == spec.shard, "the spec belongs to another rank"
        self.spec, self.format, self.group = spec, format, group
        build = Build(dtype, device, group, format)
        kept = len(spec.kept_vocab)
        self.embed = build.empty(kept, spec.hidden)
        self.layers = nn.ModuleList(DecoderLayer(spec, index, build) for index in range(len(spec.layers)))
        self.norm = RMSNorm(spec.hidden, spec.eps, build, spec.unit_offset)
        # A tied output layer is the embedding itself: one parameter, one name.
        self.lm_head = self.embed if spec.tied else build.empty(kept, spec.hidden)
        rounded = torch.tensor(spec.embed_scale, dtype=dtype).item() if spec.embed_scale_rounded else spec.embed_scale
        self.embed_scale = rounded
        self.last_streams = None if spec.streams is None else ResidualStreams(spec, spec.streams, build, last=True)
        inputs = spec.token_inputs
        self.token_inputs = None if inputs is None else TokenInputs(spec, inputs, build)
        self.ropes = nn.ModuleList(Rope(rope, head_dim, device) for rope, head_dim in spec.ropes)
        self.tower = None if spec.tower is None else VisionTower(spec.tower, dtype, device)
        self.draft: DraftHead | None = None
        if spec.draft is not None:
            self.draft = DraftHead(spec.draft, len(spec.kv_shapes) - 1, spec.vocab, build._replace(group=ONE_RANK))

    @torch.inference_mode()
    def forward(
        self, token_ids_T: torch.Tensor, batch: AttentionBatch, kv: KVCache, run_experts: RunExperts | None = None
    ) -> torch.Tensor:
        """Run one step: writes its KV, returns its hidden states after the final norm, [T, H] in the model's dtype."""
        x_TH = self.embedded(token_ids_T)
        images = batch.images
        if images is not None:
            x_TH = images.replace_in(x_TH)
        cos_sin = tuple(rope(batch.rotary_positions) for rope in self.ropes)
        inputs_TLD = None if self.token_inputs is None else self.token_inputs(token_ids_T, x_TH)
        context = StepContext(
            cos_sin, batch.kv_slots_T.long(), batch, kv, run_experts, inputs_TLD, token_ids_T=token_ids_T
        )
        if not kv.whole:
            context = deal(context)
        if self.spec.streams is not None:
            x_TH = x_TH.repeat(1, self.spec.streams.number)
        taps = batch.taps
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.take(index, x_TH)
            x_TH = layer(x_TH, context)
            if images is not None:
                x_TH = images.add_after(index, x_TH)
        if taps is not None:
            taps.take(len(self.layers), x_TH)
        return self.norm(x_TH if self.last_streams is None else self.last_streams.read(x_TH)[0])

    @property
    def embedding(self) -> Embedding:
        """The embedding, which may be this rank's part of it."""
        return Embedding(self.embed, None if self.spec.shard.size == 1 else self.spec.kept_vocab.start, self.group)

    def embedded(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding times its factor, [T, H]."""
        x_TH = self.embedding.rows(token_ids_T)
        return x_TH if self.embed_scale == 1.0 else x_TH * self.embed_scale

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits of selected hidden states, float32 [S, V]; a shard's logits cover its part of the vocabulary."""
        return self.bounded(float32_product(hidden_SH, self.lm_head))

    def bounded(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """Products of the output layer, changed in place to logits: by their divisor and softcap, if there are any."""
        divisor, softcap = self.spec.logit_divisor, self.spec.logit_softcap
        if divisor != 1.0:
            logits_SV = logits_SV.div_(divisor)
        return logits_SV if softcap is None else logits_SV.div_(softcap).tanh_().mul_(softcap)

    @property
    def vocab_shard(self) -> VocabShard | None:
        """The part of the vocabulary that `compute_logits` gives the logits of; None if all."""
        spec = self.spec
        if spec.shard.size == 1:
            return None
        return VocabShard(self.group, spec.kept_vocab.start, len(spec.vocab_of(0)), spec.vocab)

    def hf_regions(self) -> list[Region]:
        """The model's parameters, each once, under their Hugging Face names."""
        names, cut = self.spec.names, self.spec.vocab_cut
        regions = [one_name(f"{names.embed}.weight", self.embed, cut)]
        for index, layer in enumerate(self.layers):
            regions += layer.regions(names.layer.format(index))  # type: ignore[operator]
        regions.append(one_name(f"{names.norm}.weight", self.norm.weight))
        if self.last_streams is not None:
            regions += self.last_streams.regions("model.hc_head.hc_")
        if self.token_inputs is not None:
            regions += self.token_inputs.regions()
        if not self.spec.tied:
            regions.append(one_name(f"{names.lm_head}.weight", self.lm_head, cut))
        regions = [with_spellings(region, names.spellings) for region in regions]
        if self.tower is not None:
            regions += self.tower.regions()
        return regions if self.draft is None else [*regions, *self.draft.update_regions()]

    def hf_views(self) -> dict[str, torch.Tensor]:
        """Hugging Face names of all layouts, and for each name a view of its part of a fused parameter.

        Names of different layouts cover the same memory; `check_names(hf_regions(), names, ...)` checks whether a set
        of names covers everything once. A copy into a view changes the model; one into coded weights is quantised. The
        views of a shard take whole tensors and copy the shard's part (`CutView`).
        """
        return all_views(self.hf_regions())

    def scale_views(self) -> dict[str, torch.Tensor]:
        """The views that take scales of coded weights as checkpoints have them, by the names of the weights."""
        views: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            prefix = self.spec.names.layer.format(index)
            for block in cast(DecoderLayer, layer).blocks:
                views |= block.scale_views(prefix)
        views = {name: view for stem, view in views.items() for name in self.spec.names.spellings(stem)}
        return views if self.draft is None else views | self.draft.scale_views()

    def draft_names(self) -> frozenset[str]:
        """Names of the tensors of the draft model in updates."""
        return frozenset() if self.draft is None else frozenset(all_views(self.draft.update_regions()))
