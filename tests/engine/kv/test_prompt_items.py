"""A prompt of several items: the engine takes their tokens, and prefix keys are made of what the items say."""

import numpy as np
import pytest

from rollout.engine.messages.prompts import Prompt, TokenIds
from rollout.engine.messages.requests import Request, SamplingParams
from rollout.engine.messages.to_engine import Submit
from rollout.engine.sequence.sequence_kv import PrefixKeys
from tests.support.engine.harness import Bench

PAGE = 4


def in_items(tokens: list[int], cuts: list[int]) -> Prompt:
    """A prompt of these tokens, one item between two cuts."""
    bounds = [0, *cuts, len(tokens)]
    pairs = zip(bounds, bounds[1:], strict=False)
    return Prompt(tuple(TokenIds(np.array(tokens[start:end], np.int32)) for start, end in pairs))


@pytest.mark.parametrize("cuts", [[], [1], [4, 8], [3, 5, 6, 18]])
def test_items_of_tokens_are_one_run_of_tokens(cuts):
    tokens = list(range(100, 119))
    prompt, whole = in_items(tokens, cuts), Prompt.of_tokens(np.array(tokens, np.int32))
    assert len(prompt) == 19 and prompt.token_ids.tolist() == tokens
    for start in range(19):
        for end in range(start, 20):
            assert prompt.content(start, end) == whole.content(start, end)


def test_a_page_with_other_content_has_another_key_and_so_have_the_pages_after_it():
    tokens = list(range(12))
    contents = [in_items(tokens, [5]), in_items([*tokens[:4], 99, *tokens[5:]], [5])]
    keys = [PrefixKeys.begin(0), PrefixKeys.begin(0)]
    for start in range(0, 12, PAGE):
        for prompt, chain in zip(contents, keys, strict=True):
            chain.append(chain.next_key(prompt.content(start, start + PAGE)))
    assert [keys[0][i] == keys[1][i] for i in range(3)] == [True, False, False]


def test_prompts_with_different_salts_share_no_kv(model, prompt_of, greedy):
    bench, tokens = Bench(model, page_size=PAGE), prompt_of(30)
    array, greedily = np.array(tokens, np.int32), SamplingParams(temperature=0.0)
    for name, salt in (("plain", b""), ("a", b"a"), ("b", b"b"), ("a again", b"a"), ("plain again", b"")):
        prompt = Prompt((TokenIds(array),), salt)
        bench.engine.inbox.put(Submit(Request(("c", name), prompt, 8, sampling=greedily)))
        bench.run()
        assert bench.tokens(name) == greedy(tokens, 8)
        assert bench.done[name].cached_tokens == (29 if name.endswith("again") else 0)


def test_a_prompt_of_several_items_is_generated_from_and_cached_like_any_other(model, prompt_of, greedy):
    bench, tokens = Bench(model, page_size=PAGE), prompt_of(30)
    bench.complete("one", tokens, 8)
    greedily = SamplingParams(temperature=0.0)
    bench.engine.inbox.put(Submit(Request(("c", "several"), in_items(tokens, [3, 16]), 8, sampling=greedily)))
    bench.run()
    assert bench.done["several"].cached_tokens == 29
    assert bench.tokens("several") == bench.tokens("one") == greedy(tokens, 8)
