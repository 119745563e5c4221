"""Damage in a running engine is seen by what the tests of all families compare (`test_every_family.py`)."""

import pytest
import torch

from tests.support.engine.harness import Bench, load
from tests.support.engine.replay import agrees
from tests.support.models.families import FAMILIES, make_checkpoint


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    hf_model = make_checkpoint(request.param, folder)
    return load(folder), hf_model


@pytest.mark.parametrize("damage", ["rope", "page", "kv"])
def test_damage_in_a_running_engine_is_seen(family, damage):
    """What they compare is sharp enough to see one wrong position, one wrong page, one lost page of KV."""
    model, hf_model = family
    prompt = torch.randint(0, model.spec.vocab, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    bench = Bench(model)
    bench.submit("a", prompt, 60)
    hooks = [model.ropes[0].register_forward_pre_hook(lambda _, given: (given[0] * 2,))] if damage == "rope" else []
    bench.ticks(6)
    seq = bench.engine.roster.groups["c", "a"].sequences[0]
    executor = bench.engine.executor
    if damage == "page":
        executor.compute.run(lambda: executor.step.rows.pages[seq.row, 6].fill_(seq.kv.pages[0]))
    if damage == "kv":
        executor.compute.run(lambda: executor.step.kv.v[0][seq.kv.pages[7]].mul_(-3.0))
    bench.run()
    for hook in hooks:
        hook.remove()
    assert not agrees(hf_model, prompt, bench.completions["a", 0])
