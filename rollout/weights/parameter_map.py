"""The worker's side of names: which tensors make a whole model, decided by the memory that they write.

A worker offers views of its fused parameters under Hugging Face names. The same memory may have several names: experts
one by one and stacked, a tied output layer. An update is whole when it writes every element of every parameter exactly
once.

    fused parameter   |============ qkv ============|
    views offered     |--- q ---|-- k --|--- v -----|        each a list of byte runs [start, end)

The views of a shard take whole tensors and keep a part of each, so a worker checks that its part is whole.

Weights that the worker keeps as codes of blocks may come as codes, too (`float8_e4m3fn`). Then the scales must come
with them, under the weight's name + "_scale_inv".

Two kinds of tensors need not match (`UpdateNames`): optional tensors that are left out keep their values, and unused
tensors are received and dropped.

Exact aliases (same memory, shape and strides: tied embeddings) may be sent under one name or under all; in the second
case their values must be equal, which the receiver checks once they have arrived (`ManifestFit.aliases`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from rollout.models.coded import SCALES
from rollout.models.cut import whole_shape
from rollout.models.draft_head import PREFIX
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import Manifest

if TYPE_CHECKING:
    from rollout.config import ModelSettings
    from rollout.models.loader import LoadedModel

_LISTED = 8  # names in one message
#: Prefixes that wrappers of a trainer's model put into the names of its tensors.
_PREFIXES = {
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "module.": "DistributedDataParallel",
    "base_model.model.": "PEFT",
}


@dataclass(frozen=True, slots=True)
class UpdateNames:
    """Names of tensors that an update may have or lack."""

    kept_if_absent: frozenset[str] = frozenset()
    unused: tuple[str, ...] = ()  # beginnings of names that the worker has no use for
    optional: frozenset[str] = frozenset()  # names that may be absent even where an update must be whole
    unused_patterns: tuple[str, ...] = ()  # regular expressions that such names contain
    scales: frozenset[str] = frozenset()  # names of weights that may come as codes

    def is_unused(self, name: str) -> bool:
        """Whether updates drop this tensor. Ask only for names that are no parameters."""
        return name.startswith(self.unused) or any(re.search(pattern, name) for pattern in self.unused_patterns)


def update_names(settings: ModelSettings, loaded: LoadedModel) -> UpdateNames:
    """The names that updates may have or lack. With random weights an update must have every tensor."""
    kept = frozenset() if settings.load_format == "random" else loaded.kept_if_absent()
    scales = frozenset(loaded.scale_views())
    return UpdateNames(kept, loaded.spec.unused, loaded.draft_names(), loaded.spec.unused_patterns, scales)


@dataclass(frozen=True, slots=True)
class ManifestFit:
    """A manifest that fits: which tensors to copy, and which pairs (copied name, other name) must be equal."""

    copied: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]
    kept: tuple[str, ...] = ()  # not in the manifest: these parameters keep their values
    unused: tuple[str, ...] = ()  # in the manifest, and not copied


class AbsentTensors(NamedTuple):
    """Tensors that an update lacks: some required tensors (none: the update is whole), and optional tensors."""

    missing: list[str]
    left_out: list[str]


class ParameterMap:
    """The views that a worker offers, and the check whether a manifest covers its parameters exactly once.

    `views` maps names to tensors on the worker's device; no view may overlap itself (a stride of 0 is a programmer's
    error).
    """

    def __init__(self, views: Mapping[str, torch.Tensor], names: UpdateNames = UpdateNames()) -> None:  # noqa: B008 -- frozen
        self.views, self.names = dict(views), names
        self._runs = {name: _byte_runs(view) for name, view in self.views.items() if name not in names.scales}
        self._whole = _union(self._runs.values())

    @property
    def max_update_bytes(self) -> int:
        """More than the bytes of an update that fits: every view once, in float32, with its padding.

        Tensors that are not used may take as much again.
        """
        return (2 if self.names.unused or self.names.unused_patterns else 1) * sum(
            4 * math.prod(whole_shape(view)) + 64 for view in self.views.values()
        )

    def check(self, manifest: Manifest, whole: bool = False) -> ManifestFit:
        """Decide whether the manifest's tensors make a whole update. With `whole` only optional ones may be left out.

        Raises `WeightsRejected`, listing names, when a name is unknown, a shape differs, elements would stay
        unwritten, or elements would be written twice.
        """
        self.check_tensors(manifest)
        scales = self._check_codes(manifest)
        unused = tuple(entry.name for entry in manifest.tensors if self._is_unused(entry.name))
        may_lack = self.names.optional if whole else self.names.kept_if_absent | self.names.optional
        fit = self._check_cover(self._used(manifest), unused, may_lack)
        return replace(fit, copied=fit.copied + scales)

    def _check_codes(self, manifest: Manifest) -> tuple[str, ...]:
        """The names of the scales in a manifest. Codes need the scales of their blocks, and scales need codes."""
        dtypes = {entry.name: entry.dtype for entry in manifest.tensors}
        codes = [name for name, dtype in dtypes.items() if dtype == "float8_e4m3fn" and not self._is_unused(name)]
        strange = [name for name in codes if name + SCALES not in self.names.scales]
        if strange:
            advice = "the worker does not keep these as codes of blocks: send 16-bit weights, or set its weight_dtype"
            raise _rejected("codes", strange, advice)
        alone = [name for name in codes if name + SCALES not in dtypes]
        if alone:
            raise _rejected("codes without scales", alone, f"send a tensor <name>{SCALES} with each")
        scales = tuple(name for name in dtypes if name in self.names.scales)
        without = [name for name in scales if dtypes.get(name.removesuffix(SCALES)) != "float8_e4m3fn"]
        if without:
            raise _rejected("scales without codes", without, "send float8_e4m3fn codes with them, or weights alone")
        return scales

    def check_tied(self, tied: Mapping[str, str], manifest: Manifest) -> None:
        """Check names that a manifest leaves out because it has the same tensor under another name.

        Raises `WeightsRejected` unless both names are one parameter here, or have no use: then send every name.
        """
        sent = {entry.name for entry in manifest.tensors}
        for name, other in tied.items():
            if other not in sent or name in sent:
                raise WeightsRejected(f"tied names {name!r:.80} as {other!r:.80}; send only that one", field="tied")
            if not (self._is_unused(name) or self._is_one(name, other)):
                raise WeightsRejected(f"{name!r:.80} is not {other!r:.80} here; send it, too", field="tied")

    def _is_one(self, name: str, other: str) -> bool:
        return name in self.views and other in self.views and _home(self.views[name]) == _home(self.views[other])

    def check_tensors(self, manifest: Manifest) -> None:
        """Raise `WeightsRejected`, listing names, when a name is unknown or a shape differs."""
        entries = [entry for entry in manifest.tensors if not self._is_unused(entry.name)]
        names = [entry.name for entry in entries]
        unknown = [name for name in names if name not in self.views]
        if unknown:
            raise _rejected("unknown tensors", unknown, _advice(unknown[0], self.views))
        misshaped = [
            f"{entry.name} {list(entry.shape)} (expected {list(whole_shape(self.views[entry.name]))})"
            for entry in entries
            if tuple(entry.shape) != whole_shape(self.views[entry.name])
        ]
        if misshaped:
            raise _rejected("wrong shapes", misshaped, "send each tensor whole, in the checkpoint's shape")

    def lacks(self, manifest: Manifest) -> AbsentTensors:
        """The tensors that the manifest, which passes `check_tensors`, lacks of a whole update."""
        copied, _ = self._split_aliases(self._used(manifest))
        intervals, _ = _stack([(name, self._runs[name]) for name in copied])
        written, kept = self._with_kept(_merge(intervals), self.names.kept_if_absent | self.names.optional)
        return AbsentTensors([] if np.array_equal(written, self._whole) else self._missing(written), kept)

    def uses(self, manifest: Manifest) -> bool:
        """Whether the worker has a use for any of the manifest's tensors."""
        return bool(self._used(manifest))

    def _is_unused(self, name: str) -> bool:
        return name not in self.views and self.names.is_unused(name)

    def _used(self, manifest: Manifest) -> list[str]:
        return [e.name for e in manifest.tensors if e.name not in self.names.scales and not self._is_unused(e.name)]

    def _with_kept(self, written: np.ndarray, may_lack: frozenset[str]) -> tuple[np.ndarray, list[str]]:
        """The bytes that are written or keep their values, and the names of unchanged parameters."""
        kept = []
        for name in (name for name in self._runs if name in may_lack):
            if not _overlaps(written, self._runs[name]):  # under this name and under others
                kept.append(name)
                written = _union([written, self._runs[name]])
        return written, kept

    def _check_cover(self, names: list[str], unused: tuple[str, ...], may_lack: frozenset[str]) -> ManifestFit:
        copied, aliases = self._split_aliases(names)
        intervals, owners = _stack([(name, self._runs[name]) for name in copied])
        clash = np.flatnonzero(intervals[1:, 0] < intervals[:-1, 1])
        if len(clash):
            pairs = sorted({f"{owners[i]} and {owners[i + 1]}" for i in clash.tolist()})
            raise _rejected("tensors that write the same parameters", pairs, "send one layout of each parameter")
        written, kept = self._with_kept(_merge(intervals), may_lack)
        if not np.array_equal(written, self._whole):
            missing, advice = self._missing(written), "an update must carry every parameter"
            if all(name.endswith("lm_head.weight") for name in missing):
                advice += "; the worker's output layer is not its embedding: send what the trainer's model has for it"
            raise _rejected("missing tensors", missing, advice)
        return ManifestFit(tuple(copied), tuple(aliases), tuple(kept), unused)

    def _split_aliases(self, names: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
        first: dict[tuple, str] = {}
        copied, aliases = [], []
        for name in names:
            view = self.views[name]
            home = _home(view)
            if view.numel() and home in first:
                aliases.append((first[home], name))
            else:
                first[home] = name
                copied.append(name)
        return copied, aliases

    def _missing(self, intervals: np.ndarray) -> list[str]:
        """Missing names that would complete the cover: none whose memory is partly written already."""
        missing = []
        written = _merge(intervals)
        for name, runs in self._runs.items():
            if len(runs) and not _overlaps(written, runs):
                missing.append(name)
                written = _union([written, runs])
            if len(missing) > _LISTED:
                break
        return missing or ["part of a parameter that has no name of its own"]


def _home(view: torch.Tensor) -> tuple:
    return view.data_ptr(), view.shape, view.stride(), view.dtype


def _byte_runs(view: torch.Tensor) -> np.ndarray:
    """The bytes that a view spans, as sorted, merged runs: int64 [runs, 2] of absolute addresses."""
    if view.numel() == 0:
        return np.empty((0, 2), np.int64)
    dims = sorted((stride, size) for size, stride in zip(view.shape, view.stride(), strict=True) if size > 1)
    assert all(stride > 0 for stride, _ in dims), "a view of a parameter must not overlap itself"
    run = 1
    rest: list[tuple[int, int]] = []
    for stride, size in dims:
        if not rest and stride == run:
            run *= size
        else:
            rest.append((stride, size))
    starts = np.zeros(1, np.int64)
    for stride, size in rest:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    starts = np.sort(starts) * view.element_size() + view.data_ptr()
    runs = np.stack([starts, starts + run * view.element_size()], axis=1)
    assert (runs[1:, 0] >= runs[:-1, 1]).all(), "a view of a parameter must not overlap itself"
    assert int((runs[:, 1] - runs[:, 0]).sum()) == math.prod(view.shape) * view.element_size()
    return _merge(runs)


def _stack(named: Iterable[tuple[str, np.ndarray]]) -> tuple[np.ndarray, list[str]]:
    """All runs of several tensors sorted by start, and the tensor of each."""
    rows, owners = [np.empty((0, 2), np.int64)], []
    for name, runs in named:
        rows.append(runs)
        owners.extend([name] * len(runs))
    intervals = np.concatenate(rows)
    order = np.argsort(intervals[:, 0], kind="stable")
    return intervals[order], [owners[i] for i in order.tolist()]


def _union(groups: Iterable[np.ndarray]) -> np.ndarray:
    intervals = np.concatenate([np.empty((0, 2), np.int64), *groups])
    return _merge(intervals[np.argsort(intervals[:, 0], kind="stable")])


def _merge(intervals: np.ndarray) -> np.ndarray:
    """Join runs, sorted by start, that touch or overlap."""
    if len(intervals) == 0:
        return intervals
    ends = np.maximum.accumulate(intervals[:, 1])
    fresh = np.concatenate([[True], intervals[1:, 0] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(fresh)[1:] - 1, [len(intervals) - 1]])
    return np.stack([intervals[fresh, 0], ends[last]], axis=1)


def _overlaps(merged: np.ndarray, runs: np.ndarray) -> bool:
    """Whether any run shares a byte with `merged` (sorted, disjoint)."""
    if len(merged) == 0:
        return False
    after = np.searchsorted(merged[:, 1], runs[:, 0], side="right")
    inside = after < len(merged)
    return bool((merged[after[inside], 0] < runs[inside, 1]).any())


def _advice(name: str, known: Collection[str]) -> str:
    """Advice on an unknown name: a wrapper around the trainer's model may have added a prefix."""
    added = [prefix for prefix in _PREFIXES if prefix in name]
    plain = name
    for prefix in added:
        plain = plain.replace(prefix, "")
    if added and plain in known:
        return f"strip {' and '.join(f'{prefix!r} ({_PREFIXES[prefix]})' for prefix in added)} from the names"
    if "lora_" in name or ".base_layer." in name:
        return "these are names of a PEFT model: publish its merged weights, or its adapter with adapter="
    if name.startswith(PREFIX):
        return f"these are not of a draft model that the worker has: leave {PREFIX}* out, or set speculation_model"
    return "send the names of the served checkpoint's architecture"


def _rejected(what: str, names: list[str], advice: str) -> WeightsRejected:
    more = " and more" if len(names) > _LISTED else ""
    return WeightsRejected(f"{what}: {', '.join(names[:_LISTED])}{more}; {advice}", field="manifest")
