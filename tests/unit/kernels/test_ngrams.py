"""Guesses by n-grams are what a loop over the text says, by torch and by the kernel."""

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

    def guess(self, by, reach: int = REACH) -> torch.Tensor:
        by(self.rows, self.ints, self.pages, self.tokens, self.guesses, last=LAST, length=LENGTH, reach=reach)
        return self.guesses


def by_kernel(*tensors: torch.Tensor, **columns: int) -> None:
    triton_ngrams.draft_by_ngrams(*tensors, **columns, most_equal=MOST_EQUAL)


#: Tokens that are equal, in texts longer than two blocks of the kernel.
PLACES = ((3, 2000), (1023, 1024), (1024, 1025), (2047, 2049), (100, 100 + 1024), (70, 70 + 2048))
ON_GPU = torch.cuda.is_available()
BOTH = [
    pytest.param(ngrams.draft_by_ngrams, "cpu", id="torch"),
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
def test_only_the_end_of_a_long_text_is_searched(by, device):
    filler = [100 + i for i in range(64)]
    texts = [[7, 8, *filler[:-2], 7], [7, 8, *filler[:-1], 7]]
    rows = Rows(texts, 1, 0, device)
    assert rows.guess(by, reach=64)[rows.rows].flatten().tolist() == [8, 7]
    assert REACH > 16_384


@pytest.mark.parametrize(("by", "device"), BOTH)
def test_texts_of_all_lengths_around_the_ends_of_pages(by, device):
    """Also empty ones, which have a last token alone, and texts of large ids."""
    rng = random.Random(7)
    ids = [2**24, 2**24 + 1, 2**31 - 1, 0]  # equal as float32, or as their low bits
    texts = [[ids[rng.randrange(4)] for _ in range(length)] for length in range(1, 2 * PAGE + 4)]
    rows = Rows(texts, 5, 0, device)
    guesses = rows.guess(by).tolist()
    for row, text in zip(rows.rows.tolist(), texts, strict=True):
        assert guesses[row] == followed(text, 5), len(text)


@pytest.mark.parametrize(("by", "device"), BOTH)
@pytest.mark.parametrize("reach", [1, 2, 17, 1024, 1025, 2500])
def test_places_lie_within_reach_in_texts_of_several_blocks(by, device, reach):
    """The only place with equal tokens is the last one within reach, or the first one beyond."""
    texts = []
    for total in (2510, 2600):
        for place in (total - reach, total - reach - 1):
            text = list(range(10, 10 + total))
            text[place - 1] = text[-1] = 5
            texts.append(text)
    rows = Rows(texts, 2, 0, device)
    guesses = rows.guess(by, reach).tolist()
    for i, (row, text) in enumerate(zip(rows.rows.tolist(), texts, strict=True)):
        place = len(text) - reach
        found = [text[place], text[place + 1] if reach > 1 else text[place]]
        assert guesses[row] == ([5, 5] if i % 2 else found)


@pytest.mark.parametrize(("by", "device"), BOTH)
def test_the_newest_of_equal_places_is_found_across_blocks(by, device):
    """Also where a block has them at the same place."""
    texts = []
    for first, second in PLACES:
        text = list(range(10, 2210))
        text[first], text[second], text[-1] = 5, 5, 5
        texts.append(text)
    rows = Rows(texts, 1, 1, device)
    guesses = rows.guess(by).tolist()
    expected = [text[second + 1] for text, second in zip(texts, (second for _, second in PLACES), strict=True)]
    assert [guess for (guess,) in [guesses[row] for row in rows.rows.tolist()]] == expected


@pytest.mark.parametrize(("by", "device"), BOTH)
def test_rows_may_be_a_column_and_the_padding_row_several_times(by, device):
    """As the places of a verify step give them, and those of a rehearsal."""
    rows = Rows([[4, 5, 6, 4, 5], [7]], 3, 0, device)
    rows.ints[0, LENGTH], rows.ints[0, LAST] = 0, 9
    first, second = rows.rows.tolist()
    rows.rows = torch.tensor([[first, 0], [0, 0], [second, 0], [0, 0]], device=device)[:, 0]
    guesses = rows.guess(by).tolist()
    assert (guesses[first], guesses[second], guesses[0]) == ([6, 4, 5], [7] * 3, [9] * 3)


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
