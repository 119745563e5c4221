"""The native families, one declaration each: a module for each lineage, all by architecture here."""

from rollout.models.families import (
    deepseek,
    gemma,
    glm,
    granite,
    llama,
    llama4,
    mistral,
    mixtures,
    nemotron,
    olmo,
    qwen,
)
from rollout.models.families.declare import Family, Multimodal

_LINEAGES = (llama, llama4, mistral, qwen, glm, deepseek, gemma, granite, olmo, mixtures, nemotron)
#: Families by their name in the `architectures` of a config.json.
FAMILIES: dict[str, Family] = {name: family for lineage in _LINEAGES for name, family in lineage.FAMILIES.items()}
MULTIMODAL: dict[str, Multimodal] = {
    name: whole for lineage in (mistral, qwen, deepseek, gemma, mixtures) for name, whole in lineage.MULTIMODAL.items()
}
