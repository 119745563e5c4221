"""The settings of a worker: name, type, default, unit and meaning of each, in small groups by feature.

A setting comes from a TOML file, then the environment, then the command line; the later source wins (see
`rollout.settings_sources`). A key that is not declared here is an error.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollout.config.engine import AttentionSplit, EngineConstants, EngineSettings
from rollout.config.section import SettingsSection
from rollout.config.service import ServiceConstants, ServiceSettings

#: The code that runs a model: a decoder of a native family, or transformers' own code.
ModelImpl = Literal["auto", "native", "transformers"]
#: The frequencies of a model with LongRoPE.
LongRope = Literal["short", "long"]


class CheckpointSettings(SettingsSection):
    """The model and the device."""

    path: str = Field("", description="checkpoint: folder or Hugging Face hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub checkpoint")
    load_format: Literal["auto", "random"] = Field(
        "auto", description="random: tensors of the real shapes, for benchmarks"
    )
    model_impl: ModelImpl = Field(
        "auto", description="native: our decoder; transformers: transformers' code; auto: native if possible"
    )
    longrope: LongRope = Field("short", description="frequencies of Phi-3 and Phi-4-mini")
    images: bool = Field(False, description="serve images, with the model's vision tower")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of the weights; auto: the checkpoint's, on a CPU float32"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")


class ModelConstants(SettingsSection):
    """Values of the model that no source of settings can change. Tests load models with other values."""

    #: Seed of the weights that `load_format = random` makes.
    random_seed: int = 0


class ModelSettings(CheckpointSettings):
    """The model, and how it is loaded."""

    constants: ModelConstants = ModelConstants()


__all__ = [
    "AttentionSplit",
    "EngineConstants",
    "EngineSettings",
    "LongRope",
    "MetricsSettings",
    "ModelConstants",
    "ModelImpl",
    "ModelSettings",
    "SecuritySettings",
    "ServiceConstants",
    "ServiceSettings",
    "Settings",
    "SupervisorSettings",
    "WeightsSettings",
]


class MetricsSettings(SettingsSection):
    """Metrics: where they go, and how often."""

    interval_s: float = Field(5.0, gt=0, description="seconds between two reports")
    jsonl: str | None = Field(None, description="file for metrics, one JSON object a report")
    wandb: bool = Field(True, description="log to W&B, by its variables (WANDB_NAME, ...); offline without an API key")
    wandb_project: str = Field("rollout", description="W&B project")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="HTTP port of /metrics (Prometheus) and /health; 0: a free one; none: no HTTP"
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="address of the metrics port")


class WeightsSettings(SettingsSection):
    """The worker's side of weights updates."""

    bind: str = Field("tcp://127.0.0.1:0", description="endpoint for weights updates; port 0: a free one")
    initial_version: int = Field(0, ge=0, lt=2**63, description="weights version of the checkpoint")
    min_version: int = Field(0, ge=0, lt=2**63, description="no completion begins under an older version")
    idle_s: float = Field(60.0, gt=0, description="seconds without data after which an update is dropped")
    apply: Literal["auto", "staged", "in_place"] = Field(
        "auto",
        description="staged: an update has its own memory; in_place: it overwrites the weights while generation is "
        "held; auto: by memory",
    )
    staging: Literal["auto", "device", "host"] = Field(
        "auto",
        description="memory of a staged update; host: slower swaps; auto: device if it takes at most a third of the "
        "free memory",
    )

    @model_validator(mode="after")
    def _waits_somewhere(self) -> WeightsSettings:
        if self.apply == "in_place" and self.staging != "auto":
            raise ValueError(
                f"staging = {self.staging} applies to staged updates only: remove it, or set apply = staged"
            )
        return self


class SecuritySettings(SettingsSection):
    """Encryption and authentication of the sockets."""

    curve_secret_key: str | None = Field(
        None, description="file with the CURVE secret key (`rollout keys`); none: no encryption"
    )
    curve_client_keys: str | None = Field(None, description="folder with the public keys (*.key) of clients")
    insecure: bool = Field(False, description="allow public addresses without CURVE")

    @model_validator(mode="after")
    def _both_or_none(self) -> SecuritySettings:
        if (self.curve_secret_key is None) != (self.curve_client_keys is None):
            raise ValueError("curve_secret_key and curve_client_keys go together: set both or neither")
        return self


class SupervisorSettings(SettingsSection):
    """Several workers on one machine, and restarts."""

    workers: int = Field(1, ge=1, le=64, description="worker processes; a supervisor restarts several")
    supervise: bool = Field(False, description="supervise a single worker, too")
    max_restarts: int = Field(5, ge=0, description="restarts of a worker in an hour; then it stays down")
    restart_backoff_s: float = Field(
        1.0, ge=0, description="seconds before a restart; doubled by each in an hour, up to 60"
    )


class Settings(SettingsSection):
    """All settings of one worker."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    service: ServiceSettings = Field(default_factory=ServiceSettings)
    weights: WeightsSettings = Field(default_factory=WeightsSettings)
    security: SecuritySettings = Field(default_factory=SecuritySettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    supervisor: SupervisorSettings = Field(default_factory=SupervisorSettings)
    ready_file: str | None = Field(None, description="file for the endpoints, as JSON, once the worker is ready")
    exit_with_parent: bool = Field(False, description="end the worker when its parent process ends")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is logged"
    )
    log_format: Literal["text", "json"] = Field("text", description="json: one object a line")
