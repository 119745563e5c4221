"""A causal LM of transformers as the engine sees it: forwards over the paged KV cache, logits, named parameters.

    forward          the module without its output layer, on packed tokens [1, T]; its layers call `paged_attention`
    compute_logits   what the module does after its last hidden states, with the output layer in float32

The module computes its own rotary embedding from the positions. In a packed step it gets no cache of transformers and
no mask; for other ways see `ways`.

Legend: T tokens of a step, S selected tokens, H hidden, V vocabulary.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.fallback.attention import PAGED, RUNNING, FallbackStep
from rollout.models.fallback.cache import CacheFacts, LayerCache, ModuleStates, base_of
from rollout.models.fallback.experts import kernel_sizes
from rollout.models.fallback.module_weights import checkpoint_regions, own_tensors
from rollout.models.fallback.probe import LayerFacts, probe_cache, probe_layers
from rollout.models.fallback.rows import FallbackRows
from rollout.models.fallback.ways import WAYS, Way
from rollout.models.layers import float32_product
from rollout.models.names import Region, all_views
from rollout.models.spec import KVShape, MoESpec
from rollout.models.state_pool import NO_STATES, States

#: A model that keeps states alone still counts its tokens by pages; nothing is written there.
_NO_KV = KVShape(1, 8, 0)


@dataclass(frozen=True, slots=True)
class FallbackSpec:
    """The facts about a model that the engine needs; the part of `ModelSpec` that a module of transformers shows."""

    architecture: str
    vocab: int
    max_positions: int  # the longest context that the model was made for
    layers: tuple[LayerFacts, ...]  # layers whose attention is ours
    kv_shapes: tuple[KVShape, ...]  # the KV of a token, for each layer that keeps some
    caches: tuple[LayerCache, ...]  # what each layer keeps in a cache of transformers; none in a packed step
    way: Way
    tied_names: Mapping[str, str]  # other names of tied tensors, such as the output layer's, with their first names
    moe: MoESpec | None = None  # routers and experts of a module are not known here
    unused: tuple[str, ...] = ()
    unused_patterns: tuple[str, ...] = ()  # patterns of tensors that its class leaves out of checkpoints

    @property
    def plain_scores(self) -> bool:
        """True if no layer's attention has a softcap or sinks."""
        return not any(layer.softcap or layer.sinks for layer in self.layers)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of KV cache that one token takes in all layers."""
        return sum(shape.bytes_per_token(dtype) for shape in self.kv_shapes)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row's state in all layers."""
        return sum(state.nbytes for layer in self.caches for state in layer.states)

    def draft_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a step keeps of one draft for the states: none, because nothing drafts."""
        return 0

    def allocate_states(
        self,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> States:
        """Memory for `places` states, if the model has any."""
        return ModuleStates.allocate(self.caches, places, device, zeros) if self.state_bytes(dtype) else NO_STATES


class TransformersModel:
    """Runs a module of transformers over the paged cache. The constructor probes its layers.

    Raises ValueError if a layer cannot be served.
    """

    def __init__(self, module: Any, max_positions: int, way: Way = WAYS[0]) -> None:
        self.module = module.eval().requires_grad_(False)
        self._head = _head_of(module)
        vocab, (_, aliases) = len(self.embed), own_tensors(module)
        self._layers: dict[nn.Module, LayerFacts] = {}
        self._rows: FallbackRows | None = None
        set_attention(module, "eager")
        facts = CacheFacts((), ())
        with torch.inference_mode():
            if way.rows != "packed":
                facts = probe_cache(module, vocab)
                self._rows = FallbackRows(module, way, facts)
            if way.attention == "paged" and (facts.kv_shapes or not facts.layers):
                self._layers = _own_attention(module, vocab)
                facts = replace(facts, kv_shapes=tuple(f.kv for f in self._layers.values() if not f.shared))
        if way == WAYS[0]:
            _check_all_layers(module, self._layers)
        self.spec = FallbackSpec(
            architecture=type(module).__name__,
            vocab=len(module.get_output_embeddings().weight),
            max_positions=max_positions,
            layers=tuple(self._layers.values()),
            kv_shapes=facts.kv_shapes or (_NO_KV,),
            caches=facts.layers,
            way=way,
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
        if self._rows is not None:
            return self._by_rows(self._rows, token_ids_T.long(), batch, kv)
        ids_1T, positions_1T = token_ids_T.long()[None], batch.positions_T.long()[None]
        with self._attention_of(batch, kv):
            return base_of(self.module)(input_ids=ids_1T, position_ids=positions_1T, use_cache=False).last_hidden_state[
                0
            ]

    def _by_rows(self, rows: FallbackRows, ids_T: torch.Tensor, batch: AttentionBatch, kv: KVCache) -> torch.Tensor:
        hidden_TH: torch.Tensor | None = None
        for at_BN, piece in rows.pieces(batch, kv):
            with self._attention_of(piece.batch, kv):
                hidden_BNH = rows.run(ids_T[at_BN], piece)
            if at_BN.numel() == len(ids_T):
                return hidden_BNH.flatten(0, 1)
            if hidden_TH is None:
                hidden_TH = hidden_BNH.new_zeros(len(ids_T), hidden_BNH.shape[-1])
            hidden_TH.index_copy_(0, at_BN.flatten(), hidden_BNH.flatten(0, 1))
        if hidden_TH is None:  # padding alone
            hidden_TH = self.embed.new_zeros(len(ids_T), self.embed.shape[1])
        return hidden_TH

    @contextlib.contextmanager
    def _attention_of(self, batch: AttentionBatch, kv: KVCache) -> Iterator[None]:
        """While it is entered, our attention finds this step."""
        running = RUNNING.set(FallbackStep(batch, kv, self._layers, batch.kv_slots_T.long()))
        try:
            yield
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


class _Result(MoeModelOutputWithPast):
    """The result of a base model. Absent fields are None; output layers pass them on."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):  # Python's own protocols ask for these
            raise AttributeError(name)


class _GivenStates(nn.Module):
    """Stands in for the module without its output layer, or for a part of it: returns its input, hidden states."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._facts = vars(base)  # no registered module: this one holds no parameters

    def __getattr__(self, name: str) -> Any:
        """A plain value of the module; a part of it is replaced as well."""
        facts = super().__getattribute__("__dict__").get("_facts", {})
        if name in facts.get("_modules", {}):
            return self
        if name in facts:
            return facts[name]
        raise AttributeError(name)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Result:
        """The result of a model with these last hidden states."""
        return _Result(last_hidden_state=inputs_embeds)


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
    """The module with its base replaced: its operations on hidden states before and after its output layer."""
    output, base = module.get_output_embeddings(), base_of(module)
    names = {id(child): name for name, child in module.named_children()}
    if type(output) is not nn.Linear or id(output) not in names or id(base) not in names:
        raise ValueError("it has no output layer of its own after a base model")
    head = copy.copy(module)  # shares everything but the table of its children
    replaced = {names[id(base)]: _GivenStates(base), names[id(output)]: _Float32Output(output)}
    head._modules = {**module._modules, **replaced}
    return head


def set_attention(module: Any, implementation: str) -> None:
    """Choose the attention function of a module whose code asks for one."""
    if type(module)._can_set_attn_implementation():
        module.set_attn_implementation(implementation)


def _own_attention(module: Any, vocab: int) -> dict[nn.Module, LayerFacts]:
    """The layers of a module, which call our attention from now on. Raises ValueError if one cannot be served."""
    cls = type(module)
    if not (cls._supports_attention_backend and cls._can_set_attn_implementation()):
        raise ValueError("its layers compute attention themselves, not through transformers' attention interface")
    layers = probe_layers(module, vocab)
    module.set_attn_implementation(PAGED)
    return layers


def _check_all_layers(module: Any, layers: dict[nn.Module, LayerFacts]) -> None:
    expected = module.config.get_text_config().num_hidden_layers
    if len(layers) != expected:
        raise ValueError(f"{len(layers)} of its {expected} layers call transformers' attention interface")
