"""How far a trainer's log-probs are from the worker's: the estimator, what counts, and how it reaches the report."""

import json
import math
import threading

import numpy as np
import pytest

from rollout.metrics.logprob_mismatch import MismatchBox, MismatchSums, compare, compare_by_version
from rollout.metrics.meter import Meter

NAN = math.nan


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_equal_rows_have_none_and_a_shift_the_known_one():
    draw = np.random.default_rng(3)
    worker = -draw.exponential(2.0, 4096).astype(np.float32)
    assert compare(worker, worker) == MismatchSums(4096)
    for shift in (0.1, -0.1, 1.5):
        found = compare(worker, worker + np.float32(shift))
        assert found.k3_kl == pytest.approx(math.exp(shift) - 1 - shift, rel=1e-3)
        assert found.mean_abs == pytest.approx(abs(shift), rel=1e-4) and found.max_abs == pytest.approx(
            abs(shift), rel=1e-3
        )


def test_k3_is_the_divergence_on_average_over_what_the_worker_draws():
    draw = np.random.default_rng(5)
    worker, trainer = (np.log(draw.dirichlet(np.ones(12))) for _ in range(2))
    tokens = draw.choice(12, size=400_000, p=np.exp(worker) / np.exp(worker).sum())
    found = compare(worker[tokens].astype(np.float32), trainer[tokens].astype(np.float32))
    exact = float((np.exp(worker) * (worker - trainer)).sum())
    assert found.k3_kl == pytest.approx(exact, rel=0.05) and exact > 0.1


def test_small_differences_keep_their_digits():
    found = compare(row(-1.0), row(-1.0 + 2**-12))
    assert found.k3_kl == pytest.approx(2**-25, rel=1e-3), "exp(d) - 1 - d would have lost them"


def test_only_tokens_that_both_know_count():
    found = compare(row(-1.0, NAN, -2.0, -math.inf), row(-1.5, -1.0, NAN, -1.0))
    assert found == MismatchSums(1, pytest.approx(math.exp(-0.5) - 0.5), 0.5, 0.5)
    assert compare(row(NAN), row(-1.0)) == compare(row(), row()) == MismatchSums()


def test_a_hopeless_token_stays_finite_and_its_true_size_shows():
    found = compare(row(-2000.0), row(-0.5))
    assert found.k3_kl == pytest.approx(math.exp(20) - 21) and found.max_abs == 1999.5
    down = compare(row(-0.5), row(-2000.0))
    assert down.k3_kl == pytest.approx(1998.5) and math.isfinite(down.k3_kl)


def test_versions_have_their_own_tokens_and_add_up():
    worker, trainer = row(*[-1.0] * 6), row(-1, -1, -1.5, -1.5, -1, NAN)
    parts = compare_by_version(worker, trainer, [(3, 2), (4, 2), (3, 2)])
    assert {version: (part.tokens, part.mean_abs) for version, part in parts.items()} == {3: (3, 0.0), 4: (2, 0.5)}
    assert sum(parts.values(), MismatchSums()) == compare(worker, trainer)


def test_a_report_has_the_interval_and_keeps_it_until_there_is_another():
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    meter = Meter(Clock())
    assert not [name for name in meter.report() if name.startswith("mismatch/")]
    meter.mismatch(MismatchSums(10, 1.0, 2.0, 0.5))
    meter.mismatch(MismatchSums(30, 1.0, 2.0, 0.25))
    for _ in range(2):
        report = meter.report()
        shown = {name: value for name, value in report.items() if name.startswith("mismatch/")}
        assert shown == {
            "mismatch/k3_kl": 0.05, "mismatch/mean_abs": 0.1, "mismatch/max_abs": 0.5, "mismatch/tokens": 40,
        }  # fmt: skip
        json.dumps(shown, allow_nan=False)
    meter.mismatch(MismatchSums(40, 0.0, 0.0, 0.0))
    report, totals = meter.report(), meter.totals()
    assert (report["mismatch/k3_kl"], report["mismatch/max_abs"], report["mismatch/tokens"]) == (0.0, 0.0, 80)
    assert (totals["mismatch/k3_kl"], totals["mismatch/max_abs"]) == (2.0 / 80, 0.5)


def test_nothing_is_lost_between_two_threads():
    box, taken, done = MismatchBox(), [], threading.Event()

    def take() -> None:
        while not done.is_set():
            taken.append(box.take())

    thread = threading.Thread(target=take)
    thread.start()
    for _ in range(20_000):
        box.add(MismatchSums(1, 1.0, 1.0, 1.0))
    done.set()
    thread.join()
    assert sum([*taken, box.take()], MismatchSums()).tokens == 20_000
    assert box.take() == MismatchSums()
