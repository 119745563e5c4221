"""A causal LM of transformers as the engine sees it: forwards over the paged KV cache, logits, named parameters.

    forward          the module without its output layer, on packed tokens [1, T]; its layers call `paged_attention`
    compute_logits   what the module does after its last hidden states, with the output layer in float32

The module computes its own rotary embedding from the positions. It gets no cache of transformers and no mask.

Legend: T tokens of a step, S selected tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.fallback.attention import RUNNING, FallbackStep
from rollout.models.fallback.experts import kernel_sizes
from rollout.models.fallback.probe import LayerFacts, probe_layers
from rollout.models.fallback.weights import checkpoint_regions, own_tensors
from rollout.models.layers import float32_product
from rollout.models.names import Region, all_views
from rollout.models.spec import KVShape, MoESpec


@dataclass(frozen=True, slots=True)
class FallbackSpec:
    """The facts about a model that the engine needs; the part of `ModelSpec` that a module of transformers shows."""

    architecture: str
    vocab: int
    max_positions: int  # the longest context that the model was made for
    layers: tuple[LayerFacts, ...]
    tied_names: Mapping[str, str]  # other names of tied tensors, such as the output layer's, with their first names
    moe: MoESpec | None = None  # routers and experts of a module are not known here
    unused: tuple[str, ...] = ()
    unused_patterns: tuple[str, ...] = ()  # patterns of tensors that its class leaves out of checkpoints

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """The KV of a token, for each layer."""
        return tuple(layer.kv for layer in self.layers)

    @property
    def plain_scores(self) -> bool:
        """True if no layer's attention has a softcap or sinks."""
        return not any(layer.softcap or layer.sinks for layer in self.layers)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of KV cache that one token takes in all layers."""
        return sum(shape.bytes_per_token(dtype) for shape in self.kv_shapes)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row's state in all layers: none, because layers with states are refused."""
        return 0


class TransformersModel:
    """Runs a module of transformers over the paged cache. The constructor probes its layers.

    Raises ValueError if a layer cannot be served.
    """

    experts = "plain"  # the format of the experts' weights

    def __init__(self, module: Any, max_positions: int) -> None:
        self.module = module.eval().requires_grad_(False)
        self._head = _head_of(module)
        embed, (_, aliases) = self.embed, own_tensors(module)
        with torch.inference_mode():
            self._layers = probe_layers(module, len(embed))
        _check_all_layers(module, self._layers)
        self.spec = FallbackSpec(
            architecture=type(module).__name__,
            vocab=len(module.get_output_embeddings().weight),
            max_positions=max_positions,
            layers=tuple(self._layers.values()),
            tied_names=aliases,
            unused_patterns=tuple(module._keys_to_ignore_on_load_unexpected or ()),
        )

    @property
    def embed(self) -> torch.Tensor:
        """The embedding, [V, H]; its dtype and device are the model's."""
        return self.module.get_input_embeddings().weight

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, each once."""
        return self.module.parameters()

    @torch.inference_mode()
    def __call__(self, token_ids_T: torch.Tensor, batch: AttentionBatch, kv: KVCache) -> torch.Tensor:
        """Run one step: writes its KV, returns its hidden states after the final norm, [T, H] in the model's dtype."""
        running = RUNNING.set(FallbackStep(batch, kv, self._layers, batch.kv_slots_T.long()))
        try:
            ids_1T, positions_1T = token_ids_T.long()[None], batch.positions_T.long()[None]
            return self.module.base_model(
                input_ids=ids_1T, position_ids=positions_1T, use_cache=False
            ).last_hidden_state[0]
        finally:
            RUNNING.reset(running)

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits of selected hidden states, float32 [S, V]."""
        return self._head(inputs_embeds=hidden_SH[None], use_cache=False).logits[0].float()

    def kernel_sizes(self) -> list[int]:
        """Numbers of tokens up to which a step runs by the same kernels of experts, ascending."""
        blocks = [module for module in self.module.modules() if hasattr(module, "_apply_gate")]
        top_k = getattr(self.module.config.get_text_config(), "num_experts_per_tok", None)
        if not blocks or type(top_k) is not int:
            return []
        return sorted(set().union(*(kernel_sizes(block, top_k) for block in blocks)))

    def hf_regions(self) -> list[Region]:
        """The module's parameters and saved buffers, each once, under the checkpoint's names and its own."""
        return checkpoint_regions(self.module)

    def hf_views(self) -> dict[str, torch.Tensor]:
        """Views by all these names; a copy into a view changes the model."""
        return all_views(self.hf_regions())


class _States(MoeModelOutputWithPast):
    """The result of a base model. Absent fields are None; output layers pass them on."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):  # Python's own protocols ask for these
            raise AttributeError(name)


class _GivenStates(nn.Module):
    """Stands in for the module without its output layer: returns the hidden states that it is given."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _States:
        """The result of a model whose last hidden states these are."""
        return _States(last_hidden_state=inputs_embeds)


class _Float32Output(nn.Module):
    """The output layer, computed in float32: logits rounded to 16 bits would cost log-probs their precision."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.weight = linear.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, S, H] to float32 [1, S, V]."""
        logits = float32_product(hidden[0], self.linear.weight)
        return logits[None] if self.linear.bias is None else logits[None] + self.linear.bias.float()


def _head_of(module: Any) -> Any:
    """The module with its base replaced: what it does to hidden states before and after its output layer."""
    output = module.get_output_embeddings()
    name = next((name for name, child in module.named_children() if child is output), None)
    if name is None or type(output) is not nn.Linear or module.base_model is module:
        raise ValueError("it has no output layer of its own after a base model")
    head = copy.copy(module)  # shares everything but the table of its children
    head._modules = {**module._modules, module.base_model_prefix: _GivenStates(), name: _Float32Output(output)}
    return head


def _check_all_layers(module: Any, layers: dict[nn.Module, LayerFacts]) -> None:
    expected = module.config.get_text_config().num_hidden_layers
    if len(layers) != expected:
        raise ValueError(
            f"{len(layers)} of its {expected} layers keep keys and values through transformers' attention interface; "
            "what the others keep (a linear state, KV of other layers) cannot be served"
        )
