"""Language models over a paged KV cache, and their loading from Hugging Face checkpoints."""

from rollout.checkpoint_folder import CheckpointError
from rollout.models.batch import AttentionBatch, KVCache, PromptChunk
from rollout.models.checkpoint_config import GenerationDefaults
from rollout.models.decoder import Decoder
from rollout.models.loader import LoadedModel, load_model
from rollout.models.names import NameCheck, check_names
from rollout.models.registry import supported_architectures
from rollout.models.spec import ModelSpec

__all__ = [
    "AttentionBatch",
    "CheckpointError",
    "PromptChunk",
    "Decoder",
    "GenerationDefaults",
    "KVCache",
    "LoadedModel",
    "ModelSpec",
    "NameCheck",
    "check_names",
    "load_model",
    "supported_architectures",
]
