"""Codes of changed words: the reader of the old bytes gets the new ones, and damaged codes are found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_bridge.transports.changed_words import changed_words, find_words


def words(count: int, seed: int) -> torch.Tensor:
    return torch.randint(
        -(1 << 15), 1 << 15, (count,), dtype=torch.int16, generator=torch.Generator().manual_seed(seed)
    )


def after(old: torch.Tensor, parts: dict) -> torch.Tensor:
    new = old.clone()
    if "all" in parts:
        return parts["all"].view(torch.int16)
    if parts:
        found = find_words(parts, len(old))
        assert found is not None
        new[found[0]] = found[1]
    return new


@given(
    st.integers(1, 3000), st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.12, 0.13, 0.5, 0.9, 0.99, 1.0]), st.integers(0, 99)
)
def test_the_reader_gets_the_new_words_at_every_density(count: int, share: float, seed: int) -> None:
    old = words(count, seed)
    places = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < share
    new = torch.where(places, words(count, seed + 1), old)
    parts = changed_words(old.view(torch.uint8), new.view(torch.uint8))
    assert torch.equal(after(old, parts), new)
    nbytes = sum(part.nbytes for part in parts.values())
    changes = int((old != new).sum())
    assert nbytes <= min(new.nbytes, 2 * changes + -(-count // 16) * 2) + 2 and (changes > 0 or nbytes == 0)


@pytest.mark.parametrize(
    "places", [[0], [254], [255], [256], [509], [510], [511], [0, 255, 512], [4095], [0, 4095], [1, 2, 3]]
)
def test_gaps_of_every_length_are_kept(places: list[int]) -> None:
    old = torch.zeros(4096, dtype=torch.int16)
    new = old.clone()
    new[places] = -1
    parts = changed_words(old.view(torch.uint8), new.view(torch.uint8))
    assert set(parts) == {"gaps", "words"} and torch.equal(after(old, parts), new)


def test_bits_of_a_number_are_told_apart_that_compare_equal_or_not_at_all() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, float("nan")], dtype=torch.bfloat16)
    new = torch.tensor([-0.0, float("nan"), 1.0, 2.0], dtype=torch.bfloat16)
    new.view(torch.int16)[1] += 1  # another NaN
    parts = changed_words(old.view(torch.uint8), new.view(torch.uint8))
    assert torch.equal(after(old.view(torch.int16), parts), new.view(torch.int16))


@pytest.mark.parametrize("part", ["gaps", "bits"])
def test_places_outside_of_the_bucket_or_without_a_value_are_found(part: str) -> None:
    def numbers(*codes: int) -> torch.Tensor:
        return torch.tensor(codes, dtype=torch.uint8).view(torch.bfloat16)

    one = torch.zeros(1, dtype=torch.bfloat16)
    right = {"gaps": numbers(99, 255), "bits": numbers(*[0] * 12, 8, 0)}[part]
    outside = {"gaps": numbers(100, 255), "bits": numbers(*[0] * 12, 16, 0)}[part]
    two = {"gaps": numbers(99, 0), "bits": numbers(*[0] * 12, 12, 0)}[part]
    assert find_words({part: right, "words": one}, 100) is not None  # type: ignore[misc]
    for wrong in (outside, two):
        assert find_words({part: wrong, "words": one}, 100) is None  # type: ignore[misc]
