"""Guesses by n-grams are what a loop over the text says, by torch and by the kernel."""

from __future__ import annotations

import random

import pytest
import torch
from rollout_kernels.step import ngrams, triton_ngrams
from rollout_kernels.step.ngrams import MOST_EQUAL, REACH

from tests.support.ngrams import followed

PAGE, LAST, LENGTH, INTS = 16, 0, 1, 9


class Rows:
    """Texts of rows in pages of a pool, in any order; no page is of two rows."""

    def __init__(self, texts: list[list[int]], guesses: int, seed: int, device: str = "cpu") -> None:
        rng = random.Random(seed)
        columns = max(len(text) for text in texts) // PAGE + 2
        numbers = rng.sample(range(1, len(texts) * columns + 2), len(texts) * columns)
        count = len(texts) + 3
        self.ints = torch.full((count, INTS), 77, dtype=torch.int64)
        self.pages = torch.zeros(count, columns, dtype=torch.int32)
        self.tokens = torch.randint(0, 5, (len(texts) * columns + 2, PAGE), dtype=torch.int32)  # what others left
        self.guesses = torch.full((count, guesses), -5, dtype=torch.int64)
        self.rows = torch.tensor(rng.sample(range(1, count), len(texts)))
        for i, (row, text) in enumerate(zip(self.rows.tolist(), texts, strict=True)):
            mine = numbers[i * columns : (i + 1) * columns]
            self.pages[row] = torch.tensor(mine)
            self.ints[row, LAST], self.ints[row, LENGTH] = text[-1], len(text) - 1
            for at, token in enumerate(text[:-1]):
                self.tokens[mine[at // PAGE], at % PAGE] = token
        for name in ("ints", "pages", "tokens", "guesses", "rows"):
            setattr(self, name, getattr(self, name).to(device))

    def guess(self, by) -> torch.Tensor:
        by(self.rows, self.ints, self.pages, self.tokens, self.guesses, last=LAST, length=LENGTH)
        return self.guesses


def by_kernel(*tensors: torch.Tensor, **columns: int) -> None:
    triton_ngrams.guess_by_ngrams(*tensors, **columns, most_equal=MOST_EQUAL, reach=ngrams.REACH)


ON_GPU = torch.cuda.is_available()
BOTH = [
    pytest.param(ngrams.guess_by_ngrams, "cpu", id="torch"),
    pytest.param(by_kernel, "cuda" if ON_GPU else "cpu", id="kernel"),
]


@pytest.mark.parametrize(("by", "device"), BOTH)
@pytest.mark.parametrize("seed", range(4))
def test_guesses_follow_the_longest_and_newest_place(by, device, seed):
    rng = random.Random(seed)
    texts = [[rng.randrange(rng.choice([1, 2, 3, 40])) for _ in range(rng.choice([1, 2, 3, 9, 40]))] for _ in range(8)]
    texts.append([rng.randrange(4) for _ in range(150)])
    texts.append([*([3, 1, 2] * 20), 3])  # goes round
    most = rng.choice([1, 3, 6])
    rows = Rows(texts, most, seed, device)
    guesses = rows.guess(by).tolist()
    for row, text in zip(rows.rows.tolist(), texts, strict=True):
        assert guesses[row] == followed(text, most), text
    others = set(range(len(guesses))) - set(rows.rows.tolist())
    assert all(guesses[row] == [-5] * most for row in others), "no other row has guesses"


@pytest.mark.parametrize(("by", "device"), BOTH)
def test_more_equal_tokens_count_until_there_are_as_many_as_are_compared(by, device):
    end = list(range(20, 20 + MOST_EQUAL + 2))
    longer, shorter, least = [*end, 1], [*end[1:], 2], [*end[3:], 3]
    rows = Rows([[*longer, 9, *shorter, 9, *least, 9, *end], [*longer, 9, *least, 9, *end]], 1, 0, device)
    guesses = rows.guess(by)[rows.rows].flatten().tolist()
    assert guesses == [2, 1], "among places with as many equal tokens as are compared it is the newest"


@pytest.mark.parametrize(("by", "device"), BOTH)
def test_only_the_end_of_a_long_text_is_searched(by, device, monkeypatch):
    monkeypatch.setattr(ngrams, "REACH", 64)
    filler = [100 + i for i in range(64)]
    texts = [[7, 8, *filler[:-2], 7], [7, 8, *filler[:-1], 7]]
    rows = Rows(texts, 1, 0, device)
    assert rows.guess(by)[rows.rows].flatten().tolist() == [8, 7]
    assert REACH > 16_384


@pytest.mark.gpu
def test_a_search_over_long_texts_takes_a_small_part_of_a_step():
    rng = random.Random(0)
    rows = Rows([[rng.randrange(50) for _ in range(16_000)] for _ in range(64)], 3, 0, "cuda")
    rows.guess(by_kernel)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        rows.guess(by_kernel)
    end.record()
    end.synchronize()
    took_us = start.elapsed_time(end) / 20 * 1e3
    print(f"64 rows of 16K: {took_us:.1f} us")
    assert took_us < 400
