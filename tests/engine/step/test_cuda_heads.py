"""A draft model on a GPU: captured, without a wait, and it changes no bit of what deterministic steps draw."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from rollout.config import ModelSettings
from rollout.engine.device.streams import make_device
from rollout.engine.step.head_drafts import HeadGraphs
from rollout.engine.step.row_state import LENGTH, SEED
from rollout.models import load_model
from tests.engine.step.test_cuda_verify import SIZES, all_of, submit
from tests.support.engine.cuda_harness import load_bf16, make_fused_checkpoint, tick_without_waiting, watch_compilation
from tests.support.engine.drafting import replayed_guesses, watch_guesses
from tests.support.engine.harness import Bench, prompt_of
from tests.support.models.draft_heads import head_config, random_head, save_head

pytestmark = pytest.mark.gpu
HEADS = {**SIZES, "speculation": "heads", "speculation_model": "a folder"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("heads")
    target = make_fused_checkpoint(base / "target")
    sizes = {"intermediate_size": 512, "head_dim": 64, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config = head_config(AutoConfig.from_pretrained(target), 2000, **sizes)
    return target, save_head(base / "head", config, random_head(config))


def load_drafted(folders):
    settings = ModelSettings(path=str(folders[0]), dtype="bfloat16")
    return load_model(settings, torch.device("cuda"), draft=folders[1]).model


def run(bench: Bench) -> Bench:
    submit(bench)
    bench.run()
    bench.close()
    return bench


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("wrong", [None, 0.3])
def test_deterministic_completions_are_equal_bit_for_bit(folders, monkeypatch, kv_dtype, wrong):
    fields = {"deterministic": True, "fused_experts": True, "kv_dtype": kv_dtype}
    plain = run(Bench(load_bf16(folders[0]), make_device("cuda"), **SIZES, **fields))
    if wrong is not None:  # guesses that are replayed by the host cannot be captured
        replayed_guesses(monkeypatch, {done.seed: done.token_ids for done in plain.completions.values()}, wrong)
        monkeypatch.setattr(HeadGraphs, "guess_size", lambda *_: None)
    bench = run(Bench(load_drafted(folders), make_device("cuda"), **HEADS, **fields))
    assert all_of(bench) == all_of(plain)
    counters = bench.engine.roster.counters
    assert counters.drafted > 300 and (wrong is None or counters.accepted > 100)


def test_its_steps_are_captured_and_wait_for_nothing(folders, monkeypatch):
    bench = Bench(load_drafted(folders), make_device("cuda"), **HEADS)
    headers, execute = [], bench.engine.executor.execute
    bench.engine.executor.execute = lambda upload, slot: (headers.append(upload.header), execute(upload, slot))
    compiled = watch_compilation(monkeypatch)
    for i in range(8):
        bench.submit(f"r{i}", prompt_of(100, i), 200, sampling={"temperature": 1.0, "seed": i})
    for _ in range(20):
        bench.engine.tick()
    headers.clear()
    reserved = torch.cuda.memory_reserved()
    tick_without_waiting(bench)
    assert torch.cuda.memory_reserved() == reserved
    assert all((header.size, header.drafts, header.guesses) == (32, 3, 3) for header in headers[:100])
    bench.submit("other", prompt_of(333, 9), 50, sampling={"temperature": 1.0, "seed": 3, "top_k": 5})
    bench.run()
    bench.close()
    assert compiled == []


def test_captured_guesses_are_those_of_eager_steps(folders, monkeypatch):
    """Up to rounding: these products have another number of rows."""
    found = []
    for graphs in (True, False):
        bench = Bench(load_drafted(folders), make_device("cuda"), **HEADS, cuda_graphs=graphs)
        with monkeypatch.context() as patch:
            seen = watch_guesses(patch)
            for i in range(5):
                bench.submit(f"r{i}", prompt_of(60 + 7 * i, i), 60, sampling={"temperature": 0.7 * i, "seed": i})
            bench.run()
        bench.close()
        tokens = {done.seed: done.token_ids for done in bench.completions.values()}
        found.append({(ints[SEED], ints[LENGTH], tuple(tokens[ints[SEED]])): guesses for ints, _, guesses in seen})
    both = found[0].keys() & found[1].keys()
    equal = sum(found[0][key][0] == found[1][key][0] for key in both)
    assert len(both) > 50 and equal > 0.9 * len(both), (len(both), equal)
