"""A draft model of one layer: it guesses the next tokens of another model, the target, from its hidden states.

EAGLE-3 (arXiv 2503.01840). At position p it gets the target's hidden states of p, fused by a product, and the embedding
of the token at p + 1; from these it guesses the token at p + 2:

    hidden_p, embedding of the token at p + 1  -->  one layer, with KV of its own  -->  hidden, logits for p + 2
    this hidden, embedding of that guess       -->  the same layer                 -->  hidden, logits for p + 3

So after the first guess it goes on from its own hidden states. Embedding, and output layer if it has none, are those of
the target. Its vocabulary may be a part of the target's. Its KV is one more layer of the target's pool, on the same
pages. On a GPU, in 16 bits, the fused kernels run all that is between its products.

Legend: T tokens, S selected tokens, H hidden, F width of the hidden states that are read, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm, embed_rope, finish_qkv, silu_mul

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.layers import (
    Attention,
    Block,
    DenseFeedForward,
    Linear,
    RMSNorm,
    StepContext,
    empty_parameter,
    float32_product,
)
from rollout.models.names import Region, all_views, one_name, with_spellings
from rollout.models.rope import Rope
from rollout.models.spec import DraftSpec

#: What the names of its tensors begin with in updates.
PREFIX = "draft."
#: Tensors of a checkpoint that say which tokens of the target its vocabulary has: the offset of each, and a flag for
#: each token of the target, which follows from the offsets.
OFFSETS, FLAGS = "d2t", "t2d"
_LAYER, _ALSO_LAYER = "midlayer.", "layers.0."


class DraftHead(Block):
    """The draft model. Its parameters are uninitialised until a loader has filled them.

    `kv_index` is its place among the layers with KV, `vocab` the size of the target's vocabulary.
    """

    def __init__(self, spec: DraftSpec, kv_index: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.vocab = spec, vocab
        in_16_bits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        self.fused = in_16_bits and spec.feed_forward.activation == "silu"
        self.fc = Linear(spec.fc, dtype, device)
        self.embed_norm, self.hidden_norm, self.feed_forward_norm, self.norm = (
            RMSNorm(spec.hidden, spec.eps, dtype, device) for _ in range(4)
        )
        self.rope = Rope(spec.mixer.rope, spec.mixer.head_dim, device)
        self.mixer = Attention(spec.mixer, 0, kv_index, 0, dtype, device)
        self.feed_forward = DenseFeedForward(spec.feed_forward, 0, dtype, device)
        self.lm_head = empty_parameter(spec.vocab, spec.hidden, dtype=dtype, device=device) if spec.own_head else None
        #: int64: the token of the target that each token of its vocabulary is; filled by the loader.
        self.target_ids: torch.Tensor | None
        ids = torch.arange(spec.vocab, device=device) if spec.mapped else None
        self.register_buffer("target_ids", ids, persistent=False)

    @torch.inference_mode()
    def fuse(self, hidden_TF: torch.Tensor) -> torch.Tensor:
        """The target's hidden states, fused, [T, H]."""
        return self.fc(hidden_TF)

    @torch.inference_mode()
    def forward(
        self,
        following_T: torch.Tensor,
        embed_VH: torch.Tensor,
        hidden_TH: torch.Tensor,
        batch: AttentionBatch,
        kv: KVCache,
    ) -> torch.Tensor:
        """Run its layer, which writes its KV; hidden states before the last norm, [T, H].

        `following_T` are the tokens after the positions of `hidden_TH`, `embed_VH` the target's embedding.
        """
        if self.fused:
            return self._by_kernels(following_T, embed_VH, hidden_TH, batch, kv)
        embeds_TH = F.embedding(following_T, embed_VH)
        context = StepContext((self.rope(batch.positions_T),), batch.kv_slots_T.long(), batch, kv)
        normed_TH = self.hidden_norm(hidden_TH)
        x_TH = normed_TH if self.spec.norm_before_residual else hidden_TH
        inputs_TX = torch.cat((self.embed_norm(embeds_TH), normed_TH), dim=-1)
        x_TH = self.mixer(inputs_TX, context).add_to(x_TH)
        return self.feed_forward(self.feed_forward_norm(x_TH), context).add_to(x_TH)

    def _by_kernels(
        self,
        following_T: torch.Tensor,
        embed_VH: torch.Tensor,
        hidden_TH: torch.Tensor,
        batch: AttentionBatch,
        kv: KVCache,
    ) -> torch.Tensor:
        spec, eps, cache = self.spec.mixer, self.spec.eps, kv.layer(self.mixer.kv_index)
        tables = embed_VH, self.rope.inv_freq_D, self.rope.sign_D
        embeds_TH, cos_sin = embed_rope(following_T.contiguous(), batch.positions_T.contiguous(), *tables)
        hidden_TH = hidden_TH.contiguous()
        normed_TH = add_rms_norm(hidden_TH, None, self.hidden_norm.weight, eps)
        inputs_TX = torch.cat((add_rms_norm(embeds_TH, None, self.embed_norm.weight, eps), normed_TH), dim=-1)
        qkv, o = self.mixer.qkv_proj, self.mixer.o_proj
        q_TQD = finish_qkv(
            F.linear(inputs_TX, qkv.weight)[None],
            qkv.bias,
            None,
            eps,
            *cos_sin,
            batch.kv_slots_T.long(),
            cache.k_PSGD,
            cache.v_PSGD,
            spec.heads,
            cache.scales_P2GS,
            inputs_TX.dtype,
        )
        mixed_TK = self.mixer.attend(q_TQD, batch, cache).flatten(1)
        residual_TH = (normed_TH if self.spec.norm_before_residual else hidden_TH).clone()  # changed in place from here
        y_TH = add_rms_norm(residual_TH, o.product(mixed_TK)[None], self.feed_forward_norm.weight, eps)
        gated_TI = silu_mul(self.feed_forward.gate_up_proj.product(y_TH))
        return self.feed_forward.down_proj.add_to(residual_TH, gated_TI)

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor, target_head_VH: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary, float32 [S, V]; -inf for tokens that it cannot draft."""
        weight = target_head_VH if self.lm_head is None else self.lm_head
        normed_SH = (
            add_rms_norm(hidden_SH.contiguous(), None, self.norm.weight, self.spec.eps)
            if self.fused
            else self.norm(hidden_SH)
        )
        logits_SK = float32_product(normed_SH, weight)
        if self.target_ids is None:
            return logits_SK
        logits_SV = logits_SK.new_full((len(logits_SK), self.vocab), -torch.inf)
        return logits_SV.index_copy_(1, self.target_ids, logits_SK)

    def regions(self) -> list[Region]:
        """Its parameters, each once, under the names of checkpoints."""
        norms = {
            f"{_LAYER}input_layernorm": self.embed_norm,
            f"{_LAYER}hidden_norm": self.hidden_norm,
            f"{_LAYER}post_attention_layernorm": self.feed_forward_norm,
            "norm": self.norm,
        }
        regions = [
            *self.fc.regions(""),
            *(one_name(f"{name}.weight", norm.weight) for name, norm in norms.items()),
            *self.mixer.regions(_LAYER),
            *self.feed_forward.regions(_LAYER),
        ]
        if self.lm_head is not None:
            regions.append(one_name("lm_head.weight", self.lm_head))
        return [with_spellings(region, _spellings) for region in regions]

    def update_regions(self) -> list[Region]:
        """The same under the names of updates, which may leave each of them out."""
        return [
            replace(with_spellings(region, lambda name: (PREFIX + name,)), kept_if_absent=True)
            for region in self.regions()
        ]

    def views(self) -> dict[str, torch.Tensor]:
        """Names of checkpoints, and for each a view of its part of a parameter."""
        return all_views(self.regions())


def _spellings(name: str) -> tuple[str, ...]:
    return (name, _ALSO_LAYER + name.removeprefix(_LAYER)) if name.startswith(_LAYER) else (name,)
