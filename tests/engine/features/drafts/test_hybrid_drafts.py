"""Models with linear attention draft like others: states follow the accepted drafts, whatever happens to them."""

import functools

import pytest
import torch

from rollout.engine.build import rebuild_engine
from tests.engine.features.drafts.test_speculation import RULES, SAMPLED, assert_same, recorded, submit_six
from tests.engine.test_invariants import run_watched
from tests.support.engine.constraints import Cycle
from tests.support.engine.conversation import Conversation
from tests.support.engine.drafting import drafting
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench, load
from tests.support.engine.harness import prompt_of as any_prompt
from tests.support.engine.sleeping import Sleeping
from tests.support.kernels.grids import nightly

VOCAB = 83
prompt_of = functools.partial(any_prompt, vocab=VOCAB)


@pytest.fixture
def model(hybrid):
    return load(hybrid()[0])


def submit_all(bench: Bench) -> None:
    """Groups, all kinds of sampling, stops, tops, a constraint, and prompts of one token and of two."""
    for i, sampling in enumerate(RULES):
        bench.submit(f"rules{i}", prompt_of(5 + 3 * i, i), 18 + i, sampling=sampling, n=1 + i % 2)
    stop = {"token_ids": (31, 32), "min_tokens": 6}
    bench.submit("stops", prompt_of(9, 20), 60, sampling=SAMPLED, stop=stop, n=3)
    bench.submit("tops", prompt_of(6, 21), 15, sampling=SAMPLED, logprobs=3, stream_every=2)
    bench.submit("short", prompt_of(1, 22), 20, sampling=SAMPLED, n=2)
    bench.submit("two", prompt_of(2, 22), 2, sampling=SAMPLED)
    bench.submit("cycle", prompt_of(8, 23), 12, sampling=SAMPLED, constraint=Cycle([[1, 5, 9], [2, 3, 40], [7, 8]]))


@pytest.fixture(scope="module")
def plain(hybrid):
    """What `submit_all` gives without drafts, by family."""
    known: dict[str, Bench] = {}

    def run(stem: str) -> Bench:
        if stem not in known:
            bench = known[stem] = Bench(load(hybrid(stem)[0]))
            submit_all(bench)
            bench.finish()
        return known[stem]

    return run


@pytest.mark.parametrize(
    ("stem", "wrong", "ragged", "depth"),
    [
        ("Qwen3Next", 0.3, True, 2),
        *nightly(
            ("Qwen3_5", 0.0, False, 2),
            ("OlmoHybrid", 0.2, False, 2),
            ("Qwen3_5", 1.0, False, 1),
            *(
                (stem, wrong, ragged, depth)
                for stem in ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "OlmoHybrid")
                for wrong, ragged, depth in ((0.0, False, 1), (1.0, True, 2), (0.3, True, 1), (0.1, True, 2))
            ),
        ),
    ],
)
def test_any_drafts_give_the_same_completions(hybrid, plain, stem, wrong, ragged, depth):
    fields = {"speculation_tokens": 3 if ragged else 5, "pipeline_depth": depth}
    without = plain(stem)
    bench, _ = drafting(load(hybrid(stem)[0]), recorded(without.completions), wrong, depth, ragged, **fields)
    submit_all(bench)
    run_watched(bench)
    assert_same(bench, without)
    drafts = bench.drafts
    assert drafts.drafted > 50
    assert drafts.accepted == 0 if wrong == 1.0 else drafts.accepted > 20


def test_states_have_seen_the_tokens_of_their_rows_after_every_step(model):
    """The state of a row after some steps with drafts is that of a row with as many tokens, computed at once."""
    plain = Bench(model, prefix_cache=False)
    plain.complete("a", prompt_of(9), 40, sampling=SAMPLED)
    bench, _ = drafting(model, recorded(plain.completions), 0.4, pipeline_depth=1, ragged=True)
    bench.submit("a", prompt_of(9), 40, sampling=SAMPLED)
    states, checked = bench.engine.executor.step.kv.states, 0
    while ("a", 0) not in bench.completions or bench.engine.busy:
        bench.engine.tick()
        rows = bench.engine.roster.decoding
        if not rows or rows[0].inflight_refs:
            continue
        seq, checked = rows[0], checked + 1
        tokens = [*prompt_of(9), *seq.tokens][: seq.kv.length]
        alone = Bench(model, prefix_cache=False)
        alone.complete("a", tokens, 1)  # one prefill, and no step after it
        row = alone.engine.roster.free_rows[-1]  # the last that was freed
        for mine, theirs in zip(states.tensors, alone.engine.executor.step.kv.states.tensors, strict=True):
            torch.testing.assert_close(mine[seq.row], theirs[row], rtol=1e-4, atol=1e-5)
        alone.close()
    assert checked > 9 and bench.drafts.accepted > 9
    assert bench.tokens("a") == plain.tokens("a")


# --- sessions ---


@pytest.mark.parametrize("depth", [2, *nightly(1)])
def test_turns_of_a_session_go_on_after_drafts(hybrid, model, depth):
    """Also after a stop amid accepted drafts, where the state has seen tokens that are none of the completion's."""
    limits = {"stop": {"token_ids": (31, 40, 7, 55)}, "sampling": SAMPLED}
    plain = Conversation(Bench(model, prefix_cache=False), "s", prompt_of, session=False)
    said = [plain.say(new, 24, **limits) for new in (11, 5, 3, 4, 9, 2)]
    reasons = [plain.bench.completions[f"s{turn}", 0].finish.reason for turn in range(1, 7)]
    assert "stop" in reasons
    answers = {(f"s{turn}", 0): [*tokens, 1, 2, 3] for turn, tokens in enumerate(said, 1)}
    for wrong in (0.0, 0.4, 1.0):
        fields = {"pipeline_depth": depth, "speculation_tokens": 4}
        bench, _ = drafting(model, answers, wrong, **fields)
        talk = Conversation(bench, "s", prompt_of)
        assert [talk.say(new, 24, **limits) for new in (11, 5, 3, 4, 9, 2)] == said
        for turn in range(1, 7):
            ours, theirs = (which.completions[f"s{turn}", 0] for which in (bench, plain.bench))
            assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)
        hits = bench.status().prefix_hits
        assert hits["turn_end"] > 0 and hits["turn_end"] + hits["prompt_end"] == 5
        bench.engine.roster.check_integrity()
        bench.close()


# --- pages run short, weights change, requests end, the device sleeps or fails ---


@pytest.fixture(scope="module")
def six(hybrid) -> Bench:
    bench = Bench(load(hybrid()[0]), kv_pages=600)
    submit_six(bench)
    return bench.finish()


@pytest.mark.parametrize("on_host", [True, False])
def test_rows_sleep_between_verify_steps(model, six, on_host):
    host_gib = 16 * model.spec.state_bytes(torch.float32) / 2**30 if on_host else 0.0
    bench, _ = drafting(model, recorded(six.completions), 0.3, bench=Sleeping, host_kv_gib=host_gib, kv_pages=600)
    submit_six(bench)
    for _ in range(2):
        bench.ticks(9)
        assert bench.sleep().facts["parked"] == (6 if on_host else 0)
        bench.wake()
    bench.finish()
    assert bench.drafts.accepted > 20
    assert_same(bench, six)


def test_an_engine_that_is_built_again_drafts_on(model, six):
    bench, _ = drafting(model, recorded(six.completions), 0.3, kv_pages=600)
    submit_six(bench)
    bench.ticks(9)
    fail_a_step(bench)
    for state in bench.engine.executor.step.kv.states.tensors:
        state.fill_(float("nan"))
    rebuild_engine(bench.engine, bench.settings)
    bench.completions.clear()
    submit_six(bench)
    bench.finish()
    assert bench.drafts.accepted > 20
    assert_same(bench, six)


# --- everything at once ---
