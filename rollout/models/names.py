"""The table between checkpoint names and fused parameters.

A region is a part of the model's parameters. It has one or more alternatives: each is a set of names that covers the
region exactly, such as one tensor an expert, or all experts stacked. A set of names is complete when it contains
exactly one whole alternative of every region, and nothing else.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from rollout.models.cut import Cut, CutView


@dataclass(frozen=True, slots=True)
class Region:
    """Sets of views that each cover the same parameters once; files usually have the first set."""

    alternatives: tuple[Mapping[str, torch.Tensor], ...]
    #: An update may leave the region out; then the region keeps its value: trainers hold it in a buffer, and send only
    #: parameters.
    kept_if_absent: bool = False


@dataclass(frozen=True, slots=True)
class NameCheck:
    """The names that keep a set from being complete, in the order of the model; all empty when it is complete."""

    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    doubled: tuple[str, ...]  # names of parameters that other names of the set cover too

    @property
    def complete(self) -> bool:
        """True if the names cover every parameter exactly once."""
        return not (self.missing or self.unknown or self.doubled)


def one_name(name: str, view: torch.Tensor, cut: Cut | None = None) -> Region:
    """A region that has only one name; of a shard, a `cut` of the tensor of this name."""
    return Region(({name: CutView.of(view.detach(), cut)},))


def with_spellings(region: Region, spellings: Callable[[str], tuple[str, ...]]) -> Region:
    """The region with each of its alternatives in all spellings; its names must have equally many."""
    alternatives = tuple(
        dict(zip(names, views.values(), strict=True))
        for views in region.alternatives
        for names in zip(*map(spellings, views), strict=True)
    )
    return replace(region, alternatives=alternatives)


def all_views(regions: Iterable[Region]) -> dict[str, torch.Tensor]:
    """Every name of every alternative."""
    return {name: view for region in regions for views in region.alternatives for name, view in views.items()}


def is_needed(name: str, tied: Container[str]) -> bool:
    """False for a tensor that follows from other tensors: if a checkpoint has it, it is not read.

    `tied` are other names of tied tensors.
    """
    return not (name.endswith(".rotary_emb.inv_freq") or name in tied)


def check_names(regions: Iterable[Region], names: Iterable[str]) -> NameCheck:
    """Compare `names` with the names that the model needs."""
    given = dict.fromkeys(names)
    known: set[str] = set()
    missing: list[str] = []
    doubled: list[str] = []
    for region in regions:
        found = [[name for name in views if name in given] for views in region.alternatives]
        known.update(name for names_found in found for name in names_found)
        best = max(range(len(found)), key=lambda i, found=found: len(found[i]))  # type: ignore[misc]
        missing += [name for name in region.alternatives[best] if name not in given]
        doubled += [name for i, names_found in enumerate(found) if i != best for name in names_found]
    return NameCheck(tuple(missing), tuple(name for name in given if name not in known), tuple(doubled))
