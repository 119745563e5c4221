"""The settings of what a worker reports."""

from __future__ import annotations

from pydantic import Field

from rollout.config.section import SettingsSection


class MetricsSettings(SettingsSection):
    """Metrics: where they go, and how often."""

    interval_s: float = Field(5.0, gt=0, description="seconds between two reports")
    jsonl: str | None = Field(None, description="file for metrics, one JSON object a report")
    wandb: bool = Field(
        True,
        description="log to W&B, which reads its variables (WANDB_NAME, WANDB_RUN_GROUP, ...); without an API key "
        "offline, below WANDB_DIR or runs",
    )
    wandb_project: str = Field("rollout", description="W&B project")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="HTTP port of /metrics (Prometheus) and /health; 0: a free one; none: no HTTP",
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="address of the metrics port")
