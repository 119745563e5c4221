"""The table of transformers' architectures: what it says of each of them is what a worker does."""

from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout.models.fallback.model import TransformersModel
from scripts.check.architectures import Result, of_architectures, read_results, run, try_one

VERSION, RESULTS = read_results()
of_this_release = pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"made with transformers {VERSION}")


def test_nothing_is_served_wrongly_and_85_percent_of_the_decoder_only_architectures_are_served() -> None:
    best = of_architectures(RESULTS)
    assert len(best) > 100 and not [result for result in RESULTS if result.served == "wrong"]
    assert sum(result.served in ("native", "fallback") for result in best) >= 0.85 * len(best)
    assert all(result.detail for result in RESULTS if result.served in ("fallback", "refused", "not tried"))


def told(result: Result) -> Result:
    """Without the reason of a refusal, in which there may be roundings."""
    return result._replace(detail=result.detail if result.served == "fallback" else "")


@of_this_release
def test_the_table_has_every_causal_lm() -> None:
    assert {result.model_type for result in RESULTS} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@of_this_release
@pytest.mark.parametrize("model_type", ["bloom", "mamba2", "olmo2", "rwkv", "bert"])
def test_a_line_of_the_table_is_so(model_type: str) -> None:
    assert told(try_one(model_type)) == next(told(result) for result in RESULTS if result.model_type == model_type)


def test_a_model_with_other_logits_than_transformers_is_found(monkeypatch: Any) -> None:
    right = TransformersModel.compute_logits
    # After the check at the start, which compares prompts of other lengths.
    monkeypatch.setattr("rollout.models.fallback.start.check_start", lambda model: None)
    monkeypatch.setattr(TransformersModel, "compute_logits", lambda self, hidden: right(self, hidden.flip(-1)))
    assert try_one("gpt_neox").served == "wrong"


@of_this_release
@pytest.mark.nightly
def test_the_whole_table_is_so() -> None:
    assert list(map(told, run([result.model_type for result in RESULTS]))) == list(map(told, RESULTS))
