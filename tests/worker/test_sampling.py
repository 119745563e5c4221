"""What a worker draws: the same tokens for the same seed, whatever else runs, and after a break as without one."""

import numpy as np
import pytest

from tests.support.kernels.grids import nightly
from tests.support.worker.harness import COLON, EOS, SPACE, TEXTS, text_of, token_ids
from tests.support.worker.raw_client import RawClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.results import Completion
from trainer_bridge.wire.errors import BadRequest

#: Goes with a bias of 100 on one token: the checkpoints' logits lie further apart than that.
BAN = dict.fromkeys(range(len(TEXTS)), -100.0)
#: Temperature at which the checkpoints are unsure of every token.
HOT = 60.0
ENDLESS = {"ignore_eos": True}


def tokens(completion: Completion) -> list[int]:
    return completion.token_ids.tolist()


def test_a_seed_gives_the_same_tokens_whatever_else_runs(client: RolloutClient) -> None:
    alone = client.generate("17:", n=3, max_tokens=80, temperature=HOT, seed=7, stop=ENDLESS)
    crowd = [{"prompt": f"{start}:", "seed": start} for start in range(30, 40)]
    crowd.insert(4, {"prompt": "17:", "seed": 7, "n": 3})
    results = client.generate_many(crowd, max_tokens=80, temperature=HOT, stop=ENDLESS)
    for one, other in zip(alone.completions, results[4].completions, strict=True):
        assert tokens(one) == tokens(other) and one.seed == other.seed
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    other_seed = client.generate("17:", n=3, max_tokens=80, temperature=HOT, seed=8, stop=ENDLESS)
    assert all(tokens(a) != tokens(b) for a, b in zip(alone.completions, other_seed.completions, strict=True))


def test_a_drawn_seed_is_returned_and_can_be_used_again(client: RolloutClient) -> None:
    first, second = (client.generate("17:", max_tokens=60, temperature=HOT, stop=ENDLESS) for _ in range(2))
    assert tokens(first.completions[0]) != tokens(second.completions[0])
    seed = first.extra["seed"]
    assert isinstance(seed, int) and 0 <= seed < 2**63
    again = client.generate("17:", max_tokens=60, temperature=HOT, seed=seed, stop=ENDLESS)
    assert tokens(again.completions[0]) == tokens(first.completions[0])


@pytest.mark.parametrize("sampling", [{"temperature": HOT, "top_p": 0.9, "top_k": 6}, *nightly({"temperature": HOT})])
def test_after_a_cancel_the_chunks_go_on_as_if_nothing_had_happened(client: RolloutClient, sampling: dict) -> None:
    settings = {"max_tokens": 400, "stop": ENDLESS}
    whole = client.generate("17:", sampling={**sampling, "seed": 11}, **settings).completions[0]
    fewer = {**settings, "max_tokens": 399}  # on a busy machine all tokens may be there before the cancel
    with client.generate("17:", sampling={**sampling, "seed": 11}, stream="tokens", stream_every=8, **fewer) as stream:
        for chunk in stream:
            if chunk.offset + len(chunk.token_ids) >= 60:
                stream.cancel()
                break
    (partial,) = stream.partials()
    assert 60 <= len(partial) < 400
    assert partial.seed == whole.seed
    result = client.generate("17:", sampling=sampling, continue_from=partial, **settings)
    (joined,) = result.completions
    assert tokens(joined) == tokens(whole) and joined.seed == whole.seed and result.extra["seed"] == whole.seed
    assert joined.versions == [(0, 400)] and joined.finish_reason == "length"
    np.testing.assert_allclose(joined.logprobs, whole.logprobs, atol=1e-5)
    np.testing.assert_allclose(joined.raw_logprobs, whole.raw_logprobs, atol=1e-4)
    if "top_k" in sampling:
        assert joined.drawn_logprobs is not None and whole.drawn_logprobs is not None
        known = len(partial) if np.isnan(joined.drawn_logprobs[0]) else 0  # a continuation may not know earlier ones
        assert np.isnan(joined.drawn_logprobs[:known]).all()
        np.testing.assert_allclose(joined.drawn_logprobs[known:], whole.drawn_logprobs[known:], atol=1e-5)
    else:
        assert joined.drawn_logprobs is None


def test_log_probs_that_a_continuation_does_not_give_are_unknown(raw: RawClient) -> None:
    prior = {"token_ids": token_ids(" 18 19"), "seed": 5}
    raw.send("generate", "c", prompt="17:", max_tokens=12, continue_from=prior, stream="tokens", stream_every=2)
    chunks, result = raw.receive_all("c")
    (completion,) = result["completions"]
    assert text_of(completion["token_ids"]) == " 18 19 20 21"
    assert completion["versions"] == [[-1, 6], [0, 6]] and result["prompt_tokens"] == 3
    assert np.isnan(completion["logprobs"][:6]).all() and np.isfinite(completion["logprobs"][6:]).all()
    assert chunks[0]["offset"] == 6 and "".join(text_of(chunk["token_ids"]) for chunk in chunks) == " 20 21"


def test_greedy_takes_the_likeliest_token(client: RolloutClient) -> None:
    greedy = client.generate("17:", max_tokens=30, temperature=0).completions[0]
    assert text_of(tokens(greedy)) == " 18 19 20 21 22 23 24 25 26 27"
    assert greedy.drawn_logprobs is None
    np.testing.assert_array_equal(greedy.logprobs, greedy.raw_logprobs)


def test_a_biased_token_is_drawn_and_its_logprobs_tell_both_distributions(client: RolloutClient) -> None:
    five = TEXTS.index("5")
    # A numpy integer is as good a key as any.
    result = client.generate("17:", max_tokens=20, logit_bias={**BAN, np.int64(five): 100.0})
    (completion,) = result.completions
    assert tokens(completion) == [five] * 20
    assert completion.drawn_logprobs is not None
    assert (completion.drawn_logprobs > -0.1).all()
    assert completion.logprobs[0] < -100  # a space would have been certain


def test_min_tokens_bans_stop_tokens_until_then(client: RolloutClient) -> None:
    stop = {"token_ids": [SPACE]}
    early = client.generate("17:", max_tokens=20, stop=stop).completions[0]
    assert (tokens(early), early.finish_reason, early.stop) == ([SPACE], "stop", SPACE)
    late = client.generate("17:", max_tokens=400, stop={**stop, "min_tokens": 7}, seed=1).completions[0]
    assert SPACE not in tokens(late)[:7] and late.finish_reason == "stop" and late.stop == SPACE
    assert len(late) >= 8 and tokens(late)[-1] == SPACE
    assert late.drawn_logprobs is not None


def test_the_rest_is_cancelled_once_enough_are_complete(client: RolloutClient) -> None:
    """Stop tokens come at random, so completions end far apart; a cancelled one is a prefix of the uncancelled one."""
    fields = {"n": 8, "max_tokens": 400, "temperature": HOT, "seed": 3, "stop": {"token_ids": [COLON], **ENDLESS}}
    some, whole = (client.generate("17:", **fields, **more).completions for more in ({"min_complete": 3}, {}))
    reasons = [completion.finish_reason for completion in some]
    assert reasons.count("cancelled") == 5 and {completion.finish_reason for completion in whole} <= {"stop", "length"}
    for part, complete in zip(some, whole, strict=True):
        assert tokens(part) == tokens(complete)[: len(part)]
    soonest = sorted(range(8), key=lambda i: len(whole[i]))[:3]
    assert [i for i in range(8) if reasons[i] != "cancelled"] == sorted(soonest)
    with pytest.raises(BadRequest, match="min_complete") as caught:
        client.generate("17:", n=2, min_complete=3)
    assert caught.value.field == "min_complete"


def test_eos_ends_a_completion_unless_it_is_ignored(client: RolloutClient) -> None:
    bias = {**BAN, EOS: 100.0}
    ended = client.generate("17:", max_tokens=9, logit_bias=bias).completions[0]
    assert (tokens(ended), ended.finish_reason, ended.stop) == ([EOS], "stop", EOS)
    ignored = client.generate("17:", max_tokens=9, logit_bias=bias, stop={"ignore_eos": True}).completions[0]
    assert (tokens(ignored), ignored.finish_reason, ignored.stop) == ([EOS] * 9, "length", None)


@pytest.mark.parametrize("stream", [False, "tokens"])
def test_a_stop_string_is_found_across_tokens(client: RolloutClient, stream: str | bool) -> None:
    """The string takes three tokens, and is looked for at every fourth."""
    prompt = " ".join(map(str, range(40, 58))) + ":"
    fields = {"max_tokens": 200, "stop": {"strings": ["never", " 64"]}, "return_text": True}
    if stream:
        with client.generate(prompt, stream="tokens", stream_every=1, **fields) as chunks:
            sent = [chunk for chunk in chunks]
            result = chunks.wait()
        assert "".join(chunk.part.text or "" for chunk in sent) == " 58 59 60 61 62 63"
        assert sum(len(chunk.token_ids) for chunk in sent) == 21
    else:
        result = client.generate(prompt, **fields)
    (completion,) = result.completions
    assert (completion.finish_reason, completion.stop) == ("stop", " 64")
    assert completion.text == " 58 59 60 61 62 63"
    assert text_of(tokens(completion)) == " 58 59 60 61 62 63 64"
    assert completion.versions == [(0, 21)] and len(completion.logprobs) == 21


def test_a_stop_string_inside_the_first_tokens_counts_only_after_min_tokens(client: RolloutClient) -> None:
    stop = {"strings": [" 18", " 21"], "min_tokens": 4}
    (completion,) = client.generate("17:", max_tokens=50, stop=stop, return_text=True).completions
    assert completion.stop == " 21" and completion.text == " 18 19 20"


def test_penalties_change_the_draws_and_their_log_probs(client: RolloutClient) -> None:
    penalties = {"presence_penalty": 100.0, "frequency_penalty": 100.0}
    (plain,) = client.generate("17:", max_tokens=40, temperature=0).completions
    (other,) = client.generate("17:", max_tokens=40, temperature=0, **penalties).completions
    assert other.drawn_logprobs is not None and plain.drawn_logprobs is None
    assert len(set(tokens(other)[:8])) > len(set(tokens(plain)[:8]))
