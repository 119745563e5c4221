"""Verify steps in the captured steps of a GPU: the same bits as plain ones, no wait, nothing compiled while serving."""

import pytest
import torch
from rollout_kernels.step import draft_by_ngrams

from rollout.constraints.matcher import AllowList
from rollout.engine.device.streams import make_device
from rollout.engine.features.drafts import ngram_drafter
from rollout.engine.messages.to_engine import PutAdapter
from scripts.bench.random_adapter import random_adapter
from tests.support.engine.cuda_harness import load_bf16, make_fused_checkpoint, tick_without_waiting, watch_compilation
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import Bench, prompt_of, watch_headers

pytestmark = pytest.mark.gpu
VOCAB = 4001
SIZES = {
    **{"kv_pages": 900, "page_size": 16, "max_rows": 8, "prefill_chunk_tokens": 256, "speculation_rows": 24},
    **{"shared_saved_bytes": 1, "ahead_saved_bytes": 1, "shared_positions": 1},
}
RULES = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 5, "logit_bias": ((5, 3.0), (9, -4.0))},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_fused_checkpoint(tmp_path_factory.mktemp("verify"))


def submit(bench: Bench) -> None:
    """A group behind a long prompt, all kinds of sampling, likeliest tokens, a stop."""
    bench.submit("group", prompt_of(400, 1), 90, sampling=RULES[0], n=3)
    for i, sampling in enumerate(RULES):
        bench.submit(f"rules{i}", prompt_of(150 + 40 * i, 2 + i), 60 + 5 * i, sampling=sampling)
    bench.submit("masked", prompt_of(50, 19), 50, sampling=RULES[0], constraint=AllowList(tuple(range(40)), VOCAB))
    bench.submit("tops", prompt_of(70, 20), 40, sampling=RULES[0], logprobs=3)
    bench.submit("stops", prompt_of(70, 21), 80, sampling=RULES[0], stop={"token_ids": (31, 32), "min_tokens": 6})


def run(bench: Bench) -> Bench:
    submit(bench)
    return bench.finish()


def tokens_of(bench: Bench) -> dict[tuple[str, int], list[int]]:
    return {key: done.token_ids for key, done in bench.completions.items()}


def all_of(bench: Bench) -> dict:
    return {
        key: (done.token_ids, done.logprobs, done.raw_logprobs, done.top_ids, done.top_logprobs, done.finish.reason)
        for key, done in bench.completions.items()
    }


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_deterministic_completions_are_equal_bit_for_bit(folder, kv_dtype):
    fields = {**SIZES, "deterministic": True, "kv_dtype": kv_dtype}
    plain = run(Bench(load_bf16(folder), make_device("cuda"), **fields))
    for wrong, ragged, shares in [(0.0, False, True), (0.3, True, True), (0.3, True, False), (1.0, False, True)]:
        bench, _ = drafting(
            load_bf16(folder),
            tokens_of(plain),
            wrong,
            ragged=ragged,
            device=make_device("cuda"),
            group_attention=shares,
            **fields,
        )
        assert all_of(run(bench)) == all_of(plain), (wrong, ragged, shares)
        drafts = bench.drafts
        assert drafts.drafted > 100 and (drafts.accepted > 50) == (wrong < 1)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_drafts_by_ngrams_change_no_bit_and_are_those_of_torch(folder, monkeypatch, kv_dtype):
    fields = {**SIZES, "deterministic": True, "kv_dtype": kv_dtype}
    plain = run(Bench(load_bf16(folder), make_device("cuda"), **fields))
    checked, search = [], ngram_drafter.draft_by_ngrams

    def compare(rows_R, ints_NI, pages_NP, tokens_PS, guesses_NG, **columns):
        search(rows_R, ints_NI, pages_NP, tokens_PS, guesses_NG, **columns)
        expected_NG = guesses_NG.cpu()
        draft_by_ngrams(rows_R.cpu(), ints_NI.cpu(), pages_NP.cpu(), tokens_PS.cpu(), expected_NG, **columns)
        checked.append(torch.equal(expected_NG, guesses_NG.cpu()))

    monkeypatch.setattr(ngram_drafter, "draft_by_ngrams", compare)
    bench = Bench(load_bf16(folder), make_device("cuda"), speculation="ngram", **fields)
    checked.clear()  # at the start kernels are compiled without running
    bias = tuple((token, 9.0) for token in range(20, 28))  # a text of few tokens, which repeats
    for each in (bench, other := Bench(load_bf16(folder), make_device("cuda"), **fields)):
        each.submit("few", prompt_of(300, 31), 150, sampling={"temperature": 1.0, "seed": 9, "logit_bias": bias}, n=2)
    assert all_of(run(bench)) == all_of(run(other))
    assert {key: all_of(bench)[key] for key in all_of(plain)} == all_of(plain)
    assert len(checked) > 100 and all(checked)
    drafts = bench.drafts
    assert drafts.drafted > 300 and drafts.accepted > 40


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("shares", [True, False])
def test_logprobs_are_those_of_plain_steps_up_to_rounding(folder, shares, slots):
    """At a high temperature rounding hardly ever changes a token, so rows stay together. With slots: adapters."""
    fields = {**SIZES, "adapter_slots": slots, "adapter_rank": 16}
    plain = Bench(load_bf16(folder), make_device("cuda"), **fields)
    bench, _ = drafting(
        load_bf16(folder),
        known := {},
        0.2,
        device=make_device("cuda"),
        group_attention=shares,
        **fields,
    )
    for each in (plain, bench):
        for i in range(slots):
            model = each.engine.executor.step.model
            each.engine.inbox.put(PutAdapter(f"a{i}", random_adapter(model.spec, 16, torch.bfloat16, i)))
        for i in range(8):
            adapter = f"a{i % 3}" if i % 3 < slots else None
            sampling = {"temperature": 100.0, "seed": i}
            each.submit(f"r{i}", prompt_of(300 + 20 * i, i), 64, sampling=sampling, adapter=adapter)
        each.finish()
        known.update(tokens_of(plain))
    assert bench.drafts.accepted > 100
    for key, one in plain.completions.items():
        other = bench.completions[key]
        same = next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), 64)
        assert same > 8, key
        ours, theirs = torch.tensor(other.raw_logprobs[:same]), torch.tensor(one.raw_logprobs[:same])
        assert (ours - theirs).abs().mean() < 0.03, key


@pytest.mark.parametrize("drafter", ["suffix", "ngram"])
def test_verify_steps_are_captured_and_wait_for_nothing(folder, monkeypatch, drafter):
    """The drafts of the first are all wrong."""
    if drafter == "suffix":
        bench, _ = drafting(load_bf16(folder), {}, 1.0, device=make_device("cuda"), **SIZES)
    else:
        bench = Bench(load_bf16(folder), make_device("cuda"), speculation="ngram", **SIZES)
    headers = watch_headers(bench)
    compiled = watch_compilation(monkeypatch)
    for i in range(8):
        bench.submit(f"r{i}", prompt_of(100, i), 200, sampling={"temperature": 1.0, "seed": i})
    bench.ticks(20)
    headers.clear()
    reserved = torch.cuda.memory_reserved()
    tick_without_waiting(bench)
    assert torch.cuda.memory_reserved() == reserved
    bench.finish()
    assert compiled == []
    assert all(header.size == 32 for header in headers[:100]) and all(
        header.most_ahead == 3 for header in headers[:100]
    )
