"""Sleep and wake on a GPU: the driver has the memory meanwhile, graphs replay at the same addresses, all or nothing."""

import gc
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.engine.device.cuda_pages import CudaPages
from rollout.engine.device.releasable import ReleasableMemory
from rollout.engine.device.streams import make_device
from rollout.engine.messages.to_service import Done, Failed
from rollout.models.fused import FusedDecoder
from rollout.weights.kept_memory import StagedMemory
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.staging import WeightStaging
from tests.support.engine.cuda_harness import FUSED_SIZES, assert_steady, load_bf16
from tests.support.engine.harness import load
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.updates import Mailbox, Update
from trainer_bridge.wire.manifest import pack

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MIB = 1 << 20
#: KV of about a GiB in four tensors.
LARGE = {"page_size": 64, "kv_pages": 43_000}
SAMPLED = {"temperature": 1.0, "seed": 11}


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def bench_of(model, receiver=None, **engine) -> Sleeping:
    return Sleeping(model, make_device("cuda"), receiver, **engine)


def some_tokens(bench: Sleeping, prompt_of, name: str) -> list[list[int]]:
    """Of requests that run by themselves, with and without changed logits: captured steps of both kinds."""
    for i, sampling in enumerate(({"temperature": 0.0}, SAMPLED, {**SAMPLED, "top_k": 7})):
        bench.submit(f"{name}{i}", prompt_of(9 + i, i), 40, sampling=sampling)
    bench.run()
    return [bench.tokens(f"{name}{i}") for i in range(3)]


@pytest.fixture(scope="module")
def fused(tmp_path_factory) -> Path:
    """A checkpoint of sizes that the fused kernels take."""
    torch.manual_seed(3)
    config = Qwen3Config(vocab_size=1031, tie_word_embeddings=False, **FUSED_SIZES)
    folder = tmp_path_factory.mktemp("fused")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("level", [1, 2])
def test_the_driver_has_weights_and_kv_while_it_sleeps(folders, level):
    gc.collect()
    bench = bench_of(load(folders[0], "cuda"), Mailbox(), **LARGE)
    memory = bench.sleeper.memory
    assert memory.nbytes > 0.9e9
    torch.cuda.empty_cache()
    for _ in range(3):
        before = free_bytes()
        slept = bench.sleep(level)
        asleep = free_bytes()
        assert isinstance(slept, Done) and asleep - before >= 0.95 * memory.nbytes
        assert abs(slept.facts["bytes"] - (asleep - before)) < 64 * MIB
        assert isinstance(bench.wake(), Done)
        assert abs(free_bytes() - before) < 64 * MIB


def test_memory_is_the_drivers_once_nothing_lies_in_it(folders):
    gc.collect()
    torch.cuda.empty_cache()
    before = free_bytes()
    bench = bench_of(load(folders[0], "cuda"), **LARGE)
    there = free_bytes()
    assert before - there > 0.9e9
    bench.close()
    del bench
    gc.collect()
    torch.cuda.empty_cache()
    assert free_bytes() - there > 0.9e9


@pytest.mark.parametrize("in_bf16", [True, False], ids=["bf16", "float32"])
def test_captured_steps_replay_at_the_same_addresses(folders, fused, prompt_of, in_bf16, monkeypatch):
    bench = bench_of(load_bf16(fused) if in_bf16 else load(folders[0], "cuda"))
    assert isinstance(bench.engine.executor.step.forward, FusedDecoder) == in_bf16
    graphs, kv = bench.engine.executor.graphs, bench.engine.executor.step.kv
    places = [tensor.data_ptr() for tensor in (*kv.tensors, *bench.engine.executor.step.model.parameters())]
    before = some_tokens(bench, prompt_of, "before")
    for i in range(2):
        assert isinstance(bench.sleep(), Done)
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").fill_(255)  # another tensor takes the memory
        assert isinstance(bench.wake(), Done)
        assert bench.engine.executor.graphs is graphs and bench.engine.executor.captures
        now = [tensor.data_ptr() for tensor in (*kv.tensors, *bench.engine.executor.step.model.parameters())]
        assert now == places and not any(cache.any() for cache in kv.tensors)
        assert some_tokens(bench, prompt_of, f"after{i}") == before
    bench.submit("steady", prompt_of(12), 300)
    assert_steady(bench, monkeypatch)


@pytest.mark.parametrize("host_kv_gib", [0.0, 0.001])
def test_rows_that_slept_have_the_tokens_of_rows_that_did_not(folders, prompt_of, host_kv_gib):
    tokens = []
    for sleeps in (False, True):
        bench = bench_of(load(folders[0], "cuda"), host_kv_gib=host_kv_gib)
        for i in range(5):
            bench.submit(f"r{i}", prompt_of(9 + 7 * i, i), 60, sampling=SAMPLED)
        bench.ticks(25)
        if sleeps:
            assert isinstance(bench.sleep(), Done) and bench.engine.roster.running == 0
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").fill_(255)  # another tensor takes the memory
            assert bench.wake().facts["parked"] == (5 if host_kv_gib else 0)
        bench.run()
        recomputed = [bool(bench.completions[f"r{i}", 0].recomputed) for i in range(5)]
        assert recomputed == [sleeps and not host_kv_gib] * 5
        tokens.append([bench.tokens(f"r{i}") for i in range(5)])
        bench.close()
    assert tokens[0] == tokens[1]


def test_after_level_2_a_whole_update_cures_it(folders, prompt_of):
    mailbox = Mailbox()
    bench = bench_of(load(folders[0], "cuda"), mailbox)
    model = bench.engine.executor.step.model
    bench.sleep(2)
    bench.wake()
    assert not any(parameter.any() for parameter in model.parameters())
    bench.submit("waits", prompt_of(9), 20)
    bench.ticks(5)
    assert bench.status().state == "stale" and not bench.tokens("waits")
    mailbox.ready = Update(1, load(folders[1], "cuda"), model)
    bench.run()
    other = bench_of(load(folders[1], "cuda"))
    other.complete("same", prompt_of(9), 20)
    assert bench.tokens("waits") == other.tokens("same")
    bench.close(), other.close()


@pytest.mark.parametrize("looks", [True, False])
def test_a_wake_without_enough_memory_leaves_everything_asleep(folders, prompt_of, monkeypatch, looks):
    """It looks first; and where that says there is room (others may be quicker), the driver refuses at some block."""
    gc.collect()
    bench = bench_of(load(folders[0], "cuda"), **LARGE)
    before = some_tokens(bench, prompt_of, "before")
    bench.sleep()
    torch.cuda.empty_cache()
    other = torch.empty(free_bytes() - 600 * MIB, dtype=torch.uint8, device="cuda")
    asleep = free_bytes()
    if not looks:
        monkeypatch.setattr(CudaPages, "free_bytes", lambda self: 1 << 60)
    for _ in range(2):
        answer = bench.wake()
        assert isinstance(answer, Failed) and answer.code == "unavailable"
        assert ("0.00 GiB are missing" in answer.message) != looks
        assert abs(free_bytes() - asleep) < 32 * MIB and bench.engine.gate.asleep
    monkeypatch.undo()
    del other
    assert isinstance(bench.wake(), Done)
    assert some_tokens(bench, prompt_of, "after") == before


def test_kept_memory_returns_whole_and_a_shadow_goes_on():
    device = make_device("cuda")
    memory = ReleasableMemory(device, CudaPages(device.torch_device))
    weights = [torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in (100 * MIB, 7, 90 * MIB, 1 << 20)]
    values = [weight.clone() for weight in weights]
    memory.take_over(weights, kept=True)
    views = {"x": torch.empty(2 * MIB, device="cuda", dtype=torch.bfloat16)}
    staging = WeightStaging(StagedMemory(views, "device", memory.buffer))
    manifest = pack(1, [("x", "bfloat16", [2 * MIB])], MIB)
    host = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8).pin_memory()
    for _ in range(2):
        assert all(torch.equal(weight, value) for weight, value in zip(weights, values, strict=True))
        staging.open(manifest, ManifestFit(("x",), ()))
        staging.take(0, host)
        staging.abandon()
        assert torch.equal(staging.memory.blocks[0].cpu(), host)
        memory.save()
        memory.release()
        memory.restore()
        assert not staging.memory.blocks[0].any()
