"""The settings of the model: which checkpoint, and how it is loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout.config.section import SettingsSection

#: The code that runs a model: a decoder of a native family, or transformers' own code.
ModelImpl = Literal["auto", "native", "transformers"]
#: The frequencies of a model with LongRoPE.
LongRope = Literal["short", "long"]


class CheckpointSettings(SettingsSection):
    """The model and the device."""

    path: str = Field("", description="checkpoint: folder or Hugging Face hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub checkpoint")
    load_format: Literal["auto", "random"] = Field(
        "auto", description="random: tensors of the real shapes without files, for benchmarks"
    )
    model_impl: ModelImpl = Field(
        "auto",
        description="native: our decoder; transformers: its code, half as fast; auto: native if it can",
    )
    longrope: LongRope = Field(
        "short",
        description="frequencies of Phi-3 and Phi-4-mini; short ends sequences at the original context",
    )
    images: bool = Field(False, description="serve images, with the model's vision tower")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of the weights; auto: the checkpoint's, float32 on a CPU"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")


class ModelConstants(SettingsSection):
    """Values of the model that no source of settings can change. Tests load models with other values."""

    #: Seed of the weights that `load_format = random` makes.
    random_seed: int = 0


class ModelSettings(CheckpointSettings):
    """The model, and how it is loaded."""

    constants: ModelConstants = ModelConstants()
