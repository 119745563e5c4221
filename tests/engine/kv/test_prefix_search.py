"""The search for known KV, choice by choice, beside a search that compares tokens and knows no keys."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.prefixes import KnownPages, Prefixes
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.kv.state_prefixes import StatePrefixes
from rollout.engine.kv.tier import KVTier
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request
from rollout.engine.sequence.sequence import Group, Sequence
from rollout.engine.sequence.sequence_kv import PrefixEnd, PrefixKeys
from tests.support.engine.harness import Bench

PAGE, PAGES, PLACES = 4, 400, 200
Tokens = tuple[int, ...]
SEEDS = range(30)


class SomeKeys(KVTier):
    """A tier with these keys."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def has(self, key: bytes, oldest: int) -> bool:
        return key in self.keys

    def has_end(self, point: PrefixEnd, tokens: int, oldest: int) -> bool:
        return point.key in self.keys


class Known:
    """A pool and a tier with beginnings of random texts of two words, so that many texts begin alike."""

    def __init__(self, seed: int, states: bool) -> None:
        self.rng = random.Random(seed)
        self.pool, self.tier = PagePool(PAGES), SomeKeys()
        snapshots = Snapshots(0, PLACES, self.pool)
        sessions = Sessions(self.pool, PAGE, PAGES, snapshots)
        shared = self.pool, self.tier, PAGE, True, sessions
        self.prefixes = StatePrefixes(*shared, 0, snapshots) if states else Prefixes(*shared)
        self.in_pool, self.in_tier = set[Tokens](), set[Tokens]()  # beginnings, by their last page
        self.cached, self.ends_in_tier = set[Tokens](), set[Tokens]()
        self.texts = [self.text() for _ in range(12)]

    def text(self) -> Tokens:
        words = ((1, 1, 1), (1, 2))
        return sum((self.rng.choice(words) for _ in range(self.rng.randrange(2, 16))), ())

    def keys(self, text: Tokens) -> PrefixKeys:
        """The keys of its full pages."""
        keys = self.prefixes.no_keys(0, 0)
        for start in range(0, len(text) - PAGE + 1, PAGE):
            keys.append(keys.next_key(content(text)(start, start + PAGE)))
        return keys

    def end(self, text: Tokens) -> PrefixEnd:
        full, after = divmod(len(text), PAGE)
        return self.keys(text).end(full, content(text)(len(text) - after, len(text)), after)

    def put_pages(self, share: float = 0.8) -> None:
        """Put some full pages into the pool, and some into the tier."""
        for text in self.texts:
            for end, key in zip(range(PAGE, len(text) + 1, PAGE), self.keys(text), strict=True):
                if self.rng.random() < share:
                    self.pool.remember(key, self.pool.allocate(), 0)
                    self.in_pool.add(text[:end])
                if self.rng.random() < share:
                    self.tier.keys.add(key)
                    self.in_tier.add(text[:end])

    def put_ends(self, share: float = 0.6) -> None:
        """Put some ends into the cache of snapshots, and some into the tier."""
        for text in [text[: self.rng.randrange(1, len(text) + 1)] for text in self.texts]:
            assert isinstance(self.prefixes, StatePrefixes)
            point, snapshots = self.end(text), self.prefixes.snapshots
            if text not in self.cached and self.rng.random() < share:
                snapshots.keep(point, snapshots.take(), 0, 0)
                self.cached.add(text)
            if self.rng.random() < share:
                self.tier.keys.add(point.key)
                self.pool.ends.note(point.digest, point.after)
                self.ends_in_tier.add(text)

    def reaches(self, text: Tokens, *places: set[Tokens]) -> bool:
        """Whether each full page of a text is in one of these places."""
        return all(any(text[:end] in place for place in places) for end in range(PAGE, len(text) + 1, PAGE))

    def walk(self, text: Tokens) -> KnownPages:
        begin = KnownPages([], self.prefixes.no_keys(0, 0))
        return self.prefixes.known_pages(content(text), begin, (len(text) - 1) // PAGE, 0)


def content(text: Tokens) -> Callable[[int, int], bytes]:
    return Prompt.of_tokens(np.array(text, np.int32)).content


def beginnings(text: Tokens) -> list[Tokens]:
    """The beginnings of a text without its last token, the longest one first."""
    return [text[:end] for end in range(len(text) - 1, -1, -1)]


@pytest.mark.parametrize("seed", SEEDS)
def test_pages_are_known_up_to_the_first_that_neither_pool_nor_tier_has(seed: int) -> None:
    known = Known(seed, states=False)
    known.put_pages()
    for text in [*known.texts, known.text()]:
        found, whole = known.walk(text), [begin for begin in beginnings(text) if len(begin) % PAGE == 0]
        assert len(found.pages) == len(found.keys)
        reached = next(begin for begin in whole if known.reaches(begin, known.in_pool, known.in_tier))
        assert len(found.pages) == len(reached) // PAGE
        assert list(found.keys) == list(known.keys(reached))
        here = next(begin for begin in whole if known.reaches(begin, known.in_pool))
        assert found.in_pool == [known.pool.find(key) for key in known.keys(here)] and all(found.in_pool)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_half_full_page_is_found_by_the_tokens_before_its_end(seed: int) -> None:
    known = Known(seed, states=False)
    ends = dict[Tokens, int]()
    for text in known.texts:
        end = known.end(text)
        if end.after and text not in ends:
            ends[text] = known.pool.allocate()
            known.pool.remember(end.key, ends[text], 0)
            known.pool.ends.note(end.digest, end.after)
    for text in [*known.texts, known.text()]:
        for full in range(len(text) // PAGE + 1):
            keys = known.keys(text[: full * PAGE])
            found = list(known.prefixes.half_pages(content(text), keys, len(text), 0))
            inside = [text[:end] for end in range(min(len(text), full * PAGE + PAGE - 1), full * PAGE, -1)]
            expected = [(ends[begin], min(len(begin), len(text) - 1)) for begin in inside if begin in ends]
            assert [(page, tokens) for page, tokens, hit in found if hit == "turn_end"] == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_the_longest_end_is_chosen_of_the_cache_and_of_a_tier(seed: int) -> None:
    known = Known(seed, states=True)
    known.put_pages()
    known.put_ends()
    prefixes = known.prefixes
    assert isinstance(prefixes, StatePrefixes)
    for text in [*known.texts, known.text()]:
        found = known.walk(text)
        ends = list(prefixes.ends(content(text), found.keys, len(text) - 1, 0))

        cached = [end for end in beginnings(text) if end in known.cached and known.reaches(end, known.in_pool)]
        assert prefixes.longest_cached(ends, found).tokens == max(map(len, cached), default=0)

        reached = [end for end in beginnings(text) if known.reaches(end, known.in_pool, known.in_tier)]
        there = [end for end in reached if end in known.cached | known.ends_in_tier]
        assert prefixes.longest_in_tier(ends, found, 0).tokens == max(map(len, there), default=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_prefill_is_awaited_if_its_priority_is_not_lower(seed: int) -> None:
    known = Known(seed, states=True)
    known.put_pages(0.3)
    prefixes, prefills = known.prefixes, dict[Tokens, int]()
    assert isinstance(prefixes, StatePrefixes)
    for index, text in enumerate(known.texts):
        begin, priority = text[: known.rng.randrange(1, len(text))], known.rng.randrange(3)
        point = known.end(begin)
        prefixes.snapshots.expect(point)
        prefixes.set_frontier(sequence(text, index, priority), point.key)
        prefills[begin] = max(priority, prefills.get(begin, 0))
    for priority in range(3):
        for text in known.texts:
            found, seq = known.walk(text), sequence(text, 99, priority)
            ends = list(prefixes.ends(content(text), found.keys, len(text) - 1, 0))
            expected = [end for end in beginnings(text) if prefills.get(end, -1) >= priority]
            assert prefixes.longest_awaited(ends, seq, 0).tokens == max(map(len, expected), default=0)


def sequence(text: Tokens, index: int, priority: int) -> Sequence:
    request = Request(("c", str(index)), Prompt.of_tokens(np.array(text, np.int32)), 4, priority=priority)
    return Sequence(Group(request, 0.0, "c"), 0, index)


def test_what_follows_a_short_prompt_of_a_group_is_found(model, prompt_of) -> None:
    """The completions of a group, whose prompt fills no page, are known like those of a prompt alone."""
    bench, prompt = Bench(model, page_size=8), prompt_of(5)
    bench.complete("group", prompt, 30, n=3, sampling={"temperature": 1.0, "seed": 3})
    for index in range(3):
        said = prompt + bench.tokens("group", index)
        bench.complete(f"goes on {index}", said, 2)
        assert bench.done[f"goes on {index}"].cached_tokens == len(said) - 1
