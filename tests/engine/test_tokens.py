"""The engine's tokens are transformers' tokens, whatever happens around them."""

import pytest
import torch

from tests.support.engine.harness import Bench
from tests.support.engine.streams import DeafDevice, LateDevice, random_delays
from tests.support.kernels.grids import nightly

SAMPLED = {"temperature": 1.0, "seed": 11}


def run_mixed(bench: Bench, prompt_of, **fields) -> dict[str, list[int]]:
    for i, length in enumerate((5, 17, 64, 130, 9)):
        bench.submit(f"r{i}", prompt_of(length, i), 40, **fields)
    bench.run()
    tokens = {f"r{i}": bench.tokens(f"r{i}") for i in range(5)}
    bench.close()
    return tokens


@pytest.mark.parametrize("chunk", [7, 1000, *nightly(64)])
@pytest.mark.parametrize("depth", [2, *nightly(1)])
def test_greedy_tokens_equal_transformers_through_chunked_prefill(model, prompt_of, greedy, chunk, depth):
    tokens = run_mixed(Bench(model, prefill_chunk_tokens=chunk, pipeline_depth=depth), prompt_of)
    for i, length in enumerate((5, 17, 64, 130, 9)):
        assert tokens[f"r{i}"] == greedy(prompt_of(length, i), 40)


def test_logprobs_are_log_softmax_of_transformers_logits(model, prompt_of, hf_models):
    bench = Bench(model)
    prompt = prompt_of(21)
    bench.complete("a", prompt, 50, sampling={"temperature": 0.7, "seed": 3})
    done = bench.completions["a", 0]
    with torch.inference_mode():
        logits = hf_models[0](torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
    ids = torch.tensor(done.token_ids)[:, None]
    for mine, theirs in ((done.logprobs, logits / 0.7), (done.raw_logprobs, logits)):
        expected = theirs.log_softmax(-1).gather(1, ids)[:, 0]
        assert torch.allclose(torch.tensor(mine), expected, atol=1e-4)


def test_depth_one_and_two_sample_the_same_tokens(model, prompt_of):
    runs = [run_mixed(Bench(model, pipeline_depth=depth), prompt_of, sampling=SAMPLED) for depth in (1, 2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("seed", range(3))
def test_streams_that_are_late_change_no_token(model, prompt_of, seed):
    plain = run_mixed(Bench(model), prompt_of, sampling=SAMPLED)
    assert run_mixed(Bench(model, random_delays(seed)), prompt_of, sampling=SAMPLED) == plain


def assert_broken(bench: Bench, plain, prompt_of) -> None:
    """It gives other tokens than `plain`, or a fault."""
    try:
        broken = run_mixed(bench, prompt_of, sampling=SAMPLED)
    except Exception as error:
        assert not isinstance(error, TimeoutError)
    else:
        assert broken != plain
    bench.close(check=False)


@pytest.mark.parametrize(
    ("deaf", "late"),
    [("compute", "h2d"), ("d2h", "compute")],
    ids=["compute does not wait for the upload", "d2h does not wait for compute"],
)
def test_a_forgotten_event_is_seen(model, prompt_of, deaf, late):
    """The check above can fail: without one wait, late streams give other tokens, or a fault."""
    plain = run_mixed(Bench(model), prompt_of, sampling=SAMPLED)
    bench = Bench(model, DeafDevice(deaf, late))
    assert_broken(bench, plain, prompt_of)


def test_a_slot_that_is_reused_too_early_is_seen(model, prompt_of):
    """With one slot for both steps, an upload overwrites what a late compute stream has not read."""
    plain = run_mixed(Bench(model), prompt_of, sampling=SAMPLED)
    bench = Bench(model, LateDevice({"compute": lambda: 0.003}))
    free = bench.engine.pipeline.free_slots
    free[1] = free[0]
    assert_broken(bench, plain, prompt_of)


def test_neighbours_do_not_change_a_rows_draws(model, prompt_of):
    alone = Bench(model)
    alone.complete("a", prompt_of(12), 60, sampling=SAMPLED)
    crowd = Bench(model, max_rows=5)
    for i in range(9):
        crowd.submit(f"x{i}", prompt_of(5 + 3 * i, 50 + i), 7 + 5 * i, sampling={"temperature": 1.3, "seed": i})
    crowd.complete("a", prompt_of(12), 60, sampling=SAMPLED, priority=1)
    assert crowd.tokens("a") == alone.tokens("a")
    alone.close(), crowd.close()


def test_completions_of_a_group_differ_and_are_reproducible(model, prompt_of):
    runs = []
    for _ in range(2):
        bench = Bench(model)
        bench.complete("g", prompt_of(10), 30, n=6, sampling=SAMPLED)
        runs.append([bench.tokens("g", i) for i in range(6)])
        assert len({bench.completions["g", i].seed for i in range(6)}) == 6
        bench.close()
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 6


@pytest.mark.parametrize("cut", [1, 15, 39])
def test_continuing_a_partial_completion_gives_the_undisturbed_tokens(model, prompt_of, cut):
    import numpy as np

    from rollout.engine.messages.requests import Prior

    bench = Bench(model)
    bench.complete("whole", prompt_of(19), 40, sampling=SAMPLED)
    whole = bench.completions["whole", 0]
    prior = Prior(np.array(whole.token_ids[:cut], dtype=np.int32))
    bench.complete("rest", prompt_of(19), 40, sampling={**SAMPLED, "seed": whole.seed}, prior=prior)
    assert bench.tokens("rest") == whole.token_ids[cut:]
    assert bench.completions["rest", 0].seed == whole.seed
