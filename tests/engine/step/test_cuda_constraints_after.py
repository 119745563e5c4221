"""On a GPU, rows take captured steps where no mask is needed, and have the bits of rows with masks."""

import numpy as np
import pytest

from rollout.constraints.marker import AfterMarker, IdMarker
from rollout.constraints.matcher import ANYTHING
from rollout.constraints.thoughts import BudgetedConstraint, ThoughtRule
from rollout.engine.device.streams import make_device
from rollout.engine.upload import RowNeeds
from tests.support.engine.constraints import SIZE, AlwaysMasked, AlwaysMaskedBudget, Cycle, X, Y
from tests.support.engine.cuda_harness import load_bf16, make_fused_checkpoint, watch_compilation
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import Bench, prompt_of, watch_headers

pytestmark = pytest.mark.gpu
VOCAB, MARK, STOP = 4001, 7, 5
SIZES = {"kv_pages": 900, "page_size": 16, "max_rows": 12, "prefill_chunk_tokens": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_fused_checkpoint(tmp_path_factory.mktemp("after"))


def submit(bench: Bench, always: bool) -> None:
    """Rows with a constraint after a marker, with all kinds of rules, and rows without any."""
    kind = AlwaysMasked if always else AfterMarker
    rules: list[dict] = [{}, {"top_k": 50, "top_p": 0.95}, {"frequency_penalty": 0.2, "repetition_penalty": 1.1}]
    for i in range(9):
        sampling = {"temperature": 1.0, "seed": i, "logit_bias": ((MARK, 9.0), (STOP, -9.0)), **rules[i % 3]}
        stop = {"token_ids": (STOP,), "min_tokens": 12 * (i % 2)}
        constraint = kind(Cycle([X, Y, SIZE], STOP, VOCAB), IdMarker((MARK,)))
        more = {"logprobs": 3} if i % 4 == 0 else {}
        bench.submit(
            f"after{i}", prompt_of(20 + 9 * i, i), 90, sampling=sampling, stop=stop, constraint=constraint, **more
        )
        bench.submit(f"plain{i}", prompt_of(20 + 9 * i, i), 30 + 5 * i, sampling={"temperature": 1.0, "seed": i})
    for i, budget in enumerate((0, 7, 40)):
        prompt = [*prompt_of(30, i), MARK]
        begin = ThoughtRule(budget, (MARK,), (STOP, STOP + 1)).after(np.array(prompt, np.int32), ())
        budgeted = AlwaysMaskedBudget if always else BudgetedConstraint
        sampling = {"temperature": 1.0, "seed": i, "logit_bias": ((MARK, 6.0),), **rules[i]}
        bench.submit(f"budget{i}", prompt, 90, sampling=sampling, constraint=budgeted(ANYTHING, begin))


def run(bench: Bench, always: bool) -> dict:
    submit(bench, always)
    bench.finish()
    return {
        key: (done.token_ids, done.logprobs, done.drawn_logprobs, done.top_ids, done.top_logprobs, done.finish.reason)
        for key, done in bench.completions.items()
    }


def test_free_rows_have_the_bits_of_rows_with_masks_and_nothing_is_compiled_for_them(folder, monkeypatch):
    fields = {**SIZES, "deterministic": True}
    masked = run(Bench(load_bf16(folder), make_device("cuda"), **fields), always=True)
    assert sum(MARK in tokens[:-1] for tokens, *_ in masked.values()) >= 6
    assert [masked[f"budget{i}", 0][0][budget : budget + 2] for i, budget in enumerate((0, 7, 40))] == [[5, 6]] * 3
    bench = Bench(load_bf16(folder), make_device("cuda"), **fields)
    compiled = watch_compilation(monkeypatch)
    free = run(bench, always=False)
    assert not compiled
    assert {key: outcome[:2] for key, outcome in free.items()} == {key: outcome[:2] for key, outcome in masked.items()}
    assert free == masked
    recorded = {key: outcome[0] for key, outcome in masked.items()}
    for wrong in (0.0, 0.4):
        drafts = {"speculation_tokens": 4, "speculation_rows": 24, "device": make_device("cuda")}
        drafted, _ = drafting(load_bf16(folder), recorded, wrong, **drafts, **fields)
        assert run(drafted, always=False) == masked
        assert drafted.drafts.accepted > 50


def test_free_rows_take_captured_steps_that_wait_for_no_mask(folder):
    bench = Bench(load_bf16(folder), make_device("cuda"), **SIZES)
    headers = watch_headers(bench)
    for i in range(4):
        sampling = {"temperature": 1.0, "seed": i}
        constraint = AfterMarker(Cycle([X, Y], vocab=VOCAB), IdMarker((VOCAB - 1, VOCAB - 1, VOCAB - 1)))
        bench.submit(f"r{i}", prompt_of(20, i), 100, sampling=sampling, constraint=constraint)
    bench.run()
    decodes = [header for header in headers if not header.layout]
    assert len(decodes) > 90 and all(header.size for header in decodes)
    assert not any(header.needs & RowNeeds.CONSTRAIN.value for header in headers)
    for i in range(4):
        assert len(bench.completions[f"r{i}", 0].drawn_logprobs) == 100
