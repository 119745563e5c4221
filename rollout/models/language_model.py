"""The models that the engine runs: a decoder of a native family, or a module of transformers.

Both are called with the tokens of a step, and have `spec`, `embed`, `parameters`, `compute_logits`,
`hf_regions` and `hf_views`. The second one is imported only where it is used: it needs most of transformers.
"""

from typing import TYPE_CHECKING, TypeAlias, Union

from rollout.models.decoder import Decoder

if TYPE_CHECKING:
    from rollout.models.fallback.model import FallbackSpec, TransformersModel
    from rollout.models.spec import ModelSpec

LanguageModel: TypeAlias = Union[Decoder, "TransformersModel"]
LanguageModelSpec: TypeAlias = Union["ModelSpec", "FallbackSpec"]


def native(model: LanguageModel) -> Decoder:
    """The model as a decoder, where settings that only native families have were checked (`check_model`)."""
    assert isinstance(model, Decoder), "only native families have adapters and routing"
    return model
