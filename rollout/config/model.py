"""The settings of the model: which checkpoint, and how it is loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout.config.section import Section

#: What runs a model: a decoder of a native family, or transformers' own code.
ModelImpl = Literal["auto", "native", "transformers"]
#: The frequencies of a model with LongRoPE.
LongRope = Literal["short", "long"]


class ModelSettings(Section):
    """The model and the device."""

    path: str = Field("", description="checkpoint: a local folder or a Hugging Face hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub checkpoint")
    load_format: Literal["auto", "random"] = Field(
        "auto", description="auto reads the safetensors files; random fills tensors of the real shapes, for benchmarks"
    )
    model_impl: ModelImpl = Field(
        "auto",
        description="native: this project's decoder; transformers: transformers' own code, about half as fast; "
        "auto: native if the family is native",
    )
    longrope: LongRope = Field(
        "short",
        description="frequencies of a model with LongRoPE (Phi-3, Phi-4-mini). short: sequences end at its original "
        "context; long: its whole context",
    )
    images: bool = Field(False, description="serve images; the model needs a vision tower")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of the weights; auto: the checkpoint's type, float32 on a CPU"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    cpu_threads: int = Field(1, ge=1, description="threads of one tensor operation on a CPU")
    random_seed: int = Field(0, ge=0, description="seed of the weights that load_format = random makes")
