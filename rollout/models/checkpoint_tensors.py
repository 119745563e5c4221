"""Tensors of a checkpoint folder: one model.safetensors, or shards with an index.

Weights in fp8 are e4m3 codes, with a scale for each block of 128 x 128 (`name` + "_scale_inv"). They stay codes where
the model keeps this format; else they are decoded. So are experts in MXFP4; a model in `mxfp8` codes their values
again, without loss.

All names and shapes are checked before the first tensor is read, so a wrong checkpoint leaves the model as it was.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from rollout_kernels.moe.formats import BLOCK
from safetensors import SafetensorError, safe_open

from rollout.checkpoint_folder import CheckpointError, Progress, read_json
from rollout.models.coded import SCALES as FP8_SCALES
from rollout.models.coded import CodedView, decoded
from rollout.models.cut import CutView, whole_shape
from rollout.models.mxfp4 import BLOCKS, NOT_A_NUMBER, SCALES, decode_into, decoded_shape
from rollout.models.names import Region, all_views, check_names

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = ("I32", "I64")  # types of tables
_NAMES_SHOWN = 8
_COMPARED_VALUES = 1 << 22  # at once


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it, or "MXFP4", or "FP8_BLOCK"
    scales: Path | None = None  # the file with the scales of the latter two; `file` has the blocks or codes
    turned: bool = False  # its last two dimensions are swapped in the file
    name: str | None = None  # in its file, where it stands for a tensor of another name
    pieces: tuple[tuple[str, Path], ...] = ()  # the names and files of the tensors that make it, along their first dim

    @property
    def values(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)


def first_names(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are, for a message."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(f"{name:.200}" for name in names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint, from the files' headers.

    Raises:
        CheckpointError: there are no safetensors, the index names missing files or files outside the folder, or a
            tensor is not in the file that the index names.
    """
    if (folder / _SINGLE).is_file():
        return read_header(folder / _SINGLE)
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder} contains neither {_SINGLE} nor {_INDEX}; other formats are not supported")
    weight_map = _read_index(folder / _INDEX)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        header = read_header(folder / shard)
        _refuse(folder, {f"also in {shard}": [name for name in header if name in tensors]})
        tensors |= header
    moved = [name for name, shard in weight_map.items() if name in tensors and tensors[name].file.name != shard]
    missing = [name for name in weight_map if name not in tensors]
    _refuse(folder, {"in the index but in no shard": missing, "not in the shard that the index names": moved})
    return tensors


def join_mxfp4(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Join each pair of blocks and scales into one tensor."""
    joined = dict(tensors)
    for name, blocks in tensors.items():
        whole = name.removesuffix(BLOCKS)
        scales = tensors.get(whole + SCALES)
        if whole == name or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        shape = decoded_shape(blocks.shape, scales.shape)
        if shape is not None:
            del joined[name], joined[whole + SCALES]
            joined[whole] = StoredTensor(blocks.file, shape, "MXFP4", scales.file)
    return joined


def has_mxfp4(tensors: dict[str, StoredTensor]) -> bool:
    """Whether tensors of a checkpoint are in MXFP4."""
    return any(stored.dtype == "MXFP4" for stored in tensors.values())


def join_fp8(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Join each pair of codes and scales of their blocks into one tensor."""
    joined = dict(tensors)
    for name, codes in tensors.items():
        scales = tensors.get(name + FP8_SCALES)
        if codes.dtype != "F8_E4M3" or scales is None or scales.dtype not in _DTYPES:
            continue
        if len(codes.shape) == 2 and scales.shape == tuple(-(-size // BLOCK) for size in codes.shape):
            del joined[name + FP8_SCALES]
            joined[name] = replace(codes, dtype="FP8_BLOCK", scales=scales.file)
    return joined


def join_pieces(tensors: dict[str, StoredTensor], regions: Sequence[Region]) -> dict[str, StoredTensor]:
    """Join pieces into one tensor where their sizes differ from the parts after which they are named.

    transformers saves a joined tensor in equal pieces under the names of its parts, however wide each part is.
    """
    joined = dict(tensors)
    for region in regions:
        wholes = [views for views in region.alternatives if len(views) == 1]
        for views in region.alternatives if wholes else ():
            found = {name: tensors[name] for name in views if name in tensors}
            if len(views) == 1 or found.keys() != views.keys():
                continue
            ((name, view),) = wholes[0].items()
            shapes, whole = [stored.shape for stored in found.values()], whole_shape(view)
            alike = all(len(shape) == len(whole) and shape[1:] == whole[1:] for shape in shapes)
            plain = all(stored.dtype in _DTYPES for stored in found.values())
            fits = plain and alike and sum(shape[0] for shape in shapes) == whole[0]
            if fits and shapes != [whole_shape(part) for part in views.values()]:
                first = next(iter(found.values()))
                pieces = tuple((stored.name or key, stored.file) for key, stored in found.items())
                joined = {key: stored for key, stored in joined.items() if key not in found}
                joined[name] = replace(first, shape=whole, name=name, pieces=pieces)
    return joined


def transposed(
    tensors: dict[str, StoredTensor], views: dict[str, torch.Tensor], endings: tuple[str, ...]
) -> dict[str, StoredTensor]:
    """The tensors; tensors with these endings are transposed unless their file has the model's shape."""
    turned = dict(tensors)
    for name, stored in tensors.items():
        if name.endswith(endings) and name in views and len(stored.shape) == 3:
            wanted, shape = whole_shape(views[name]), (stored.shape[0], stored.shape[2], stored.shape[1])
            if shape == wanted != stored.shape:
                turned[name] = replace(stored, shape=shape, turned=True)
    return turned


def check_tensors(folder: Path, tensors: dict[str, StoredTensor], regions: Sequence[Region], architecture: str) -> None:
    """Raise one CheckpointError with all tensors that are missing, unknown, doubled, or of a wrong shape or type."""
    check = check_names(regions, tensors)
    views = all_views(regions)
    wanted = {name: stored for name, stored in tensors.items() if name in views}
    shapes = [
        f"{name} {list(stored.shape)} for {list(whole_shape(views[name]))}"
        for name, stored in wanted.items()
        if stored.shape != whole_shape(views[name])
    ]
    readable = {*_DTYPES, "MXFP4", "FP8_BLOCK"}
    types = [
        f"{name} {stored.dtype}"
        for name, stored in wanted.items()
        if stored.dtype not in (_INTEGERS if views[name].dtype == torch.int64 else readable)
    ]
    problems: dict[str, Sequence[str]] = {
        "missing": check.missing,
        f"not part of {architecture}": check.unknown,
        "given twice, in two layouts": check.doubled,
        "of the wrong shape": shapes,
        "of an unsupported type": types,
    }
    _refuse(folder, problems)


def copy_tensors(
    tensors: dict[str, StoredTensor],
    views: dict[str, torch.Tensor],
    progress: Progress | None,
    scale_views: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Copy checked tensors into the model, converted to its dtype; `progress` gets (values done, values in all).

    `scale_views` are the views of weights that the model keeps as codes.
    """
    names = sorted(tensors, key=lambda name: str(tensors[name].file))
    total = sum(tensors[name].values for name in names)
    done = 0
    for file in dict.fromkeys(tensors[name].file for name in names):
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in names:
                if tensors[name].file == file:
                    view = views[name]
                    own_name = tensors[name].name or name
                    if tensors[name].pieces:
                        view.copy_(torch.cat([_piece(*piece) for piece in tensors[name].pieces]))
                    elif tensors[name].dtype == "MXFP4":
                        _decode(own_name, tensors[name], view)
                    elif tensors[name].dtype == "FP8_BLOCK" and not _keeps_codes(view):
                        view.copy_(decoded(reader.get_tensor(own_name), _fp8_scales(own_name, tensors[name])))
                    elif isinstance(view, CutView) and not tensors[name].turned:
                        if view.cut.kept:
                            view.copy_kept(view.cut.read(reader.get_slice(own_name)))
                    else:
                        tensor = reader.get_tensor(own_name)
                        view.copy_(tensor.mT if tensors[name].turned else tensor)
                    if tensors[name].dtype == "FP8_BLOCK" and _keeps_codes(view):
                        scale_views[name].copy_(_fp8_scales(own_name, tensors[name]))
                    done += tensors[name].values
                    if progress is not None:
                        progress(done, total)


def _piece(name: str, file: Path) -> torch.Tensor:
    with safe_open(file, framework="pt", device="cpu") as reader:
        return reader.get_tensor(name)


def _keeps_codes(view: torch.Tensor) -> bool:
    """Whether a view takes codes of blocks as they are. A view of another rank's part takes anything."""
    kept = view.kept_part if isinstance(view, CutView) else view
    return not kept.numel() or (isinstance(kept, CodedView) and kept.format == "fp8_block")


def _fp8_scales(name: str, stored: StoredTensor) -> torch.Tensor:
    assert stored.scales is not None
    with safe_open(stored.scales, framework="pt") as reader:
        scales = reader.get_tensor(name + FP8_SCALES)
    wrong = scales[~((scales >= 0) & scales.isfinite())]
    if wrong.numel():
        raise CheckpointError(
            f"{name + FP8_SCALES} in {stored.scales} has {wrong.numel()} scales that are negative or not finite, "
            f"such as {wrong[0].item()}: save the checkpoint again"
        )
    return scales


def _decode(name: str, stored: StoredTensor, view: torch.Tensor) -> None:
    assert stored.scales is not None
    with safe_open(stored.file, framework="pt") as blocks, safe_open(stored.scales, framework="pt") as scales:
        exponents = scales.get_tensor(name + SCALES)
        if (exponents == NOT_A_NUMBER).any():
            raise CheckpointError(f"{name + SCALES} in {stored.scales} has scales that are NaN: save it again")
        decode_into(view, blocks.get_tensor(name + BLOCKS), exponents)


def are_equal(
    tensors: dict[str, StoredTensor], first: str, second: str, dtype: torch.dtype, at_once: int = _COMPARED_VALUES
) -> bool:
    """Whether two tensors have the same values once they are converted to `dtype`; reads up to the first difference.

    `at_once` values are compared at a time.
    """
    a, b = tensors[first], tensors[second]
    if a.shape != b.shape or not {a.dtype, b.dtype} <= _DTYPES.keys():
        return False
    rows = max(1, at_once // max(1, math.prod(a.shape[1:])))
    with safe_open(a.file, framework="pt") as reader, safe_open(b.file, framework="pt") as other_reader:
        one, other = reader.get_slice(first), other_reader.get_slice(second)
        return all(
            torch.equal(one[begin : begin + rows].to(dtype), other[begin : begin + rows].to(dtype))
            for begin in range(0, a.shape[0], rows)
        )


def stored_dtype(tensors: dict[str, StoredTensor]) -> torch.dtype | None:
    """The type of most of the checkpoint's values; None if it is not supported."""
    values: dict[str, int] = {}
    for stored in tensors.values():
        values[stored.dtype] = values.get(stored.dtype, 0) + stored.values
    return _DTYPES.get(max(values, key=lambda dtype: values[dtype])) if values else None


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, from its header. Raises CheckpointError for any other file."""
    try:
        if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
            raise CheckpointError(f"{file} is not a file")
        with safe_open(file, framework="pt", device="cpu") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
            return {n: StoredTensor(file, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (SafetensorError, OSError, MemoryError) as error:
        raise CheckpointError(f"{file!s:.500} cannot be read: {error!s:.500}") from error


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{file} has no 'weight_map' of tensor names to file names")
    # The check is on names, not on targets: in the hub's cache every file of a snapshot is a link to another folder.
    outside = [s for s in dict.fromkeys(weight_map.values()) if Path(s).name != s or "\\" in s or s in ("", "..")]
    if outside:
        raise CheckpointError(f"{file} names files outside its folder: {first_names(outside)}")
    return weight_map


def _refuse(folder: Path, problems: dict[str, Sequence[str]] | dict[str, list[str]]) -> None:
    found = [f"{len(names)} tensors {what}: {first_names(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(f"checkpoint {folder} cannot be loaded; " + "; ".join(found))
