"""Drafts by n-grams in all families and whatever happens to rows: drafts fit the text, completions stay the same."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.engine.build import rebuild_engine
from rollout.models import load_model
from tests.engine.features.drafts.test_drafts_fuzz import by_ngrams, disturbed
from tests.engine.features.drafts.test_speculation import assert_same
from tests.engine.test_invariants import run_watched
from tests.support.engine.drafting import fixed_costs, row_by_row
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench, load
from tests.support.engine.images import submit as submit_image
from tests.support.engine.sleeping import Sleeping
from tests.support.kernels.grids import nightly
from tests.support.models.every_family import EVERY_FAMILY
from tests.support.models.images import make_model, picture, prompt_with
from tests.support.ngrams import CheckedDrafts, texts_of

#: Too slow on a CPU, or with contexts that are too short.
_LEFT_OUT = {"Kimi-K2", "Phi3 long"}
_IN_EVERY_RUN = ("Qwen3_5", "Gemma3", "DeepseekV3", "NemotronH", "BailingHybrid")  # states, windows, latents
_AT_NIGHT = [name for name in EVERY_FAMILY if name not in _LEFT_OUT and name not in _IN_EVERY_RUN]
#: With fewer pages than six texts take.
_FEW_PAGES = {"kv_pages": 40, "page_size": 4}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(i: int) -> list[int]:
    """Of few different tokens, so that most n-grams came before; every two begin alike."""
    rng = random.Random(i // 2)
    return [rng.randrange(4) + 3 for _ in range(20)] + [3 + i % 2]


PROMPTS = {f"r{i}": prompt(i) for i in range(6)}


def submit_six(bench: Bench) -> None:
    for i, (name, tokens) in enumerate(PROMPTS.items()):
        sampling = {"temperature": 0.7, "seed": 100 + 10 * i, "logit_bias": tuple((t, 30.0) for t in range(3, 7))}
        bench.submit(name, tokens, 45, sampling=sampling)


def six_without(model: Any, **fields: Any) -> Bench:
    plain = Bench(model, **fields)
    submit_six(plain)
    return plain.finish()


@pytest.mark.parametrize("name", [*_IN_EVERY_RUN[1:], *nightly(_IN_EVERY_RUN[0], *_AT_NIGHT)])
def test_drafts_of_all_families_are_those_of_the_text(name, tmp_path, monkeypatch):
    """Rows give their pages up, and prompts come in pieces and from the prefix cache."""
    EVERY_FAMILY[name](tmp_path, 0)
    plain = six_without(load(tmp_path), kv_pages=600)
    checked = CheckedDrafts(monkeypatch, texts_of(plain, PROMPTS))
    bench = Bench(load(tmp_path), speculation="ngram", prefill_chunk_tokens=16, **_FEW_PAGES)
    submit_six(bench)
    run_watched(bench)
    bench.close()
    assert_same(bench, plain)
    assert checked.count > 60 and checked.wrong == []
    counters = bench.engine.roster.counters
    drafts = bench.drafts
    assert counters.preemptions > 0 and drafts.accepted > 20


def test_codes_of_kv_have_tokens_beside_them(folders, monkeypatch):
    """All bits are equal with rows computed one by one."""
    row_by_row(monkeypatch)
    fields = {**fixed_costs(), "kv_dtype": "fp8_e4m3", "kv_pages": 600, "max_rows": 6}
    plain = six_without(load(folders[0]), **fields)
    checked = CheckedDrafts(monkeypatch, texts_of(plain, PROMPTS))
    bench = Bench(load(folders[0]), speculation="ngram", speculation_rows=12, **fields)
    submit_six(bench)
    bench.finish()
    assert_same(bench, plain, exact=True)
    assert checked.count > 60 and checked.wrong == []
    assert bench.drafts.accepted > 20


@pytest.mark.parametrize("stem", ["qwen3", *nightly("Qwen3_5")])
@pytest.mark.parametrize("host_kv_gib", [0.0, 0.01])
def test_drafts_after_a_sleep_are_those_of_the_text(stem, host_kv_gib, tmp_path, monkeypatch):
    """Whether the KV was dropped, or went to the host and back."""
    EVERY_FAMILY[stem](tmp_path, 0)
    plain = six_without(load(tmp_path), kv_pages=600)
    checked = CheckedDrafts(monkeypatch, texts_of(plain, PROMPTS))
    bench = Sleeping(load(tmp_path), speculation="ngram", host_kv_gib=host_kv_gib, kv_pages=200)
    submit_six(bench)
    for _ in range(2):
        bench.ticks(6)
        bench.sleep(mode="keep")
        assert bench.wake()
    run_watched(bench)
    assert_same(bench, plain)
    assert checked.count > 60 and checked.wrong == []


@pytest.mark.parametrize("stem", ["Qwen3_5", *nightly("qwen3", "Gemma3")])
def test_an_engine_that_is_built_again_drafts_from_new_texts_alone(stem, tmp_path, monkeypatch):
    """Whatever a fault left in the pages, such as ids that no token has."""
    EVERY_FAMILY[stem](tmp_path, 0)
    plain = six_without(load(tmp_path), kv_pages=600)
    checked = CheckedDrafts(monkeypatch, texts_of(plain, PROMPTS))
    bench = Bench(load(tmp_path), speculation="ngram", kv_pages=200)
    submit_six(bench)
    bench.ticks(9)
    fail_a_step(bench)
    no_token = 2**31 - 1
    bench.engine.executor.step.kv.tokens.fill_(no_token)
    rebuild_engine(bench.engine, bench.settings)
    tokens = bench.engine.executor.step.kv.tokens
    assert not (tokens == no_token).any(), "only steps that are timed at the start may have written to pages"
    bench.completions.clear()
    submit_six(bench)
    run_watched(bench)
    assert_same(bench, plain)
    assert checked.count > 60 and checked.wrong == []


@pytest.mark.parametrize("name", ["Qwen3-VL", *nightly("Qwen2.5-VL", "Qwen3.5")])
def test_placeholders_of_images_are_tokens_of_the_text(name, tmp_path, monkeypatch):
    """A prompt may repeat them, so they are drafted; no token changes."""
    make_model(name, tmp_path)
    prompts = {f"r{i}": prompt_with(3, picture(4, 6, i), 4, picture(4, 6, i + 1), 1, seed=i) for i in range(3)}

    def run(**fields: Any) -> Bench:
        model = load_model(ModelSettings(path=str(tmp_path), images=True), torch.device("cpu")).model
        bench = Bench(model, prefill_chunk_tokens=16, **fields)
        for i, (each, one) in enumerate(prompts.items()):
            ends_with_images = {"temperature": 1.0, "seed": i + 1, "logit_bias": ((one.ids[5], 9.0),)}
            submit_image(bench, each, one, 40, sampling=ends_with_images)
        return bench.finish()

    plain = run()
    checked = CheckedDrafts(monkeypatch, texts_of(plain, {each: one.ids for each, one in prompts.items()}))
    bench = run(speculation="ngram")
    assert_same(bench, plain)
    assert checked.count > 30 and checked.wrong == []


@pytest.mark.parametrize(
    ("name", "seed"), nightly(*((name, seed) for name in [*_IN_EVERY_RUN, *_AT_NIGHT] for seed in (1, 2)))
)
def test_whatever_happens_in_other_families(name, seed, tmp_path):
    vocab = EVERY_FAMILY[name](tmp_path, 0).config.get_text_config().vocab_size
    disturbed(seed, lambda: load(tmp_path), by_ngrams(lambda: load(tmp_path)), [], vocab)
