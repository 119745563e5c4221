"""The decoder-only transformer that every supported family is an instance of.

Legend: T tokens of a step, S selected tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rollout_kernels.moe.formats import Format
from torch import nn

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.layers import Attention, Block, DenseMLP, RMSNorm, SparseMLP, empty_parameter
from rollout.models.names import Region, all_views, one_name
from rollout.models.rope import Rope
from rollout.models.spec import ModelSpec


class DecoderLayer(Block):
    """Attention and feed-forward block, each behind a norm and added to the residual stream."""

    def __init__(
        self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device, experts: Format = "plain"
    ) -> None:
        super().__init__()
        self.input_norm = RMSNorm(spec.hidden, spec.eps, dtype, device)
        self.attention = Attention(spec, layer, dtype, device)
        self.post_attention_norm = RMSNorm(spec.hidden, spec.eps, dtype, device)
        sparse = spec.is_sparse(layer)
        self.sparse_place = sum(map(spec.is_sparse, range(layer)))  # among the sparse layers, if it is one
        self.mlp = SparseMLP(spec, dtype, device, experts) if sparse else DenseMLP(spec, layer, dtype, device)

    def forward(
        self,
        x_TH: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        slots_T: torch.Tensor,
        batch: AttentionBatch,
        kv: KVCache,
    ) -> torch.Tensor:
        """The residual stream after this layer."""
        x_TH = self.attention(self.input_norm(x_TH), x_TH, cos_sin, slots_T, batch, kv)
        if isinstance(self.mlp, DenseMLP):
            return self.mlp(self.post_attention_norm(x_TH), x_TH, batch.adapters)
        if batch.experts is None:
            return self.mlp(self.post_attention_norm(x_TH), x_TH)
        kept_TK = batch.experts.layer(self.sparse_place, len(x_TH))
        return self.mlp(self.post_attention_norm(x_TH), x_TH, kept_TK)

    def regions(self, prefix: str) -> list[Region]:
        """Hugging Face tensors under `prefix`."""
        return [
            one_name(f"{prefix}input_layernorm.weight", self.input_norm.weight),
            *self.attention.regions(f"{prefix}self_attn."),
            one_name(f"{prefix}post_attention_layernorm.weight", self.post_attention_norm.weight),
            *self.mlp.regions(prefix),
        ]


class Decoder(Block):
    """A language model over a paged KV cache. Its parameters are uninitialised until a loader has filled them.

    `experts` is the format in which the weights of experts are kept; all else is of `dtype`.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, experts: Format = "plain") -> None:
        super().__init__()
        self.spec = spec
        self.experts = experts
        self.embed = empty_parameter(spec.vocab, spec.hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(spec, layer, dtype, device, experts) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.eps, dtype, device)
        # A tied output layer is the embedding itself: one parameter, one name.
        self.lm_head = self.embed if spec.tied else empty_parameter(spec.vocab, spec.hidden, dtype=dtype, device=device)
        self.rope = Rope(spec.rope, spec.head_dim, device)

    @torch.inference_mode()
    def forward(self, token_ids_T: torch.Tensor, batch: AttentionBatch, kv: KVCache) -> torch.Tensor:
        """Run one step: writes its KV, returns its hidden states after the final norm, [T, H] in the model's dtype."""
        x_TH = F.embedding(token_ids_T, self.embed)
        cos_sin = self.rope(batch.positions_T)
        slots_T = batch.kv_slots_T.long()
        for layer in self.layers:
            x_TH = layer(x_TH, cos_sin, slots_T, batch, kv)
        return self.norm(x_TH)

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits of selected hidden states, float32 [S, V]."""
        if hidden_SH.is_cuda and hidden_SH.dtype != torch.float32:
            # Rounding logits to 16 bits would cost more precision in log-probs than all else.
            return torch.mm(hidden_SH, self.lm_head.t(), out_dtype=torch.float32)
        return F.linear(hidden_SH.float(), self.lm_head.float())

    def hf_regions(self) -> list[Region]:
        """The model's parameters, each once, under their Hugging Face names."""
        regions = [one_name("model.embed_tokens.weight", self.embed)]
        for index, layer in enumerate(self.layers):
            regions += layer.regions(f"model.layers.{index}.")  # type: ignore[operator]
        regions.append(one_name("model.norm.weight", self.norm.weight))
        return regions if self.spec.tied else [*regions, one_name("lm_head.weight", self.lm_head)]

    def hf_views(self) -> dict[str, torch.Tensor]:
        """Hugging Face names of all layouts and the parts of fused parameters that they stand for.

        Names of different layouts cover the same memory; `check_names(hf_regions(), names, tied)` says whether a set
        of names covers everything once. Copying into a view changes the model; into one of coded experts, it quantises.
        """
        return all_views(self.hf_regions())
