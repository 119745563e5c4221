"""The suffix index finds what a search over all texts finds."""

import random

import numpy as np
import pytest

from rollout.engine.features.drafts.suffix_drafter import CANDIDATES, LEAST, MOST, SuffixDrafter, SuffixIndex


class Searched:
    """The same by comparing the end of a text with every place, newest first."""

    def __init__(self, prompt: list[int]) -> None:
        self.texts = [list(prompt)]
        self.context = prompt[-MOST:]
        self.places = [(0, position) for position in range(LEAST, len(prompt))]

    def open(self) -> int:
        self.texts.append(list(self.context))
        return len(self.texts) - 1

    def add(self, text: int, tokens: list[int]) -> None:
        for token in tokens:
            if len(self.texts[text]) >= LEAST:
                self.places.append((text, len(self.texts[text])))
            self.texts[text].append(token)

    def match(self, text: int) -> tuple[int, int, int] | None:
        own, candidates = self.texts[text], []
        for other, position in reversed(self.places):
            length = 0
            for a, b in zip(reversed(own), reversed(self.texts[other][:position]), strict=False):
                if a != b or length == MOST:
                    break
                length += 1
            if length >= LEAST:
                candidates.append((other, position, length))
        return max(candidates[:CANDIDATES], key=lambda found: found[2], default=None)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", [2, 5, 300_000])
def test_the_longest_newest_match_is_found(seed, vocab):
    rng = random.Random(seed)
    snippets = [[rng.randrange(vocab) for _ in range(rng.randint(1, 50))] for _ in range(4)]
    prompt = [token for _ in range(rng.randint(0, 3)) for token in rng.choice(snippets)]
    index, searched = SuffixIndex(prompt), Searched(prompt)
    texts = [index.open() for _ in range(3)]
    assert texts == [searched.open() for _ in range(3)]
    for _ in range(25):
        text, tokens = rng.choice(texts), list(rng.choice(snippets))[: rng.randint(1, 12)]
        index.add(text, tokens)
        searched.add(text, tokens)
        for each in texts:
            match = index.match(each)
            assert match == searched.match(each)
            if match is not None and match.text != each:
                expected = searched.texts[match.text][match.position : match.position + 7]
                assert index.after(each, match, 7) == expected


def test_a_text_that_repeats_itself_is_expected_to_go_on():
    index = SuffixIndex([])
    text = index.open()
    index.add(text, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3])
    match = index.match(text)
    assert match is not None and index.after(text, match, 9) == [4, 1, 2, 3, 4, 1, 2, 3, 4]


def test_grams_of_large_token_ids_are_told_apart():
    index = SuffixIndex([])
    text = index.open()
    index.add(text, [1, 0, 0, 9, 0, 2**24 - 1, 0, 8, 0, 2**24 - 1, 0])
    match = index.match(text)
    assert match is not None and (match.position, match.length) == (7, 3)


# --- the drafter ------------------------------------------------------------------------------------------------------

PROMPT = np.array([5, 6, 7, 8], dtype=np.int32)


def test_a_sibling_and_an_earlier_completion_are_followed():
    drafter = SuffixDrafter(1000)
    assert drafter.path("a", PROMPT, [1, 2, 3, 4, 5], 3) == []
    assert drafter.path("b", PROMPT, [], 3) == [1, 2, 3], "the sibling's beginning follows the end of the prompt"
    drafter.ended("a")
    drafter.ended("b")
    assert drafter.path("c", PROMPT.copy(), [1, 2, 3], 5) == [4, 5]
    assert drafter.path("d", PROMPT[:3], [1, 2, 3], 5) == [], "another prompt"


def test_a_path_has_the_version_of_its_text():
    drafter = SuffixDrafter(1000)
    drafter.path("old", PROMPT, [1, 2, 3, 4], 0, version=2)
    drafter.path("old", PROMPT, [1, 2, 3, 4, 9], 0, version=3)
    drafter.ended("old")
    assert drafter.path("new", PROMPT, [1, 2, 3], 2, version=7) == [4, 9] and drafter.source("new") == 3
    assert drafter.path("new", PROMPT, [1, 2, 3, 30, 31, 32, 33, 30, 31, 32], 1, version=8) == [33]
    assert drafter.source("new") == 8, "its own text"
    assert drafter.path("new", PROMPT, [1, 2, 3, 30, 31, 32, 33, 30, 31, 32, 5, 6, 7], 1, version=8) == [8]
    assert drafter.source("new") is None, "the prompt"
    assert drafter.path("new", PROMPT, [1, 2, 3, 30, 31, 32, 33, 30, 31, 32, 5, 6, 7, 40], 1, version=8) == []
    assert drafter.source("new") is None


def test_the_prompt_used_longest_ago_is_dropped_first_and_none_that_is_in_use():
    drafter = SuffixDrafter(60)
    prompts = [PROMPT + i for i in range(5)]
    drafter.path("stays", prompts[0], list(range(20)), 1)
    for i in range(1, 5):
        drafter.path(i, prompts[i], list(range(20)), 1)
        drafter.ended(i)
        assert drafter.kept <= 60
    assert drafter.path("again", prompts[4], [3, 4, 5], 1) == [6]
    assert drafter.path("gone", prompts[1], [3, 4, 5], 1) == []
    assert drafter.path("beside", prompts[0], [3, 4, 5], 1) == [6]


def test_the_end_of_an_unknown_completion_is_no_error():
    SuffixDrafter(10).ended("never seen")


def test_running_completions_leave_the_kept_ones_their_room():
    """However long they are."""
    drafter = SuffixDrafter(60)
    drafter.path("early", PROMPT, list(range(20)), 0)
    drafter.ended("early")
    for i in range(4):
        drafter.path(i, PROMPT + 10 * i + 10, list(range(100, 300)), 0)
    drafter.path("short", PROMPT + 90, [1, 2, 3], 0)
    drafter.ended("short")
    assert drafter.path("late", PROMPT, [3, 4, 5], 1) == [6]


def test_a_prompt_that_is_always_in_use_keeps_no_more_than_others():
    """Requests for it overlap without end."""
    drafter, rng = SuffixDrafter(200), random.Random(0)
    texts = {i: [rng.randrange(50) for _ in range(40)] for i in range(60)}
    for i in range(60):
        drafter.path(i, PROMPT, texts[i][:20], 0, version=i)
        if i:
            drafter.path(i - 1, PROMPT, texts[i - 1], 0, version=i)
            drafter.ended(i - 1)
        assert drafter.kept <= 200 and drafter.tokens <= 300
    for at in range(20, 37):  # what is left of it goes on as if it were alone
        path, version = drafter.path(59, PROMPT, texts[59][:at], 3, version=60), drafter.source(59)
        alone = SuffixDrafter(200)
        alone.path(59, PROMPT, texts[59][:20], 0, version=59)
        if path and version in (59, 60):
            assert path == alone.path(59, PROMPT, texts[59][:at], 3, version=60)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kept_tokens", [0, 50, 400])
def test_what_is_kept_is_counted_and_bounded_whatever_ends_when(seed, kept_tokens):
    drafter, rng, texts, running = SuffixDrafter(kept_tokens), random.Random(seed), {}, []
    prompts = [np.arange(100 * i, 100 * i + rng.choice([0, 2, 5, 50]), dtype=np.int32) for i in range(4)]
    for step in range(300):
        if rng.random() < 0.2:
            running.append((step, rng.choice(prompts)))
            texts[step] = []
            drafter.path(*running[-1], [], 0)
        if not running:
            continue
        which = rng.randrange(len(running))
        key, prompt = running[which]
        texts[key] += [rng.randrange(9) for _ in range(rng.randint(0, 8))]
        path = drafter.path(key, prompt, texts[key], 4, version=step)
        assert len(path) <= 4 and (not path or drafter.source(key) is None or 0 <= drafter.source(key) <= step)
        if rng.random() < 0.2:
            drafter.ended(key)
            del running[which]
            in_use = sum(min(len(prompt), 32) + len(texts[each]) for each, prompt in running)
            in_use += sum({id(prompt): len(prompt) for _, prompt in running}.values())
            assert 0 <= drafter.kept <= max(kept_tokens, in_use)
            assert drafter.tokens - drafter.kept == in_use
    for key, _ in running:
        drafter.ended(key)
    assert drafter.tokens == drafter.kept <= kept_tokens
