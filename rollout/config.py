"""The settings of a worker: name, type, default, unit and meaning of each.

A setting comes from a TOML file, then the environment, then the command line; the later one wins (see
`rollout.settings_sources`). A key that is not declared here is an error.
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


#: What runs a model: a decoder of a native family, or transformers' own code.
ModelImpl = Literal["auto", "native", "transformers"]
#: The frequencies of a model with LongRoPE.
LongRope = Literal["short", "long"]


class ModelSettings(_Section):
    """The model and the device."""

    path: str = Field("", description="checkpoint: a local folder or a Hugging Face hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub checkpoint")
    load_format: Literal["auto", "random"] = Field(
        "auto", description="auto reads the safetensors files; random fills tensors of the real shapes, for benchmarks"
    )
    model_impl: ModelImpl = Field(
        "auto",
        description="what runs the model. native: the decoder of this project, for the families that it has. "
        "transformers: transformers' own code over the paged KV cache, about half as fast, without adapters, routing, "
        "deterministic and expert_dtype. auto: native where the family is native, else transformers",
    )
    longrope: LongRope = Field(
        "short",
        description="frequencies of a model with LongRoPE (Phi-3, Phi-4-mini), for all sequences. short: sequences end "
        "at its original context. long: its whole context, and short sequences have these frequencies, too",
    )
    images: bool = Field(
        False,
        description="serve images: load the vision tower of a model of text and images, and take `media` in requests; "
        "false: such a model is served for text alone",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of the weights; auto: the checkpoint's type, float32 on a CPU"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    cpu_threads: int = Field(1, ge=1, description="threads of one tensor operation on a CPU")
    random_seed: int = Field(0, ge=0, description="seed of the weights that load_format=random makes")


def _adapter_folders(text: str) -> list[tuple[str, str]]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if any(not (name.strip() and folder.strip()) for name, _, folder in pairs):
        raise ValueError("adapters is written name=folder, several separated by commas")
    return [(name.strip(), folder.strip()) for name, _, folder in pairs]


class EngineSettings(_Section):
    """The pipeline, the rows, the KV cache, adapters, sleep."""

    pipeline_depth: Literal[1, 2] = Field(
        2, description="steps in flight: 2 overlaps host and device, 1 waits for each step"
    )
    max_rows: int = Field(32, ge=1, le=4096, description="sequences that decode at once")
    page_size: int = Field(16, ge=1, le=1024, description="tokens of KV in a page")
    kv_pages: int | None = Field(
        None, ge=2, description="pages in the KV pool; none: as many as fit the measured memory"
    )
    kv_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description="type of the KV cache. auto: the model's type. fp8_e4m3: half the bytes of bf16, relative error "
        "of up to 1/16 a value; needs a GPU of compute capability 8.9 or later",
    )
    kv_memory_fraction: float | None = Field(
        None,
        gt=0.0,
        le=0.98,
        description="share of the memory left by the weights that KV and (on a GPU) the largest steps may take; "
        "none: 0.85 on a GPU, 0.25 on a CPU; unused with kv_pages",
    )
    kv_memory_max_gib: float | None = Field(None, gt=0, description="upper bound on the KV pool, GiB")
    max_context_tokens: int | None = Field(
        None, ge=2, description="most tokens of prompt plus completion; none: the model's own limit"
    )
    fair_queue: bool = Field(
        True,
        description="clients of one priority that wait get equal numbers of tokens, however many completions each has "
        "queued, and their prompts are computed in turn; false: all goes in the order of arrival",
    )
    prefill_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="most prompt tokens in one prefill step; none: 8192 on a GPU (16384 with experts), 2048 on a CPU",
    )
    image_tokens: int = Field(
        16_384,
        ge=64,
        description="size of the buffer for embeddings of images, tokens; equal images of several requests are "
        "encoded once while they are in it. With model.images",
    )
    image_patches: int = Field(
        16_384,
        ge=1,
        description="most patches that the vision tower encodes before a prefill step, and most of an image or video",
    )
    cuda_graphs: bool = Field(
        True, description="capture decode steps as CUDA graphs; a MoE model also needs fused_experts"
    )
    fused_experts: bool = Field(
        True, description="run experts with the warp-decode and grouped kernels (bf16 or f16, on a GPU)"
    )
    expert_dtype: Literal["auto", "mxfp8", "fp8_row", "fp8_block"] = Field(
        "auto",
        description="type of the expert weights. auto: the model's type. The others are e4m3 codes, quantised when the "
        "weights arrive, with one scale for 32 inputs (mxfp8), for each output (fp8_row) or for 128 x 128 (fp8_block); "
        "they need fused_experts",
    )
    group_attention: bool = Field(
        True, description="decode attention reads KV pages that several rows share once, where that is faster; on a GPU"
    )
    deterministic: bool = Field(
        False,
        description="make every completion the same bit for bit, whatever else runs and however its KV was computed; "
        "slower, linear attention in prompts most of all; needs a GPU and the fused kernels, and excludes adapters",
    )
    routing: bool = Field(
        False,
        description="record the experts of every token, for return_routing (MoE models). Costs host memory: one byte a "
        "token, layer and chosen expert for the whole KV pool (two bytes from 257 experts on)",
    )
    adapter_slots: int = Field(
        0,
        ge=0,
        le=64,
        description="LoRA adapters on the device at once; 0 serves none",
    )
    adapter_rank: int = Field(32, ge=1, le=256, description="largest rank of an adapter; every slot has room for it")
    max_adapters: int = Field(
        32, ge=1, le=4096, description="adapters loaded at once; those without a slot stay in host memory"
    )
    adapter_root: str | None = Field(
        None, description="load_adapter reads adapters below this folder only; none: no adapter can be loaded by path"
    )
    adapters: str = Field(
        "",
        description="adapters to load at start: name=folder, separated by commas; PEFT folders",
    )
    sleep: bool = Field(
        False,
        description="allow sleep and wake: the device memory of weights and KV can be released and mapped again at the "
        "same addresses",
    )
    sleep_rows: Literal["keep", "abort"] = Field(
        "keep",
        description="default for running completions when `sleep` names no `mode`. keep: they wait and go on after the "
        "wake, at level 1 with their KV if host_kv_gib has room for it. abort: they are cancelled",
    )
    sleep_requests: Literal["wait", "refuse"] = Field(
        "wait", description="default for new requests during a sleep when `sleep` names no `requests`: wait, or refuse"
    )
    sleep_kv_s: float = Field(
        60.0,
        gt=0.0,
        description="a sleep fails if copying the KV of completions to the host takes longer, seconds",
    )
    cuda_graph_rows: int = Field(
        256,
        ge=1,
        le=4096,
        description="largest number of rows of a captured decode step; larger steps are launched kernel by kernel",
    )
    compile_threads: int = Field(
        16,
        ge=0,
        le=256,
        description="on a GPU: threads that compile all kernels at the start, at most one a core; 0: each kernel is "
        "compiled when it is first launched",
    )
    prefix_cache: bool = Field(True, description="keep the KV pages of prompts for later requests with the same prefix")
    state_snapshots: int | None = Field(
        None,
        ge=0,
        description="snapshots of the states of linear attention: one for each prompt that a group shares, up to two "
        "for each idle session, the others are a cache; models of attention alone have none. none: a quarter of "
        "max_rows, at least 4",
    )
    session_share: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="share of the KV pages that idle sessions may hold; rows that need pages evict them",
    )
    host_kv_gib: float = Field(
        0.0,
        ge=0.0,
        description="pinned host memory for the KV of preempted sequences and of all sequences in a sleep of level 1, "
        "GiB, of which the ranks of tensor_parallel have equal parts; 0: their KV is computed again",
    )
    host_kv_piece_mib: float = Field(
        32.0,
        gt=0.0,
        description="most MiB of KV that one copy between host and device moves; takes twice as much device memory",
    )
    kv_on_swap: Literal["keep", "recompute"] = Field(
        "keep",
        description="KV of running rows when the weights change. keep: it stays, and new tokens attend to older KV. "
        "recompute: it is computed again under the new weights",
    )
    recompute_fraction: float = Field(
        0.3,
        gt=0.0,
        le=1.0,
        description="with kv_on_swap = recompute: largest part of the time since the last update that computing KV "
        "again may take. A ready update waits until all KV that the last one dropped is there again, and until its "
        "steps took at most this part of the time. Nothing waits while no row runs, or during a pause, a hold or a "
        "sleep. 1.0: every update is applied at once",
    )
    mask_s: float = Field(
        1.0,
        gt=0,
        description="time limit for the mask of one constrained row, seconds; a completion that exceeds it fails",
    )
    mask_threads: int | None = Field(
        None, ge=1, le=64, description="threads that compute masks of constrained rows; none: half the cores"
    )
    speculation: Literal["off", "suffix", "ngram", "heads", "auto"] = Field(
        "off",
        description="draft tokens and verify several in one decode step; completions stay the same. suffix: what "
        "followed the last tokens before, in the row, in other completions of its prompt, and in earlier ones. "
        "ngram: the same in the row alone, found on the device, so that it knows each token at once. "
        "heads: guesses of speculation_model, or of the checkpoint's own layers for multi-token prediction. auto: "
        "suffix, and heads if there is a speculation_model or the checkpoint has such layers, else ngram; for each row "
        "what was right more often; and only as many drafts as pay, by acceptance and by the costs of steps on this "
        "device",
    )
    speculation_model: str | None = Field(
        None,
        description="checkpoint of the model that drafts with heads: a local folder or a Hugging Face hub id of an "
        "EAGLE-3 head for the served model. none: the served checkpoint's own layers for multi-token prediction. "
        "Every rank of tensor_parallel has all of it",
    )
    speculation_tokens: int = Field(3, ge=1, le=16, description="most drafts of a row in a step")
    speculation_rows: int = Field(
        64,
        ge=1,
        le=4096,
        description="most drafts of all rows in a step; each takes device memory for the state of a row",
    )
    speculation_kept_tokens: int = Field(
        1_000_000,
        ge=0,
        description="tokens of prompts and completions that are kept to draft from, beside those of running "
        "completions; one takes about 300 bytes of host memory",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="GPUs that run the model together, with a part of it each: ranks, a process each on this machine. "
        "Needs Linux; on a CPU the ranks are processes that share it. Excludes models that run through "
        "transformers' own code; heads and widths must be divisible (docs/tensor_groups.md)",
    )
    check_ranks: bool = Field(
        False,
        description="compare the tokens that the ranks of tensor_parallel drew after every step, and end the worker "
        "where they differ; for debugging",
    )
    rank_stall_s: float | None = Field(
        8.0,
        gt=0,
        description="seconds in which a rank of tensor_parallel completes no part of what it was ordered, or no rank "
        "any step, after which the worker returns all tokens and exits; none: never",
    )
    rank_start_stall_s: float | None = Field(
        120.0,
        gt=0,
        description="seconds in which ranks of tensor_parallel do nothing at the start that can be seen, after which "
        "the worker exits; bytes read, kernels compiled, values loaded and captured steps can be seen; none: never",
    )
    stop_check_every: int = Field(4, ge=1, description="tokens between two searches for stop strings")
    max_faults: int = Field(
        3, ge=0, description="engine faults in an hour that are repaired by a rebuild; one more ends the worker"
    )
    stall_s: float = Field(
        120.0,
        gt=0,
        description="seconds without a tick of the loop after which `status` says stalled and requests are refused",
    )
    stall_exit_s: float | None = Field(
        600.0,
        gt=0,
        description="seconds without a tick after which the worker returns all tokens and exits; none: never",
    )

    @property
    def expert_format(self) -> Literal["plain", "mxfp8", "fp8_row", "fp8_block"]:
        """`expert_dtype` as the kernels name it."""
        return "plain" if self.expert_dtype == "auto" else self.expert_dtype

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

    @property
    def step_rows(self) -> int:
        """The most rows of a decode step, drafts included."""
        return self.max_rows + self.draft_rows

    @property
    def snapshot_places(self) -> int:
        """`state_snapshots`, or its default."""
        return max(4, self.max_rows // 4) if self.state_snapshots is None else self.state_snapshots

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of the adapters to load at start, by name."""
        return dict(_adapter_folders(self.adapters))

    @model_validator(mode="after")
    def _adapters_fit(self) -> EngineSettings:
        given = _adapter_folders(self.adapters)
        if (given or self.adapter_root is not None) and not self.adapter_slots:
            raise ValueError(
                "adapters and adapter_root need adapter_slots: set it to the number of adapters in use at once"
            )
        if len(dict(given)) < len(given):
            raise ValueError("adapters has a name twice: choose different names")
        if len(given) > self.max_adapters:
            raise ValueError(f"adapters lists {len(given)}: raise max_adapters (now {self.max_adapters})")
        if self.adapter_slots and self.deterministic:
            raise ValueError("deterministic excludes adapters: set adapter_slots = 0")
        return self

    @model_validator(mode="after")
    def _drafts_have_a_model(self) -> EngineSettings:
        if self.speculation_model is not None and self.speculation not in ("heads", "auto"):
            raise ValueError(
                f"speculation_model is for speculation = heads or auto, not {self.speculation}: change one of them"
            )
        return self

    @model_validator(mode="after")
    def _ranks_can_do_it(self) -> EngineSettings:
        if self.tensor_parallel == 1:
            return self
        if not sys.platform.startswith("linux"):
            raise ValueError("tensor_parallel needs Linux: set it to 1")
        return self

    @model_validator(mode="after")
    def _codes_need_their_kernels(self) -> EngineSettings:
        if self.expert_dtype != "auto" and not self.fused_experts:
            raise ValueError(
                f"expert_dtype = {self.expert_dtype} needs fused_experts = true; or set expert_dtype = auto"
            )
        return self


class ServiceSettings(_Section):
    """The request socket and the limits of requests."""

    bind: str = Field(
        "tcp://127.0.0.1:5757",
        description="endpoint of the request socket, an IPv6 address in brackets; port 0 picks a free port",
    )
    max_queue: int = Field(4096, ge=1, description="most completions in the queue")
    max_n: int = Field(1024, ge=1, description="most completions of one request")
    max_prompt_tokens: int = Field(1 << 20, ge=1, description="most tokens of one prompt")
    max_message_bytes: int = Field(64 << 20, ge=1024, description="most bytes of one message, all frames")
    max_header_bytes: int = Field(16 << 20, ge=1024, description="most bytes of a message header")
    max_blobs: int = Field(256, ge=0, description="most blobs in one message")
    max_prompt_chars: int = Field(
        8 << 20, ge=1, description="most characters of a prompt sent as text, or rendered by a chat template"
    )
    max_prompt_s: float = Field(
        60.0, gt=0, description="time limit of chat template and tokenizer for one prompt, seconds"
    )
    max_constraint_s: float = Field(20.0, gt=0, description="time limit for compiling a constraint, seconds")
    max_pending_bytes: int = Field(
        1 << 30, ge=1024, description="most bytes of messages whose requests wait or run; further requests are refused"
    )
    max_clients: int = Field(1024, ge=1, description="clients that are remembered")
    lease_s: float = Field(
        60.0, ge=0, description="seconds that a named client may be disconnected before its requests are cancelled"
    )
    session_lease_s: float = Field(
        300.0, gt=0, description="seconds that a session keeps its KV for the next turn, unless the request sets it"
    )
    max_session_lease_s: float = Field(3600.0, gt=0, description="largest session_lease_s of a request, seconds")
    max_media: int = Field(64, ge=1, le=4096, description="most images and videos of a request; with model.images")
    max_media_patches: int = Field(262_144, ge=1, description="most patches of all images and videos of a request")
    media_store_bytes: int = Field(
        2 << 30,
        ge=1,
        description="host memory for the pixels of images, bytes: of images that requests in flight need or "
        "that later requests may name by their hash",
    )
    max_results: int = Field(4096, ge=0, description="results kept until they are acknowledged")
    max_results_bytes: int = Field(512 << 20, ge=0, description="most bytes of all kept results")
    max_reply_bytes: int = Field(1 << 30, ge=1, description="most bytes of top log-probs and routing in one reply")
    max_results_age_s: float = Field(3600.0, ge=0, description="seconds after which a kept result is dropped")
    heartbeat_s: float = Field(10.0, gt=0, description="interval of ZMTP heartbeats, seconds")
    max_stream_buffer_bytes: int = Field(
        256 << 20, ge=1 << 16, description="most unsent bytes for one slow client; then its stream is dropped"
    )
    drain_s: float = Field(
        30.0, ge=0, description="time limit of a drain, seconds; then unfinished completions are returned as they are"
    )

    @model_validator(mode="after")
    def _lease_within_its_limit(self) -> ServiceSettings:
        if self.session_lease_s > self.max_session_lease_s:
            raise ValueError(
                f"session_lease_s = {self.session_lease_s:g} is larger than max_session_lease_s = "
                f"{self.max_session_lease_s:g}: change one of them"
            )
        return self


class WeightsSettings(_Section):
    """The worker's side of the weight bridge."""

    bind: str = Field("tcp://127.0.0.1:0", description="endpoint for weight updates; port 0 picks a free port")
    initial_version: int = Field(0, ge=0, lt=2**63, description="weights version of the checkpoint")
    min_version: int = Field(
        0,
        ge=0,
        lt=2**63,
        description=(
            "no completion begins under an older version. With initial_version + 1 a worker that (re)starts waits for "
            "a publisher and never samples from its checkpoint"
        ),
    )
    idle_s: float = Field(
        60.0,
        gt=0,
        description=(
            "seconds without data after which an unfinished update is dropped; choose more than the publisher's "
            "begin_s and stall_s"
        ),
    )
    apply: Literal["auto", "staged", "in_place"] = Field(
        "auto",
        description=(
            "staged: an update is received into memory of its own and swapped in. in_place: generation is held while "
            "the update overwrites the weights. auto: staged if memory allows"
        ),
    )
    staging: Literal["auto", "device", "host"] = Field(
        "auto",
        description=(
            "memory of a staged update. device: GPU memory, which leaves less for KV. host: pinned host memory; the "
            "swap takes about 40 times as long. auto: device if that takes at most a third of the memory that the "
            "weights leave free"
        ),
    )

    @model_validator(mode="after")
    def _waits_somewhere(self) -> WeightsSettings:
        if self.apply == "in_place" and self.staging != "auto":
            raise ValueError(
                f"staging = {self.staging} applies to staged updates only: remove it, or set apply = staged"
            )
        return self


class SecuritySettings(_Section):
    """Encryption and authentication of the sockets."""

    curve_secret_key: str | None = Field(
        None,
        description="file with the CURVE secret key of both sockets (`rollout keys` makes it); none: no encryption",
    )
    curve_client_keys: str | None = Field(
        None, description="folder with the public keys (*.key) of clients that may connect"
    )
    insecure: bool = Field(False, description="allow addresses that other hosts can reach without CURVE")

    @model_validator(mode="after")
    def _both_or_none(self) -> SecuritySettings:
        if (self.curve_secret_key is None) != (self.curve_client_keys is None):
            raise ValueError("curve_secret_key and curve_client_keys go together: set both or neither")
        return self


class MetricsSettings(_Section):
    """Where metrics go, and how often."""

    interval_s: float = Field(5.0, gt=0, description="seconds between two reports")
    jsonl: str | None = Field(None, description="file for metrics, one JSON object a report")
    wandb: bool = Field(True, description="log to Weights & Biases; offline, below wandb_dir, if there is no API key")
    wandb_project: str = Field("rollout", description="W&B project")
    wandb_group: str | None = Field(None, description="W&B group, one for a job")
    wandb_name: str | None = Field(None, description="W&B run name")
    wandb_dir: str = Field("runs", description="folder of the W&B run files")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="HTTP port for Prometheus (/metrics) and /health; 0 picks a free port; none: no HTTP",
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="address of that HTTP port")
    timeline: str | None = Field(None, description="file for a PNG of the last steps, drawn when the worker ends")
    timeline_steps: int = Field(40, ge=2, le=2000, description="steps in the timeline picture")


class SupervisorSettings(_Section):
    """Several workers on one machine, or one, that are started again when they die."""

    workers: int = Field(
        1, ge=1, le=64, description="worker processes; a supervisor runs and restarts them if there are several"
    )
    supervise: bool = Field(
        False, description="supervise a single worker, too, such as one that has all GPUs with tensor_parallel"
    )
    max_restarts: int = Field(5, ge=0, description="restarts of one worker in an hour; after that it stays down")
    restart_backoff_s: float = Field(
        1.0, ge=0, description="seconds before the first restart; doubles with every restart in an hour, up to 60"
    )


class Settings(_Section):
    """All settings of one worker."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    service: ServiceSettings = Field(default_factory=ServiceSettings)
    weights: WeightsSettings = Field(default_factory=WeightsSettings)
    security: SecuritySettings = Field(default_factory=SecuritySettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    supervisor: SupervisorSettings = Field(default_factory=SupervisorSettings)
    ready_file: str | None = Field(
        None, description="file for the endpoints, as JSON, written when the worker is ready"
    )
    exit_with_parent: bool = Field(False, description="end the worker when its parent process ends")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is logged"
    )
    log_format: Literal["text", "json"] = Field("text", description="form of the log; json: one object a line")
