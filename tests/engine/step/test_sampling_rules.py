"""The table of the sampling rules: a default changes nothing, and a new entry reaches the torch twin by itself."""

import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_kernels import SamplingRows, sample

from rollout.engine.messages.requests import Request, SamplingParams
from rollout.engine.sequence.sequence import needs_of
from rollout.engine.upload import RowNeeds
from rollout.service.requests.schema import parse_request
from trainer_bridge.client.generate_request import plan_request
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.sampling_rules import RULES, SamplingFields, SamplingRule

HEADER = {"v": 1, "op": "generate", "id": "a", "prompt": [1, 2, 3]}
SCRIPT = "tests.support.engine.made_up_rule"

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def rows(sampling: SamplingParams, seed: int, switched_on: bool) -> SamplingRows:
    """One row that draws; with `switched_on`, a step whose other rows need every rule."""
    more = {}
    if switched_on:
        more = {f"{rule.name}_S": torch.tensor([rule.row_value(sampling)]) for rule in RULES}
        more["counts_SV"] = torch.arange(40, dtype=torch.int32)[None] % 3
    settled = {"temperature_S": torch.ones(1), "noise_S": torch.ones(1)}
    return SamplingRows(**{**settled, **more}, seed_S=torch.tensor([seed]), index_S=torch.tensor([5]))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), scale=st.sampled_from([0.01, 1.0, 12.0]))
def test_the_default_of_every_rule_changes_neither_token_nor_log_probs(seed, scale):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed % 2**31)) * scale
    plain = sample(logits, rows(SamplingParams(), seed, switched_on=False))
    defaults = sample(logits, rows(SamplingParams(), seed, switched_on=True))
    for entry in fields(plain):
        assert torch.equal(getattr(plain, entry.name), getattr(defaults, entry.name)), entry.name


@each_rule
def test_a_default_that_is_sent_is_as_good_as_none(rule: SamplingRule):
    sent = parse_request(HEADER | {"sampling": {rule.name: rule.default}})
    assert sent.sampling == parse_request(HEADER).sampling
    request = Request(("c", "a"), torch.zeros(1).numpy(), 4, sampling=SamplingParams(**{rule.name: rule.default}))
    assert needs_of(request) == RowNeeds.DRAW


@each_rule
def test_a_value_out_of_range_is_refused_by_its_name(rule: SamplingRule):
    step = 1 if rule.kind is int else 1e-6
    wrong = [rule.least - step, rule.most + step, "1", None, True, [rule.default]]
    wrong += [rule.least] if rule.above_least else []
    wrong += [0.5] if rule.kind is int else [float("nan"), float("inf")]
    for value in wrong:
        with pytest.raises(RolloutError) as refused:
            parse_request(HEADER | {"sampling": {rule.name: value}})
        assert (refused.value.code, refused.value.field) == ("bad_request", f"sampling.{rule.name}"), value
    for value in [rule.most] if rule.above_least else [rule.least, rule.most]:
        assert parse_request(HEADER | {"sampling": {rule.name: value}}).sampling.rules[rule.name] == value


@each_rule
def test_the_client_knows_the_rule_and_its_type(rule: SamplingRule):
    assert plan_request([1], {rule.name: rule.default}).fields["sampling"] == {rule.name: rule.default}
    with pytest.raises(TypeError, match=rf"\b{rule.name}\b"):  # the error suggests it
        plan_request([1], {rule.name + "x": rule.default})


def test_type_checkers_see_exactly_the_rules_of_the_table():
    seen = {name: kind.__forward_arg__ for name, kind in SamplingFields.__annotations__.items()}
    assert seen == {rule.name: rule.kind.__name__ for rule in RULES}


def test_a_made_up_rule_goes_from_the_client_to_the_torch_twin_by_its_entry_alone(folders):
    """In a process of its own, which adds the entry before anything is made from the table."""
    command = [sys.executable, "-m", SCRIPT, str(folders[0])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["header", "schema", "gateway", "row", "twin"]
