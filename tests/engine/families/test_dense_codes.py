"""Dense weights as codes beside adapters, drafts and KV on the host: as with the weights that the codes stand for.

Log-probs are equal up to the order of sums, which depends on the rows of a step.
"""

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.models.coded import CodedView
from scripts.check.weight_formats import decode_into
from tests.support.engine.adapted import bench_of, make_adapters
from tests.support.engine.drafting import drafting, fixed_costs
from tests.support.engine.harness import Bench, load, prompt_of
from tests.support.engine.offloading import counts, offloading, submit_six

FORMATS = ["fp8_row", "fp8_block"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_dtype": "bf16"}, "weight_dtype = fp8_block"),
        ({"weight_dtype": "fp8_block", "deterministic": True}, "depend on its step"),
        ({"weight_dtype": "fp8_block"}, "Hopper"),
    ],
)
def test_activations_become_codes_only_where_kernels_multiply_them(changes, reason, folders):
    settings = ModelSettings(path=str(folders[0]), dtype="float32")
    format = "plain" if changes["weight_dtype"] == "bf16" else changes["weight_dtype"]
    model = load_model(settings, torch.device("cpu"), weights=format).model
    with pytest.raises(ValueError, match=reason):
        Bench(model, fp8_activations_from=64, **changes)


@pytest.fixture(scope="module", params=FORMATS)
def pair(request, folders):
    """A model with codes, its settings, and a plain model with the weights of these codes."""
    settings = ModelSettings(path=str(folders[0]), dtype="float32")
    coded = load_model(settings, torch.device("cpu"), weights=request.param).model
    assert isinstance(coded.hf_views()["model.layers.0.mlp.up_proj.weight"], CodedView)
    return coded, {"weight_dtype": request.param}, decode_into(load(folders[0]), coded)


def result(bench: Bench) -> dict:
    """Tokens and log-probs of every completion."""
    bench.finish()
    return {key: (done.token_ids, done.raw_logprobs) for key, done in bench.completions.items()}


def assert_same(mine: dict, theirs: dict) -> None:
    assert mine.keys() == theirs.keys()
    for key, (tokens, logprobs) in mine.items():
        assert tokens == theirs[key][0]
        assert logprobs == pytest.approx(theirs[key][1], abs=1e-4)


def submit(bench: Bench, adapted: int = 0) -> None:
    for i in range(4):
        adapter = f"a{i}" if i < adapted else None
        sampling = {"temperature": 1.0, "seed": i}
        bench.submit(f"r{i}", prompt_of(5 + 7 * i, i), 24, sampling=sampling, n=1 + i % 2, adapter=adapter)


def test_adapters_are_added_to_products_of_codes(pair, hf_models, folders, tmp_path_factory):
    coded, engine, decoded = pair
    adapters = make_adapters(hf_models[0], folders[0], tmp_path_factory)
    results = []
    for model, settings in ((coded, engine), (decoded, {})):
        bench = bench_of(model, adapters, count=3, **settings)
        submit(bench, adapted=3)
        results.append(result(bench))
    assert_same(*results)
    bare = Bench(coded, **engine)
    submit(bare)
    without = result(bare)
    assert {key[0] for key in without if without[key][0] != results[0][key][0]} == {"r0", "r1", "r2"}


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_drafts_are_verified_by_codes(wrong, pair):
    coded, engine, decoded = pair
    plain = Bench(decoded)
    submit(plain)
    result(plain)
    answers = {key: done.token_ids for key, done in plain.completions.items()}
    results, drafted = [], []
    for model, settings in ((coded, engine), (decoded, {})):
        bench, _ = drafting(model, answers, wrong, **fixed_costs(), **settings)
        submit(bench)
        results.append(result(bench))
        drafted.append(bench.drafts.accepted)
    assert_same(*results)
    assert drafted[0] == drafted[1] > 0


def test_rows_of_codes_come_back_from_the_host(pair):
    coded, engine, decoded = pair
    results = []
    for model, settings in ((coded, engine), (decoded, {})):
        bench = offloading(model, prefill_chunk_tokens=512, **settings)
        submit_six(bench, prompt_of)
        results.append(result(bench))
        assert counts(bench).restored > 0
    assert_same(*results)
