"""The settings of a worker: name, type, default, unit and meaning of each, in small groups by feature.

A setting comes from a TOML file, then the environment, then the command line; the later one wins (see
`rollout.settings_sources`). A key that is not declared here is an error.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollout.config.engine import EngineConstants, EngineSettings
from rollout.config.model import LongRope, ModelConstants, ModelImpl, ModelSettings
from rollout.config.observe import MetricsSettings
from rollout.config.section import SettingsSection
from rollout.config.service import ServiceConstants, ServiceSettings
from rollout.config.weights import WeightsSettings

__all__ = [
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


class SecuritySettings(SettingsSection):
    """Encryption and authentication of the sockets."""

    curve_secret_key: str | None = Field(
        None,
        description="file with the CURVE secret key (`rollout keys`); none: no encryption",
    )
    curve_client_keys: str | None = Field(None, description="folder with the public keys (*.key) of clients")
    insecure: bool = Field(False, description="allow addresses that other hosts can reach without CURVE")

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
        1.0, ge=0, description="seconds before a restart; doubles with each in an hour, up to 60"
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
    ready_file: str | None = Field(
        None, description="file for the endpoints, as JSON, written when the worker is ready"
    )
    exit_with_parent: bool = Field(False, description="end the worker when its parent process ends")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is logged"
    )
    log_format: Literal["text", "json"] = Field("text", description="json: one object a line")
