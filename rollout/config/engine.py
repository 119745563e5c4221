"""The settings of the engine: a small group for each feature, and `EngineSettings`, which has all of them.

The groups are bases of `EngineSettings`: a user finds all of them in the table `[engine]`, and code reads
`engine.host_kv_gib`, or takes the group that it needs.
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import Field, model_validator

from rollout.config.section import SettingsSection

#: Attention is divided by heads, by the rows of a step, or by the positions of a context.
AttentionSplit = Literal["heads", "rows", "context"]


class StepSettings(SettingsSection):
    """Rows and steps."""

    max_rows: int = Field(32, ge=1, le=4096, description="sequences that decode at once")
    max_context_tokens: int | None = Field(
        None, ge=2, description="most tokens of prompt and completion; none: the model's limit"
    )
    prefill_chunk_tokens: int | None = Field(
        None, ge=1, description="most tokens of a prefill step; none: 8192 on a GPU (16384 with experts), 2048 on a CPU"
    )
    pipeline_depth: Literal[1, 2] = Field(2, description="steps in flight; 1: host and device do not overlap")
    cuda_graph_rows: int = Field(
        1024, ge=0, le=4096, description="most rows of a decode step in a CUDA graph; 0: no graphs"
    )
    kernel_cache: str | None = Field(
        None, min_length=1, description="folder of `rollout kernels`, read at the start in place of compiling"
    )
    group_attention: bool = Field(True, description="on a GPU, read shared KV pages once for all rows")
    deterministic: bool = Field(
        False, description="the same bits whatever else runs; slower; on GPUs with fused kernels"
    )

    @property
    def cuda_graphs(self) -> bool:
        """Whether decode steps are CUDA graphs."""
        return self.cuda_graph_rows > 0


class KVSettings(SettingsSection):
    """The KV cache."""

    page_size: int = Field(16, ge=1, le=1024, description="tokens of KV in a page")
    kv_pages: int | None = Field(None, ge=2, description="pages in the KV pool; none: as many as fit")
    kv_memory_fraction: float | None = Field(
        None,
        gt=0.0,
        le=0.98,
        description="largest share of the memory left by the weights, for KV and the largest steps; none: 0.25 on a "
        "CPU; a GPU keeps 5% free (3 GiB to 15%)",
    )
    kv_memory_max_gib: float | None = Field(
        None, gt=0, description="most GiB of the KV pool; set it if a trainer shares the GPU"
    )
    kv_dtype: Literal["auto", "fp8_e4m3", "fp8_int8"] = Field(
        "auto",
        description="fp8_e4m3: half the bytes of bf16, error up to 1/16; fp8_int8: a quarter of it for values; both "
        "need compute capability 8.9",
    )
    prefix_cache: bool = Field(True, description="keep KV for requests with the same prefix")
    state_snapshots: int | None = Field(
        None, ge=0, description="snapshots of linear-attention states; none: max_rows / 4, at least 4"
    )


class SwapSettings(SettingsSection):
    """KV when the weights change."""

    kv_on_swap: Literal["keep", "recompute"] = Field("keep", description="KV of running rows after an update")
    max_kv_age: int = Field(
        0, ge=0, description="most versions by which KV of prefixes and sessions may be older than the weights"
    )
    recompute_fraction: float = Field(
        0.3, gt=0.0, le=1.0, description="largest share of the time for recomputation, for which updates wait"
    )

    @model_validator(mode="after")
    def _older_kv_is_kept(self) -> SwapSettings:
        if self.max_kv_age and self.kv_on_swap != "keep":
            raise ValueError("max_kv_age above 0 needs kv_on_swap = keep; or set max_kv_age = 0")
        return self


class OffloadSettings(SettingsSection):
    """Offload and sleep."""

    host_kv_gib: float = Field(0.0, ge=0.0, description="pinned host memory for KV without room on the GPU; 0: none")
    disk_kv_gib: float = Field(0.0, ge=0.0, description="disk for KV of known prefixes without room on the host")
    disk_kv_folder: str | None = Field(
        None, min_length=1, description="folder on a local disk; each worker makes a subfolder and deletes it"
    )
    sleep: bool = Field(False, description="allow sleep, which releases the device memory")

    @model_validator(mode="after")
    def _disk_is_behind_the_host(self) -> OffloadSettings:
        if self.disk_kv_gib and (self.disk_kv_folder is None or not self.host_kv_gib):
            missing = "disk_kv_folder" if self.disk_kv_folder is None else "host_kv_gib"
            raise ValueError(f"disk_kv_gib = {self.disk_kv_gib} needs {missing}: set it, or set disk_kv_gib = 0")
        return self


class WeightFormatSettings(SettingsSection):
    """The format of weights."""

    weight_dtype: Literal["auto", "bf16", "fp8_block", "fp8_row", "mxfp8"] = Field(
        "auto",
        description="format of projections and experts; bf16: model.dtype; fp8_block, fp8_row, mxfp8: e4m3 with a "
        "scale for 128 x 128, an output, or 32 inputs; auto: the checkpoint's",
    )
    fp8_activations_from: int | None = Field(
        None,
        ge=1,
        description="tokens of a step from which on attention and MLP products round their inputs to e4m3; needs "
        "weights in fp8_block and a Hopper GPU; none: never",
    )

    @property
    def weight_format(self) -> Literal["auto", "plain", "fp8_block", "fp8_row", "mxfp8"]:
        """`weight_dtype` as the kernels name it."""
        return "plain" if self.weight_dtype == "bf16" else self.weight_dtype


class ExpertSettings(SettingsSection):
    """Experts, of MoE models."""

    routing: bool = Field(False, description="record experts for return_routing, in host memory")


def _adapter_folders(text: str) -> list[tuple[str, str]]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if any(not (name.strip() and folder.strip()) for name, _, folder in pairs):
        raise ValueError("adapters is written name=folder, several separated by commas")
    return [(name.strip(), folder.strip()) for name, _, folder in pairs]


class AdapterSettings(SettingsSection):
    """LoRA adapters."""

    adapter_slots: int = Field(0, ge=0, le=64, description="adapters on the device; 0: none")
    adapter_rank: int = Field(32, ge=1, le=256, description="largest rank")
    max_adapters: int = Field(32, ge=1, le=4096, description="most loaded adapters, with or without a slot")
    adapter_root: str | None = Field(None, description="folder below which load_adapter reads; none: it is refused")
    adapters: str = Field("", description="PEFT folders to load at start: name=folder, separated by commas")

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of the adapters to load at start, by name."""
        return dict(_adapter_folders(self.adapters))

    @model_validator(mode="after")
    def _adapters_fit(self) -> AdapterSettings:
        given = _adapter_folders(self.adapters)
        if (given or self.adapter_root is not None) and not self.adapter_slots:
            raise ValueError(
                "adapters and adapter_root need adapter_slots: set it to the number of adapters in use at once"
            )
        if len(dict(given)) < len(given):
            raise ValueError("adapters has the same name twice: choose different names")
        if len(given) > self.max_adapters:
            raise ValueError(f"adapters lists {len(given)}: raise max_adapters (now {self.max_adapters})")
        return self


class SpeculationSettings(SettingsSection):
    """Speculation: drafted tokens, several in a decode step."""

    speculation: Literal["off", "suffix", "ngram", "heads", "auto"] = Field(
        "off", description="source of drafts; suffix, ngram: earlier text; heads: a draft model; auto: what pays"
    )
    speculation_model: str | None = Field(
        None, description="folder or hub id of an EAGLE-3 head; none: the checkpoint's layers"
    )
    speculation_tokens: int = Field(3, ge=1, le=16, description="most drafts of a row in a step")
    speculation_rows: int = Field(64, ge=1, le=4096, description="most drafts of all rows in a step")

    @property
    def mtp(self) -> Literal["unused", "if_there", "needed"]:
        """Whether the checkpoint's own layers for multi-token prediction draft."""
        if self.speculation_model is not None or self.speculation not in ("heads", "auto"):
            return "unused"
        return "needed" if self.speculation == "heads" else "if_there"

    @property
    def draft_rows(self) -> int:
        """`speculation_rows`, or 0 without speculation."""
        return 0 if self.speculation == "off" else self.speculation_rows

    @model_validator(mode="after")
    def _drafts_have_a_model(self) -> SpeculationSettings:
        if self.speculation_model is not None and self.speculation not in ("heads", "auto"):
            raise ValueError(
                f"speculation_model is for speculation = heads or auto, not {self.speculation}: change one of them"
            )
        return self


class RankSettings(SettingsSection):
    """Several GPUs for one model."""

    tensor_parallel: int = Field(
        1, ge=1, le=64, description="GPUs of this machine for the model (ranks, a process each)"
    )
    attention_split: AttentionSplit = Field(
        "heads",
        description="what ranks divide in attention; rows: for models with experts; context: parts of each page, for "
        "latents and few KV heads",
    )
    rank_stall_s: float | None = Field(
        8.0,
        gt=0,
        description="seconds without progress of a rank until the worker exits, or a stopped one is killed; 15 times "
        "as many at the start; none: never",
    )
    check_ranks: bool = Field(False, description="for debugging: end the worker if ranks draw different tokens")

    @property
    def rank_start_stall_s(self) -> float | None:
        """Seconds without visible progress of all ranks after which a start has hung; None: never."""
        return None if self.rank_stall_s is None else 15 * self.rank_stall_s

    @model_validator(mode="after")
    def _ranks_can_do_it(self) -> RankSettings:
        if self.tensor_parallel > 1 and not sys.platform.startswith("linux"):
            raise ValueError("tensor_parallel needs Linux: set it to 1")
        if self.attention_split != "heads" and self.tensor_parallel == 1:
            raise ValueError(f"attention_split = {self.attention_split} needs tensor_parallel = 2 or more")
        return self


class FaultSettings(SettingsSection):
    """Faults and time limits."""

    mask_s: float = Field(
        1.0, gt=0, description="seconds for the mask of a constrained row, after which its completion fails"
    )
    stall_exit_s: float | None = Field(
        600.0,
        gt=0,
        description="seconds without a tick until the worker exits; after a fifth it refuses requests; none: no exit, "
        "refuses after 120",
    )

    @property
    def stalled_s(self) -> float:
        """Seconds without a tick after which the worker counts as stalled."""
        return 120.0 if self.stall_exit_s is None else self.stall_exit_s / 5


class EngineConstants(SettingsSection):
    """Values of the engine that no source of settings can change. Tests build engines with other values."""

    #: Embeddings of images on the device, tokens: one image of the largest size, or many small ones that stay for
    #: later requests. 16,384 tokens of width 4,096 in bf16 take 128 MiB.
    image_tokens: int = 16_384
    #: Patches of the largest image or video, and of what is encoded before one prefill step, since attention in the
    #: tower takes time by their square. A picture of 2,048 x 2,048 pixels has 16,384 patches of 16 x 16.
    image_patches: int = 16_384
    #: Share of the KV pages that idle sessions may hold. Half stays for the prefix cache; rows that need pages take
    #: them from both.
    session_share: float = 0.5
    #: Most KV that one copy between host and device moves, MiB. Large enough that the fixed cost of a copy is small;
    #: two such buffers are on the device.
    host_kv_piece_mib: float = 32.0
    #: Bytes of KV that a layer need not read, from which on rows read shared pages once. On an H100, 117 MB saved made
    #: a layer slower by a fifth (8 rows of 4K + 2K, 32 of 1K + 1K), 230 MB (32 rows of 4K + 2K, 4 KV heads) left it as
    #: it was, and 460 MB made it a quarter faster.
    shared_saved_bytes: int = 256 << 20
    #: The same in a verify step, where a row and its drafts share all pages. On an H100 with contexts of 4K, 8 rows
    #: with three drafts save 402 MB a layer and take 7.8 ms instead of 9.0, 16 rows 10.2 instead of 12.5; one row saves
    #: 50 MB and loses 1%: `--least-saved` of scripts/bench/speculation.py.
    ahead_saved_bytes: int = 64 << 20
    #: KV that rows share is read once only if they share at least this many positions.
    shared_positions: int = 256
    #: Threads that compute masks of constrained rows. None: half the cores, as the loop and the tokenizer need others.
    mask_threads: int | None = None
    #: Rebuilds of the engine in an hour; one more fault ends the worker.
    max_faults: int = 3
    #: Tokens of ended completions and prompts to draft from: 300 bytes each, so 300 MB of host memory.
    speculation_kept_tokens: int = 1_000_000
    #: Part of the device's time that its drafter takes while its drafts do not pay.
    unpaid_share: float = 0.005
    #: Seconds for copying the KV of completions to the host before a sleep: 100 GiB take 10 s at 10 GiB/s.
    sleep_kv_s: float = 60.0


class EngineSettings(
    StepSettings,
    KVSettings,
    SwapSettings,
    OffloadSettings,
    WeightFormatSettings,
    ExpertSettings,
    AdapterSettings,
    SpeculationSettings,
    RankSettings,
    FaultSettings,
):
    """All settings of the engine."""

    constants: EngineConstants = EngineConstants()

    @property
    def step_rows(self) -> int:
        """The most rows of a decode step, drafts included."""
        return self.max_rows + self.draft_rows

    @property
    def snapshot_places(self) -> int:
        """`state_snapshots`, or its default."""
        return max(4, self.max_rows // 4) if self.state_snapshots is None else self.state_snapshots

    @model_validator(mode="after")
    def _split_alone(self) -> EngineSettings:
        split, rows = self.attention_split, self.attention_split == "rows"
        others = {
            "host_kv_gib = 0": rows and self.host_kv_gib > 0,
            "speculation = off": rows and self.speculation != "off",
            "speculation = suffix, ngram or off": not rows and self.speculation in ("heads", "auto"),
            "deterministic = false": self.deterministic,
            f"page_size = a multiple of {self.tensor_parallel}": not rows and self.page_size % self.tensor_parallel > 0,
        }
        if split != "heads" and (wrong := [name for name, is_set in others.items() if is_set]):
            raise ValueError(f"attention_split = {split} needs {' and '.join(wrong)}")
        return self

    @model_validator(mode="after")
    def _deterministic_without_adapters(self) -> EngineSettings:
        if self.adapter_slots and self.deterministic:
            raise ValueError("deterministic does not work with adapters: set adapter_slots = 0")
        return self

    @model_validator(mode="after")
    def _disk_of_known_prefixes(self) -> EngineSettings:
        if self.disk_kv_gib and not self.prefix_cache:
            raise ValueError("disk_kv_gib keeps KV of the prefix cache: set prefix_cache = true, or disk_kv_gib = 0")
        return self

    @model_validator(mode="after")
    def _deterministic_with_new_kv(self) -> EngineSettings:
        if self.max_kv_age and self.deterministic:
            raise ValueError("deterministic does not work with KV of older weights: set max_kv_age = 0")
        return self
