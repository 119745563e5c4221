"""Settings of a worker: every key, its unit, its default.

A setting comes from a TOML file, then the environment, then the command line; the later one wins (see
`rollout.settings_sources`). A key that is not declared here is an error.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSettings(_Section):
    """Which weights to serve and how to hold them."""

    path: str = Field("", description="local folder or Hugging Face hub id of the checkpoint")
    revision: str | None = Field(None, description="branch, tag or commit of a hub checkpoint")
    load_format: Literal["auto", "random"] = Field(
        "auto", description="auto reads the checkpoint's safetensors; random fills the real shapes for benchmarks"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto takes the checkpoint's own type, float32 on a CPU"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    cpu_threads: int = Field(1, ge=1, description="threads of a tensor operation on a CPU")
    random_seed: int = Field(0, ge=0, description="seed of load_format=random")


def _adapter_folders(text: str) -> list[tuple[str, str]]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if any(not (name.strip() and folder.strip()) for name, _, folder in pairs):
        raise ValueError("adapters is written name=folder, several separated by commas")
    return [(name.strip(), folder.strip()) for name, _, folder in pairs]


class EngineSettings(_Section):
    """The two-slot pipeline, the rows and the KV pages."""

    pipeline_depth: Literal[1, 2] = Field(2, description="steps in flight: 2 overlaps the host, 1 waits for each step")
    max_rows: int = Field(32, ge=1, le=4096, description="sequences that decode at once")
    page_size: int = Field(16, ge=1, le=1024, description="tokens of KV in a page")
    kv_pages: int | None = Field(None, ge=2, description="pages in the KV pool; absent: sized from measured memory")
    kv_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description="how KV is kept: auto in the model's type; fp8_e4m3 in half the bytes of 16 bits, each value with "
        "an error of up to 1/16 of it; on a GPU from compute capability 8.9 on",
    )
    kv_memory_fraction: float = Field(
        0.85,
        gt=0.0,
        le=0.98,
        description="share of the memory beside the weights for KV and, on a GPU, the largest steps; not with kv_pages",
    )
    kv_memory_max_gib: float | None = Field(None, gt=0, description="upper bound on the KV pool, GiB")
    max_context_tokens: int | None = Field(
        None, ge=2, description="prompt plus completion, tokens; absent: what the model was made for"
    )
    prefill_chunk_tokens: int = Field(2048, ge=1, description="prompt tokens in one prefill step")
    cuda_graphs: bool = Field(True, description="capture decode steps as CUDA graphs; experts only with fused_experts")
    fused_experts: bool = Field(True, description="experts by the warp-decode kernels, in bf16 or f16 on a GPU")
    expert_dtype: Literal["auto", "mxfp8", "fp8_row", "fp8_block"] = Field(
        "auto",
        description="how weights of experts are kept: auto in the model's type; else as e4m3 codes with a scale for 32 "
        "inputs, for each output, or for 128 x 128, quantised as they arrive; with fused_experts only",
    )
    deterministic: bool = Field(
        False,
        description="a completion is the same bit for bit whatever runs beside it and however its context came about; "
        "prompts and steps take longer; needs a GPU and the fused kernels, and cannot have adapters",
    )
    routing: bool = Field(
        False,
        description="keep which experts each token takes, for return_routing; MoE models only. Takes host memory: for "
        "each token of the KV pool a byte for each of its experts in each layer (two from 257 experts on)",
    )
    adapter_slots: int = Field(
        0,
        ge=0,
        le=64,
        description="LoRA adapters on the device at once; 0: none are served, and nothing is kept for them",
    )
    adapter_rank: int = Field(32, ge=1, le=256, description="largest rank of an adapter; slots are made for it")
    max_adapters: int = Field(
        32, ge=1, le=4096, description="adapters loaded at once; those without a slot wait in host memory"
    )
    adapter_root: str | None = Field(
        None, description="folder below which load_adapter may read adapters; absent: none can be loaded by path"
    )
    adapters: str = Field(
        "",
        description="adapters to load at start: name=folder, several separated by commas; folders as PEFT writes them",
    )
    sleep: bool = Field(
        False,
        description="offer sleep and wake: weights and KV lie in memory that can be given back to the device and had "
        "again at the same addresses",
    )
    sleep_rows: Literal["keep", "abort"] = Field(
        "keep",
        description="what a sleep that does not say it does with completions: keep makes them wait, at level 1 with "
        "their KV as far as host_kv_gib has room, and computes the rest anew after the wake; abort cancels them",
    )
    sleep_requests: Literal["wait", "refuse"] = Field(
        "wait", description="what becomes of requests that come during a sleep that does not say it"
    )
    sleep_kv_s: float = Field(
        60.0,
        gt=0.0,
        description="seconds for which a sleep waits until the KV of completions is on the host; then it is refused",
    )
    cuda_graph_rows: int = Field(
        256, ge=1, le=4096, description="rows up to which decode steps are captured; larger ones are launched singly"
    )
    prefix_cache: bool = Field(True, description="keep pages of finished prompts for reuse")
    session_share: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="share of the KV pages that sessions may hold between their turns, which rows can have at any time",
    )
    host_kv_gib: float = Field(
        0.0,
        ge=0.0,
        description="pinned host memory, GiB, for the KV of preempted sequences, and of all in a sleep of level 1, "
        "which then come back without being computed again; 0: they are computed again",
    )
    host_kv_piece_mib: float = Field(
        32.0,
        gt=0.0,
        description="MiB that one copy of such KV moves at most, in pages; twice as much device memory is taken for it",
    )
    kv_on_swap: Literal["keep", "recompute"] = Field(
        "keep", description="what happens to the KV of running rows when weights change"
    )
    mask_s: float = Field(
        1.0, gt=0, description="seconds for the masks of a step; a completion that takes longer ends as an error"
    )
    mask_threads: int | None = Field(
        None, ge=1, le=64, description="threads that make the masks of constrained completions; absent: half the cores"
    )
    stop_check_every: int = Field(4, ge=1, description="tokens between two looks for stop strings")
    max_faults: int = Field(
        3, ge=0, description="faults in an hour after which the engine is rebuilt; the next one ends the worker"
    )
    stall_s: float = Field(
        120.0, gt=0, description="seconds for which the loop may hang before the status is stalled and work is refused"
    )
    stall_exit_s: float | None = Field(
        600.0, gt=0, description="seconds for which the loop may hang before the worker hands back what it has and ends"
    )

    @property
    def expert_format(self) -> Literal["plain", "mxfp8", "fp8_row", "fp8_block"]:
        """`expert_dtype` as the kernels name it."""
        return "plain" if self.expert_dtype == "auto" else self.expert_dtype

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of the adapters to load at start, by name."""
        return dict(_adapter_folders(self.adapters))

    @model_validator(mode="after")
    def _adapters_fit(self) -> EngineSettings:
        given = _adapter_folders(self.adapters)
        if (given or self.adapter_root is not None) and not self.adapter_slots:
            raise ValueError("adapters and adapter_root need adapter_slots: set how many lie on the device at once")
        if len(dict(given)) < len(given):
            raise ValueError("adapters names one twice: give each a name of its own")
        if len(given) > self.max_adapters:
            raise ValueError(f"adapters names {len(given)}, more than max_adapters = {self.max_adapters}: raise that")
        if self.adapter_slots and self.deterministic:
            raise ValueError("deterministic steps cannot have adapters: set adapter_slots = 0")
        return self

    @model_validator(mode="after")
    def _codes_need_their_kernels(self) -> EngineSettings:
        if self.expert_dtype != "auto" and not self.fused_experts:
            raise ValueError(f"expert_dtype = {self.expert_dtype} needs fused_experts: leave that on, or use auto")
        return self


class ServiceSettings(_Section):
    """The ZeroMQ socket and the limits on what a message may ask for."""

    bind: str = Field("tcp://127.0.0.1:5757", description="endpoint of the request socket; port 0 picks a free one")
    max_queue: int = Field(4096, ge=1, description="requests that may wait")
    max_n: int = Field(1024, ge=1, description="completions of one request")
    max_prompt_tokens: int = Field(1 << 20, ge=1, description="tokens of one prompt")
    max_message_bytes: int = Field(64 << 20, ge=1024, description="bytes of one message, all frames")
    max_header_bytes: int = Field(16 << 20, ge=1024, description="bytes of one message header")
    max_blobs: int = Field(256, ge=0, description="blobs of one message")
    max_prompt_chars: int = Field(
        8 << 20, ge=1, description="characters of one prompt sent as text, or of what a chat template makes of messages"
    )
    max_prompt_s: float = Field(
        60.0, gt=0, description="seconds that the chat template and the tokenizer may take for one prompt"
    )
    max_constraint_s: float = Field(20.0, gt=0, description="seconds that a constraint may take to be compiled")
    max_pending_bytes: int = Field(
        1 << 30, ge=1024, description="bytes of all messages whose requests wait or run; beyond that they are refused"
    )
    max_clients: int = Field(1024, ge=1, description="clients remembered at once")
    lease_s: float = Field(
        60.0, ge=0, description="seconds that a named client may stay away before its requests are ended"
    )
    session_lease_s: float = Field(
        300.0, gt=0, description="seconds for which a session's KV waits for the next turn, unless the request says it"
    )
    max_session_lease_s: float = Field(
        3600.0, gt=0, description="seconds, the longest session_lease_s that a request may ask for"
    )
    max_results: int = Field(4096, ge=0, description="results kept for clients that come back for them")
    max_results_bytes: int = Field(512 << 20, ge=0, description="bytes of all results that are kept")
    max_reply_bytes: int = Field(
        1 << 30, ge=1, description="bytes that the likeliest tokens and the routing of a request's reply may come to"
    )
    max_results_age_s: float = Field(3600.0, ge=0, description="seconds after which a result is forgotten")
    heartbeat_s: float = Field(10.0, gt=0, description="interval of ZMTP heartbeats, seconds")
    max_stream_buffer_bytes: int = Field(256 << 20, ge=1 << 16, description="unsent bytes kept for one slow client")
    drain_s: float = Field(
        30.0, ge=0, description="seconds that a drain may take before rows are handed back as they are"
    )

    @model_validator(mode="after")
    def _lease_within_its_limit(self) -> ServiceSettings:
        if self.session_lease_s > self.max_session_lease_s:
            raise ValueError(
                f"session_lease_s is {self.session_lease_s:g}, more than max_session_lease_s = "
                f"{self.max_session_lease_s:g}: lower it, or raise that"
            )
        return self


class WeightsSettings(_Section):
    """The worker's side of the weight bridge."""

    bind: str = Field("tcp://127.0.0.1:0", description="endpoint of the weight transport; port 0 picks a free one")
    initial_version: int = Field(
        0, ge=0, lt=2**63, description="weights version of the checkpoint that is served first"
    )
    min_version: int = Field(
        0,
        ge=0,
        lt=2**63,
        description=(
            "no request begins under older weights, whatever it asks for: with one more than initial_version a worker "
            "that starts, or starts again, waits for a publisher and never samples from its checkpoint"
        ),
    )
    idle_s: float = Field(
        60.0,
        gt=0,
        description=(
            "seconds without data after which a half-sent update is dropped; more than the publishers' begin_s and "
            "stall_s"
        ),
    )
    apply: Literal["auto", "staged", "in_place"] = Field(
        "auto",
        description=(
            "staged: updates wait whole in memory of their own and are swapped in; in_place: generation is held while "
            "they overwrite the weights; auto: staged where memory allows"
        ),
    )
    staging: Literal["auto", "device", "host"] = Field(
        "auto",
        description=(
            "where a staged update waits for its swap. device: in the GPU's memory, which the KV then lacks; host: in "
            "pinned host memory, from which the swap takes some 40 times as long; auto: device if it takes at most a "
            "third of what the weights leave free"
        ),
    )

    @model_validator(mode="after")
    def _waits_somewhere(self) -> WeightsSettings:
        if self.apply == "in_place" and self.staging != "auto":
            raise ValueError(f"staging = {self.staging} is for staged updates; leave it out, or set apply = staged")
        return self


class SecuritySettings(_Section):
    """Who may connect to the request socket and to the weight transport."""

    curve_secret_key: str | None = Field(
        None, description="file with the CURVE key pair of both sockets (rollout keys makes it); absent: no CURVE"
    )
    curve_client_keys: str | None = Field(
        None, description="folder with the public keys (*.key) of the clients that may connect"
    )
    insecure: bool = Field(False, description="bind addresses that other hosts can reach without CURVE")

    @model_validator(mode="after")
    def _both_or_none(self) -> SecuritySettings:
        if (self.curve_secret_key is None) != (self.curve_client_keys is None):
            raise ValueError("curve_secret_key and curve_client_keys go together: set both, or none")
        return self


class MetricsSettings(_Section):
    """What the worker reports of itself."""

    interval_s: float = Field(5.0, gt=0, description="seconds between two reports")
    jsonl: str | None = Field(None, description="file that gets one JSON object a report")
    wandb: bool = Field(True, description="log to Weights & Biases (offline when there is no key)")
    wandb_project: str = Field("rollout", description="W&B project")
    wandb_group: str | None = Field(None, description="W&B group, one for a job")
    wandb_name: str | None = Field(None, description="W&B run name")
    wandb_dir: str = Field("runs", description="folder of offline W&B runs")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of a page for Prometheus; 0 picks a free one; absent: no page"
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="address at which that page is served")
    timeline: str | None = Field(None, description="PNG picture of the last steps, written at the end")
    timeline_steps: int = Field(40, ge=2, le=2000, description="steps in the timeline picture")


class SupervisorSettings(_Section):
    """Several workers on one machine, each with a device of its own."""

    workers: int = Field(1, ge=1, le=64, description="worker processes; more than 1 has them supervised")
    max_restarts: int = Field(5, ge=0, description="restarts of one worker in an hour; then it is given up")
    restart_backoff_s: float = Field(
        1.0, ge=0, description="seconds before the first restart; doubles with each in the last hour, to 60 at most"
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
    ready_file: str | None = Field(None, description="file that gets the endpoints as JSON once the worker can serve")
    exit_with_parent: bool = Field(False, description="end when the process that launched the worker ends")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line shown")
    log_format: Literal["text", "json"] = Field("text", description="json writes each log line as a JSON object")
