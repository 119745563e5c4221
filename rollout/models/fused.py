"""Steps of a model on a GPU with the fused kernels: seven or eight launches a layer, nothing read on the host.

    add_rms_norm -> q/k/v product -> finish_qkv -> attention -> output product
    add_rms_norm -> gate/up product with SiLU -> down product       dense layers
    norm and router -> experts                                      sparse layers, see `fused_experts`

Decode and prefill differ in the attention, few and many tokens in the products: those with few tokens are our own, as
far as `rollout_kernels.linear.table` goes, the others cuBLAS's. The residual stream is kept in the model's dtype and is
read and written by the norms alone; products whose sum is added to it come in parts, float32 where there are
several. A step with adapters has a small kernel beside each product, and SiLU is then a kernel of its own: what reads a
product adds its correction. With many tokens, or where experts come next, products are corrected in place. A model
whose queries and keys are normalised all heads together, or clipped, takes the generic operations
between the q/k/v product and attention.

Legend: T tokens, S selected tokens, H hidden, W fused q/k/v width, I intermediate, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from rollout_kernels.linear.table import Config, last_rows, linear_config
from rollout_kernels.linear.triton_linear import gate_up_silu, linear, linear_parts
from rollout_kernels.lora import Correction
from rollout_kernels.lora.triton_lora import adds_later, shrink_beside
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm, embed_rope, finish_qkv, silu_mul

from rollout.models import deterministic as one_order
from rollout.models.adapters import Product, StepAdapters
from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.decoder import Decoder, DecoderLayer
from rollout.models.deterministic import products
from rollout.models.fused_experts import FusedExperts
from rollout.models.fused_experts import kernels_take as experts_take
from rollout.models.layers import Attention, DenseMLP
from rollout.models.spec import ModelSpec


def supports(model: Decoder, experts: bool) -> bool:
    """True if steps of this model are to be run by `FusedDecoder`: on a GPU, in 16 bits, and its kernels take it.

    `experts` says whether those of experts are to be used, too.
    """
    dtype = model.embed.dtype
    sixteen = model.embed.is_cuda and dtype in (torch.bfloat16, torch.float16)
    return sixteen and kernels_take(model.spec, dtype) and (experts or model.spec.moe is None)


def kernels_take(spec: ModelSpec, dtype: torch.dtype) -> bool:
    """True if the kernels can run a model, on whatever device: none of the rarer options, and experts that they take.

    Dense models run in float32 too: in Triton's interpreter, on a CPU.
    """
    rare = spec.mlp_bias or spec.o_bias
    return not rare and (spec.moe is None or experts_take(spec, dtype))


def _configs(spec: ModelSpec, tokens: int, deterministic: bool) -> dict[str, Config | None]:
    return {name: linear_config(*product, tokens, deterministic) for name, product in products(spec).items()}


class Unsummed(NamedTuple):
    """A product as the kernel that reads it takes it."""

    parts_STN: torch.Tensor
    correction: Correction | None  # of adapters, not yet added


class FusedDecoder:
    """Runs steps of a `Decoder` that `kernels_take`; shares its parameters and stands in for it.

    With `deterministic` a token's results do not depend on the step that it is in; see `rollout.models.deterministic`.
    """

    def __init__(self, model: Decoder, deterministic: bool = False) -> None:
        assert kernels_take(model.spec, model.embed.dtype)
        if deterministic:
            one_order.check_deterministic(model.spec)
        self._model = model
        self._deterministic = deterministic
        self._experts = None if model.spec.moe is None else FusedExperts(model, deterministic)
        self._plain_qkv = model.spec.qk_norm != "full" and model.spec.clip_qkv is None
        self._configs: dict[str, Config | None] = {}  # of the step that is being launched

    @torch.inference_mode()
    def __call__(self, token_ids_T: torch.Tensor, batch: AttentionBatch, kv: KVCache) -> torch.Tensor:
        """Run one step: writes its KV, returns its hidden states after the final norm, [T, H]."""
        model = self._model
        self._configs = _configs(model.spec, len(token_ids_T), self._deterministic)
        if self._experts is not None:
            self._experts.begin_step(len(token_ids_T))
        rope = model.rope
        residual_TH, cos_sin = embed_rope(token_ids_T, batch.positions_T, model.embed, rope.inv_freq_D, rope.sign_D)
        last = None
        for layer in model.layers:
            residual_TH, last = self._layer(cast(DecoderLayer, layer), residual_TH, last, cos_sin, batch, kv)
        return self._norm(residual_TH, last, model.norm.weight)

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits of selected hidden states, float32 [S, V]."""
        spec = self._model.spec
        config = linear_config(*products(spec)["head"], len(hidden_SH), self._deterministic)
        if config is None:
            return self._model.compute_logits(hidden_SH)
        return linear(hidden_SH, self._model.lm_head, config, out_dtype=torch.float32)

    def kernel_sizes(self) -> list[int]:
        """Numbers of tokens up to which a step runs by the same products and kernels of experts, ascending.

        Where no step of these sizes was run before, a kernel may be compiled while serving.
        """
        return sorted({*last_rows(), *([] if self._experts is None else self._experts.sizes())})

    def take_chosen(self) -> list[torch.Tensor]:
        """Experts of each sparse layer, int32 [T, K], of the step that was just captured; a replay writes them anew."""
        return [] if self._experts is None else self._experts.take_chosen()

    def _layer(
        self,
        layer: DecoderLayer,
        residual_TH: torch.Tensor,
        last: Unsummed | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        kv: KVCache,
    ) -> tuple[torch.Tensor, Unsummed]:
        """One layer; `last` is the last layer's output, not yet added. Returns the residual and this layer's."""
        x_TH = self._norm(residual_TH, last, layer.input_norm.weight)
        dense = isinstance(layer.mlp, DenseMLP)
        attended = self._attention(layer.attention, x_TH, cos_sin, batch, kv, later=dense)
        if not isinstance(layer.mlp, DenseMLP):
            assert self._experts is not None
            residual_TH, parts = self._experts.run(layer, residual_TH, attended.parts_STN, batch.experts)
            return residual_TH, Unsummed(parts, None)
        x_TH = self._norm(residual_TH, attended, layer.post_attention_norm.weight)
        gated_TI = self._gated(x_TH, layer.mlp, batch.adapters)
        return residual_TH, self._product("down", gated_TI, layer.mlp.down_proj.weight, layer.mlp.layer, batch.adapters)

    def _norm(self, residual_TH: torch.Tensor, added: Unsummed | None, weight_H: torch.Tensor) -> torch.Tensor:
        parts, correction = (None, None) if added is None else added
        return add_rms_norm(residual_TH, parts, weight_H, self._model.spec.eps, correction)

    def _product(
        self,
        name: Product,
        x: torch.Tensor,
        weight: torch.Tensor,
        layer: int,
        adapters: StepAdapters | None,
        later: bool = True,
    ) -> Unsummed:
        """`x weight^T` in parts. Unless the correction may be added `later`, the first part has it already."""
        config = self._configs[name]
        beside = later and adapters is not None and _adds_later(adapters, layer, name)
        parts = F.linear(x, weight)[None] if config is None else linear_parts(x, weight, config, beside)
        return Unsummed(parts, _correct(adapters, layer, name, parts[0], x, beside))

    def _gated(self, x_TH: torch.Tensor, mlp: DenseMLP, adapters: StepAdapters | None) -> torch.Tensor:
        config, weight_2IH = self._configs["gate_up"], mlp.gate_up_proj.weight
        if adapters is not None:  # they correct what goes into SiLU, so that is no part of the product
            beside = _adds_later(adapters, mlp.layer, "gate_up")
            if config is None:
                gate_up = F.linear(x_TH, weight_2IH)
            else:
                gate_up = linear(x_TH, weight_2IH, config, beside=beside)
            return silu_mul(gate_up, _correct(adapters, mlp.layer, "gate_up", gate_up, x_TH, beside))
        return silu_mul(F.linear(x_TH, weight_2IH)) if config is None else gate_up_silu(x_TH, weight_2IH, config)

    def _attention(
        self,
        attention: Attention,
        x_TH: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        kv: KVCache,
        later: bool,
    ) -> Unsummed:
        """The attention block's output; writes this layer's keys and values. For `later` see `_product`."""
        spec = self._model.spec
        cache = kv.layer(attention.layer)
        if self._plain_qkv:
            parts, correction = self._product("qkv", x_TH, attention.qkv_proj.weight, attention.layer, batch.adapters)
            q_TQD = finish_qkv(
                parts,
                attention.qkv_proj.bias,
                attention.qk_norm_weight if spec.qk_norm == "head" else None,
                spec.eps,
                *cos_sin,
                batch.kv_slots_T,
                cache.k_PSGD,
                cache.v_PSGD,
                spec.heads,
                cache.scales_P2GS,
                x_TH.dtype,
                correction,
            )
        else:
            q_TQD = attention.project(x_TH, cos_sin, batch.kv_slots_T.long(), cache, batch.adapters)
        if self._deterministic:
            out_TQD = one_order.attend(q_TQD, batch, cache, attention.scale, attention.window)
        else:
            out_TQD = attention.attend(q_TQD, batch, cache)
        out_TK = out_TQD.flatten(1)
        return self._product("o", out_TK, attention.o_proj.weight, attention.layer, batch.adapters, later)


def _adds_later(adapters: StepAdapters, layer: int, name: Product) -> bool:
    return adds_later(len(adapters.slots_T), adapters.of(layer, name), adapters.segmented)


def _correct(
    adapters: StepAdapters | None, layer: int, name: Product, y: torch.Tensor, x: torch.Tensor, beside: bool
) -> Correction | None:
    """The correction of the product `y` that was just launched: begun beside it, or added to it in place."""
    if adapters is None:
        return None
    if beside:
        return shrink_beside(x, adapters.of(layer, name), adapters.slots_T)
    adapters.add(layer, name, y, x)
    return None
