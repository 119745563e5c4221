"""The settings of the worker's side of weights updates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollout.config.section import SettingsSection


class WeightsSettings(SettingsSection):
    """The worker's side of weights updates."""

    bind: str = Field("tcp://127.0.0.1:0", description="endpoint for weights updates; port 0: a free one")
    initial_version: int = Field(0, ge=0, lt=2**63, description="weights version of the checkpoint")
    min_version: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="no completion begins under an older version; initial_version + 1: never sample from the "
        "checkpoint",
    )
    idle_s: float = Field(
        60.0,
        gt=0,
        description="seconds without data after which an unfinished update is dropped; more than the publisher's "
        "begin_s and stall_s",
    )
    apply: Literal["auto", "staged", "in_place"] = Field(
        "auto",
        description="staged: an update has its own memory and is swapped in; in_place: it overwrites the weights "
        "while generation is held; auto: staged if memory allows",
    )
    staging: Literal["auto", "device", "host"] = Field(
        "auto",
        description="memory of a staged update; device: less KV; host: pinned, swaps take about 40 times as long; "
        "auto: device if it takes at most a third of the free memory",
    )

    @model_validator(mode="after")
    def _waits_somewhere(self) -> WeightsSettings:
        if self.apply == "in_place" and self.staging != "auto":
            raise ValueError(
                f"staging = {self.staging} applies to staged updates only: remove it, or set apply = staged"
            )
        return self
