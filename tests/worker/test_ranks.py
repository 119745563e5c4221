"""Workers of several ranks against workers of one rank: same model, same requests, gloo on a CPU."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support.models.draft_heads import head_config, random_head, save_head
from tests.support.models.families import make_checkpoint
from tests.support.tokenizer_folder import make_tokenizer_folder
from tests.support.worker.harness import assert_idle, launch, paused_amid
from tests.support.worker.lost_ranks import FAULT, ended, followers_of
from tests.support.worker.rank_pair import LOGPROB, Pair, assert_all_equal, assert_equal, start_pair
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher

#: Few pages and rows, small chunks: rows are preempted, and prompts come in pieces.
FLAGS: dict[str, Any] = {
    **{"dtype": "float32", "max_rows": 6, "page_size": 4, "kv_pages": 60, "prefill_chunk_tokens": 16},
    **{"routing": True, "device": "cpu", "max_context_tokens": 200},
}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "stop": {"ignore_eos": True}}
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}


#: Ranks, speculation and the split of attention of the second worker.
CASES = [
    (2, "off", "heads"),
    (2, "off", "rows"),
    (2, "off", "context"),
    *(
        pytest.param(case, marks=pytest.mark.nightly)
        for case in [
            (2, "suffix", "heads"),
            (2, "ngram", "heads"),
            (2, "heads", "heads"),
            (4, "off", "heads"),
            (4, "off", "rows"),
            (4, "off", "context"),
            (2, "suffix", "context"),
        ]
    ),
]


#: For tests to which the split of attention makes no difference.
LEAST = [CASES[0], *(pytest.param(case, marks=pytest.mark.nightly) for case in CASES[1:3]), *CASES[3:]]
of_one_split = pytest.mark.parametrize("pair", LEAST, indirect=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint with a tokenizer, and its vocabulary."""
    from transformers import AutoTokenizer

    folder = make_tokenizer_folder(tmp_path_factory.mktemp("model"))
    vocab = len(AutoTokenizer.from_pretrained(folder)) + 5
    make_checkpoint("qwen3_moe", folder, seed=1, vocab_size=vocab, **SIZES)
    return make_tokenizer_folder(folder), vocab


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, model: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    from transformers import AutoConfig

    folder, vocab = model
    logs = tmp_path_factory.mktemp("logs")
    names = ("tensor_parallel", "speculation", "attention_split")
    flags = dict(zip(names, request.param, strict=True)) | {"check_ranks": True}
    if flags["attention_split"] == "rows":
        flags |= {"kv_pages": 52, "max_rows": 24}  # of each rank; its rows are still too many for it
    if flags["speculation"] == "heads":
        config = head_config(AutoConfig.from_pretrained(folder), vocab // 2)
        flags["speculation_model"] = save_head(logs / "head", config, random_head(config))
    with start_pair(folder, vocab, logs, FLAGS, flags) as workers:
        yield workers
        assert_idle(workers.several)


def test_groups_prefixes_and_preemption_give_the_same_tokens(pair: Pair) -> None:
    shared = pair.prompt(21, 0)
    requests: list[dict[str, Any]] = [
        {"prompt": shared + pair.prompt(3 + 5 * i, i), "max_tokens": 30 + 3 * i, "n": 1 + i % 3, **SAMPLED}
        for i in range(12)
    ]
    for i, request in enumerate(requests):
        request |= {"seed": i} | ({"temperature": 0.0} if i % 2 else {})
    assert_all_equal(pair.both(requests))
    with RolloutClient(pair.several.endpoint, timeout_s=60) as client:
        status = client.status()
    assert status["preemptions"] > 0, "the pool is too small for these"


@of_one_split
def test_every_rule_of_sampling_gives_the_same_tokens(pair: Pair) -> None:
    rules: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05, "temperature": 0.7},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"logit_bias": {7: 4.0, 11: -5.0}, "top_k": 20, "top_p": 0.9},
        {"stop": {"token_ids": [9, 30], "min_tokens": 6}},
    ]
    requests = [
        {"prompt": pair.prompt(9 + i, i), "max_tokens": 24, **SAMPLED, "seed": 40 + i, **rule}
        for i, rule in enumerate(rules)
    ]
    assert_all_equal(pair.both(requests))


@of_one_split
def test_ranks_agree_on_draws_of_requests_without_a_seed(pair: Pair) -> None:
    """The group compares the tokens of its ranks and ends where they differ."""
    request = {"prompt": pair.prompt(9, 1), "max_tokens": 20, "temperature": 1.0, "stop": {"ignore_eos": True}}
    with RolloutClient(pair.several.endpoint, timeout_s=60) as client:
        results = client.generate_many([request] * 4)
        assert client.status()["state"] == "serving"
    drawn = {tuple(result.completions[0].token_ids.tolist()) for result in results}
    assert len(drawn) == 4 and all(len(tokens) == 20 for tokens in drawn)


def test_scores_and_routing_are_those_of_one_rank(pair: Pair) -> None:
    asked = {"max_tokens": 12, "logprobs": 3, "prompt_logprobs": True, "return_routing": True, "temperature": 0.0}
    results = pair.both([{"prompt": pair.prompt(25, i), **asked} for i in range(3)])
    assert_all_equal(results)
    for theirs, ours in results:
        assert np.allclose(ours.prompt_logprobs, theirs.prompt_logprobs, rtol=0, atol=LOGPROB, equal_nan=True)
        a, b = ours.completions[0], theirs.completions[0]
        assert a.top_ids is not None and np.array_equal(a.top_ids, b.top_ids)
        assert np.allclose(a.top_logprobs, b.top_logprobs, rtol=0, atol=LOGPROB)
        assert a.routing is not None and np.array_equal(a.routing, b.routing)
    named = {"prompt_logprob_token_ids": [1, 7, 3], "prompt_entropy": True, "prompt_logprobs_last": 9}
    for theirs, ours in pair.both([{"prompt": pair.prompt(25, 1), "max_tokens": 0, **named}]):
        for name in ("prompt_logprobs", "prompt_chosen_logprobs", "prompt_entropy"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert len(a) == 9 and np.allclose(a, b, rtol=0, atol=LOGPROB)
    whole = {"max_tokens": 0, "prompt_logprobs": True, "return_routing": "all"}
    for theirs, ours in pair.both([{"prompt": pair.prompt(length, length), **whole} for length in (1, 30, 200)]):
        assert np.allclose(ours.prompt_logprobs, theirs.prompt_logprobs, rtol=0, atol=LOGPROB, equal_nan=True)
        assert len(ours.completions[0]) == 0 and ours.completions[0].finish_reason == "length"
        a, b = ours.completions[0].routing, theirs.completions[0].routing
        assert a is b is None if ours.prompt_tokens == 1 else len(a) == ours.prompt_tokens - 1 and np.array_equal(a, b)


def test_constrained_rows_draw_with_the_masks_of_rank_0(pair: Pair) -> None:
    pytest.importorskip("xgrammar")
    constraint = {"regex": "(yes|no|[0-9]{2,5}), [a-f]+"}
    requests: list[dict[str, Any]] = [
        {"prompt": pair.prompt(8, i), "max_tokens": 20, "temperature": 1.0, "seed": i} for i in range(5)
    ]
    for request in requests[:3]:
        request["constraint"] = constraint
    after = {"constraint": {**constraint, "after": [40]}, "logit_bias": {40: 6.0}, "max_tokens": 60}
    requests += [{**request, **after, "stop": {"min_tokens": 9}} for request in requests[3:]]
    results = pair.both(requests)
    assert_all_equal(results)
    assert any(40 in result.completions[0].token_ids[:-1] for _, result in results[5:])


def test_an_update_amid_a_completion_is_swapped_by_all_ranks_or_by_none(pair: Pair, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, seed=2, vocab_size=pair.vocab, **SIZES)
    new = load_file(tmp_path / "model.safetensors")
    old = load_file(pair.folder / "model.safetensors")
    greedy = {"prompt": pair.prompt(17, 3), "max_tokens": 20, "temperature": 0.0, "stop": {"ignore_eos": True}}
    (before,) = pair.both([greedy])
    for worker in (pair.one, pair.several):
        with (
            WeightPublisher(worker.endpoint, bucket_bytes=1 << 14) as publisher,
            RolloutClient(worker.endpoint, timeout_s=600) as client,
        ):
            first = client.status()["weights_version"]
            stream = paused_amid(client, **greedy | {"max_tokens": 170})
            (report,) = publisher.publish(new, first + 1).applied(60)
            assert report.version == first + 1
            client.resume()
            (completion,) = stream.wait().completions
            assert [version for version, _ in completion.versions] == [first, first + 1]
            for rank in client.status()["ranks"]:
                assert rank["verified"] == rank["swapped"] > 0, "all have the update, whole and copied"
            with pytest.raises(Exception, match="missing tensors"):
                publisher.publish(dict(list(new.items())[1:]), first + 2).applied(60)
    (changed,) = pair.both([greedy])
    assert_all_equal([changed])
    assert changed[0].completions[0].token_ids.tolist() != before[0].completions[0].token_ids.tolist()
    for worker in (pair.one, pair.several):
        with WeightPublisher(worker.endpoint) as publisher:
            publisher.publish(old, first + 3).applied(60)
    (again,) = pair.both([greedy])
    assert_all_equal([again])
    assert again[1].completions[0].token_ids.tolist() == before[1].completions[0].token_ids.tolist()


@of_one_split
def test_cancel_and_pause_leave_nothing_behind_on_any_rank(pair: Pair) -> None:
    with RolloutClient(pair.several.endpoint, timeout_s=60) as client:
        with client.generate(pair.prompt(9, 1), max_tokens=180, stream="tokens", n=2, **SAMPLED) as stream:
            next(stream)
        client.pause("keep")
        client.resume()
    assert_idle(pair.several)
    requests = [{"prompt": pair.prompt(6 + i, i), "max_tokens": 15, "temperature": 0.0} for i in range(4)]
    assert_all_equal(pair.both(requests))


def test_turns_of_sessions_find_their_kv(pair: Pair) -> None:
    def talk(client: RolloutClient) -> list[Any]:
        prompts, said = [pair.prompt(14 + i, i) for i in range(2)], []
        for turn in range(3):
            requests = [
                {"prompt": prompt, "max_tokens": 9, "session": f"s{i}", **SAMPLED, "seed": i}
                for i, prompt in enumerate(prompts)
            ]
            answers = [result.completions[0] for result in client.generate_many(requests)]
            said += answers
            prompts = [
                [*prompt, *answer.token_ids.tolist(), *pair.prompt(3, turn)]
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        for i in range(2):
            client.end_session(f"s{i}")
        return said

    theirs, ours = pair.each(talk)
    for a, b in zip(ours, theirs, strict=True):
        assert_equal(a, b)
    for status in pair.each(lambda client: client.status()):
        assert status["sessions"]["hits"] >= 4


@pytest.mark.parametrize("split", ["rows", "context"])
def test_a_rank_that_is_killed_amid_split_attention_hands_back_all_tokens(
    model: tuple[Path, int], split: str, tmp_path: Path
) -> None:
    flags = FLAGS | {"tensor_parallel": 2, "attention_split": split}
    with (
        launch(model[0], log=tmp_path / "log", **flags) as worker,
        RolloutClient(worker.endpoint, timeout_s=60) as client,
    ):
        request = {"prompt": [*range(3, 12)], "max_tokens": 190, "n": 4, **SAMPLED}
        stream = client.generate(**request, stream="tokens")
        next(stream)
        (follower,) = followers_of(worker.pid)
        os.kill(follower, signal.SIGKILL)
        completions = stream.wait().completions
        assert {completion.finish_reason for completion in completions} <= {"error", "length"}
        assert any(completion.finish_reason == "error" and len(completion) for completion in completions)
        assert ended(worker) == FAULT


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(9)])
def test_random_requests_give_the_same_tokens(pair: Pair, seed: int) -> None:
    draws, requests = random.Random(seed), []
    for i in range(24):
        request: dict[str, Any] = {"prompt": pair.prompt(draws.randrange(1, 60), draws.randrange(5))}
        request |= {"max_tokens": draws.randrange(1, 60), "n": draws.choice([1, 1, 2, 4]), "seed": i}
        request |= draws.choice([{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 4, "temperature": 1.3}])
        request |= draws.choice([{}, {"logprobs": 2}, {"prompt_logprobs": True}, {"repetition_penalty": 1.1}])
        requests.append(request)
    assert_all_equal(pair.both(requests))


@pytest.mark.nightly
@pytest.mark.parametrize("experts", ["fp8_block", "mxfp8", "auto"])
def test_codes_of_kv_and_of_experts_cut_by_width_give_the_tokens_of_one_rank(
    experts: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, logs = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("logs")
    wide = SIZES | {"hidden_size": 128, "moe_intermediate_size": 256, "head_dim": 64, "vocab_size": 211}
    wide |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}  # ranks cut along blocks
    make_checkpoint("qwen3_moe", folder, seed=1, **wide)
    flags = FLAGS | {"kv_dtype": "fp8_e4m3", "weight_dtype": experts}
    several = {"tensor_parallel": 2, "check_ranks": True}
    # A value between two codes may become either, by the last bit of a sum.
    with start_pair(folder, 211, logs, flags, several, exact=False, tolerance=0.02) as pair:
        requests = [{"prompt": pair.prompt(9 + 7 * i, i), "max_tokens": 40, "seed": i, **SAMPLED} for i in range(6)]
        pair.check(pair.both(requests))
