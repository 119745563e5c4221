"""The shape of a model, in our words: what a config.json says once the differences between families are resolved.

A `ModelSpec` is complete: nothing that builds, loads or runs a model looks at the Hugging Face config again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

RopeKind = Literal["default", "linear", "llama3", "yarn"]
#: none; every head by itself, with one weight for all heads; all heads together.
QKNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding and its scaling; fields of other kinds than `kind` are unused."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies sine and cosine


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The sparse layers of a mixture-of-experts model."""

    experts: int
    top_k: int
    intermediate: int  # of one expert
    renormalize: bool  # the chosen experts' weights add up to 1
    layers: tuple[bool, ...]  # which layers are sparse; the others are dense
    naming: Literal["mlp", "block_sparse_moe"]  # how checkpoints name the tensors of one expert


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that the decoder is built from."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope: RopeSpec
    max_positions: int
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QKNorm
    clip_qkv: float | None
    windows: tuple[int | None, ...]  # of each layer; None sees everything
    moe: MoESpec | None

    @property
    def q_dim(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of KV cache that a token takes over all layers; those of e4m3 codes come with float32 scales."""
        scale = torch.float32.itemsize if dtype == torch.float8_e4m3fn else 0
        return 2 * self.layers * self.kv_heads * (self.head_dim * dtype.itemsize + scale)

    def is_sparse(self, layer: int) -> bool:
        """True if this layer's feed-forward block is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]
