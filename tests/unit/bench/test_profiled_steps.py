"""From a profiler's kernels to the steps that they belong to."""

import pytest

from scripts.bench.profiled_steps import summarise


def kernel(begin: float, length: float, launch: int) -> dict:
    return {"cat": "kernel", "ts": begin, "dur": length, "args": {"correlation": launch}}


TWO_STEPS = [kernel(0, 4, 7), kernel(5, 3, 7), kernel(10, 4, 8), kernel(14, 6, 8)]


def test_a_step_spans_from_its_first_kernel_to_its_last_one():
    seen = summarise(TWO_STEPS, 2)
    assert (seen.steps, seen.kernels) == (2, 2)
    assert seen.active_share == pytest.approx(18 / 20)
    assert seen.kernel_share == pytest.approx(17 / 20)


def test_kernels_that_overlap_count_once():
    seen = summarise([kernel(0, 6, 1), kernel(5, 5, 1), kernel(10, 5, 2), kernel(15, 5, 2)], 2)
    assert seen.active_share == seen.kernel_share == 1.0


def test_kernels_of_other_launches_are_left_out():
    seen = summarise([*TWO_STEPS, kernel(8.5, 0.1, 99)], 2)
    assert seen.kernel_share == pytest.approx(17 / 20)


def test_kernels_without_common_ids_are_split_evenly():
    single = [kernel(e["ts"], e["dur"], i) for i, e in enumerate(TWO_STEPS)]
    assert summarise(single, 2) == summarise(TWO_STEPS, 2)


def test_kernels_that_do_not_make_up_the_steps_are_an_error():
    with pytest.raises(ValueError, match="3 equal steps"):
        summarise(TWO_STEPS, 3)
    with pytest.raises(ValueError, match="0 kernels"):
        summarise([], 1)
