"""What the rows of measured steps are like."""

import torch

from tests.support.engine.harness import Bench


def test_measured_rows_have_tokens_and_kv_of_their_own(model):
    """Or all would choose the experts of one, and steps of a mixture look cheaper than they are."""
    bench = Bench(model, speculation="auto")
    step = bench.engine.executor.step
    bench.close()
    rows = bench.settings.engine.step_rows
    assert rows > 20
    for keys_PSGD in step.kv.k:
        first_RX = keys_PSGD[1 : rows + 1, 0].flatten(1)
        assert len(torch.unique(first_RX, dim=0)) == rows
    for state in (step.rows.ints, step.rows.pages):
        assert not state.any(), "rows are as before"
