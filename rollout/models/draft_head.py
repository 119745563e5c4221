"""A draft model of one layer: it drafts the next tokens of another model, the target, from its hidden states.

From the target's hidden state at position p, and the embedding of the token at p + 1, it drafts the token at p + 2:

    hidden_p, embedding of the token at p + 1  -->  one layer, with KV of its own  -->  hidden, logits for p + 2
    that hidden state, embedding of the draft  -->  the same layer                 -->  hidden, logits for p + 3

So after the first draft it goes on from its own hidden states. There are two layouts (see `DraftSpec`):

    EAGLE-3   hidden = fc(states of several layers);   x = hidden;   x += mixer([norm(embedding), norm(hidden)])
    MTP       hidden = the target's last norm;         x = fc([norm(embedding), norm(hidden)]);   x += mixer(norm(x))
    both      x += feed_forward(norm(x));   logits = output layer(norm(x));   MTP passes norm(x) on, EAGLE-3 x

The embedding is the target's, and so is the output layer if the draft model has none. Its vocabulary may be a part of
the target's. Its KV is one more layer of the target's pool, on the same pages. Every rank of a tensor group has the
whole draft model. On a GPU, in 16 bits, the fused kernels run all that is between its products, and its experts.

Legend: T tokens, S selected tokens, H hidden, F width of the hidden states that are read, V vocabulary.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm, embed_rope, gated

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.finished_queries import finish_queries
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
    gate_output,
)
from rollout.models.names import Region, all_views, one_name, with_spellings
from rollout.models.spec import DraftNames, DraftSpec, LatentSpec, MoESpec

#: The prefix of the tensors of an EAGLE-3 head in updates.
PREFIX = "draft."
#: Tensors of a checkpoint that say which tokens of the target its vocabulary has: the offset of each, and a flag for
#: each token of the target, which follows from the offsets.
OFFSETS, FLAGS = "d2t", "t2d"
EAGLE_NAMES = DraftNames(
    prefix=PREFIX,
    layer="midlayer.",
    fc="fc",
    embed_norm="midlayer.input_layernorm",
    hidden_norm="midlayer.hidden_norm",
    feed_forward_norm="midlayer.post_attention_layernorm",
    norm="norm",
    beginnings=(("midlayer.", ("midlayer.", "layers.0.")),),
)


class DraftHead(Block):
    """The draft model. Its parameters are uninitialised until a loader has filled them.

    `kv_index` is its place among the layers with KV, `vocab` the size of the target's vocabulary. Of its weights
    only experts may be codes.
    """

    def __init__(self, spec: DraftSpec, kv_index: int, vocab: int, build: Build) -> None:
        super().__init__()
        self.spec, self.vocab = spec, vocab
        in_16_bits = build.device.type == "cuda" and build.dtype in (torch.bfloat16, torch.float16)
        self.fused = in_16_bits and _kernels_take(spec)
        self.fc = Linear(spec.fc, build.plain)
        self.embed_norm, self.hidden_norm, self.feed_forward_norm, self.norm = (
            RMSNorm(spec.hidden, spec.eps, build, spec.unit_offset) for _ in range(4)
        )
        self.mixer_norm = None
        if spec.joined:
            self.mixer_norm = RMSNorm(spec.hidden, spec.eps, build, spec.unit_offset)
        self.rope = Rope(*spec.mixer.turned, build.device)
        self.mixer: Attention | LatentAttention
        if isinstance(spec.mixer, LatentSpec):
            self.mixer = LatentAttention(spec.mixer, 0, kv_index, 0, build.plain)
        else:
            self.mixer = Attention(spec.mixer, 0, kv_index, 0, build.plain)
        self.feed_forward: DenseFeedForward | SparseFeedForward
        if isinstance(spec.feed_forward, MoESpec):
            self.feed_forward = SparseFeedForward(spec.feed_forward, 0, build)
        else:
            self.feed_forward = DenseFeedForward(spec.feed_forward, 0, build.plain)
        self.lm_head = build.empty(spec.vocab, spec.hidden) if spec.own_head else None
        #: int64: the token of the target that each token of its vocabulary is; filled by the loader.
        self.target_ids: torch.Tensor | None
        ids = torch.arange(spec.vocab, device=build.device) if spec.mapped else None
        self.register_buffer("target_ids", ids, persistent=False)

    @torch.inference_mode()
    def fuse(self, hidden_TF: torch.Tensor, target_norm: RMSNorm) -> torch.Tensor:
        """The target's hidden states as it reads them, [T, H]: fused, or after the target's last norm."""
        if not self.spec.joined:
            return self.fc(hidden_TF)
        if not self.fused:
            return target_norm(hidden_TF)
        how = target_norm.weight, target_norm.eps, None, target_norm.unit_offset
        return add_rms_norm(hidden_TF.contiguous(), None, *how)

    @torch.inference_mode()
    def forward(
        self,
        following_T: torch.Tensor,
        embedding: Embedding,
        hidden_TH: torch.Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        run_experts: RunExperts | None = None,
    ) -> torch.Tensor:
        """Run the layer, which writes its KV; returns the hidden states for the next draft, [T, H].

        `following_T` are the tokens after the positions of `hidden_TH`, `embedding` is the target's.
        `run_experts` runs its sparse block if it is given.
        """
        if self.fused and (run_experts is not None or isinstance(self.feed_forward, DenseFeedForward)):
            return self._by_kernels(following_T, embedding, hidden_TH, batch, kv, run_experts)
        embeds_TH = embedding.rows(following_T)
        context = StepContext((self.rope(batch.positions_T),), batch.kv_slots_T.long(), batch, kv, run_experts)
        normed_TH = self.hidden_norm(hidden_TH)
        inputs_TX = self._side_by_side(self.embed_norm(embeds_TH), normed_TH)
        if self.mixer_norm is None:
            x_TH = normed_TH if self.spec.norm_before_residual else hidden_TH
        else:
            x_TH = self.fc(inputs_TX)
            inputs_TX = self.mixer_norm(x_TH)
        x_TH = self.mixer(inputs_TX, context).add_to(x_TH)
        x_TH = self.feed_forward(self.feed_forward_norm(x_TH), context).add_to(x_TH)
        return self.norm(x_TH) if self.spec.joined else x_TH

    def _side_by_side(self, embeds_TH: torch.Tensor, hidden_TH: torch.Tensor) -> torch.Tensor:
        return torch.cat((hidden_TH, embeds_TH) if self.spec.hidden_first else (embeds_TH, hidden_TH), dim=-1)

    def _by_kernels(
        self,
        following_T: torch.Tensor,
        embedding: Embedding,
        hidden_TH: torch.Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        run_experts: RunExperts | None,
    ) -> torch.Tensor:
        assert isinstance(self.mixer, Attention), "_kernels_take"
        cache, norm = kv.layer(self.mixer.kv_index), self._normed
        tables = embedding.weight_VH, self.rope.inv_freq_D, self.rope.sign_D, embedding.first
        embeds_TH, cos_sin = embed_rope(following_T.contiguous(), batch.positions_T.contiguous(), *tables)
        if embedding.first is not None:
            embeds_TH = embedding.group.all_reduce(embeds_TH)
        hidden_TH = hidden_TH.contiguous()
        normed_TH = norm(hidden_TH, None, self.hidden_norm)
        inputs_TX = self._side_by_side(norm(embeds_TH, None, self.embed_norm), normed_TH)
        if self.mixer_norm is None:
            residual_TH = (normed_TH if self.spec.norm_before_residual else hidden_TH).clone()  # changed in place
        else:
            residual_TH = self.fc.product(inputs_TX)
            inputs_TX = norm(residual_TH, None, self.mixer_norm)
        qkv, o = self.mixer.qkv_proj, self.mixer.o_proj
        product_STN = F.linear(inputs_TX, qkv.weight)[None]
        q_TQD, gate_TK = finish_queries(
            self.mixer, product_STN, cos_sin, batch.kv_slots_T.long(), cache, inputs_TX.dtype
        )
        mixed_TK = gate_output(self.mixer.attend(q_TQD, batch, cache).flatten(1), gate_TK)
        y_TH = norm(residual_TH, o.product(mixed_TK)[None], self.feed_forward_norm)
        block = self.feed_forward
        if isinstance(block, DenseFeedForward):
            residual_TH = block.down_proj.add_to(residual_TH, gated(block.gate_up_proj.product(y_TH)))
        else:
            assert run_experts is not None
            residual_TH = residual_TH + run_experts(block, y_TH, None, None)
        return norm(residual_TH, None, self.norm) if self.spec.joined else residual_TH

    def _normed(self, x_TH: torch.Tensor, parts_STH: torch.Tensor | None, norm: RMSNorm) -> torch.Tensor:
        return add_rms_norm(x_TH, parts_STH, norm.weight, norm.eps, None, norm.unit_offset)

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor, target_head_VH: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary, float32 [S, V]; -inf for tokens that it cannot draft.

        With one rank's part of the target's output layer they are the logits of this part.
        """
        weight = target_head_VH if self.lm_head is None else self.lm_head
        normed_SH = hidden_SH
        if not self.spec.joined:
            normed_SH = self._normed(hidden_SH.contiguous(), None, self.norm) if self.fused else self.norm(hidden_SH)
        logits_SK = float32_product(normed_SH, weight)
        if self.target_ids is None:
            return logits_SK
        logits_SV = logits_SK.new_full((len(logits_SK), self.vocab), -torch.inf)
        return logits_SV.index_copy_(1, self.target_ids, logits_SK)

    def regions(self) -> list[Region]:
        """Its parameters, each once, under the names of a checkpoint of its own."""
        return [with_spellings(region, self.spec.names.spellings) for region in self._regions()]

    def _regions(self) -> list[Region]:
        names = self.spec.names
        norms = {
            names.embed_norm: self.embed_norm,
            names.hidden_norm: self.hidden_norm,
            names.mixer_norm: self.mixer_norm,
            names.feed_forward_norm: self.feed_forward_norm,
            names.norm: self.norm,
        }
        regions = [
            *self.fc.regions(""),
            *(one_name(f"{name}.weight", norm.weight) for name, norm in norms.items() if norm is not None),
            *self.mixer.regions(names.layer),
            *self.feed_forward.regions(names.layer),
        ]
        if self.lm_head is not None:
            regions.append(one_name(f"{names.lm_head}.weight", self.lm_head))
        return regions

    def update_regions(self) -> list[Region]:
        """The same under the names of updates, which may leave each of them out."""
        prefixes = self.spec.names.prefixes
        return [
            replace(
                with_spellings(region, lambda name: tuple(prefix + name for prefix in prefixes)), kept_if_absent=True
            )
            for region in self.regions()
        ]

    def scale_views(self) -> dict[str, torch.Tensor]:
        """The views that take scales of coded experts, by the names of the weights in updates."""
        names, views = self.spec.names, self.feed_forward.scale_views(self.spec.names.layer)
        spelled = {name: view for stem, view in views.items() for name in names.spellings(stem)}
        return {prefix + name: view for prefix in names.prefixes for name, view in spelled.items()}

    def views(self) -> dict[str, torch.Tensor]:
        """Names of a checkpoint of its own, and for each a view of its part of a parameter."""
        return all_views(self.regions())


def _kernels_take(spec: DraftSpec) -> bool:
    """True if the fused kernels run everything between its products and its experts."""
    mixer, block = spec.mixer, spec.feed_forward
    if isinstance(mixer, LatentSpec) or mixer.gate or mixer.growth is not None:
        return False
    return isinstance(block, MoESpec) or block.activation == "silu"
