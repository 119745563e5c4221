from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.weights.parameter_map import ParameterMap
from tests.support.bridge.harness import TinyModel
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import ALIGN_BYTES, DTYPE_BYTES, Manifest, from_wire, pack, usual_bucket_bytes

ROWS = [("a", "float32", [3, 5]), ("b", "bfloat16", [7]), ("empty", "float16", [0, 4]), ("scalar", "float32", [])]

shapes = st.lists(st.integers(0, 9), max_size=4)
rows = st.lists(st.tuples(st.text(min_size=1, max_size=5), st.sampled_from(list(DTYPE_BYTES)), shapes), max_size=12)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def unique(rows: list) -> list:
    return list({name: (name, dtype, shape) for name, dtype, shape in rows}.values())


@given(rows, st.integers(1, 5))
@settings(deadline=None, max_examples=100)
def test_tensors_are_aligned_disjoint_and_covered_by_the_buckets(rows: list, blocks: int) -> None:
    manifest = pack(1, unique(rows), blocks * ALIGN_BYTES)
    end = 0
    for entry in manifest.tensors:
        assert entry.offset % ALIGN_BYTES == 0 and end <= entry.offset < end + ALIGN_BYTES
        end = entry.end
    spans = [manifest.bucket_span(i) for i in range(manifest.bucket_count)]
    assert [start for start, _ in spans] == [i * manifest.bucket_bytes for i in range(len(spans))]
    assert all(start < stop <= start + manifest.bucket_bytes for start, stop in spans)
    assert (spans[-1][1] if spans else 0) == manifest.total_bytes == end


@given(rows)
@settings(deadline=None, max_examples=100)
def test_a_manifest_survives_the_wire(rows: list) -> None:
    manifest = pack(7, unique(rows), 128)
    assert from_wire(manifest.to_wire()) == manifest


@given(anything)
@settings(deadline=None, max_examples=200)
def test_reading_anything_gives_a_manifest_or_a_rejection(value: object) -> None:
    for candidate in (
        value,
        {**pack(1, ROWS, 64).to_wire(), "tensors": value},
        {**pack(1, ROWS, 64).to_wire(), "digest": value},
    ):
        try:
            assert isinstance(from_wire(candidate), Manifest)
        except WeightsRejected:
            pass


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"digest": "0" * 32}, "digest"),
        ({"version": 2}, "digest"),
        ({"version": -1}, "version"),
        ({"version": True}, "version"),
        ({"bucket_bytes": 100}, "multiple of 64"),
        ({"bucket_bytes": 1 << 40}, "bucket_bytes"),
        ({"tensors": [["a", "float32", [1]], ["a", "float32", [1]]]}, "a is listed twice"),
        ({"tensors": [["a", "float64", [1]]]}, "float64"),
        ({"tensors": [["a", "float32", [-1]]]}, "shape"),
        ({"tensors": [["a", "float32", [1 << 49, 1 << 49]]]}, "which no worker holds"),
        ({"tensors": [["a", "float32", [1] * 9]]}, "shape"),
        ({"tensors": [["a", "float32", 3]]}, "tensors"),
        ({"extra": 1}, "exactly"),
    ],
)
def test_a_changed_manifest_is_rejected_with_the_reason(change: dict, named: str) -> None:
    with pytest.raises(WeightsRejected, match=named):
        from_wire({**pack(1, ROWS, 64).to_wire(), **change})


@pytest.mark.parametrize("version", [np.int64(7), np.uint8(7), torch.tensor(7)])
def test_a_publishers_version_may_be_any_kind_of_integer(version: Any) -> None:
    manifest = pack(version, ROWS, 64)
    assert type(manifest.version) is int and manifest == pack(7, ROWS, 64)
    assert from_wire(manifest.to_wire()) == manifest
    with pytest.raises(WeightsRejected, match="version"):
        from_wire({**manifest.to_wire(), "version": version})


@pytest.mark.parametrize("version", [True, np.True_, 1.0, np.float64(1), "1", None, -1, np.int64(-1), 1 << 63])
def test_a_version_that_is_no_integer_or_out_of_range_is_rejected(version: Any) -> None:
    with pytest.raises(WeightsRejected, match="version must be an integer"):
        pack(version, ROWS, 64)


def test_the_layout_digest_ignores_the_version_and_nothing_else() -> None:
    base = pack(1, ROWS, 64)
    assert pack(2, ROWS, 64).layout_digest == base.layout_digest
    assert pack(2, ROWS, 64).digest != base.digest
    assert pack(1, ROWS, 128).layout_digest != base.layout_digest
    assert pack(1, ROWS[::-1], 64).layout_digest != base.layout_digest


def manifest_of(model: TinyModel, names: list[str]) -> Manifest:
    return pack(1, [(name, "bfloat16", model.views[name].shape) for name in names], 64)


@pytest.mark.parametrize("stacked", [False, True])
def test_either_layout_of_experts_is_a_whole_model(stacked: bool) -> None:
    model = TinyModel()
    names = model.names(stacked)
    fit = ParameterMap(model.views).check(manifest_of(model, names))
    assert list(fit.copied) == names and fit.aliases == ()


def test_layouts_may_be_mixed_where_each_parameter_is_written_once() -> None:
    model = TinyModel()
    names = [name for name in model.names() if not name.endswith("down.weight")] + ["experts.down"]
    ParameterMap(model.views).check(manifest_of(model, names))


def test_a_tied_tensor_may_come_under_both_names() -> None:
    model = TinyModel()
    fit = ParameterMap(model.views).check(manifest_of(model, [*model.names(), "lm_head.weight"]))
    assert fit.aliases == (("embed.weight", "lm_head.weight"),)
    assert "lm_head.weight" not in fit.copied


def test_both_layouts_at_once_are_rejected() -> None:
    model = TinyModel()
    names = [*model.names(), "experts.down"]
    with pytest.raises(WeightsRejected, match=r"write the same.*experts\.0\.down\.weight and experts\.down"):
        ParameterMap(model.views).check(manifest_of(model, names))


@pytest.mark.parametrize("gone", ["norm.weight", "k.weight", "experts.1.up.weight", "experts.2.down.weight"])
def test_a_missing_tensor_is_named(gone: str) -> None:
    model = TinyModel()
    names = [name for name in model.names() if name != gone]
    with pytest.raises(WeightsRejected, match=f"missing tensors: {gone};"):
        ParameterMap(model.views).check(manifest_of(model, names))


def test_an_unknown_name_and_a_wrong_shape_are_named() -> None:
    model = TinyModel()
    with pytest.raises(WeightsRejected, match="unknown tensors: stranger"):
        ParameterMap(model.views).check(pack(1, [("stranger", "float32", [1])], 64))
    rows = [(name, "float32", list(model.views[name].shape)) for name in model.names()]
    rows[0] = ("embed.weight", "float32", [6, 11])
    with pytest.raises(WeightsRejected, match=r"embed\.weight \[6, 11\] \(expected \[11, 6\]\)"):
        ParameterMap(model.views).check(pack(1, rows, 64))


@given(st.permutations(range(4)), st.integers(0, 3), st.data())
@settings(deadline=None, max_examples=60)
def test_cover_by_strided_views_agrees_with_marking_elements(order: list, dim: int, data: st.DataObject) -> None:
    base = torch.zeros(2, 3, 4, 2).permute(order)
    cut = data.draw(st.integers(1, base.shape[dim] - 1))
    views = {"all": base, "low": base.narrow(dim, 0, cut), "high": base.narrow(dim, cut, base.shape[dim] - cut)}
    names = data.draw(st.lists(st.sampled_from(sorted(views)), unique=True))
    for name in names:
        views[name] += 1
    whole = bool((base == 1).all())
    manifest = pack(1, [(name, "float32", views[name].shape) for name in names], 64)
    if whole:
        ParameterMap(views).check(manifest)
    else:
        with pytest.raises(WeightsRejected):
            ParameterMap(views).check(manifest)


@pytest.mark.parametrize(
    ("total_bytes", "gpus", "mib"),
    [(0, True, 64), (4 << 30, True, 64), (8 << 30, True, 128), (61 << 30, True, 256), (61 << 30, False, 64)],
)
def test_large_models_travel_between_gpus_in_large_buckets(total_bytes: int, gpus: bool, mib: int) -> None:
    assert usual_bucket_bytes(total_bytes, gpus) == mib << 20
