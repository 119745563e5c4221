"""The shape of a model as data: a tuple of layers, and for each layer its mixer and its feed-forward block.

A `ModelSpec` is complete. Nothing that builds, loads or runs a model reads the Hugging Face config again. A block is
built from its own spec alone, so layers may differ in everything but the width of the residual stream.

    ModelSpec
      layers: LayerSpec, one a layer
        mixer          AttentionSpec                         mixes tokens, keeps KV by page
                       | LatentSpec                          mixes tokens, keeps a latent by page
                       | CompressedSpec                      mixes tokens and windows of tokens, keeps both by page
                       | StateMixerSpec                      mixes tokens, keeps one state a row
        feed_forward   DenseSpec | MoESpec with a RouterSpec  works on each token alone

The spec of a shard says what one rank of a tensor group has: its numbers of heads and widths are the rank's, and the
products say which parts of the checkpoint's tensors they hold (`rollout.models.shard`).

A new variant is a field with a default where a block changes a little, and a class of its own where the block is
another one. Specs also hold the names of their tensors in checkpoints: module names, after the prefix of the layer.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from rollout_kernels.delta import Rule

from rollout.config import AttentionSplit
from rollout.models.cut import Cut
from rollout.models.vision_spec import TowerSpec

RopeKind = Literal["none", "default", "linear", "llama3", "yarn", "longrope", "proportional"]
#: none; each head alone, with one weight for all heads; each head alone, without weights; all heads together.
QKNorm = Literal["none", "head", "unit", "full"]
#: Keys and values of attention: products of the token; values are the keys before their norm; or the KV of the last
#: earlier layer of the same kind with KV of its own.
KVSource = Literal["own", "keys", "shared"]
#: The activation of a gated feed-forward block: SiLU, GELU, or GELU with tanh in the place of erf. A block with the
#: squared ReLU has no gate. `clamped` is the GLU of gpt-oss with an alpha of 1.702, and needs a limit.
Activation = Literal["silu", "bounded_silu", "gelu", "gelu_tanh", "relu2", "clamped"]
#: Functions by which a router turns logits into the weights of experts.
Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. `default` has the frequencies 1 / theta^(i / width), `none` turns by no angle."""

    kind: RopeKind
    theta: float
    #: Radians per position of the dimensions that turn, fastest first, where the embedding is scaled: float32 values.
    frequencies: tuple[float, ...] = ()
    amplitude: float = 1.0  # multiplies sine and cosine
    share: float = 1.0  # the share of a head's dimensions that turn, the first ones; the others stay
    interleaved: bool = False  # dimension i pairs with i + 1; otherwise with i + half
    #: The position, of three, that each frequency takes, fastest first; empty where a token has one position.
    axes: tuple[int, ...] = ()

    def width(self, head_dim: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_dim * self.share)


#: Names of caches of codes: e4m3, or e4m3 keys and int8 values.
CODED_KV = (torch.float8_e4m3fn, torch.int8)


class KVShape(NamedTuple):
    """The KV of a token in one layer: a key and a value for each KV head; a `v_dim` of 0 if values are in the keys.

    Of latent attention with an indexer, the indexer's keys stand in the place of values.
    """

    heads: int
    k_dim: int
    v_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of KV cache that one token takes; codes have float32 scales as well."""
        scales = 2 * torch.float32.itemsize if dtype in CODED_KV else 0
        return self.heads * ((self.k_dim + self.v_dim) * dtype.itemsize + scales)


class Shard(NamedTuple):
    """A rank of a tensor group: it has one of `size` equal parts of a width."""

    rank: int
    size: int

    def part(self, kept: int) -> tuple[int, int]:
        """The range of a width that this rank keeps: `kept` for each rank."""
        return self.rank * kept, (self.rank + 1) * kept

    def cut(self, *kept: int) -> Cut | None:
        """The cut of outputs that hold several modules side by side; every rank keeps a part of each.

        None for one rank, as for everything that is not cut.
        """
        if self.size == 1:
            return None
        begins = [sum(kept[:index]) * self.size for index in range(len(kept))]
        parts = [self.part(width) for width in kept]
        ranges = tuple((at + begin, at + end) for at, (begin, end) in zip(begins, parts, strict=True))
        return Cut(0, sum(kept) * self.size, ranges)

    def input_cut(self, kept: int) -> Cut | None:
        """The cut of a product whose inputs are by rank."""
        cut = self.cut(kept)
        return None if cut is None else cut.at(1)


#: The shard of a model on one rank.
WHOLE = Shard(0, 1)


class LinearSpec(NamedTuple):
    """A matrix product whose weight holds one or more modules of a checkpoint, side by side along the outputs."""

    inputs: int
    modules: tuple[str, ...]
    widths: tuple[int, ...]  # outputs of each module
    bias: bool
    #: The outputs of each module that a shard keeps, None for all; empty if it keeps all of every module.
    output_cuts: tuple[Cut | None, ...] = ()
    #: The inputs of each module that a shard keeps. The product is then a part of a sum over the ranks.
    input_cut: Cut | None = None
    joined: str = ""  # another name, of one module that holds two of equal width

    @property
    def outputs(self) -> int:
        return sum(self.widths)


def joined_cut(cuts: tuple[Cut | None, ...]) -> Cut | None:
    """The cut of a tensor that holds several modules side by side; None if they are not cut."""
    ranges: list[tuple[int, int]] = []
    whole = 0
    for cut in cuts:
        if cut is None:
            return None
        ranges += [(whole + begin, whole + end) for begin, end in cut.ranges]
        whole += cut.whole
    return Cut(0, whole, tuple(ranges))


def _all_inputs(width: int) -> Cut:
    """The cut of a product that is a part of a sum over the ranks although it has all inputs."""
    return Cut(1, width, ((0, width),))


def _widths(modules: tuple[str, ...], widths: tuple[int, ...]) -> tuple[int, ...]:
    """The outputs of each module, if one module may hold all of them."""
    return widths if len(modules) > 1 else (sum(widths),)


# --- mixers ----------------------------------------------------------------------------------------------------------


class AttentionNames(NamedTuple):
    """Modules of an attention block. `qkv` are three, or one that holds queries, keys and values side by side."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    gate: str = "self_attn.gate_proj"
    sinks: str = "self_attn.sinks"  # a tensor, no module


class BlockNames(NamedTuple):
    """Modules of an indexer of blocks."""

    q: str = "self_attn.index_q_proj"
    k: str = "self_attn.index_k_proj"
    q_norm: str = "self_attn.index_q_norm"
    k_norm: str = "self_attn.index_k_norm"


class BlocksSpec(NamedTuple):
    """The choice of the blocks of a context that take part in attention; see `rollout.models.chosen_blocks`."""

    dim: int  # dimensions of its queries and keys; rotary embeddings turn the first of them
    size: int  # tokens of a block
    top_k: int  # blocks that a token attends to
    nearest: int  # blocks that always take part: the token's own block, and blocks right before it
    names: BlockNames = BlockNames()


class QueryGrowth(NamedTuple):
    """A factor of the queries that grows with their position p: 1 + beta ln(1 + floor((p + first) / positions))."""

    beta: float
    positions: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention over the paged cache."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int | None  # tokens that a token sees, itself included; None: all
    qkv_bias: bool
    o_bias: bool
    qk_norm: QKNorm
    clip_qkv: float | None  # bounds queries, keys and values
    eps: float  # epsilon of the query and key norms
    names: AttentionNames = AttentionNames()
    scale: float | None = None  # factor of the scores; None: the head dimension to the power of -1/2
    softcap: float | None = None  # bounds the scaled scores s: softcap tanh(s / softcap)
    unit_offset: bool = False  # the weights of the query and key norms are stored less 1
    growth: QueryGrowth | None = None
    sinks: bool = False  # each head has a score that takes part in the softmax and has no value
    gate: bool = False  # a sigmoid of a product of the token weights the output, each value of each head on its own
    query_gate: bool = False  # such a gate inside the product of the queries: each head is followed by its gate
    inputs: int | None = None  # width of its input; None: the residual stream's
    value_dim: int | None = None  # dimensions of a value, fewer than of a key; None: as many
    value_scale: float = 1.0  # factor of the values
    value_norm: bool = False  # each value head is normalised, without weights
    kv: KVSource = "own"
    chunk: int | None = None  # positions of a chunk: a token attends within its own chunk; None: to all before it
    blocks: BlocksSpec | None = None  # a token attends to chosen blocks; None: to all before it
    shard: Shard = WHOLE  # the heads above are one rank's
    all_kv_heads: int = 0  # a shard: the KV heads of the whole model; a KV head may be on several ranks
    #: rows: all heads, but no rows of other ranks. context: all KV heads, but no positions of other ranks.
    split: AttentionSplit = "heads"

    @property
    def q_dim(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def v_dim(self) -> int:
        """Dimensions of a value head."""
        return self.value_dim or self.head_dim

    @property
    def qkv(self) -> LinearSpec:
        """The product that makes queries, their gates if any, and the block's own keys and values."""
        q_width = 2 * self.q_dim if self.query_gate else self.q_dim
        made = {"own": 3, "keys": 2, "shared": 1}[self.kv]
        modules = self.names.qkv[:made]
        widths = _widths(modules, (q_width, self.kv_dim, self.kv_heads * self.v_dim)[:made])
        each = (self.q_cut(q_width // self.heads), self.kv_cut(self.head_dim), self.kv_cut(self.v_dim))
        cuts = each[:made] if len(self.names.qkv) > 1 else (joined_cut(each),)
        return LinearSpec(self.inputs or self.hidden, modules, widths, self.qkv_bias, cuts)

    def q_cut(self, width: int) -> Cut | None:
        """A shard's cut of a tensor that has `width` entries for each query head."""
        return self.shard.cut(self.heads * width)

    def kv_cut(self, width: int) -> Cut | None:
        """A shard's cut of a tensor that has `width` entries for each KV head."""
        if self.shard.size == 1:
            return None
        kept = self.kept_kv_heads
        return Cut(0, self.all_kv_heads * width, ((kept.start * width, kept.stop * width),))

    @property
    def kept_kv_heads(self) -> slice:
        """The KV heads above, by their index in the whole model."""
        return slice(0, self.kv_heads) if self.split == "context" else self.own_kv_heads

    @property
    def own_kv_heads(self) -> slice:
        """The KV heads of the whole model that a shard's query heads read."""
        begin = self.shard.rank * self.all_kv_heads // self.shard.size
        return slice(begin, begin + max(1, self.all_kv_heads // self.shard.size))

    @property
    def decode_group(self) -> int:
        """Query heads that a rank's decode attention reads a KV head for."""
        return self.heads * (self.shard.size if self.split == "context" else 1) // self.kv_heads

    @property
    def index(self) -> LinearSpec:
        """The product that makes a query for each KV head, and one key, by which blocks are chosen."""
        assert self.blocks is not None
        dim, names = self.blocks.dim, self.blocks.names
        cuts = (self.kv_cut(dim), None)
        return LinearSpec(self.hidden, (names.q, names.k), (self.kv_heads * dim, dim), False, cuts)

    @property
    def output_gate(self) -> LinearSpec | None:
        """The projection that makes the output's gates, if it is a product by itself."""
        if not self.gate:
            return None
        return LinearSpec(self.hidden, (self.names.gate,), (self.q_dim,), False, (self.q_cut(self.head_dim),))

    @property
    def o(self) -> LinearSpec:
        width = self.heads * self.v_dim
        cut = _all_inputs(width) if self.split == "rows" else self.shard.input_cut(width)
        return LinearSpec(width, (self.names.o,), (self.hidden,), self.o_bias, (), cut)

    @property
    def turned(self) -> tuple[RopeSpec, int]:
        """Its rotary embedding, and the dimension of the heads that it is for."""
        return self.rope, self.head_dim

    @property
    def kv_shape(self) -> KVShape:
        """The KV of a token that it reads; the kernels take values as wide as keys."""
        return KVShape(self.kv_heads, self.head_dim, self.head_dim)

    @property
    def key_shape(self) -> KVShape | None:
        """The room of a token besides."""
        return None if self.blocks is None else KVShape(1, self.blocks.dim, 0)


class LatentNames(NamedTuple):
    """Modules of a block of latent attention."""

    q: str = "self_attn.q_proj"  # without a rank of the queries
    q_a: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    o: str = "self_attn.o_proj"
    gate: str = "self_attn.g_proj"


class IndexerNames(NamedTuple):
    """Modules of an indexer."""

    q: str = "self_attn.indexer.wq_b"
    k: str = "self_attn.indexer.wk"
    k_norm: str = "self_attn.indexer.k_norm"
    weights: str = "self_attn.indexer.weights_proj"


#: The same of an indexer that chooses entries of windows.
IN_COMPRESSOR = IndexerNames(
    q="self_attn.compressor.indexer.q_b_proj", weights="self_attn.compressor.indexer.scorer.weights_proj"
)


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The choice of the tokens that take part in latent attention; see `rollout.models.indexer`."""

    hidden: int
    q_rank: int  # width of the latent that its queries are made of
    heads: int
    dim: int  # dimensions of a head; the first ones turn
    top_k: int  # tokens that a token attends to
    interleaved: bool  # a dimension turns with its neighbour, whatever latent attention does
    eps: float = 1e-6  # epsilon of the norm of keys
    names: IndexerNames = IndexerNames()

    @property
    def q(self) -> LinearSpec:
        """The product that makes queries."""
        return LinearSpec(self.q_rank, (self.names.q,), (self.heads * self.dim,), False)

    @property
    def k(self) -> LinearSpec:
        """The product that makes the key of a token."""
        return LinearSpec(self.hidden, (self.names.k,), (self.dim,), False)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): all heads share one latent a token.

    A head's key is a product of the latent, then a rotary part that all heads share. Its value is another product.
    """

    hidden: int
    heads: int
    q_rank: int | None  # width of the queries' own latent; None: they are a product of the token
    kv_rank: int  # width of the latent
    nope_dim: int  # dimensions of a head's queries and keys that do not turn
    rope_dim: int  # dimensions that turn
    value_dim: int  # dimensions of a head
    rope: RopeSpec
    scale: float  # factor of the scores
    bias: bool  # biases of the products that make latents, and of the output product
    eps: float  # epsilon of the norms of latents
    names: LatentNames = LatentNames()
    growth: QueryGrowth | None = None
    gate: bool = False  # a sigmoid of a product of the token weights the output of each head
    indexer: IndexerSpec | None = None  # chooses tokens, also for the layers after it that share its choice
    shares_choice: bool = False  # it uses the choice of the last indexer before it
    shard: Shard = WHOLE  # the heads above are one rank's; latents are whole on every rank
    split: AttentionSplit = "heads"  # as `AttentionSpec.split`

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """The KV of a token: the latent, and the part of its keys that turns."""
        return self.kv_rank + self.rope_dim

    @property
    def inputs(self) -> LinearSpec:
        """The product of a token: the latent of its queries, or the queries themselves, then the latent of its KV."""
        query = (self.names.q, self.heads * self.head_dim) if self.q_rank is None else (self.names.q_a, self.q_rank)
        cuts = (*self._head_cuts(self.head_dim), None) if self.q_rank is None else ()
        return LinearSpec(self.hidden, (query[0], self.names.kv_a), (query[1], self.latent_dim), self.bias, cuts)

    @property
    def q_b(self) -> LinearSpec | None:
        """The product that makes queries of their latent."""
        if self.q_rank is None:
            return None
        cuts = self._head_cuts(self.head_dim)
        return LinearSpec(self.q_rank, (self.names.q_b,), (self.heads * self.head_dim,), False, cuts)

    @property
    def kv_b(self) -> LinearSpec:
        """The product that makes keys and values of the latent, by head; no step runs it for all heads as it is."""
        width = self.nope_dim + self.value_dim
        return LinearSpec(self.kv_rank, (self.names.kv_b,), (self.heads * width,), False, self._head_cuts(width))

    @property
    def output_gate(self) -> LinearSpec | None:
        """The projection to gates of the output, if the layer has them."""
        if not self.gate:
            return None
        return LinearSpec(self.hidden, (self.names.gate,), (self.heads,), False, self._head_cuts(1))

    @property
    def o(self) -> LinearSpec:
        width = self.heads * self.value_dim
        cut = _all_inputs(width) if self.split == "rows" else self.shard.input_cut(width)
        return LinearSpec(width, (self.names.o,), (self.hidden,), self.bias, (), cut)

    def _head_cuts(self, width: int) -> tuple[Cut | None]:
        """A shard's cut of a module that has `width` outputs for each head."""
        return (self.shard.cut(self.heads * width),)

    @property
    def turned(self) -> tuple[RopeSpec, int]:
        """Its rotary embedding, and the dimension that it is for."""
        return self.rope, self.rope_dim

    @property
    def kv_shape(self) -> KVShape:
        """The KV of a token: one head, whose values are the first dimensions of its key; then the indexer's key."""
        return KVShape(1, self.latent_dim, 0 if self.indexer is None else self.indexer.dim)


class WindowsSpec(NamedTuple):
    """The windows of tokens that a compressor makes entries of; see `rollout.models.compressed`."""

    tokens: int  # tokens of a window
    overlap: bool  # an entry is made of the window before as well


#: Tokens of a page that share room for one entry of a window.
ENTRY_TOKENS = 4


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Attention to a window of tokens and to entries that stand for earlier windows; one head is key and value."""

    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    groups: int  # groups of neighbouring heads, whose outputs become `o_rank` values each
    o_rank: int
    rope: RopeSpec  # turns the last dimensions of a head
    window: int  # tokens that a token sees, itself included
    eps: float
    windows: WindowsSpec | None = None  # None: there are no entries
    indexer: IndexerSpec | None = None  # chooses entries; None: all take part
    shard: Shard = WHOLE  # the heads and groups above are one rank's; keys and entries are whole on every rank
    split: AttentionSplit = "heads"

    @property
    def raw(self) -> tuple[int, int]:
        """Values and gates of a token, for the compressor of entries and for the indexer's."""
        times = 0 if self.windows is None else 4 if self.windows.overlap else 2
        return times * self.head_dim, 0 if self.indexer is None else times * self.indexer.dim

    @property
    def inputs(self) -> LinearSpec:
        """The product of a token: the latent of its queries, its key, then values and gates of compressors."""
        modules, widths = ["self_attn.q_a_proj", "self_attn.kv_proj"], [self.q_rank, self.head_dim]
        for name, width in zip(("compressor", "compressor.indexer"), self.raw, strict=True):
            modules += [f"self_attn.{name}.kv_proj", f"self_attn.{name}.gate_proj"] if width else []
            widths += [width // 2] * 2 if width else []
        return LinearSpec(self.hidden, tuple(modules), tuple(widths), False)

    @property
    def q_b(self) -> LinearSpec:
        """The product that makes queries of their latent."""
        width = self.heads * self.head_dim
        return LinearSpec(self.q_rank, ("self_attn.q_b_proj",), (width,), False, (self.shard.cut(width),))

    @property
    def o_a(self) -> LinearSpec:
        """The products that narrow the outputs of each group."""
        inputs, width = self.heads * self.head_dim // self.groups, self.groups * self.o_rank
        return LinearSpec(inputs, ("self_attn.o_a_proj",), (width,), False, (self.shard.cut(width),))

    @property
    def out(self) -> LinearSpec:
        width = self.groups * self.o_rank
        return LinearSpec(width, ("self_attn.o_b_proj",), (self.hidden,), False, (), self.shard.input_cut(width))

    @property
    def turned(self) -> tuple[RopeSpec, int]:
        """Its rotary embedding, and the dimension of the heads that it is for."""
        return self.rope, self.head_dim

    @property
    def kv_shape(self) -> KVShape:
        """Room of a token: its key and its share of entries; in the place of values its share of the indexer's."""
        entry = self.head_dim // ENTRY_TOKENS if self.windows is not None else 0
        return KVShape(1, self.head_dim + entry, self.indexer.dim // ENTRY_TOKENS if self.indexer is not None else 0)

    @property
    def key_shape(self) -> KVShape | None:
        """The room of a token besides."""
        return None if self.windows is None else KVShape(1, *self.raw)


class StateSizes(NamedTuple):
    """The state of a row in one layer: a matrix for each head, in float32, and the last inputs of a convolution."""

    heads: int
    key_dim: int
    value_dim: int
    channels: int  # channels of the convolution
    conv: int  # tokens that it sees, the present one included

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row's state; the convolution's inputs are of the model's dtype."""
        recurrent = self.heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return recurrent + self.channels * (self.conv - 1) * dtype.itemsize


class DraftSizes(NamedTuple):
    """The sizes of `DraftInputs` of one draft, beside the inputs of the convolution."""

    rule: Rule
    mixed: int
    gates: int

    def mixed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of what it takes of a token, in a model of `dtype`."""
        return dtype if self.rule == "gated" else torch.float32

    def bytes(self, dtype: torch.dtype) -> int:
        return self.mixed * self.mixed_dtype(dtype).itemsize + self.gates * torch.float32.itemsize


class StateMixer:
    """A mixer that keeps one state a row instead of KV."""

    __slots__ = ()
    hidden: int
    names: Any
    shard: Shard

    @property
    def state(self) -> StateSizes:
        raise NotImplementedError

    @property
    def kept(self) -> DraftSizes:
        """A step's data on one draft in this layer, kept until it is known whether it is accepted."""
        raise NotImplementedError

    @property
    def inputs(self) -> LinearSpec:
        """The product that makes everything that the block needs of a token."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Width of the outputs of all heads."""
        raise NotImplementedError

    @property
    def out(self) -> LinearSpec:
        cut = self.shard.input_cut(self.width)
        return LinearSpec(self.width, (self.names.out,), (self.hidden,), self.inputs.bias, (), cut)

    @property
    def head_cut(self) -> Cut | None:
        """A shard's cut of a tensor with an entry for each head."""
        return self.shard.cut(self.state.heads)

    @property
    def width_cut(self) -> Cut | None:
        """A shard's cut of a tensor with an entry for each dimension of each head."""
        return self.shard.cut(self.width)


class DeltaNetNames(NamedTuple):
    """Modules and tensors of a gated DeltaNet block.

    `inputs` are the modules of the product before the convolution: queries, keys, values, then output gates z, then b
    and a. `conv` are alternatives: one depthwise convolution over queries, keys and values, or three.
    """

    inputs: tuple[str, ...] = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
    conv: tuple[tuple[str, ...], ...] = (("linear_attn.conv1d",),)
    a_log: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(StateMixer):
    """Gated DeltaNet: linear attention whose state is corrected by each token (arXiv 2412.06464).

    A short convolution and SiLU come before it, a norm of each head and a gate after it.
    """

    hidden: int
    key_heads: int
    value_heads: int  # a multiple of the key heads; the value heads of a key head are neighbours
    key_dim: int  # dimensions of a head
    value_dim: int  # dimensions of a head
    conv: int  # tokens that the convolution sees, the present one included
    eps: float  # epsilon of the norm of the outputs
    interleaved: bool = False  # the input product is sorted by key head: its q, k, v, z; and its b, a
    beta_scale: float = 1.0  # how much of a key's old value a token may replace: 1 all of it, 2 reflects it
    names: DeltaNetNames = DeltaNetNames()
    shard: Shard = WHOLE  # the heads above are one rank's

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values: what the convolution works on."""
        return 2 * self.key_heads * self.key_dim + self.width

    @property
    def width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def input_widths(self) -> tuple[int, ...]:
        """Widths of queries, keys, values, gates z, b and a."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.width, self.width, self.value_heads, self.value_heads

    @property
    def inputs(self) -> LinearSpec:
        """The product that makes everything that the block needs of a token."""
        modules, (q, k, v, z, b, a) = self.names.inputs, self.input_widths
        by_modules = {2: (q + k + v + z, b + a), 4: (q + k + v, z, b, a), 6: (q, k, v, z, b, a)}
        widths = by_modules[len(modules)]
        joined = len(modules) == 4  # one module holds queries, keys and values side by side
        cuts = tuple(self.shard.cut(*((q, k, v) if joined and not at else (w,))) for at, w in enumerate(widths))
        return LinearSpec(self.hidden, modules, widths, False, cuts)

    @property
    def conv_cuts(self) -> tuple[Cut | None, Cut | None, Cut | None, Cut | None]:
        """A shard's cuts of a convolution over queries, keys and values, and of a convolution over each of them."""
        q, k, v, *_ = self.input_widths
        return self.shard.cut(q, k, v), self.shard.cut(q), self.shard.cut(k), self.shard.cut(v)

    @property
    def state(self) -> StateSizes:
        return StateSizes(self.value_heads, self.key_dim, self.value_dim, self.mixed, self.conv)

    @property
    def kept(self) -> DraftSizes:
        return DraftSizes("gated", self.mixed, 2 * self.value_heads)


class KimiDeltaNames(NamedTuple):
    """Modules and tensors of a block of Kimi delta attention. For `conv` see `DeltaNetNames`."""

    #: Queries, keys, values, b, then decays and output gates, or their latents.
    inputs: tuple[str, ...] = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *("self_attn.b_proj", "self_attn.f_a_proj", "self_attn.g_a_proj"),
    )
    decay: str = "self_attn.f_b_proj"
    gate: str = "self_attn.g_b_proj"
    conv: tuple[tuple[str, ...], ...] = (
        ("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
        ("self_attn.conv1d",),
    )
    a_log: str = "self_attn.A_log"
    dt_bias: str = "self_attn.dt_bias"
    norm: str = "self_attn.o_norm"
    out: str = "self_attn.o_proj"


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec(StateMixer):
    """Kimi delta attention; see `rollout.models.kimi_delta`."""

    hidden: int
    value_heads: int
    key_dim: int  # dimensions of a head
    value_dim: int  # the same
    rank: int | None  # width of the latents of decays and of output gates; None: they are products of the token
    conv: int  # tokens that the convolution sees, the present one included
    eps: float  # epsilon of the norm of the outputs
    bound: float | None = None  # below 0: a logarithm of a decay is this, times a sigmoid; None: a softplus makes it
    names: KimiDeltaNames = KimiDeltaNames()
    shard: Shard = WHOLE  # the heads above are one rank's

    @property
    def width(self) -> int:
        return self.value_heads * self.key_dim

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values: what the convolution works on."""
        return 3 * self.width

    @property
    def inputs(self) -> LinearSpec:
        """The product that makes everything that the block needs of a token."""
        last, cut = (self.width, self.width_cut) if self.rank is None else (self.rank, None)
        widths = (self.width, self.width, self.width, self.value_heads, last, last)
        cuts = (*(self.width_cut,) * 3, self.head_cut, cut, cut)
        return LinearSpec(self.hidden, self.names.inputs, widths, False, cuts)

    @property
    def decay(self) -> LinearSpec | None:
        """The product that makes the decays of channels of their latent."""
        return self._of_latent(self.names.decay)

    @property
    def gate(self) -> LinearSpec | None:
        """The product that makes output gates of their latent."""
        return self._of_latent(self.names.gate)

    def _of_latent(self, name: str) -> LinearSpec | None:
        if self.rank is None:
            return None
        return LinearSpec(self.rank, (name,), (self.width,), False, (self.width_cut,))

    @property
    def conv_cuts(self) -> tuple[Cut | None, ...]:
        """The cuts in the form of `DeltaNetSpec`'s fields."""
        return self.shard.cut(*(self.width,) * 3), *(self.width_cut,) * 3

    @property
    def state(self) -> StateSizes:
        return StateSizes(self.value_heads, self.key_dim, self.value_dim, self.mixed, self.conv)

    @property
    def kept(self) -> DraftSizes:
        return DraftSizes("channels", 2 * self.width, self.value_heads + self.width)


class Mamba2Names(NamedTuple):
    """Modules and tensors of a Mamba-2 block."""

    inputs: str = "mamba.in_proj"  # output gates, the inputs of the convolution, steps
    conv: str = "mamba.conv1d"
    a_log: str = "mamba.A_log"
    dt_bias: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    norm: str = "mamba.norm"
    out: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True)
class Mamba2Spec(StateMixer):
    """A Mamba-2 block; see `rollout.models.mamba2`."""

    hidden: int
    heads: int
    head_dim: int
    groups: int  # neighbouring heads of a group share what is written and read
    state_dim: int
    conv: int  # tokens that the convolution sees, the present one included
    conv_bias: bool
    bias: bool  # biases of the input and the output product
    steps: tuple[float, float]  # the least and the largest step
    eps: float  # epsilon of the norm of the outputs, of each group on its own
    names: Mamba2Names = Mamba2Names()
    shard: Shard = WHOLE  # the heads and groups above are one rank's
    all_groups: int = 0  # a shard: the groups of the whole model; one is on every rank

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed_widths(self) -> tuple[int, int, int]:
        """Widths of the convolution's channels: inputs of heads, writers of the state, readers of the state."""
        return self.width, self.groups * self.state_dim, self.groups * self.state_dim

    @property
    def inputs(self) -> LinearSpec:
        """The product that makes everything that the block needs of a token."""
        widths = (self.width, *self.mixed_widths, self.heads)
        cuts = (joined_cut((self.width_cut, *self._mixed_cuts, self.head_cut)),)
        return LinearSpec(self.hidden, (self.names.inputs,), (sum(widths),), self.bias, cuts)

    @property
    def _mixed_cuts(self) -> tuple[Cut | None, ...]:
        heads, group, _ = self.mixed_widths
        shared = Cut(0, group, ((0, group),)) if self.all_groups == 1 else self.shard.cut(group)
        return self.shard.cut(heads), shared, shared

    @property
    def conv_cut(self) -> Cut | None:
        """A shard's cut of the convolution."""
        return joined_cut(self._mixed_cuts)

    @property
    def state(self) -> StateSizes:
        return StateSizes(self.heads, self.state_dim, self.head_dim, sum(self.mixed_widths), self.conv)

    @property
    def kept(self) -> DraftSizes:
        return DraftSizes("plain", self.heads * self.state_dim + self.width, self.heads)


#: Mixers that keep KV by page, and those that keep one state a row.
KVMixerSpec = AttentionSpec | LatentSpec | CompressedSpec
StateMixerSpec = DeltaNetSpec | KimiDeltaSpec | Mamba2Spec
MixerSpec = KVMixerSpec | StateMixerSpec

# --- feed-forward blocks ---------------------------------------------------------------------------------------------


class DenseNames(NamedTuple):
    """Modules of a dense feed-forward block. `gate_up` are two, or one that holds gate and values side by side."""

    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    joined: str = ""  # another name, of one module in the place of the two


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A gated feed-forward block, or one without a gate; then `gate_up` has the values alone."""

    hidden: int
    intermediate: int
    bias: bool
    names: DenseNames = DenseNames()
    activation: Activation = "silu"
    limit: float | None = None  # bounds activations, see `rollout_kernels.gated`
    shard: Shard = WHOLE  # the intermediate width of one rank

    @property
    def gate_up(self) -> LinearSpec:
        """The product that makes gate and values."""
        parts = 1 if self.activation == "relu2" else 2
        widths = _widths(self.names.gate_up, (self.intermediate,) * parts)
        each = (self.shard.cut(self.intermediate),) * parts
        cuts = each if len(self.names.gate_up) > 1 else (joined_cut(each),)
        return LinearSpec(self.hidden, self.names.gate_up, widths, self.bias, cuts, joined=self.names.joined)

    @property
    def down(self) -> LinearSpec:
        cut = self.shard.input_cut(self.intermediate)
        return LinearSpec(self.intermediate, (self.names.down,), (self.hidden,), self.bias, (), cut)


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The rule by which a token gets its experts."""

    scoring: Scoring
    top_k: int
    renormalize: bool  # the weights of the chosen experts add up to 1, before `scale`
    bias: bool = False  # a tensor is added to the scores for the choice, and not to the weights: float32 [E]
    float32: bool = False  # logits are computed in float32 and not rounded to the model's dtype
    groups: int = 1  # number of groups of neighbouring experts
    top_groups: int = 1  # number of groups that a token takes experts of: with the largest sums of their best scores
    group_best: int = 2  # number of best scores in a group's sum
    scale: float = 1.0  # factor of the weights
    logit_bias: bool = False  # the product that makes the logits has a bias
    least_sum: float = 0.0  # weights that add up to less are divided by this
    weights_inputs: bool = False  # the weights are factors of experts' inputs, and not of their outputs

    @property
    def plain(self) -> bool:
        """True for the rule that the kernels have: the largest softmax, of logits in the model's dtype."""
        return self == RouterSpec("softmax", self.top_k, self.renormalize)


class MoENames(NamedTuple):
    """Modules of a mixture of experts; `{}` stands for the number of an expert."""

    router: tuple[str, ...] = ("mlp.gate",)  # alternatives; files usually have the first
    router_bias: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)  # alternatives; a tensor, no module
    bias_row: bool = False  # this tensor is a matrix of one row
    table: str = "mlp.gate.tid2eid"  # a tensor, no module
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    #: Tensors of all experts together, the alternative to single experts' tensors. Biases have these names and "_bias".
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    shared: DenseNames = DenseNames(
        ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), "mlp.shared_expert.down_proj"
    )
    shared_gate: str = "mlp.shared_expert_gate"
    narrow: str = ""  # the products around experts that work on a narrower state
    widen: str = ""


class ApartNames(NamedTuple):
    """Norms and factors of experts that are apart; the last two are tensors."""

    shared: str
    shared_output: str
    experts: str
    experts_output: str
    router_scale: str
    expert_factors: str


class ClampedGLUSpec(NamedTuple):
    """The activation of gpt-oss; see `clamped_glu` of the kernels."""

    alpha: float
    limit: float


class Limits(NamedTuple):
    """Bounds of activations, see `rollout_kernels.gated`; infinite in layers without one."""

    experts: float
    shared: float


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A mixture of gated feed-forward experts with SiLU, without a gate, or with biases and a clamped GLU.

    With the last gates and values alternate, and checkpoints have only the tensors of all experts, transposed.
    """

    hidden: int
    experts: int  # experts of the whole model, from which the router chooses
    intermediate: int  # width of one expert; in a shard with parts of experts, the rank's part
    router: RouterSpec
    names: MoENames = MoENames()
    shared: DenseSpec | None = None  # the experts that every token takes, added to the others, as one expert
    shared_gate: bool = False  # a sigmoid of the token weights the shared expert's output
    clamped: ClampedGLUSpec | None = None
    activation: Activation = "silu"
    limits: Limits | None = None
    turned: bool = False  # checkpoints have only the tensors of all experts, transposed, gates before values
    inner: int | None = None  # width of experts' inputs, if a product makes them of the token; None: the token's own
    apart: ApartNames | None = None  # the shared expert, the routed experts and the router have norms of their own
    eps: float = 0.0  # epsilon of norms of their own
    table: int | None = None  # tokens of a table that says the experts of each; None: the router chooses them
    shard: Shard = WHOLE  # one rank's part of each expert's intermediate width, or of the experts
    whole_experts: bool = False  # a shard: it keeps some whole experts

    @property
    def width(self) -> int:
        """Width of an expert's input and output."""
        return self.inner or self.hidden

    @property
    def halves(self) -> int:
        """Parts of an expert's first projection: gate and values, or these alone."""
        return 1 if self.activation == "relu2" else 2

    @property
    def kept_experts(self) -> range:
        """The experts that are kept: all, or one rank's."""
        if not self.whole_experts:
            return range(self.experts)
        return range(*self.shard.part(self.experts // self.shard.size))

    @property
    def expert_cut(self) -> Cut | None:
        """A shard's cut of a tensor of all experts, if it keeps whole experts."""
        return self.shard.cut(len(self.kept_experts)) if self.whole_experts else None

    @property
    def width_cut(self) -> Cut | None:
        """A shard's cut of an expert's intermediate width, if it keeps a part of each expert."""
        return None if self.whole_experts else self.shard.cut(self.intermediate)

    @property
    def gate_up_cut(self) -> Cut | None:
        """A shard's cut of gates and values together: gates first, or alternating with a clamped GLU."""
        if self.whole_experts:
            return None
        if self.clamped is not None:
            return self.shard.cut(2 * self.intermediate)
        return self.shard.cut(*(self.intermediate,) * self.halves)

    @property
    def shared_like_others(self) -> int:
        """The number of routed experts that could store the shared expert, cut along its width; 0: none fit."""
        shared = self.shared
        if shared is None or self.clamped is not None or shared.intermediate % self.intermediate or self.limits:
            return 0
        if (
            len(shared.names.gate_up) == 1 or self.inner is not None or self.router.weights_inputs or self.apart
        ):  # such tensors are kept as they are
            return 0
        return shared.intermediate // self.intermediate


FeedForwardSpec = DenseSpec | MoESpec


def _has_kv(mixer: MixerSpec | None) -> bool:
    """Whether a mixer keeps KV of its own."""
    return isinstance(mixer, KVMixerSpec) and not (isinstance(mixer, AttentionSpec) and mixer.kv == "shared")


def _key_shapes(mixer: MixerSpec | None) -> tuple[KVShape, ...]:
    """The shape of the second KV of a token, for a mixer that keeps one."""
    shape = mixer.key_shape if isinstance(mixer, AttentionSpec | CompressedSpec) else None
    return () if shape is None else (shape,)


# --- layers and the model --------------------------------------------------------------------------------------------


#: Positions of the norm of a block: the block reads the normalised stream, its output is normalised, or both.
NormPlace = Literal["before", "after", "around"]


class LayerNames(NamedTuple):
    """Norms of a layer. The last two are those after the blocks, where a block has a norm on each side."""

    mixer_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    mixer_output_norm: str = ""
    feed_forward_output_norm: str = ""
    #: Other names of the first two in files or updates.
    also_mixer_norm: str | None = None
    also_feed_forward_norm: str | None = None


class TokenInputNames(NamedTuple):
    """Modules of the inputs that layers have of a token: of the model, then of a layer."""

    embed: str = "model.embed_tokens_per_layer"
    project: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    widen: str = "per_layer_projection"
    output_norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class TokenInputSpec:
    """An input of each layer: the token's row of a separate embedding, and a product of the token's embedding."""

    dim: int
    vocab: int
    activation: Activation  # activation of the gate by which a layer weights its input
    names: TokenInputNames = TokenInputNames()


class StreamsSpec(NamedTuple):
    """Several residual streams in the place of one; see `rollout.models.residual_streams`."""

    number: int
    rounds: int  # how often the weights between streams are normalised
    eps: float


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A mixer and a feed-forward block, each with norms; the layer adds their outputs to the residual stream.

    A layer may have only one block, then with a norm before it.
    """

    mixer: MixerSpec | None
    feed_forward: FeedForwardSpec | None
    names: LayerNames = LayerNames()
    norms: NormPlace = "before"
    residual_scale: float = 1.0  # factor of the outputs that are added
    factor: str | None = None  # the name of a factor of the residual stream after the layer

    @property
    def blocks(self) -> tuple[MixerSpec | FeedForwardSpec, ...]:
        """Its blocks, in their order."""
        return tuple(block for block in (self.mixer, self.feed_forward) if block is not None)

    @property
    def sparse(self) -> bool:
        """True if the feed-forward block is a mixture of experts."""
        return isinstance(self.feed_forward, MoESpec)


#: Spellings of the beginning of a name in files and updates: (beginning, spellings). Files usually have the first
#: spelling.
Beginnings = tuple[tuple[str, tuple[str, ...]], ...]


def _spellings(name: str, beginnings: Beginnings) -> tuple[str, ...]:
    """All that files and updates may call a tensor or module of this name; files usually have the first."""
    for beginning, others in beginnings:
        if name.startswith(beginning):
            return tuple(other + name.removeprefix(beginning) for other in others)
    return (name,)


class DraftNames(NamedTuple):
    """Modules of a draft model. In updates all names have the prefix; in a checkpoint of its own they have not."""

    prefix: str
    layer: str  # the beginning of the names of its layer's blocks
    fc: str
    embed_norm: str
    hidden_norm: str
    feed_forward_norm: str
    norm: str  # the last one
    mixer_norm: str = ""  # where the mixer has a norm of its own
    lm_head: str = "lm_head"
    beginnings: Beginnings = ()  # beginnings of names without the prefix
    prefix_beginnings: Beginnings = ()

    def spellings(self, name: str) -> tuple[str, ...]:
        """All that a checkpoint of its own may call a tensor of this name."""
        return _spellings(name, self.beginnings)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """All that the names of its tensors may begin with in updates."""
        return _spellings(self.prefix, self.prefix_beginnings)


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft model of one layer over hidden states of its target model, in one of two layouts.

    EAGLE-3 (arXiv 2503.01840): the product `fc` fuses hidden states of several layers. The mixer reads the normalised
    embedding and hidden state side by side, and the hidden state is the residual stream.

    Multi-token prediction (`joined`; arXiv 2412.19437, section 2.2): `fc` makes the residual stream of the normalised
    embedding and hidden state. The layer is like the model's layers. Hidden states are read, and passed on, after a
    norm.
    """

    hidden: int  # width of the residual stream, as in the target
    vocab: int  # tokens that it can draft
    eps: float
    #: The target's layers before which the residual stream is read; the number of layers means after the last layer.
    taps: tuple[int, ...]
    mixer: AttentionSpec | LatentSpec
    feed_forward: FeedForwardSpec
    names: DraftNames
    joined: bool = False
    hidden_first: bool = False  # the hidden state stands before the embedding
    own_head: bool = False  # it has an output layer of its own, else it uses the target's
    mapped: bool = False  # its vocabulary is a part of the target's
    unit_offset: bool = False  # the weights of all norms are stored less 1
    norm_before_residual: bool = False  # EAGLE-3: the hidden state is added after its norm, and not before

    @property
    def read_width(self) -> int:
        """Width of the hidden states that are read of a token."""
        return len(self.taps) * self.hidden

    @property
    def fc(self) -> LinearSpec:
        """The product that joins embedding and hidden state, or fuses the hidden states which are read."""
        inputs = 2 * self.hidden if self.joined else self.read_width
        return LinearSpec(inputs, (self.names.fc,), (self.hidden,), False)


class ModelNames(NamedTuple):
    """Modules outside the layers, and the prefix of a layer; `{}` stands for its number."""

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    beginnings: Beginnings = ()  # beginnings of the names above
    parts: Beginnings = ()  # the same of parts inside of names
    renamed: tuple[tuple[str, str], ...] = ()  # parts, and what files have for them; replaced in turn

    def spellings(self, name: str) -> tuple[str, ...]:
        """All that files and updates may call a tensor or module of this name; files usually have the first."""
        names = _spellings(name, self.beginnings)
        if self.renamed:
            in_files = functools.reduce(lambda spelled, pair: spelled.replace(*pair), self.renamed, name)
            names = tuple(dict.fromkeys((in_files, *names)))
        for part, others in self.parts:
            if part in name:
                names = tuple(spelled.replace(part, other) for other in others for spelled in names)
        return names


@dataclass(frozen=True)
class ModelSpec:
    """Everything that the decoder is built from. All mixtures of experts are alike, except in limits and tables."""

    architecture: str
    hidden: int
    vocab: int
    eps: float  # epsilon of the norms before blocks, and of the last norm
    max_positions: int  # the longest context that the model was made for
    tied: bool  # the output layer is the embedding
    layers: tuple[LayerSpec, ...]
    names: ModelNames = ModelNames()
    embed_scale: float = 1.0  # factor of the embedding
    embed_scale_rounded: bool = False  # this factor is rounded to the model's dtype
    token_inputs: TokenInputSpec | None = None  # each layer adds a block of its own input
    streams: StreamsSpec | None = None  # there are several residual streams
    logit_divisor: float = 1.0
    logit_softcap: float | None = None  # bounds the logits l: softcap tanh(l / softcap)
    unit_offset: bool = False  # the weights of all norms are stored less 1
    #: Beginnings of the names of tensors that checkpoints and updates may have, but that text does not need.
    unused: tuple[str, ...] = ()
    turned_files: tuple[str, ...] = ()  # endings of tensors whose last two dimensions are swapped in files
    tower: TowerSpec | None = None  # the tower of a model that is served with images
    draft: DraftSpec | None = None  # the model that drafts for it
    #: The draft model that checkpoints may have as layers for the prediction of several tokens; see `draft`.
    mtp: DraftSpec | None = None
    shard: Shard = WHOLE  # blocks and vocabulary are one rank's part
    only_experts_coded: bool = False  # where weights are codes, as in a checkpoint in MXFP4

    @property
    def unused_patterns(self) -> tuple[str, ...]:
        """Regular expressions of such names: classes of transformers have them, native families do not."""
        return ()

    @property
    def kept_vocab(self) -> range:
        """The tokens whose rows of embedding and output layer are kept: all, or one rank's."""
        return self.vocab_of(self.shard.rank)

    @property
    def split(self) -> AttentionSplit:
        """The dimension that ranks divide in attention."""
        mixers = (layer.mixer for layer in self.layers)
        return next((mixer.split for mixer in mixers if isinstance(mixer, KVMixerSpec)), "heads")

    def vocab_of(self, rank: int) -> range:
        """The tokens that a rank of this shard's group keeps; the first ranks keep equally many.

        A rank's first token is a multiple of four, as a draw makes four random numbers at a time.
        """
        most = -(-self.vocab // (4 * self.shard.size)) * 4
        return range(min(self.vocab, rank * most), min(self.vocab, (rank + 1) * most))

    @property
    def vocab_cut(self) -> Cut | None:
        """A shard's cut of embedding and output layer."""
        if self.shard.size == 1:
            return None
        return Cut(0, self.vocab, ((self.kept_vocab.start, self.kept_vocab.stop),))

    @functools.cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with KV of their own, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if _has_kv(layer.mixer))

    @functools.cached_property
    def indexed_layers(self) -> tuple[int, ...]:
        """Indices of the layers that choose blocks or compress windows: each keeps more of a token beside its KV."""
        return tuple(index for index, layer in enumerate(self.layers) if _key_shapes(layer.mixer))

    def key_index(self, layer: int) -> int:
        """The index of what such a layer keeps, in `kv_shapes`."""
        return len(self.attention_layers) + self.indexed_layers.index(layer)

    def kv_index(self, layer: int) -> int:
        """The index of the KV that a layer reads, among the KV of `attention_layers`."""
        mixer = self.layers[layer].mixer
        if isinstance(mixer, AttentionSpec) and mixer.kv == "shared":
            kind = (mixer.turned, mixer.window, mixer.kv_shape)
            mixers = [(index, self.layers[index].mixer) for index in self.attention_layers if index < layer]
            own = [(i, m) for i, m in mixers if isinstance(m, AttentionSpec)]
            layer = next(i for i, m in reversed(own) if (m.turned, m.window, m.kv_shape) == kind)
        return self.attention_layers.index(layer)

    @functools.cached_property
    def state_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a state by row, ascending; empty for a model of attention alone."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mixer, StateMixer))

    @functools.cached_property
    def state_mixers(self) -> tuple[StateMixer, ...]:
        """The mixers of `state_layers`."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, StateMixer))

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row's state in all layers."""
        return sum(mixer.state.bytes(dtype) for mixer in self.state_mixers)

    def draft_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a step keeps of one draft for the states of all layers."""
        return sum(mixer.state.channels * dtype.itemsize + mixer.kept.bytes(dtype) for mixer in self.state_mixers)

    @functools.cached_property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.sparse)

    @functools.cached_property
    def moe(self) -> MoESpec | None:
        """The experts of each sparse layer, whose limits may differ; None for a dense model."""
        sparse = (layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoESpec))
        blocks = {replace(b, limits=b.limits and Limits(math.inf, math.inf), table=None) for b in sparse}
        assert len(blocks) <= 1, "records of experts and plans of kernels are made for one kind of mixture"
        return next(iter(blocks), None)

    @functools.cached_property
    def ropes(self) -> tuple[tuple[RopeSpec, int], ...]:
        """Rotary embeddings of the layers with their head dimensions, each once, in the order of the layers."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(dict.fromkeys(m.turned for m in mixers if isinstance(m, KVMixerSpec)))

    @property
    def plain_scores(self) -> bool:
        """True if no layer's attention has a softcap or sinks."""
        mixers = (layer.mixer for layer in self.layers)
        return not any(m.softcap or m.sinks for m in mixers if isinstance(m, AttentionSpec))

    @functools.cached_property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """The KV of a token for each of `attention_layers`, what `indexed_layers` keep, then of the draft model."""
        mixers = (self.layers[index].mixer for index in self.attention_layers)
        shapes = tuple(mixer.kv_shape for mixer in mixers if isinstance(mixer, KVMixerSpec))
        shapes += tuple(shape for index in self.indexed_layers for shape in _key_shapes(self.layers[index].mixer))
        return shapes if self.draft is None else (*shapes, self.draft.mixer.kv_shape)

    @property
    def tied_names(self) -> dict[str, str]:
        """Names of the output layer where it is the embedding, with a name of that. They may be sent, and need not."""
        if not self.tied:
            return {}
        embed = self.names.spellings(f"{self.names.embed}.weight")[0]
        return dict.fromkeys(self.names.spellings(f"{self.names.lm_head}.weight"), embed)

    def layer_prefixes(self, layer: int) -> tuple[str, ...]:
        """All that the names of a layer's tensors may begin with; files usually have the first."""
        return self.names.spellings(self.names.layer.format(layer))

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of KV cache that one token takes in all layers."""
        return sum(shape.bytes_per_token(dtype) for shape in self.kv_shapes)
