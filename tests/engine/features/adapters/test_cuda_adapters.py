"""Adapters on a GPU: PEFT's merged models, in captured steps and without, and neither a wait nor a compilation."""

import pytest
import torch

from rollout.engine.device.streams import make_device
from rollout.engine.messages.to_engine import PutAdapter
from rollout.models.peft_tensors import AdapterPacker, load_peft_folder
from scripts.bench.random_adapter import random_adapter
from tests.support.engine.cuda_harness import load_bf16, make_fused_checkpoint, no_waiting, watch_compilation
from tests.support.engine.harness import Bench, load
from tests.support.models.families import make_checkpoint
from tests.support.peft_adapters import make_adapter, merged

pytestmark = pytest.mark.gpu


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("captured", [True, False])
def test_rows_are_what_peft_merges(tmp_path, captured):
    reference = make_checkpoint("qwen3", tmp_path / "base")
    model = load(tmp_path / "base", "cuda")
    bench = Bench(model, make_device("cuda"), cuda_graph_rows=256 * captured, adapter_slots=3, adapter_rank=16)
    references = [reference]
    for i in range(3):
        folder = make_adapter(reference, tmp_path / str(i), i)
        bench.engine.inbox.put(
            PutAdapter(f"a{i}", load_peft_folder(folder, model.spec, 16, torch.float32, AdapterPacker(pinned=True)))
        )
        references.append(merged(reference, folder))
    for i in range(8):
        bench.submit(f"r{i}", prompt(5 + 9 * i, i), 40, adapter=f"a{i % 4 - 1}" if i % 4 else None)
    bench.run()
    for i in range(8):
        got, ids = bench.tokens(f"r{i}"), prompt(5 + 9 * i, i)
        with torch.no_grad():
            logits = references[i % 4](torch.tensor([ids + got])).logits[0, len(ids) - 1 : -1]
        took = logits[torch.arange(len(got)), torch.tensor(got)]
        assert (logits.max(-1).values - took).max() < 5e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that the fused kernels run."""
    return make_fused_checkpoint(tmp_path_factory.mktemp("adapted"))


def test_nothing_is_compiled_while_serving(folder, monkeypatch):
    model = load_bf16(folder)
    bench = Bench(model, make_device("cuda"), kv_pages=600, max_rows=8, adapter_slots=2, adapter_rank=16)
    for i in range(3):
        bench.engine.inbox.put(PutAdapter(f"a{i}", random_adapter(model.spec, 16, torch.bfloat16, i, 0.05)))
    compiled = watch_compilation(monkeypatch)
    for i in range(8):
        bench.submit(f"r{i}", prompt(3 + 17 * i, i), 60, adapter=f"a{i % 3}" if i % 4 else None)
    bench.run()
    assert compiled == []


def test_steps_with_adapters_never_wait_for_the_device(folder):
    model = load_bf16(folder)
    bench = Bench(model, make_device("cuda"), kv_pages=600, max_rows=4, adapter_slots=2, adapter_rank=16)
    for i in range(2):
        bench.engine.inbox.put(PutAdapter(f"a{i}", random_adapter(model.spec, 16, torch.bfloat16, i, 0.05)))
    for i in range(4):
        bench.submit(f"r{i}", prompt(20, i), 400, adapter=f"a{i % 2}")
    bench.ticks(200)
    with no_waiting():
        bench.ticks(60)
    bench.run()
